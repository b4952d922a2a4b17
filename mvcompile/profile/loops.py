"""The kernels of a bundle one by one, in loops that are switched on and off, without the network around them."""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np

from mvcompile.bundle.reader import Bundle
from mvcompile.bundle.schema import CONSTANT, KERNELS, RUNTIME_LIBRARY, WEIGHTS, Manifest
from mvcompile.errors import BundleError
from mvcompile.runtime import memory
from mvcompile.runtime.native import Kernel, Library, ensure_tvm_runtime
from mvcompile.runtime.worker import CallingThread

One: TypeAlias = tuple[int, int]
"""A task and one of its variants."""

_POLL_S = 0.05


class Loops:
    """A thread on `core` that runs the chosen variant while it is switched on, layer after layer of its task. A context manager.

    Raises what `runtime.native` raises for a library that this system cannot load, BundleError for one without the kernel.
    """

    def __init__(self, bundle: Bundle, core: int) -> None:
        self._manifest = bundle.manifest
        ensure_tvm_runtime(bundle.member(RUNTIME_LIBRARY))
        self._library = Library(bundle.member(KERNELS))
        self._weights = np.frombuffer(bundle.member(WEIGHTS), np.uint8)
        self._task = -1
        self._arguments: list[list[Any]] = []
        self._kernel: Kernel = lambda: None
        self._wanted, self._begun, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._over = False
        self._calls = 0
        self._error: BaseException | None = None
        worker = CallingThread(core)
        self._thread = threading.Thread(target=self._serve, args=(worker,), name="mvcompile loops", daemon=True)
        self._thread.start()

    def choose(self, one: One) -> None:
        """The variant that is run from now on; nothing may run now."""
        task, variant = one
        symbol = self._manifest.tasks[task].variants[variant].symbol
        kernel = self._library.function(symbol)
        if kernel is None:
            raise BundleError(f"{KERNELS} has no function {symbol!r}, which a variant of the manifest names: compile again")
        if self._task != task:
            self._arguments, self._task = arguments(self._manifest, task, self._weights), task
        self._kernel = kernel

    def on(self) -> None:
        """Runs it; returns after the first call. Raises what the thread has raised."""
        self._begun.clear()
        self._wanted.set()
        self._wait(self._begun)

    def off(self) -> int:
        """Stops after the call that is under way: how many calls there were since `on`, the first one not counted."""
        self._wanted.clear()
        self._wait(self._idle)
        return self._calls

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._over = True
        self._wanted.set()
        self._thread.join()
        self._arguments, self._task, self._kernel = [], -1, lambda: None

    def __enter__(self) -> Loops:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(_POLL_S):
            if self._error is not None or not self._thread.is_alive():
                raise BundleError(f"a kernel cannot be run by itself: {self._error}; compile the model again") from self._error

    def _serve(self, worker: CallingThread) -> None:
        try:
            while True:
                self._idle.set()
                self._wanted.wait()
                self._idle.clear()
                if self._over:
                    return
                worker.call(self._run, None)
        except BaseException as error:  # for the one who waits
            self._error = error

    def _run(self, nothing: None) -> None:
        kernel, layers, wanted = self._kernel, self._arguments, self._wanted
        self._calls = -1
        while wanted.is_set() and not self._over:
            for tensors in layers:
                kernel(*tensors)
                self._calls += 1
                self._begun.set()
                if not wanted.is_set():
                    return


def arguments(manifest: Manifest, number: int, weights: memory.Array) -> list[list[Any]]:
    """Per layer of task `number`, a tensor for each parameter: the layer's own weights, and activations that all its layers share
    (normal random numbers; integers are indices, and 0 is always one)."""
    task = manifest.tasks[number]
    chance = np.random.default_rng(0)
    activations = []
    for parameter in task.parameters:
        array = memory.allocate_array(parameter.dtype, parameter.shape)
        if array.dtype.kind == "f":
            array[...] = chance.standard_normal(parameter.shape, np.float32)
        activations.append(memory.tensor(array))
    layers = []
    for step in manifest.plan.steps:
        if step.task == number:
            found = [manifest.plan.tensors[index] for index in step.arguments]
            layers.append(
                [
                    memory.tensor(memory.array_at(weights, one.offset, one.dtype, one.shape))
                    if one.storage == CONSTANT
                    else activation
                    for one, activation in zip(found, activations, strict=True)
                ]
            )
    return layers
