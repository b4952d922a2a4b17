"""Ask/tell search over candidates, of which nothing is known here but identity and perhaps a cost model's opinion."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

C = TypeVar("C", bound=Hashable)
C_contra = TypeVar("C_contra", bound=Hashable, contravariant=True)

EXPLORE = 0.2
"""Share of every batch that is drawn at random, so that a wrong model cannot hide a good candidate for ever."""


class Strategy(Protocol[C]):
    """Proposes candidates and learns from what became of them. `told` latencies are seconds; None is a failed candidate."""

    def ask(self, count: int) -> list[C]:
        """At most `count` candidates that were not asked or told before; empty when there is nothing left to try."""

    def tell(self, results: Sequence[tuple[C, float | None]]) -> None:
        """Outcomes of candidates, asked ones or ones known from an earlier run."""

    @property
    def remaining(self) -> int | None:
        """How many candidates are left; None when the space has no end."""


class CostModel(Protocol[C_contra]):
    """Predicts which candidates are fast."""

    def fit(self, results: Sequence[tuple[C_contra, float | None]]) -> None:
        """Learns from measured latencies in seconds (None: failed): all there are, those of the last call first."""

    def predict(self, candidates: Sequence[C_contra]) -> Sequence[float]:
        """A score per candidate; higher is faster."""


class PoolStrategy(Generic[C]):
    """A finite pool, tried whole if there is time: a spread-out first batch, then the model's favourites first.

    Without a model the order is a seeded shuffle. Small structured spaces are swept this way: evolution needs longer to propose
    a dozen candidates than it takes to measure them (docs/design/001-pipeline.md).
    """

    def __init__(self, pool: Sequence[C], *, seed: int, model: CostModel[C] | None = None) -> None:
        shuffled = list(dict.fromkeys(pool))
        random.Random(seed).shuffle(shuffled)
        self._left = dict.fromkeys(shuffled)
        self._model = model
        self._told: list[tuple[C, float | None]] = []
        self._stale = False

    @property
    def remaining(self) -> int:
        return len(self._left)

    def ask(self, count: int) -> list[C]:
        """See `Strategy.ask`."""
        order = list(self._left)
        if self._model is not None and self._told and len(order) > count:
            order = self._ranked(order, count)
        chosen = order[:count]
        for candidate in chosen:
            del self._left[candidate]
        return chosen

    def _ranked(self, order: list[C], count: int) -> list[C]:
        assert self._model is not None
        if self._stale:
            self._model.fit(self._told)
            self._stale = False
        scores = self._model.predict(order)
        ranked = [order[i] for i in sorted(range(len(order)), key=lambda i: -scores[i])]
        favourites = dict.fromkeys(ranked[: count - round(count * EXPLORE)])
        return [*favourites, *(candidate for candidate in order if candidate not in favourites)]

    def tell(self, results: Sequence[tuple[C, float | None]]) -> None:
        """See `Strategy.tell`."""
        for candidate, _ in results:
            self._left.pop(candidate, None)
        self._told += results
        self._stale = self._stale or bool(results)


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

    def tell(self, results: Sequence[tuple[C, float | None]]) -> None:
        """See `Strategy.tell`."""
        for strategy in self._strategies:
            strategy.tell(results)


class Allocation:
    """Which task deserves the next batch: the one with the most predicted time still to be won.

    Predicted gain of a task = calls x (best latency - bound) x freshness. The bound is the larger of FLOPs at the best rate and
    bytes at the best bandwidth seen on any task of this run (a roofline, Williams et al. 2009, measured on the fly); freshness
    is the unswept part of a finite space, or halves with every batch that did not improve an endless one.
    """

    PATIENCE = 3
    IMPROVED = 0.98

    def __init__(self) -> None:
        self._flops_per_s = 1.0
        self._bytes_per_s = 1.0
        self._best: dict[str, float] = {}
        self._barren: dict[str, int] = {}

    def saw(self, task: str, latency_s: float, flops: float, moved_bytes: float) -> None:
        """A valid measurement of `task`."""
        self._flops_per_s = max(self._flops_per_s, flops / latency_s)
        self._bytes_per_s = max(self._bytes_per_s, moved_bytes / latency_s)
        self._best[task] = min(latency_s, self._best.get(task, latency_s))

    def batch_ended(self, task: str, best_before: float | None) -> None:
        """A batch of `task` was measured; `best_before` is its best latency before that."""
        best = self._best.get(task)
        improved = best is not None and (best_before is None or best < best_before * self.IMPROVED)
        self._barren[task] = 0 if improved else self._barren.get(task, 0) + 1

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
        endless = 0.0 if barren >= self.PATIENCE else 0.5**barren
        freshness = endless if unswept is None else unswept
        return calls * max(best - bound, 0.05 * best) * freshness
