"""Everything that was made of a model, put into one bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import tvm

from mvcompile.build import PlannedModel
from mvcompile.bundle import schema
from mvcompile.bundle.interference import INTERFERENCE, Interference, check_interference, encode_interference
from mvcompile.bundle.writer import Source, write_bundle
from mvcompile.errors import EnvironmentProblem
from mvcompile.tasks import Program, Task
from mvcompile.tuning.fronts import ParetoSet, objectives_of
from mvcompile.types import OBJECTIVE_UNITS, HostTarget, TensorSpec, Verification, align

MODEL_RTOL = 1e-3
MODEL_ATOL = 1e-5
"""Tolerance of a whole model's outputs against the reference."""
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "onnxslim", "onnxruntime", "xgboost-cpu")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One set of inputs and the outputs a named reference computed from them, in the model's order."""

    reference: str
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bundle says of the model's origin."""

    name: str
    onnx_sha256: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fingerprint: str
    weights_cold: bool


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """What goes into a bundle: the model with the weights that its kernels take, its plan, the records kept for each task, one
    verification for each of them, and the library."""

    program: Program
    planned: PlannedModel
    sets: Sequence[ParetoSet]
    checks: Sequence[Sequence[Verification]]
    library: Path


def symbol(task: Task, number: int) -> str:
    """The library function of a task's variant."""
    return f"{task.kind}_{task.key}_v{number}"


def write(
    path: Path,
    identity: Identity,
    target: HostTarget,
    built: Built,
    expectation: Expectation,
    interference: Interference | None = None,
) -> schema.Manifest:
    """Writes the bundle, with what was measured of its variants beside neighbours, and returns its manifest."""
    program, planned, sets = built.program, built.planned, built.sets
    shares = _time_shares(program, sets)
    tasks = tuple(
        _task(task, pareto, verified, share)
        for task, pareto, verified, share in zip(program.tasks, sets, built.checks, shares, strict=True)
    )
    selftest, selftest_bytes = _selftest(expectation)
    runtime = Path(tvm.__file__).parent / "lib" / schema.RUNTIME_LIBRARY
    license_text = Path(tvm.__file__).parent / "LICENSE"
    for needed in (runtime, license_text):
        if not needed.exists():
            raise EnvironmentProblem(f"the installed TVM lacks {needed.name}; reinstall apache-tvm from its wheel")
    manifest = schema.Manifest(
        format_version=schema.FORMAT_VERSION,
        model=schema.Model(identity.name, identity.onnx_sha256, identity.inputs, identity.outputs),
        target=target,
        tvm_ffi=_version("apache-tvm-ffi") or "unknown",
        toolchain=_toolchain(),
        fingerprint=identity.fingerprint,
        objectives=_objectives(identity.weights_cold),
        tasks=tasks,
        plan=planned.plan,
        selftest=selftest,
        coverage=_coverage(tasks),
        members=(),
    )
    traces = {record.trace_sha256: record.trace for pareto in sets for record in pareto.kept}
    members: dict[str, Source] = {
        schema.KERNELS: built.library,
        schema.WEIGHTS: _weights(planned),
        schema.RUNTIME_LIBRARY: runtime,
        schema.RUNTIME_LICENSE: license_text,
        schema.TRACES: json.dumps(traces, sort_keys=True, separators=(",", ":")).encode(),
        schema.SELFTEST: selftest_bytes,
    }
    if interference is not None:
        check_interference(interference, manifest)
        members[INTERFERENCE] = encode_interference(interference)
    return write_bundle(path, manifest, members)


def _time_shares(program: Program, sets: Sequence[ParetoSet]) -> list[float]:
    seconds = [task.calls * objectives_of(pareto.kept[0]).latency_s for task, pareto in zip(program.tasks, sets, strict=True)]
    total = sum(seconds)
    return [each / total for each in seconds] if total else [0.0 for _ in seconds]


def _task(task: Task, pareto: ParetoSet, checks: Sequence[Verification], share: float) -> schema.Task:
    variants = tuple(
        schema.Variant(symbol(task, number), record.space, record.trace_sha256, record.objectives, record.latency_spread, check)
        for number, (record, check) in enumerate(zip(pareto.kept, checks, strict=True))
    )
    return schema.Task(
        name=task.name,
        key=task.key,
        kind=task.kind,
        flops=task.flops,
        parameters=task.parameters,
        num_outputs=task.num_outputs,
        time_share=share,
        tuned=pareto.measured > 1,
        measured=pareto.measured,
        front=tuple(objectives_of(record) for record in pareto.front),
        hypervolume_ratio=pareto.hypervolume_ratio,
        variants=variants,
    )


def _coverage(tasks: Sequence[schema.Task]) -> schema.Coverage:
    total = sum(task.time_share for task in tasks)
    if not total:
        return schema.Coverage(1.0, 1.0)
    ratio = sum(task.time_share * task.hypervolume_ratio for task in tasks) / total
    tuned = sum(task.time_share for task in tasks if task.tuned) / total
    return schema.Coverage(min(1.0, ratio), min(1.0, tuned))


def _objectives(weights_cold: bool) -> tuple[schema.ObjectiveInfo, ...]:
    state = "not in any cache" if weights_cold else "in the last-level cache"
    sources = {
        "latency_s": f"measured: median of single calls on one thread, activations warm, weights {state}, no neighbour",
        "footprint_bytes": "estimated: loop nest, last-level cache that keeps memory traffic near compulsory",
        "traffic_bytes": "estimated: loop nest, bytes per call between the private caches and the shared levels",
    }
    return tuple(schema.ObjectiveInfo(name, unit, sources[name]) for name, unit in OBJECTIVE_UNITS.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _toolchain() -> dict[str, str]:
    from mvcompile import __version__

    found = {package: _version(package) for package in PACKAGES}
    known = {package: text for package, text in found.items() if text is not None}
    return dict(sorted({"mvcompile": __version__, "llvm": str(tvm.target.codegen.llvm_version_major()), **known}.items()))


def _weights(planned: PlannedModel) -> Iterator[memoryview]:
    """weights.bin: every constant at its offset, zeros between."""
    position = 0
    for offset, array in planned.weights:
        if offset > position:
            yield memoryview(bytes(offset - position))
        yield array.reshape(-1).view(np.uint8).data
        position = offset + array.nbytes
    if planned.weights_bytes > position:
        yield memoryview(bytes(planned.weights_bytes - position))


def _selftest(expectation: Expectation) -> tuple[schema.SelfTest, bytes]:
    content = bytearray()

    def place(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
        offsets = []
        for array in arrays:
            content.extend(bytes(align(len(content)) - len(content)))
            offsets.append(len(content))
            content.extend(np.ascontiguousarray(array).tobytes())
        return tuple(offsets)

    inputs, outputs = place(expectation.inputs), place(expectation.outputs)
    return schema.SelfTest(inputs, outputs, expectation.reference, MODEL_RTOL, MODEL_ATOL), bytes(content)
