"""Frozen values that cross module borders. Nothing here imports more than the standard library."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

ALIGNMENT_BYTES = 64
"""Every tensor a kernel touches starts at a multiple of this (compiled kernels use aligned vector loads)."""


def align(offset: int, to: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of `to` that is not below `offset` (both bytes)."""
    return -(-offset // to) * to


DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Size in bytes of an element of every dtype a model's tensor may have."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (numpy spelling) and static shape of a model input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes of a dense tensor of this spec."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Status(str, Enum):
    """Outcome of measuring a candidate. Everything but `OK` is data too, and never enters a front."""

    OK = "ok"
    BUILD_ERROR = "build_error"
    RUN_ERROR = "run_error"
    TIMEOUT = "timeout"
    WRONG_RESULT = "wrong_result"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, order=True)
class Objectives:
    """What is minimised: solo latency (s), LLC footprint (bytes), traffic to shared levels (bytes per call)."""

    latency_s: float
    footprint_bytes: float
    traffic_bytes: float

    def vector(self) -> tuple[float, float, float]:
        """The objectives in their fixed order."""
        return (self.latency_s, self.footprint_bytes, self.traffic_bytes)


OBJECTIVE_UNITS: Mapping[str, str] = {"latency_s": "s", "footprint_bytes": "bytes", "traffic_bytes": "bytes"}


@dataclass(frozen=True, slots=True)
class HostTarget:
    """The CPU that code is generated for.

    Cache sizes are bytes: `l1d_bytes` and `l2_bytes` per core, `llc_bytes` shared by `num_cores`.
    `features` are the instruction-set extensions the code may use, in LLVM's spelling, sorted.
    """

    triple: str
    arch: str
    cpu: str
    features: tuple[str, ...]
    num_cores: int
    l1d_bytes: int
    l2_bytes: int
    llc_bytes: int
    vector_bits: int
    vector_registers: int
    cpu_model: str

    @property
    def key(self) -> str:
        """Digest of everything that makes a measurement comparable; records of another key are never mixed in."""
        return digest_json(asdict(self))[:16]


UNLIMITED_BYTES_PER_S = 1e15
"""A rate that no core reaches: as fast as it can."""


@dataclass(frozen=True, slots=True)
class Dials:
    """What a neighbour takes: bytes of the last-level cache that it keeps walking through, and bytes per second that it reads
    from and writes to memory. 0 is nothing, `UNLIMITED_BYTES_PER_S` as much as it can."""

    resident_bytes: int = 0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostView:
    """What a host profile (`mvcompile calibrate`) knows that profiling uses: the host's CPU, the core that is measured and the
    neighbour's (None: there is none), bytes of the last-level cache as loads see it, and of a probe's chain through it."""

    cpu_model: str
    measured_core: int
    neighbour_core: int | None
    llc_bytes: int
    chain_bytes: int


@dataclass(frozen=True, slots=True)
class Level:
    """An interference level: a name, and what a neighbour on one other core is set to, at this level."""

    name: str
    dials: Dials


def digest_json(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON form of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class Argument:
    """What a kernel takes at one place: parameter `position` of its task, as it is, or a weight in the form of the algorithm that
    `form` names."""

    position: int
    form: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """How far an output was from its reference, and the tolerance it had to meet (|a-b| <= atol + rtol*|b|)."""

    max_abs_error: float
    max_rel_error: float
    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Record:
    """A measured (or failed) candidate of a task.

    `trace` is the schedule's trace as JSON text; `space` names where it came from. Objectives and verification are
    present if and only if `status` is `OK`; `latency_spread` is the interquartile range of the timings over their median;
    `message` explains every other status.
    """

    task_key: str
    target_key: str
    fingerprint: str
    trace: str
    space: str
    status: Status
    objectives: Objectives | None = None
    latency_spread: float | None = None
    verification: Verification | None = None
    message: str = ""
    version: int = field(default=1)

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.objectives is not None):
            raise ValueError(f"a record has objectives if and only if its status is ok, got {self.status}")

    @property
    def trace_sha256(self) -> str:
        """Identity of the candidate within its task."""
        return hashlib.sha256(self.trace.encode()).hexdigest()
