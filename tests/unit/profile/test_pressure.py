"""The reporter on a machine that is invented: what variants take is found in spite of drift, and noise is not taken for it."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mvcompile.bundle.interference import check_interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import BundleError
from mvcompile.measure.load import Counters, Work
from mvcompile.profile.loops import Loops, One, arguments
from mvcompile.profile.pressure import (
    LEAST_PAIRS,
    LEAST_ROUNDS,
    PATTERNS,
    Chopper,
    Felt,
    drawn,
    feel,
    measure,
    patterns,
    plan,
    rows_of,
    worth_knowing,
)
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.kernels import write_kernel_bundle
from mvcompile.testing.profiles import interference_of
from mvcompile.types import Objectives

ONES: list[One] = [(0, 0), (0, 1), (1, 0)]


class Machine:
    """Runner, load and clock: the probe is slower by `takes` while a variant runs, and wanders."""

    def __init__(self, takes: dict[One, float], noise: float = 0.05, drift: float = 0.3) -> None:
        self.takes, self.noise, self.drift = takes, noise, drift
        self.now, self.work, self.done, self.started = 0.0, Work(), 0.0, 0.0
        self.one, self.running, self.begun = (-1, -1), False, 0.0
        self.chance = random.Random(0)
        self.order: list[One] = []

    def choose(self, one: One) -> None:
        assert not self.running
        self.one = one
        self.order.append(one)

    def on(self) -> None:
        self.running, self.begun = True, self.now

    def off(self) -> int:
        self.running = False
        return round((self.now - self.begun) / 1e-3)

    def apply(self, work: Work) -> None:
        self.work, self.done, self.started = work, 0.0, self.now

    def counters(self) -> Counters:
        chased = round(self.done) if self.work.chase_bytes else 0
        written = round(self.done) if self.work.write_rate else 0
        return Counters(self.now - self.started, chased_loads=chased, written_bytes=written)

    def stop(self) -> None:
        """Nothing to end."""

    def sleep(self, seconds: float) -> None:
        slower = 1 + self.takes[self.one] if self.running else 1.0
        rate = 1e9 * (1 + self.drift * math.sin(self.now)) * self.chance.gauss(1, self.noise) / slower
        self.now += seconds
        self.done += rate * seconds

    def chopper(self) -> Chopper:
        return Chopper(self, self, patterns(32 << 20), clock=lambda: self.now, sleep=self.sleep)


def test_what_variants_take_is_found_beside_drift_and_noise() -> None:
    takes = {(0, 0): 0.0, (0, 1): 0.1, (1, 0): 0.3}
    machine = Machine(takes)
    found = feel(machine.chopper(), ONES, budget_s=60.0, seed=1)
    for one, true in takes.items():
        assert found[one].pressure == pytest.approx(true, abs=4 * found[one].error)
        assert 0.001 <= found[one].error < 0.01
        assert found[one].call_s == pytest.approx(1e-3, rel=0.2)
    assert machine.now < 66.0
    rounds, _, _ = plan(len(ONES), 60.0)
    turns = [machine.order[i : i + len(ONES) * PATTERNS] for i in range(0, len(machine.order), len(ONES) * PATTERNS)]
    assert len(turns) == rounds >= LEAST_ROUNDS
    assert all(set(turn) == set(ONES) for turn in turns)


def test_a_window_in_which_the_probe_did_not_run_does_not_count() -> None:
    machine = Machine(dict.fromkeys(ONES, 0.2), noise=0.0, drift=0.0)
    sleep = machine.sleep
    stalls = iter(range(10**6))

    def stalled(seconds: float) -> None:
        if next(stalls) % 11 == 0:
            machine.now += seconds
            return
        sleep(seconds)

    chopper = replace(machine.chopper(), sleep=stalled)
    assert feel(chopper, ONES, 20.0, 0)[(0, 0)].pressure == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(("count", "budget_s"), [(0, 20.0), (5, 0.0), (5, 0.1)])
def test_too_little_time_measures_nothing(count: int, budget_s: float, tmp_path: Path) -> None:
    assert plan(count, budget_s)[2] == 0
    assert measure(tmp_path / "none.mvb", [(0, 0)] * count, (0, 1), budget_s, 0) == {}


def test_a_small_budget_goes_to_the_heaviest_tasks() -> None:
    rounds, seconds, count = plan(100, 10.0)
    assert (rounds, 0 < count < 100) == (LEAST_ROUNDS, True)
    assert seconds > 0
    assert LEAST_PAIRS >= 3
    tasks = tiny_manifest().tasks
    tasks = (replace(tasks[0], time_share=0.1), replace(tasks[0], time_share=0.9))
    assert worth_knowing(tasks, [(0, 1), (0, 1)]) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert worth_knowing(tasks, [(0, 1), (0,)]) == [(0, 0), (0, 1)]


def felt(pressure: float, error: float) -> Felt:
    return Felt(pressure, pressure, pressure, error, 1e-3)


def test_what_is_certain_stays_and_what_is_not_becomes_what_the_footprint_lets_expect() -> None:
    ones = [(0, i) for i in range(6)]
    footprint = {one: 1e6 * (1 + i) for i, one in enumerate(ones)}
    sure = {one: felt(0.02 * (1 + i) + (0.05 if i == 2 else 0.0), 0.001) for i, one in enumerate(ones)}
    values = drawn(sure, footprint)
    assert all(values[one] == pytest.approx(sure[one].pressure, abs=0.005) for one in ones)
    vague = {**sure, (0, 5): felt(-0.5, 1.0)}
    assert drawn(vague, footprint)[(0, 5)] == pytest.approx(0.13, abs=0.05)


def test_pure_noise_makes_nobody_kinder_than_another() -> None:
    chance = random.Random(1)
    ones = [(0, i) for i in range(40)]
    values = drawn({one: felt(chance.gauss(0, 0.05), 0.05) for one in ones}, {one: 1e6 * (one[1] % 5) for one in ones})
    assert max(values.values()) - min(values.values()) < 0.02
    assert min(values.values()) >= 0


def test_rows_have_a_place_for_every_variant_and_fit_the_bundle() -> None:
    manifest = tiny_manifest()
    dense, relu = manifest.tasks
    manifest = replace(manifest, tasks=(replace(dense, variants=tuple(map(with_objectives, dense.variants))), relu))
    rows = rows_of({(0, 0): felt(0.1, 0.001), (0, 1): felt(0.2, 0.001)}, manifest)
    assert rows[1] == (None,)
    assert rows[0] == (pytest.approx(0.1, abs=0.01), pytest.approx(0.2, abs=0.01))
    assert rows_of({}, manifest) == ()
    check_interference(replace(interference_of(manifest), pressure=rows), manifest)


def with_objectives(variant: object) -> object:
    return replace(variant, objectives=Objectives(1e-3, 0.0, 1e6))  # type: ignore[type-var]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "tiny.mvb"
    write_kernel_bundle(path)
    return path


def test_kernels_run_in_loops_that_can_be_switched(bundle: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with open_bundle(bundle) as opened, Loops(opened, core) as loops:
        for one in ONES:
            loops.choose(one)
            loops.on()
            assert loops.off() >= 0
        loops.choose((0, 1))
        loops.on()
        counts = 0
        while counts < 3:
            counts += loops.off()
            loops.on()
        loops.off()
    assert not loops._thread.is_alive()


def test_layers_have_their_own_weights_and_share_activations(bundle: Path) -> None:
    with open_bundle(bundle) as opened, Loops(opened, min(os.sched_getaffinity(0))) as loops:
        layers = arguments(opened.manifest, 0, loops._weights)
    assert len(layers) == 2
    first, second = ([tensor.data_ptr() for tensor in layer] for layer in layers)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, False, True]


def test_a_kernel_that_is_not_there_is_named(bundle: Path, tmp_path: Path) -> None:
    with open_bundle(bundle) as opened:
        task = opened.manifest.tasks[0]
        with Loops(opened, min(os.sched_getaffinity(0))) as loops:
            object.__setattr__(task.variants[0], "symbol", "nothing")
            with pytest.raises(BundleError, match="'nothing'"):
                loops.choose((0, 0))


def test_a_real_probe_feels_a_real_variant(bundle: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    found = measure(bundle, ONES, (cores[0], cores[-1]), 1.2, 0)
    assert set(found) == set(ONES)
    assert all(each.call_s > 0 and each.error > 0 for each in found.values())
