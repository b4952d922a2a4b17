"""From a task's records to the variants that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mvcompile import pareto
from mvcompile.types import Objectives, Record, Status

NOISE = 0.02
"""Candidates that differ by less in an objective are equal in it: what medians of an interleaved comparison repeat to."""
RESOLUTION = 0.7
"""Latencies that differ by less than this times the timings' interquartile range are equal: twice the standard error of the
difference of two medians of 14 normal timings (1.253 sigma / sqrt(14) each; an interquartile range is 1.349 sigma)."""
MAX_SLOWDOWN = 2.0
"""A candidate this many times slower than the fastest is no choice at any pressure: it bounds the front and its hypervolume."""


@dataclass(frozen=True, slots=True)
class ParetoSet:
    """The measured front of a task and the records kept from it, fastest first.

    `measured` counts candidates with status ok; `hypervolume_ratio` is the kept records' over the front's.
    """

    measured: int
    front: tuple[Record, ...]
    kept: tuple[Record, ...]
    hypervolume_ratio: float


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """The last record of every trace, by the trace's digest, in order of first appearance."""
    found: dict[str, Record] = {}
    for record in records:
        found[record.trace_sha256] = record
    return found


def objectives_of(record: Record) -> Objectives:
    """The objectives of a record whose status is ok."""
    assert record.objectives is not None
    return record.objectives


def front_of(records: Iterable[Record]) -> tuple[Record, ...]:
    """The fastest valid record, and those that no other one beats beyond noise, fastest first; slower ones than MAX_SLOWDOWN are
    left out. Noise is NOISE, and for latency what timings that spread as these do cannot tell apart. The fastest stays even where
    one that is slower by less than noise moves less: it is what a model runs alone."""
    valid = [record for record in latest(records).values() if record.status is Status.OK]
    if not valid:
        return ()
    fastest = min(objectives_of(record).latency_s for record in valid)
    near = [record for record in valid if objectives_of(record).latency_s <= MAX_SLOWDOWN * fastest]
    near.sort(key=lambda record: (objectives_of(record).vector(), record.trace_sha256))
    spread = float(np.median([record.latency_spread or 0.0 for record in near]))
    noise = (max(NOISE, RESOLUTION * spread), NOISE, NOISE)
    indices = {0, *(int(i) for i in pareto.front(_points(near), rtol=noise))}
    return tuple(near[i] for i in sorted(indices))


def pareto_set(records: Sequence[Record], variants: int, allowed: Callable[[Record], bool] = lambda record: True) -> ParetoSet:
    """At most `variants` members of the front of the records `allowed`, with the largest hypervolume, the fastest always among
    them and first. What may not be kept, for the copies of weights that it needs, is no choice, and not in the front."""
    measured = sum(record.status is Status.OK for record in latest(records).values())
    front = front_of(record for record in records if allowed(record))
    if not front:
        return ParetoSet(measured, (), (), 1.0)
    points = _points(front)
    fastest = int(np.argmin(points[:, 0]))
    chosen = pareto.thin(points, variants, _reference(points), keep=[fastest])
    ratio = hypervolume_ratio([objectives_of(front[int(i)]) for i in chosen], [objectives_of(record) for record in front])
    kept = sorted((front[int(i)] for i in chosen), key=lambda record: objectives_of(record).vector())
    return ParetoSet(measured, front, tuple(kept), ratio)


NEAR = 1.1
"""A candidate that is slower than the fastest by no more than this may be the fastest beside a neighbour."""


def contenders(records: Sequence[Record], count: int, allowed: Callable[[Record], bool] = lambda record: True) -> ParetoSet:
    """At most `count` records to be compared beside neighbours: the front, thinned if need be, and then the fastest of the rest.

    A kernel's sensitivity is no objective, so what another one dominates alone may still be the better one under pressure."""
    found = pareto_set(records, count, allowed)
    if len(found.kept) < min(count, found.measured):
        fastest = objectives_of(found.kept[0]).latency_s
        known = {record.trace_sha256 for record in found.kept}
        rest = [
            record
            for record in latest(each for each in records if allowed(each)).values()
            if record.status is Status.OK
            and record.trace_sha256 not in known
            and fastest <= objectives_of(record).latency_s <= NEAR * fastest
        ]
        rest.sort(key=lambda record: (objectives_of(record).vector(), record.trace_sha256))
        found = with_kept(found, [*found.kept, *rest[: count - len(found.kept)]])
    return found


def with_kept(found: ParetoSet, kept: Iterable[Record]) -> ParetoSet:
    """The same front with other records kept of it."""
    ordered = tuple(sorted(kept, key=lambda record: objectives_of(record).vector()))
    ratio = hypervolume_ratio([objectives_of(record) for record in ordered], [objectives_of(record) for record in found.front])
    return ParetoSet(found.measured, found.front, ordered, ratio)


def hypervolume_ratio(kept: Sequence[Objectives], front: Sequence[Objectives]) -> float:
    """Hypervolume of the kept objective vectors over that of the measured front, 0 to 1; 1 when nothing was measured."""
    if not front:
        return 1.0
    points = np.array([each.vector() for each in front], dtype=np.float64)
    return pareto.coverage([each.vector() for each in kept], points, _reference(points))


def _reference(points: np.ndarray) -> np.ndarray:
    """The corner that hypervolume is measured to: the slowest latency that is a choice, a little beyond the worst traffic."""
    reference = pareto.reference_point(points)
    reference[0] = MAX_SLOWDOWN * points[:, 0].min() * 1.01
    return reference


def _points(records: Sequence[Record]) -> np.ndarray:
    return np.array([objectives_of(record).vector() for record in records], dtype=np.float64)
