"""What must hold inside a manifest for its bundle to be safe to run, beyond the form that `codec.py` checks.

A bundle whose manifest passes makes no kernel read or write outside the memory it was given, calls no function with other
arguments than it was compiled for, and reads no tensor that nothing has written. Standard library only: the runtime calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from mvcompile.bundle.check_plan import check_plan
from mvcompile.bundle.codec import fault, mismatch
from mvcompile.bundle.extents import checked_nbytes, require_range
from mvcompile.bundle.schema import (
    FORMAT_VERSION,
    HEADER_BYTES,
    PAGE_BYTES,
    REQUIRED_MEMBERS,
    SELFTEST,
    TRACES,
    WEIGHTS,
    Coverage,
    Manifest,
    Member,
    Model,
    ObjectiveInfo,
    SelfTest,
    Task,
    Variant,
)
from mvcompile.errors import BundleError
from mvcompile.types import OBJECTIVE_UNITS, HostTarget, TensorSpec

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMBER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_ROUNDING = 1e-6  # a sum of shares may exceed 1 by the rounding of its terms


def check_manifest(manifest: Manifest, file_length: int, data_start: int = HEADER_BYTES) -> None:
    """Check all of `manifest`, whose members lie between byte `data_start` and byte `file_length` of their file.

    Raises BundleError that names the JSON path of the first value that is wrong, the value and what was expected.
    """
    if manifest.format_version != FORMAT_VERSION:
        raise fault("manifest.format_version", manifest.format_version, f"{FORMAT_VERSION}, as the header says")
    _check_model(manifest.model)
    _check_target(manifest.target)
    _require_text(manifest.tvm_ffi, "manifest.tvm_ffi")
    _require_text(manifest.fingerprint, "manifest.fingerprint")
    _check_objectives(manifest.objectives)
    _check_tasks(manifest)
    members = _check_members(manifest.members, file_length, data_start)
    check_plan(manifest.plan, manifest.model, manifest.tasks, members[WEIGHTS].length)
    _check_selftest(manifest.selftest, manifest.model, members[SELFTEST].length)
    _check_coverage(manifest.coverage)


def check_traces(manifest: Manifest, data: bytes | memoryview) -> None:
    """Check that `data`, the bytes of traces.json, holds the trace of every variant and nothing that is not what its key says.

    No part of opening a bundle, because running it needs no traces. Raises BundleError.
    """
    try:
        traces = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{TRACES} is not JSON in UTF-8: {error}") from error
    if not isinstance(traces, dict):
        raise fault(TRACES, traces, "an object that maps the SHA-256 of a trace to its text")
    for digest, trace in traces.items():
        if not isinstance(trace, str) or sha256(trace.encode("utf-8", "surrogatepass")).hexdigest() != digest:
            raise fault(f"{TRACES}[{digest!r}]", trace, "the text with this SHA-256")
    for index, task in enumerate(manifest.tasks):
        for number, variant in enumerate(task.variants):
            if variant.trace_sha256 not in traces:
                path = f"manifest.tasks[{index}].variants[{number}].trace_sha256"
                raise fault(path, variant.trace_sha256, f"the digest of a trace in {TRACES}")


def _check_model(model: Model) -> None:
    if model.onnx_sha256 is not None:
        _require_sha256(model.onnx_sha256, "manifest.model.onnx_sha256")
    _check_specs(model.inputs, "manifest.model.inputs")
    _check_specs(model.outputs, "manifest.model.outputs")
    _require_unique((spec.name for spec in model.inputs), "manifest.model.inputs", "name")
    if not model.outputs:
        raise fault("manifest.model.outputs", model.outputs, "at least one output")


def _check_specs(specs: tuple[TensorSpec, ...], path: str) -> None:
    for index, spec in enumerate(specs):
        checked_nbytes(spec.dtype, spec.shape, f"{path}[{index}]")


def _check_target(target: HostTarget) -> None:
    for name in ("triple", "arch", "cpu"):
        _require_text(getattr(target, name), f"manifest.target.{name}")
    if target.num_cores < 1:
        raise fault("manifest.target.num_cores", target.num_cores, "at least 1")
    if tuple(sorted(set(target.features))) != target.features:
        raise fault("manifest.target.features", target.features, "features in ascending order, each once")


def _check_objectives(objectives: tuple[ObjectiveInfo, ...]) -> None:
    names = tuple(objective.name for objective in objectives)
    if names != tuple(OBJECTIVE_UNITS):
        raise fault("manifest.objectives", names, f"the objectives {', '.join(OBJECTIVE_UNITS)} in this order")
    for index, objective in enumerate(objectives):
        path = f"manifest.objectives[{index}]"
        if objective.unit != OBJECTIVE_UNITS[objective.name]:
            raise fault(f"{path}.unit", objective.unit, repr(OBJECTIVE_UNITS[objective.name]))
        if not objective.source.startswith(("measured: ", "estimated: ")):
            raise fault(f"{path}.source", objective.source, "'measured: ...' or 'estimated: ...'")


def _check_tasks(manifest: Manifest) -> None:
    tasks = manifest.tasks
    for index, task in enumerate(tasks):
        _check_task(task, f"manifest.tasks[{index}]")
    _require_unique((task.key for task in tasks), "manifest.tasks", "key")
    symbols = ((f"tasks[{t}].variants[{v}]", one.symbol) for t, task in enumerate(tasks) for v, one in enumerate(task.variants))
    seen: dict[str, str] = {}
    for path, symbol in symbols:
        if symbol in seen:
            raise fault(f"manifest.{path}.symbol", symbol, f"a symbol of its own, manifest.{seen[symbol]} has the same")
        seen[symbol] = path
    total = sum(task.time_share for task in tasks)
    if total > 1 + _ROUNDING:
        raise fault("the sum of manifest.tasks[*].time_share", total, "at most 1")


def _check_task(task: Task, path: str) -> None:
    for name in ("name", "key", "kind"):
        _require_text(getattr(task, name), f"{path}.{name}")
    for index, parameter in enumerate(task.parameters):
        checked_nbytes(parameter.dtype, parameter.shape, f"{path}.parameters[{index}]")
    if not 1 <= task.num_outputs <= len(task.parameters):
        raise fault(f"{path}.num_outputs", task.num_outputs, f"1 to {len(task.parameters)}, the number of parameters")
    _require_share(task.time_share, f"{path}.time_share")
    _require_share(task.hypervolume_ratio, f"{path}.hypervolume_ratio")
    if len(task.front) > task.measured or (task.measured and not task.front):
        expected = f"1 to {task.measured} vectors of as many measured" if task.measured else "none, because nothing was measured"
        raise mismatch(f"{path}.front", f"{len(task.front)} vectors", expected)
    if task.tuned and not task.measured:
        raise fault(f"{path}.measured", task.measured, "at least 1 for a tuned task")
    _check_variants(task.variants, f"{path}.variants")


def _check_variants(variants: tuple[Variant, ...], path: str) -> None:
    if not variants:
        raise fault(path, variants, "at least one variant")
    for index, variant in enumerate(variants):
        if not IDENTIFIER.fullmatch(variant.symbol):
            raise fault(f"{path}[{index}].symbol", variant.symbol, "an identifier of ASCII letters, digits and _")
        _require_sha256(variant.trace_sha256, f"{path}[{index}].trace_sha256")
        if (variant.objectives is None) != (variants[0].objectives is None):
            raise fault(f"{path}[{index}].objectives", variant.objectives, "objectives for all variants of a task or for none")
        if variant.objectives is None and variant.latency_spread is not None:
            raise fault(f"{path}[{index}].latency_spread", variant.latency_spread, "null, as the objectives")
    known = [variant.objectives.latency_s for variant in variants if variant.objectives is not None]
    if known and min(known) < known[0]:
        fastest = known.index(min(known))
        raise fault(f"{path}[0].objectives.latency_s", known[0], f"the least of the task, variant {fastest} has {known[fastest]}")


def _check_members(members: tuple[Member, ...], file_length: int, data_start: int) -> Mapping[str, Member]:
    _require_unique((member.name for member in members), "manifest.members", "name")
    by_name = {member.name: member for member in members}
    missing = [name for name in REQUIRED_MEMBERS if name not in by_name]
    if missing:
        raise fault("manifest.members", sorted(by_name), f"also {', '.join(missing)}")
    end, before = data_start, "the manifest"
    for index, member in sorted(enumerate(members), key=lambda item: (item[1].offset, item[1].length)):
        path = f"manifest.members[{index}]"
        if not MEMBER_NAME.fullmatch(member.name):
            raise fault(f"{path}.name", member.name, "a file name of at most 100 ASCII letters, digits, '.', '_' and '-'")
        require_range(member.offset, member.length, PAGE_BYTES, file_length, path)
        if member.offset < end:
            raise fault(f"{path}.offset", member.offset, f"at least {end}, where {before} ends")
        _require_sha256(member.sha256, f"{path}.sha256")
        end, before = member.offset + member.length, member.name
    if end != file_length:
        raise fault("the end of the last of manifest.members", end, f"the file's length of {file_length} bytes")
    return by_name


def _check_selftest(selftest: SelfTest, model: Model, selftest_bytes: int) -> None:
    _require_text(selftest.reference, "manifest.selftest.reference")
    for name, specs in (("input_offsets", model.inputs), ("output_offsets", model.outputs)):
        offsets, path = getattr(selftest, name), f"manifest.selftest.{name}"
        if len(offsets) != len(specs):
            raise fault(path, offsets, f"{len(specs)} offsets, one for each of the model's")
        for index, (offset, spec) in enumerate(zip(offsets, specs, strict=True)):
            require_range(offset, spec.nbytes, 64, selftest_bytes, f"{path}[{index}]", SELFTEST)


def _check_coverage(coverage: Coverage) -> None:
    _require_share(coverage.hypervolume_ratio, "manifest.coverage.hypervolume_ratio")
    _require_share(coverage.tuned_share, "manifest.coverage.tuned_share")


def _require_text(value: str, path: str) -> None:
    if not value:
        raise fault(path, value, "a string that is not empty")


def _require_share(value: float, path: str) -> None:
    if not 0 <= value <= 1:
        raise fault(path, value, "a share from 0 to 1")


def _require_sha256(value: str, path: str) -> None:
    if not SHA256.fullmatch(value):
        raise fault(path, value, "a SHA-256 digest of 64 lower-case hexadecimal digits")


def _require_unique(values: Iterable[str], path: str, field: str) -> None:
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        if value in seen:
            raise BundleError(
                f"{path}[{index}].{field} is {value!r}, which {path}[{seen[value]}].{field} is too, expected no two alike"
            )
        seen[value] = index
