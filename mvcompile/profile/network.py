"""Times the steps of a model in the running network, beside a neighbour, with all variants taking turns.

Every run chooses the variants of all steps anew, so that a step's timings see its neighbours' variants in every mixture, in the
cache state that the network leaves; levels alternate, so that what drifts, drifts for all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mvcompile.bundle.interference import Table
from mvcompile.types import Dials, Level

LEAST_ROUNDS = 5
MOST_ROUNDS = 60
SETTLE_S = 0.01
"""How long a neighbour runs before the run that fills the caches: it has to have walked through its set."""

Floats = NDArray[np.float64]


class Achieved(Protocol):
    """What a neighbour really took, in the form that bundles keep."""

    @property
    def dials(self) -> Dials:
        """Bytes and bytes per second."""


class Neighbour(Protocol):
    """Who puts pressure on the network from another core: `mvcompile.measure.generator.Generator`."""

    def set(self, dials: Dials) -> None:
        """Let it take this from now on."""

    def achieved(self) -> Achieved:
        """What it has taken since."""


class Network(Protocol):
    """What is used of a `runtime.Session`."""

    @property
    def variants(self) -> Mapping[str, Sequence[Any]]:
        """The variants of each layer, in the order in which layers run."""

    def run_profiled(self, inputs: Mapping[str, Any]) -> tuple[float, ...]:
        """Seconds of each layer in one run."""

    def select_all(self, selection: Sequence[int]) -> None:
        """One variant per layer."""


@dataclass(slots=True)
class Samples:
    """Timings: per level, per run, the variant and the seconds of every step; and the runs that each round had at a level."""

    counts: tuple[int, ...]
    variants: list[list[tuple[int, ...]]]
    seconds: list[list[tuple[float, ...]]]
    achieved: list[list[Dials]]
    rounds: int = 0

    def tables(self) -> tuple[Table, Table]:
        """Medians in seconds, and interquartile ranges over them: per level, step, variant."""
        found = [self._level(level) for level in range(len(self.seconds))]
        return tuple(each[0] for each in found), tuple(each[1] for each in found)

    def _level(self, level: int) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        chosen, seconds = np.array(self.variants[level]), np.array(self.seconds[level])
        medians, spreads = [], []
        for step, count in enumerate(self.counts):
            quartiles = [
                np.percentile(seconds[chosen[:, step] == variant, step], (25, 50, 75)).tolist() for variant in range(count)
            ]
            medians.append(tuple(middle for _, middle, _ in quartiles))
            spreads.append(tuple((high - low) / middle if middle else 0.0 for low, middle, high in quartiles))
        return tuple(medians), tuple(spreads)

    @property
    def timings(self) -> int:
        """How many timings the table's entries have at least."""
        return self.rounds

    def run_spread(self) -> float:
        """Interquartile range over median of whole runs at the first level."""
        low, middle, high = np.percentile(np.sum(self.seconds[0], axis=1), (25, 50, 75))
        return float((high - low) / middle)

    def drift(self) -> float:
        """By what share the first level's runs of the last round differ from those of the first round (medians)."""
        runs = np.sum(self.seconds[0], axis=1)
        turns = len(runs) // self.rounds
        return abs(float(np.median(runs[-turns:]) / np.median(runs[:turns])) - 1.0)

    def taken(self) -> tuple[Dials, ...]:
        """What the neighbour took at each level, medians over rounds."""
        return tuple(
            Dials(
                int(np.median([each.resident_bytes for each in found])),
                float(np.median([each.read_bytes_per_s for each in found])),
                float(np.median([each.write_bytes_per_s for each in found])),
            )
            for found in self.achieved
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """A network on its cores, the inputs it runs on, and the neighbour beside it."""

    network: Network
    inputs: Mapping[str, Any]
    neighbour: Neighbour
    levels: tuple[Level, ...]
    clock: Callable[[], float] = field(default=time.monotonic)
    settle_s: float = SETTLE_S

    @property
    def counts(self) -> tuple[int, ...]:
        """How many variants each step has."""
        return tuple(len(variants) for variants in self.network.variants.values())

    def enter(self, level: int) -> None:
        """Sets the neighbour and waits until the caches are what they are beside it."""
        self.neighbour.set(self.levels[level].dials)
        if self.levels[level].dials != Dials():
            time.sleep(self.settle_s)
        self.network.run_profiled(self.inputs)

    def leave(self) -> None:
        """Quiet again."""
        self.neighbour.set(Dials())

    def time(self, selection: Sequence[int]) -> tuple[float, ...]:
        """Seconds of each step of one run with these variants."""
        self.network.select_all(selection)
        return self.network.run_profiled(self.inputs)


def sample(bench: Bench, budget_s: float, seed: int, report: Callable[[float], None] = lambda share: None) -> Samples:
    """Rounds over all levels in random order until `budget_s` is spent, at least LEAST_ROUNDS; in a round every variant of every
    step runs at least once at every level. `report` gets the share of the budget that is spent."""
    counts = bench.counts
    turns = max(counts, default=1)
    rng = random.Random(seed)
    levels = len(bench.levels)
    samples = Samples(counts, [[] for _ in range(levels)], [[] for _ in range(levels)], [[] for _ in range(levels)])
    start = bench.clock()
    while samples.rounds < MOST_ROUNDS:
        spent = bench.clock() - start
        if samples.rounds >= LEAST_ROUNDS and spent + spent / samples.rounds > budget_s:
            break
        for level in rng.sample(range(levels), levels):
            bench.enter(level)
            first = [rng.randrange(count) for count in counts]
            for turn in range(turns):
                chosen = tuple((start_at + turn) % count for start_at, count in zip(first, counts, strict=True))
                samples.variants[level].append(chosen)
                samples.seconds[level].append(bench.time(chosen))
            samples.achieved[level].append(bench.neighbour.achieved().dials)
        samples.rounds += 1
        report(min(1.0, (bench.clock() - start) / budget_s) if budget_s > 0 else 1.0)
    bench.leave()
    return samples
