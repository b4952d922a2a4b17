"""How parallel loops are shared: the code that every bundle's kernels.so carries, called as kernels call it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime import load
from mvcompile.runtime.native import Library, ensure_tvm_runtime
from mvcompile.runtime.team import IDLE_NS, SHARES_PER_THREAD, Team, TeamCalls, team_calls
from mvcompile.testing.kernels import tiny_inputs, tiny_reference

PART = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
"""FTVMParallelLambda of TVM's c_backend_api.h: number of the part, environment, data."""

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, PART, ctypes.c_void_p, ctypes.c_int)

Part = Callable[[int], int]


class Kernels:
    """The library of a bundle, and its parallel loops as kernels make them."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        path = folder / "loops.so"
        with open_bundle(bundle) as opened:
            ensure_tvm_runtime(opened.member("libtvm_runtime.so"))
            path.write_bytes(opened.member("kernels.so"))
        self.module = tvm_ffi.load_module(str(path))
        calls = team_calls(LibraryOf(self.module))
        assert calls is not None
        self.calls: TeamCalls = calls
        self._pointer = ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "__TVMBackendParallelLaunch")
        self.tasks = 0

    def loop(self, part: Part) -> int:
        """Runs a loop; `tasks` says in how many parts. Returns what the kernel would return."""

        def call(number: int, environment: int, data: int) -> int:
            self.tasks = ctypes.c_int.from_address(environment + ctypes.sizeof(ctypes.c_void_p)).value
            return part(number) if data == 7 else -2

        assert self._pointer.value is not None
        return int(LAUNCH(self._pointer.value)(PART(call), 7, 0))


class LibraryOf(Library):
    """A library that is loaded already."""

    def __init__(self, module: object) -> None:
        self._module = module


@pytest.fixture
def kernels(bundle: Path, tmp_path: Path) -> Iterator[Kernels]:
    found = Kernels(bundle, tmp_path)
    yield found
    found.calls.team(0)


def team_of(kernels: Kernels, cores: list[int], calls: TeamCalls | None = None) -> Team:
    team = Team(calls or kernels.calls, cores, "test")
    kernels.calls.team(team.address)
    return team


def test_without_a_team_the_caller_runs_the_whole_loop(kernels: Kernels) -> None:
    kernels.calls.team(0)
    seen: list[tuple[int, int]] = []
    assert kernels.loop(lambda part: seen.append((part, threading.get_ident())) or 0) == 0  # type: ignore[func-returns-value]
    assert (seen, kernels.tasks) == ([(0, threading.get_ident())], 1)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_every_part_runs_once(kernels: Kernels, two_cores: list[int], threads: int) -> None:
    team = team_of(kernels, (two_cores * threads)[:threads])
    parts = SHARES_PER_THREAD * threads
    who: Counter[int] = Counter()
    for number in range(200):
        seen: list[int] = []

        def part(index: int, seen: list[int] = seen) -> int:
            seen.append(index)
            who[threading.get_ident()] += 1
            return 0

        assert kernels.loop(part) == 0
        assert sorted(seen) == list(range(parts))
        assert kernels.tasks == parts
        if number % 50 == 49:
            time.sleep(3e-9 * IDLE_NS)  # long enough for the threads to sleep
    team.stop()
    team.join()
    assert who[threading.get_ident()] > 0
    assert len(who) > 1


def test_nobody_waits_for_a_thread_that_has_not_begun(kernels: Kernels, two_cores: list[int]) -> None:
    never = threading.Event()
    team = team_of(kernels, two_cores[:1] * 3, replace(kernels.calls, work=lambda address, number: never.wait()))
    mine: list[int] = []
    for _ in range(3):
        assert kernels.loop(lambda part: mine.append(threading.get_ident()) or 0) == 0  # type: ignore[func-returns-value]
    assert mine == [threading.get_ident()] * 9 * SHARES_PER_THREAD
    never.set()
    team.stop()
    team.join()


def test_a_thread_that_is_late_in_a_part_comes_to_the_first_core_and_goes_home(kernels: Kernels, two_cores: list[int]) -> None:
    if len(two_cores) < 2:
        return
    first, second = ({core} for core in two_cores)
    team = team_of(kernels, two_cores)
    caller = threading.get_ident()
    begun = threading.Event()
    seen: list[set[int]] = []

    def part(index: int) -> int:
        if threading.get_ident() == caller:
            begun.wait(10)
        elif not begun.is_set():
            begun.set()
            until = time.monotonic() + 10
            while os.sched_getaffinity(0) != first and time.monotonic() < until:
                time.sleep(0.001)
        seen.append(os.sched_getaffinity(0))
        return 0

    assert kernels.loop(part) == 0
    assert first in seen[1:]
    for _ in range(20):  # until it has taken a part again, from where it belongs
        begun.set()
        seen.clear()
        homes: list[set[int]] = []

        def again(index: int, homes: list[set[int]] = homes) -> int:
            if threading.get_ident() == caller:
                time.sleep(0.001)
            else:
                homes.append(os.sched_getaffinity(0))
            return 0

        assert kernels.loop(again) == 0
        if homes:
            assert homes[-1] == second
            break
    else:
        raise AssertionError("the second thread took no part in 20 loops")
    team.stop()
    team.join()


def test_what_a_part_returns_is_what_the_loop_returns(kernels: Kernels, two_cores: list[int]) -> None:
    team = team_of(kernels, two_cores)
    assert kernels.loop(lambda part: -1 if part == SHARES_PER_THREAD else 0) == -1
    assert kernels.loop(lambda part: 0) == 0
    team.stop()
    team.join()


def test_threads_leave_whether_they_look_or_sleep(kernels: Kernels, two_cores: list[int]) -> None:
    for pause_s in (0.0, 5e-9 * IDLE_NS):
        team = team_of(kernels, two_cores * 2)
        kernels.loop(lambda part: 0)
        time.sleep(pause_s)
        before = threading.active_count()
        team.stop()
        team.stop()
        team.join()
        assert threading.active_count() == before - (2 * len(two_cores) - 1)


def test_a_session_that_is_dropped_takes_its_threads_with_it(bundle: Path, two_cores: list[int]) -> None:
    before = threading.active_count()
    session = load(bundle, cores=two_cores)
    session.select_all(1)
    session.run(tiny_inputs(1))
    assert threading.active_count() == before + len(two_cores) - 1
    del session
    gc.collect()
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_core_that_may_not_be_used_is_named(kernels: Kernels, two_cores: list[int]) -> None:
    nowhere = max(os.sched_getaffinity(0)) + 1000
    before = threading.active_count()
    with pytest.raises(EnvironmentProblem, match=rf"no thread of the session could be started on core {nowhere}: .*cores=\.\.\."):
        Team(kernels.calls, [two_cores[0], two_cores[0], nowhere], "test")
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_runs_are_right_beside_a_process_that_wants_the_same_core(bundle: Path, two_cores: list[int]) -> None:
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, two_cores[-1:])
        while os.getppid() > 1:
            pass
        os._exit(0)
    try:
        with load(bundle, cores=two_cores) as session:
            session.select_all(1)
            for number in range(300):
                inputs = tiny_inputs(number)
                np.testing.assert_allclose(session.run(inputs)["y"], tiny_reference(inputs)["y"], rtol=1e-4, atol=1e-5)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
