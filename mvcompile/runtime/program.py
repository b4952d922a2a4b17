"""A bundle's plan, bound to memory: what is done once at load so that a run has next to nothing left to do."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mvcompile.bundle.schema import ARENA, CONSTANT, INPUT, KERNELS, Manifest, Plan, Task, Tensor
from mvcompile.errors import BundleError
from mvcompile.runtime import memory
from mvcompile.runtime.driver import DRIVER
from mvcompile.runtime.entrance import Enter, no_entrance, open_entrance
from mvcompile.runtime.entrance_ir import ENTRANCE
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Kernel, Library
from mvcompile.runtime.outputs import OutputPool, Outputs
from mvcompile.runtime.stamps import StampRing
from mvcompile.runtime.steps import NativeSteps, PythonSteps, StepError, Steps
from mvcompile.runtime.team import TeamCalls, team_calls

Kernels = tuple[tuple[Kernel, ...], ...]
"""Per task, per variant."""

_PREPARED = 64
"""How many selections are kept ready to be stored: more than any model has levels."""

_Result = TypeVar("_Result")


def load_program(manifest: Manifest, library: Library, weights: memoryview) -> Program:
    """The program of a bundle.

    Raises BundleError if the library lacks a kernel, EnvironmentProblem for lack of memory.
    """
    kernels = _find_kernels(manifest.tasks, library)
    return Program(manifest, kernels, weights, library.function(DRIVER), library.function(ENTRANCE), team_calls(library))


def _find_kernels(tasks: Sequence[Task], library: Library) -> Kernels:
    return tuple(tuple(_find(variant.symbol, library) for variant in task.variants) for task in tasks)


def _find(symbol: str, library: Library) -> Kernel:
    kernel = library.function(symbol)
    if kernel is None:
        raise BundleError(f"{KERNELS} has no function {symbol!r}, which a variant of the manifest names: compile the model again")
    return kernel


class Program:
    """Steps ready to run. Only `select`, `select_all` and `selected` may be called while a run is in flight; runs must not
    overlap.

    `changed_ns` is when the selection was last changed (CLOCK_MONOTONIC): a run that began later has had all of it from its first
    step on. Whoever reads both holds `changing`.

    `entrance` is another way to run it, None if there is none: not during a run, and no run while it is open. `pins` says whether
    it can pin the thread that runs (`settle`); `team_calls` are what shares its parallel loops among threads, None if the bundle
    has nothing but TVM's pool for that.
    """

    def __init__(
        self,
        manifest: Manifest,
        kernels: Kernels,
        weights: memoryview,
        driver: Kernel | None,
        entrance: Kernel | None = None,
        team_calls: TeamCalls | None = None,
    ) -> None:
        plan = manifest.plan
        self._layers = tuple(step.layer for step in plan.steps)
        self._choices = tuple(kernels[step.task] for step in plan.steps)
        self._variant_of = {id(kernel): index for variants in kernels for index, kernel in enumerate(variants)}
        self.input_buffers = [memory.allocate_array(spec.dtype, spec.shape) for spec in manifest.model.inputs]
        self._own = tuple(zip((spec.name for spec in manifest.model.inputs), self.input_buffers, strict=True))
        self._input_tensors = [memory.tensor(buffer) for buffer in self.input_buffers]
        self._input_uses = _input_uses(plan)
        results = list(dict(zip((spec.name for spec in manifest.model.outputs), plan.outputs, strict=True)).values())
        self._passed_on = _passed_on(plan, results)
        self._pool = OutputPool(manifest.model.outputs)
        arrays = _arrays(plan, weights, self.input_buffers)
        first = [choices[0] for choices in self._choices]
        tensors = [memory.tensor(array) for array in arrays]
        arguments = [[tensors[index] for index in step.arguments] for step in plan.steps]
        sources = [arrays[index] for index in results]
        self.pins = driver is not None
        self.team_calls = None if driver is None else team_calls
        self._steps: Steps = (
            PythonSteps(first, arguments, sources) if driver is None else NativeSteps(driver, first, arguments, sources)
        )
        self.entrance = (
            open_entrance(entrance, self._steps.run_address, len(plan.steps), dict(self._own), manifest.model.outputs)
            if isinstance(self._steps, NativeSteps)
            else None
        )
        self._prepared: dict[tuple[int, ...], Any] = {}
        self.changing = threading.RLock()  # of those who select: runs never wait for it. A signal handler may select as well
        self.changed_ns = time.monotonic_ns()

    def select(self, step: int, variant: int) -> None:
        """Use `variant` of step `step` from its next call on. Raises IndexError after `clear`."""
        with self.changing:
            self._steps.select(step, self._choices[step][variant])
            self.changed_ns = time.monotonic_ns()

    def select_all(self, variants: tuple[int, ...]) -> None:
        """Do that for all steps at once. Raises IndexError after `clear`."""
        with self.changing:
            prepared = self._prepared.get(variants)
            if prepared is None:
                if len(self._choices) != len(variants):
                    raise IndexError(f"{len(variants)} variants for {len(self._choices)} steps")
                prepared = self._steps.prepare([kernels[one] for kernels, one in zip(self._choices, variants, strict=True)])
                if len(self._prepared) >= _PREPARED:
                    self._prepared.clear()
                self._prepared[variants] = prepared
            self._steps.select_all(prepared)
            self.changed_ns = time.monotonic_ns()

    @property
    def enter(self) -> Enter:
        """The function of `entrance`."""
        return no_entrance if self.entrance is None else self.entrance.enter

    def record(self, ring: StampRing | None) -> None:
        """Let every run leave its stamps in `ring`, or none. Not during a run."""
        self._steps.record(ring)
        if self.entrance is not None:
            self.entrance.record(ring)

    def settle(self, core: int | None, team: int = 0) -> None:
        """From now on pin the thread that runs to `core` meanwhile, if the program pins, and share parallel loops with the team
        at this address, if there is one. Not during a run."""
        self._steps.pin(core)
        if self.team_calls is not None:
            self.team_calls.team(team)

    def selected(self) -> tuple[int, ...]:
        """The selected variant of each step; nothing after `clear`."""
        with self.changing:
            variant_of = self._variant_of
            return tuple(variant_of[id(kernel)] for kernel in self._steps.selected())

    def owns(self, inputs: object) -> bool:
        """Whether `inputs` is a dict of exactly the `input_buffers`."""
        if type(inputs) is not dict or len(inputs) != len(self._own):
            return False
        for name, buffer in self._own:  # noqa: SIM110  (any() costs a frame in cold caches)
            if inputs.get(name) is not buffer:
                return False
        return True

    def run(self, inputs: Sequence[Array] | None) -> dict[str, Array]:
        """Run all steps on `inputs` (dtypes and shapes are right), or on what `input_buffers` hold if that is None, and return
        the outputs by name in new arrays."""
        outputs = self._pool.take()
        if inputs is None:
            try:
                self._steps.run(outputs)
            except StepError as error:
                raise self._failure(error) from error.__cause__
            if self.entrance is not None:
                self.entrance.wanted = True
        else:
            self._on(inputs, self._steps.run, outputs)
        return outputs.arrays

    def run_into(self, inputs_and_out: tuple[Sequence[Array], dict[str, Array]]) -> dict[str, Array]:
        """The same, but into arrays of the caller, C-contiguous and in the model's order."""
        inputs, out = inputs_and_out
        self._on(inputs, self._steps.run, self._pool.of(out))
        return out

    def run_profiled(self, inputs: Sequence[Array]) -> tuple[float, ...]:
        """Do all that `run` does, and return the seconds of each step, the call included, instead of the outputs."""
        return tuple(self._on(inputs, self._steps.run_timed, self._pool.take()))

    def clear(self) -> None:
        """Drop every reference into the bundle's and the arena's memory, and to the kernels."""
        with self.changing:
            self._choices, self._variant_of, self._steps, self._prepared = (), {}, PythonSteps((), (), ()), {}
        self.input_buffers, self._input_tensors, self._own = [], [], ()
        self._pool, self.team_calls = OutputPool(()), None
        if self.entrance is not None:
            self.entrance.clear()
            self.entrance = None

    def _on(self, inputs: Sequence[Array], run: Callable[[Outputs], _Result], outputs: Outputs) -> _Result:
        bound = [
            index for index, array in enumerate(inputs) if array is not self.input_buffers[index] and self._take(index, array)
        ]
        try:
            return run(outputs)
        except StepError as error:
            raise self._failure(error) from error.__cause__
        finally:
            for index in bound:  # the caller's arrays must not live until the next run
                self._bind(index, self._input_tensors[index], self.input_buffers[index])

    def _take(self, index: int, array: Array) -> bool:
        """Make `array` what the steps read as input `index`, in place if they can (then return True), else by a copy."""
        tensor = memory.bindable(array)
        if tensor is None:
            np.copyto(self.input_buffers[index], array)
            return False
        self._bind(index, tensor, array)
        return True

    def _bind(self, index: int, tensor: Any, array: Array) -> None:
        for step, position in self._input_uses[index]:
            self._steps.bind(step, position, tensor)
        for output in self._passed_on[index]:
            self._steps.read_output(output, array)

    def _failure(self, error: StepError) -> BundleError:
        reason = " ".join(str(error.__cause__ or "it gave no reason").split())
        return BundleError(f"the kernel of layer {self._layers[error.step]!r} failed: {reason}; compile the model again")


def _arrays(plan: Plan, weights: memoryview, inputs: Sequence[Array]) -> list[Array]:
    """The memory of each tensor of the plan."""
    storages = {tensor.storage for tensor in plan.tensors}
    blocks = {}
    if CONSTANT in storages:
        blocks[CONSTANT] = np.frombuffer(weights, np.uint8)
    if ARENA in storages:
        blocks[ARENA] = memory.allocate(plan.arena_bytes)
    return [
        inputs[one.offset] if one.storage == INPUT else memory.array_at(blocks[one.storage], one.offset, one.dtype, one.shape)
        for one in plan.tensors
    ]


def _input_of(tensor: Tensor) -> int | None:
    """The model input that a tensor is, None if it is none."""
    return tensor.offset if tensor.storage == INPUT else None


def _passed_on(plan: Plan, results: Sequence[int]) -> dict[int, list[int]]:
    """Per input of the model, which of `results` (tensors) are this very input."""
    outputs: dict[int, list[int]] = defaultdict(list)
    for output, index in enumerate(results):
        which = _input_of(plan.tensors[index])
        if which is not None:
            outputs[which].append(output)
    return outputs


def _input_uses(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Per input of the model, wherever a step reads it: the step, and the position among its arguments."""
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        for position, index in enumerate(step.arguments):
            which = _input_of(plan.tensors[index])
            if which is not None:
                uses[which].append((number, position))
    return uses
