"""Handle on a process that loads caches and memory from one core (`load_worker`): what it is asked for, and what it did."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.measure import load_loops as loops
from mvcompile.types import align

START_S = 120.0
"""A process that is not ready after this long is given up: it imports TVM, and fills its buffers."""
TAKE_S = 10.0
"""As long as a setting may wait to be taken. It takes microseconds, or as long as a chain of dependent loads takes to build."""
STREAM_FACTOR = 4
"""A stream's buffer is this many last-level caches large: nothing of it is still there when its turn comes again."""
HUGE_PAGE_BYTES = 2 << 20

_START = "import sys; sys.path[:] = sys.argv[7:]; from mvcompile.measure.load_worker import main; main(sys.argv[1:7])"


@dataclass(frozen=True, slots=True)
class Work:
    """What the process is asked for. Sizes are bytes, rounded down to `load_loops.GRANULE_BYTES`; rates are bytes per second, 0
    for none and below 0 for as fast as it can; a window of 0 is the whole buffer. `parallel`: the chain is followed from several
    places in turn, so that loads do not wait for each other."""

    resident_bytes: int = 0
    read_rate: float = 0.0
    read_window: int = 0
    write_rate: float = 0.0
    write_window: int = 0
    chase_bytes: int = 0
    parallel: bool = False
    counting: bool = False


@dataclass(frozen=True, slots=True)
class Counters:
    """What was done since the last setting was taken, and the seconds that took."""

    seconds: float = 0.0
    walked_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    chased_loads: int = 0
    counted_steps: int = 0


class Load(Protocol):
    """What generator and probe need of the process; tests have one that is none."""

    def apply(self, work: Work) -> None:
        """Asks for `work` in place of what was asked for before; returns when that has begun."""

    def counters(self) -> Counters:
        """What was done since then."""

    def stop(self) -> None:
        """Ends the process. Nothing else may be called afterwards but this."""


class LoadProcess:
    """A child process pinned to `core`, with buffers for a last-level cache of `llc_bytes`: that much for the resident set and
    `STREAM_FACTOR` times as much for each stream. It is killed with the thread that starts it here, by the system if need be.

    Raises UsageError for a core that this process may not use, EnvironmentProblem if the process does not come up.
    """

    def __init__(self, core: int, llc_bytes: int) -> None:
        allowed = os.sched_getaffinity(0)
        if core not in allowed:
            raise UsageError(f"core {core} is not among the cores this process may use ({_listed(allowed)}); name one of these")
        if llc_bytes < loops.GRANULE_BYTES:
            raise UsageError(f"a last-level cache of {llc_bytes} bytes is none; give its size in bytes")
        self.core = core
        self._walk_bytes = align(llc_bytes, HUGE_PAGE_BYTES)
        self._stream_bytes = align(STREAM_FACTOR * llc_bytes, HUGE_PAGE_BYTES)
        size = loops.WORDS * 8
        memory = os.memfd_create("mvcompile-load")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            os.ftruncate(memory, size)
            self._map = mmap.mmap(memory, size)
            self._words = memoryview(self._map).cast("q")
            numbers = (core, memory, self._wake, os.getpid(), self._walk_bytes, self._stream_bytes)
            command = [sys.executable, "-c", _START, *map(str, numbers), *sys.path]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=(memory, self._wake)
            )
        except OSError as error:
            os.close(self._wake)
            raise EnvironmentProblem(f"cannot start a process that loads the caches: {error.strerror}") from error
        finally:
            os.close(memory)
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The child's process number."""
        return self._process.pid

    def _await_ready(self) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        said = self._process.stdout.readline().decode(errors="replace").strip() if readable else f"nothing in {START_S:.0f} s"
        if said != "ready":
            raise EnvironmentProblem(
                f"the process that loads the caches from core {self.core} did not start ({said or 'it ended'}); it needs "
                f"{(self._walk_bytes + 2 * self._stream_bytes) >> 20} MiB of memory, and 'mvcompile[compile]' installed"
            )

    def apply(self, work: Work) -> None:
        """See `Load`. Raises UsageError for sizes the buffers do not have, EnvironmentProblem if the process is gone or stuck."""
        words = self._words
        for word, value in self._settings(work).items():
            words[word] = value
        epoch = words[loops.EPOCH] + 1
        words[loops.EPOCH] = epoch
        os.eventfd_write(self._wake, 1)
        limit = time.monotonic() + TAKE_S
        while words[loops.TAKEN] != epoch:
            self._require_alive()
            if time.monotonic() > limit:
                raise EnvironmentProblem(
                    f"the process that loads the caches got no time on core {self.core} in {TAKE_S:.0f} s; keep that core free"
                )
            time.sleep(20e-6)

    def _settings(self, work: Work) -> dict[int, int]:
        return {
            loops.RESIDENT_BYTES: _size("resident set", work.resident_bytes, self._walk_bytes),
            loops.READ_RATE: _rate(work.read_rate),
            loops.READ_WINDOW: _size("window of reads", work.read_window or self._stream_bytes, self._stream_bytes),
            loops.WRITE_RATE: _rate(work.write_rate),
            loops.WRITE_WINDOW: _size("window of writes", work.write_window or self._stream_bytes, self._stream_bytes),
            loops.CHASE_BYTES: _size("chain", work.chase_bytes, self._stream_bytes),
            loops.FLAGS: loops.COUNTING * work.counting | loops.PARALLEL * work.parallel,
        }

    def counters(self) -> Counters:
        """See `Load`. Raises EnvironmentProblem if the process is gone."""
        self._require_alive()
        words = self._words
        counts = words[loops.WALKED_BYTES : loops.COUNTED_STEPS + 1].tolist()
        return Counters((words[loops.NOW_NS] - words[loops.STARTED_NS]) * 1e-9, *counts)

    def _require_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise EnvironmentProblem(
                f"the process that loads the caches from core {self.core} has ended (exit code {code}); start another one"
            )

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """See `Load`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._wake >= 0:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._words.release()
            self._map.close()
            os.close(self._wake)
            self._wake = -1


def _size(what: str, size: int, limit: int) -> int:
    if not 0 <= size <= limit:
        raise UsageError(f"a {what} of {size} bytes is not between 0 and {limit}, the size of its buffer")
    return size // loops.GRANULE_BYTES * loops.GRANULE_BYTES


def _rate(rate: float) -> int:
    return -1 if rate < 0 else round(rate)


def _listed(cores: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
