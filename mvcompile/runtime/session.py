"""Load a bundle and run it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TypeAlias, TypeVar

from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import KERNELS, RUNTIME_LIBRARY, WEIGHTS, Manifest, Variant
from mvcompile.errors import BundleError, EnvironmentProblem, UsageError
from mvcompile.runtime.cores import CoreRegistry, Lease
from mvcompile.runtime.cpus import PinError
from mvcompile.runtime.host import check_host, this_host
from mvcompile.runtime.inputs import ArrayCheck
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Library, ensure_tvm_runtime
from mvcompile.runtime.program import Program, load_program
from mvcompile.runtime.selection import Choice, LayerTable
from mvcompile.runtime.worker import CallingThread, OwnThread, WorkerStoppedError
from mvcompile.types import Objectives, TensorSpec, Verification

_CORES = CoreRegistry()
_process = os.getpid()
"""Of this process: asking the system costs some microseconds after a run."""
_LIVE: weakref.WeakSet[Session] = weakref.WeakSet()
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """A variant of a layer. `index` is what `Session.select` takes; objectives are None when nothing was measured;
    `latency_spread` is the interquartile range of the timings over their median."""

    index: int
    symbol: str
    space: str
    objectives: Objectives | None
    latency_spread: float | None
    verification: Verification


def load(
    path: str | os.PathLike[str],
    *,
    threads: int = 1,
    cores: Sequence[int] | None = None,
    share_cores: bool = False,
    verify: bool = True,
) -> Session:
    """Open the bundle at `path`, check it against this host and make it ready to run, every layer with its variant 0.

    The session runs on `threads` cores that no other session of this process holds, or on exactly `cores` (one thread each, the
    first one runs what is not parallel); with `share_cores` it may take cores that others hold. Without `verify` the digests of
    the bundle's members are not checked: for files that were verified before.

    Raises UsageError for a file that cannot be read and for cores that cannot be had, BundleError for a file that is damaged or
    no bundle, IncompatibleBundleError for a newer format, another architecture, CPU features this CPU lacks, another system or
    another tvm-ffi, EnvironmentProblem for lack of memory or threads. None of the bundle's code is loaded before all checks.
    """
    with ExitStack() as undo:
        bundle = open_bundle(path, verify=verify)
        undo.callback(bundle.close)
        try:
            check_host(bundle.manifest, this_host())
            lease = _CORES.lease(str(bundle.path), threads, cores, share_cores)
            undo.callback(_CORES.release, lease)
            ensure_tvm_runtime(bundle.member(RUNTIME_LIBRARY))
            alone = lease.cores[0] if len(lease.cores) == 1 else None
            program = load_program(bundle.manifest, Library(bundle.member(KERNELS)), bundle.member(WEIGHTS), alone)
        except BundleError as error:
            raise _named(bundle, error) from error
        worker = _worker(lease.cores, f"mvcompile {bundle.manifest.model.name}", not program.pins)
        undo.pop_all()
    return Session(bundle, program, worker, lease)


Worker: TypeAlias = CallingThread | OwnThread


def _worker(cores: Sequence[int], name: str, pin: bool) -> Worker:
    return CallingThread(cores[0], pin) if len(cores) == 1 else OwnThread(cores, name)


class Session:
    """A bundle that is ready to run; made by `load`. All methods may be called from any thread; runs take turns.

    A session of one core runs in the thread that calls it, which is pinned to that core for as long as the run takes; one of
    several cores has a thread of its own and a pool, pinned to its cores. Use it as a context manager or call `close`, which
    gives its cores and memory back, as the garbage collector does. In a forked child a session cannot be used: every method
    raises UsageError there.
    """

    def __init__(self, bundle: Bundle, program: Program, worker: Worker, lease: Lease) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self._program = program
        self._worker = worker
        self._lease = lease
        self._process = _process
        self._inputs = ArrayCheck("input", "inputs", manifest.model.inputs)
        self._outputs = ArrayCheck("output", "out", manifest.model.outputs)
        infos = [tuple(_info(index, variant) for index, variant in enumerate(task.variants)) for task in manifest.tasks]
        self._variants = MappingProxyType({step.layer: infos[step.task] for step in manifest.plan.steps})
        self._table = LayerTable({layer: len(found) for layer, found in self._variants.items()})
        self._finalizer = weakref.finalize(self, _abandon, self._process, worker, lease, program.clear, bundle.close)
        self._finalizer.atexit = False  # at exit the thread has to be waited for: see _close_all
        _LIVE.add(self)

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._bundle.manifest

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What `run` takes."""
        return self.manifest.model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What `run` returns."""
        return self.manifest.model.outputs

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in the order they run."""
        return self._table.layers

    @property
    def variants(self) -> Mapping[str, tuple[VariantInfo, ...]]:
        """The variants of each layer. Variant 0 is the fastest when nothing else runs."""
        return self._variants

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores the session runs on; the first one runs what is not parallel."""
        return self._lease.cores

    @property
    def selection(self) -> tuple[int, ...]:
        """The selected variant of each layer, in the order of `layers`."""
        self._require_open()
        selected = self._program.selected()
        if len(selected) != len(self.layers):  # closed since the line before last
            raise self._closed()
        return selected

    @property
    def input_buffers(self) -> dict[str, Array]:
        """The session's own arrays, one for each input, where `run` copies what it cannot use in place. The fastest way to run is
        to fill these and pass them to `run`."""
        self._require_open()
        return dict(zip((spec.name for spec in self.inputs), self._program.input_buffers, strict=False))

    def run(self, inputs: Mapping[str, Array], *, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Run the model once and return its outputs by name: `out`'s arrays, or new C-contiguous ones that belong to the caller.

        `inputs` has one array for each of `self.inputs`, with its dtype and shape. C-contiguous arrays at multiples of 64 bytes
        are used in place and must not be changed meanwhile; others are copied to `input_buffers`. `out` has one C-contiguous
        array for each of `self.outputs`, which are written after the last layer and not at all if one fails.

        Raises InputError for a wrong set of names, dtype or shape, or an `out` that cannot be written; UsageError after `close`
        or in a forked child; EnvironmentProblem if the system does not let the thread run on the session's core any more.
        """
        program = self._program
        if out is not None:
            return self._call(program.run_into, (self._inputs.arrays(inputs), self._outputs.writable(out)))
        return self._call(program.run, None if program.owns(inputs) else self._inputs.arrays(inputs))

    def run_profiled(self, inputs: Mapping[str, Array]) -> tuple[float, ...]:
        """Do what `run` does, but return the seconds each layer took, in the order of `layers`, with the cost of calling it and
        of reading the clock (40 ns, or half a microsecond if the bundle has no driver). Raises what `run` raises."""
        return self._call(self._program.run_profiled, self._inputs.arrays(inputs))

    def select(self, layer: str, variant: int) -> None:
        """Run `layer` with `variant` from its next call on, which may be in a run that is under way.

        Raises UsageError for an unknown layer or variant.
        """
        self._require_open()
        self._store([self._table.choice(layer, variant)])

    def select_all(self, selection: Mapping[str, int] | Sequence[int] | int) -> None:
        """Select for several layers at once: by name (layers not named keep theirs), one number per layer in the order of
        `layers`, or one number for all (layers with fewer variants take their last one). A run under way may see some only.

        Raises UsageError for an unknown layer or variant or a wrong number of them; then nothing is changed.
        """
        self._require_open()
        self._store(self._table.choices(selection))

    def member(self, name: str) -> memoryview:
        """The bytes of member `name` of the bundle, without a copy. Raises BundleError if there is no such member."""
        self._require_open()
        return self._bundle.member(name)

    def close(self) -> None:
        """Wait for the run under way, then give back cores, thread and memory. A second call does nothing."""
        if self._finalizer.detach() is None or self._forked():
            return
        self._worker.stop(_cleanup(self._program.clear, self._bundle.close))
        self._worker.join()
        _CORES.release(self._lease)

    def __enter__(self) -> Session:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"cores {list(self.cores)}" if self._finalizer.alive else "closed"
        return f"<Session of {self._bundle.path}, {state}>"

    def _call(self, function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
        if self._process != _process:
            self._require_open()
        try:
            return self._worker.call(function, argument)
        except WorkerStoppedError:
            raise self._closed() from None
        except BundleError as error:
            raise _named(self._bundle, error) from error
        except PinError as error:
            raise EnvironmentProblem(
                f"the session of {self._bundle.path} may not run on its core {error.core} any more: "
                "load the bundle again, on cores=... that this process may use now"
            ) from error

    def _store(self, choices: Sequence[Choice]) -> None:
        try:
            for step, variant in choices:
                self._program.select(step, variant)
        except IndexError:  # closed since it was checked: the program is empty
            raise self._closed() from None

    def _require_open(self) -> None:
        if self._forked():
            raise UsageError(
                f"the session of {self._bundle.path} belongs to process {self._process}, this is its forked child {os.getpid()}, "
                "which has none of its threads: load the bundle in the child"
            )
        if not self._finalizer.alive:
            raise self._closed()

    def _forked(self) -> bool:
        return self._process != _process

    def _closed(self) -> UsageError:
        return UsageError(f"the session of {self._bundle.path} is closed: load the bundle again")


def _named(bundle: Bundle, error: BundleError) -> BundleError:
    return type(error)(f"{bundle.path}: {error}")


def _info(index: int, variant: Variant) -> VariantInfo:
    return VariantInfo(index, variant.symbol, variant.space, variant.objectives, variant.latency_spread, variant.verification)


def _cleanup(*actions: Callable[[], object]) -> Callable[[], None]:
    def cleanup() -> None:
        for action in actions:
            action()

    return cleanup


def _abandon(process: int, worker: Worker, lease: Lease, *actions: Callable[[], object]) -> None:
    """The end of a session that was never closed. The garbage collector calls this in any thread, so it waits for nothing."""
    if process == _process:
        worker.stop(_cleanup(*actions))
        _CORES.release(lease)


def _close_all() -> None:
    """Threads must not run kernels while the interpreter and the libraries are taken down."""
    for session in list(_LIVE):
        session.close()


def _after_fork() -> None:
    global _process
    _process = os.getpid()
    _CORES.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
