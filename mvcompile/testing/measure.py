"""Measuring without hardware: fakes for the tuning loop, which need no TVM and always say the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from mvcompile.measure.protocol import Candidate, Outcome, Subject
from mvcompile.types import Objectives, Status, Verification

Behaviour = Callable[[Subject, Candidate], Outcome]

EXACT = Verification(0.0, 0.0, 1e-5, 1e-6)


def valid(latency_s: float, footprint_bytes: float = 0.0, traffic_bytes: float = 1e6) -> Outcome:
    """A candidate that was timed."""
    return Outcome(Status.OK, Objectives(latency_s, footprint_bytes, traffic_bytes), 0.01, EXACT)


def failed(status: Status, message: str = "as the test wants it") -> Outcome:
    """A candidate that was not."""
    return Outcome(status, message=message)


def a_subject(key: str) -> Subject:
    """A task of that key, without a program."""
    return Subject(key, "", (), 1, weights_cold=True)


class FakeMeasurer:
    """A `Measurer` that asks `behaviour` what becomes of a candidate when it is measured, and `comparison` when it is compared
    (the same by default).

    It keeps what it was asked to do: `measured` and `compared` are (task key, traces) of every call in order, `bests` the best
    latency that came with each call of `measure`. `before` is called with the number of the call of `measure`, from 0, before
    anything is done: whatever it raises interrupts the measuring.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        *,
        comparison: Behaviour | None = None,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._behaviour, self._comparison, self._before = behaviour, comparison or behaviour, before
        self.measured: list[tuple[str, tuple[str, ...]]] = []
        self.compared: list[tuple[str, tuple[str, ...]]] = []
        self.bests: list[float | None] = []
        self.closed = False

    @property
    def traces(self) -> list[str]:
        """The traces of all candidates that were measured, in order."""
        return [trace for _, traces in self.measured for trace in traces]

    def measure(self, subject: Subject, candidates: Sequence[Candidate], best_latency_s: float | None) -> list[Outcome]:
        """See `Measurer`."""
        self._before(len(self.measured))
        self.measured.append((subject.key, tuple(candidate.trace for candidate in candidates)))
        self.bests.append(best_latency_s)
        return [self._behaviour(subject, candidate) for candidate in candidates]

    def compare(self, subject: Subject, candidates: Sequence[Candidate]) -> list[Outcome]:
        """See `Measurer`."""
        self.compared.append((subject.key, tuple(candidate.trace for candidate in candidates)))
        return [self._comparison(subject, candidate) for candidate in candidates]

    def close(self) -> None:
        """See `Measurer`."""
        self.closed = True

    def __enter__(self) -> FakeMeasurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SteadyClock:
    """A tuning `Clock` on which every step takes `step_s` seconds, whatever it took."""

    def __init__(self, step_s: float = 0.0, spent_s: float = 0.0) -> None:
        self.step_s, self.spent_s = step_s, spent_s

    def add(self, seconds: float) -> None:
        """See `Clock`."""
        assert seconds >= 0
        self.spent_s += self.step_s


class EndlessStrategy:
    """A search `Strategy` without an end: `prefix`0, `prefix`1, ... in space `generic`. It keeps what it is told, and what it
    was last told of other tasks."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._next = prefix, 0
        self.told: list[tuple[Candidate, Objectives | None]] = []
        self.related: list[Sequence[tuple[Candidate, Objectives | None]]] = []

    @property
    def remaining(self) -> int | None:
        return None

    def ask(self, count: int) -> list[Candidate]:
        """See `Strategy`."""
        known = {candidate.trace for candidate, _ in self.told}
        asked: list[Candidate] = []
        while len(asked) < count:
            candidate, self._next = Candidate(f"{self._prefix}{self._next}", "generic"), self._next + 1
            if candidate.trace not in known:
                asked.append(candidate)
        return asked

    def tell(self, results: Sequence[tuple[Candidate, Objectives | None]]) -> None:
        """See `Strategy`."""
        self.told += results

    def relate(self, tasks: Sequence[Sequence[tuple[Candidate, Objectives | None]]]) -> None:
        """See `Strategy`."""
        self.related = list(tasks)
