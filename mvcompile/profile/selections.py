"""The selection vector of each level: chosen layer by layer from the table, then judged by whole runs.

Layers are not independent: a variant leaves the caches to the next layer. So what the table says can be overruled by whole runs
beside the neighbour. It takes clear evidence to do that: a table's entry rests on timings of one step, of which a whole run is
hundreds, with the noise of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mvcompile import regret
from mvcompile.bundle.interference import Selection, Table
from mvcompile.profile.network import Bench, Floats

LEAST_RUNS = 5
MOST_RUNS = 60
PROPOSED_AT_MOST = 6
DECIDING_SHARE = 0.7
"""Of the budget: the rest measures what was decided."""
NEAR = 1.05
"""A variant that is slower than the chosen one by more than this share is not proposed to the whole run."""

Vector = tuple[int, ...]
Kept = Sequence[Sequence[int]]
"""Per step: the variants that may be selected, 0 among them."""


def by_table(latency: Table, spread: Table, kept: Kept, timings: int) -> list[Vector]:
    """Per level: the variant of each step that its timings say is fastest."""
    vectors = []
    for rows, spreads in zip(latency, spread, strict=True):
        chosen = []
        for row, wide, allowed in zip(rows, spreads, kept, strict=True):
            best = regret.select([row[i] for i in allowed], [wide[i] for i in allowed], timings)
            chosen.append(allowed[best])
        vectors.append(tuple(chosen))
    return vectors


def refine(
    bench: Bench, latency: Table, tasks: Sequence[int], kept: Kept, vectors: Sequence[Vector], budget_s: float
) -> tuple[Selection, ...]:
    """The selection of each level, measured: its vector of `vectors`, unless variant 0 everywhere or another level's vector is
    clearly better; then improved task by task (`tasks`: the task of each step), the heaviest first, while this level's part of
    `budget_s` lasts; and variant 0 everywhere if the result is clearly worse than that."""
    zeros = (0,) * len(kept)
    chosen = []
    for level in range(len(bench.levels)):
        until = bench.clock() + DECIDING_SHARE * budget_s / len(bench.levels)
        bench.enter(level)
        best = _best(bench, list(dict.fromkeys([vectors[level], zeros, *vectors])), until)
        for step, variant in _changes(latency[level], tasks, kept, best):
            if bench.clock() >= until:
                break
            changed = tuple(variant if tasks[i] == tasks[step] else old for i, old in enumerate(best))
            best = _best(bench, [best, changed], until)
        chosen.append(best)
    return _measured(bench, zeros, chosen, (1.0 - DECIDING_SHARE) * budget_s)


def _best(bench: Bench, proposals: Sequence[Vector], until: float) -> Vector:
    """The first proposal, or the fastest of those that are clearly better."""
    times = race(bench, proposals, until - bench.clock())
    better = [i for i in range(1, len(proposals)) if regret.clearly_better(times[0] - times[i])]
    return proposals[min(better, key=lambda i: float(np.median(times[i])))] if better else proposals[0]


def _measured(bench: Bench, zeros: Vector, chosen: list[Vector], budget_s: float) -> tuple[Selection, ...]:
    """What was chosen for each level once more against variant 0 everywhere, levels in alternation so that they compare."""
    times: list[list[tuple[float, float]]] = [[] for _ in chosen]
    start = bench.clock()
    while len(times[-1]) < LEAST_RUNS or (len(times[-1]) < MOST_RUNS and bench.clock() - start < budget_s):
        for level, vector in enumerate(chosen):
            bench.enter(level)
            alone = sum(bench.time(zeros))
            times[level].append((alone, sum(bench.time(vector)) if vector != zeros else alone))
    bench.leave()
    found = []
    for vector, pairs in zip(chosen, np.array(times), strict=True):
        alone_s = float(np.median(pairs[:, 0]))
        keep = not regret.clearly_better(pairs[:, 1] - pairs[:, 0])
        low, middle, high = np.percentile(pairs[:, int(keep)], (25, 50, 75))
        found.append(Selection(vector if keep else zeros, float(middle), float((high - low) / middle), alone_s))
    return tuple(found)


def race(bench: Bench, vectors: Sequence[Vector], budget_s: float) -> Floats:
    """Seconds of whole runs, shape (vectors, runs): the vectors take turns, LEAST_RUNS at least."""
    rows: list[list[float]] = []
    start = bench.clock()
    while len(rows) < LEAST_RUNS or (len(rows) < MOST_RUNS and bench.clock() - start < budget_s):
        rows.append([sum(bench.time(vector)) for vector in vectors])
    times: Floats = np.array(rows).T
    return times


def _changes(rows: Sequence[Sequence[float]], tasks: Sequence[int], kept: Kept, chosen: Vector) -> list[tuple[int, int]]:
    """(a step, another variant of its task), the heaviest tasks first: the variant that is next best in the table."""
    weight: dict[int, float] = {}
    first: dict[int, int] = {}
    for step, task in enumerate(tasks):
        weight[task] = weight.get(task, 0.0) + rows[step][chosen[step]]
        first.setdefault(task, step)
    proposed = []
    for task in sorted(weight, key=lambda each: -weight[each]):
        step = first[task]
        others = [i for i in kept[step] if i != chosen[step] and rows[step][i] <= NEAR * rows[step][chosen[step]]]
        if others:
            proposed.append((step, min(others, key=lambda i: rows[step][i])))
    return proposed[:PROPOSED_AT_MOST]
