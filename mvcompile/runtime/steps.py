"""The steps of a program and two ways to run them: by the bundle's own driver, or one by one from Python."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.native import Kernel

Arguments = Sequence[Sequence[Any]]
"""Per step, per parameter: a tensor."""

_TENSOR = 70  # kTVMFFITensor of tvm-ffi's c_api.h
_NANOSECONDS = np.array((10**9, 1), np.int64)
"""Of the seconds and the rest in a `timespec`."""
_FUNCTION, _ARGUMENTS, _COUNT = range(3)  # the words of a step


class StepError(Exception):
    """The kernel of step `step` raised the error that is this one's cause."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Steps(Protocol):
    """Steps with their arguments and the kernel that each calls next. `select` may be called at any time, from any thread; of the
    other methods only one at a time."""

    def select(self, step: int, kernel: Kernel) -> None:
        """Let `step` call `kernel` from its next turn on. One store, which no reader can see half of."""

    def selected(self) -> list[Kernel]:
        """The kernel of each step."""

    def bind(self, step: int, position: int, tensor: Any) -> None:
        """Make `tensor` the argument at `position` of `step`."""

    def run(self) -> None:
        """Run the steps. Raises StepError."""

    def run_timed(self) -> list[float]:
        """Run the steps and return each one's seconds. Raises StepError."""


class PythonSteps:
    """Steps that Python calls one by one."""

    def __init__(self, kernels: Sequence[Kernel], arguments: Arguments) -> None:
        self._kernels = list(kernels)
        self._arguments = [list(row) for row in arguments]

    def select(self, step: int, kernel: Kernel) -> None:
        self._kernels[step] = kernel

    def selected(self) -> list[Kernel]:
        return self._kernels.copy()

    def bind(self, step: int, position: int, tensor: Any) -> None:
        self._arguments[step][position] = tensor

    def run(self) -> None:
        step = 0
        try:
            for step, arguments in enumerate(self._arguments):
                self._kernels[step](*arguments)
        except Exception as error:
            raise StepError(step) from error

    def run_timed(self) -> list[float]:
        clock, seconds, step = time.perf_counter, [], 0
        try:
            for step, arguments in enumerate(self._arguments):
                before = clock()
                self._kernels[step](*arguments)
                seconds.append(clock() - before)
        except Exception as error:
            raise StepError(step) from error
        return seconds


class NativeSteps:
    """Steps that the bundle's driver runs (`driver.py` describes the words)."""

    def __init__(self, driver: Kernel, kernels: Sequence[Kernel], arguments: Arguments) -> None:
        self._driver = driver
        self._kernels: dict[int, Kernel] = {}
        self._arguments = [list(row) for row in arguments]  # the words hold addresses: these keep what they point to
        counts = [len(row) for row in arguments]
        self._first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._values = np.zeros((int(self._first[-1]), 2), np.uint64)
        self._values[:, 0] = _TENSOR
        self._steps = np.zeros((len(counts), 3), np.uint64)
        self._steps[:, _ARGUMENTS] = memory.address(self._values) + self._values.strides[0] * self._first[:-1]
        self._steps[:, _COUNT] = counts
        self._times = np.zeros((len(counts) + 1, 2), np.int64)
        self._steps_address, self._times_address = (ctypes.c_void_p(memory.address(one)) for one in (self._steps, self._times))
        for step, row in enumerate(arguments):
            self.select(step, kernels[step])
            for position, tensor in enumerate(row):
                self.bind(step, position, tensor)

    def select(self, step: int, kernel: Kernel) -> None:
        handle = _handle(kernel)
        self._kernels[handle] = kernel  # before the store: whoever reads the handle has to find the kernel
        self._steps[step, _FUNCTION] = handle

    def selected(self) -> list[Kernel]:
        return [self._kernels[handle] for handle in self._steps[:, _FUNCTION].tolist()]

    def bind(self, step: int, position: int, tensor: Any) -> None:
        self._arguments[step][position] = tensor
        self._values[self._first[step] + position, 1] = _handle(tensor)

    def run(self) -> None:
        self._run(None)

    def run_timed(self) -> list[float]:
        self._run(self._times_address)
        stamps_ns = self._times @ _NANOSECONDS
        seconds: list[float] = (np.diff(stamps_ns) * 1e-9).tolist()
        return seconds

    def _run(self, times: ctypes.c_void_p | None) -> None:
        stopped = self._driver(self._steps_address, 0, len(self._steps), times)
        if stopped != len(self._steps):
            self._fail(int(stopped))  # type: ignore[call-overload]

    def _fail(self, step: int) -> None:
        """The driver only says which step: its error comes from calling it once more."""
        try:
            self.selected()[step](*self._arguments[step])
        except Exception as error:
            raise StepError(step) from error
        raise StepError(step)


def _handle(value: Any) -> int:
    return int(value.__chandle__())
