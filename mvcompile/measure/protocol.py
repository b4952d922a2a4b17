"""What the tuning loop and a measurer say to each other: plain values, so that fakes need no TVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mvcompile.types import Objectives, Status, Verification


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule to measure: its trace (JSON text) and the name of the space it came from."""

    trace: str
    space: str


@dataclass(frozen=True, slots=True)
class Subject:
    """The task that candidates belong to: `module` is its unscheduled program (TVM's JSON), `constants` the positions of weights.

    `weights_cold`: the model does not fit the last-level cache, so weights are flushed before every timed call."""

    key: str
    module: str
    constants: tuple[int, ...]
    num_outputs: int
    weights_cold: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate. Objectives and spread are present if and only if it was timed, which needs `status` ok."""

    status: Status
    objectives: Objectives | None = None
    latency_spread: float | None = None
    verification: Verification | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker process answers to a request that raised an exception."""

    text: str


class Measurer(Protocol):
    """Builds, checks and times candidates. Failures are outcomes; an exception means the set-up is broken."""

    def measure(self, subject: Subject, candidates: Sequence[Candidate], best_latency_s: float | None) -> list[Outcome]:
        """One outcome per candidate, in order. Candidates much slower than `best_latency_s` are timed coarsely."""

    def compare(self, subject: Subject, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Like `measure`, precisely and interleaved (A, B, A, B, ...), so that small differences between candidates hold."""

    def close(self) -> None:
        """Ends the workers."""
