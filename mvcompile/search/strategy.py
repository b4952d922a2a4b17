"""Ask/tell search over candidates, of which nothing is known here but identity and perhaps a cost model's opinion."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from mvcompile.search.choice import Points, for_the_front
from mvcompile.types import Objectives

C = TypeVar("C", bound=Hashable)
C_contra = TypeVar("C_contra", bound=Hashable, contravariant=True)


LEAST_KNOWN = 8
"""With fewer measured candidates a batch has no share for the front."""


class Strategy(Protocol[C]):
    """Proposes candidates and learns from what became of them: their objectives, or None for a failed candidate."""

    def ask(self, count: int) -> list[C]:
        """At most `count` candidates that were not asked or told before; empty when there is nothing left to try."""

    def tell(self, results: Sequence[tuple[C, Objectives | None]]) -> None:
        """Outcomes of candidates, asked ones or ones known from an earlier run."""

    def relate(self, tasks: Sequence[Sequence[tuple[C, Objectives | None]]]) -> None:
        """All outcomes so far of other tasks on the same target, task by task, in place of those of the last call."""

    @property
    def remaining(self) -> int | None:
        """How many candidates are left; None when the space has no end."""


class CostModel(Protocol[C_contra]):
    """Predicts the objectives of candidates of one task."""

    def relate(self, tasks: Sequence[Sequence[tuple[C_contra, Objectives | None]]]) -> None:
        """See `Strategy.relate`."""

    def fit(self, results: Sequence[tuple[C_contra, Objectives | None]]) -> None:
        """Learns from all outcomes of the task itself that there are, oldest first (None: failed)."""

    def predict(self, candidates: Sequence[C_contra]) -> Points | None:
        """Objectives in their fixed order, shape (candidates, 3); None while nothing is known that tells candidates apart."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a batch is made of: shares of it that are drawn at random (so that a wrong model cannot hide a good candidate for
    ever) and that are to add to the front; the rest are those that are predicted to be fastest.

    The front has its share once LEAST_KNOWN candidates were measured: before, its model is another task's, and what is rare
    in one front is not in another.
    """

    random: float = 0.125
    front: float = 0.25


class PoolStrategy(Generic[C]):
    """A finite pool, tried whole if there is time: a first batch drawn at random, unless the model has heard of other tasks, then
    the model's favourites first.

    Without a model the order is a seeded shuffle. Small structured spaces are swept this way: evolution needs longer to propose
    a dozen candidates than it takes to measure them (docs/design/001-pipeline.md). What the model prefers is in part what it
    expects to be fastest and in part what it expects to add to the front (docs/design/008-search-for-fronts.md).
    """

    def __init__(self, pool: Sequence[C], *, seed: int, model: CostModel[C] | None = None, shares: Shares | None = None) -> None:
        shuffled = list(dict.fromkeys(pool))
        self._dice = random.Random(seed)
        self._dice.shuffle(shuffled)
        self._model, self._shares = model, shares or Shares()
        self._left = dict.fromkeys(shuffled)
        self._told: list[tuple[C, Objectives | None]] = []
        self._stale = False

    @property
    def remaining(self) -> int:
        return len(self._left)

    def ask(self, count: int) -> list[C]:
        """See `Strategy.ask`. The fastest ones come first, those drawn at random last."""
        chosen = list(self._left)
        if self._model is not None and len(chosen) > count:
            chosen = self._chosen(self._model, chosen, count)
        chosen = chosen[:count]
        for candidate in chosen:
            del self._left[candidate]
        return chosen

    def _chosen(self, model: CostModel[C], order: list[C], count: int) -> list[C]:
        """`order` with the model's favourites in front."""
        if self._stale:
            model.fit(self._told)
            self._stale = False
        predicted = model.predict(order)
        if predicted is None:
            return order
        ranked = np.argsort(predicted[:, 0], kind="stable").tolist()
        known = np.array([found.vector() for _, found in self._told if found is not None])
        guided = count - round(count * self._shares.random)
        wanted = round(guided * self._shares.front) if len(known) >= LEAST_KNOWN else 0
        favourites = ranked[: guided - wanted]
        if wanted:
            favourites += for_the_front(predicted, favourites, known, wanted, self._dice)
        first = [order[row] for row in favourites]
        return list(dict.fromkeys([*first, *order]))

    def tell(self, results: Sequence[tuple[C, Objectives | None]]) -> None:
        """See `Strategy.tell`."""
        for candidate, _ in results:
            self._left.pop(candidate, None)
        self._told += results
        self._stale = self._stale or bool(results)

    def relate(self, tasks: Sequence[Sequence[tuple[C, Objectives | None]]]) -> None:
        """See `Strategy.relate`."""
        if self._model is not None:
            self._model.relate(tasks)


class OneByOne(Generic[C]):
    """Several searches, each asked when the ones before it have nothing left; all learn from every outcome."""

    def __init__(self, strategies: Sequence[Strategy[C]]) -> None:
        self._strategies = list(strategies)

    @property
    def remaining(self) -> int | None:
        counts = [strategy.remaining for strategy in self._strategies]
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)

    def ask(self, count: int) -> list[C]:
        """See `Strategy.ask`."""
        return next((asked for strategy in self._strategies if (asked := strategy.ask(count))), [])

    def tell(self, results: Sequence[tuple[C, Objectives | None]]) -> None:
        """See `Strategy.tell`."""
        for strategy in self._strategies:
            strategy.tell(results)

    def relate(self, tasks: Sequence[Sequence[tuple[C, Objectives | None]]]) -> None:
        """See `Strategy.relate`."""
        for strategy in self._strategies:
            strategy.relate(tasks)


class Allocation:
    """Which task deserves the next batch: the one with the most predicted time still to be won for its price.

    Predicted gain of a task = calls x (best latency - bound) x freshness. The bound is the larger of FLOPs at the best rate and
    bytes at the best bandwidth seen on any task of this run (a roofline, Williams et al. 2009, measured on the fly). Freshness
    halves with every barren batch in a row, one by which neither the best latency nor the front's hypervolume became better by
    more than noise; after PATIENCE of them an endless search is done, while a finite one is always worth its unswept part, so
    that it is swept whole when no other task needs the time.
    """

    PATIENCE = 3
    IMPROVED = 0.98
    GROWN = 0.01

    def __init__(self) -> None:
        self._flops_per_s = 1.0
        self._bytes_per_s = 1.0
        self._best: dict[str, float] = {}
        self._barren: dict[str, int] = {}
        self._prices: dict[str, float] = {}

    def saw(self, task: str, latency_s: float, flops: float, moved_bytes: float) -> None:
        """A valid measurement of `task`."""
        self._flops_per_s = max(self._flops_per_s, flops / latency_s)
        self._bytes_per_s = max(self._bytes_per_s, moved_bytes / latency_s)
        self._best[task] = min(latency_s, self._best.get(task, latency_s))

    def batch_ended(self, task: str, best_before: float | None, growth: float, price: float = 1.0) -> None:
        """A batch of `task` was measured; `best_before` is its best latency before that, `growth` the share of its front's
        hypervolume that is new, `price` what it took of that which limits the tuning."""
        self._prices[task] = max(price, 1e-6)
        best = self._best.get(task)
        improved = best is not None and (best_before is None or best < best_before * self.IMPROVED)
        self._barren[task] = 0 if improved or growth > self.GROWN else self._barren.get(task, 0) + 1

    def best(self, task: str) -> float | None:
        """The task's best latency so far in seconds."""
        return self._best.get(task)

    def gain_s(self, task: str, calls: int, flops: float, moved_bytes: float, unswept: float | None) -> float:
        """Predicted seconds per inference still to be won; 0 when the task is not worth another batch."""
        best = self._best.get(task)
        if best is None:
            return 0.0
        bound = max(flops / self._flops_per_s, moved_bytes / self._bytes_per_s)
        barren = self._barren.get(task, 0)
        fresh = unswept if unswept is not None else 0.0 if barren >= self.PATIENCE else 1.0
        return calls * max(best - bound, 0.05 * best) * fresh * 0.5**barren

    def price(self, task: str) -> float:
        """What the next batch of `task` will probably take: as much as its last one, or as the others' last ones on average."""
        known = self._prices.values()
        return self._prices.get(task, sum(known) / len(known) if known else 1.0)
