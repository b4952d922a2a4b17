"""The schedule of a task that no search has improved; works for any tensor program made of blocks.

One candidate, no sampled decisions. Producers are inlined where that repeats little work. What is left are three kinds of loop
nests, told apart by the axis along which they read contiguous memory:

- maps (element-wise, data movement): vectors along the result's last axis; a transpose in square tiles.
- column reductions (pooling, depthwise convolution, products of two activations): the axis is one of the result. A tile of rows
  times vectors stays in registers while the reduction runs; the element-wise consumer follows in the same tile. Widths that
  vectors do not divide run innermost as a whole, which LLVM vectorises.
- row reductions (softmax, layer normalisation): the axis is reduced. As many partial results as a vector has lanes.

A primitive that does not apply to a block is left out, and with it what would have followed on that block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm_ffi import structural_walk

from mvcompile.types import HostTarget

PARALLEL_ELEMENTS = 1 << 15
"""Below this many elements a parallel launch (1 to 40 microseconds) costs more than it gains."""
CHUNKS_PER_CORE = 4
"""Iterations of a parallel loop for each core: enough for cores of unequal speed."""
TRANSPOSE_TILE = 16
MAX_TILE_ROWS = 8
MAX_TILE_VECTORS = 8
MAX_REPEATS = 16
"""How often an element without function calls may be computed: a 3x3 window reads each nine times."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a nest is cut for."""

    lanes: int
    registers: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Nest:
    """A block and its loops, as they are before anything is done to them. `contiguous` are the loops that the last index of some
    operand depends on; in a reduction, of an operand that is reduced."""

    block: Any
    spatial: list[Any]
    reductions: list[Any]
    contiguous: list[Any]
    extents: dict[Any, int]

    @property
    def iterations(self) -> int:
        return math.prod(self.extents.values())

    @property
    def shape(self) -> list[int]:
        return [self.extents[loop] for loop in self.spatial]


def schedule(sch: Schedule, target: HostTarget) -> Schedule:
    """Applies the default to `sch` in place and returns it."""
    machine = Machine(target.vector_bits // 32, target.vector_registers, CHUNKS_PER_CORE * target.num_cores)
    for block in _blocks(sch):
        _try_inline(sch, block)
    for block in _blocks(sch):
        nest = _nest(sch, block)
        if nest is not None:
            with suppress(ScheduleError):
                _schedule_nest(sch, nest, machine)
    return sch


def _blocks(sch: Schedule) -> list[Any]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _nest(sch: Schedule, block: Any) -> Nest | None:
    """None for a block that is done already, or whose loops are not its axes."""
    loops, axes = list(sch.get_loops(block)), list(sch.get(block).iter_vars)
    if not loops or len(loops) != len(axes) or any(int(sch.get(loop).kind) != 0 for loop in loops):
        return None
    spatial = [loop for loop, axis in zip(loops, axes, strict=True) if not _is_reduction(axis)]
    reductions = [loop for loop, axis in zip(loops, axes, strict=True) if _is_reduction(axis)]
    last = _last_indices(sch.get(block))
    contiguous = [loop for loop, axis in zip(loops, axes, strict=True) if axis.var in last]
    return Nest(block, spatial, reductions, contiguous, {loop: int(sch.get(loop).extent) for loop in loops})


def _last_indices(block: Any) -> set[Any]:
    """The variables in the last index of the operands: all of a map's, those that a reduction runs over."""
    reduced = {axis.var for axis in block.iter_vars if _is_reduction(axis)}
    found: set[Any] = set()
    for operand in block.reads:
        indices = [_variables(each.min) for each in operand.region]
        if indices and (not reduced or any(reduced & each for each in indices)):
            found |= indices[-1]
    return found


def _variables(expression: Any) -> set[Any]:
    found: set[Any] = set()
    structural_walk(expression, (tirx.Var, found.add), order="post")
    return found


def _is_reduction(axis: Any) -> bool:
    return int(axis.iter_type) == 2


def _try_inline(sch: Schedule, block: Any) -> None:
    """Inlines an element-wise or data movement block into its only consumer, unless that would repeat much work.

    A window reads an element several times: padding that is computed there is cheaper than a padded copy in memory. A function
    such as `exp` is never computed twice, and nothing is for every row of a product.
    """
    consumers = sch.get_consumers(block)
    if len(consumers) != 1:
        return
    nest, consumer = _nest(sch, block), _nest(sch, consumers[0])
    if nest is None or consumer is None or nest.reductions:
        return
    if consumer.iterations > nest.iterations * (1 if _calls_functions(sch, block) else MAX_REPEATS):
        return
    with suppress(ScheduleError):
        sch.compute_inline(block)


def _calls_functions(sch: Schedule, block: Any) -> bool:
    names: list[str] = []
    structural_walk(sch.get(block).body, (Call, lambda call: names.append(str(getattr(call.op, "name", "")))), order="post")
    return any(not name.endswith("if_then_else") for name in names)


def _schedule_nest(sch: Schedule, nest: Nest, machine: Machine) -> None:
    if not nest.reductions:
        _map(sch, nest, machine)
    elif nest.spatial and nest.spatial[-1] in nest.contiguous:
        _reduce_columns(sch, nest, machine)
    else:
        _reduce_rows(sch, nest, machine)


def _map(sch: Schedule, nest: Nest, machine: Machine) -> None:
    *outer, inner = nest.spatial
    across = [loop for loop in outer if loop in nest.contiguous]
    if inner not in nest.contiguous and across:
        _transpose(sch, nest, across[-1], machine)
        return
    if nest.extents[inner] % machine.lanes == 0:
        inner, lane = sch.split(inner, [None, machine.lanes])
        sch.vectorize(lane)
        outer.append(inner)
    _parallel(sch, outer, nest.iterations, machine)


def _transpose(sch: Schedule, nest: Nest, across: Any, machine: Machine) -> None:
    """Reads lines along `across`, writes lines along the last axis: in tiles, so that each line is used up while it is in L1.

    Vectors are gathered and stored, or, where they do not divide the last axis, loaded and scattered.
    """
    *outer, inner = nest.spatial
    sizes = [_divisor(nest.extents[loop], TRANSPOSE_TILE) for loop in (across, inner)]
    across_out, across_in = sch.split(across, [None, sizes[0]])
    inner_out, inner_in = sch.split(inner, [None, sizes[1]])
    grid = [across_out if loop == across else loop for loop in outer] + [inner_out]
    scatter = sizes[1] % machine.lanes != 0 and sizes[0] % machine.lanes == 0
    tile = [inner_in, across_in] if scatter else [across_in, inner_in]
    sch.reorder(*grid, *tile)
    _parallel(sch, grid, nest.iterations, machine)
    if int(sch.get(tile[-1]).extent) % machine.lanes == 0:
        sch.vectorize(tile[-1])


def _reduce_columns(sch: Schedule, nest: Nest, machine: Machine) -> None:
    *outer, columns = nest.spatial
    width = _group(sch, nest)
    if width < nest.extents[columns]:
        group, columns = sch.split(columns, [None, width])
        outer = [group, *outer]
    if width % machine.lanes:
        sch.reorder(*outer, *nest.reductions, columns)
        _parallel(sch, outer, nest.iterations, machine)
        sch.decompose_reduction(nest.block, nest.reductions[0])
        return
    consumer = _consumer(sch, nest)
    # With one operand (pooling) there is nothing to reuse: four accumulators hide the latency, and more do not pay.
    accumulators = machine.registers // 4 if len(sch.get(nest.block).reads) == 1 else machine.registers
    rows = int(sch.get(outer[-1]).extent) if outer else 1
    height, vectors = _tile(rows, width // machine.lanes, accumulators, machine.registers)
    columns, vector, lane = sch.split(columns, [None, vectors, machine.lanes])
    grid, tile = [*outer, columns], [vector, lane]
    if height > 1:
        upper, row = sch.split(outer[-1], [None, height])
        grid, tile = [*outer[:-1], upper, columns], [row, vector, lane]
    sch.reorder(*grid, *nest.reductions, *tile)
    grid = _parallel(sch, grid, nest.iterations, machine)
    if consumer is not None:
        sch.reverse_compute_at(consumer, grid[-1], preserve_unit_loops=True)
        last = sch.get_loops(consumer)[-1]
        sch.vectorize(sch.split(last, [None, machine.lanes])[1])
    sch.vectorize(lane)
    for loop in tile[:-1]:
        sch.unroll(loop)
    sch.decompose_reduction(nest.block, nest.reductions[0])


def _group(sch: Schedule, nest: Nest) -> int:
    """Columns that read the same channels: all of them, or those of one group of a grouped convolution.

    A vector across two groups would have to gather its operands.
    """
    block, extent = sch.get(nest.block), nest.extents[nest.spatial[-1]]
    column = [axis.var for axis in block.iter_vars if not _is_reduction(axis)][-1]
    widths = [extent]

    def visit(division: Any) -> None:
        if division.a.same_as(column) and isinstance(division.b, tirx.IntImm):
            widths.append(int(division.b))

    structural_walk(block.body, (tirx.FloorDiv, visit), order="post")
    return min(width for width in widths if extent % width == 0)


def _consumer(sch: Schedule, nest: Nest) -> Any:
    """The block that may follow in the same tile: the only consumer, element for element."""
    consumers = sch.get_consumers(nest.block)
    if len(consumers) != 1:
        return None
    consumer = _nest(sch, consumers[0])
    return None if consumer is None or consumer.reductions or consumer.shape != nest.shape else consumers[0]


def _tile(rows: int, vectors: int, accumulators: int, registers: int) -> tuple[int, int]:
    """Rows and vectors of a tile: the most accumulators that leave registers for one row of operands and a broadcast."""
    fitting = [
        (height, count)
        for count in range(1, MAX_TILE_VECTORS + 1)
        for height in range(1, MAX_TILE_ROWS + 1)
        if vectors % count == 0 and rows % height == 0
        if height * count <= accumulators and height * count + count + 1 <= registers
    ]
    return max(fitting, key=lambda tile: (tile[0] * tile[1], -abs(tile[1] - 2)))


def _reduce_rows(sch: Schedule, nest: Nest, machine: Machine) -> None:
    last = nest.reductions[-1]
    width = _divisor_of_lanes(nest.extents[last], machine.lanes)
    if width == 1 or not nest.spatial:
        if _parallel(sch, nest.spatial, nest.iterations, machine):
            sch.decompose_reduction(nest.block, nest.reductions[0])
        return
    _, lane = sch.split(last, [None, width])
    partial = sch.rfactor(lane, len(nest.spatial))
    row = sch.fuse(*sch.get_loops(nest.block)[:-1])
    sch.compute_at(partial, row, preserve_unit_loops=True)
    if nest.iterations >= PARALLEL_ELEMENTS:
        sch.parallel(row)
    lane, *others = sch.get_loops(partial)[1:]  # the new axis is the first one
    sch.reorder(*others, lane)
    sch.vectorize(lane)
    sch.decompose_reduction(partial, others[-len(nest.reductions)])


def _divisor_of_lanes(extent: int, lanes: int) -> int:
    return next((width for width in (2 * lanes, lanes) if extent % width == 0), 1)


def _divisor(extent: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if extent % size == 0)


def _parallel(sch: Schedule, loops: Sequence[Any], iterations: int, machine: Machine) -> list[Any]:
    """Joins outer loops until there is enough to share out, and runs them in parallel; returns the loops there are then."""
    extents = [int(sch.get(loop).extent) for loop in loops]
    if iterations < PARALLEL_ELEMENTS or math.prod(extents) == 1:
        return list(loops)
    count = next((n for n in range(1, len(loops) + 1) if math.prod(extents[:n]) >= machine.chunks), len(loops))
    joined = sch.fuse(*loops[:count]) if count > 1 else loops[0]
    sch.parallel(joined)
    return [joined, *loops[count:]]
