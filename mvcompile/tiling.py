"""What the structured search spaces share: how large a register tile may be, and how it becomes straight-line vector code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule

UNROLL_ROWS = 16
"""No tile has more rows: beyond, code size grows and no register file holds it."""


def loop_extents(sch: Schedule, block: Any) -> list[int]:
    """The extents of the loops around a block, outermost first."""
    return [int(sch.get(loop).extent) for loop in sch.get_loops(block)]


def row_budget(vectors: int, registers: int) -> int:
    """Tile rows that leave registers for one row of the panel and a broadcast: MR*v + v + 1 <= registers."""
    return max(1, min(UNROLL_ROWS, (registers - vectors - 1) // vectors))


def row_tiles(extent: int, budget: int, vectors: int) -> list[int]:
    """Candidate MR: at least half the accumulators the budget allows (fewer cannot hide the FMA latency), up to the budget."""
    if extent <= budget:
        return sorted({extent, -(-extent // 2)}) if extent > 4 else [extent]
    least = max(1, min(budget, -(-6 // vectors)))
    return list(range(least, budget + 1))


def vector_width(extent: int, lanes: int) -> int:
    """The largest power-of-two part of `lanes` that divides `extent`: channels that do not fill the widest vectors take a half
    or a quarter of them."""
    while extent % lanes:
        lanes //= 2
    return lanes


def sample(sch: Schedule, candidates: Sequence[int]) -> Any:
    """A decision among `candidates`, all as likely."""
    return sch.sample_categorical(list(candidates), [1.0 / len(candidates)] * len(candidates))


def straight_line(sch: Schedule, tile: Sequence[Any], lanes: int) -> None:
    """Writes a tile (loops over rows, then one over columns) as vectors of `lanes`, everything unrolled."""
    *rows, columns = tile
    vectors, lane = sch.split(columns, [None, lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    for loop in rows:
        sch.unroll(loop)


def unroll_but_last(sch: Schedule, loops: Sequence[Any]) -> None:
    """Unrolls all loops but the last, which is one vector."""
    *outer, lane = loops
    sch.vectorize(lane)
    for loop in outer:
        sch.unroll(loop)
