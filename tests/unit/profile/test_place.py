"""Where profiles are measured, and what they take from a host profile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile import cli
from mvcompile.config import ProfileConfig
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import write_host_profile
from mvcompile.profile import command, stage
from mvcompile.profile.place import Place, place_of, read_host, unfit
from mvcompile.profile.pressure import patterns
from mvcompile.runtime.cpus import neighbour_of
from mvcompile.runtime.host import cpu_model
from mvcompile.testing.hosts import MIB, host_profile_of
from mvcompile.testing.kernels import write_kernel_bundle
from mvcompile.testing.machines import TARGET
from mvcompile.types import Dials, HostView

CORES = sorted(os.sched_getaffinity(0))


def host(measured: int = 0, neighbour: int | None = 1, cpu: str | None = None) -> HostView:
    return HostView(cpu_model() if cpu is None else cpu, measured, neighbour, 8 * MIB, 6 * MIB)


def test_without_a_host_profile_the_neighbour_is_where_calibrate_has_it() -> None:
    place = place_of(None, [0, 1, 2, 3], TARGET)
    assert place.neighbour == neighbour_of(0, [0, 1, 2, 3])
    assert place.pair == (0, place.neighbour)
    assert sorted(place.cores) == [0, 1, 2, 3]
    assert place.cores[-1] == place.neighbour
    assert (place.llc_bytes, place.cpu_model, place.chain_bytes) == (32 * MIB, "imagined", None)


def test_a_host_profile_names_cores_and_chain() -> None:
    assert place_of(host(2, 1), [0, 1, 2, 3], TARGET) == Place((2, 0, 3, 1), 1, 32 * MIB, "imagined", 6 * MIB)


def test_default_levels_are_for_the_cache_as_seen() -> None:
    assert stage.levels_of(ProfileConfig(), 32 * MIB)[1].dials == Dials(resident_bytes=16 * MIB)
    levels = stage.levels_of(ProfileConfig(host=host()), 32 * MIB)
    assert [level.name for level in levels] == ["none", "llc", "read", "write"]
    assert levels[1].dials == Dials(resident_bytes=4 * MIB)
    own = stage.levels_of(ProfileConfig(levels=levels[:2], host=host()), 32 * MIB)
    assert own == levels[:2]


def test_the_probe_follows_the_chain_of_the_host_profile() -> None:
    assert patterns(32 * MIB)[0].chase_bytes == 8 * MIB
    assert patterns(32 * MIB, 6 * MIB)[0].chase_bytes == 6 * MIB
    assert patterns(4 * MIB, 6 * MIB)[0].chase_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (host(cpu="another"), r"is of another, this host has .*: measure this host again \(`mvcompile calibrate`\)"),
        (host(neighbour=None), r"was measured with one core and knows no neighbour"),
        (host(neighbour=7), r"uses core 7, which this process may not: widen the affinity mask, or measure"),
        (host(measured=5, neighbour=7), r"uses core 5, 7, which"),
    ],
)
def test_a_host_profile_that_does_not_fit_is_refused(
    view: HostView, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = ProfileConfig(host=view)
    with pytest.raises(EnvironmentProblem, match=message):
        stage.profile(tmp_path / "none.mvb", config, None)
    found = replace(host_profile_of(cpu=view.cpu_model), measured_core=view.measured_core, neighbour_core=view.neighbour_core)
    write_host_profile(tmp_path / "host.json", found)
    with pytest.raises(UsageError, match=rf"host.json: .*{message}"):
        read_host(tmp_path / "host.json")
    assert unfit(host(), [0, 1]) is None


def test_the_commands_read_host_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    configs: list[ProfileConfig] = []

    def profiled(bundle: str, output: str, config: ProfileConfig) -> Any:
        configs.append(config)
        raise UsageError("enough")

    monkeypatch.setattr(command, "profile_bundle", profiled)
    path = tmp_path / "host.json"
    write_host_profile(path, host_profile_of())
    assert cli.main(["profile", "a.mvb", "--host", str(path), "--budget", "5s"]) == 2
    assert configs == [ProfileConfig(5.0, host=host())]
    write_host_profile(path, host_profile_of(cpu="another"))
    for arguments in (["profile", "a.mvb"], ["compile", "none.onnx", "-o", str(tmp_path / "a.mvb")]):
        assert cli.main([*arguments, "--host", str(path)]) == 2
        assert "host.json: the host profile is of another" in capsys.readouterr().err
    assert len(configs) == 1


def test_a_profile_is_measured_where_the_host_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.mvb"
    write_kernel_bundle(path)
    if len(CORES) < 2:
        with pytest.raises(EnvironmentProblem):
            stage.profile(path, ProfileConfig(budget_s=0), None)
        return
    view = HostView(cpu_model(), CORES[1], CORES[0], 2 * MIB, MIB)
    found = stage.profile(path, ProfileConfig(budget_s=0, host=view), None).interference
    assert found.cpu_model == cpu_model()  # not that of the machine that compiled the bundle
    assert found.levels[1].dials.resident_bytes == MIB
    assert found.achieved[1].resident_bytes > 0
