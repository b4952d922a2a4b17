"""Monitors whose models come from a host profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import PERF, RESCTRL, CounterModel, write_host_profile
from mvcompile.runtime import Auto, Perf, ResctrlMonitor, Session, load, monitors
from mvcompile.runtime.counters import Counts
from mvcompile.testing.hosts import counter_model_of, host_profile_of
from mvcompile.testing.kernels import tiny_inputs, write_kernel_bundle
from mvcompile.testing.profiles import interference_of


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled") / "profiled.mvb"
    write_kernel_bundle(path, scales=(1.0, 2.0), interference=lambda manifest: interference_of(manifest, cores=(1, 2)))
    return path


@pytest.fixture
def host(tmp_path: Path, profiled: Path) -> Callable[..., Path]:
    """Writes a host profile with models of the given kinds."""
    with load(profiled, share_cores=True) as session:
        digest = next(one.sha256 for one in session.manifest.members if one.name == "kernels.so")

    def write(*models: CounterModel, cpu: str | None = None, **changes: Any) -> Path:
        path = tmp_path / "host.json"
        write_host_profile(path, host_profile_of(models or (counter_model_of(kernels_sha256=digest, **changes),), cpu=cpu))
        return path

    return write


class Misses:
    """Hardware counters of as many misses per second as `level` says."""

    level = 0

    def __init__(self, cores: object) -> None:
        self.seconds = self.misses = 0.0

    def read(self) -> Counts:
        self.seconds += 1.0
        self.misses += Misses.level
        return Counts(self.seconds, 1.0, 1.0, 1.0, self.misses)

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("read", [Perf.read, Auto.read])
def test_a_session_follows_the_model(
    read: Any, profiled: Path, host: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "PerfCounters", Misses)
    monkeypatch.setattr(Misses, "level", 0)
    with load(profiled, policy="adaptive", monitor=read(host()), share_cores=True) as session:
        assert session.stats().monitor == "perf"
        monkeypatch.setattr(Misses, "level", 3)
        run_until(session, "write")
        assert session.stats().level == "write"


def run_until(session: Session, level: str) -> None:
    for _ in range(100_000):
        session.run(tiny_inputs(1))
        if session.stats().level == level:
            return


def test_where_counters_cannot_be_read_auto_does_without(
    profiled: Path, host: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(cores: object) -> None:
        raise EnvironmentProblem("none here")

    monkeypatch.setattr(monitors, "PerfCounters", none)
    with load(profiled, policy="adaptive", monitor=Auto.read(host()), share_cores=True) as session:
        assert session.stats().monitor == "residual"
        with pytest.raises(EnvironmentProblem, match="none here"):
            session.adapt("adaptive", Perf.read(host()))


def test_models_of_another_machine_are_refused(host: Callable[..., Path]) -> None:
    path = host(cpu="another CPU")
    for read in (Perf.read, ResctrlMonitor.read, Auto.read):
        with pytest.raises(
            UsageError, match=r"host.json was measured on another CPU, this host has .*`mvcompile calibrate --bundle"
        ):
            read(path)


def test_a_kind_that_is_not_there_is_refused_with_the_reason(host: Callable[..., Path], tmp_path: Path) -> None:
    path = host()
    with pytest.raises(
        UsageError, match=r"no model of resctrl counters \(resctrl is not mounted at .*`mvcompile calibrate --bundle"
    ):
        ResctrlMonitor.read(path)
    path = host(counter_model_of(RESCTRL))
    with pytest.raises(UsageError, match=r"no model of perf counters \(llc_misses: none\)"):
        Perf.read(path)
    assert Auto.read(path).model == ResctrlMonitor.read(path).model
    write_host_profile(path, host_profile_of())
    assert Auto.read(path) == Auto()
    with pytest.raises(UsageError, match=r"nowhere cannot be read"):
        Auto.read(tmp_path / "nowhere")


def test_models_of_another_bundle_its_levels_or_cores_are_refused(
    profiled: Path, host: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, two_cores: list[int]
) -> None:
    monkeypatch.setattr(monitors, "PerfCounters", Misses)
    with load(profiled, share_cores=True) as session:
        for monitor, message in (
            (
                Perf.read(host(counter_model_of(PERF))),
                rf"other kernels, those of 'tiny', than {profiled} has: fit one with .*{profiled}",
            ),
            (
                Perf.read(host(levels=("none", "half"))),
                r"knows the levels none, half, the bundle has none, llc, read, write: fit",
            ),
            (Perf.read(host(cores=3)), r"was fitted on 3 core\(s\), this session has 1"),
        ):
            with pytest.raises(UsageError, match=message):
                session.adapt("adaptive", monitor)
    if len(two_cores) == 2:
        with load(profiled, cores=two_cores, share_cores=True) as session, pytest.raises(UsageError, match="this session has 2"):
            session.adapt("adaptive", Perf.read(host()))


def test_a_model_that_was_made_by_hand_serves_any_bundle(profiled: Path, host: Callable[..., Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(monitors, "PerfCounters", Misses)
    model = replace(Perf.read(host(counter_model_of(PERF))).model, fitted=None)
    with load(profiled, policy="adaptive", monitor=Perf(model), share_cores=True) as session:
        assert session.stats().monitor == "perf"
