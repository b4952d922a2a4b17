"""The steps of a program and two ways to run them: by the bundle's own driver, or one by one from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.cpus import PinError, mask_of
from mvcompile.runtime.driver import RUN_WORDS
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Kernel
from mvcompile.runtime.outputs import Outputs
from mvcompile.runtime.stamps import StampRing

Arguments = Sequence[Sequence[Any]]
"""Per step, per parameter: a tensor."""

_TENSOR = 70  # kTVMFFITensor of tvm-ffi's c_api.h
_NANOSECONDS = np.array((10**9, 1), np.int64)
"""Of the seconds and the rest in a `timespec`."""
_FUNCTION, _ARGUMENTS, _COUNT = range(3)  # the words of a step
_MASK = 4  # the word of a run that has the address of its CPU mask; the next one has its length


class StepError(Exception):
    """The kernel of step `step` raised the error that is this one's cause."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Steps(Protocol):
    """Steps with their arguments, the kernel that each calls next, and the arrays that hold the model's outputs after them.

    `select`, `prepare` and `select_all` may be called at any time, from any thread; of the other methods only one at a time."""

    def select(self, step: int, kernel: Kernel) -> None:
        """Let `step` call `kernel` from its next turn on. One store, which no reader can see half of."""

    def prepare(self, kernels: Sequence[Kernel]) -> Any:
        """What `select_all` takes to let each step call its one of `kernels`."""

    def select_all(self, prepared: Any) -> None:
        """Do for all steps what `select` does for one: a store for each, no more."""

    def selected(self) -> list[Kernel]:
        """The kernel of each step."""

    def bind(self, step: int, position: int, tensor: Any) -> None:
        """Make `tensor` the argument at `position` of `step`."""

    def read_output(self, which: int, source: Array) -> None:
        """Let output `which` be what `source`, C-contiguous, holds after the steps."""

    def record(self, ring: StampRing | None) -> None:
        """Let every `run` leave its stamps in `ring` from now on, or none."""

    def pin(self, core: int | None) -> None:
        """Pin the thread that runs to `core` meanwhile, from now on, if these steps can; not if that is None."""

    def run(self, outputs: Outputs) -> None:
        """Run the steps and copy what they leave to `outputs`. Raises StepError, PinError, and what the ring's listener does."""

    def run_timed(self, outputs: Outputs) -> list[float]:
        """Do the same, but leave no stamps, and return each step's seconds."""


class PythonSteps:
    """Steps that Python calls one by one."""

    def __init__(self, kernels: Sequence[Kernel], arguments: Arguments, sources: Sequence[Array]) -> None:
        self._kernels = list(kernels)
        self._arguments = [list(row) for row in arguments]
        self._sources = list(sources)
        self._ring: StampRing | None = None

    def select(self, step: int, kernel: Kernel) -> None:
        self._kernels[step] = kernel

    def prepare(self, kernels: Sequence[Kernel]) -> Any:
        return list(kernels)

    def select_all(self, prepared: Any) -> None:
        self._kernels[:] = prepared

    def selected(self) -> list[Kernel]:
        return self._kernels.copy()

    def bind(self, step: int, position: int, tensor: Any) -> None:
        self._arguments[step][position] = tensor

    def read_output(self, which: int, source: Array) -> None:
        self._sources[which] = source

    def record(self, ring: StampRing | None) -> None:
        self._ring = ring

    def pin(self, core: int | None) -> None:
        """They cannot."""

    def run(self, outputs: Outputs) -> None:
        if self._ring is None:
            self._run(outputs, lambda kernel, arguments: kernel(*arguments))
        else:
            self._ring.write(self._run_stamped(outputs))
            self._ring.advance()

    def run_timed(self, outputs: Outputs) -> list[float]:
        return [(after - before) * 1e-9 for before, after in pairwise(self._run_stamped(outputs))]

    def _run_stamped(self, outputs: Outputs) -> list[int]:
        clock = time.monotonic_ns
        stamps_ns = [clock()]

        def call(kernel: Kernel, arguments: Sequence[Any]) -> None:
            kernel(*arguments)
            stamps_ns.append(clock())

        self._run(outputs, call)
        return stamps_ns

    def _run(self, outputs: Outputs, call: Callable[[Kernel, Sequence[Any]], object]) -> None:
        step = 0
        try:
            for step, arguments in enumerate(self._arguments):
                call(self._kernels[step], arguments)
        except Exception as error:
            raise StepError(step) from error
        for array, source in zip(outputs.arrays.values(), self._sources, strict=True):
            array[...] = source


class NativeSteps:
    """Steps that the bundle's driver runs (`driver.py` describes the words).

    `run_address` is where the driver finds all of it."""

    def __init__(self, driver: Kernel, kernels: Sequence[Kernel], arguments: Arguments, sources: Sequence[Array]) -> None:
        self._driver = driver
        self._kernels: dict[int, Kernel] = {}
        self._known: dict[int, tuple[Kernel, int]] = {}
        self._arguments = [list(row) for row in arguments]  # the words hold addresses: these keep what they point to
        counts = [len(row) for row in arguments]
        self._first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._values = np.zeros((int(self._first[-1]), 2), np.uint64)
        self._values[:, 0] = _TENSOR
        self._steps = np.zeros((len(counts), 3), np.uint64)
        self._steps[:, _ARGUMENTS] = memory.address(self._values) + self._values.strides[0] * self._first[:-1]
        self._steps[:, _COUNT] = counts
        self._functions = self._steps[:, _FUNCTION]
        self._sources = np.zeros((len(sources), 2), np.uint64)
        self._held = list(sources)
        self._words = np.zeros(RUN_WORDS, np.uint64)
        self._words[:_MASK] = memory.address(self._steps), len(counts), memory.address(self._sources), len(sources)
        self.pin(None)
        self._ring: StampRing | None = None
        self._count, self.run_address = len(counts), memory.address(self._words)
        self._times = np.zeros((len(counts) + 1, 2), np.int64)
        self._times_address = 0
        for which, source in enumerate(sources):
            self.read_output(which, source)
        for step, row in enumerate(arguments):
            self.select(step, kernels[step])
            for position, tensor in enumerate(row):
                self.bind(step, position, tensor)

    def select(self, step: int, kernel: Kernel) -> None:
        self._functions[step] = self._handle_of(kernel)

    def prepare(self, kernels: Sequence[Kernel]) -> Any:
        return np.array([self._handle_of(kernel) for kernel in kernels], np.uint64)

    def select_all(self, prepared: Any) -> None:
        # The words are 24 bytes apart and aligned, so that numpy stores them one by one, each whole.
        self._functions[:] = prepared

    def _handle_of(self, kernel: Kernel) -> int:
        """Before the handle is stored: whoever reads it has to find the kernel."""
        known = self._known.get(id(kernel))
        if known is None:
            handle = _handle(kernel)
            known = self._known[id(kernel)] = (kernel, handle)  # which keeps the kernel, and so its id
            self._kernels[handle] = kernel
        return known[1]

    def selected(self) -> list[Kernel]:
        return [self._kernels[handle] for handle in self._steps[:, _FUNCTION].tolist()]

    def bind(self, step: int, position: int, tensor: Any) -> None:
        self._arguments[step][position] = tensor
        self._values[self._first[step] + position, 1] = _handle(tensor)

    def read_output(self, which: int, source: Array) -> None:
        self._held[which] = source
        self._sources[which] = memory.address(source), source.nbytes

    def record(self, ring: StampRing | None) -> None:
        self._ring = ring

    def pin(self, core: int | None) -> None:
        self._core = core
        self._mask = np.frombuffer(b"" if core is None else mask_of(core), np.uint8)
        self._words[_MASK:] = 0 if core is None else memory.address(self._mask), self._mask.size

    def run(self, outputs: Outputs) -> None:
        ring = self._ring
        stopped = self._driver(self.run_address, outputs.table, self._times_address if ring is None else ring.address)
        if stopped != self._count:
            self._fail(stopped)
        if ring is not None:
            ring.advance()

    def run_timed(self, outputs: Outputs) -> list[float]:
        stopped = self._driver(self.run_address, outputs.table, memory.address(self._times))
        if stopped != self._count:
            self._fail(stopped)
        stamps_ns = self._times @ _NANOSECONDS
        seconds: list[float] = (np.diff(stamps_ns) * 1e-9).tolist()
        return seconds

    def time_every_run(self) -> None:
        """Let `run` too read the clock after each step, and leave it in `_times`: for benchmarks."""
        self._times_address = memory.address(self._times)

    def _fail(self, stopped: Any) -> NoReturn:
        """The driver only says which step: its error comes from calling it once more."""
        step = int(stopped)
        if step < 0:
            assert self._core is not None
            raise PinError(self._core)
        try:
            self.selected()[step](*self._arguments[step])
        except Exception as error:
            raise StepError(step) from error
        raise StepError(step)


def _handle(value: Any) -> int:
    return int(value.__chandle__())
