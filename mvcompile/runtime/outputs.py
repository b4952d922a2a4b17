"""Arrays for a run to leave its outputs in, made before there is a run to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.memory import Array
from mvcompile.types import TensorSpec

_AHEAD = 16
_AHEAD_BYTES = 2**16


class Outputs(NamedTuple):
    """Where a run leaves its outputs. Few and small objects: each one that a run lets go costs it a microsecond."""

    arrays: dict[str, Array]
    """C-contiguous, in the order of the model's outputs, each name once."""
    table: int
    """Address of their addresses (64-bit words)."""


class OutputPool:
    """New arrays for the outputs of one model. One thread at a time.

    A new array and its address cost 1 us in a warm loop but 80 us in the caches that a run leaves behind, so small ones are made
    some runs ahead, several at a time.
    """

    def __init__(self, specs: Sequence[TensorSpec], most: int = _AHEAD, most_bytes: int = _AHEAD_BYTES) -> None:
        """`ahead` is how many are made at a time: `most`, or fewer that take `most_bytes` together, but one at least."""
        self._specs = {spec.name: (spec.shape, np.dtype(spec.dtype)) for spec in specs}
        self.ahead = max(1, min(most, most_bytes // max(1, sum(spec.nbytes for spec in specs))))
        self._tables = np.zeros((self.ahead, max(1, len(self._specs))), np.uint64)
        self._own = np.zeros(max(1, len(self._specs)), np.uint64)
        self._ready: list[Outputs] = []

    def take(self) -> Outputs:
        """Arrays that nobody else has. The table is good until the next call but as many as are made ahead."""
        if not self._ready:
            self._ready = [self._into(table, self._new()) for table in self._tables]
        return self._ready.pop()

    def of(self, arrays: dict[str, Array]) -> Outputs:
        """These arrays, of the right dtypes and shapes and C-contiguous. The table is good until the next call."""
        return self._into(self._own, arrays)

    def _new(self) -> dict[str, Array]:
        return {name: np.empty(shape, dtype) for name, (shape, dtype) in self._specs.items()}

    def _into(self, table: Array, arrays: dict[str, Array]) -> Outputs:
        table[: len(arrays)] = [memory.address(array) for array in arrays.values()]
        return Outputs(arrays, memory.address(table))
