"""The one loop that joins search, measurement and records."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mvcompile.config import TuningConfig
from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.protocol import Candidate, Measurer, Outcome, Subject
from mvcompile.records import RecordStore
from mvcompile.search.strategy import Allocation, Strategy
from mvcompile.tuning.fronts import front_of, hypervolume_ratio, latest, objectives_of
from mvcompile.types import Objectives, Record, Status

COMPARED_AT_MOST = 12
SETTLING_SHARE = 0.25
"""Of the budget, on top of it: what may be spent on comparing the fronts' members with each other once the search has ended."""


@dataclass(frozen=True, slots=True)
class TuningTask:
    """What the loop needs to know of a task: identity, weight in the model, and how to search it.

    `strategy` makes the search (only called for tasks that get a batch: building one may take a second); `fallbacks` are what to
    use if `default` should not work, best first. `shares`: spaces whose kernels need only a share of the `flops`.
    """

    name: str
    subject: Subject
    calls: int
    flops: float
    moved_bytes: float
    default: Candidate
    strategy: Callable[[], Strategy[Candidate]]
    fallbacks: Callable[[], Sequence[Candidate]] = tuple
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of the tuning, for whoever shows it: something of `task` was measured.

    Times in seconds. `trials`, `failed` and `model_s` (the sum of the best latencies of all layers measured so far) are the whole
    model's; `best_s` and `front_size` are the task's. `left_s` is None when only the number of trials is limited.
    """

    task: str
    trials: int
    best_s: float | None
    front_size: int
    elapsed_s: float
    left_s: float | None
    model_s: float
    failed: int


class Clock(Protocol):
    """Tuning seconds already spent on this model, kept across interruptions."""

    spent_s: float

    def add(self, seconds: float) -> None:
        """Counts `seconds` and keeps the sum where the next run finds it."""


@dataclass(slots=True)
class _State:
    """A task while it is tuned."""

    task: TuningTask
    records: list[Record]
    strategy: Strategy[Candidate] | None = None
    size: int | None = None
    ended: bool = False


class Tuner:
    """Tunes the tasks of one model for one target.

    Records are appended to `store` after every batch, so an interruption loses at most the batch in flight; records that are
    there already count as tried. Raises EnvironmentProblem when a task has no schedule that runs and is right.
    """

    def __init__(
        self,
        tasks: Sequence[TuningTask],
        store: RecordStore,
        measurer: Measurer,
        *,
        target_key: str,
        fingerprint: str,
        config: TuningConfig,
        clock: Clock,
        report: Callable[[Progress], None] = lambda progress: None,
        allocation: Allocation | None = None,
    ) -> None:
        self._store, self._measurer, self._config, self._clock, self._report = store, measurer, config, clock, report
        self._identity = (target_key, fingerprint)
        self._states = [_State(task, list(store.records(task.subject.key, target_key, fingerprint))) for task in tasks]
        self._allocation = allocation or Allocation()
        for state in self._states:
            for record in state.records:
                self._note(state.task, record)

    @property
    def trials(self) -> int:
        """Distinct candidates recorded for this model's tasks, defaults not counted."""
        return sum(max(0, len(latest(state.records)) - 1) for state in self._states)

    def run(self) -> Mapping[str, tuple[Record, ...]]:
        """All records per task key, in the order they were made."""
        for state in self._states:
            self._measure_default(state)
        while not self._spent():
            promising = self._most_promising()
            if promising is None:
                break
            self._measure_batch(promising)
        self._settle_fronts()
        return {state.task.subject.key: tuple(state.records) for state in self._states}

    def _spent(self) -> bool:
        if self._clock.spent_s >= self._config.seconds:
            return True
        return self._config.trials is not None and self.trials >= self._config.trials

    def _measure_default(self, state: _State) -> None:
        """Every task starts with the schedule it would have without a search: what is to be improved, and the fallback."""
        if any(record.status is Status.OK for record in latest(state.records).values()):
            return
        outcome = self._try(state, state.task.default)
        if outcome.status is Status.OK:
            return
        if any(self._try(state, fallback).status is Status.OK for fallback in state.task.fallbacks()):
            return
        raise EnvironmentProblem(
            f"the default schedule of task {state.task.name} ({state.task.subject.key}) is unusable: {outcome.status.value}: "
            f"{outcome.message}; if the machine was busy or short of memory, run again to resume"
        )

    def _try(self, state: _State, candidate: Candidate) -> Outcome:
        outcome = self._measurer.measure(state.task.subject, [candidate], None)[0]
        self._append(state, [candidate], [outcome])
        self._show(state)
        return outcome

    def _most_promising(self) -> _State | None:
        gains = [(self._gain(state), -index) for index, state in enumerate(self._states)]
        best, index = max(gains, default=(0.0, 0))
        return self._states[-index] if best > 0 else None

    def _gain(self, state: _State) -> float:
        """Of the task's next batch, for each second that it will take; for each trial if only their number is limited."""
        if state.ended:
            return 0.0
        left = state.strategy.remaining if state.strategy is not None else None
        unswept = 1.0 if state.strategy is None else None if left is None else left / max(state.size or 1, 1)
        task = state.task
        least_flops = task.flops * min(task.shares.values(), default=1.0)
        gain = self._allocation.gain_s(task.subject.key, task.calls, least_flops, task.moved_bytes, unswept)
        return gain / self._allocation.price(task.subject.key)

    def _measure_batch(self, state: _State) -> None:
        start = time.monotonic()
        count = self._config.batch
        if self._config.trials is not None:
            count = min(count, self._config.trials - self.trials)
        if state.strategy is None:
            self._begin(state)
        assert state.strategy is not None
        state.strategy.relate(self._related(state))
        candidates = state.strategy.ask(count)
        if not candidates:
            state.ended = True
            self._clock.add(time.monotonic() - start)
            return
        best, front = self._allocation.best(state.task.subject.key), front_of(state.records)
        outcomes = self._measurer.measure(state.task.subject, candidates, best)
        self._append(state, candidates, outcomes)
        state.strategy.tell([(candidate, each.objectives) for candidate, each in zip(candidates, outcomes, strict=True)])
        share = hypervolume_ratio(*([objectives_of(each) for each in found] for found in (front, front_of(state.records))))
        seconds = time.monotonic() - start
        price = seconds if math.isfinite(self._config.seconds) else 1.0
        self._allocation.batch_ended(state.task.subject.key, best, 1.0 - share, price)
        self._clock.add(seconds)
        self._show(state)

    def _begin(self, state: _State) -> None:
        """Makes the search and tells it what earlier runs found."""
        state.strategy = state.task.strategy()
        state.size = state.strategy.remaining
        state.strategy.tell(_results(state.records))

    def _related(self, state: _State) -> list[list[tuple[Candidate, Objectives | None]]]:
        """What is known of other tasks on this target, those of other models in the store included."""
        own = state.task.subject.key
        return [_results(self._store.records(key, *self._identity)) for key in self._store.tasks(*self._identity) if key != own]

    def _append(self, state: _State, candidates: Sequence[Candidate], outcomes: Sequence[Outcome]) -> None:
        target_key, fingerprint = self._identity
        records = [
            Record(
                state.task.subject.key,
                target_key,
                fingerprint,
                candidate.trace,
                candidate.space,
                outcome.status,
                outcome.objectives,
                outcome.latency_spread,
                outcome.verification,
                outcome.message,
            )
            for candidate, outcome in zip(candidates, outcomes, strict=True)
        ]
        self._store.append(records)
        state.records += records
        for record in records:
            self._note(state.task, record)

    def _note(self, task: TuningTask, record: Record) -> None:
        if record.objectives is not None:
            flops = task.flops * task.shares.get(record.space, 1.0)
            self._allocation.saw(task.subject.key, record.objectives.latency_s, flops, task.moved_bytes)

    def _settle_fronts(self) -> None:
        """Measures the fronts' members again, interleaved and precisely: what was measured minutes apart is not comparable.

        The tasks that take most of the model's time come first, since this is paid on top of the budget, and ends in time.
        """
        until = self._config.seconds * (1.0 + SETTLING_SHARE)
        heaviest = sorted(self._states, key=lambda state: -self._seconds(state))
        for state in heaviest:
            while self._clock.spent_s < until and self._settle_front(state):
                pass

    def _settle_front(self, state: _State) -> bool:
        """Compares the members of one front; whether there was anything to compare.

        A member with a second record was settled before. Members that leave the front may make room for others, so that it takes
        several passes at times; it ends because every pass settles a member for good. Resuming measures nothing more.
        """
        front = front_of(state.records)[:COMPARED_AT_MOST]
        times_seen = Counter(record.trace for record in state.records if record.status is Status.OK)
        if len(front) < 2 or all(times_seen[member.trace] > 1 for member in front):
            return False
        start = time.monotonic()
        candidates = [Candidate(record.trace, record.space) for record in front]
        self._append(state, candidates, self._measurer.compare(state.task.subject, candidates))
        self._clock.add(time.monotonic() - start)
        self._show(state)
        return True

    def _seconds(self, state: _State) -> float:
        """What the task takes of a run of the model, as far as is known."""
        return state.task.calls * (self._allocation.best(state.task.subject.key) or 0.0)

    def _show(self, state: _State) -> None:
        model_s = sum(map(self._seconds, self._states))
        failed = sum(record.status is not Status.OK for each in self._states for record in each.records)
        left = self._config.seconds - self._clock.spent_s
        front = front_of(state.records)
        self._report(
            Progress(
                state.task.name,
                self.trials,
                objectives_of(front[0]).latency_s if front else None,
                len(front),
                self._clock.spent_s,
                max(0.0, left) if left != float("inf") else None,
                model_s,
                failed,
            )
        )


def _results(records: Sequence[Record]) -> list[tuple[Candidate, Objectives | None]]:
    """What a search is told of records: the last outcome of every candidate."""
    return [(Candidate(*identity), found) for identity, found in {(r.trace, r.space): r.objectives for r in records}.items()]
