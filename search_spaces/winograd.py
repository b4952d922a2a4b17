"""Winograd convolutions (`mvcompile.algorithms.winograd`): transform, multiply plane by plane, transform back.

Dataflows
- strips: some rows of tiles after the other, each through all stages, so that a strip's planes stay in the second-level cache;
  the transformed weights are read once for every strip. Strips run in parallel.
- planes: every stage for the whole image, each one in parallel. The weights are read once, if they are large the next panel while
  the present one is used (`mvcompile.prefetch`); the planes of a large image leave the cache between the stages.

The product of a plane is the matrix product of `dense`: a register tile of MR image tiles times one panel of output channels,
panels outermost. What follows the convolution (bias, residual, activation) is done where a tile is transformed back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tvm.s_tir import Schedule

from mvcompile.algorithms.winograd import CROP, INPUT, OUTPUT, PAD, PRODUCT
from mvcompile.prefetch import FETCHED_PART, FETCHED_ROWS, NEXT_PANEL
from mvcompile.tiling import loop_extents, row_budget, row_tiles, sample, straight_line, unroll_but_last, vector_width
from mvcompile.types import HostTarget

MOST_STRIPS = 4
"""Heights of a strip that are tried: beyond, neighbouring ones differ little."""
LEAST_LANES = 4
"""Elements of the narrowest vectors (128 bits) that are worth transforming with."""


class Lanes(NamedTuple):
    """Elements in a vector of each stage: of the transform of the input, the product, the transform back."""

    inputs: int
    product: int
    outputs: int


def programs(sch: Schedule, target: HostTarget) -> Iterator[Schedule]:
    """Both dataflows, with the height of a strip and MR sampled; none if the channels do not fill even narrow vectors."""
    names = _names(sch)
    if PRODUCT not in names:
        return
    _, tiles, _, channels = loop_extents(sch, sch.get_sblock(PRODUCT))
    down, across, _ = loop_extents(sch, sch.get_sblock(OUTPUT))
    lanes = target.vector_bits // 32
    panel = int(sch.get(sch.get_sblock(PRODUCT)).reads[1].source.shape[-1])
    columns = loop_extents(sch, sch.get_sblock(names[-1]))[-1]
    if panel % lanes:
        return
    widths = [vector_width(extent, lanes) for extent in (channels, columns)]
    if min(widths) < LEAST_LANES:
        return
    lanes_of = Lanes(widths[0], lanes, widths[1])
    vectors = panel // lanes
    budget = row_budget(vectors, target.vector_registers)
    yield _scheduled(sch.copy(), None, row_tiles(tiles, budget, vectors), panel, lanes_of)
    weights = math.prod(int(extent) for extent in sch.get(sch.get_sblock(PRODUCT)).reads[1].source.shape)
    if 1 < tiles <= FETCHED_ROWS and 4 * weights >= target.l2_bytes // FETCHED_PART:
        yield _scheduled(sch.copy(), None, row_tiles(tiles, budget, vectors), panel, lanes_of, fetch=True)
    heights = [height for height in range(1, down) if down % height == 0]
    if heights:
        rows = row_tiles(heights[0] * across, budget, vectors)
        yield _scheduled(sch.copy(), _spread(heights), rows, panel, lanes_of)


def _names(sch: Schedule) -> list[str]:
    return [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]


def _spread(values: list[int]) -> list[int]:
    """At most MOST_STRIPS of the values, the ends among them."""
    if len(values) <= MOST_STRIPS:
        return values
    return sorted({values[round(index * (len(values) - 1) / (MOST_STRIPS - 1))] for index in range(MOST_STRIPS)})


def _scheduled(
    sch: Schedule, heights: list[int] | None, rows: list[int], panel: int, lanes: Lanes, *, fetch: bool = False
) -> Schedule:
    """The stages in strips of one of `heights` rows of tiles; stage by stage if there are no heights."""
    padding, inputs, product, outputs = (sch.get_sblock(name) for name in (PAD, INPUT, PRODUCT, OUTPUT))
    last = _inline_others(sch)
    copy = sch.cache_write(product, 0, "global")
    tile = _tile_extent(sch, outputs)
    strip = _back(sch, last, outputs, tile, heights, lanes.outputs)
    if strip is not None:
        sch.compute_at(copy, strip, preserve_unit_loops=True)
    loop = _multiply(sch, product, copy, sample(sch, rows), panel, lanes.product, parallel=strip is None)
    if fetch:
        sch.annotate(loop, NEXT_PANEL, 1)
    for block in (inputs, padding):
        if strip is not None:
            sch.compute_at(block, strip, preserve_unit_loops=True)
        *outer, channels = sch.get_loops(block)
        sch.vectorize(sch.split(channels, [None, lanes.inputs])[1])
        wide = [loop for loop in outer if int(sch.get(loop).extent) > 1]
        if strip is None and wide:
            sch.parallel(wide[0])
    return sch


def _inline_others(sch: Schedule) -> Any:
    """Inlines what is before the first stage and what is after the last one, into the program's last block, which it returns."""
    names = _names(sch)
    for name in names[: names.index(PAD)]:
        sch.compute_inline(sch.get_sblock(name))
    for name in names[names.index(CROP) : -1]:
        sch.compute_inline(sch.get_sblock(name))
    return sch.get_sblock(names[-1])


def _tile_extent(sch: Schedule, outputs: Any) -> int:
    return int(sch.get(outputs).writes[0].region[0].extent)


def _back(sch: Schedule, last: Any, outputs: Any, tile: int, heights: list[int] | None, lanes: int) -> Any:
    """The transform back and what follows, one tile of one vector of channels at a time. Returns the loop over strips, if any."""
    batch, y, x, c = sch.get_loops(last)
    strip = None
    if heights is None:
        down, inner_y = sch.split(y, [None, tile])
        outer = [batch, down]
    else:
        strip, down, inner_y = sch.split(y, [None, sample(sch, heights), tile])
        outer = [batch, strip, down]
    across, inner_x = sch.split(x, [None, tile])
    vector, lane = sch.split(c, [None, lanes])
    sch.reorder(*outer, across, vector, inner_y, inner_x, lane)
    outer[:2] = [sch.fuse(*outer[:2])]
    sch.compute_at(outputs, vector, preserve_unit_loops=True)
    unroll_but_last(sch, [inner_y, inner_x, lane])
    unroll_but_last(sch, sch.get_loops(outputs)[-3:])
    sch.parallel(outer[0])
    return None if heights is None else outer[0]


def _multiply(sch: Schedule, product: Any, copy: Any, rows: Any, panel: int, lanes: int, *, parallel: bool) -> Any:
    """The product of the planes in register tiles, plane by plane; planes in parallel unless strips are. Returns the loop over
    the tiles of a panel."""
    plane, tiles, columns = sch.get_loops(copy)[-3:]
    outer_r, inner_r = sch.split(tiles, [None, rows])
    outer_c, inner_c = sch.split(columns, [None, panel])
    sch.reorder(plane, outer_c, outer_r, inner_r, inner_c)
    sch.compute_at(product, outer_r, preserve_unit_loops=True)
    if parallel:  # before the initialisation is split off: two blocks that write one buffer are not provably parallel
        sch.parallel(plane)
    depth = len(sch.get_loops(copy)) - 2
    *square, reduction = sch.get_loops(product)[depth:]
    sch.reorder(reduction, *square)
    straight_line(sch, square, lanes)
    start = sch.decompose_reduction(product, reduction)
    unroll_but_last(sch, sch.get_loops(start)[depth:])
    straight_line(sch, sch.get_loops(copy)[depth:], lanes)
    return outer_r
