"""The levels of a memory hierarchy in a curve of latency over working set: pure arithmetic on measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvcompile.host_profile import CurvePoint

MEMORY = "memory"
MISSES = 0.25
"""A working set of which no more misses a level counts as living in it."""
TOLD_APART = 1.2
"""Two levels whose times differ by a smaller factor cannot be told apart."""
BEYOND = 3
SMALLEST_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class Seen:
    """A level as the curve shows it; see `LevelFound` for the fields."""

    name: str
    reported_bytes: int
    seen_bytes: int
    latency_s: float


def reported_levels(l1d_bytes: int, l2_bytes: int, llc_bytes: int) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the caches, from the core outwards; a machine whose last level is its L2 has two."""
    named = (("L1d", l1d_bytes), ("L2", l2_bytes), ("LLC", llc_bytes))
    return tuple((name, size) for index, (name, size) in enumerate(named) if index == 0 or size > named[index - 1][1])


def working_sets(largest_bytes: int) -> tuple[int, ...]:
    """Powers of two and the halves between them, from `SMALLEST_BYTES` to `largest_bytes`."""
    sizes, size = [], SMALLEST_BYTES
    while size <= largest_bytes:
        sizes += [size, size * 3 // 2]
        size *= 2
    return tuple(each for each in sizes if each <= largest_bytes)


def levels_seen(curve: Sequence[CurvePoint], reported: Sequence[tuple[str, int]]) -> tuple[Seen, ...]:
    """The reported caches as the curve shows them, and memory last. `curve` rises in working sets and ends beyond the last cache.

    A level's latency is that of the smallest set that is at least `BEYOND` times as large as the level before it: the smallest,
    because what other programs take of a shared cache only shows in larger ones. Sizes are seen by loads that do not depend on
    each other: who waits for every line loses more of a shared cache to others than a kernel does.
    """
    starts = _starts(curve, [size for _, size in reported])
    found = [
        Seen(name, size, _extent(curve, starts[index].parallel_s, starts[index + 1].parallel_s), starts[index].latency_s)
        for index, (name, size) in enumerate(reported)
    ]
    return (*found, Seen(MEMORY, 0, 0, starts[-1].latency_s))


def _starts(curve: Sequence[CurvePoint], sizes: Sequence[int]) -> list[CurvePoint]:
    """The point that stands for each level, memory last."""
    inner = (0, *sizes[:-1])
    return [*(next(point for point in curve if point.working_set_bytes >= BEYOND * size) for size in inner), curve[-1]]


def _extent(curve: Sequence[CurvePoint], here_s: float, next_s: float) -> int:
    if next_s < TOLD_APART * here_s:
        return 0
    limit = here_s + MISSES * (next_s - here_s)
    extent = 0
    for point in curve:
        if point.parallel_s > limit:
            break
        extent = point.working_set_bytes
    return extent
