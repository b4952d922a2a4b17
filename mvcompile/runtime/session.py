"""Load a bundle and run it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TypeVar

from mvcompile.bundle.interference import Interference
from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import KERNELS, RUNTIME_LIBRARY, WEIGHTS, Manifest, Variant
from mvcompile.errors import BundleError, EnvironmentProblem, UsageError
from mvcompile.runtime import memory
from mvcompile.runtime.adaptation import Adaptation
from mvcompile.runtime.adapting import Adapting, adapting, fastest_alone, read_interference
from mvcompile.runtime.cores import CoreRegistry, Lease
from mvcompile.runtime.cpus import PinError
from mvcompile.runtime.entrance import no_entrance
from mvcompile.runtime.events import Stats, Switch
from mvcompile.runtime.host import check_host, this_host
from mvcompile.runtime.inputs import ArrayCheck
from mvcompile.runtime.memory import Array
from mvcompile.runtime.monitors import MonitorSpec
from mvcompile.runtime.native import Library, ensure_tvm_runtime
from mvcompile.runtime.policy import Costs, Fixed, Policy
from mvcompile.runtime.program import Program, load_program
from mvcompile.runtime.selection import Choice, LayerTable
from mvcompile.runtime.tracing import Trace
from mvcompile.runtime.worker import Worker, WorkerStoppedError, settle, worker_for
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
    copy_weights: bool = False,
    policy: str | Policy | None = None,
    monitor: str | MonitorSpec | None = None,
    on_switch: Callable[[Switch], object] | None = None,
) -> Session:
    """Open the bundle at `path`, check it against this host and make it ready to run: with the selection that was measured as
    the fastest alone if the bundle was profiled on as many cores, otherwise with variant 0 of every layer.

    The session runs on `threads` cores that no other session of this process holds, or on exactly `cores` (one thread each, the
    first one runs what is not parallel); with `share_cores` it may take cores that others hold. Without `verify` the digests of
    the bundle's members are not checked: for files that were verified before. With `copy_weights` the weights are copied to
    memory of the session's own, in huge pages where the system has them, instead of being mapped from the file. With a `policy`
    or a `monitor` it adapts from the start, as `Session.adapt` describes.

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
            weights = memory.copied(bundle.member(WEIGHTS)) if copy_weights else bundle.member(WEIGHTS)
            program = load_program(bundle.manifest, Library(bundle.member(KERNELS)), weights)
        except BundleError as error:
            raise _named(bundle, error) from error
        worker = worker_for(program, lease.cores, _thread_name(bundle))
        settle(program, worker)
        undo.pop_all()
    session = Session(bundle, program, worker, lease)
    program.select_all(fastest_alone(bundle, len(lease.cores)))
    if policy is not None or monitor is not None:
        try:
            session.adapt("fixed" if policy is None else policy, monitor, on_switch=on_switch)
        except BaseException:
            session.close()
            raise
    return session


def _thread_name(bundle: Bundle) -> str:
    return f"mvcompile {bundle.manifest.model.name}"


class Session:
    """A bundle that is ready to run; made by `load`. All methods may be called from any thread; runs take turns.

    A session runs in the thread that calls it, which is pinned to its first core for as long as the run takes; one of several
    cores has a thread for each of the others, with which it shares parallel loops. Use it as a context manager or call `close`,
    which gives its cores and memory back, as the garbage collector does. In a forked child a session cannot be used: every
    method raises UsageError there.
    """

    def __init__(self, bundle: Bundle, program: Program, worker: Worker, lease: Lease) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self._program = program
        self._worker = worker
        self._lease = lease
        self._process = _process
        self._enter = program.enter
        self._inputs = ArrayCheck("input", "inputs", manifest.model.inputs)
        self._outputs = ArrayCheck("output", "out", manifest.model.outputs)
        infos = [tuple(_info(index, variant) for index, variant in enumerate(task.variants)) for task in manifest.tasks]
        self._variants = MappingProxyType({step.layer: infos[step.task] for step in manifest.plan.steps})
        self._table = LayerTable({layer: len(found) for layer, found in self._variants.items()})
        self._interference: list[Interference | None] = []
        self._adaptation: Adaptation | None = None
        self._adapting: Adapting | None = None
        self._moving = threading.RLock()
        self._finalizer = self._finalize()
        _LIVE.add(self)

    def _finalize(self) -> weakref.finalize[..., Session]:
        finalizer = weakref.finalize(
            self, _abandon, self._process, self._worker, self._lease, self._program.clear, self._bundle.close
        )
        finalizer.atexit = False  # at exit the thread has to be waited for: see _close_all
        return finalizer

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
    def interference(self) -> Interference | None:
        """What the bundle says of its variants beside neighbours, None if it was not profiled.

        Raises BundleError if that is damaged, IncompatibleBundleError if it is newer than this package.
        """
        if not self._interference:
            self._require_open()
            self._interference.append(read_interference(self._bundle))
        return self._interference[0]

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
        if out is None:
            outputs = self._enter(inputs)
            if outputs is not None:
                return outputs
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
        if isinstance(selection, Mapping):
            self._store(self._table.choices(selection))
            return
        variants = self._table.variants(selection)
        try:
            self._program.select_all(variants)
        except IndexError:  # closed since the line before last
            raise self._closed() from None

    def adapt(
        self,
        policy: str | Policy | None = "adaptive",
        monitor: str | MonitorSpec | None = None,
        *,
        on_switch: Callable[[Switch], object] | None = None,
    ) -> None:
        """Let `monitor` tell the level from now on, and `policy` what runs at it; statistics begin anew. With None for a policy
        the session stops adapting, and what is selected stays.

        Policies: "adaptive", "kind", "fixed", what the functions of these names return, or any function of their signature.
        Monitors: "residual" (the default), "manual", "auto", or a monitor of this package; none if the policy is fixed.
        `on_switch` is called after the run in which the level or the selection changed, before `run` returns; it must not run,
        adapt, move or close the session, and what it or a policy raises, `run` raises.

        What `select` selects meanwhile stays until the policy decides anew.

        Raises UsageError for an unknown name, and for a bundle that was not profiled, or not on this number of cores;
        EnvironmentProblem for counters that cannot be read; BundleError if the profile is damaged. Warns with ProfileWarning if
        the residual monitor gets a profile of another CPU model.
        """
        self._require_open()
        wanted = None if policy is None else adapting(policy, monitor, on_switch)
        with self._moving:
            self._adapt(wanted)

    def set_level(self, level: str) -> None:
        """Tell a session whose monitor is "manual" the level. Raises UsageError for an unknown level or another monitor."""
        self._adapted().set_level(level)

    def stats(self) -> Stats:
        """What was done since the session began to adapt. Raises UsageError if it does not adapt."""
        return self._adapted().stats()

    @contextmanager
    def trace(self, path: str | os.PathLike[str], *, runs: int = 1000) -> Iterator[None]:
        """Within the block, note when each layer of each run began and ended, with which variant, and the level; at its end,
        write the last `runs` runs to `path` as JSON that Perfetto (ui.perfetto.dev) opens. Every run is analysed meanwhile.

        Raises UsageError if the file cannot be written, or if the session is being traced already.
        """
        self._require_open()
        interference = self.interference
        levels = [] if interference is None else [level.name for level in interference.levels]
        trace = Trace(self.manifest.model.name, self.layers, levels, runs)
        trace.write(path)  # before there is something to lose
        with self._moving:
            if self._adaptation is not None and self._adaptation.traced:
                raise UsageError(f"the session of {self._bundle.path} is being traced already: end that trace first")
            temporary = self._adapting is None
            if temporary:
                self.adapt(Fixed(self.selection))
            self._call(self._adapted().trace, trace)
        try:
            yield
        finally:
            with self._moving:
                if self._finalizer.alive and self._adaptation is not None and not self._forked():
                    self._call(self._adaptation.trace, None)
                    if temporary:
                        self._adapt(None)
            trace.write(path)

    def set_cores(self, cores: Sequence[int] | None = None, *, threads: int = 1, share_cores: bool = False) -> None:
        """Run on `cores`, or on `threads` other ones, from the next run on, as `load` would; the run under way ends where it is.
        A session that adapts begins anew.

        Raises UsageError for cores that cannot be had, and if the session adapts and the bundle was not profiled on that many;
        EnvironmentProblem for lack of threads. Then it runs where it ran.
        """
        with self._moving:
            self._require_open()
            lease = _CORES.lease(str(self._bundle.path), threads, cores, share_cores, instead=self._lease)
            try:
                if self._adapting is not None:
                    self._adapting.costs(self._bundle, self.interference, len(lease.cores))
                worker = worker_for(self._program, lease.cores, _thread_name(self._bundle))
            except BaseException:
                _CORES.release(lease)
                raise
            self._worker.stop(partial(settle, self._program, worker))
            self._worker.join()
            before, finalizer = self._lease, self._finalizer
            self._worker, self._lease = worker, lease
            self._finalizer = self._finalize()
            finalizer.detach()
            _CORES.release(before)
            if self._adapting is not None:
                self._adapt(self._adapting)

    def member(self, name: str) -> memoryview:
        """The bytes of member `name` of the bundle, without a copy. Raises BundleError if there is no such member."""
        self._require_open()
        return self._bundle.member(name)

    def close(self) -> None:
        """Wait for the run under way, then give back cores, thread and memory. A second call does nothing."""
        if self._forked():
            self._finalizer.detach()
            return
        with self._moving:
            if self._finalizer.detach() is None:
                return
            adaptation = self._adaptation
            last = () if adaptation is None else (adaptation.stop,)
            self._worker.stop(_cleanup(*last, self._program.clear, self._bundle.close))
            self._worker.join()
            self._enter = no_entrance
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
        worker = self._worker
        try:
            return worker.call(function, argument)
        except WorkerStoppedError:
            with self._moving:
                moved = self._worker is not worker
            if moved:
                return self._call(function, argument)
            raise self._closed() from None
        except BundleError as error:
            raise _named(self._bundle, error) from error
        except PinError as error:
            raise EnvironmentProblem(
                f"the session of {self._bundle.path} may not run on its core {error.core} any more: "
                "load the bundle again, on cores=... that this process may use now"
            ) from error

    def _adapt(self, wanted: Adapting | None) -> None:
        """Between two runs, in the thread that runs: counters may belong to it."""
        interference = self.interference if wanted is not None else None
        costs = None if wanted is None else wanted.costs(self._bundle, interference, len(self.cores))

        def replace(costs: Costs | None) -> None:
            found = None
            if wanted is not None and costs is not None:
                found = wanted.begin(self._program, self.layers, costs, interference, self.cores)
            if self._adaptation is not None:
                self._adaptation.stop()
            self._adaptation, self._adapting = found, wanted
            if found is not None:
                found.start()

        self._call(replace, costs)

    def _adapted(self) -> Adaptation:
        self._require_open()
        if self._adaptation is None:
            raise UsageError(
                f"the session of {self._bundle.path} does not adapt, so nothing is known: call session.adapt() first, or "
                "session.adapt('fixed') for the statistics alone"
            )
        return self._adaptation

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
    for session in list(_LIVE):
        session._enter = no_entrance
    _CORES.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
