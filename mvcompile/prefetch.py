"""Software prefetches in the register tiles of scheduled programs.

Two streams of a tile are not found by hardware prefetchers, which follow neighbouring lines: what the tile's result is combined
with (a residual: one line of every row, and rows are pages apart), and the panel of weights that follows the present one (it is
first touched when it is needed, and a whole tile waits for memory). TVM's schedules have no primitive for either, so they are
inserted when a schedule is compiled (docs/design/010-prefetch.md).

Source of the method: Callahan, Kennedy and Porterfield, "Software prefetching" (ASPLOS 1991).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm_ffi import structural_map, structural_walk

NEXT_PANEL = "mvcompile.prefetch_next_panel"
"""Annotation (1: yes) of a loop over tiles that all read the panel of the loop around it: in each tile a part of the panel that
is next is fetched, so that all of it is there when the last tile is done."""
NEXT_BLOCK = "mvcompile.prefetch_next_block"
"""The same for tiles that all read one block of a panel: what is fetched is as much of the weights as the tiles read, from where
their block ends."""
FETCHED_ROWS = 256
"""Spaces do not try it for tasks with more rows: a panel is used for so long then that fetching the next one in time gains less
than the instructions for it cost."""
FETCHED_PART = 4
"""Nor for weights smaller than this part of the second-level cache, which holds activations, too."""

_LINE_ELEMENTS = 16
"""Of four bytes: a line of 64."""
_TO_ALL_LEVELS, _TO_SECOND_LEVEL = "mvcompile_prefetch_all", "mvcompile_prefetch_second"
_INSTRUCTIONS = f"""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
define linkonce_odr void @{_TO_ALL_LEVELS}(ptr %line) alwaysinline nounwind willreturn {{
  call void @llvm.prefetch.p0(ptr %line, i32 0, i32 3, i32 1) memory(inaccessiblemem: readwrite)
  ret void
}}
define linkonce_odr void @{_TO_SECOND_LEVEL}(ptr %line) alwaysinline nounwind willreturn {{
  call void @llvm.prefetch.p0(ptr %line, i32 0, i32 2, i32 1) memory(inaccessiblemem: readwrite)
  ret void
}}
"""
"""LLVM IR. As TVM's own intrinsic a prefetch would count as an access to memory that may be the tile's sums: where these have
1 KiB or more, which TVM does not keep on the stack, each step of the reduction would then store all of them."""

_Var = type(tirx.Var("x", "int64"))
_Values = Mapping[Any, Any]


def insert(module: tvm.IRModule) -> tvm.IRModule:
    """`module` with prefetches in the tiles of its scheduled `main`; the same result whatever they do."""
    function = module["main"]
    body = structural_map(function.body, (tirx.For, lambda loop: _with_prefetches(loop, list(function.params))))
    if body.same_as(function.body):
        return module
    root = body.block
    instructions = tvm.ir.StringImm(_INSTRUCTIONS)
    inside = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", instructions, root.body)
    block = SBlock([], root.reads, root.writes, root.name_hint, inside, None, root.alloc_buffers, [], root.annotations)
    return tvm.IRModule({"main": function.with_body(SBlockRealize([], True, block))}, attrs=module.attrs)


def _with_prefetches(loop: Any, parameters: Sequence[Any]) -> Any:
    """Loops come innermost first. A loop over tiles is done when the loop around it is there, whose panels it reads."""
    inner = loop.body
    if isinstance(inner, tirx.For) and (wanted := {NEXT_PANEL, NEXT_BLOCK} & set(inner.annotations)):
        (wish,) = wanted
        fetched = _next(loop, inner, parameters, wish) if int(inner.annotations[wish]) else inner
        loop = _with_body(loop, _without_annotation(fetched, wish))
    return _operands(loop, parameters)


def _operands(tile: Any, parameters: Sequence[Any]) -> Any:
    """A tile that begins with prefetches of what its sums are combined with, if that has the result's shape; else as it is."""
    parts = _tile_parts(tile)
    if parts is None:
        return tile
    loops, realized = _nest(parts[-1])
    if realized is None or len(loops) < 2 or len(realized.block.writes) != 1:
        return tile
    result = realized.block.writes[0]
    wanted = [
        read for read in realized.block.reads if _one_of(read.source, parameters) and _shape(read.source) == _shape(result.source)
    ]
    if not wanted:
        return tile
    bound = dict(zip([each.var for each in realized.block.iter_vars], realized.iter_values, strict=True))
    fetches = [
        _fetch(read.source, [_replaced(_replaced(each.min, bound), place) for each in read.region], _TO_ALL_LEVELS)
        for place in _lines(loops)
        for read in wanted
    ]
    return _with_body(tile, tirx.SeqStmt([*fetches, *parts]))


def _lines(loops: Sequence[Any]) -> Iterator[_Values]:
    """Values of a tile's loops (rows, vectors of a row, lanes of a vector), one for each line."""
    *outer, lane = loops
    step = max(1, _LINE_ELEMENTS // int(lane.extent))
    *rows, _ = outer
    ranges = [range(int(loop.extent)) for loop in rows] + [range(0, int(outer[-1].extent), step)]
    for values in itertools.product(*ranges):
        yield dict(zip([loop.loop_var for loop in loops], map(_integer, (*values, 0)), strict=True))


def _next(around: Any, tiles: Any, parameters: Sequence[Any], wish: str) -> Any:
    """The loop over tiles in whose innermost reduction loop a line is fetched of what the tiles after them read, evenly: the one
    that is as far in there as the tiles are with their steps, so that all lines of it are fetched, one after the other. Several
    lines where there are more of them than steps."""
    parts = tuple(tiles.body) if isinstance(tiles.body, tirx.SeqStmt) else (tiles.body,)
    position = next((place for place, part in enumerate(parts) if _updates(part)), None)
    if position is None:
        return tiles
    loops, realized = _nest(parts[position])
    serial = [place for place, loop in enumerate(loops) if int(loop.kind) == int(tirx.ForKind.SERIAL)]
    if not serial:
        return tiles
    bound = dict(zip([each.var for each in realized.block.iter_vars], realized.iter_values, strict=True))
    reads = [(read.source, [_replaced(each.min, bound) for each in read.region]) for read in realized.block.reads]
    tile = [loop for place, loop in enumerate(loops) if place not in serial]
    rows = [tiles.loop_var, *(loop.loop_var for loop in tile[:-2] if int(loop.extent) > 1)]  # not vectors and lanes
    weights = [
        (source, places)
        for source, places in reads
        if _one_of(source, parameters) and not any(_uses(places, variable) for variable in rows)
    ]
    if len(weights) != 1:
        return tiles
    source, places = weights[0]
    steps, count, width = loops[serial[-1]], int(tiles.extent), _shape(source)[-1]
    start = {loop.loop_var: _integer(0) for place, loop in enumerate(loops) if place >= serial[-1] or place not in serial}
    if wish == NEXT_PANEL:
        start[around.loop_var] = around.loop_var + _integer(1)
    *outer, column = (_replaced(each, start) for each in places)
    ahead = int(steps.extent) * width if wish == NEXT_BLOCK else 0
    lines = Fraction(width, _LINE_ELEMENTS * count)  # of each step
    done = (tiles.loop_var * steps.extent + steps.loop_var) * _integer(lines.numerator)
    line = tirx.floordiv(done, _integer(lines.denominator)) * _integer(_LINE_ELEMENTS) + _integer(ahead)
    fetches = [
        _fetch(source, [*outer, column + line + _integer(_LINE_ELEMENTS * further)], _TO_SECOND_LEVEL)
        for further in range(math.ceil(lines))
    ]
    body = _with_body(steps, tirx.SeqStmt([*fetches, steps.body]))
    for loop in reversed(loops[: serial[-1]]):
        body = _with_body(loop, body)
    changed = [*parts[:position], body, *parts[position + 1 :]]
    return _with_body(tiles, tirx.SeqStmt(changed) if len(changed) > 1 else body)


def _updates(statement: Any) -> bool:
    _, realized = _nest(statement)
    return realized is not None and realized.block.name_hint.endswith("_update")


def _tile_parts(loop: Any) -> tuple[Any, ...] | None:
    """What `decompose_reduction` leaves inside a loop over tiles: the start of the sums, their updates, and what follows; with
    prefetches before them, perhaps."""
    if not isinstance(loop.body, tirx.SeqStmt):
        return None
    parts = tuple(loop.body)
    nests = [part for part in parts if isinstance(part, tirx.For)]
    names = [realized.block.name_hint for _, realized in map(_nest, nests) if realized is not None]
    if len(nests) != 3 or len(names) != 3 or not all(isinstance(part, tirx.For) for part in parts[-3:]):
        return None
    return parts if names[0].endswith("_init") and names[1].endswith("_update") else None


def _nest(statement: Any) -> tuple[list[Any], Any]:
    """The loops of a perfect nest, outermost first, and the block in it (None if it is not one)."""
    loops = []
    while isinstance(statement, tirx.For):
        loops.append(statement)
        statement = statement.body
    return loops, statement if isinstance(statement, SBlockRealize) else None


def _fetch(source: Any, indices: Sequence[Any], instruction: str) -> Any:
    """The line of `source` at `indices`; the last index may go beyond its axis, which is the next row."""
    return tirx.Evaluate(tirx.call_extern("void", instruction, tirx.address_of(tirx.BufferLoad(source, list(indices)))))


def _with_body(loop: Any, body: Any) -> Any:
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step)


def _without_annotation(loop: Any, annotation: str) -> Any:
    rest = {key: value for key, value in loop.annotations.items() if key != annotation}
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, rest, loop.step)


def _replaced(expression: Any, values: _Values) -> Any:
    return structural_map(expression, (_Var, lambda variable: values.get(variable, variable)))


def _uses(expressions: Iterable[Any], variable: Any) -> bool:
    found: list[Any] = []
    for expression in expressions:
        structural_walk(expression, (_Var, found.append))
    return _one_of(variable, found)


def _one_of(node: Any, others: Iterable[Any]) -> bool:
    return any(node.same_as(other) for other in others)


def _shape(buffer: Any) -> list[int]:
    return [int(extent) for extent in buffer.shape]


def _integer(value: int) -> Any:
    return tirx.IntImm("int64", value)
