"""The threads among which a session of several cores shares the parallel loops of its kernels (`team_ir.py`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime import memory
from mvcompile.runtime.cpus import mask_of
from mvcompile.runtime.native import Kernel, Library
from mvcompile.runtime.team_ir import HEAD_LINES, LEAVE, LINE, TEAM, WORK, word

SHARES_PER_THREAD = 8
IDLE_NS = 200_000
"""More than what lies between two parallel loops of a network, and between two runs that follow each other. A thread that sleeps
starts 40 to 100 us late; meanwhile the others do its parts."""


@dataclass(frozen=True, slots=True)
class TeamCalls:
    """The functions of one kernels.so that `team_ir.py` describes."""

    team: Kernel
    work: Kernel
    leave: Kernel


def team_calls(library: Library) -> TeamCalls | None:
    """Those of `library`; None if it was built without them."""
    found = [library.function(symbol) for symbol in (TEAM, WORK, LEAVE)]
    return None if None in found else TeamCalls(*found)  # type: ignore[arg-type]


class Team:
    """One thread for each of `cores` but the first, pinned to it. The thread that runs the steps, on the first core, is none of
    them.

    `address` is what `TeamCalls.team` takes."""

    def __init__(self, calls: TeamCalls, cores: Sequence[int], name: str) -> None:
        """Raises EnvironmentProblem if a thread cannot be started or pinned."""
        lines = memory.allocate((HEAD_LINES + len(cores)) * LINE).view(np.uint64).reshape(-1, LINE // 8)
        masks = np.stack([np.frombuffer(mask_of(core), np.uint8) for core in cores])
        words = lines.reshape(-1)
        words[word("THREADS")] = len(cores)
        words[word("SHARES")] = SHARES_PER_THREAD * len(cores)
        words[word("IDLE")] = IDLE_NS
        words[word("BYTES")] = masks.shape[1]
        lines[HEAD_LINES:, word("MASK")] = [memory.address(mask) for mask in masks]
        self.address = memory.address(words)
        self._held = (words, masks)
        self._leave: Kernel | None = calls.leave
        self._threads: list[threading.Thread] = []
        for number, core in enumerate(cores[1:], 1):
            self._start(calls.work, number, core, name)

    def _start(self, work: Kernel, number: int, core: int, name: str) -> None:
        begun = threading.Event()
        failure: list[OSError] = []

        def serve(held: object = self._held) -> None:
            """Holds what its native code uses: nobody waits for it when a session is dropped."""
            line = (HEAD_LINES + number) * LINE // 8
            try:
                os.sched_setaffinity(0, (core,))
                words[line + word("THREAD")] = threading.get_native_id()
            except OSError as error:
                failure.append(error)
                return
            finally:
                begun.set()
            work(memory.address(words), number)

        words, _ = self._held
        thread = threading.Thread(target=serve, name=f"{name} {number}", daemon=True)
        try:
            thread.start()
            begun.wait()
            if failure:
                raise failure[0]
        except (RuntimeError, OSError) as error:
            self.stop()
            raise EnvironmentProblem(
                f"no thread of the session could be started on core {core}: {error}; raise the limit (ulimit -u), or name other "
                "cores=..."
            ) from error
        self._threads.append(thread)

    def stop(self) -> None:
        """Let the threads leave; not during a run. Returns at once."""
        leave, self._leave = self._leave, None  # which keeps the library
        if leave is not None:
            leave(self.address)

    def join(self) -> None:
        """Wait until they have left."""
        for thread in self._threads:
            thread.join()
