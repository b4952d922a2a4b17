"""Arrays for a run to leave its outputs in, made before there is a run to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.memory import Array
from mvcompile.types import TensorSpec

_AHEAD = 16
_AHEAD_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Outputs:
    """C-contiguous arrays for a model's outputs."""

    by_name: dict[str, Array]
    arrays: Sequence[Array]
    """In the model's order."""
    table: Array
    """Their addresses (uint64)."""
    address: int
    """Of the table."""


class OutputPool:
    """New arrays for the outputs of one model. One thread at a time.

    A new array and its address cost 1 us in a warm loop but 80 us in the caches that a run leaves behind, so small ones are made
    some runs ahead, several at a time.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = [(spec.name, spec.shape, np.dtype(spec.dtype)) for spec in specs]
        self._ahead = max(1, min(_AHEAD, _AHEAD_BYTES // max(1, sum(spec.nbytes for spec in specs))))
        self._ready: list[Outputs] = []

    def take(self) -> Outputs:
        """Arrays that nobody else has."""
        if not self._ready:
            self._ready = [self._new() for _ in range(self._ahead)]
        return self._ready.pop()

    def of(self, arrays: Sequence[Array]) -> Outputs:
        """These arrays, of the right dtypes and shapes and C-contiguous."""
        table = np.array([memory.address(array) for array in arrays], np.uint64)
        names = (name for name, _, _ in self._specs)
        return Outputs(dict(zip(names, arrays, strict=True)), arrays, table, memory.address(table))

    def _new(self) -> Outputs:
        return self.of([np.empty(shape, dtype) for _, shape, dtype in self._specs])
