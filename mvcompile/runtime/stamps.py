"""What the clock read before and after each step of the last runs.

The driver writes them as it runs (40 ns a step), so that nothing has to be done after a run but to count it: in the caches that
a run leaves behind Python needs some microseconds for every call of numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.memory import Array

ROWS = 64
_RUNS, _DUE = range(2)
_SECOND_NS = 1_000_000_000
_NANOSECONDS = np.array((_SECOND_NS, 1), np.int64)
"""Of the seconds and the rest in a `timespec`."""


class StampRing:
    """The stamps of the last `ROWS` runs of a program with `steps` steps. One run at a time.

    The stamps are `steps` + 1 `timespec`s of CLOCK_MONOTONIC. `listener` is called after a run that ended at or after `due_ns`
    (nanoseconds of that clock). What it raises, the run raises. `words` is what native code counts and looks at
    (`entrance_ir.py`: RING).
    """

    def __init__(self, steps: int, listener: Callable[[], object]) -> None:
        self._stamps = np.zeros((ROWS, steps + 1, 2), np.int64)
        first, stride = memory.address(self._stamps), self._stamps.strides[0]
        self.words = np.array((0, 0, first, stride, ROWS), np.int64)
        self.listener = listener
        self._taken = 0

    @property
    def runs(self) -> int:
        """How many there were."""
        return int(self.words[_RUNS])

    @property
    def due_ns(self) -> int:
        """When the listener is to be called next."""
        return int(self.words[_DUE])

    @due_ns.setter
    def due_ns(self, due_ns: int) -> None:
        self.words[_DUE] = due_ns

    @property
    def address(self) -> int:
        """Where the next run leaves its stamps."""
        runs, _, first, stride, rows = self.words.tolist()
        return int(first + stride * (runs % rows))

    def advance(self) -> None:
        """A run has left its stamps."""
        self.words[_RUNS] += 1
        if time.monotonic_ns() >= self.due_ns:
            self.listener()

    def write(self, stamps_ns: Sequence[int]) -> None:
        """Leave the stamps of a run that no driver has left, one before the first step and one after each."""
        row = self._stamps[self.runs % ROWS]
        row[:, 0], row[:, 1] = np.divmod(np.array(stamps_ns, np.int64), _SECOND_NS)

    def take(self) -> Array:
        """The stamps of the runs since the last call, ns (run, step; int64): those of the last `ROWS` - 1 if there were more."""
        # The oldest row may be one that a run writes at this moment, if another thread than the runs' own calls this.
        runs = self.runs
        first, last = max(self._taken, runs - ROWS + 1) % ROWS, runs % ROWS
        few = runs - self._taken
        self._taken = runs
        if few == 0:
            rows = self._stamps[:0]
        elif first < last:
            rows = self._stamps[first:last]
        else:
            rows = np.concatenate((self._stamps[first:], self._stamps[:last]))
        stamps: Array = rows @ _NANOSECONDS
        return stamps
