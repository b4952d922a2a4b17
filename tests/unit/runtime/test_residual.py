"""The residual monitor on times drawn from a profile: what it must find, and what must not deceive it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mvcompile.bundle.interference import CoreProfile
from mvcompile.errors import UsageError
from mvcompile.runtime.residual import Belief, Expectation, Residual, believe, evidence, expectation, told_apart
from mvcompile.testing.profiles import Array, profile_of_times, random_times

OPTIONS = Residual()
LAYERS = 30
Clock = Callable[[int], float]


def steady(batch: int) -> float:
    return 1.0


def drifting(batch: int) -> float:
    """10 % slower and back, in 400 batches."""
    return 1.05 + 0.05 * float(np.sin(batch / 400 * 2 * np.pi))


@dataclass
class Machine:
    """Draws what a model's steps take. The profile is off by some percent for good, runs scatter, one step in a hundred takes
    three times as long as it should."""

    profile: CoreProfile
    times: Array
    random: np.random.Generator
    scatter: float = 0.03
    outliers: float = 0.01

    def __post_init__(self) -> None:
        self.off = np.exp(0.02 * self.random.standard_normal((LAYERS, 1)))

    def runs(self, count: int, level: int, variants: tuple[int, ...], clock: float = 1.0) -> Array:
        alone = (self.times[level] * self.off)[np.arange(LAYERS), list(variants)] * clock
        scatter = self.scatter * self.random.standard_normal((count, LAYERS)) + 0.01 * self.random.standard_normal((count, 1))
        rows: Array = alone * np.exp(scatter) * np.where(self.random.random((count, LAYERS)) < self.outliers, 3.0, 1.0)
        return rows


def machine(seed: int, weaker: float = 1.0) -> Machine:
    times = random_times(seed, LAYERS)
    times = times[:1] * (1 + (times / times[:1] - 1) * weaker)
    return Machine(profile_of_times(times), times, np.random.default_rng(seed))


class Watcher:
    """The monitor as a session uses it: it switches to the selection of the level that it believes in."""

    def __init__(self, profile: CoreProfile, *, switches: bool = True) -> None:
        self.profile = profile
        self.switches = switches
        self.belief = Belief()
        self.expected: dict[tuple[int, ...], Expectation] = {}

    @property
    def variants(self) -> tuple[int, ...]:
        return self.profile.selections[self.level if self.switches else 0].variants

    @property
    def level(self) -> int:
        return tuple(dict.fromkeys(self.profile.group))[self.belief.group]

    def see(self, rows: Array) -> Belief:
        if self.variants not in self.expected:
            self.expected[self.variants] = expectation(self.profile, self.variants, OPTIONS)
        self.belief = believe(self.belief, self.expected[self.variants], rows, OPTIONS)
        return self.belief


@pytest.mark.parametrize("clock", [steady, drifting])
@pytest.mark.parametrize(("runs", "batches"), [(1, 3), (6, 2)])
@pytest.mark.parametrize("weaker", [1.0, 0.3])
def test_levels_are_found_within_three_runs_or_two_batches_and_held(runs: int, batches: int, clock: Clock, weaker: float) -> None:
    found = machine(3, weaker)
    watcher = Watcher(found.profile)
    level, since, outside, wrong = 0, 99, 0, 0
    for batch in range(600):
        if found.random.random() < 1 / 20:
            new = int(found.random.integers(4))
            level, since = new, since if new == level else 0
        watcher.see(found.runs(runs, level, watcher.variants, clock(batch)))
        since += 1
        if since >= batches:
            outside += 1
            wrong += watcher.level != level
    assert outside > 400
    assert wrong / outside < 0.05


@pytest.mark.parametrize("clock", [steady, drifting])
@pytest.mark.parametrize(("runs", "batches"), [(1, 4000), (5, 800)])
def test_no_false_alarm_in_ten_thousand_idle_runs(runs: int, batches: int, clock: Clock) -> None:
    for seed in range(3):
        found = machine(seed, 0.3)
        watcher = Watcher(found.profile)
        assert {watcher.see(found.runs(runs, 0, watcher.variants, clock(batch))).group for batch in range(batches)} == {0}


def test_a_step_that_takes_three_times_as_long_once_does_not_count() -> None:
    found = machine(1)
    found.outliers = found.scatter = 0.0
    watcher = Watcher(found.profile)
    watcher.see(found.runs(1, 0, watcher.variants))
    for step in range(LAYERS):
        row = found.runs(1, 0, watcher.variants)
        row[:, step] *= 3
        watcher.see(row)
        assert max(watcher.belief.sums, default=0.0) < OPTIONS.threshold / 2


def test_two_runs_in_a_row_are_not_enough() -> None:
    found = machine(1)
    watcher = Watcher(found.profile)
    for level in (0, 0, 3, 3, 0, 0, 3, 3, 0, 0):
        assert watcher.see(found.runs(1, level, watcher.variants)).group == 0
    assert [watcher.see(found.runs(1, 3, watcher.variants)).group for _ in range(3)] == [0, 0, 3]
    assert watcher.belief.ratio > OPTIONS.threshold


def test_a_batch_of_runs_counts_twice_if_both_of_its_halves_agree() -> None:
    found = machine(1)
    watcher = Watcher(found.profile)
    watcher.see(found.runs(6, 0, watcher.variants))
    burst = np.concatenate([found.runs(4, 3, watcher.variants), found.runs(3, 0, watcher.variants)])
    assert watcher.see(burst).group == 0
    for _ in range(3):
        watcher.see(found.runs(6, 0, watcher.variants))
    assert not watcher.belief.sums
    assert watcher.see(found.runs(6, 3, watcher.variants)).group == 0
    assert watcher.see(found.runs(1, 3, watcher.variants)).group == 3
    assert watcher.see(found.runs(2, 0, watcher.variants)).group == 3
    assert watcher.see(found.runs(1, 0, watcher.variants)).group == 0


def test_a_slower_clock_from_the_start_is_no_level() -> None:
    for factor in (0.85, 1.2):
        found = machine(2)
        watcher = Watcher(found.profile)
        for _ in range(50):
            watcher.see(found.runs(1, 0, watcher.variants, factor))
        assert watcher.level == 0
        assert watcher.belief.clock == pytest.approx(np.log(factor), abs=0.03)
        for _ in range(3):
            watcher.see(found.runs(1, 2, watcher.variants, factor))
        assert watcher.level == 2


def test_a_level_that_lasts_is_not_explained_by_a_clock_in_the_end() -> None:
    """A level that slows everything alike, by more than clocks do."""
    times = np.ones((2, LAYERS, 1)) * np.array([1e-4, 1.4e-4])[:, None, None]
    found = Machine(profile_of_times(times), times, np.random.default_rng(0))
    watcher = Watcher(found.profile)
    levels = [watcher.see(found.runs(1, level, watcher.variants)).group for level in [0] * 20 + [1] * 500]
    assert levels[:20] == [0] * 20
    assert levels[22:] == [1] * 498


def test_levels_of_a_group_are_one_and_the_first_stands_for_it() -> None:
    times = random_times(4, LAYERS)
    times[3] = times[1] * np.exp(0.04 * np.random.default_rng(0).standard_normal(times[1].shape))
    found = Machine(profile_of_times(times, group=(0, 1, 2, 1)), times, np.random.default_rng(4))
    watcher = Watcher(found.profile)
    for level, expected in ((3, 1), (1, 1), (2, 2), (3, 1), (0, 0)):
        for _ in range(4):
            watcher.see(found.runs(1, level, watcher.variants))
        assert watcher.level == expected


def test_a_level_is_found_however_much_its_times_scattered_when_they_were_measured() -> None:
    found = machine(7, 0.3)
    spread = tuple(
        tuple(tuple((0.4 if level else 0.1) for _ in row) for row in rows) for level, rows in enumerate(found.profile.spread)
    )
    watcher = Watcher(replace(found.profile, spread=spread), switches=False)
    for level in (0, 2, 0, 3):
        for _ in range(4):
            watcher.see(found.runs(5, level, watcher.variants))
        assert watcher.level == level


def test_what_can_be_told_apart() -> None:
    times = np.full((3, LAYERS, 2), 1e-4)
    times[1, : LAYERS // 2, 0] *= 1.3  # variant 1 does not feel it
    times[2] *= 1.02  # a clock
    expected = [expectation(profile_of_times(times), (variant,) * LAYERS, OPTIONS) for variant in (0, 1)]
    assert told_apart(expected[0], 0, 1, OPTIONS)
    assert told_apart(expected[0], 1, 0, OPTIONS)
    assert not told_apart(expected[1], 0, 1, OPTIONS)
    assert not told_apart(expected[0], 0, 2, OPTIONS)
    assert not told_apart(expected[0], 1, 1, OPTIONS)


def test_layers_without_times_say_nothing() -> None:
    found = machine(5)
    times = found.times.copy()
    times[1, 3] = times[2, 7] = 0.0
    profile = profile_of_times(times)
    expected = expectation(profile, (0,) * LAYERS, OPTIONS)
    assert sorted(set(range(LAYERS)) - set(expected.steps.tolist())) == [3, 7]
    seen = evidence(expected, found.runs(3, 2, (0,) * LAYERS), Belief(), OPTIONS)
    assert int(seen.likelihood.argmax()) == 2
    with pytest.raises(UsageError, match="has no times of its layers: run `mvcompile profile`"):
        expectation(profile_of_times(0 * times), (0,) * LAYERS, OPTIONS)


def test_the_median_of_runs_counts() -> None:
    found = machine(6)
    found.scatter = found.outliers = 0.0
    expected = expectation(found.profile, (0,) * LAYERS, OPTIONS)
    alone = evidence(expected, found.runs(1, 0, (0,) * LAYERS), Belief(), OPTIONS)
    for count in (3, 4):
        rows = np.concatenate([found.runs(1, 0, (0,) * LAYERS)] * count)
        rows[0] *= 50
        assert evidence(expected, rows, Belief(), OPTIONS).likelihood == pytest.approx(alone.likelihood, abs=2.0)
