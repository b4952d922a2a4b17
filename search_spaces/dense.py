"""Dense convolutions and matmuls on packed weight panels: a register tile of MR output rows times NR output columns.

One program per (dataflow, loop order, NR, tile rows), with MR sampled. `rows` are output pixels (convolution) or rows of the left
operand (matmul); `columns` output channels.

Dataflows
- one axis: all rows as one axis, so that tiles run across image rows. The input window of every pixel is gathered to one row
  first (im2col: a workspace KH*KW times the input), which a 1x1 stride-1 convolution and a matmul do not need.
- window: a tile of TY x TX neighbouring pixels read in place from the padded input.

Orders
- `weights`: a weight panel stays in cache while all rows pass it (columns outermost): the weights are read once.
  With few rows the next panel can be fetched meanwhile (`mvcompile.prefetch`).
- `rows`: a tile's input stays in L1 while all panels pass it (rows outermost): the input is read once, the panels once a tile.
- blocked: like `weights`, for panels larger than L1: one block of the reduction after the other, the partial sums of all rows
  waiting in memory; the next block can be fetched meanwhile. In the other orders the whole reduction runs inside the tile, whose
  accumulators stay in registers.
- blocked in groups: for inputs that leave the second-level cache while a panel passes them. One block of the reduction after the
  other again, but for all panels of a group, so that the block of the input (of the gathered windows, made block by block)
  stays in the cache, as do the sums of the group. The weights are read once, the input once a group.

Widths that MR does not divide get a main part and a remainder tile: LLVM takes the loops apart (`target.UNSWITCHED_COST`).

Columns that NR does not divide (in each group) are computed with the last panel's zeros, and a tile's sums are stored to a strip
of whole vectors, from which the result is made: either the strip of one panel (order `weights` without groups), or of all panels
of a group, which then pass each tile of rows one after the other, group by group (`weights`) or tile by tile (`rows`).
Source of the structure: BLIS (van Zee and van de Geijn 2015) for the tile, Goto and van de Geijn (2008) for the blocking; TTile
(Tollenaere et al., TACO 2022) for structured space plus sampling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import Schedule
from tvm.tirx import IndexMap

from mvcompile.prefetch import FETCHED_PART, FETCHED_ROWS, NEXT_BLOCK, NEXT_PANEL
from mvcompile.tiling import loop_extents, row_budget, row_tiles, sample, straight_line, unroll_but_last
from mvcompile.types import HostTarget

TAGS = ("packed_conv2d", "packed_matmul")
CROP = "packed_columns"
"""The block that leaves out what panels compute beyond the columns, if they do not fill them."""


BLOCKS = (64, 128, 256, 512)
"""Of a reduction: lengths that are tried if they divide the input channels."""
GROUP_COUNTS = (4, 8)
"""Groups of panels: fewer read the input less often, but several cores need some to share."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tile has to divide: output rows x columns, spatial height and width, reduction extent, panel width.

    `columns` are those of all panels, of which `used` are of the result.
    """

    height: int
    width: int
    columns: int
    reduction: int
    panel: int
    pointwise: bool
    channels: int
    groups: int
    used: int

    @property
    def rows(self) -> int:
        return self.height * self.width

    @property
    def partial(self) -> bool:
        """Whether the last panel (of each group) has columns that are not of the result."""
        return self.used < self.columns

    @property
    def one_axis(self) -> bool:
        """Whether all rows may be one axis. Windows of wide images would be gathered to more than the cache holds, and those of
        a grouped convolution once for every column; both tile well in place."""
        return self.pointwise or self.rows == 1 or (self.width < 64 and self.groups == 1)


def matches(sch: Schedule) -> bool:
    """Whether the task's program contains a packed dense operator."""
    return _tag(sch) is not None


def programs(sch: Schedule, target: HostTarget) -> Iterator[Schedule]:
    """Every design of the space as a schedule with sampled tile rows; designs that cannot be built are left out."""
    tag = _tag(sch)
    if tag is None:
        return
    shape = _shape(sch, tag)
    widest = target.vector_bits // 32
    for columns, order in itertools.product(_column_tiles(shape, widest), ("weights", "rows")):
        lanes = min(widest, columns)  # a panel narrower than a register has vectors of its own width
        vectors = columns // lanes
        budget = row_budget(vectors, target.vector_registers)
        tiles = row_tiles(shape.rows, budget, vectors)
        one_axis = _one_strip_axis if shape.partial else _one_axis
        if shape.pointwise or shape.rows == 1:
            yield one_axis(sch.copy(), tag, shape, order, columns, lanes, tiles)
            if columns == shape.panel and _worth_fetching(shape, order, target):
                yield one_axis(sch.copy(), tag, shape, order, columns, lanes, tiles, fetch=True)
            continue
        for tile_y in _window_heights(shape, budget):
            widths = row_tiles(shape.width, budget // tile_y, tile_y * vectors)
            if shape.partial:
                yield _strip_window(sch.copy(), tag, shape, order, tile_y, lanes, widths)
            else:
                yield _window(sch.copy(), tag, order, tile_y, columns, lanes, widths)
        if shape.one_axis:
            yield one_axis(sch.copy(), tag, shape, order, columns, lanes, tiles)
            if columns == shape.panel and _worth_fetching(shape, order, target):
                yield one_axis(sch.copy(), tag, shape, order, columns, lanes, tiles, fetch=True)
    if shape.rows > 1 and shape.one_axis:
        yield from _blocked_programs(sch, tag, shape, target)


def _blocked_programs(sch: Schedule, tag: str, shape: Shape, target: HostTarget) -> Iterator[Schedule]:
    """Designs that cut a long reduction, for panels that would leave the first-level cache between two tiles."""
    lanes = min(target.vector_bits // 32, shape.panel)
    vectors = shape.panel // lanes
    blocks = _reduction_blocks(shape, target.l1d_bytes)
    tiles = row_tiles(shape.rows, row_budget(vectors, target.vector_registers), vectors)
    if blocks and not (shape.partial and shape.groups > 1):
        blocked = _blocked_strips if shape.partial else _blocked
        yield blocked(sch.copy(), tag, shape, lanes, tiles, blocks)
        if _worth_fetching(shape, "weights", target):
            yield blocked(sch.copy(), tag, shape, lanes, tiles, blocks, fetch=True)
    counts = [count for count in GROUP_COUNTS if shape.columns % (count * shape.panel) == 0]
    lengths = [size for size in BLOCKS if shape.channels % size == 0 and size < shape.reduction][-2:]
    whole = not shape.partial and shape.groups == 1
    if counts and lengths and whole and 4 * shape.rows * shape.reduction > target.l2_bytes // 2:
        yield _blocked_groups(sch.copy(), tag, shape, lanes, tiles, lengths, counts)


def _tag(sch: Schedule) -> str | None:
    """The operator's block, if there is one and the last block computes one element for each of its results.

    A consumer may broadcast the result to a larger tensor (the gate of a squeeze-and-excitation block): then a tile of the
    consumer would compute its operands over and over.
    """
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    found = [block for block in blocks if sch.get(block).name_hint in TAGS]
    if len(found) != 1:
        return None
    cropped = [block for block in blocks if sch.get(block).name_hint == CROP]
    result, end = (_result_shape(sch, block) for block in ((cropped or found)[0], blocks[-1]))
    return str(sch.get(found[0]).name_hint) if result == end else None


def _result_shape(sch: Schedule, block: Any) -> list[int]:
    return [int(extent) for extent in sch.get(block).writes[0].source.shape]


def _shape(sch: Schedule, tag: str) -> Shape:
    block = sch.get_sblock(tag)
    extents, panel = loop_extents(sch, block), int(sch.get(block).reads[1].source.shape[-1])
    used = _result_shape(sch, sch.get_child_blocks(sch.get_sblock("root"))[-1])[-1]
    if tag == "packed_matmul":
        *rows, columns, reduction = extents
        return Shape(1, math.prod(rows), columns, reduction, panel, True, reduction, 1, used)
    batch, height, width, columns, kernel_h, kernel_w, channels = extents
    source = [int(extent) for extent in sch.get(block).reads[0].source.shape]
    pointwise = kernel_h == kernel_w == 1 and source[1:3] == [height, width]
    length = kernel_h * kernel_w * channels
    return Shape(batch * height, width, columns, length, panel, pointwise, channels, source[-1] // channels, used)


def _column_tiles(shape: Shape, lanes: int) -> list[int]:
    """The panel width, and half of it where that is still whole vectors: fewer columns leave registers for more rows."""
    if shape.panel % lanes or shape.partial:
        return [shape.panel]
    half = shape.panel // 2
    return [shape.panel, half] if half % lanes == 0 and half >= lanes else [shape.panel]


def _reduction_blocks(shape: Shape, l1_bytes: int) -> list[int]:
    """Lengths that divide the input channels, so that a block of the panel takes at most half the first-level cache; none when
    the whole panel does."""
    row_bytes = 4 * shape.panel
    if shape.reduction * row_bytes <= l1_bytes:
        return []
    most = l1_bytes // 2 // row_bytes
    return [size for size in BLOCKS if size <= most and shape.channels % size == 0 and size < shape.reduction][-2:]


def _worth_fetching(shape: Shape, order: str, target: HostTarget) -> bool:
    """Whether what is next of the weights may be fetched while the present panel is used: weights of which the core's caches keep
    little from one run to the next, and so few rows that they do not hide how long a panel takes to come. Whether it pays is
    measured."""
    few = 1 < shape.rows <= FETCHED_ROWS
    large = 4 * shape.columns * shape.reduction >= target.l2_bytes // FETCHED_PART
    return order == "weights" and few and large and (shape.groups == 1 or not shape.partial)


def _window_heights(shape: Shape, budget: int) -> list[int]:
    return [tile for tile in (1, 2) if tile <= shape.height and tile <= budget and shape.height % tile == 0]


def _consumer(sch: Schedule, tag: str) -> tuple[list[Any], Any, Any]:
    """Blocks before the operator, the operator, and the one block after it, into which the element-wise rest is inlined."""
    names = [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]
    position = names.index(tag)
    main = sch.get_sblock(tag)
    before = [sch.get_sblock(name) for name in names[:position]]
    after = [sch.get_sblock(name) for name in names[position + 1 :]]
    for block in after[:-1]:
        sch.compute_inline(block)
    last = after[-1] if after else sch.cache_write(main, 0, "global")
    return before, main, last


def _flatten_rows(sch: Schedule, main: Any, last: Any) -> None:
    """Joins all row axes of the operator's result (and of its consumer) into one, so that a tile may run across image rows."""
    extents = loop_extents(sch, last)
    if len(extents) == 2:
        return
    axes = len(extents)

    def joined(*index: Any) -> Any:
        total = index[0]
        for extent, each in zip(extents[1:-1], index[1:], strict=True):
            total = total * extent + each
        return total

    def spatial(*index: Any) -> list[Any]:
        return [joined(*index[: axes - 1]), *index[axes - 1 :]]

    result = IndexMap.from_func(spatial, ndim=axes)
    whole = IndexMap.from_func(spatial, ndim=len(sch.get(main).iter_vars))
    sch.transform_layout(main, ("write", 0), result, assume_injective_transform=True)
    sch.transform_block_layout(main, whole)
    sch.transform_block_layout(last, result)


def _gather(sch: Schedule, main: Any, before: list[Any], pointwise: bool) -> Any:
    """Copies the input window of every pixel to one row; None for an operator that reads one input pixel for each of its own."""
    if pointwise:
        return None
    gathered = sch.reindex(main, ("read", 0))
    for block in before:
        sch.compute_inline(block)
    return gathered


def _one_axis(
    sch: Schedule, tag: str, shape: Shape, order: str, columns: int, lanes: int, tiles: list[int], *, fetch: bool = False
) -> Schedule:
    before, main, last = _consumer(sch, tag)
    gathered = _gather(sch, main, before, shape.pointwise)
    _flatten_rows(sch, main, last)
    rows, cols = sch.get_loops(last)
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    outer_c, inner_c = sch.split(cols, [None, columns])
    grid = [outer_c, outer_r] if order == "weights" else [outer_r, outer_c]
    sch.reorder(*grid, inner_r, inner_c)
    _micro_kernel(sch, main, last, grid, lanes)
    if fetch:
        sch.annotate(outer_r, NEXT_PANEL, 1)
    if gathered is not None:
        _copy(sch, gathered, lanes)
    return sch


def _blocked(
    sch: Schedule, tag: str, shape: Shape, lanes: int, tiles: list[int], blocks: list[int], *, fetch: bool = False
) -> Schedule:
    """Per panel: for every block of the reduction, all tiles of rows, whose partial sums wait in memory meanwhile."""
    before, main, last = _consumer(sch, tag)
    gathered = _gather(sch, main, before, shape.pointwise)
    _flatten_rows(sch, main, last)
    rows, cols = sch.get_loops(last)
    panel, inner_c = sch.split(cols, [None, shape.panel])
    sch.reorder(panel, rows, inner_c)
    sch.compute_at(main, panel, preserve_unit_loops=True)
    rows, cols, *reduction = sch.get_loops(main)[1:]
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    outer_k, inner_k = sch.split(reduction[-1], [None, sample(sch, blocks)])
    sch.reorder(*reduction[:-1], outer_k, outer_r, inner_k, inner_r, cols)
    sch.parallel(panel)
    straight_line(sch, [inner_r, cols], lanes)
    start = sch.decompose_reduction(main, [*reduction[:-1], outer_k][0])
    if fetch:
        sch.annotate(outer_r, NEXT_BLOCK, 1)
    for block in (start, last):
        _vectors_only(sch, sch.get_loops(block)[1:], lanes)
    if gathered is not None:
        _copy(sch, gathered, lanes)
    return sch


def _blocked_groups(
    sch: Schedule, tag: str, shape: Shape, lanes: int, tiles: list[int], blocks: list[int], counts: list[int]
) -> Schedule:
    """Per group of panels: for every block of the reduction, all panels of the group, for each of them all tiles of rows."""
    before, main, last = _consumer(sch, tag)
    gathered = _gather(sch, main, before, shape.pointwise)
    _flatten_rows(sch, main, last)
    rows, cols = sch.get_loops(last)
    group, inside = sch.split(cols, [sample(sch, counts), None])
    sch.reorder(group, rows, inside)
    sch.compute_at(main, group, preserve_unit_loops=True)
    rows, cols, *reduction = sch.get_loops(main)[1:]
    panel, inner_c = sch.split(cols, [None, shape.panel])
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    outer_k, inner_k = sch.split(reduction[-1], [None, sample(sch, blocks)])
    sch.reorder(*reduction[:-1], outer_k, panel, outer_r, inner_k, inner_r, inner_c)
    if gathered is not None:
        sch.compute_at(gathered, outer_k, preserve_unit_loops=True)
    sch.parallel(group)
    straight_line(sch, [inner_r, inner_c], lanes)
    start = sch.decompose_reduction(main, [*reduction[:-1], outer_k][0])
    sch.annotate(outer_r, NEXT_PANEL, 1)
    for block in (start, last, *([] if gathered is None else [gathered])):
        _vectors_only(sch, sch.get_loops(block)[1:], lanes)
    return sch


def _vectors_only(sch: Schedule, loops: list[Any], lanes: int) -> None:
    """Vector code for a copy that is too long to be unrolled."""
    if int(sch.get(loops[-1]).extent) != lanes:
        sch.vectorize(sch.split(loops[-1], [None, lanes])[1])
    elif int(sch.get(loops[-1]).kind) == 0:
        sch.vectorize(loops[-1])


def _window(sch: Schedule, tag: str, order: str, tile_y: int, columns: int, lanes: int, widths: list[int]) -> Schedule:
    before, main, last = _consumer(sch, tag)
    batch, height, width, cols = sch.get_loops(last)
    outer_y, inner_y = sch.split(height, [None, tile_y])
    outer_x, inner_x = sch.split(width, [None, sample(sch, widths)])
    outer_c, inner_c = sch.split(cols, [None, columns])
    grid = [batch, outer_c, outer_y, outer_x] if order == "weights" else [batch, outer_y, outer_x, outer_c]
    sch.reorder(*grid, inner_y, inner_x, inner_c)
    grid = [sch.fuse(*grid[:2]), *grid[2:]]
    _micro_kernel(sch, main, last, grid, lanes)
    for block in before:
        _copy(sch, block, lanes)
    return sch


def _arrange(sch: Schedule, main: Any, last: Any, shape: Shape, *, flat: bool) -> None:
    """Gives the operator's result and its consumer an axis of groups, if there are several, and one of all rows if `flat`."""
    axes = len(sch.get(last).iter_vars)
    joined = axes - 1 if flat and axes > 2 else 0
    extents = _result_shape(sch, main)

    def split(columns: int, ndim: int) -> Any:
        def indices(*index: Any) -> list[Any]:
            total = index[0]
            for extent, each in zip(extents[1:joined], index[1:joined], strict=True):
                total = total * extent + each
            rows, column = ([total] if joined else list(index[: axes - 1])), index[axes - 1]
            group = [column // columns, column % columns] if shape.groups > 1 else [column]
            return [*rows, *group, *index[axes:]]

        return IndexMap.from_func(indices, ndim=ndim)

    if not joined and shape.groups == 1:
        return
    filled = shape.columns // shape.groups
    # The blocks first: indices of the result are simplified by what is known of the blocks' axes.
    sch.transform_block_layout(main, split(filled, len(sch.get(main).iter_vars)))
    sch.transform_block_layout(last, split(shape.used // shape.groups, axes))
    sch.transform_layout(main, ("write", 0), split(filled, axes), assume_injective_transform=True)


def _one_strip_axis(
    sch: Schedule, tag: str, shape: Shape, order: str, columns: int, lanes: int, tiles: list[int], *, fetch: bool = False
) -> Schedule:
    before, main, last = _consumer(sch, tag)
    gathered = _gather(sch, main, before, shape.pointwise)
    _arrange(sch, main, last, shape, flat=True)
    strip = sch.cache_write(main, 0, "global")
    rows, *others = sch.get_loops(strip)
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    _strips(sch, (main, strip, last), shape, order, [outer_r], [inner_r], others, lanes)
    if fetch:
        sch.annotate(outer_r, NEXT_PANEL, 1)
    if gathered is not None:
        _copy(sch, gathered, lanes)
    return sch


def _strip_window(sch: Schedule, tag: str, shape: Shape, order: str, tile_y: int, lanes: int, widths: list[int]) -> Schedule:
    before, main, last = _consumer(sch, tag)
    _arrange(sch, main, last, shape, flat=False)
    strip = sch.cache_write(main, 0, "global")
    batch, height, width, *others = sch.get_loops(strip)
    outer_y, inner_y = sch.split(height, [None, tile_y])
    outer_x, inner_x = sch.split(width, [None, sample(sch, widths)])
    sch.reorder(batch, outer_y, outer_x, inner_y, inner_x)
    rows = [sch.fuse(batch, outer_y), outer_x]
    _strips(sch, (main, strip, last), shape, order, rows, [inner_y, inner_x], others, lanes)
    for block in before:
        _copy(sch, block, lanes)
    return sch


def _strips(
    sch: Schedule,
    blocks: tuple[Any, Any, Any],
    shape: Shape,
    order: str,
    rows: list[Any],
    tile: list[Any],
    others: list[Any],
    lanes: int,
) -> None:
    """Panels of one tile of rows into a strip, from which `last` makes the result; a strip is one panel's or a whole group's.

    `rows` are the loops over tiles, `tile` those inside, `others` over groups, if there are several, and columns.
    """
    main, strip, last = blocks
    *groups, columns = others
    panel, column = sch.split(columns, [None, shape.panel])
    alone = order == "weights" and shape.groups == 1
    if alone:
        grid, inside = [panel, *rows], []
    else:
        grid, inside = [*groups, *rows] if order == "weights" else [*rows, *groups], [panel]
    sch.reorder(*grid, *inside, *tile, column)
    sch.reverse_compute_at(last, grid[-1], preserve_unit_loops=True)
    if alone:
        sch.annotate(panel, "pragma_loop_partition_hint", 1)  # only the last panel asks where the columns end
    _tile_kernel(sch, main, strip, [*grid, *inside], lanes)
    straight_line(sch, [*tile, column], lanes)


def _blocked_strips(
    sch: Schedule, tag: str, shape: Shape, lanes: int, tiles: list[int], blocks: list[int], *, fetch: bool = False
) -> Schedule:
    """As `_blocked`, for columns that do not fill the last panel."""
    before, main, last = _consumer(sch, tag)
    gathered = _gather(sch, main, before, shape.pointwise)
    _arrange(sch, main, last, shape, flat=True)
    rows, columns, *reduction = sch.get_loops(main)
    panel, column = sch.split(columns, [None, shape.panel])
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    outer_k, inner_k = sch.split(reduction[-1], [None, sample(sch, blocks)])
    sch.reorder(panel, *reduction[:-1], outer_k, outer_r, inner_k, inner_r, column)
    sch.reverse_compute_at(last, panel, preserve_unit_loops=True)
    sch.annotate(panel, "pragma_loop_partition_hint", 1)
    sch.parallel(panel)
    straight_line(sch, [inner_r, column], lanes)
    start = sch.decompose_reduction(main, [*reduction[:-1], outer_k][0])
    if fetch:
        sch.annotate(outer_r, NEXT_BLOCK, 1)
    _vectors_only(sch, sch.get_loops(start)[1:], lanes)
    if gathered is not None:
        _copy(sch, gathered, lanes)
    return sch


def _micro_kernel(sch: Schedule, main: Any, last: Any, grid: list[Any], lanes: int) -> None:
    """The tile as `_tile_kernel` writes it, and in it what follows the operator."""
    _tile_kernel(sch, main, last, grid, lanes)
    straight_line(sch, sch.get_loops(last)[len(grid) :], lanes)


def _tile_kernel(sch: Schedule, main: Any, result: Any, grid: list[Any], lanes: int) -> None:
    """Puts the operator into the innermost grid loop and writes the tile, which `result` copies, as straight-line vector code."""
    depth = len(grid)
    reductions = len(sch.get(main).iter_vars) - len(sch.get(result).iter_vars)
    sch.compute_at(main, grid[-1], preserve_unit_loops=True)
    inner = sch.get_loops(main)[depth:]
    tile, reduction = inner[: len(inner) - reductions], inner[len(inner) - reductions :]
    sch.reorder(*reduction, *tile)
    sch.parallel(grid[0])  # before the initialisation is split off: two blocks that write one buffer are not provably parallel
    straight_line(sch, tile, lanes)
    start = sch.decompose_reduction(main, reduction[0])
    unroll_but_last(sch, sch.get_loops(start)[depth:])


def _copy(sch: Schedule, block: Any, lanes: int) -> None:
    """A data movement block (padding, gathering): outermost loops in parallel, innermost in vectors where they divide."""
    *outer, last = sch.get_loops(block)
    if int(sch.get(last).extent) % lanes == 0:
        sch.vectorize(sch.split(last, [None, lanes])[1])
    wide = [loop for loop in outer if int(sch.get(loop).extent) > 1]
    if wide:
        sch.parallel(wide[0])
