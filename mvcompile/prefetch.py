"""Software prefetches in the register tiles of scheduled programs.

Two streams of a tile are not found by hardware prefetchers, which follow neighbouring lines: what the tile's result is combined
with (a residual: one line of every row, and rows are pages apart), and the panel of weights that follows the present one (it is
first touched when it is needed, and a whole tile waits for memory). TVM's schedules have no primitive for either, so they are
inserted when a schedule is compiled (docs/design/010-prefetch.md).

Source of the method: Callahan, Kennedy and Porterfield, "Software prefetching" (ASPLOS 1991).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm_ffi import structural_map, structural_walk

NEXT_PANEL = "mvcompile.prefetch_next_panel"
"""Annotation (1: yes) of a loop over tiles that all read the panel of the loop around it: in each tile a part of the panel that
is next is fetched, so that all of it is there when the last tile is done."""
FETCHED_ROWS = 128
"""Spaces do not try it for tasks with more rows: a panel is used for so long then that fetching the next one in time gains less
than the instructions for it cost."""

_LINE_ELEMENTS = 16
"""Of four bytes: a line of 64."""
_READ, _TO_ALL_LEVELS, _TO_SECOND_LEVEL, _DATA = 0, 3, 2, 1
"""Arguments of LLVM's prefetch: kind of access, locality, kind of cache."""

_Var = type(tirx.Var("x", "int64"))
_Values = Mapping[Any, Any]


def insert(module: tvm.IRModule) -> tvm.IRModule:
    """`module` with prefetches in the tiles of its scheduled `main`; the same result whatever they do."""
    function = module["main"]
    body = structural_map(function.body, (tirx.For, lambda loop: _with_prefetches(loop, list(function.params))))
    return tvm.IRModule({"main": function.with_body(body)}, attrs=module.attrs)


def _with_prefetches(loop: Any, parameters: Sequence[Any]) -> Any:
    """Loops come innermost first. A loop over tiles is done when the loop around it is there, whose panels it reads."""
    inner = loop.body
    if isinstance(inner, tirx.For) and NEXT_PANEL in inner.annotations:
        fetched = _next_panel(loop, inner, parameters) if int(inner.annotations[NEXT_PANEL]) else inner
        loop = _with_body(loop, _without_annotation(fetched))
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


def _next_panel(panels: Any, tiles: Any, parameters: Sequence[Any]) -> Any:
    """The loop over tiles in whose innermost reduction loop a line of the next panel is fetched: in tile t of T and step s of S,
    line t * ceil(S / T) + s // T, so that the tiles together fetch all of them, evenly."""
    parts = _tile_parts(tiles)
    if parts is None:
        return tiles
    *before, update, end = parts
    loops, realized = _nest(update)
    serial = [position for position, loop in enumerate(loops) if int(loop.kind) == int(tirx.ForKind.SERIAL)]
    if realized is None or not serial:
        return tiles
    panel = panels.loop_var
    bound = dict(zip([each.var for each in realized.block.iter_vars], realized.iter_values, strict=True))
    weights = [
        (read.source, places)
        for read in realized.block.reads
        if _one_of(read.source, parameters) and _uses(places := [_replaced(each.min, bound) for each in read.region], panel)
    ]
    if len(weights) != 1:
        return tiles
    steps, count = loops[serial[-1]], int(tiles.extent)
    share = -(-int(steps.extent) // count)
    place = {loop.loop_var: _integer(0) for position, loop in enumerate(loops) if position not in serial}
    place[steps.loop_var] = tiles.loop_var * _integer(share) + tirx.floordiv(steps.loop_var, _integer(count))
    place[panel] = panel + _integer(1)
    source, places = weights[0]
    fetch = _fetch(source, [_replaced(each, place) for each in places], _TO_SECOND_LEVEL)
    body = _with_body(steps, tirx.SeqStmt([fetch, steps.body]))
    for loop in reversed(loops[: serial[-1]]):
        body = _with_body(loop, body)
    return _with_body(tiles, tirx.SeqStmt([*before, body, end]))


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


def _fetch(source: Any, indices: Sequence[Any], locality: int) -> Any:
    address = tirx.address_of(tirx.BufferLoad(source, list(indices)))
    options = (tirx.IntImm("int32", each) for each in (_READ, locality, _DATA))
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *options))


def _with_body(loop: Any, body: Any) -> Any:
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step)


def _without_annotation(loop: Any) -> Any:
    rest = {key: value for key, value in loop.annotations.items() if key != NEXT_PANEL}
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
