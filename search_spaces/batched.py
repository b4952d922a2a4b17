"""Products of two activations (attention): for each of a batch, a register tile of MR rows times NR columns.

Dataflows
- panels: a panel of NR columns of the right operand is copied to a workspace [K][NR], in the order in which tiles read it, and
  all rows pass it. The panel and, mostly, the left matrix stay in L1 and L2; in parallel over the batch and panels.
- matrix: all panels of one right matrix are copied, then all of them pass each tile of rows, whose left operand stays in L1.
  In parallel over the batch.
- in place: the tile reads the right operand where it lies, if its last axis is the columns. Nothing is copied.
- strips, for columns that no vector divides: as `matrix`, with panels filled up with zeros, and the sums of a tile's rows stored
  to a strip of whole vectors, from which the result is made when the rows are done: no tile asks where the columns end.

The copy is a transpose if the right operand is stored transposed. One program per (dataflow, NR), with MR sampled; the whole
reduction runs inside the tile, whose accumulators stay in registers. What follows element by element is computed in it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm.ir.prim import Add, Mul
from tvm.s_tir import Schedule
from tvm.tirx import IndexMap, Var

from mvcompile.tiling import row_budget, row_tiles, sample, straight_line, unroll_but_last
from mvcompile.types import HostTarget

TILE_VECTORS = (2, 3, 4)
"""Vectors in a row of the tile: they leave registers for enough rows that FMAs, not loads, bound it."""
LEAST_ROWS = 4
"""With fewer, copying the right operand costs as much as the product."""
SPATIAL, REDUCED = 0, 2
"""Kinds of block axes."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of products [rows, K] x [K, columns]: the block's name, how many axes its result has, extents; the axes of the
    right operand that are K and the columns. `plain`: every index of the block is one of its axes."""

    name: str
    axes: int
    batch: int
    rows: int
    columns: int
    right: tuple[int, int]
    in_place: bool
    plain: bool


def programs(sch: Schedule, target: HostTarget) -> Iterator[Schedule]:
    """Every design of the space as a schedule with sampled tile rows; none for programs that are no such product."""
    product = _product(sch)
    if product is None:
        return
    lanes = target.vector_bits // 32
    for width in _widths(product.columns, lanes):
        tiles = row_tiles(product.rows, row_budget(width // lanes, target.vector_registers), width // lanes)
        if product.columns % width:
            if product.plain and product.rows >= LEAST_ROWS:
                yield _strips(sch.copy(), product, width, lanes, tiles)
            continue
        if product.rows >= LEAST_ROWS:
            yield _panels(sch.copy(), product, width, lanes, tiles)
        if product.rows >= LEAST_ROWS and product.batch > 1 and product.columns > width:
            yield _matrix(sch.copy(), product, width, lanes, tiles)
        if product.in_place:
            yield _in_place(sch.copy(), product, width, lanes, tiles)


def _widths(columns: int, lanes: int) -> list[int]:
    """One vector for so few columns; else two to four, those that are filled best and those that are filled almost."""
    if columns <= lanes:
        return [lanes]
    waste = {count * lanes: -columns % (count * lanes) for count in TILE_VECTORS if (count - 1) * lanes < columns}
    return [width for width in waste if waste[width] <= max(min(waste.values()), columns // 16)]


def _blocks(sch: Schedule) -> list[Any]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _product(sch: Schedule) -> Product | None:
    """The program as a product, if it is one, alone or followed by what one element needs of one element."""
    first, *others = _blocks(sch)
    block = sch.get(first)
    *spatial, last = block.iter_vars
    kinds = [[int(axis.iter_type) for axis in sch.get(each).iter_vars] for each in (first, *others)]
    if len(spatial) < 2 or kinds[0] != [SPATIAL] * len(spatial) + [REDUCED] or any(REDUCED in each for each in kinds[1:]):
        return None
    result, end = (_shape(sch.get(each).writes[0]) for each in (first, (first, *others)[-1]))
    operands = [_indices(each) for each in block.reads]
    tensors = [*block.reads, *block.writes]
    if result != end or len(operands) != 2 or any(str(each.source.dtype) != "float32" for each in tensors):
        return None
    row, column = (axis.var for axis in spatial[-2:])
    left, right = operands
    reduced, spread = _place(right, last.var), _place(right, column)
    if reduced is None or spread is None or _place(left, row) is None:
        return None
    places = (reduced, spread)
    if len(left) - 1 not in (_place(left, last.var), _place(left, row)):
        return None
    if not _adds_products(block) or len(right) - 1 not in places:
        return None
    plain = all(isinstance(index, Var) for index in (*left, *right))
    batch = math.prod(result[:-2])
    rows, columns = result[-2:]
    return Product(str(block.name_hint), len(spatial), batch, rows, columns, places, places[1] == len(right) - 1, plain)


def _shape(operand: Any) -> list[int]:
    return [int(extent) for extent in operand.source.shape]


def _indices(operand: Any) -> list[Any]:
    return [each.min for each in operand.region]


def _place(indices: list[Any], axis: Any) -> int | None:
    return next((place for place, index in enumerate(indices) if index.same_as(axis)), None)


def _adds_products(block: Any) -> bool:
    """Whether the block adds up products, and not, say, the largest of them."""
    value = getattr(block.body, "value", None)
    return isinstance(value, Add) and isinstance(value.b, Mul)


def _panels(sch: Schedule, product: Product, width: int, lanes: int, tiles: list[int]) -> Schedule:
    main = sch.get_sblock(product.name)
    pack = _pack(sch, main, sch.cache_read(main, 1, "global"), product, width)
    last = _last(sch, main)
    batch, outer_r, outer_c, tile = _split(sch, last, width, tiles)
    sch.reorder(*batch, outer_c, outer_r, *tile)
    panel = _fused(sch, [*batch, outer_c])
    _tile(sch, main, last, [panel, outer_r], lanes)
    sch.compute_at(pack, panel, preserve_unit_loops=True)
    _copy(sch, pack, lanes)
    return sch


def _matrix(sch: Schedule, product: Product, width: int, lanes: int, tiles: list[int]) -> Schedule:
    main = sch.get_sblock(product.name)
    pack = _pack(sch, main, sch.cache_read(main, 1, "global"), product, width)
    last = _last(sch, main)
    batch, outer_r, outer_c, tile = _split(sch, last, width, tiles)
    sch.reorder(*batch, outer_r, outer_c, *tile)
    matrix = _fused(sch, batch)
    _tile(sch, main, last, [matrix, outer_r, outer_c], lanes)
    sch.compute_at(pack, matrix, preserve_unit_loops=True)
    _copy(sch, pack, lanes)
    return sch


def _in_place(sch: Schedule, product: Product, width: int, lanes: int, tiles: list[int]) -> Schedule:
    main = sch.get_sblock(product.name)
    last = _last(sch, main)
    batch, outer_r, outer_c, tile = _split(sch, last, width, tiles)
    sch.reorder(*batch, outer_c, outer_r, *tile)
    _tile(sch, main, last, [_fused(sch, [*batch, outer_c]), outer_r], lanes)
    return sch


def _strips(sch: Schedule, product: Product, width: int, lanes: int, tiles: list[int]) -> Schedule:
    main = sch.get_sblock(product.name)
    sch.pad_einsum(main, [1] * (product.axes - 1) + [width, 1])
    pack = _pack(sch, main, sch.get_producers(main)[0], product, width)
    last = _last(sch, main)
    strip = sch.cache_write(main, 0, "global")
    batch, outer_r, outer_c, tile = _split(sch, strip, width, tiles)
    sch.reorder(*batch, outer_r, outer_c, *tile)
    grid = [_fused(sch, batch), outer_r] if product.batch > 1 else [_fused(sch, [*batch, outer_r])]
    sch.reverse_compute_at(last, grid[-1], preserve_unit_loops=True)
    _tile(sch, main, strip, [*grid, outer_c], lanes)
    if product.batch > 1:
        sch.compute_at(pack, grid[0], preserve_unit_loops=True)
    _copy(sch, pack, lanes)
    panel = sch.get_loops(pack)[-4]
    sch.annotate(panel, "pragma_loop_partition_hint", 1)  # only the last panel asks where the columns end
    if product.batch == 1:
        sch.parallel(panel)
    return sch


def _pack(sch: Schedule, main: Any, copy: Any, product: Product, width: int) -> Any:
    """Lays the copy of the right operand out as [batch ..., N / width, K, width]; the copying block goes in that order."""

    def panels(*index: Any) -> list[Any]:
        row, column = (index[place] for place in product.right)
        batch = [each for place, each in enumerate(index) if place not in product.right]
        return [*batch, column // width, row, column % width]

    axes = sch.get(copy).iter_vars
    order = IndexMap.from_func(panels, ndim=len(axes), index_dtype=str(axes[0].dom.extent.ty.dtype))
    sch.transform_layout(main, ("read", 1), order)
    sch.transform_block_layout(copy, order)
    return copy


def _copy(sch: Schedule, pack: Any, lanes: int) -> None:
    sch.vectorize(sch.split(sch.get_loops(pack)[-1], [None, lanes])[1])


def _split(sch: Schedule, last: Any, width: int, tiles: list[int]) -> tuple[list[Any], Any, Any, list[Any]]:
    """The loops of the result: batch, tiles of rows, tiles of columns, and the two of a tile."""
    *batch, rows, columns = sch.get_loops(last)
    outer_r, inner_r = sch.split(rows, [None, sample(sch, tiles)])
    outer_c, inner_c = sch.split(columns, [None, width])
    return batch, outer_r, outer_c, [inner_r, inner_c]


def _fused(sch: Schedule, loops: list[Any]) -> Any:
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def _last(sch: Schedule, main: Any) -> Any:
    """The block that stores the result, into which everything that follows the product is inlined."""
    after = _blocks(sch)
    names = [str(sch.get(block).name_hint) for block in after]
    after = after[names.index(str(sch.get(main).name_hint)) + 1 :]
    for block in after[:-1]:
        sch.compute_inline(block)
    return after[-1] if after else sch.cache_write(main, 0, "global")


def _tile(sch: Schedule, main: Any, last: Any, grid: list[Any], lanes: int) -> None:
    """Puts the product into the innermost grid loop and writes the tile as straight-line vector code."""
    depth = len(grid)
    sch.compute_at(main, grid[-1], preserve_unit_loops=True)
    *units, rows, columns, reduction = sch.get_loops(main)[depth:]
    sch.reorder(*units, reduction, rows, columns)
    sch.parallel(grid[0])  # before the initialisation is split off: two blocks that write one buffer are not provably parallel
    _kernel(sch, main, reduction, [rows, columns], lanes)
    straight_line(sch, sch.get_loops(last)[-2:], lanes)


def _kernel(sch: Schedule, main: Any, reduction: Any, tile: list[Any], lanes: int) -> None:
    straight_line(sch, tile, lanes)
    unroll_but_last(sch, sch.get_loops(sch.decompose_reduction(main, reduction))[-3:])
