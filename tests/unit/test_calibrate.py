"""Calibration of machines that are not there, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mvcompile import calibrate as stage
from mvcompile import cli
from mvcompile.calibrate import Clockwork, calibrate
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import MEASURABLE, NO_EFFECT, NOISY, TOO_FEW_CORES, HostProfile, read_host_profile
from mvcompile.testing.machines import MIB, TARGET, Machine


def measure(machine: Machine, cores: tuple[int, ...] = (0, 1), stolen: float = 0.0) -> HostProfile:
    times = iter([(0.0, 0.0), (stolen * 100, 100.0)])
    clockwork = Clockwork(machine.start, machine.sleep, lambda core: next(times))
    found = calibrate(TARGET, 30.0, cores=cores, clockwork=clockwork)
    assert all(load.stopped for load in machine.loads)
    return found


def test_a_quiet_machine_is_measured() -> None:
    machine = Machine()
    found = measure(machine)
    assert found.verdict == MEASURABLE
    assert found.notes == ()
    assert (found.measured_core, found.neighbour_core, found.target_key) == (0, 1, TARGET.key)
    assert [level.name for level in found.levels] == ["L1d", "L2", "LLC", "memory"]
    assert [level.reported_bytes for level in found.levels] == [32 * 1024, MIB // 2, 32 * MIB, 0]
    llc, memory = found.levels[2:]
    assert llc.latency_s < memory.latency_s
    assert memory.read_bytes_per_s == pytest.approx(16e9)
    assert found.noise.arithmetic < 1e-6
    assert found.noise.floor < 1e-6
    effects = {effect.name: effect for effect in found.effects}
    assert effects["resident, whole"].cache_slowdown > effects["resident, quarter"].cache_slowdown
    assert effects["resident, whole"].memory_slowdown == pytest.approx(1)
    assert effects["write"].memory_slowdown == pytest.approx(1.5)
    assert effects["read, half rate"].achieved.read_bytes_per_s == pytest.approx(8e9)
    assert 25 < machine.now_s < 35


def test_a_cache_that_is_shared_with_other_tenants_is_seen_smaller() -> None:
    found = measure(Machine(shared_bytes=8 * MIB))
    llc = found.levels[2]
    assert llc.seen_bytes < llc.reported_bytes / 2
    assert 2 * TARGET.l2_bytes <= found.probe_chain_bytes <= 8 * MIB
    assert any("not like the 32 MiB that the system reports" in note for note in found.notes)


def test_a_last_level_that_is_no_faster_than_memory_is_told() -> None:
    found = measure(Machine(latencies_s=(1e-9, 4e-9, 90e-9, 90e-9)))
    assert found.levels[2].seen_bytes == 0
    assert any("cannot be told from memory" in note for note in found.notes)


def test_with_one_core_everything_else_is_measured() -> None:
    found = measure(Machine(), cores=(3,))
    assert (found.verdict, found.measured_core, found.neighbour_core, found.effects) == (TOO_FEW_CORES, 3, None, ())
    assert len(found.levels) == 4
    assert found.levels[3].write_bytes_per_s > 0
    assert any("needs one of its own" in note and "--no-profile" in note for note in found.notes)


def test_noise_is_told_with_what_still_works() -> None:
    for found in (measure(Machine(shaking=0.3)), measure(Machine(), stolen=0.2)):
        assert found.verdict == NOISY
        assert any("too noisy" in note and "--no-profile" in note for note in found.notes)
        assert found.effects


def test_a_machine_whose_cores_do_not_feel_each_other_has_no_effect() -> None:
    machine = Machine(crowding=0.0, latencies_s=(1e-9, 4e-9, 15e-9, 15e-9))
    found = measure(machine)
    assert found.verdict == NO_EFFECT
    assert any("no effect on the probe" in note for note in found.notes)


def test_counters_that_are_there_are_named_and_others_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class There:
        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    def missing(*_: object) -> None:
        raise EnvironmentProblem("there are none here")

    monkeypatch.setattr(stage, "PerfCounters", There)
    monkeypatch.setattr(stage, "Resctrl", missing)
    support = stage.counter_support(0)
    assert {"cycles", "instructions", "llc_references", "llc_misses"} == set(support.perf)
    assert (support.perf_reason, support.resctrl, support.resctrl_reason) == ("", (), "there are none here")


def test_a_budget_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 10s"):
        calibrate(TARGET, 9.0)


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(Machine())
    asked = []

    def measured(target: object, budget_s: float, *, bundle: str | None, **_: object) -> HostProfile:
        asked.append((budget_s, bundle))
        return found

    monkeypatch.setattr(stage, "calibrate", measured)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate"]) == 0
    assert "interference: measurable\nwritten to host-profile.json\n" in capsys.readouterr().out
    assert read_host_profile("host-profile.json") == found
    assert cli.main(["calibrate", "-o", "other.json", "--budget", "2m", "--bundle", "a.mvb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("other.json").read_text())
    assert asked == [(60.0, None), (120.0, "a.mvb")]
