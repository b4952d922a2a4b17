"""Finite pools and the allocation of batches to tasks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mvcompile.search.strategy import EXPLORE, Allocation, PoolStrategy

POOL = [f"c{i:03}" for i in range(100)]


class NumberModel:
    """Learns that candidates with a large number are fast; before it is fitted it must not be asked."""

    def __init__(self) -> None:
        self.fits: list[int] = []

    def fit(self, results: Sequence[tuple[str, float | None]]) -> None:
        self.fits.append(len(results))

    def predict(self, candidates: Sequence[str]) -> list[float]:
        assert self.fits
        return [float(candidate[1:]) for candidate in candidates]


def sweep(strategy: PoolStrategy[str], batch: int) -> list[str]:
    asked: list[str] = []
    while found := strategy.ask(batch):
        assert len(found) <= batch
        asked += found
        strategy.tell([(candidate, 1.0) for candidate in found])
        assert strategy.remaining == len(POOL) - len(asked)
    return asked


def test_sweeps_every_candidate_once_in_an_order_that_the_seed_decides() -> None:
    orders = [sweep(PoolStrategy(POOL + POOL, seed=seed), 16) for seed in (1, 1, 2)]
    assert sorted(orders[0]) == POOL
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != POOL


def test_does_not_ask_for_what_it_was_told_nor_twice_for_what_was_not_measured() -> None:
    strategy = PoolStrategy(POOL, seed=0)
    strategy.tell([(candidate, None) for candidate in POOL[:90]] + [("of another space", 1.0)])
    assert strategy.remaining == 10
    first = strategy.ask(6)
    assert set(first) < set(POOL[90:])
    assert sorted(first + strategy.ask(6)) == POOL[90:]
    assert strategy.ask(6) == []


def test_an_empty_pool_has_nothing_to_ask() -> None:
    strategy: PoolStrategy[str] = PoolStrategy([], seed=0)
    assert strategy.remaining == 0
    assert strategy.ask(5) == []


def test_asks_for_what_the_model_prefers_and_for_some_others_once_there_are_data() -> None:
    model = NumberModel()
    strategy = PoolStrategy(POOL, seed=0, model=model)
    first = strategy.ask(10)
    assert not model.fits
    assert first == PoolStrategy(POOL, seed=0).ask(10)
    strategy.tell([(candidate, 1.0) for candidate in first])
    second = strategy.ask(10)
    favourites = sorted(set(POOL) - set(first))[::-1][: 10 - round(10 * EXPLORE)]
    assert second[: len(favourites)] == favourites
    assert len(set(second)) == 10
    assert set(second[len(favourites) :]) != set(sorted(set(POOL) - set(first) - set(favourites))[::-1][:2])  # at random
    assert model.fits == [10]


def test_fits_only_when_there_is_something_new_and_then_with_everything() -> None:
    model = NumberModel()
    strategy = PoolStrategy(POOL, seed=0, model=model)
    strategy.tell([(candidate, 1.0) for candidate in strategy.ask(5)])
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
    strategy.tell([(POOL[0], 1.0)])
    assert len(strategy.ask(7)) == 7
    assert not model.fits


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
        allocation.batch_ended("task", best_before=1.0)
        gains.append(gain(allocation, "task", flops=1.0, unswept=None))
    assert gains == [gains[0] * factor for factor in (1, 0.5, 0.25, 0)]
    allocation.saw("task", 0.99, 1.0, 1.0)
    allocation.batch_ended("task", best_before=1.0)
    assert gain(allocation, "task", flops=1.0, unswept=None) == 0.0  # a percent is noise
    allocation.saw("task", 0.5, 1.0, 1.0)
    allocation.batch_ended("task", best_before=0.99)
    assert gain(allocation, "task", flops=1.0, unswept=None) > 0.0  # an improvement renews the hope


def test_no_patience_is_lost_with_a_finite_space() -> None:
    allocation = Allocation()
    allocation.saw("task", 1.0, 1.0, 1.0)
    before = gain(allocation, "task", unswept=0.5)
    for _ in range(10):
        allocation.batch_ended("task", best_before=1.0)
    assert gain(allocation, "task", unswept=0.5) == before
