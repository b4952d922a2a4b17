"""The bundle's manifest as frozen values: the one contract between writer, reader and runtime (docs/bundle-format.md)."""

from __future__ import annotations

from dataclasses import dataclass

from mvcompile.types import HostTarget, Objectives, TensorSpec, Verification

FORMAT_VERSION = 1
MAGIC = b"\x89MVB\r\n\x1a\n"
HEADER_BYTES = 64
"""Length of the fixed header; the manifest follows it immediately."""
PAGE_BYTES = 4096
"""Members start at multiples of this, so that each can be mapped by itself."""
PIECE_BYTES = 4 * 2**20
"""A longer member is hashed in pieces of this size (the last one shorter), so that several threads can verify one member."""

KERNELS = "kernels.so"
WEIGHTS = "weights.bin"
RUNTIME_LIBRARY = "libtvm_runtime.so"
RUNTIME_LICENSE = "libtvm_runtime.LICENSE.txt"
TRACES = "traces.json"
"""A JSON object that maps `trace_sha256` of every variant to its trace: the text whose SHA-256 that is."""
SELFTEST = "selftest.bin"
REQUIRED_MEMBERS = (KERNELS, RUNTIME_LIBRARY, RUNTIME_LICENSE, SELFTEST, TRACES, WEIGHTS)

INPUT = "input"
CONSTANT = "constant"
ARENA = "arena"
STORAGES = (INPUT, CONSTANT, ARENA)


@dataclass(frozen=True, slots=True)
class Model:
    """What was compiled. `onnx_sha256` is null when the bundle came from a Relax module."""

    name: str
    onnx_sha256: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ObjectiveInfo:
    """Name, unit and source (`measured: ...` or `estimated: ...`) of one objective."""

    name: str
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled schedule. `symbol` is its function in kernels.so; objectives are null when nothing was measured."""

    symbol: str
    space: str
    trace_sha256: str
    objectives: Objectives | None
    latency_spread: float | None
    verification: Verification


@dataclass(frozen=True, slots=True)
class Parameter:
    """dtype and shape of one kernel argument."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One distinct tensor program. The last `num_outputs` parameters are written, the others read.

    `flops` per call; `time_share` is the task's share of the model's time (all calls, variant 0), 0..1;
    `measured` counts candidates measured with status ok; `front` holds the objective vectors of the measured Pareto front;
    `hypervolume_ratio` is the kept variants' hypervolume over the front's (1 when nothing was measured: see `tuned`).
    """

    name: str
    key: str
    kind: str
    flops: float
    parameters: tuple[Parameter, ...]
    num_outputs: int
    time_share: float
    tuned: bool
    measured: int
    front: tuple[Objectives, ...]
    hypervolume_ratio: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the plan. `storage` is `input` (offset = index of the model input), `constant` (byte offset in
    weights.bin) or `arena` (byte offset in the arena). Byte offsets are multiples of 64."""

    storage: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One layer: call a variant of task `task` (index) on tensors `arguments` (indices), in parameter order."""

    layer: str
    task: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The static list of steps that executes the model; `outputs` are tensor indices, one per model output."""

    arena_bytes: int
    tensors: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Byte offsets in selftest.bin of one set of inputs and of the reference's outputs, and the tolerance."""

    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]
    reference: str
    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """`hypervolume_ratio`: mean over layers of their task's ratio, weighted by time. `tuned_share`: share of the model's time in
    tuned layers. Both 0..1."""

    hypervolume_ratio: float
    tuned_share: float


@dataclass(frozen=True, slots=True)
class Member:
    """One file inside the bundle: absolute byte offset (multiple of 4096), byte length and digest (hex): its SHA-256, or, if it
    is longer than `PIECE_BYTES`, the SHA-256 of its pieces' SHA-256 digests (raw, in order)."""

    name: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to know. `toolchain` maps a package to the version that built the bundle;
    `tvm_ffi` is the release of apache-tvm-ffi whose ABI kernels.so and libtvm_runtime.so were built for;
    `fingerprint` is the digest of the graph preparation (pass list, versions, options)."""

    format_version: int
    model: Model
    target: HostTarget
    tvm_ffi: str
    toolchain: dict[str, str]
    fingerprint: str
    objectives: tuple[ObjectiveInfo, ...]
    tasks: tuple[Task, ...]
    plan: Plan
    selftest: SelfTest
    coverage: Coverage
    members: tuple[Member, ...]
