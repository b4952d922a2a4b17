"""Finite pools and the allocation of batches to tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mvcompile.search.choice import Points
from mvcompile.search.strategy import Allocation, OneByOne, PoolStrategy, Shares
from mvcompile.types import Objectives

POOL = [f"c{i:03}" for i in range(100)]
FASTEST_ONLY = Shares(random=0.2, front=0.0)

Results = Sequence[tuple[str, Objectives | None]]


def measured(candidate: str) -> Objectives:
    """The larger the number, the faster; every tenth moves less, the less the smaller its number is."""
    number = int(candidate[1:])
    return Objectives(1.0 / (1 + number), 0.0, 1e6 * (number if number % 10 == 0 else 100))


class NumberModel:
    """Knows everything, once it was fitted or has heard of other tasks."""

    def __init__(self) -> None:
        self.fits: list[int] = []
        self.related: Sequence[Results] = ()

    def relate(self, tasks: Sequence[Results]) -> None:
        self.related = tasks

    def fit(self, results: Results) -> None:
        self.fits.append(len(results))

    def predict(self, candidates: Sequence[str]) -> Points | None:
        if not self.fits and not self.related:
            return None
        return np.array([measured(candidate).vector() for candidate in candidates])


def told(candidates: Sequence[str]) -> list[tuple[str, Objectives | None]]:
    return [(candidate, measured(candidate)) for candidate in candidates]


def sweep(strategy: PoolStrategy[str], batch: int) -> list[str]:
    asked: list[str] = []
    while found := strategy.ask(batch):
        assert len(found) <= batch
        asked += found
        strategy.tell(told(found))
        assert strategy.remaining == len(POOL) - len(asked)
    return asked


def test_sweeps_every_candidate_once_in_an_order_that_the_seed_decides() -> None:
    orders = [sweep(PoolStrategy(POOL + POOL, seed=seed), 16) for seed in (1, 1, 2)]
    assert sorted(orders[0]) == POOL
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != POOL


def test_does_not_ask_for_what_it_was_told_nor_twice_for_what_was_not_measured() -> None:
    strategy = PoolStrategy(POOL, seed=0)
    strategy.tell([(candidate, None) for candidate in POOL[:90]] + told(["c999"]))
    assert strategy.remaining == 10
    first = strategy.ask(6)
    assert set(first) < set(POOL[90:])
    assert sorted(first + strategy.ask(6)) == POOL[90:]
    assert strategy.ask(6) == []


def test_an_empty_pool_has_nothing_to_ask() -> None:
    strategy: PoolStrategy[str] = PoolStrategy([], seed=0)
    assert strategy.remaining == 0
    assert strategy.ask(5) == []


def test_without_results_it_asks_for_what_other_tasks_say_is_fast() -> None:
    strategy = PoolStrategy(POOL, seed=0, model=NumberModel(), shares=FASTEST_ONLY)
    strategy.relate([told(["c001"])])
    assert strategy.ask(10)[:8] == POOL[::-1][:8]


def test_asks_for_what_is_fastest_and_for_some_others_once_there_are_data() -> None:
    model = NumberModel()
    strategy = PoolStrategy(POOL, seed=0, model=model, shares=FASTEST_ONLY)
    first = strategy.ask(10)
    assert not model.fits
    strategy.tell(told(first))
    second = strategy.ask(10)
    favourites = sorted(set(POOL) - set(first))[::-1][:8]
    assert second[:8] == favourites
    assert len(set(second)) == 10
    assert set(second[8:]) != set(sorted(set(POOL) - set(first) - set(favourites))[::-1][:2])  # at random
    assert model.fits == [10]


def test_a_share_of_every_batch_is_for_the_front_once_enough_is_known() -> None:
    few, enough = [f"c{i:03}" for i in range(1, 8)], [f"c{i:03}" for i in range(1, 9)]
    left = [candidate for candidate in POOL[::-1] if candidate not in enough]
    batches = {}
    for known in (few, enough):
        strategy = PoolStrategy(POOL, seed=0, model=NumberModel(), shares=Shares(random=0.125, front=0.25))
        strategy.tell(told(known))
        batches[len(known)] = strategy.ask(16)
        assert len(set(batches[len(known)])) == 16
    assert batches[7][:14] == left[:14]
    assert batches[8][:10] == left[:10]
    assert all(int(candidate[1:]) % 10 == 0 for candidate in batches[8][10:14])  # those that move less


def test_fits_only_when_there_is_something_new_and_then_with_everything() -> None:
    model = NumberModel()
    strategy = PoolStrategy(POOL, seed=0, model=model)
    strategy.tell(told(strategy.ask(5)))
    strategy.ask(5)
    strategy.ask(5)
    assert model.fits == [5]
    strategy.tell([("c000", None)])
    strategy.tell([])
    strategy.ask(5)
    assert model.fits == [5, 6]


def test_a_guided_sweep_is_a_sweep_and_is_repeatable() -> None:
    orders = [sweep(PoolStrategy(POOL, seed=3, model=NumberModel()), 7) for _ in range(2)]
    assert sorted(orders[0]) == POOL
    assert orders[0] == orders[1]


def test_does_not_trouble_the_model_for_the_last_batch() -> None:
    model = NumberModel()
    strategy = PoolStrategy(POOL[:8], seed=0, model=model)
    strategy.tell(told([POOL[0]]))
    assert len(strategy.ask(7)) == 7
    assert not model.fits


def test_searches_one_by_one_all_hear_of_everything() -> None:
    models = [NumberModel(), NumberModel()]
    pools = [PoolStrategy(pool, seed=0, model=model) for pool, model in zip((POOL[:4], POOL[4:8]), models, strict=True)]
    both = OneByOne(pools)
    both.relate([told(["c001"])])
    assert [len(model.related) for model in models] == [1, 1]
    assert both.remaining == 8
    assert sorted(both.ask(5)) == POOL[:4]
    both.tell(told(POOL[:5]))
    assert sorted(both.ask(5)) == POOL[5:8]
    assert both.ask(5) == []


def gain(allocation: Allocation, task: str, *, calls: int = 1, flops: float = 1e6, unswept: float | None = 1.0) -> float:
    return allocation.gain_s(task, calls, flops, 1e3, unswept)


def test_prefers_the_task_with_most_to_gain() -> None:
    allocation = Allocation()
    allocation.saw("at its bound", 1e-3, flops=1e9, moved_bytes=1e3)
    allocation.saw("slow", 1e-3, flops=1e6, moved_bytes=1e3)
    allocation.saw("fast", 1e-5, flops=1e6, moved_bytes=1e3)
    assert gain(allocation, "slow") > gain(allocation, "at its bound", flops=1e9)
    assert gain(allocation, "slow") > gain(allocation, "fast")
    assert gain(allocation, "slow", calls=3) == pytest.approx(3 * gain(allocation, "slow"))
    assert gain(allocation, "slow", unswept=0.5) == pytest.approx(0.5 * gain(allocation, "slow"))
    assert gain(allocation, "slow", unswept=0.0) == 0.0
    assert gain(allocation, "at its bound", flops=1e9) > 0.0  # the bound is only what was seen: some hope is left
    assert gain(allocation, "never measured") == 0.0


def test_bound_is_that_of_the_scarcer_resource() -> None:
    allocation = Allocation()
    allocation.saw("compute", 1e-3, flops=1e9, moved_bytes=1.0)
    allocation.saw("memory", 1e-3, flops=1.0, moved_bytes=1e7)
    allocation.saw("both", 1e-2, flops=1e9, moved_bytes=5e7)
    assert allocation.gain_s("both", 1, 1e9, 5e7, 1.0) == pytest.approx(5e-3)  # 5e7 bytes take 5 ms, 1e9 FLOPs only 1


def test_keeps_the_best_latency() -> None:
    allocation = Allocation()
    assert allocation.best("task") is None
    for latency in (3.0, 1.0, 2.0):
        allocation.saw("task", latency, 1.0, 1.0)
    assert allocation.best("task") == 1.0


def test_patience_with_a_space_without_end() -> None:
    allocation = Allocation()
    allocation.saw("task", 1.0, 1.0, 1.0)
    gains = [gain(allocation, "task", flops=1.0, unswept=None)]
    for _ in range(Allocation.PATIENCE):
        allocation.batch_ended("task", best_before=1.0, growth=0.0)
        gains.append(gain(allocation, "task", flops=1.0, unswept=None))
    assert gains == [gains[0] * factor for factor in (1, 0.5, 0.25, 0)]
    allocation.saw("task", 0.99, 1.0, 1.0)
    allocation.batch_ended("task", best_before=1.0, growth=0.005)
    assert gain(allocation, "task", flops=1.0, unswept=None) == 0.0  # a percent is noise
    allocation.saw("task", 0.5, 1.0, 1.0)
    allocation.batch_ended("task", best_before=0.99, growth=0.0)
    assert gain(allocation, "task", flops=1.0, unswept=None) > 0.0  # an improvement renews the hope


def test_a_finite_space_that_stagnates_waits_for_the_others_and_is_not_given_up() -> None:
    allocation = Allocation()
    allocation.saw("task", 1.0, 1.0, 1.0)
    first = gain(allocation, "task", flops=1.0, unswept=0.5)
    for batch in range(1, 2 * Allocation.PATIENCE):
        allocation.batch_ended("task", best_before=1.0, growth=0.0)
        assert gain(allocation, "task", flops=1.0, unswept=0.5) == first * 0.5**batch


def test_a_batch_is_expected_to_cost_what_the_last_one_did() -> None:
    allocation = Allocation()
    assert allocation.price("dear") == 1.0
    allocation.batch_ended("dear", best_before=1.0, growth=0.0, price=9.0)
    allocation.batch_ended("dear", best_before=1.0, growth=0.0, price=5.0)
    allocation.batch_ended("cheap", best_before=1.0, growth=0.0, price=1.0)
    assert allocation.price("dear") == 5.0
    assert allocation.price("never measured") == 3.0
    allocation.batch_ended("free", best_before=1.0, growth=0.0, price=0.0)
    assert allocation.price("free") > 0.0


def test_a_front_that_grows_renews_the_hope() -> None:
    allocation = Allocation()
    allocation.saw("task", 1.0, 1.0, 1.0)
    before = gain(allocation, "task", flops=1.0)
    for _ in range(Allocation.PATIENCE):
        allocation.batch_ended("task", best_before=1.0, growth=0.0)
    allocation.batch_ended("task", best_before=1.0, growth=0.02)
    assert gain(allocation, "task", flops=1.0) == before
