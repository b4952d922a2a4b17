"""Where a session's kernels run: in the calling thread; or in a thread of its own for a session of several cores whose bundle
knows no other way to share parallel loops than TVM's thread pool.

A hand-over to another thread and back costs 0.3 to 0.5 ms after 10 ms of work on a virtual machine with two cores, nearly all
of it the time in which sleeping cores wake up: more than the kernels of a small layer take. A thread pool, on the other hand,
belongs to one thread.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime.cpus import PinError
from mvcompile.runtime.entrance import Entrance, mark_thread
from mvcompile.runtime.native import configure_thread_pool
from mvcompile.runtime.program import Program
from mvcompile.runtime.team import Team

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class WorkerStoppedError(Exception):
    """A call came after `stop`."""


class _Job:
    """A call that waits for the worker. `done` is held until the call has ended."""

    __slots__ = ("argument", "done", "error", "function", "result")

    def __init__(self, function: Callable[[Any], Any], argument: Any) -> None:
        self.function = function
        self.argument = argument
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()
        self.done.acquire()


class CallingThread:
    """Runs calls in the thread that makes them, one at a time, pinned to `core` for as long as a call takes, unless `pin` is
    False: for calls that pin the thread themselves. Parallel loops are shared with the threads of `team`.

    A thread that has made a call keeps TVM's setting of one thread for its parallel loops: it matters only to code that calls
    TVM's kernels there by other ways.
    """

    def __init__(self, core: int, pin: bool = True, entrance: Entrance | None = None, team: Team | None = None) -> None:
        """During a call `entrance` is shut: nobody runs by that way meanwhile. `team` ends when this is stopped."""
        self._core = frozenset((core,))
        self._pin = pin
        self._entrance = entrance
        self._team = team
        self._gate = threading.Lock()
        self._stopped = False

    @property
    def core(self) -> int:
        """Where the steps run."""
        return min(self._core)

    @property
    def team_address(self) -> int:
        """Of the team, 0 if there is none."""
        return 0 if self._team is None else self._team.address

    def call(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        """`function(argument)`. Raises what it raises, WorkerStoppedError after `stop`, PinError."""
        entrance = self._entrance
        crowded = self._gate.locked()
        with self._gate:
            if self._stopped:
                raise WorkerStoppedError
            was_open = entrance is not None and entrance.shut()
            if not getattr(_thread_state, "is_single", False):
                self._pinned(configure_thread_pool, tuple(self._core))
                mark_thread()
                _thread_state.is_single = True
            result = self._pinned(function, argument) if self._pin else function(argument)
            # Threads that wait for each other all the time do it better here than at the entrance.
            if entrance is not None and (was_open or entrance.wanted) and not crowded:
                entrance.open()
            return result

    def _pinned(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        before = os.sched_getaffinity(0)
        if before == self._core:
            return function(argument)
        try:
            os.sched_setaffinity(0, self._core)
        except OSError as error:
            raise PinError(min(self._core)) from error
        try:
            return function(argument)
        finally:
            os.sched_setaffinity(0, before)

    def stop(self, last: Callable[[], object]) -> None:
        """Let no call in any more; wait for the one under way, then do `last()`."""
        with self._gate:
            if not self._stopped:
                self._stopped = True
                if self._entrance is not None:
                    self._entrance.shut()
                    self._entrance = None
                if self._team is not None:
                    self._team.stop()
                last()

    def join(self) -> None:
        """Wait for the threads of the team."""
        if self._team is not None:
            self._team.join()


_thread_state = threading.local()
"""`is_single`: whether TVM's parallel loops run on one thread when this thread calls them."""


class OwnThread:
    """A thread pinned to `cores[0]`, whose kernels' parallel loops run on all of `cores`, one thread each.

    The threads that call it keep their affinity. Nothing refers to the worker's owner, so that the owner can be collected.
    """

    def __init__(self, cores: Sequence[int], name: str) -> None:
        """Raises EnvironmentProblem if the thread cannot be started or pinned."""
        # A queue and a fresh lock per call: a call that an interrupt has left alone cannot be mistaken for the next one. Waking
        # the caller before the end saves 50 us, but beside a thread that computes in Python it costs two more waits of 5 ms for
        # the interpreter lock.
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._gate = threading.Lock()
        self._stopped = False
        started = _Job(_settle, tuple(cores))
        self._queue.put(started)
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EnvironmentProblem(
                f"no thread could be started for the session: {error}; raise the limit (ulimit -u)"
            ) from error
        started.done.acquire()
        if started.error is not None:
            self.stop(lambda: None)
            message = f"the session's thread could not be pinned to cores {list(cores)}: {started.error}; name other cores=..."
            raise EnvironmentProblem(message) from started.error

    def call(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        """`function(argument)` in the worker's thread, after the calls that came before. Raises what it raises.

        Raises WorkerStoppedError after `stop`.
        """
        job = _Job(function, argument)
        with self._gate:
            if self._stopped:
                raise WorkerStoppedError
            self._queue.put(job)
        job.done.acquire()
        if job.error is None:
            result: Result = job.result
            return result
        try:
            raise job.error
        finally:
            del job  # the error refers to this frame, and the job to the error

    def stop(self, last: Callable[[], object]) -> None:
        """End the thread once the calls so far are done, with `last()` as its last act. Returns at once."""
        with self._gate:
            if not self._stopped:
                self._stopped = True
                self._queue.put(_Job(_end, last))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join()


def _end(last: Callable[[], object]) -> None:
    """The last call of a thread."""
    last()


def _settle(cores: tuple[int, ...]) -> None:
    # In this order: threads of the pool that TVM does not pin itself (TVM_BIND_THREADS=0) inherit the session's cores, and TVM
    # lets the thread that configures the pool roam over all of them.
    os.sched_setaffinity(0, cores)
    configure_thread_pool(cores)
    os.sched_setaffinity(0, cores[:1])


def _serve(queue: SimpleQueue[_Job]) -> None:
    while True:
        job = queue.get()
        last = job.function is _end
        try:
            job.result = job.function(job.argument)
        except BaseException as error:  # it belongs to the caller, whatever it is
            job.error = error
        done = job.done
        del job  # the caller's arrays must not live until the next call
        done.release()
        if last:
            return


Worker: TypeAlias = CallingThread | OwnThread


def worker_for(program: Program, cores: Sequence[int], name: str) -> Worker:
    """Where `program` can run on `cores`, the first one being where serial code runs; it does once it is settled there.

    Raises EnvironmentProblem if a thread cannot be had.
    """
    if len(cores) == 1:
        return CallingThread(cores[0], not program.pins, program.entrance)
    if program.team_calls is None:
        return OwnThread(cores, name)
    return CallingThread(cores[0], not program.pins, program.entrance, Team(program.team_calls, cores, name))


def settle(program: Program, worker: Worker) -> None:
    """Let `worker` be where `program` runs from now on. Not during a run."""
    if isinstance(worker, CallingThread):
        program.settle(worker.core, worker.team_address)
    else:
        program.settle(None)
