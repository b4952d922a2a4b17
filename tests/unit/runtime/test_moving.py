"""Sessions that change their cores between runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.runtime import Session, load
from mvcompile.testing.kernels import tiny_inputs, tiny_reference, write_kernel_bundle
from mvcompile.testing.profiles import interference_of


def right(session: Session) -> bool:
    inputs = tiny_inputs(3)
    return np.allclose(session.run(inputs)["y"], tiny_reference(inputs)["y"], rtol=1e-4, atol=1e-5)


def where(session: Session) -> set[int]:
    """The cores that the first layer's thread may run on."""
    seen: list[set[int]] = []
    before = session.selection
    session._program._steps.select(0, tvm_ffi.convert_func(lambda *arguments: seen.append(os.sched_getaffinity(0))))
    session.run(tiny_inputs(0))
    session.select_all(before)
    return seen[0]


@pytest.mark.parametrize("native", [True, False])
def test_every_way_to_move(bundle: Path, plain: Path, two_cores: list[int], native: bool) -> None:
    first, last = two_cores[0], two_cores[-1]
    mine = os.sched_getaffinity(0)
    with load(bundle if native else plain, cores=[first]) as session:
        for cores in ([last], two_cores, two_cores[::-1], [first], [first], two_cores, [last]):
            session.set_cores(cores)
            assert session.cores == tuple(cores)
            session.select_all(1)
            assert where(session) == {cores[0]}
            session.select_all(0)
            assert right(session)
            assert os.sched_getaffinity(0) == mine
            with load(bundle, share_cores=True) as other:
                assert right(other)
        session.set_cores()
        assert session.cores == (first,)


def test_cores_are_leased_and_given_back(bundle: Path, two_cores: list[int]) -> None:
    if len(two_cores) < 2:
        return
    with load(bundle, cores=two_cores[:1]) as session, load(bundle, cores=two_cores[1:]) as other:
        with pytest.raises(UsageError, match=rf"core.* cannot be leased: core {two_cores[1]} is held by"):
            session.set_cores(two_cores)
        assert session.cores == (two_cores[0],)
        assert right(session)
        other.close()
        session.set_cores(two_cores[1:])
        load(bundle, cores=two_cores[:1]).close()
        with pytest.raises(UsageError, match="cannot be leased"):
            load(bundle, cores=two_cores[1:])
        outside = max(os.sched_getaffinity(0)) + 1
        with pytest.raises(UsageError, match=f"core {outside} cannot be used"):
            session.set_cores([outside])
        assert right(session)
    load(bundle, cores=two_cores).close()


def test_a_thread_that_cannot_be_had_leaves_the_session_where_it_was(
    bundle: Path, two_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise EnvironmentProblem("no thread")

    with load(bundle, cores=two_cores[:1]) as session:
        monkeypatch.setattr("mvcompile.runtime.worker.Team", fail)
        if len(two_cores) == 2:
            with pytest.raises(EnvironmentProblem, match="no thread"):
                session.set_cores(two_cores)
            load(bundle, cores=two_cores[1:]).close()
        assert session.cores == (two_cores[0],)
        assert right(session)


def test_runs_go_on_while_the_session_moves(bundle: Path, two_cores: list[int]) -> None:
    stop = threading.Event()
    wrong: list[object] = []

    def run() -> None:
        while not stop.is_set():
            try:
                if not right(session):
                    wrong.append("output")
            except Exception as error:
                wrong.append(error)

    with load(bundle, cores=two_cores[:1]) as session:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                session.set_cores(two_cores)
                session.set_cores(two_cores[1:])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert wrong == []


def test_a_session_that_moves_goes_on_adapting(tmp_path: Path, two_cores: list[int]) -> None:
    path = tmp_path / "profiled.mvb"
    counts = tuple({1, len(two_cores)})
    write_kernel_bundle(path, interference=lambda manifest: interference_of(manifest, cores=counts))
    with load(path, cores=two_cores[:1], policy="adaptive", monitor="manual") as session:
        session.run(tiny_inputs(0))
        session.set_cores(two_cores)
        assert session.stats().runs == 0
        assert right(session)
        assert session.stats().runs == 1
        session.set_level("llc")
