"""A bundle of a few kilobytes for tests: sound in every check, but its libraries hold no code."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from mvcompile.bundle.header import Header
from mvcompile.bundle.schema import (
    ARENA,
    CONSTANT,
    FORMAT_VERSION,
    HEADER_BYTES,
    INPUT,
    KERNELS,
    PAGE_BYTES,
    RUNTIME_LIBRARY,
    RUNTIME_LICENSE,
    SELFTEST,
    TRACES,
    WEIGHTS,
    Coverage,
    Manifest,
    Model,
    ObjectiveInfo,
    Parameter,
    Plan,
    SelfTest,
    Step,
    Task,
    Tensor,
    Variant,
)
from mvcompile.bundle.writer import write_bundle
from mvcompile.types import HostTarget, Objectives, TensorSpec, Verification, align

Change = Callable[[dict[str, Any]], object]
"""Changes a manifest's JSON values in place."""

_TRACES = ("[[],[]]", "[[1],[]]", "[[2],[]]")
_DIGESTS = tuple(sha256(trace.encode()).hexdigest() for trace in _TRACES)
_EXACT = Verification(max_abs_error=0.0, max_rel_error=0.0, rtol=1e-3, atol=1e-5)


def tiny_manifest() -> Manifest:
    """x (1x16) -> dense -> dense -> relu -> y. The dense task has two variants that trade latency for footprint, relu is untuned.

    `members` is empty: `write_bundle` fills it in.
    """
    return Manifest(
        format_version=FORMAT_VERSION,
        model=Model("tiny", None, (TensorSpec("x", "float32", (1, 16)),), (TensorSpec("y", "float32", (1, 16)),)),
        target=tiny_target(),
        tvm_ffi="0.1.14",
        toolchain={"apache-tvm": "0.27.0.post1", "mvcompile": "0.1.0"},
        fingerprint="f" * 64,
        objectives=(
            ObjectiveInfo("latency_s", "s", "measured: weights cold, activation warm"),
            ObjectiveInfo("footprint_bytes", "bytes", "estimated: loop nest and cache sizes"),
            ObjectiveInfo("traffic_bytes", "bytes", "estimated: loop nest and cache sizes"),
        ),
        tasks=(_dense(), _relu()),
        plan=_plan(),
        selftest=SelfTest((0,), (64,), "onnxruntime 1.23", rtol=1e-3, atol=1e-5),
        coverage=Coverage(hypervolume_ratio=0.975, tuned_share=0.75),
        members=(),
    )


def tiny_target() -> HostTarget:
    """A CPU that any x86-64 machine can stand in for: it requires no instruction-set extension."""
    return HostTarget(
        triple="x86_64-unknown-linux-gnu",
        arch="x86_64",
        cpu="x86-64",
        features=(),
        num_cores=2,
        l1d_bytes=32 * 1024,
        l2_bytes=1024 * 1024,
        llc_bytes=16 * 1024 * 1024,
        vector_bits=128,
        vector_registers=16,
        cpu_model="Example CPU",
    )


def tiny_members() -> dict[str, bytes]:
    """The members of `tiny_manifest()`: two weight matrices that are the identity, one self-test, libraries without code."""
    row = struct.Struct("<16f")
    identity = b"".join(row.pack(*(float(i == j) for j in range(16))) for i in range(16))
    values = [float(i - 8) for i in range(16)]
    return {
        KERNELS: b"\x7fELF, but no kernels",
        RUNTIME_LIBRARY: b"\x7fELF, but no runtime",
        RUNTIME_LICENSE: b"Apache License, Version 2.0\n",
        TRACES: json.dumps(dict(zip(_DIGESTS, _TRACES, strict=True)), sort_keys=True).encode(),
        SELFTEST: row.pack(*values) + row.pack(*(max(value, 0.0) for value in values)),
        WEIGHTS: identity * 2,
    }


def write_tiny(path: str | os.PathLike[str]) -> Path:
    """Write the tiny bundle to `path`."""
    write_bundle(path, tiny_manifest(), tiny_members())
    return Path(path)


def put(path: str, value: object) -> Change:
    """The change that puts `value` at `path` of a manifest's JSON, such as `plan.steps[0].task`; `[2]` past the end appends."""

    def change(plain: dict[str, Any]) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path)]
        target: Any = plain
        for step in steps:
            target = target[step]
        if isinstance(target, list) and last == len(target):
            target.append(value)
        else:
            target[last] = value

    return change


def reseal(data: bytes, change: Change) -> bytes:
    """The bundle `data` with its manifest (as JSON values) changed in place by `change`, and digests and lengths that fit again.

    What a careful forger or a faulty writer would make: only the checks of the manifest itself can refuse it. Members stay where
    they are, and where `change` says they are, as long as the manifest fits before the first one.
    """
    length = int.from_bytes(data[16:24], "little")
    plain = json.loads(data[HEADER_BYTES : HEADER_BYTES + length])
    change(plain)
    return replace_manifest(data, json.dumps(plain, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def replace_manifest(data: bytes, text: bytes) -> bytes:
    """The bundle `data` with `text` for a manifest. Members move by whole pages if it needs more room than there was."""
    body = align(HEADER_BYTES + int.from_bytes(data[16:24], "little"), PAGE_BYTES)
    start = max(body, align(HEADER_BYTES + len(text), PAGE_BYTES))
    header = Header(len(text), sha256(text).digest(), start + len(data) - body)
    return (header.pack() + text).ljust(start, b"\0") + data[body:]


def _dense() -> Task:
    fast, small = Objectives(1e-5, 4096.0, 1088.0), Objectives(1.2e-5, 2048.0, 1088.0)
    return Task(
        name="dense",
        key="d" * 16,
        kind="dense",
        flops=512.0,
        parameters=(Parameter("float32", (1, 16)), Parameter("float32", (16, 16)), Parameter("float32", (1, 16))),
        num_outputs=1,
        time_share=0.75,
        tuned=True,
        measured=12,
        front=(fast, small, Objectives(2e-5, 1024.0, 1088.0)),
        hypervolume_ratio=0.97,
        variants=(
            Variant("dense_0", "structured", _DIGESTS[0], fast, 0.01, _EXACT),
            Variant("dense_1", "structured", _DIGESTS[1], small, 0.02, _EXACT),
        ),
    )


def _relu() -> Task:
    return Task(
        name="relu",
        key="e" * 16,
        kind="elementwise",
        flops=16.0,
        parameters=(Parameter("float32", (1, 16)), Parameter("float32", (1, 16))),
        num_outputs=1,
        time_share=0.25,
        tuned=False,
        measured=0,
        front=(),
        hypervolume_ratio=1.0,
        variants=(Variant("relu_0", "default", _DIGESTS[2], None, None, _EXACT),),
    )


def _plan() -> Plan:
    row, matrix = (1, 16), (16, 16)
    return Plan(
        arena_bytes=128,
        tensors=(
            Tensor(INPUT, 0, "float32", row),
            Tensor(CONSTANT, 0, "float32", matrix),
            Tensor(ARENA, 0, "float32", row),
            Tensor(CONSTANT, 1024, "float32", matrix),
            Tensor(ARENA, 64, "float32", row),
            Tensor(ARENA, 0, "float32", row),
        ),
        steps=(Step("dense:0", 0, (0, 1, 2)), Step("dense:1", 0, (2, 3, 4)), Step("relu:0", 1, (4, 5))),
        outputs=(5,),
    )
