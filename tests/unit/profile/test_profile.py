"""Tables, kept variants and selections of a network that is a table itself: what is found has to be what was put in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mvcompile.bundle.interference import INTERFERENCE_VERSION, CoreProfile, Interference, check_interference
from mvcompile.errors import BundleError
from mvcompile.profile.network import LEAST_ROUNDS, Bench, sample
from mvcompile.profile.report import describe
from mvcompile.profile.selections import by_table, refine
from mvcompile.profile.stage import keep, restrict, task_latency
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.types import Dials, Level

LEVELS = (Level("none", Dials()), Level("write", Dials(write_bytes_per_s=1e9)))
# Per level, step, variant: the first step's variant 1 is slower alone and faster beside a writer, the last has no choice.
LATENCY = (((1.0, 1.2), (0.5, 0.6), (0.1,)), ((3.0, 1.5), (0.7, 0.6), (0.1,)))


class FakeNetwork:
    """Steps that take what the table says, with noise; time passes on a clock of its own."""

    def __init__(self, latency: Any = LATENCY, noise: float = 0.01, coupling: float = 0.0) -> None:
        self.latency, self.noise, self.coupling = latency, noise, coupling
        self.level, self.now, self.selected = 0, 0.0, [0] * len(latency[0])
        self.rng = random.Random(0)
        self.set_to: list[Dials] = []

    @property
    def variants(self) -> Mapping[str, Sequence[Any]]:
        return {f"layer {i}": range(len(row)) for i, row in enumerate(self.latency[0])}

    def select_all(self, selection: Sequence[int]) -> None:
        self.selected = list(selection)

    def run_profiled(self, inputs: Mapping[str, Any]) -> tuple[float, ...]:
        rows = self.latency[self.level]
        seconds = [row[v] * self.rng.gauss(1.0, self.noise) for row, v in zip(rows, self.selected, strict=True)]
        if self.selected[0]:
            seconds[-1] += self.coupling  # what a variant does to the layers after it
        self.now += sum(seconds)
        return tuple(seconds)

    def set(self, dials: Dials) -> None:
        self.set_to.append(dials)
        self.level = next(index for index, level in enumerate(LEVELS) if level.dials == dials)

    @dataclass(frozen=True)
    class _Taken:
        dials: Dials

    def achieved(self) -> _Taken:
        return self._Taken(LEVELS[self.level].dials)


def bench_of(network: FakeNetwork) -> Bench:
    return Bench(network, {}, network, LEVELS, clock=lambda: network.now, settle_s=0.0)


def test_the_table_is_what_the_network_does_at_each_level() -> None:
    network = FakeNetwork()
    samples = sample(bench_of(network), budget_s=0.0, seed=1)
    latency, spread = samples.tables()
    assert samples.rounds == LEAST_ROUNDS
    for level in range(2):
        for step, row in enumerate(LATENCY[level]):
            assert latency[level][step] == pytest.approx(row, rel=0.02)
    assert max(value for rows in spread for row in rows for value in row) < 0.05
    assert samples.taken() == (Dials(), LEVELS[1].dials)
    assert samples.drift() < 0.02
    assert network.set_to[-1] == Dials()  # the neighbour is quiet afterwards


def test_a_budget_buys_rounds_and_is_kept() -> None:
    network = FakeNetwork()
    shares: list[float] = []
    samples = sample(bench_of(network), budget_s=100.0, seed=1, report=shares.append)
    assert samples.rounds > LEAST_ROUNDS
    assert network.now <= 110.0
    assert shares == sorted(shares)


def test_a_drift_is_seen() -> None:
    network = FakeNetwork(noise=0.0)
    bench = bench_of(network)
    samples = sample(bench, budget_s=0.0, seed=1)
    samples.seconds[0] = [
        tuple(v * (1 + 0.1 * i / len(samples.seconds[0])) for v in run) for i, run in enumerate(samples.seconds[0])
    ]
    assert samples.drift() > 0.05


def test_each_level_gets_its_own_selection() -> None:
    network = FakeNetwork()
    bench = bench_of(network)
    latency, spread = sample(bench, budget_s=0.0, seed=1).tables()
    kept = [(0, 1), (0, 1), (0,)]
    vectors = by_table(latency, spread, kept, LEAST_ROUNDS)
    assert vectors == [(0, 0, 0), (1, 1, 0)]
    found = refine(bench, latency, [0, 1, 2], kept, vectors, budget_s=50.0)
    assert [each.variants for each in found] == vectors
    assert found[1].fastest_alone_s == pytest.approx(3.8, rel=0.05)
    assert found[1].latency_s == pytest.approx(2.2, rel=0.05)


def test_a_whole_run_overrules_the_table() -> None:
    """Variant 1 of the first layer is faster beside a writer, but what it does to the caches costs the last one more."""
    network = FakeNetwork(coupling=3.0)
    found = refine(bench_of(network), LATENCY, [0, 1, 2], [(0, 1), (0, 1), (0,)], [(0, 0, 0), (1, 0, 0)], budget_s=60.0)
    assert found[1].variants[0] == 0


def test_what_whole_runs_cannot_see_is_left_to_the_table() -> None:
    """The first layer's gain of 4 % is less than 1 % of a run, and a run spreads by more."""
    latency = (((0.10, 0.096), (0.5, 0.6), (0.6,)),) * 2
    network = FakeNetwork(latency, noise=0.04)
    found = refine(bench_of(network), latency, [0, 1, 2], [(0, 1), (0, 1), (0,)], [(1, 0, 0), (1, 0, 0)], budget_s=60.0)
    assert [each.variants for each in found] == [(1, 0, 0)] * 2


def profile_of(latency: Any) -> CoreProfile:
    spread = tuple(tuple(tuple(0.01 for _ in row) for row in rows) for rows in latency)
    network = FakeNetwork(latency)
    kept = [tuple(range(len(row))) for row in latency[0]]
    vectors = by_table(latency, spread, kept, 5)
    selections = refine(bench_of(network), latency, [0, 0, 1], kept, vectors, budget_s=10.0)
    return CoreProfile(1, latency, spread, selections, (0, 1), 0.0, (1.0, 1.0), (2, 1))


def interference_of(latency: Any) -> Interference:
    taken = tuple(level.dials for level in LEVELS)
    return Interference(INTERFERENCE_VERSION, "measured: a fake", "Example CPU", LEVELS, taken, (profile_of(latency),), ())


def test_kept_variants_are_those_some_level_needs() -> None:
    manifest = tiny_manifest()  # steps: dense, dense, relu
    assert keep(manifest, [LATENCY], None) == ((0, 1), (0,))
    assert keep(manifest, [LATENCY], 1) == ((0,), (0,))
    np.testing.assert_allclose(task_latency(manifest, LATENCY, 0), [[1.5, 1.8], [3.7, 2.1]])


def test_a_restricted_profile_says_what_was_lost() -> None:
    manifest = tiny_manifest()
    both = interference_of(LATENCY)
    check_interference(both, manifest)
    assert both.profiles[0].selections[1].variants == (1, 1, 0)
    dense, relu = manifest.tasks
    smaller = replace(manifest, tasks=(replace(dense, variants=dense.variants[1:]), relu))
    only = restrict(both_selected_one(both), manifest, ((1,), (0,)))
    check_interference(only, smaller)
    assert only.profiles[0].latency_s == (((1.2,), (0.6,), (0.1,)), ((1.5,), (0.6,), (0.1,)))
    assert only.profiles[0].regret == pytest.approx((1.8 / 1.5, 1.0))
    assert only.profiles[0].compared == (2, 1)


def both_selected_one(found: Interference) -> Interference:
    profile = found.profiles[0]
    return replace(
        found, profiles=(replace(profile, selections=tuple(replace(s, variants=(1, 1, 0)) for s in profile.selections)),)
    )


def test_a_profile_that_does_not_fit_its_bundle_is_refused() -> None:
    manifest = tiny_manifest()
    good = interference_of(LATENCY)
    with pytest.raises(BundleError, match=r"interference.json.levels"):
        check_interference(replace(good, levels=LEVELS[::-1]), manifest)
    with pytest.raises(BundleError, match=r"latency_s\[0\]\[0\] is 1 entries, expected 2"):
        check_interference(
            replace(good, profiles=(replace(good.profiles[0], latency_s=(((1.0,), (1.0,), (1.0,)),) * 2),)), manifest
        )
    with pytest.raises(BundleError, match=r"selections\[0\].variants\[2\] is 1, expected 0 to 0"):
        check_interference(both_wrong(good), manifest)


def both_wrong(found: Interference) -> Interference:
    profile = found.profiles[0]
    return replace(
        found, profiles=(replace(profile, selections=tuple(replace(s, variants=(0, 0, 1)) for s in profile.selections)),)
    )


def test_the_report_names_levels_tasks_and_regrets() -> None:
    text = describe(interference_of(LATENCY), tiny_manifest())
    assert "write" in text
    assert "dense" in text
    assert "1.000" in text
