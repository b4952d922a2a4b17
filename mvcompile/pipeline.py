"""The stages of a compilation in order: import, prepare, tune, select, build, verify, write. Resumable through the work directory."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
import tvm
from tvm import relax

from mvcompile import assemble, runtime, spaces
from mvcompile.build import Kernel, build_library, find_linker, make_plan
from mvcompile.bundle.schema import Manifest
from mvcompile.config import CompileConfig
from mvcompile.errors import EnvironmentProblem, ModelError, UsageError, VerificationError
from mvcompile.frontend.onnx_import import OnnxModel, load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.reference import integer_limits, random_inputs, reference_outputs
from mvcompile.measure.pool import PoolMeasurer
from mvcompile.measure.protocol import Subject
from mvcompile.records import DiskStore
from mvcompile.search.strategy import PoolStrategy, Strategy
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Program, Task, extract
from mvcompile.tuning.fronts import ParetoSet, pareto_set
from mvcompile.tuning.loop import Progress, Tuner, TuningTask
from mvcompile.tuning.metaschedule import EvolutionStrategy, XgbCostModel
from mvcompile.types import DTYPE_BYTES, HostTarget, Record, Status, TensorSpec, Verification, digest_json

SELFTEST_SEED = 1
REBUILDS = 3


class Reporter(Protocol):
    """Who shows what happens. Everything has a default that shows nothing."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def progress(self, progress: Progress) -> None:
        """A batch was measured."""

    def note(self, text: str) -> None:
        """Something a person should know; the compilation goes on."""


class Silent:
    """A Reporter that shows nothing."""

    def stage(self, name: str) -> None:
        """See `Reporter`."""

    def progress(self, progress: Progress) -> None:
        """See `Reporter`."""

    def note(self, text: str) -> None:
        """See `Reporter`."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The bundle that was written: path, manifest, candidates recorded for its tasks, seconds of tuning spent on it so far, and
    the largest absolute error of any output against the reference."""

    path: Path
    manifest: Manifest
    trials: int
    tuning_s: float
    max_abs_error: float


def compile_model(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    config: CompileConfig | None = None,
    *,
    reporter: Reporter | None = None,
) -> CompileResult:
    """Compiles the ONNX model at `path` into a bundle at `output`.

    An interrupted call that is made again with the same work directory goes on where it stopped. Raises ModelError or UsageError for what is
    wrong with the model or the options, EnvironmentProblem for what the host lacks, StoreError for an unusable work
    directory, VerificationError when the result differs from ONNX Runtime (nothing is written then).
    """
    config, reporter = config or CompileConfig(), reporter or Silent()
    _require_output(output, model=path)
    reporter.stage("import")
    model = load_model(path, config.shapes)
    for warning in model.warnings:
        reporter.note(warning)
    module = to_relax(model)

    def expect() -> assemble.Expectation:
        return _onnx_expectation(model)

    return _compile(module, model.name, model.sha256, model.inputs, model.outputs, expect, Path(output), config, reporter)


def compile_module(
    module: tvm.IRModule,
    output: str | os.PathLike[str],
    config: CompileConfig | None = None,
    *,
    reporter: Reporter | None = None,
) -> CompileResult:
    """Compiles a Relax module into a bundle at `output`: `main` takes tensors of static shape and returns a tensor or a tuple of
    tensors; weights are constants (`BindParams`). Inputs keep their parameters' names, outputs are named output_0, output_1, ...

    The reference is the same module, built with TVM's default pipeline. Raises like `compile_model`.
    """
    config, reporter = config or CompileConfig(), reporter or Silent()
    _require_output(output)
    inputs, outputs = _interface(module)
    name = config.name or Path(output).stem

    def expect() -> assemble.Expectation:
        return _relax_expectation(module, inputs)

    return _compile(module, name, None, inputs, outputs, expect, Path(output), config, reporter)


def _require_output(output: str | os.PathLike[str], model: str | os.PathLike[str] | None = None) -> None:
    folder = Path(output).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"the folder of {os.fspath(output)} does not exist: create {folder}, or name another output")
    if Path(output).is_dir():
        raise UsageError(f"{os.fspath(output)} is a folder; name a file, such as model.mvb")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the folder {folder} cannot be written to; name another output")
    if model is not None and os.path.exists(output) and os.path.exists(model) and os.path.samefile(output, model):
        raise UsageError(f"{os.fspath(output)} is the model itself, which the bundle would replace; name another output")


def _require_cost_model() -> None:
    """TVM imports its cost model's package in the middle of tuning; what is missing is said before any work is done."""
    if importlib.util.find_spec("xgboost") is None:
        raise EnvironmentProblem("tuning needs xgboost: pip install 'mvcompile[compile]', or compile with --budget 0")


def _interface(module: tvm.IRModule) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    names = [variable.name_hint for variable in module.get_global_vars()]
    if "main" not in names:
        raise ModelError(f"the module has no function main (it has: {', '.join(names) or 'none'})")
    main = module["main"]
    result = main.ret_ty
    kinds = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    try:
        inputs = tuple(_spec(each.name_hint, each.ty) for each in main.params)
        outputs = tuple(_spec(f"output_{index}", kind) for index, kind in enumerate(kinds))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"main must take and return tensors of static shape: {error}") from error
    return inputs, outputs


def _spec(name: str, kind: relax.TensorType) -> TensorSpec:
    dtype, shape = str(kind.dtype), tuple(int(extent) for extent in kind.shape)
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name} has dtype {dtype}; supported are {', '.join(DTYPE_BYTES)}")
    return TensorSpec(name, dtype, shape)


def _onnx_expectation(model: OnnxModel) -> assemble.Expectation:
    inputs = random_inputs(model.inputs, SELFTEST_SEED, integer_limits(model.original))
    found = reference_outputs(model.original, inputs, threads=len(os.sched_getaffinity(0)))
    return assemble.Expectation(
        f"onnxruntime {onnxruntime.__version__}",
        tuple(inputs[spec.name] for spec in model.inputs),
        tuple(np.asarray(found[spec.name], dtype=spec.dtype) for spec in model.outputs),
    )


def _relax_expectation(module: tvm.IRModule, inputs: Sequence[TensorSpec]) -> assemble.Expectation:
    values = random_inputs(inputs, SELFTEST_SEED)
    machine = relax.VirtualMachine(tvm.compile(module, target=tvm.target.Target("llvm")), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(values[spec.name]) for spec in inputs))
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    arrays = tuple(tensor.numpy() for tensor in tensors)
    return assemble.Expectation(f"tvm {tvm.__version__}", tuple(values[spec.name] for spec in inputs), arrays)


class _FileClock:
    """Tuning seconds of one model, kept in the work directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spent_s = 0.0
        with suppress(OSError, ValueError, KeyError, TypeError):  # an unreadable file only means that time is counted anew
            self.spent_s = max(0.0, float(json.loads(path.read_text())["spent_s"]))

    def add(self, seconds: float) -> None:
        """See `Clock`."""
        self.spent_s += seconds
        partial = self._path.with_suffix(".tmp")
        try:
            partial.write_text(json.dumps({"spent_s": self.spent_s}))
            os.replace(partial, self._path)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {self._path}: {error.strerror}; free space and run again to resume") from error


def _compile(
    module: tvm.IRModule,
    name: str,
    sha256: str | None,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    expect: object,
    output: Path,
    config: CompileConfig,
    reporter: Reporter,
) -> CompileResult:
    find_linker()  # before any work is done
    if config.tuning.seconds > 0 and config.tuning.trials != 0:
        _require_cost_model()
    reporter.stage("prepare")
    target = detect_target()
    prepared = prepare(module, target)
    program = extract(prepared)
    planned = make_plan(program)
    weights_cold = program.weight_bytes + planned.plan.arena_bytes > target.llc_bytes
    work = Path(config.work_dir) if config.work_dir else output.with_name(output.name + ".work")
    identity = assemble.Identity(config.name or name, sha256, inputs, outputs, prepared.fingerprint, weights_cold)
    with _open_work(work, reporter) as store, PoolMeasurer(target, work / "references" / prepared.fingerprint[:16]) as measurer:
        clock = _FileClock(work / f"clock-{digest_json([sha256, prepared.fingerprint, config.tuning.seed])[:16]}.json")
        subjects = [_subject(task, weights_cold) for task in program.tasks]
        tasks = [
            _tuning_task(task, subject, target, config) for task, subject in zip(program.tasks, subjects, strict=True)
        ]
        tuner = Tuner(
            tasks,
            store,
            measurer,
            target_key=target.key,
            fingerprint=prepared.fingerprint,
            config=config.tuning,
            clock=clock,
            report=reporter.progress,
        )
        reporter.stage("tune")
        records = tuner.run()
        reporter.stage("build")
        built = _build(program, subjects, records, target, config, store, measurer, work)
        reporter.stage("verify")
        expectation = expect()  # type: ignore[operator]
        unverified = output.with_name(f".{output.name}.unverified")
        try:
            manifest = assemble.write(
                unverified, identity, target, program, planned, built.sets, built.checks, expectation, built.library
            )
            error = _verify(unverified)
            os.replace(unverified, output)
        finally:
            unverified.unlink(missing_ok=True)
        return CompileResult(output, manifest, tuner.trials, clock.spent_s, error)


def _open_work(work: Path, reporter: Reporter) -> DiskStore:
    store = DiskStore(work)
    if store.recovered is not None:
        reporter.note(str(store.recovered))
    return store


def _subject(task: Task, weights_cold: bool) -> Subject:
    return Subject(task.key, tvm.ir.save_json(task.module), tuple(sorted(task.constants)), task.num_outputs, weights_cold)


def _tuning_task(task: Task, subject: Subject, target: HostTarget, config: CompileConfig) -> TuningTask:
    moved = sum(int(np.prod(each.shape)) * DTYPE_BYTES[each.dtype] for each in task.parameters)

    def strategy() -> Strategy:  # type: ignore[type-arg]
        seed = (config.tuning.seed * 1_000_003 + int(task.key[:6], 16)) % 2**30
        pool = spaces.structured_candidates(task.module, target)
        if pool:
            return PoolStrategy(pool, seed=seed, model=XgbCostModel(task.module, tvm_target(target), seed))
        return EvolutionStrategy(task.module, tvm_target(target), seed=seed, batch=config.tuning.batch)

    default = spaces.default_candidate(task.module, target)
    return TuningTask(task.name, subject, task.calls, task.flops, float(moved), default, strategy)


@dataclass(frozen=True, slots=True)
class _Built:
    library: Path
    sets: list[ParetoSet]
    checks: list[list[Verification]]


def _build(
    program: Program,
    subjects: Sequence[Subject],
    records: dict[str, tuple[Record, ...]] | object,
    target: HostTarget,
    config: CompileConfig,
    store: DiskStore,
    measurer: PoolMeasurer,
    work: Path,
) -> _Built:
    """Selects, links and checks variants; one that is wrong in the linked library is recorded as such and the rest is selected anew."""
    library = work / "kernels.so"
    known = {key: list(found) for key, found in records.items()}  # type: ignore[attr-defined]
    for _ in range(REBUILDS):
        sets = [pareto_set(known[task.key], config.tuning.variants) for task in program.tasks]
        _require_variants(program, sets)
        kernels = [
            Kernel(assemble.symbol(task, number), task.module, record.trace)
            for task, pareto in zip(program.tasks, sets, strict=True)
            for number, record in enumerate(pareto.kept)
        ]
        build_library(library, kernels, target)
        checks, wrong = [], []
        for task, subject, pareto in zip(program.tasks, subjects, sets, strict=True):
            symbols = [assemble.symbol(task, number) for number in range(len(pareto.kept))]
            outcomes = measurer.verify(subject, library, symbols)
            checks.append([outcome.verification for outcome in outcomes if outcome.verification is not None])
            wrong += [
                _rejected(record, outcome.status, outcome.message)
                for record, outcome in zip(pareto.kept, outcomes, strict=True)
                if outcome.status is not Status.OK
            ]
        if not wrong:
            return _Built(library, sets, checks)
        store.append(wrong)
        for record in wrong:
            known[record.task_key].append(record)
    raise VerificationError(f"variants still differ from their reference after {REBUILDS} builds: see the records in {work}")


def _require_variants(program: Program, sets: Sequence[ParetoSet]) -> None:
    for task, pareto in zip(program.tasks, sets, strict=True):
        if not pareto.kept:
            raise VerificationError(f"task {task.name} ({task.key}) has no schedule whose result is right; see its records")


def _rejected(record: Record, status: Status, message: str) -> Record:
    return Record(
        record.task_key, record.target_key, record.fingerprint, record.trace, record.space, status, message=message or "differs"
    )


def _verify(path: Path) -> float:
    """Runs the finished bundle as a user would, with its fastest and with its last variants, against the reference."""
    worst = 0.0
    with runtime.load(path, share_cores=True) as session:
        last = {layer: len(variants) - 1 for layer, variants in session.variants.items()}
        for selection in (0, last):
            session.select_all(selection)
            result = runtime.selftest(session)
            for check in result.outputs:
                worst = max(worst, check.max_abs_error)
            if not result.passed:
                bad = next(check for check in result.outputs if not check.passed)
                raise VerificationError(
                    f"output {bad.name!r} differs from {result.reference} in {bad.errors} of {bad.elements} elements (largest error "
                    f"{bad.max_abs_error:.3g}, tolerance {result.atol:g} + {result.rtol:g} |reference|); no bundle was written"
                )
    return worst
