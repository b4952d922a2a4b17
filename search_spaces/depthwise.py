"""Depthwise convolutions, channels last: a register tile of TY x TX output pixels times vectors of channels.

The whole window is unrolled inside the tile, so that what neighbouring pixels share is loaded once. Padding is read in place: the
loop over tiles along a row is partitioned when it is lowered, and only its ends ask where the image ends. (With a padded strip
per block of rows instead, the best of 60 designs was 1.1 to 2 times slower on four of MobileNet-V2's layers.)

Dataflows
- pixels: all channels of a tile before the next tile. Memory is read and written in the order in which it lies.
- blocks: a block of channels passes over a block of rows before the next one; its weights stay in registers or L1, and the rows
  of the block in L2. With blocks of one tile's height, rows are finished one by one; with one block, channels are.

Both run in parallel over blocks of rows and, in `blocks`, of channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import Schedule

from mvcompile.types import HostTarget

OPERATOR = "group_conv2d_nhwc"
LARGEST_WINDOW = 49
"""More taps are not unrolled: code would leave the instruction cache."""
TILE_WIDTHS = (2, 4, 8)
LEAST_ACCUMULATORS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Output extents, and the lanes of the widest vector that divides the channels."""

    height: int
    width: int
    channels: int
    lanes: int


def matches(sch: Schedule) -> bool:
    """Whether the task's program is a depthwise convolution, followed by nothing but what one element needs of one element."""
    blocks = _blocks(sch)
    found = [block for block in blocks if str(sch.get(block).name_hint) == OPERATOR]
    if len(found) != 1:
        return False
    data, weight = (_extents(operand) for operand in sch.get(found[0]).reads)
    result, end = (_extents(sch.get(block).writes[0]) for block in (found[0], blocks[-1]))
    one_to_one = data[-1] == result[-1] and weight[2] == 1
    return one_to_one and result == end and math.prod(weight[:2]) <= LARGEST_WINDOW


def programs(sch: Schedule, target: HostTarget) -> Iterator[Schedule]:
    """Every design of the space as a schedule with sampled tile widths and row blocks; none for other programs."""
    if not matches(sch):
        return
    shape = _shape(sch, target.vector_bits // 32)
    if shape is None:
        return
    most = (target.vector_registers * 5) // 8  # the rest is for weights and inputs
    for vectors in (1, 2, 3):
        for tile_y in (1, 2):
            widths = _tile_widths(shape.width, tile_y * vectors, most)
            if shape.channels % (vectors * shape.lanes) or shape.height % tile_y or not widths:
                continue
            yield _pixels(sch.copy(), shape, tile_y, vectors, widths)
            yield _blocked(sch.copy(), shape, tile_y, vectors, widths)


def _blocks(sch: Schedule) -> list[Any]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _extents(region: Any) -> list[int]:
    return [int(extent) for extent in region.source.shape]


def _shape(sch: Schedule, widest: int) -> Shape | None:
    _, height, width, channels = _extents(sch.get(_blocks(sch)[-1]).writes[0])
    lanes = next((lanes for lanes in (widest, widest // 2, widest // 4) if lanes >= 4 and channels % lanes == 0), None)
    return None if lanes is None else Shape(height, width, channels, lanes)


def _tile_widths(width: int, rows: int, most: int) -> list[int]:
    """Candidates for TX; the middle one is the one to start with. A row of up to 8 pixels may be one tile or two."""
    tiles = sorted({-(-width // 2), width}) if width <= TILE_WIDTHS[-1] else [*TILE_WIDTHS, *([7] if width % 7 == 0 else [])]
    return [tile for tile in tiles if tile * rows <= most and (tile * rows >= LEAST_ACCUMULATORS or width < LEAST_ACCUMULATORS)]


def _row_blocks(rows: int) -> list[int]:
    """Tiles in a block of rows: one, a few, all."""
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    few = min(divisors, key=lambda size: abs(size - 4))
    return sorted({1, few, rows})


def _sample(sch: Schedule, candidates: list[int]) -> Any:
    return sch.sample_categorical(candidates, [1.0 / len(candidates)] * len(candidates))


def _pixels(sch: Schedule, shape: Shape, tile_y: int, vectors: int, widths: list[int]) -> Schedule:
    main, last = _consumer(sch)
    batch, y, x, channels = sch.get_loops(last)
    outer_y, inner_y = sch.split(y, [None, tile_y])
    outer_x, inner_x = sch.split(x, [None, _sample(sch, widths)])
    outer_c, inner_c = sch.split(channels, [None, vectors * shape.lanes])
    sch.reorder(batch, outer_y, outer_x, outer_c, inner_y, inner_x, inner_c)
    _tile(sch, main, last, [sch.fuse(batch, outer_y), outer_x, outer_c], outer_x, shape.lanes)
    return sch


def _blocked(sch: Schedule, shape: Shape, tile_y: int, vectors: int, widths: list[int]) -> Schedule:
    main, last = _consumer(sch)
    batch, y, x, channels = sch.get_loops(last)
    outer_y, inner_y = sch.split(y, [None, tile_y])
    block_y, outer_y = sch.split(outer_y, [None, _sample(sch, _row_blocks(shape.height // tile_y))])
    outer_x, inner_x = sch.split(x, [None, _sample(sch, widths)])
    outer_c, inner_c = sch.split(channels, [None, vectors * shape.lanes])
    sch.reorder(batch, block_y, outer_c, outer_y, outer_x, inner_y, inner_x, inner_c)
    _tile(sch, main, last, [sch.fuse(batch, block_y, outer_c), outer_y, outer_x], outer_x, shape.lanes)
    return sch


def _consumer(sch: Schedule) -> tuple[Any, Any]:
    """The operator, with its padding inlined, and the one block after it, into which the element-wise rest is inlined."""
    names = [str(sch.get(block).name_hint) for block in _blocks(sch)]
    position = names.index(OPERATOR)
    for name in (*names[:position], *names[position + 1 : -1]):
        sch.compute_inline(sch.get_sblock(name))
    main = sch.get_sblock(OPERATOR)
    return main, sch.get_sblock(names[-1]) if names[-1] != OPERATOR else sch.cache_write(main, 0, "global")


def _tile(sch: Schedule, main: Any, last: Any, grid: list[Any], along_row: Any, lanes: int) -> None:
    """Puts the operator into the innermost grid loop and writes the tile and its window as straight-line vector code."""
    depth = len(grid)
    sch.compute_at(main, grid[-1], preserve_unit_loops=True)
    inner = sch.get_loops(main)[depth:]
    tile, window = inner[:4], inner[4:]
    sch.reorder(*window, *tile)
    sch.parallel(grid[0])  # before the initialisation is split off: two blocks that write one buffer are not provably parallel
    _straight_line(sch, tile, lanes)
    for loop in window:
        sch.unroll(loop)
    *rows, lane = sch.get_loops(sch.decompose_reduction(main, window[0]))[depth:]
    sch.vectorize(lane)
    for loop in rows:
        sch.unroll(loop)
    _straight_line(sch, sch.get_loops(last)[depth:], lanes)
    sch.annotate(along_row, "pragma_loop_partition_hint", 1)


def _straight_line(sch: Schedule, tile: list[Any], lanes: int) -> None:
    *rows, channels = tile
    vectors, lane = sch.split(channels, [None, lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    for loop in rows:
        sch.unroll(loop)
