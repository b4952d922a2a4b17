"""The stages of a compilation in order: import, prepare, tune, select, build, verify, write. Resumable by its work directory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
import tvm
import tvm_ffi

from mvcompile import assemble, runtime, spaces
from mvcompile.algorithms import ALGORITHMS, Programs
from mvcompile.build import find_linker, make_plan
from mvcompile.bundle.schema import MAGIC, Manifest
from mvcompile.config import CompileConfig
from mvcompile.errors import EnvironmentProblem, UsageError, VerificationError
from mvcompile.frontend.onnx_import import OnnxModel, load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.reference import integer_limits, random_inputs, reference_outputs
from mvcompile.frontend.relax_module import interface, module_outputs
from mvcompile.measure.pool import PoolMeasurer
from mvcompile.measure.protocol import Candidate, Subject
from mvcompile.measure.residence import kept_answer, stays, stays_as_before
from mvcompile.records import DiskStore
from mvcompile.search.strategy import OneByOne, PoolStrategy, Strategy
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Program, Task, extract
from mvcompile.tuning.clock import FileClock
from mvcompile.tuning.decisions import DecisionModel
from mvcompile.tuning.loop import Progress, Tuner, TuningTask
from mvcompile.tuning.metaschedule import EvolutionStrategy
from mvcompile.types import DTYPE_BYTES, HostTarget, TensorSpec, digest_json
from mvcompile.variants import Builder, profiled_variants

SELFTEST_SEED = 1

# TVM calls back into Python, and hands on what is raised there by its name: one it does not know comes out as a RuntimeError, and
# Ctrl-C inside a pass would be a model that cannot be lowered.
for _kind in (KeyboardInterrupt, MemoryError):
    tvm_ffi.register_error(_kind.__name__, _kind)


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

    An interrupted call that is made again with the same work directory goes on where it stopped. Raises ModelError or UsageError
    for what is wrong with the model or the options, EnvironmentProblem for what the host lacks, StoreError for an unusable work
    directory, VerificationError when the result differs from ONNX Runtime (nothing is written then).
    """
    config, reporter = config or CompileConfig(), reporter or Silent()
    bundle = _usable_output(output, config, model=path)
    reporter.stage("import")
    return _compile(_onnx_source(path, config, reporter), bundle, config, reporter)


def _onnx_source(path: str | os.PathLike[str], config: CompileConfig, reporter: Reporter) -> _Source:
    model = load_model(path, config.shapes)
    for warning in model.warnings:
        reporter.note(warning)
    return _Source(to_relax(model), model.name, model.sha256, model.inputs, model.outputs, lambda: _onnx_expectation(model))


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
    bundle = _usable_output(output, config)
    inputs, outputs = interface(module)
    source = _Source(module, Path(output).stem, None, inputs, outputs, lambda: _module_expectation(module, inputs))
    return _compile(source, bundle, config, reporter)


def _usable_output(output: str | os.PathLike[str], config: CompileConfig, model: str | os.PathLike[str] | None = None) -> Path:
    """Where the bundle goes. Raises UsageError for what must not or cannot be written, before any work is done."""
    path, real = Path(output), Path(os.path.realpath(output))
    if not real.parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist: create {real.parent}, or name another output")
    if real.is_dir():
        raise UsageError(f"{path} is a folder; name a file, such as model.mvb")
    if not os.access(real.parent, os.W_OK):
        raise UsageError(f"the folder {real.parent} cannot be written to; name another output")
    if model is not None and real.exists() and os.path.exists(model) and os.path.samefile(real, model):
        raise UsageError(f"{path} is the model itself, which the bundle would replace; name another output")
    if real.exists() and not _is_replaceable(real):
        raise UsageError(f"{path} exists and is no bundle, so it is not overwritten; remove it, or name another output")
    if os.path.realpath(_work_directory(path, config)) == str(real):
        raise UsageError(f"the work directory and the output are both {path}; name another output or work directory")
    return path


def _is_replaceable(path: Path) -> bool:
    """Whether an existing file is a bundle, or empty."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) in (MAGIC, b"")
    except OSError:
        return False


def _work_directory(output: Path, config: CompileConfig) -> Path:
    return Path(config.work_dir) if config.work_dir else output.with_name(output.name + ".work")


def _require_cost_model() -> None:
    """TVM imports its cost model's package in the middle of tuning; what is missing is said before any work is done."""
    if importlib.util.find_spec("xgboost") is None:
        raise EnvironmentProblem("tuning needs xgboost: pip install 'mvcompile[compile]', or compile with --budget 0")


def _onnx_expectation(model: OnnxModel) -> assemble.Expectation:
    inputs = random_inputs(model.inputs, SELFTEST_SEED, integer_limits(model.original))
    threads = len(os.sched_getaffinity(0))
    found = reference_outputs(model.original, inputs, weights=model.weights, threads=threads)
    return assemble.Expectation(
        f"onnxruntime {onnxruntime.__version__}",
        tuple(inputs[spec.name] for spec in model.inputs),
        tuple(np.asarray(found[spec.name], dtype=spec.dtype) for spec in model.outputs),
    )


def _module_expectation(module: tvm.IRModule, inputs: Sequence[TensorSpec]) -> assemble.Expectation:
    values = random_inputs(inputs, SELFTEST_SEED)
    outputs = module_outputs(module, values)
    return assemble.Expectation(f"tvm {tvm.__version__}", tuple(values[spec.name] for spec in inputs), outputs)


@dataclass(slots=True, eq=False)
class _Source:
    """What is compiled, and how to get the outputs that are expected of it: each once, as both hold all weights until then."""

    module: tvm.IRModule | None
    name: str
    sha256: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    expect: Callable[[], assemble.Expectation] | None

    def take_program(self, target: HostTarget) -> tuple[Program, str]:
        """The prepared program, and the fingerprint of how it was prepared."""
        module, self.module = self.module, None
        assert module is not None
        prepared = prepare(module, target)
        return extract(prepared), prepared.fingerprint

    def take_expectation(self) -> assemble.Expectation:
        """The expected outputs."""
        expect, self.expect = self.expect, None
        assert expect is not None
        return expect()


def _compile(source: _Source, output: Path, config: CompileConfig, reporter: Reporter) -> CompileResult:
    find_linker()  # before any work is done
    own = [spaces.load_space(path) for path in config.spaces]
    if _tunes(config):
        _require_cost_model()
    reporter.stage("prepare")
    cores = sorted(os.sched_getaffinity(0))  # before TVM or ONNX Runtime run anything: they may change it
    target = detect_target()
    program, fingerprint = source.take_program(target)
    name = (config.name or source.name).encode(errors="replace").decode()  # a file's name need not be whole characters
    expectation = source.take_expectation()  # before the tuning: what the reference cannot run could not be verified
    work = _work_directory(output, config)
    references = work / "references" / fingerprint[:16]
    with _open_work(work, reporter) as store, PoolMeasurer(target, references, cores=cores) as measurer:
        weights_cold = _weights_are_cold(program, fingerprint, target, config, cores[0], work, reporter)
        state = f"{fingerprint}-{'cold' if weights_cold else 'warm'}"
        clock = FileClock(work / f"clock-{_tuning_key(program, state, config)}.json")
        identity = assemble.Identity(name, source.sha256, source.inputs, source.outputs, fingerprint, weights_cold)
        subjects = [_subject(task, weights_cold) for task in program.tasks]
        tasks = [_tuning_task(task, subject, target, config, own) for task, subject in zip(program.tasks, subjects, strict=True)]
        tuner = Tuner(
            tasks,
            store,
            measurer,
            target_key=target.key,
            # What is timed with cold weights is no record for a model whose weights stay in the cache.
            fingerprint=state,
            config=config.tuning,
            clock=clock,
            report=reporter.progress,
        )
        reporter.stage("tune")
        records = tuner.run()
        known = {key: list(found) for key, found in records.items()}
        builder = Builder(program, subjects, target, config, known, store, measurer, work)
        reporter.stage("build")
        built, interference = profiled_variants(builder, identity, expectation, config.profile, reporter)
        reporter.stage("verify")

        def write(path: Path) -> Manifest:
            return assemble.write(path, identity, target, built, expectation, interference)

        manifest, error = _publish(output, work, write)
        return CompileResult(output, manifest, tuner.trials, clock.spent_s, error)


def _publish(output: Path, work: Path, write: Callable[[Path], Manifest]) -> tuple[Manifest, float]:
    """Writes a bundle under another name, runs it, and only if its results are right gives it its own name.

    The other name is always the same for a work directory, which one compilation at a time uses: what a kill leaves is replaced.
    """
    target = Path(os.path.realpath(output))  # a link stays a link
    unverified = target.with_name(f".mvcompile-{digest_json([os.path.realpath(work), target.name])[:16]}.unverified")
    try:
        manifest = write(unverified)
        error = _verify(unverified)
        os.replace(unverified, target)
    except OSError as problem:
        raise EnvironmentProblem(f"{output} cannot be written: {problem}; see to it and run again to resume") from problem
    finally:
        with suppress(OSError):
            unverified.unlink()
    return manifest, error


def _tunes(config: CompileConfig) -> bool:
    return config.tuning.seconds > 0 and config.tuning.trials != 0


def _weights_are_cold(
    program: Program, fingerprint: str, target: HostTarget, config: CompileConfig, core: int, work: Path, reporter: Reporter
) -> bool:
    """Whether the weights, with as many transformed ones as there may be, leave the last-level cache between two runs. Measured
    when something is tuned for the first time; until then as the system reports the cache."""
    model_bytes = round(program.weight_bytes * config.tuning.weight_growth) + make_plan(program).plan.arena_bytes
    if model_bytes > target.llc_bytes:
        return True
    path = work / f"cache-{_tuning_key(program, fingerprint, config)}.json"
    if not _tunes(config):
        return kept_answer(path) is False
    cold = not stays_as_before(path, lambda: stays(model_bytes, target, core))
    if cold:
        reporter.note(
            f"the model's weights and activations, up to {model_bytes >> 20} MiB, do not stay in the last-level cache, though it "
            f"is reported to have {target.llc_bytes >> 20} MiB: candidates are timed with weights that come from memory"
        )
    return cold


def _tuning_key(program: Program, fingerprint: str, config: CompileConfig) -> str:
    """Whose time a clock counts: the same tasks as often, prepared alike, searched from the same seed."""
    tasks = sorted((task.key, task.calls) for task in program.tasks)
    return digest_json([tasks, fingerprint, config.tuning.seed])[:16]


def _open_work(work: Path, reporter: Reporter) -> DiskStore:
    store = DiskStore(work)
    if store.recovered is not None:
        reporter.note(str(store.recovered))
    return store


def _subject(task: Task, weights_cold: bool) -> Subject:
    return Subject(task.key, tvm.ir.save_json(task.module), tuple(sorted(task.constants)), task.num_outputs, weights_cold)


def _tuning_task(
    task: Task, subject: Subject, target: HostTarget, config: CompileConfig, own: Sequence[spaces.OwnSpace]
) -> TuningTask:
    moved = sum(int(np.prod(each.shape)) * DTYPE_BYTES[each.dtype] for each in task.parameters)

    def strategy() -> Strategy[Candidate]:
        seed = (config.tuning.seed * 1_000_003 + int(task.key[:6], 16)) % 2**30
        built_in = spaces.structured_candidates(task.module, target)
        pool = built_in + [each for space in own for each in spaces.own_candidates(task.module, target, space)]
        finite = PoolStrategy(pool, seed=seed, model=DecisionModel(seed)) if pool else None
        if finite is not None and built_in:
            return finite
        endless = EvolutionStrategy(task.module, tvm_target(target), seed=seed, batch=config.tuning.batch)
        return endless if finite is None else OneByOne([finite, endless])

    default = spaces.default_candidate(task.module, target)

    def fallbacks() -> list[Candidate]:
        return [candidate for candidate in spaces.fallback_candidates(task.module, target) if candidate != default]

    shares = {name: ALGORITHMS[name].products for name in Programs(task.module).alternatives()}
    return TuningTask(task.name, subject, task.calls, task.flops, float(moved), default, strategy, fallbacks, shares)


def _verify(path: Path) -> float:
    """Runs the finished bundle as a user would against the reference, until every variant has run; the largest absolute error."""
    worst = 0.0
    with runtime.load(path, share_cores=True) as session:
        for variant in range(max(map(len, session.variants.values()), default=1)):
            session.select_all(variant)  # of layers with fewer variants, the last one
            result = runtime.selftest(session)
            for check in result.outputs:
                worst = max(worst, check.max_abs_error)
            if not result.passed:
                bad = next(check for check in result.outputs if not check.passed)
                raise VerificationError(
                    f"output {bad.name!r} differs from {result.reference} in {bad.errors} of {bad.elements} elements (largest "
                    f"error {bad.max_abs_error:.3g}, tolerance {result.atol:g} + {result.rtol:g} |reference|); "
                    "no bundle was written"
                )
    return worst
