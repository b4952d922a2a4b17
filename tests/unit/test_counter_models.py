"""Models of counters, fitted beside a neighbour that is not there to counters that nobody has."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile import counter_models as stage
from mvcompile.bundle.interference import Interference
from mvcompile.calibrate import Clockwork, calibrate
from mvcompile.counter_models import KINDS, LEAST_ROUNDS, MOST_ROUNDS, Kind, Stand, fit_counters, sample, subject_of
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import PERF, RESCTRL, read_host_profile, write_host_profile
from mvcompile.runtime import Auto, Perf, ResctrlMonitor, counters, resctrl
from mvcompile.runtime.host import cpu_model
from mvcompile.testing.kernels import write_kernel_bundle
from mvcompile.testing.machines import TARGET, Machine
from mvcompile.testing.profiles import LEVELS, interference_of
from mvcompile.types import Dials

CORE = min(os.sched_getaffinity(0))
MIB = 2**20


class Beside:
    """A neighbour: knows what it was last set to."""

    def __init__(self) -> None:
        self.set_to: list[Dials] = [Dials()]

    def set(self, dials: Dials) -> None:
        self.set_to.append(dials)

    @property
    def traffic(self) -> tuple[float, float, float]:
        dials = self.set_to[-1]
        return float(dials.resident_bytes > 0), float(dials.read_bytes_per_s > 0), float(dials.write_bytes_per_s > 0)


class Counting:
    """Counters of both kinds, which go on by a second with each reading; `blind` ones show nothing but noise."""

    def __init__(self, kind: str, traffic: Any, *, blind: bool = False, readings: int = 10**9) -> None:
        self.kind, self.traffic, self.blind, self.readings = kind, traffic, blind, readings
        self.chance = random.Random(0)
        self.sums = [0.0] * 5
        self.closed = False

    def read(self) -> Any:
        self.readings -= 1
        if self.readings < 0:
            raise EnvironmentProblem("they are gone")
        cache, reads, writes = (0.0, 0.0, 0.0) if self.blind else self.traffic()
        rates = (1e9, 2e9 - 5e8 * cache, 1e7 + 5e6 * writes, 1e6 + 4e6 * reads + 2e6 * cache)
        noisy = [rate * self.chance.gauss(1.0, 0.02) for rate in rates]
        self.sums = [total + value for total, value in zip(self.sums, (1.0, *noisy), strict=True)]
        if self.kind == PERF:
            return counters.Counts(*self.sums)
        return resctrl.Traffic(self.sums[0], 1e6 * (1 + cache) * self.chance.gauss(1, 0.02), self.sums[4], self.sums[3])

    def close(self) -> None:
        self.closed = True


class Runs:
    """A network of two layers that takes 30 ms, and a clock that runs with it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.selected: list[tuple[int, ...]] = []

    def run(self, inputs: Mapping[str, Any]) -> None:
        self.now += 0.03

    def select_all(self, selection: Sequence[int]) -> None:
        self.selected.append(tuple(selection))


def stand_of(neighbour: Beside, network: Runs, **sources: Counting) -> Stand:
    kinds = {kind.name: kind for kind in KINDS}
    opened = {name: (kinds[name], source) for name, source in sources.items()}
    return Stand(network, {}, neighbour, opened, LEVELS, ((0, 0), (1, 0)), clock=lambda: network.now, sleep=lambda seconds: None)


def test_windows_take_turns_in_rounds() -> None:
    neighbour, network = Beside(), Runs()
    windows = sample(stand_of(neighbour, network, perf=Counting(PERF, lambda: neighbour.traffic)), budget_s=0.0)
    assert len(windows) == LEAST_ROUNDS * len(LEVELS) * 2
    for number in range(LEAST_ROUNDS):
        here = [one.level for one in windows if one.round == number]
        assert sorted(here) == [0, 0, 1, 1, 2, 2, 3, 3]
    orders = {tuple(one.level for one in windows if one.round == number) for number in range(LEAST_ROUNDS)}
    assert len(orders) > 1
    assert neighbour.set_to[-1] == Dials()
    assert set(network.selected) == {(0, 0), (1, 0)}
    assert network.now == pytest.approx(len(windows) * 0.15)  # one run for the caches and four for the window
    longer = sample(stand_of(neighbour, Runs(), perf=Counting(PERF, lambda: neighbour.traffic)), budget_s=1e6)
    assert {one.round for one in longer} == set(range(MOST_ROUNDS))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run to a window."""
    monkeypatch.setattr(stage, "WINDOW_S", 0.0)
    monkeypatch.setattr(stage, "SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled") / "profiled.mvb"
    write_kernel_bundle(path, interference=interference)
    return path


def interference(manifest: Any, **changes: Any) -> Interference:
    """Levels that a small machine can have."""
    small = tuple(
        replace(level, dials=replace(level.dials, resident_bytes=min(level.dials.resident_bytes, 2 * MIB))) for level in LEVELS
    )
    return replace(interference_of(manifest, **changes), levels=small, achieved=tuple(level.dials for level in small))


def fake_kinds(machine: Machine, **sources: dict[str, Any]) -> tuple[Kind, ...]:
    """Counters that see what the last load of `machine` that was started does: the neighbour."""

    def traffic() -> tuple[float, float, float]:
        work = machine.loads[-1].work
        return float(work.resident_bytes > 0), float(work.read_rate != 0), float(work.write_rate != 0)

    def missing(core: int) -> Any:
        raise EnvironmentProblem("there are none here")

    return tuple(
        replace(kind, open=(lambda core, kind=kind: Counting(kind.name, traffic, **sources[kind.name])))
        if kind.name in sources
        else replace(kind, open=missing)
        for kind in KINDS
    )


def fit(machine: Machine, path: Path, **sources: dict[str, Any]) -> Any:
    subject = subject_of(path, cpu_model())
    return fit_counters(subject, CORE, CORE + 1, 32 * MIB, 0.0, kinds=fake_kinds(machine, **sources), start=machine.start)


@pytest.mark.usefixtures("quick")
def test_a_model_of_each_kind_that_can_be_read(profiled: Path) -> None:
    machine = Machine()
    (perf, seen), notes = fit(machine, profiled, perf={}, resctrl={})
    assert (perf.kind, seen.kind, notes) == (PERF, RESCTRL, ())
    assert (perf.bundle, perf.cores, perf.levels) == ("tiny", 1, ("none", "llc", "read", "write"))
    assert perf.windows == LEAST_ROUNDS * 4 * 2
    assert min(perf.right) > 0.9
    assert min(seen.right) > 0.9
    assert machine.loads[-1].stopped


@pytest.mark.usefixtures("quick")
def test_what_a_model_is_worth_is_said(profiled: Path) -> None:
    (perf,), notes = fit(Machine(), profiled, perf={"blind": True})
    assert sum(perf.right) / 4 < 0.6
    assert notes == ()


@pytest.mark.usefixtures("quick")
def test_counters_that_fail_meanwhile_are_left_out(profiled: Path) -> None:
    (seen,), notes = fit(Machine(), profiled, perf={"readings": 25}, resctrl={})
    assert seen.kind == RESCTRL
    assert notes == ("there is no model of perf counters: they are gone",)
    models, notes = fit(Machine(), profiled, perf={"readings": 25})
    assert (models, len(notes)) == ((), 1)


def test_counters_of_this_machine_give_features_or_a_reason() -> None:
    for kind in KINDS:
        try:
            source = kind.open(CORE)
        except EnvironmentProblem:
            continue
        before = source.read()
        assert len(kind.between(before, source.read())) == len(kind.features)
        source.close()


def test_without_counters_there_is_a_note(profiled: Path) -> None:
    machine = Machine()
    models, notes = fit(machine, profiled)
    assert (models, machine.loads) == ((), [])
    assert notes == ("no counters can be read here, so there is no model of them for tiny; the residual monitor needs none",)
    models, (note,) = fit_counters(subject_of(profiled, cpu_model()), CORE, None, 32 * MIB, 0.0)
    assert models == ()
    assert "a neighbour needs a core of its own" in note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"has no profile, so there are no levels to find by counters: run `mvcompile profile .*other.mvb` on this host"),
        ({"source": "estimated: invented"}, r"has no measured profile of 1 core: run `mvcompile profile"),
        ({"cores": (2,)}, r"has no measured profile of 1 core"),
        ({"cpu": "another"}, r"was profiled on another, this host has .*: run `mvcompile profile"),
    ],
)
def test_a_bundle_without_a_profile_of_this_host_is_refused_before_anything_is_measured(
    change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.mvb"
    write_kernel_bundle(path, interference=None if change is None else lambda manifest: interference(manifest, **change))
    machine = Machine()
    with pytest.raises(UsageError, match=message):
        calibrate(replace(TARGET, cpu_model=cpu_model()), 30.0, bundle=path, clockwork=Clockwork(machine.start, machine.sleep))
    assert machine.loads == []


@pytest.mark.usefixtures("quick")
def test_calibrate_keeps_the_models_and_monitors_read_them(profiled: Path, tmp_path: Path) -> None:
    machine = Machine()
    clockwork = Clockwork(machine.start, machine.sleep, lambda core: (0.0, 1.0), kinds=fake_kinds(machine, perf={}, resctrl={}))
    target = replace(TARGET, cpu_model=cpu_model())
    stages: list[str] = []
    found = calibrate(target, 10.0, cores=(CORE, CORE + 1), bundle=profiled, stage=stages.append, clockwork=clockwork)
    assert stages[-1] == "counters"
    path = tmp_path / "host.json"
    write_host_profile(path, found)
    assert read_host_profile(path) == found
    for monitor, model in zip((Perf.read(path), ResctrlMonitor.read(path)), found.counter_models, strict=True):
        linear = monitor.model
        assert (linear.features, linear.coefficients, linear.points) == (model.features, model.coefficients, model.points)
        assert linear.fitted is not None
        assert linear.fitted.kernels_sha256 == model.kernels_sha256
    assert Auto.read(path).model == Perf.read(path).model
