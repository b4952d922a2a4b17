from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from mvcompile.errors import BundleError, EnvironmentProblem, InputError, UsageError
from mvcompile.runtime import Session, entrance, load
from mvcompile.runtime.entrance import Entrance, no_entrance
from mvcompile.runtime.memory import address
from mvcompile.runtime.stamps import StampRing
from mvcompile.testing.kernels import Array, tiny_inputs, tiny_reference


@pytest.fixture
def ready(bundle: Path) -> Iterator[Session]:
    """A session with an open entrance and inputs in its buffers."""
    with load(bundle) as session:
        fill(session, 1)
        session.run(session.input_buffers)
        yield session


def fill(session: Session, seed: int) -> dict[str, Array]:
    inputs = tiny_inputs(seed)
    for name, buffer in session.input_buffers.items():
        buffer[...] = inputs[name]
    return tiny_reference(inputs)


def the(session: Session) -> Entrance:
    found = session._program.entrance
    assert found is not None
    return found


def close_to(found: dict[str, Array] | None, expected: dict[str, Array]) -> bool:
    assert found is not None
    return all(np.allclose(found[name], array, rtol=1e-4, atol=1e-5) for name, array in expected.items())


def long_way(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What goes the long way from now on."""
    seen: list[object] = []
    original = session._program.run
    monkeypatch.setattr(session._program, "run", lambda inputs: (seen.append(inputs), original(inputs))[1])
    return seen


def test_runs_on_the_own_buffers_take_the_entrance(ready: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = long_way(ready, monkeypatch)
    outputs = []
    for seed in range(5):
        expected = fill(ready, seed)
        outputs.append(ready.run(ready.input_buffers))
        assert close_to(outputs[-1], expected)
        assert list(outputs[-1]) == ["y", "hidden"]
    assert len({address(one["y"]) for one in outputs}) == 5
    assert seen == []


def test_outputs_made_ahead_run_out_and_are_made_again(ready: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = long_way(ready, monkeypatch)
    expected = fill(ready, 3)
    outputs = [ready.run(ready.input_buffers) for _ in range(140)]
    assert all(close_to(one, expected) for one in outputs)
    assert len({address(one["y"]) for one in outputs}) == 140
    assert seen == [None, None]


def test_outputs_belong_to_the_caller_alone(ready: Session) -> None:
    outputs = ready.run(ready.input_buffers)
    mine = {"y": np.zeros(1)}
    assert sys.getrefcount(outputs) == sys.getrefcount(mine)
    assert sys.getrefcount(outputs["y"]) == sys.getrefcount(mine["y"])
    gone = weakref.ref(outputs["y"])
    del outputs
    assert gone() is None


def test_outputs_made_ahead_are_let_go_with_the_session(bundle: Path) -> None:
    with load(bundle) as session:
        session.run(session.input_buffers)
        made = [weakref.ref(array) for array in gc.get_referents(*ahead(session))]
        assert len(made) == 128
        assert all(one() is not None for one in made)
    assert all(one() is None for one in made)


def ahead(session: Session) -> list[object]:
    return [ctypes.cast(address, ctypes.py_object).value for address in the(session)._ready[:, 0].tolist()]


class Sly(dict[str, Array]):
    """Not what its own storage says."""

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        return tiny_inputs(7)[key]


class Angry(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = str.__hash__


def test_other_inputs_are_not_let_in(ready: Session) -> None:
    buffers = ready.input_buffers
    enter = the(ready).enter
    assert enter(dict(reversed(buffers.items()))) is not None
    x = buffers["x"]
    wrong = [
        {"x": x},
        {**buffers, "z": x},
        {**buffers, "x": x.copy()},
        {**buffers, "x": x[:]},
        {"y": x, "gate": buffers["gate"]},
        {Angry("x"): x, "gate": buffers["gate"]},
        Sly(buffers),
        list(buffers.values()),
        None,
        {},
    ]
    for inputs in wrong:
        assert enter(inputs) is None
    assert close_to(ready.run(Sly(buffers)), tiny_reference(tiny_inputs(7)))
    with pytest.raises(InputError, match="there is no input 'z'"):
        ready.run({**buffers, "z": x})
    assert enter(buffers) is not None


def test_another_thread_runs_the_long_way_first(ready: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[int] = []
    monkeypatch.setattr("mvcompile.runtime.worker.configure_thread_pool", lambda cores: configured.append(len(cores)))
    found: list[object] = []

    def run() -> None:
        found.extend((the(ready).enter(ready.input_buffers), ready.run(ready.input_buffers)))
        found.append(the(ready).enter(ready.input_buffers))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0] is None
    assert found[1] is not None
    assert found[2] is not None
    assert configured == [1]


def test_selections_count_at_once(doubling: Path) -> None:
    with load(doubling) as session:
        fill(session, 2)
        session.run(session.input_buffers)
        for scales in ((1.0, 1.0), (2.0, 1.0), (2.0, 2.0), (1.0, 2.0)):
            session.select_all((int(scales[0]) - 1, int(scales[1]) - 1, 0))
            assert close_to(the(session).enter(session.input_buffers), tiny_reference(tiny_inputs(2), scales))


def held_up(session: Session) -> tuple[threading.Event, threading.Event]:
    """Let the first step wait: two events, when it has begun, and when it may go on."""
    inside, proceed = threading.Event(), threading.Event()
    steps = session._program._steps
    first = steps.selected()[0]

    def slow(*arguments: object) -> None:
        inside.set()
        proceed.wait(10)
        first(*arguments)

    steps.select(0, tvm_ffi.convert_func(slow))
    return inside, proceed


def test_nobody_else_runs_while_a_run_is_inside(ready: Session) -> None:
    inside, proceed = held_up(ready)
    found: list[dict[str, Array] | None] = []

    def known() -> None:
        proceed.set()
        ready.run(ready.input_buffers)
        inside.clear()
        proceed.clear()
        found.append(the(ready).enter(ready.input_buffers))

    runner, other = (threading.Thread(target=target) for target in (known, lambda: found.append(ready.run(ready.input_buffers))))
    runner.start()
    while proceed.is_set() or not inside.is_set():
        time.sleep(0.001)
    assert the(ready).enter(ready.input_buffers) is None
    other.start()
    time.sleep(0.02)
    assert found == []
    proceed.set()
    runner.join()
    other.join()
    assert len(found) == 2
    assert all(close_to(one, tiny_reference(tiny_inputs(1))) for one in found)


def test_close_waits_for_the_run_that_is_inside(ready: Session) -> None:
    buffers, enter = ready.input_buffers, the(ready).enter
    inside, proceed = held_up(ready)
    found: list[dict[str, Array] | None] = []

    def run() -> None:
        proceed.set()
        ready.run(buffers)
        inside.clear()
        proceed.clear()
        found.append(enter(buffers))

    runner = threading.Thread(target=run)
    runner.start()
    while proceed.is_set() or not inside.is_set():
        time.sleep(0.001)
    closer = threading.Thread(target=ready.close)
    closer.start()
    time.sleep(0.02)
    assert closer.is_alive()
    proceed.set()
    runner.join()
    closer.join()
    assert close_to(found[0], tiny_reference(tiny_inputs(1)))
    assert enter(buffers) is None
    with pytest.raises(UsageError, match="is closed"):
        ready.run(buffers)


def test_threads_that_run_and_switch_at_will_never_get_a_wrong_output(doubling: Path) -> None:
    wrong: list[object] = []
    with load(doubling) as session:
        fill(session, 2)
        possible = [tiny_reference(tiny_inputs(2), (one, other)) for one in (1.0, 2.0) for other in (1.0, 2.0)]

        def run() -> None:
            for _ in range(400):
                outputs = session.run(session.input_buffers)
                if not any(close_to(outputs, expected) for expected in possible):
                    wrong.append(outputs)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            session.select("dense0", 1)
            session.select_all(0)
            session.select("dense1", 1)
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_step_that_fails_is_told_by_the_long_way(ready: Session) -> None:
    steps, expected = ready._program._steps, fill(ready, 1)
    first = steps.selected()[0]

    def fail(*arguments: object) -> None:
        raise ValueError("no such luck")

    left = the(ready)._words[entrance._LEFT]
    steps.select(0, tvm_ffi.convert_func(fail))
    assert the(ready).enter(ready.input_buffers) is None
    with pytest.raises(BundleError, match="the kernel of layer 'dense0' failed: no such luck"):
        ready.run(ready.input_buffers)
    steps.select(0, first)
    assert the(ready)._words[entrance._LEFT] == left
    assert close_to(ready.run(ready.input_buffers), expected)


def test_a_core_that_may_not_be_used_any_more(ready: Session) -> None:
    nowhere = os.sysconf("SC_NPROCESSORS_CONF")
    core = ready.cores[0]
    ready._program.settle(nowhere)
    assert the(ready).enter(ready.input_buffers) is None
    with pytest.raises(EnvironmentProblem, match=f"may not run on its core {nowhere} any more"):
        ready.run(ready.input_buffers)
    ready._program.settle(core)
    ready.run(ready.input_buffers)
    assert the(ready).enter(ready.input_buffers) is not None


def test_it_pins_the_thread_meanwhile_and_follows_the_session(bundle: Path, two_cores: list[int]) -> None:
    allowed = os.sched_getaffinity(0)
    seen: list[object] = []
    with load(bundle, cores=two_cores[:1]) as session:
        session._program._steps.select(0, tvm_ffi.convert_func(lambda *arguments: seen.append(os.sched_getaffinity(0))))
        for cores in [[core] for core in two_cores] + [two_cores, two_cores[::-1]]:
            session.set_cores(cores)
            session.run(session.input_buffers)
            seen.clear()
            assert the(session).enter(session.input_buffers) is not None
            assert seen == [{cores[0]}]
            assert os.sched_getaffinity(0) == allowed


def test_runs_that_are_watched_leave_their_stamps(ready: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = StampRing(len(ready.layers), lambda: heard.append(ring.runs))
    ring.due_ns = 2**62
    heard: list[int] = []
    the(ready).record(ring)
    before = time.monotonic_ns()
    for number in range(1, 6):
        if number == 4:
            ring.due_ns = time.monotonic_ns()
        assert the(ready).enter(ready.input_buffers) is not None
        assert ring.runs == number
    stamps = ring.take()
    assert stamps.shape == (5, 4)
    assert before <= stamps[0, 0]
    assert (np.diff(stamps.reshape(-1)) >= 0).all()
    assert stamps[-1, -1] <= time.monotonic_ns()
    assert heard == [4, 5]
    for _ in range(70):  # more than there are rows, and than there are outputs made ahead
        ready.run(ready.input_buffers)
    the(ready).record(None)
    assert len(ring.take()) > 60
    assert close_to(the(ready).enter(ready.input_buffers), tiny_reference(tiny_inputs(1)))


def test_what_a_listener_raises_the_run_raises(ready: Session) -> None:
    class Complaint(Exception):
        pass

    def complain() -> None:
        raise Complaint

    made = ahead(ready)
    before = [sys.getrefcount(one) for one in made]
    left = int(the(ready)._words[entrance._LEFT])
    the(ready).record(StampRing(len(ready.layers), complain))
    with pytest.raises(Complaint):
        ready.run(ready.input_buffers)
    the(ready).record(None)
    after = [sys.getrefcount(one) for one in made]
    assert [row for row in range(len(made)) if after[row] != before[row]] == [left - 1]
    assert after[left - 1] == before[left - 1] - 1
    assert the(ready).enter(ready.input_buffers) is not None


def test_a_session_that_adapts_takes_the_entrance_too(ready: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.adapt("fixed")
    ready.run(ready.input_buffers)
    seen = long_way(ready, monkeypatch)
    for _ in range(3):
        ready.run(ready.input_buffers)
    assert ready.stats().runs == 4
    assert seen == []
    ready.adapt(None)
    ready.run(ready.input_buffers)
    assert seen == []


def test_other_runs_leave_it_open(ready: Session) -> None:
    expected = fill(ready, 1)
    ready.run({name: array.copy() for name, array in ready.input_buffers.items()})
    ready.run(ready.input_buffers, out={name: np.zeros_like(array) for name, array in expected.items()})
    ready.run_profiled(ready.input_buffers)
    assert close_to(the(ready).enter(ready.input_buffers), expected)


def test_an_interrupt_during_a_run_leaves_it_in_order(ready: Session) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    expected = fill(ready, 1)
    first = ready._program._steps.selected()[0]

    def slow(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        first(*arguments)

    before = signal.signal(signal.SIGALRM, interrupt)
    ready._program._steps.select(0, tvm_ffi.convert_func(slow))
    try:
        with pytest.raises((Interrupt, BundleError)):
            ready.run(ready.input_buffers)
    finally:
        ready._program._steps.select(0, first)
        signal.signal(signal.SIGALRM, before)
    for _ in range(2):
        assert close_to(ready.run(ready.input_buffers), expected)


FORK = """
import os, sys
from mvcompile.errors import UsageError
from mvcompile.runtime import load
session = load(sys.argv[1])
buffers = session.input_buffers
for _ in range(2):
    session.run(buffers)
child = os.fork()
if child == 0:
    status = 1
    try:
        session.run(buffers)
    except UsageError as error:
        status = 0 if "is its forked child" in str(error) else 2
    finally:
        os._exit(status)
print(os.waitpid(child, 0)[1], len(session.run(buffers)))
"""


def test_a_forked_child_is_not_let_in(bundle: Path, python: Callable[..., str]) -> None:
    assert python(FORK, bundle) == "0 2"


@pytest.mark.parametrize("lack", ["support", "room", "function"])
def test_without_it_a_session_runs_as_well(bundle: Path, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "support":
        monkeypatch.setattr(entrance, "is_supported", lambda: False)
    elif lack == "room":
        monkeypatch.setattr(entrance, "_AHEAD_BYTES", 1)
    else:
        monkeypatch.setattr("mvcompile.runtime.program.ENTRANCE", "mvcompile_entrance_of_another_day")
    with load(bundle) as session:
        assert session._program.entrance is None
        assert session._enter is no_entrance
        expected = fill(session, 1)
        for _ in range(3):
            assert close_to(session.run(session.input_buffers), expected)
