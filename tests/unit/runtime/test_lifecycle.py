from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi

from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.runtime import Session, load, selftest
from mvcompile.runtime.cores import Lease
from mvcompile.testing.kernels import Array, tiny_inputs


def eventually(condition: Callable[[], bool]) -> bool:
    """TVM's pool ends with its thread, a few milliseconds after Python has forgotten that."""
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def cores_of(thread: str) -> set[int]:
    return os.sched_getaffinity(int(thread))


def mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "kernels.so" in line or ".mvb" in line]


def test_everything_says_so_after_close(bundle: Path) -> None:
    with load(bundle) as session:
        assert "cores" in repr(session)
    session.close()
    uses: list[Callable[[], object]] = [
        lambda: session.run(tiny_inputs(1)),
        lambda: session.run_profiled(tiny_inputs(1)),
        lambda: session.select("dense0", 1),
        lambda: session.select_all(0),
        lambda: session.selection,
        lambda: session.input_buffers,
        lambda: session.member("weights.bin"),
        lambda: selftest(session),
        session.__enter__,
    ]
    for use in uses:
        with pytest.raises(UsageError, match=f"the session of {bundle} is closed: load the bundle again"):
            use()
    assert repr(session) == f"<Session of {bundle}, closed>"
    assert session.manifest.model.name == "tiny"


def test_close_leaves_nothing_behind(bundle: Path, two_cores: list[int]) -> None:
    load(bundle).close()
    assert eventually(lambda: mapped() == [])
    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    sessions = []
    for _ in range(5):
        session = load(bundle, cores=two_cores)
        session.select_all(1)
        session.run(tiny_inputs(1))
        session.close()
        sessions.append(session)
    assert eventually(lambda: threads() <= before)
    assert mapped() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_threads_run_on_the_cores_of_the_session_and_the_caller_where_it_was(bundle: Path, two_cores: list[int]) -> None:
    mine, before = os.sched_getaffinity(0), threads()
    with load(bundle, cores=two_cores[::-1]) as session:
        session.select_all(1)
        session.run(tiny_inputs(1))
        assert os.sched_getaffinity(0) == mine
        assert [cores_of(thread) for thread in threads() - before] == [{core} for core in two_cores[:-1]]


def test_close_waits_for_the_run_under_way(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = load(bundle)
    entered, proceed = threading.Event(), threading.Event()
    original = session._program._take

    def take(index: int, array: Array) -> bool:
        entered.set()
        proceed.wait(10)
        return original(index, array)

    monkeypatch.setattr(session._program, "_take", take)
    found: list[object] = []
    runner = threading.Thread(target=lambda: found.append(session.run(tiny_inputs(1))))
    runner.start()
    entered.wait(10)
    closer = threading.Thread(target=session.close)
    closer.start()
    assert closer.is_alive()
    proceed.set()
    runner.join()
    closer.join()
    assert len(found) == 1


def test_a_dropped_session_ends_its_thread(bundle: Path, two_cores: list[int]) -> None:
    before = threads()
    session: Session | None = load(bundle, cores=two_cores)
    assert threads() - before
    session = None
    assert session is None
    assert eventually(lambda: threads() <= before)


FORK = """
import os, sys
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.runtime import load, selftest
cores = sorted(os.sched_getaffinity(0))
session = load(sys.argv[1], cores=cores)
child = os.fork()
if child == 0:
    status = 1
    try:
        for use in (lambda: selftest(session), lambda: session.select("dense0", 1), lambda: session.selection):
            try:
                use()
            except UsageError as error:
                print("refused:", error, flush=True)
        session.close()
        del session
        with load(sys.argv[1], cores=cores) as own:
            print("own session passes:", selftest(own).passed, flush=True)
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
print("parent passes:", selftest(session).passed)
"""


def test_a_forked_child_is_told_and_can_load_anew(bundle: Path, python: Callable[..., str]) -> None:
    lines = python(FORK, bundle, options=("-W", "ignore::DeprecationWarning")).splitlines()
    assert len(lines) == 5
    assert all("is its forked child" in line and "load the bundle in the child" in line for line in lines[:3])
    assert lines[3:] == ["own session passes: True", "parent passes: True"]


EXIT = """
import os, sys, threading
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.runtime import load
from mvcompile.testing.kernels import Array, tiny_inputs
session = load(sys.argv[1], cores=sorted(os.sched_getaffinity(0)))
session.select_all(1)
started = threading.Event()
def run():
    try:
        while True:
            session.run(tiny_inputs(1))
            started.set()
    except UsageError:
        pass
threading.Thread(target=run, daemon=True).start()
started.wait(30)
"""


def test_a_process_that_never_closes_its_session_ends_cleanly(bundle: Path, python: Callable[..., str]) -> None:
    assert python(EXIT, bundle) == ""


@pytest.mark.parametrize("native", [True, False])
def test_a_session_of_one_core_runs_in_the_calling_thread_and_gives_its_affinity_back(
    bundle: Path, plain: Path, two_cores: list[int], native: bool
) -> None:
    before, allowed = threads(), os.sched_getaffinity(0)
    seen = []
    with load(bundle if native else plain, cores=two_cores[1:]) as session:
        assert threads() == before
        session._program._steps.select(0, tvm_ffi.convert_func(lambda *arguments: seen.append(os.sched_getaffinity(0))))
        session.run(tiny_inputs(0))
        assert os.sched_getaffinity(0) == allowed
        os.sched_setaffinity(0, two_cores[1:])
        try:
            session.run(tiny_inputs(0))
            assert os.sched_getaffinity(0) == set(two_cores[1:])
        finally:
            os.sched_setaffinity(0, allowed)
    assert seen == [set(two_cores[1:])] * 2


@pytest.mark.parametrize("native", [True, False])
def test_a_core_that_may_not_be_used_any_more(bundle: Path, plain: Path, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = os.sysconf("SC_NPROCESSORS_CONF")  # the first core that this machine has not
    path = bundle if native else plain
    with monkeypatch.context() as patch:
        patch.setattr("mvcompile.runtime.worker.configure_thread_pool", lambda cores: None)
        patch.setattr("mvcompile.runtime.session._CORES.lease", lambda *arguments: Lease(0, "here", (nowhere,)))
        patch.setattr("mvcompile.runtime.session._CORES.release", lambda lease: None)
        with load(path) as session, pytest.raises(EnvironmentProblem, match=f"may not run on its core {nowhere} any more"):
            session.run(tiny_inputs(0))
