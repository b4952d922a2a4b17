"""Sessions that adapt: with real kernels, and a profile that was invented for them."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvcompile.errors import BundleError, IncompatibleBundleError, UsageError
from mvcompile.runtime import Auto, Decision, Manual, ProfileWarning, Session, Switch, adaptive, fixed, kind, load
from mvcompile.runtime.policy import Costs, Situation
from mvcompile.testing.kernels import tiny_inputs, tiny_reference, write_kernel_bundle
from mvcompile.testing.profiles import interference_of


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Variant 1 doubles; it is the faster one at all levels but the first. There is a profile for one core and for two."""
    path = tmp_path_factory.mktemp("profiled") / "profiled.mvb"
    write_kernel_bundle(path, scales=(1.0, 2.0), interference=lambda manifest: interference_of(manifest, cores=(1, 2)))
    return path


@pytest.fixture(scope="module")
def profiled_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled") / "plain.mvb"
    write_kernel_bundle(path, scales=(1.0, 2.0), driver=False, interference=interference_of)
    return path


@pytest.fixture(params=["native", "python"])
def session(profiled: Path, profiled_plain: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with load(profiled if request.param == "native" else profiled_plain) as session:
        yield session


def outputs_are(session: Session, scales: tuple[float, float]) -> bool:
    inputs = tiny_inputs(4)
    return np.allclose(session.run(inputs)["y"], tiny_reference(inputs, scales)["y"], rtol=1e-4, atol=1e-5)


def test_a_session_begins_with_what_was_fastest_alone(tmp_path: Path, bundle: Path) -> None:
    def second_alone(manifest: Any) -> Any:
        found = interference_of(manifest, factors=((1.2, 1.0), (1.0, 1.3)))
        assert any(found.profiles[0].selections[0].variants)
        return found

    path = tmp_path / "a.mvb"
    write_kernel_bundle(path, scales=(1.0, 2.0), interference=second_alone)
    with load(path, share_cores=True) as session:
        assert session.interference is not None
        assert session.selection == session.interference.profiles[0].selections[0].variants
    with load(bundle, share_cores=True) as other:
        assert not any(other.selection)
    newer = tmp_path / "b.mvb"
    write_kernel_bundle(newer, scales=(1.0, 2.0), interference=lambda manifest: replace(interference_of(manifest), version=9))
    with load(newer, share_cores=True) as other:  # what it cannot read it runs without
        assert not any(other.selection)


def test_what_the_bundle_says(session: Session, bundle: Path) -> None:
    found = session.interference
    assert found is not None
    assert [level.name for level in found.levels] == ["none", "llc", "read", "write"]
    assert session.interference is found
    with load(bundle, share_cores=True) as other:
        assert other.interference is None


def test_a_damaged_profile_is_found_when_it_is_needed_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "damaged.mvb"
    write_kernel_bundle(path, interference=lambda manifest: b'{"version": 1, "levels": 3}')
    with load(path) as session:
        assert outputs_are(session, (1.0, 1.0))
        for use in (lambda: session.interference, session.adapt):
            with pytest.raises(BundleError, match=rf"{path}: interference.json.*; profile the bundle again"):
                use()
    write_kernel_bundle(path, interference=lambda manifest: b'{"version": 9}')
    with load(path) as session, pytest.raises(IncompatibleBundleError, match=f"{path}: .*upgrade mvcompile"):
        session.adapt()


def test_an_orchestrator_sets_the_level(session: Session) -> None:
    told: list[Switch] = []
    session.adapt("adaptive", "manual", on_switch=told.append)
    assert outputs_are(session, (1.0, 1.0))
    session.adapt(adaptive(dwell_s=0.0), "manual", on_switch=told.append)
    session.set_level("write")
    assert session.selection == (1, 1, 0)
    assert outputs_are(session, (2.0, 2.0))
    session.set_level("none")
    assert outputs_are(session, (1.0, 1.0))
    stats = session.stats()
    assert (stats.runs, stats.monitor, stats.level) == (2, "manual", "none")
    assert stats.latency_median_s > 0
    assert [(one.before, one.after) for one in told[1:]] == [(None, "none"), ("none", "write"), ("write", "none")]


def test_after_adapting_the_selection_stays(session: Session) -> None:
    session.adapt("adaptive", Manual("read"))
    assert session.selection == (1, 1, 0)
    session.adapt(None)
    assert session.selection == (1, 1, 0)
    assert outputs_are(session, (2.0, 2.0))
    for use in (session.stats, lambda: session.set_level("none")):
        with pytest.raises(UsageError, match=r"does not adapt, so nothing is known: call session.adapt\(\) first"):
            use()
    session.adapt(None)


def test_policies_by_name_and_by_value(session: Session) -> None:
    def mine(costs: Costs, situation: Situation, before: Decision) -> Decision:
        return Decision((0, 1, 0), situation.level, situation.now_s, "mine") if before.level < 0 else before

    for policy, selection in (
        ("adaptive", (1, 1, 0)),
        ("fixed", (0, 0, 0)),
        (fixed(1), (1, 1, 0)),
        (fixed([0, 1, 0]), (0, 1, 0)),
        (kind(0.5), (1, 1, 0)),
        ("kind", (1, 1, 0)),
        (mine, (0, 1, 0)),
    ):
        session.adapt(policy, Manual("llc"))  # type: ignore[arg-type]
        assert session.selection == selection
    for wrong in ("fast", 3):
        with pytest.raises(UsageError, match=r"policy is .*, expected 'fixed', 'adaptive', 'kind' or a function"):
            session.adapt(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="monitor is 'eyes'"):
        session.adapt("adaptive", "eyes")


def test_the_residual_monitor_watches_real_runs(session: Session) -> None:
    session.adapt()
    for _ in range(300):
        session.run(session.input_buffers)
    stats = session.stats()
    assert (stats.runs, stats.monitor) == (300, "residual")
    assert stats.monitor_s > 0
    assert session._adaptation is not None
    session.adapt("adaptive", Auto())
    assert session.stats().monitor == "residual"


def test_load_adapts(profiled: Path) -> None:
    told: list[Switch] = []
    with load(profiled, policy="adaptive", monitor=Manual("llc"), on_switch=told.append) as session:
        assert session.selection == (1, 1, 0)
        assert len(told) == 1
    with load(profiled, monitor="residual") as session:
        assert session.stats().monitor == "residual"
        assert session.selection == (0, 0, 0)
    with pytest.raises(UsageError, match="policy is 'fast'"):
        load(profiled, policy="fast")
    load(profiled, cores=sorted(os.sched_getaffinity(0))[:1]).close()  # the cores were given back


def test_without_a_profile_only_the_fixed_policy_works(bundle: Path) -> None:
    with load(bundle) as session:
        for arguments in (("adaptive",), ("kind",), ("fixed", "residual"), ("adaptive", "manual")):
            with pytest.raises(UsageError, match=rf"{bundle} has no profile \(interference.json\).*`mvcompile profile`"):
                session.adapt(*arguments)  # type: ignore[arg-type]
        session.adapt("fixed")
        assert outputs_are(session, (1.0, 1.0))
        assert session.stats().runs == 1
        with pytest.raises(UsageError, match="has no profile"):
            session.adapt("adaptive")
        assert session.stats().runs == 1  # it goes on as it was


def test_without_a_profile_for_the_number_of_cores(profiled_plain: Path, two_cores: list[int]) -> None:
    if len(two_cores) == 2:
        with load(profiled_plain, cores=two_cores) as session:
            with pytest.raises(UsageError, match=rf"{profiled_plain}: the bundle has no profile for 2 cores \(there are: 1\)"):
                session.adapt()
            session.adapt("fixed")
            session.set_cores(two_cores[:1])
            session.adapt()
            with pytest.raises(UsageError, match="no profile for 2 cores"):
                session.set_cores(two_cores)
            assert session.cores == tuple(two_cores[:1])
            assert outputs_are(session, (1.0, 1.0))


def test_a_failure_of_a_callback_reaches_the_caller(session: Session) -> None:
    def fail(switch: Switch) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        session.adapt("adaptive", "manual", on_switch=fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        session.set_level("llc")
    assert outputs_are(session, (1.0, 1.0)) or outputs_are(session, (2.0, 2.0))


def test_switching_from_many_threads_never_gives_a_wrong_output(profiled: Path, two_cores: list[int]) -> None:
    inputs = tiny_inputs(6)
    possible = [tiny_reference(inputs, scales)["y"] for scales in itertools.product((1.0, 2.0), (1.0, 2.0))]
    stop = threading.Event()

    def whole() -> None:
        while not stop.is_set():
            session.select_all([1, 1, 0])
            session.select_all(0)

    def single() -> None:
        while not stop.is_set():
            for layer, variant in itertools.product(("dense0", "dense1"), (0, 1)):
                session.select(layer, variant)

    def levels() -> None:
        for level in itertools.cycle(("llc", "none")):
            session.set_level(level)
            if stop.is_set():
                return

    with load(profiled, cores=two_cores, policy=adaptive(dwell_s=0.0), monitor="manual") as session:
        threads = [threading.Thread(target=target) for target in (whole, single, levels)]
        for thread in threads:
            thread.start()
        try:
            outputs = [session.run(inputs)["y"] for _ in range(20)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert all(any(np.allclose(output, one, rtol=1e-4, atol=1e-5) for one in possible) for output in outputs)


def test_a_session_that_adapts_can_be_collected_and_closed(profiled: Path) -> None:
    session = load(profiled, policy="adaptive")
    gone = weakref.ref(session)
    session.run(tiny_inputs(0))
    del session
    gc.collect()
    assert gone() is None
    session = load(profiled, policy="adaptive")
    session.close()
    for use in (session.stats, session.adapt, lambda: session.set_level("none"), lambda: session.set_cores(threads=1)):
        with pytest.raises(UsageError, match="is closed: load the bundle again"):
            use()


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_a_trace_has_every_layer_of_every_run(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    session.adapt(adaptive(dwell_s=0.0), "manual")
    with session.trace(path):
        session.run(tiny_inputs(1))
        session.set_level("write")
        session.run(tiny_inputs(1))
    session.run(tiny_inputs(1))
    found = events(path)
    slices = [one for one in found if one["ph"] == "X"]
    layers = [one for one in slices if one["name"] != "run"]
    assert [one["name"] for one in layers] == ["dense0", "dense1", "merge"] * 2
    assert [one["args"]["variant"] for one in layers] == [0, 0, 0, 1, 1, 0]
    runs = [one for one in slices if one["name"] == "run"]
    assert len(runs) == 2
    for run, inside in zip(runs, (layers[:3], layers[3:]), strict=True):
        assert run["ts"] <= inside[0]["ts"]
        assert sum(one["dur"] for one in inside) == pytest.approx(run["dur"], rel=1e-6)
    counters = [one for one in found if one["ph"] == "C"]
    assert [one["args"]["write"] for one in counters] == [0, 1]
    (switch,) = [one for one in found if one["ph"] == "i"]
    assert switch["args"]["layers"] == {"dense0": "0 -> 1", "dense1": "0 -> 1"}
    assert runs[0]["ts"] < switch["ts"] < runs[1]["ts"]
    assert {one["args"]["name"] for one in found if one["ph"] == "M"} == {"mvcompile tiny", "runs", "layers"}


def test_a_session_that_does_not_adapt_can_be_traced(session: Session, tmp_path: Path) -> None:
    session.select("dense1", 1)
    with session.trace(tmp_path / "trace.json", runs=2):
        for _ in range(3):
            session.run(tiny_inputs(1))
        with pytest.raises(UsageError, match="is being traced already"), session.trace(tmp_path / "other.json"):
            pass
    layers = [one for one in events(tmp_path / "trace.json") if one["ph"] == "X" and one["name"] != "run"]
    assert [one["args"]["variant"] for one in layers] == [0, 1, 0] * 2
    with pytest.raises(UsageError, match="does not adapt"):
        session.stats()
    assert session.selection == (0, 1, 0)


def test_a_trace_that_cannot_be_written_is_refused_before_the_first_run(session: Session, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"the trace cannot be written to .*: No such file"),
        session.trace(tmp_path / "no" / "x"),
    ):
        pass
    with pytest.raises(UsageError, match="does not adapt"):
        session.stats()


def test_a_trace_is_written_although_the_session_was_closed(session: Session, tmp_path: Path) -> None:
    with session.trace(tmp_path / "trace.json"):
        session.run(tiny_inputs(1))
        session.close()
    assert len([one for one in events(tmp_path / "trace.json") if one["name"] == "dense0"]) == 1


def test_a_selection_by_hand_stays_until_the_policy_decides(session: Session) -> None:
    session.adapt(adaptive(dwell_s=0.0), Manual("llc"))
    session.select("dense0", 0)
    for _ in range(3):
        session.run(tiny_inputs(1))
    assert session.selection == (0, 1, 0)
    session.set_level("none")
    session.set_level("llc")
    assert session.selection == (1, 1, 0)


def test_a_profile_of_estimates_serves_every_monitor_but_the_residual(tmp_path: Path) -> None:
    path = tmp_path / "estimated.mvb"
    write_kernel_bundle(path, interference=lambda manifest: replace(interference_of(manifest), source="estimated: invented"))
    with load(path) as session:
        with pytest.raises(UsageError, match="has estimated times only"):
            session.adapt()
        session.adapt("adaptive", Manual("llc"))
        assert session.selection == (1, 1, 0)


def test_a_profile_of_another_cpu_is_not_trusted_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.mvb"
    write_kernel_bundle(path, interference=lambda manifest: interference_of(manifest, cpu="Another CPU"))
    with load(path, share_cores=True) as session:
        for monitor in (None, "residual", "auto"):
            with pytest.warns(ProfileWarning, match=r"was profiled on Another CPU, this host has .*`mvcompile profile`"):
                session.adapt("adaptive", monitor)
        assert session.stats().monitor == "residual"
        session.adapt("adaptive", "manual")  # nobody takes times for levels
        session.adapt("fixed")
