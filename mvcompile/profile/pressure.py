"""What variants take from others: how much slower a probe on another core becomes while a variant runs (the "reporter" of
Bubble-Up, MICRO 2011).

A variant runs in a loop over all layers of its task, each with its own weights: that is as near as a loop comes to the caches of
the running network, and the same for all variants of a task. The probe has two patterns, as in `mvcompile.measure.probe`:
dependent loads through a part of the last-level cache, and a stream to memory. The rates of both wander by 10 to 20 % on a
machine that is shared, at all time scales. So the variant is switched on and off every few milliseconds, a figure is the median
over pairs of neighbouring windows of how much faster the probe is without it, and more of the shortest pairs are better than
fewer long ones. The stream writes: its rate wanders half as much as that of one that reads (17 against 26 % at 1 ms on an EPYC
7003), for the same effect.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from mvcompile import regret
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest, Task
from mvcompile.measure.load import Counters, Load, LoadProcess, Work
from mvcompile.measure.probe import CHAIN_SHARE
from mvcompile.profile.loops import Loops, One

LEAST_ROUNDS, MOST_ROUNDS = 3, 12
TURN_S = 0.2
"""Of a variant with a pattern, if there is time for more rounds."""
WINDOW_S = 0.008
"""Long enough for a variant to fill a part of the cache: a copy slows a chain down by 17 % in windows of 2 ms, by 35 % in
these."""
SKIP_S = 0.0005
LEAST_PAIRS = 3
"""Of a pattern in a round."""
PATTERNS = 2
LEAST_ERROR = 1e-3

Rows: TypeAlias = tuple[tuple[float | None, ...], ...]
"""Per task and variant, None where nothing was measured."""
Clock: TypeAlias = Callable[[], float]


class Runner(Protocol):
    """Who runs variants on the measured core: `Loops`."""

    def choose(self, one: One) -> None:
        """The variant that is run from now on."""

    def on(self) -> None:
        """Runs it; returns when it has begun."""

    def off(self) -> int:
        """Stops; returns when nothing runs any more: how many calls there were since `on`."""


@dataclass(frozen=True, slots=True)
class Felt:
    """What the probe felt of a variant: how many times slower its patterns were, less 1, and both in one number (their geometric
    mean, less 1: may be below 0 by chance) with its standard error; seconds of a call meanwhile."""

    cache: float
    memory: float
    pressure: float
    error: float
    call_s: float


@dataclass(slots=True)
class Pairs:
    """Of one variant: per pattern the logarithms of how much faster the probe was without it; and its calls."""

    logs: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    calls: int = 0
    seconds: float = 0.0

    def felt(self) -> Felt:
        """Medians, and the standard error of their mean."""
        middles, errors = [], []
        for values in self.logs:
            low, middle, high = np.percentile(values or [0.0], (25, 50, 75)).tolist()
            middles.append(middle)
            errors.append(max(regret.standard_error(high - low, len(values)), LEAST_ERROR))
        cache, memory = (math.expm1(each) for each in middles)
        pressure = math.expm1(sum(middles) / PATTERNS)
        error = math.hypot(*errors) / PATTERNS
        return Felt(cache, memory, pressure, error, self.seconds / self.calls if self.calls else 0.0)


@dataclass(frozen=True, slots=True)
class Chopper:
    """Compares windows in which a variant runs with those in between."""

    runner: Runner
    load: Load
    patterns: tuple[Work, Work]
    clock: Clock = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def pairs(self, one: One, pattern: int, seconds: float, into: Pairs) -> None:
        """Adds what `seconds` give, LEAST_PAIRS at least."""
        self.runner.choose(one)
        self.load.apply(self.patterns[pattern])
        self.sleep(WINDOW_S)
        until = self.clock() + seconds
        count = 0
        while count < LEAST_PAIRS or self.clock() < until:
            self.runner.on()
            begin = self.clock()
            with_it = self._rate()
            into.calls += self.runner.off()
            into.seconds += self.clock() - begin
            without = self._rate()
            count += 1
            if with_it > 0 and without > 0:  # otherwise the system let the probe not run at all
                into.logs[pattern].append(math.log(without / with_it))
        self.load.apply(Work())

    def _rate(self) -> float:
        self.sleep(SKIP_S)
        before = self.load.counters()
        self.sleep(WINDOW_S)
        after = self.load.counters()
        passed = after.seconds - before.seconds
        return (_done(after) - _done(before)) / passed if passed > 0 else 0.0


def _done(counters: Counters) -> int:
    return counters.chased_loads + counters.written_bytes  # a pattern does one of them


def patterns(llc_bytes: int, chain_bytes: int | None = None) -> tuple[Work, Work]:
    """A chain through a part of the last-level cache (`chain_bytes`, by default a `CHAIN_SHARE`th), and a stream of writes to
    memory."""
    return Work(chase_bytes=min(chain_bytes or llc_bytes // CHAIN_SHARE, llc_bytes)), Work(write_rate=-1.0)


def feel(chopper: Chopper, ones: Sequence[One], budget_s: float, seed: int) -> dict[One, Felt]:
    """What the probe feels of each of `ones`, in about `budget_s`; of the first ones only if that is not enough for all. Rounds
    over all in random order, so that none has the bad minutes of the machine to itself."""
    rounds, seconds, count = plan(len(ones), budget_s)
    chance = random.Random(seed)
    found = {one: Pairs() for one in ones[:count]}
    for _ in range(rounds):
        for one in chance.sample(list(found), len(found)):
            for pattern in range(PATTERNS):
                chopper.pairs(one, pattern, seconds, found[one])
    return {one: pairs.felt() for one, pairs in found.items()}


def plan(count: int, budget_s: float) -> tuple[int, float, int]:
    """Rounds, seconds of each variant's turn with a pattern, and how many of `count` variants, for a budget of `budget_s`."""
    least_s = LEAST_PAIRS * 2 * (WINDOW_S + SKIP_S) + WINDOW_S
    fits = min(count, int(budget_s / (LEAST_ROUNDS * PATTERNS * least_s)))
    if not fits:
        return 0, 0.0, 0
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_s / (PATTERNS * fits * TURN_S))))
    return rounds, budget_s / (rounds * PATTERNS * fits) - WINDOW_S, fits


def worth_knowing(tasks: Sequence[Task], kept: Sequence[Sequence[int]]) -> list[One]:
    """The `kept` variants of tasks that have several, those of the heaviest task first."""
    heaviest = sorted(range(len(tasks)), key=lambda task: -tasks[task].time_share)
    return [(task, variant) for task in heaviest if len(kept[task]) > 1 for variant in kept[task]]


def measure(
    path: str | os.PathLike[str],
    ones: Sequence[One],
    cores: tuple[int, int],
    budget_s: float,
    seed: int,
    chain_bytes: int | None = None,
) -> dict[One, Felt]:
    """What a probe on the second of `cores` feels of the variants `ones` of the bundle at `path` on the first one (see `feel` and
    `patterns`); nothing if the budget is too small.

    Raises what `LoadProcess` and `Loops` do.
    """
    if not plan(len(ones), budget_s)[2]:
        return {}
    with open_bundle(path, verify=False) as bundle:
        llc_bytes = bundle.manifest.target.llc_bytes
        load = LoadProcess(cores[1], llc_bytes)
        try:
            with Loops(bundle, cores[0]) as loops:
                return feel(Chopper(loops, load, patterns(llc_bytes, chain_bytes)), ones, budget_s, seed)
        finally:
            load.stop()


def rows_of(felt: Mapping[One, Felt], manifest: Manifest) -> Rows:
    """What bundles keep of it: per task and variant, at least 0; nothing at all if nothing was measured."""
    if not felt:
        return ()
    values = drawn(felt, {one: footprint(manifest, one) for one in felt})
    return tuple(
        tuple(values.get((number, variant)) for variant in range(len(task.variants)))
        for number, task in enumerate(manifest.tasks)
    )


def footprint(manifest: Manifest, one: One) -> float:
    """Bytes that a variant is estimated to keep in the last-level cache."""
    objectives = manifest.tasks[one[0]].variants[one[1]].objectives
    return objectives.footprint_bytes if objectives is not None else 0.0


def drawn(felt: Mapping[One, Felt], footprint_bytes: Mapping[One, float]) -> dict[One, float]:
    """Pressures, drawn from what was felt towards what the estimated footprints let expect, each by how uncertain it is.

    Whoever spends time to be kind must not spend it on noise, and one variant's pressure takes seconds to measure to a per cent.
    So the variants lend each other what they have in common: the straight line over the footprint that fits all best, and how far
    they scatter about it more than their errors explain (empirical Bayes; Fay and Herriot, JASA 1979). The footprint, because
    traffic that the last-level cache serves is not felt (docs/design/005-static-traffic.md).
    """
    ones = list(felt)
    p, e, x = (
        np.array(each) for each in zip(*((felt[o].pressure, felt[o].error, footprint_bytes[o]) for o in ones), strict=True)
    )
    weight = e**-2
    middle_x, middle_p = (float(np.sum(weight * each) / np.sum(weight)) for each in (x, p))
    square = float(np.sum(weight * (x - middle_x) ** 2))
    slope = max(0.0, float(np.sum(weight * (x - middle_x) * (p - middle_p))) / square) if square > 0 else 0.0
    line = middle_p + slope * (x - middle_x)
    rest = p - line
    scatter = max(0.0, float(np.sum(weight * rest**2) - max(len(ones) - 2, 1)) / float(np.sum(weight)))
    values = np.maximum(line + rest * scatter / (scatter + e**2), 0.0)
    return dict(zip(ones, values.tolist(), strict=True))
