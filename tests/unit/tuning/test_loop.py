"""The tuning loop with a measurer that measures nothing."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mvcompile.config import TuningConfig
from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.protocol import Candidate, Outcome, Subject
from mvcompile.records import DiskStore, MemoryStore, RecordStore
from mvcompile.search.strategy import Allocation, PoolStrategy, Strategy
from mvcompile.testing.measure import EndlessStrategy, FakeMeasurer, SteadyClock, a_subject, failed, valid
from mvcompile.tuning.fronts import front_of
from mvcompile.tuning.loop import Progress, Tuner, TuningTask
from mvcompile.types import Record, Status

POOL = 20


def behave(subject: Subject, candidate: Candidate) -> Outcome:
    """`task/17` takes 17 ms more than the best; every seventh fails. All have the same traffic, so the front is one point."""
    name, _, number = candidate.trace.partition("/")
    if number == "default":
        return valid(0.5)
    if int(number) % 7 == 3:
        return failed(Status.RUN_ERROR, f"{name} crashed")
    return valid(0.1 + int(number) / 1000)


def trade_off(subject: Subject, candidate: Candidate) -> Outcome:
    """The slower, the less traffic: every candidate is on the front, but the default."""
    _, _, number = candidate.trace.partition("/")
    return valid(0.5, 0.0, 1e9) if number == "default" else valid(0.3 + int(number) / 100, 0.0, 1e9 / (1 + int(number)))


def a_task(
    name: str, *, size: int = POOL, calls: int = 1, strategy: Callable[[], Strategy[Candidate]] | None = None,
    fallbacks: Sequence[Candidate] = (),
) -> TuningTask:  # fmt: skip
    pool = [Candidate(f"{name}/{i}", "dense") for i in range(size)]
    return TuningTask(
        name=f"fused_{name}",
        subject=a_subject(name),
        calls=calls,
        flops=1e6,
        moved_bytes=1e6,
        default=Candidate(f"{name}/default", "default"),
        strategy=strategy or (lambda: PoolStrategy(pool, seed=1)),
        fallbacks=lambda: fallbacks,
    )


def a_tuner(
    tasks: Sequence[TuningTask],
    store: RecordStore,
    measurer: FakeMeasurer,
    *,
    clock: SteadyClock | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    target: str = "target",
    trials: int | None = None,
    budget_s: float | None = None,
    batch: int = 4,
) -> Tuner:
    config = TuningConfig(budget_s=budget_s, trials=trials, batch=batch)
    return Tuner(
        tasks, store, measurer,
        target_key=target, fingerprint="prepared", config=config, clock=clock or SteadyClock(), report=report,
    )  # fmt: skip


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as opened:
        yield opened


def refuse() -> Strategy[Candidate]:
    raise AssertionError("no search was to begin")


def test_measures_every_default_before_anything_else(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a"), a_task("b")], store, measurer, trials=3).run()
    assert measurer.measured[:2] == [("a", ("a/default",)), ("b", ("b/default",))]
    assert measurer.bests[:2] == [None, None]
    assert "default" not in "".join(measurer.traces[2:])


def test_no_budget_means_defaults_only(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    tuner = a_tuner([a_task("a", strategy=refuse)], store, measurer, budget_s=0)
    records = tuner.run()
    assert measurer.traces == ["a/default"]
    assert tuner.trials == 0
    assert [record.status for record in records["a"]] == [Status.OK]


@pytest.mark.parametrize("trials", [0, 1, 4, 7, 2 * POOL])
def test_measures_as_many_candidates_as_allowed_each_once(trials: int, store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    tuner = a_tuner([a_task("a"), a_task("b")], store, measurer, trials=trials)
    tuner.run()
    assert len(measurer.traces) == len(set(measurer.traces)) == 2 + trials
    assert tuner.trials == trials
    assert max(len(traces) for _, traces in measurer.measured) <= 4


def test_ends_when_everything_was_measured(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a"), a_task("b", size=0)], store, measurer, trials=1000).run()
    assert sorted(measurer.traces) == sorted(["a/default", "b/default", *(f"a/{i}" for i in range(POOL))])


def test_ends_when_the_time_is_up(store: MemoryStore) -> None:
    measurer, clock = FakeMeasurer(behave), SteadyClock(step_s=10)
    a_tuner([a_task("a", size=1000)], store, measurer, clock=clock, budget_s=35).run()
    assert len(measurer.measured) == 1 + 4
    assert clock.spent_s == 40
    a_tuner([a_task("a", size=1000)], store, measurer, clock=clock, budget_s=60).run()
    assert len(measurer.measured) == 1 + 6  # what earlier runs spent counts


@pytest.mark.parametrize(("limit", "waits"), [({"budget_s": 120.0}, True), ({"trials": 48}, False)])
def test_what_takes_long_to_measure_waits_if_time_is_short(
    limit: dict[str, Any], waits: bool, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(subject: Subject, candidate: Candidate) -> Outcome:
        now[0] += 10.0 if candidate.trace.startswith("dear") else 1.0
        return valid(0.5)

    measurer = FakeMeasurer(slow)
    a_tuner([a_task("dear", size=100), a_task("cheap", size=100)], store, measurer, clock=SteadyClock(10), **limit).run()
    counts = Counter(name for name, _ in measurer.measured)
    assert counts["cheap"] + counts["dear"] == 2 + 12
    assert (counts["cheap"] - counts["dear"] >= 3) is waits  # with each batch that brings nothing, half of the hope is lost


def test_the_first_of_two_limits_ends_it(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a", size=1000)], store, measurer, clock=SteadyClock(10), budget_s=15, trials=1000).run()
    assert len(measurer.traces) == 1 + 8


def test_time_of_a_search_that_finds_nothing_counts(store: MemoryStore) -> None:
    clock = SteadyClock(step_s=10)
    a_tuner([a_task("a", size=0)], store, FakeMeasurer(behave), clock=clock, budget_s=100).run()
    assert clock.spent_s == 10


def test_a_search_without_end_ends_when_it_stops_to_help(store: MemoryStore) -> None:
    strategy = EndlessStrategy("a/1")  # a/10, a/11, ...: the first batch holds the best one
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a", strategy=lambda: strategy)], store, measurer, trials=10_000).run()
    assert len(measurer.measured) == 1 + 1 + Allocation.PATIENCE
    told = {candidate.trace: found and found.latency_s for candidate, found in strategy.told}
    assert set(told) == set(measurer.traces)
    assert told["a/default"] == 0.5
    assert told["a/10"] is None
    assert told["a/11"] == pytest.approx(0.111)


def test_a_task_whose_front_stagnates_gives_way_to_one_whose_front_grows(store: MemoryStore) -> None:
    """All of a take the same; b is a little faster, and every candidate of it is on the front."""

    def behaviour(subject: Subject, candidate: Candidate) -> Outcome:
        name, _, number = candidate.trace.partition("/")
        if number == "default" or name == "a":
            return valid(1.0 if name == "a" else 0.9, 0.0, 1e9)
        return valid(0.9 + int(number) / 1000, 0.0, 1e9 - 1e7 * int(number))

    measurer = FakeMeasurer(behaviour)
    a_tuner([a_task("a", size=100), a_task("b", size=100)], store, measurer, trials=40).run()
    batches = [key for key, _ in measurer.measured[2:]]
    assert batches[0] == "a"
    assert batches.count("b") > batches.count("a")


def test_searches_hear_of_the_other_tasks_of_their_target(store: MemoryStore) -> None:
    """Also of what is in the store of another model's tasks, and never of another target's."""
    Tuner(
        [a_task("far")], store, FakeMeasurer(behave),
        target_key="other", fingerprint="prepared", config=TuningConfig(trials=4), clock=SteadyClock(),
    ).run()  # fmt: skip
    a_tuner([a_task("old")], store, FakeMeasurer(behave), trials=2).run()
    strategies = {name: EndlessStrategy(f"{name}/1") for name in "ab"}
    tasks = [a_task(name, strategy=lambda name=name: strategies[name]) for name in strategies]  # type: ignore[misc]
    a_tuner(tasks, store, FakeMeasurer(behave), trials=8).run()
    assert [len(each) for each in strategies["a"].related] == [3, 1]  # before b's first batch
    old, a = strategies["b"].related
    assert [candidate.trace for candidate, _ in old] == [
        "old/default",
        *(r.trace for r in store.records("old", "target", "prepared")[1:]),
    ]
    assert [found and found.latency_s for _, found in a] == pytest.approx([0.5, None, 0.111, 0.112, 0.113])


def test_gives_batches_to_the_task_that_costs_the_model_most(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a"), a_task("b", calls=1000), a_task("c")], store, measurer, trials=12).run()
    assert [key for key, _ in measurer.measured[3:]] == ["b"] * 3


def test_tells_the_measurer_the_best_latency(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a")], store, measurer, trials=POOL).run()
    assert measurer.bests[1] == 0.5
    assert min(best for best in measurer.bests if best is not None) < 0.2
    assert measurer.bests[1:] == sorted(measurer.bests[1:], reverse=True)  # type: ignore[type-var]


def test_failures_are_records_with_their_reason_and_never_on_the_front(store: MemoryStore) -> None:
    records = a_tuner([a_task("a")], store, FakeMeasurer(behave), trials=POOL).run()["a"]
    failures = [record for record in records if record.status is not Status.OK]
    assert {record.trace for record in failures} == {"a/3", "a/10", "a/17"}
    assert all(record.message == "a crashed" and record.objectives is None for record in failures)
    assert [record.trace for record in front_of(records)] == ["a/0"]


def test_records_say_what_was_measured(store: MemoryStore) -> None:
    a_tuner([a_task("a")], store, FakeMeasurer(behave), trials=4).run()
    for record in store.records("a", "target", "prepared"):
        assert (record.task_key, record.target_key, record.fingerprint) == ("a", "target", "prepared")
        assert record.space == ("default" if record.trace == "a/default" else "dense")
    assert store.count == 5


def test_resuming_measures_nothing_twice(store: MemoryStore) -> None:
    tasks = [a_task("a"), a_task("b")]
    first, second, third = FakeMeasurer(behave), FakeMeasurer(behave), FakeMeasurer(behave)
    a_tuner(tasks, store, first, trials=5).run()
    a_tuner(tasks, store, second, trials=12).run()
    assert len(second.traces) == 7
    assert not set(first.traces) & set(second.traces)
    before = store.count
    tuner = a_tuner(tasks, store, third, trials=12)
    assert tuner.trials == 12
    records = tuner.run()
    assert third.measured == third.compared == []
    assert store.count == before == sum(map(len, records.values()))


@pytest.mark.parametrize("moment", [0, 1, 2, 5])
def test_an_interruption_loses_the_batch_in_flight_at_most(moment: int, tmp_path: Path) -> None:
    def interrupt(number: int) -> None:
        if number == moment:
            raise KeyboardInterrupt

    tasks = [a_task("a"), a_task("b")]
    interrupted, resumed = FakeMeasurer(behave, before=interrupt), FakeMeasurer(behave)
    with DiskStore(tmp_path) as store, pytest.raises(KeyboardInterrupt):
        a_tuner(tasks, store, interrupted, trials=2 * POOL).run()
    assert len(interrupted.measured) == moment
    with DiskStore(tmp_path) as store:
        assert store.count == len(interrupted.traces)
        records = a_tuner(tasks, store, resumed, trials=2 * POOL).run()
    assert not set(interrupted.traces) & set(resumed.traces)
    assert len(interrupted.traces) + len(resumed.traces) == 2 + 2 * POOL
    assert {key: front_of(found)[0].trace for key, found in records.items()} == {"a": "a/0", "b": "b/0"}


@pytest.mark.parametrize(("target", "prepared"), [("other", "prepared"), ("target", "other")])
def test_records_of_another_target_or_preparation_do_not_count(target: str, prepared: str, store: MemoryStore) -> None:
    strange = FakeMeasurer(behave)
    Tuner(
        [a_task("a")], store, strange,
        target_key=target, fingerprint=prepared, config=TuningConfig(trials=POOL), clock=SteadyClock(),
    ).run()  # fmt: skip
    measurer = FakeMeasurer(behave)
    tuner = a_tuner([a_task("a")], store, measurer, trials=4)
    assert tuner.trials == 0
    tuner.run()
    assert len(measurer.traces) == 5


def test_a_default_that_does_not_work_gives_way_to_a_fallback(store: MemoryStore) -> None:
    def behaviour(subject: Subject, candidate: Candidate) -> Outcome:
        return valid(0.4) if candidate.trace == "plain" else failed(Status.WRONG_RESULT, "differs")

    fallbacks = [Candidate("worse", "default"), Candidate("plain", "default"), Candidate("never tried", "default")]
    task = a_task("a", fallbacks=fallbacks)
    measurer, again = FakeMeasurer(behaviour), FakeMeasurer(behaviour)
    records = a_tuner([task], store, measurer, budget_s=0).run()["a"]
    assert measurer.traces == ["a/default", "worse", "plain"]
    assert [record.trace for record in front_of(records)] == ["plain"]
    a_tuner([task], store, again, budget_s=0).run()
    assert again.traces == []


def test_a_task_without_any_schedule_that_works_is_an_error_and_is_tried_again(store: MemoryStore) -> None:
    measurer = FakeMeasurer(lambda subject, candidate: failed(Status.TIMEOUT, "its time was up"))
    with pytest.raises(EnvironmentProblem, match=r"fused_a \(a\).*timeout: its time was up.*run again"):
        a_tuner([a_task("a")], store, measurer, budget_s=0).run()
    assert store.records("a", "target", "prepared")[0].status is Status.TIMEOUT
    a_tuner([a_task("a")], store, FakeMeasurer(behave), budget_s=0).run()
    assert store.records("a", "target", "prepared")[-1].status is Status.OK


def test_settles_a_front_by_one_comparison_and_not_again(store: MemoryStore) -> None:
    measurer, again = FakeMeasurer(trade_off), FakeMeasurer(trade_off)
    records = a_tuner([a_task("a", size=6)], store, measurer, trials=6).run()["a"]
    front = [record.trace for record in front_of(records)]
    assert front == [f"a/{i}" for i in range(6)]
    assert measurer.compared == [("a", tuple(front))]
    a_tuner([a_task("a", size=6)], store, again, trials=6).run()
    assert again.compared == []


def test_a_front_of_one_is_not_compared(store: MemoryStore) -> None:
    measurer = FakeMeasurer(behave)
    a_tuner([a_task("a")], store, measurer, trials=POOL).run()
    assert measurer.compared == []


def test_the_comparison_decides_and_who_enters_then_is_settled_too(store: MemoryStore) -> None:
    """a/0 was measured too fast, and a/1 crashes at times: without them two others are on the front."""

    def behaviour(subject: Subject, candidate: Candidate) -> Outcome:
        found = {"a/0": (0.2, 5e6), "a/1": (0.3, 1e6), "a/2": (0.25, 6e6), "a/3": (0.35, 2e6), "a/default": (0.5, 9e6)}
        latency, traffic = found[candidate.trace]
        return valid(latency, 0.0, traffic)

    def comparison(subject: Subject, candidate: Candidate) -> Outcome:
        if candidate.trace == "a/1":
            return failed(Status.RUN_ERROR)
        return valid(0.28, 0.0, 5e6) if candidate.trace == "a/0" else behaviour(subject, candidate)

    measurer, again = FakeMeasurer(behaviour, comparison=comparison), FakeMeasurer(behaviour, comparison=comparison)
    records = a_tuner([a_task("a", size=4)], store, measurer, trials=4).run()["a"]
    assert measurer.compared == [("a", ("a/0", "a/1")), ("a", ("a/2", "a/0", "a/3"))]
    assert [record.trace for record in front_of(records)] == ["a/2", "a/0", "a/3"]
    a_tuner([a_task("a", size=4)], store, again, trials=4).run()
    assert again.compared == []


def test_settling_ends_however_results_jump(store: MemoryStore) -> None:
    """Each comparison makes its members slow, so that others enter, until there are no others."""
    measurer = FakeMeasurer(trade_off, comparison=lambda subject, candidate: valid(0.9, 0.0, 1e9))
    a_tuner([a_task("a")], store, measurer, trials=POOL).run()
    compared = list(itertools.chain.from_iterable(traces for _, traces in measurer.compared))
    assert 1 < len(measurer.compared) <= POOL
    assert set(compared) <= {f"a/{i}" for i in range(POOL)} | {"a/default"}


def test_reports_what_happened(store: MemoryStore) -> None:
    events: list[Progress] = []
    clock = SteadyClock(step_s=10)
    tasks = [a_task("a"), a_task("b", calls=3)]
    a_tuner(tasks, store, FakeMeasurer(behave), clock=clock, report=events.append, budget_s=55).run()
    assert [event.task for event in events[:2]] == ["fused_a", "fused_b"]
    assert [event.trials for event in events] == [0, 0, 4, 8, 12, 16, 20, 24]
    assert [event.elapsed_s for event in events] == [0, 0, 10, 20, 30, 40, 50, 60]
    assert [event.left_s for event in events] == [55, 55, 45, 35, 25, 15, 5, 0]
    assert events[0].model_s == 0.5
    assert events[1].model_s == 0.5 + 3 * 0.5
    model = [event.model_s for event in events[1:]]
    assert model == sorted(model, reverse=True)
    assert model[-1] < model[0]
    records = [record for key in "ab" for record in store.records(key, "target", "prepared")]
    assert events[-1].failed == sum(record.status is not Status.OK for record in records) > 0
    for event in events:
        assert event.front_size == 1
        assert event.best_s is not None
        assert 0.1 <= event.best_s <= 0.5


def test_says_that_there_is_no_time_limit(store: MemoryStore) -> None:
    events: list[Progress] = []
    a_tuner([a_task("a")], store, FakeMeasurer(trade_off), report=events.append, trials=4).run()
    assert [event.left_s for event in events] == [None] * 3
    assert events[-1].front_size == 4  # settling it was reported too


def test_a_model_without_tasks_needs_no_tuning(store: MemoryStore) -> None:
    assert a_tuner([], store, FakeMeasurer(behave), budget_s=100).run() == {}


def records_of(store: RecordStore) -> list[Record]:
    return list(store.records("a", "target", "prepared"))


def test_the_seed_and_the_outcomes_decide_everything() -> None:
    runs = []
    for _ in range(2):
        with MemoryStore() as store:
            a_tuner([a_task("a"), a_task("b")], store, FakeMeasurer(behave), trials=15).run()
            runs.append(records_of(store))
    assert runs[0] == runs[1]


def test_settling_is_paid_on_top_of_the_budget_by_a_share_of_it_and_the_heaviest_task_comes_first(store: MemoryStore) -> None:
    """Every step takes 10 s: ten batches, then three comparisons until 125 s."""
    tasks = [a_task(name, size=POOL, calls=calls) for name, calls in (("a", 1), ("b", 3), ("c", 2))]
    measurer = FakeMeasurer(trade_off)
    a_tuner(tasks, store, measurer, clock=SteadyClock(step_s=10), budget_s=100).run()
    assert [name for name, _ in measurer.compared][:1] == ["b"]
    assert len(measurer.compared) == 3
