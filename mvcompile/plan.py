"""Offsets in one arena for all intermediate tensors: liveness-based reuse, no run-time allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvcompile.types import align


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size` bytes that is written at step `first` and last used at step `last` (inclusive)."""

    size: int
    first: int
    last: int


def assign_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offsets (multiples of 64), one per lifetime, and the arena's size; buffers alive at the same step never overlap.

    Greedy by size: the largest buffer first, at the lowest gap that is free for its whole lifetime (Pisarchyk and Lee 2020,
    "Efficient Memory Management for Deep Neural Net Inference", offset calculation).
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].size, lifetimes[i].first, i)):
        life = lifetimes[index]
        rivals = sorted(
            (offsets[other], offsets[other] + align(lifetimes[other].size))
            for other in placed
            if lifetimes[other].first <= life.last and life.first <= lifetimes[other].last
        )
        offset = 0
        for start, end in rivals:
            if offset + align(life.size) <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append(index)
    total = max((offsets[i] + align(lifetimes[i].size) for i in placed), default=0)
    return offsets, total
