"""From records to fronts and to the variants that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvcompile.tuning.fronts import MAX_SLOWDOWN, NOISE, front_of, hypervolume_ratio, latest, objectives_of, pareto_set
from mvcompile.types import Objectives, Record, Status

TRADE_OFF = [(1.0, 9e6), (1.1, 7e6), (1.2, 5e6), (1.3, 3e6), (1.5, 2e6), (1.8, 1e6)]
"""Latencies (s) and traffics (bytes) of which none is better in both."""


def record(trace: str, latency_s: float, traffic_bytes: float = 1e6, footprint_bytes: float = 0.0) -> Record:
    objectives = Objectives(latency_s, footprint_bytes, traffic_bytes)
    return Record("task", "target", "prepared", trace, "dense", Status.OK, objectives, 0.01)


def failure(trace: str, status: Status = Status.WRONG_RESULT) -> Record:
    return Record("task", "target", "prepared", trace, "dense", status, message="why")


def traces(records: Sequence[Record]) -> str:
    return "".join(each.trace for each in records)


def front_records() -> list[Record]:
    return [record("abcdef"[i], *point) for i, point in enumerate(TRADE_OFF)]


def test_front_is_what_nothing_beats_fastest_first() -> None:
    records = [record("slow", 1.6, 9e6), *reversed(front_records()), record("x", 1.31, 5e6)]
    assert traces(front_of(records)) == "abcdef"
    assert front_of([]) == ()


def test_the_last_record_of_a_trace_counts() -> None:
    records = [record("a", 1.0, 9e6), record("b", 1.2, 5e6), record("a", 1.4, 9e6)]
    assert [each.trace for each in latest(records).values()] == ["a", "b"]
    assert traces(front_of(records)) == "b"
    assert traces(front_of([*records, record("a", 0.9, 9e6)])) == "ab"


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_failed_records_never_enter(status: Status) -> None:
    records = [record("a", 1.0), failure("b", status)]
    assert traces(front_of(records)) == "a"
    assert front_of([failure("b", status)]) == ()
    assert front_of([record("a", 1.0), failure("a", status)]) == ()  # it was good once, and is not any more
    assert pareto_set(records, 5).measured == 1
    empty = pareto_set([failure("b", status)], 5)
    assert (empty.measured, empty.front, empty.kept, empty.hypervolume_ratio) == (0, (), (), 1.0)


def test_latencies_are_equal_within_what_their_timings_resolve() -> None:
    """The wider timings spread, the more two latencies have to differ to be a choice; of traffic, nothing is timed."""

    def found(spread: float) -> str:
        records = [record("a", 1.0, 9e6), record("b", 1.05, 5e6), record("c", 1.1, 4.7e6), record("d", 1.4, 2e6)]
        return traces(front_of(replace(each, latency_spread=spread) for each in records))

    assert found(0.01) == "abcd"
    assert found(0.10) == "acd"  # b and c are as fast, within 7 %, and c moves less
    assert found(1.00) == "ad"


def test_what_differs_by_noise_is_equal() -> None:
    near = 1 + NOISE / 2
    assert traces(front_of([record("a", 1.0, 1e6), record("b", near, 1e6 / near)])) == "a"
    kinder = [record("a", 1.0, 1e6), record("b", near, 0.5e6), record("c", near, 0.9e6)]
    assert traces(front_of(kinder)) == "ab"  # the fastest stays, whatever moves less in nearly the same time
    assert traces(front_of([record("a", 1.0, 1e6), record("b", 1 + 2 * NOISE, 0.5e6)])) == "ab"


def test_what_is_far_slower_is_no_choice() -> None:
    records = [record("a", 1.0, 9e6), record("b", 0.99 * MAX_SLOWDOWN, 2e6), record("c", 1.01 * MAX_SLOWDOWN, 1.0)]
    assert traces(front_of(records)) == "ab"
    assert pareto_set(records, 5).measured == 3


def test_one_good_schedule_gives_one_variant() -> None:
    records = [record("a", 1.0, 1e6), record("b", 1.5, 1e6), record("c", 1.2, 2e6, 3e6), record("d", 1.001, 1e6)]
    found = pareto_set(records, 5)
    assert traces(found.kept) == traces(found.front) == "a"
    assert found.measured == 4
    assert found.hypervolume_ratio == 1.0


def test_keeps_all_when_there_is_room_and_loses_volume_when_there_is_not() -> None:
    everything = pareto_set(front_records(), 6)
    assert traces(everything.kept) == "abcdef"
    assert everything.hypervolume_ratio == 1.0
    ratios = []
    for count in (1, 2, 3, 4, 5):
        found = pareto_set(front_records(), count)
        assert len(found.kept) == count
        assert found.kept[0].trace == "a"
        assert traces(found.front) == "abcdef"
        assert 0 < found.hypervolume_ratio < 1
        ratios.append(found.hypervolume_ratio)
    assert ratios == sorted(ratios)


def test_does_not_depend_on_the_order_of_records() -> None:
    forward, backward = pareto_set(front_records(), 3), pareto_set(front_records()[::-1], 3)
    assert forward == backward
    assert traces(pareto_set([record("b", 1.0), record("a", 1.0)], 3).kept) == traces(
        pareto_set([record("a", 1.0), record("b", 1.0)], 3).kept
    )


def test_ratio_of_a_selection_is_that_of_its_objectives() -> None:
    found = pareto_set(front_records(), 3)
    front = [objectives_of(each) for each in found.front]
    assert hypervolume_ratio([objectives_of(each) for each in found.kept], front) == found.hypervolume_ratio
    assert hypervolume_ratio(front, front) == 1.0
    assert hypervolume_ratio([], []) == 1.0
    assert hypervolume_ratio([], front) == 0.0


sizes = st.floats(0, 1e9)
records_of_a_task = st.lists(
    st.builds(record, st.text("abcdefgh", min_size=1, max_size=2), st.floats(1e-7, 10.0), sizes, sizes), min_size=1, max_size=30
)


@given(records_of_a_task, st.integers(1, 6))
def test_any_records_give_a_usable_set(records: list[Record], variants: int) -> None:
    found = pareto_set(records, variants)
    assert 1 <= len(found.kept) <= variants
    assert set(found.kept) <= set(found.front) <= set(latest(records).values())
    latencies = [objectives_of(each).latency_s for each in found.kept]
    assert latencies == sorted(latencies)
    assert latencies[0] == min(objectives_of(each).latency_s for each in found.front)
    assert latencies[0] <= (1 + NOISE) ** 2 * min(objectives_of(each).latency_s for each in latest(records).values())
    assert 0 < found.hypervolume_ratio <= 1
    assert (found.hypervolume_ratio == 1.0) >= (len(found.kept) == len(found.front))


def test_what_may_not_be_kept_is_not_in_the_front() -> None:
    records = [*front_records(), replace(record("w", 0.5, 0.5e6), space="winograd4")]
    assert traces(pareto_set(records, 6).kept) == "w"
    found = pareto_set(records, 6, lambda each: each.space == "dense")
    assert (found.measured, traces(found.front), traces(found.kept)) == (7, "abcdef", "abcdef")
    assert found.hypervolume_ratio == 1.0
