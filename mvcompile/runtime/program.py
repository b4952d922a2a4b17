"""A bundle's plan, bound to memory: what is done once at load so that a step of a run is one function call."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mvcompile.bundle.schema import ARENA, CONSTANT, INPUT, KERNELS, Manifest, Plan, Task
from mvcompile.errors import BundleError
from mvcompile.runtime import memory
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Kernel, Library

Kernels = tuple[tuple[Kernel, ...], ...]
"""Per task, per variant."""


def find_kernels(tasks: Sequence[Task], library: Library) -> Kernels:
    """Every variant's function. Raises BundleError if the library lacks one."""
    return tuple(tuple(_find(variant.symbol, library) for variant in task.variants) for task in tasks)


def _find(symbol: str, library: Library) -> Kernel:
    kernel = library.function(symbol)
    if kernel is None:
        raise BundleError(f"{KERNELS} has no function {symbol!r}, which a variant of the manifest names: compile the model again")
    return kernel


@dataclass(frozen=True, slots=True)
class _InputUse:
    """A step that reads model inputs: its arguments with holes, and which input goes into which hole."""

    step: int
    template: tuple[Any, ...]
    holes: tuple[tuple[int, int], ...]


class Program:
    """Steps ready to run. Only `select` and `selected` may be called while a run is in flight; runs must not overlap.

    `selected[i]` is the kernel that step i calls next: storing one there is the whole act of switching a layer.
    """

    def __init__(self, manifest: Manifest, kernels: Kernels, weights: memoryview) -> None:
        plan = manifest.plan
        self._layers = tuple(step.layer for step in plan.steps)
        self._choices = tuple(kernels[step.task] for step in plan.steps)
        self._variant_of = [{id(kernel): index for index, kernel in enumerate(choices)} for choices in self._choices]
        self._selected = [choices[0] for choices in self._choices]
        self._input_buffers: list[tuple[Array, Any] | None] = [None] * len(manifest.model.inputs)
        self._inputs = manifest.model.inputs
        arrays = _arrays(plan, weights)
        self._output_arrays = [arrays[index] for index in plan.outputs]
        self._output_inputs = [plan.tensors[index].offset if arrays[index] is None else -1 for index in plan.outputs]
        self._arguments, self._uses = _arguments(plan, arrays)

    def select(self, step: int, variant: int) -> None:
        """Use `variant` of step `step` from its next call on. Raises IndexError after `clear`."""
        self._selected[step] = self._choices[step][variant]

    def selected(self) -> tuple[int, ...]:
        """The selected variant of each step; nothing after `clear`."""
        return tuple(index[id(kernel)] for index, kernel in zip(self._variant_of, self._selected.copy(), strict=False))

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run all steps on `inputs` (dtypes and shapes are right) and return copies of the outputs, in the model's order."""
        steps = iter(self._bound(inputs))
        try:
            # Both iterators read their list when they get to an item, so a kernel stored meanwhile is called.
            for kernel, arguments in zip(self._selected, steps, strict=True):
                kernel(*arguments)
        except Exception as error:
            self._fail(operator.length_hint(steps), error)
        return self._outputs(inputs)

    def run_profiled(self, inputs: Sequence[Array], clock: Callable[[], float] = time.perf_counter) -> tuple[float, ...]:
        """Run all steps on `inputs` and return each one's seconds, the call included."""
        steps = iter(self._bound(inputs))
        seconds = []
        try:
            for kernel, arguments in zip(self._selected, steps, strict=True):
                begin = clock()
                kernel(*arguments)
                seconds.append(clock() - begin)
        except Exception as error:
            self._fail(operator.length_hint(steps), error)
        return tuple(seconds)

    def clear(self) -> None:
        """Drop every reference into the bundle's and the arena's memory, and to the kernels."""
        for references in (
            self._selected,
            self._arguments,
            self._uses,
            self._output_arrays,
            self._variant_of,
            self._input_buffers,
        ):
            references.clear()
        self._choices = ()

    def _bound(self, inputs: Sequence[Array]) -> list[tuple[Any, ...]]:
        if not self._uses:
            return self._arguments
        tensors = [self._input_tensor(index, array) for index, array in enumerate(inputs)]
        arguments = self._arguments.copy()
        for use in self._uses:
            values = list(use.template)
            for position, index in use.holes:
                values[position] = tensors[index]
            arguments[use.step] = tuple(values)
        return arguments

    def _input_tensor(self, index: int, array: Array) -> Any:
        in_place = memory.bindable(array)
        if in_place is not None:
            return in_place
        buffer = self._input_buffers[index]
        if buffer is None:
            spec = self._inputs[index]
            aligned = memory.allocate_array(spec.dtype, spec.shape)
            buffer = self._input_buffers[index] = (aligned, memory.tensor(aligned))
        np.copyto(buffer[0], array)
        return buffer[1]

    def _outputs(self, inputs: Sequence[Array]) -> list[Array]:
        sources = zip(self._output_arrays, self._output_inputs, strict=True)
        return [np.array(inputs[index] if array is None else array, order="C") for array, index in sources]

    def _fail(self, remaining: int, error: Exception) -> NoReturn:
        step = len(self._arguments) - remaining - 1
        reason = " ".join(str(error).split())
        raise BundleError(f"the kernel of layer {self._layers[step]!r} failed: {reason}; compile the model again") from error


def _arrays(plan: Plan, weights: memoryview) -> list[Array | None]:
    """The memory of each tensor of the plan, None for those that each run brings."""
    storages = {tensor.storage for tensor in plan.tensors}
    blocks = {}
    if CONSTANT in storages:
        blocks[CONSTANT] = np.frombuffer(weights, np.uint8)
    if ARENA in storages:
        blocks[ARENA] = memory.allocate(plan.arena_bytes)
    return [
        None if one.storage == INPUT else memory.array_at(blocks[one.storage], one.offset, one.dtype, one.shape)
        for one in plan.tensors
    ]


def _arguments(plan: Plan, arrays: list[Array | None]) -> tuple[list[tuple[Any, ...]], list[_InputUse]]:
    """The arguments of each step, and the steps whose arguments are complete only when a run brings its inputs."""
    tensors = [None if array is None else memory.tensor(array) for array in arrays]
    arguments = [tuple(tensors[index] for index in step.arguments) for step in plan.steps]
    uses = []
    for number, step in enumerate(plan.steps):
        holes = [
            (position, plan.tensors[index].offset) for position, index in enumerate(step.arguments) if tensors[index] is None
        ]
        if holes:
            uses.append(_InputUse(number, arguments[number], tuple(holes)))
    return arguments, uses
