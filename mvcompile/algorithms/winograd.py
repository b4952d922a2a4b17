"""Winograd's minimal filtering for 3x3 convolutions of stride 1: F(m x m, 3 x 3), with (m + 2)^2 products for m^2 outputs.

The image is cut into tiles of m x m outputs. The (m+2) x (m+2) inputs of a tile and the 3 x 3 weights are each transformed into
(m+2)^2 numbers, the planes, which are multiplied plane by plane (a matrix product over the channels), and the products are
transformed back: Y = A' [(G g G') * (B' d B)] A. Against the 9 m^2 products of the direct sum that is 2.25, 3.24 and 4 times
fewer for m of 2, 3 and 4; the weight is 16/9, 25/9 and 36/9 as large.

Sources: Winograd 1980; Lavin and Gray (CVPR 2016) for convolutional networks; the matrices by the Toom-Cook construction from
interpolation points (Barabasz, Anderson, Soodhalter and Gregg, ACM TOMS 2020), of which the error depends strongly: for m = 4 the
points 0, +-3/4, +-3/2 lose a third of what the usual 0, +-1, +-2 do (docs/design/006-winograd.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812  (its name in all of TVM's documents)

CONVOLUTION = "packed_conv2d"
"""The block that `frontend.packing` makes."""
PAD, INPUT, PRODUCT, OUTPUT, CROP = (f"winograd_{stage}" for stage in ("pad", "input", "product", "output", "crop"))
"""The blocks that take its place, in order."""

_TAPS = 3
_POINTS = {2: (0, 1, -1), 3: (0, 1, -1, Fraction(1, 2)), 4: (0, Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))}
Row = Sequence[float]


class Matrices(NamedTuple):
    """B' (m+2, m+2), G (m+2, 3) and A' (m, m+2) as rows."""

    data: Sequence[Row]
    weight: Sequence[Row]
    output: Sequence[Row]


@cache
def matrices(tile: int) -> Matrices:
    """The transforms of F(tile, 3), exact where floats are: Toom-Cook with the points of `_POINTS` and infinity."""
    points = [Fraction(point) for point in _POINTS[tile]]
    data, weight = [], []
    for index, point in enumerate(points):
        others = [other for place, other in enumerate(points) if place != index]
        scale = math.prod((point - other for other in others), start=Fraction(1))
        sign = -1 if scale < 0 else 1  # of both, so that fewer coefficients are negative
        data.append([sign * coefficient for coefficient in _polynomial(others)] + [Fraction(0)])
        weight.append([point**power / abs(scale) for power in range(_TAPS)])
    data.append(_polynomial(points))
    weight.append([Fraction(0)] * (_TAPS - 1) + [Fraction(1)])
    output = [[point**power for point in points] + [Fraction(int(power == tile - 1))] for power in range(tile)]
    return Matrices(*([[float(each) for each in row] for row in rows] for rows in (data, weight, output)))


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients, lowest first, of the monic polynomial with these roots."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [high - root * low for high, low in zip(shifted, [*found, Fraction(0)], strict=True)]
    return found


class Winograd:
    """F(tile x tile, 3 x 3) as an `Algorithm`, for packed convolutions with one group, stride 1 and no dilation."""

    def __init__(self, tile: int) -> None:
        self._tile = tile

    @property
    def products(self) -> float:
        """See `Algorithm.products`."""
        return (self._tile + 2) ** 2 / (_TAPS * self._tile) ** 2

    def transform(self, weight: np.ndarray) -> np.ndarray:
        """Panels `(CO/NR, 3, 3, CI, NR)` to planes of panels `((m+2)^2, CO/NR, CI, NR)`; computed in float64, rounded once."""
        change = np.array(matrices(self._tile).weight)
        panels, _, _, channels, lanes = weight.shape
        planes = np.einsum("ia,pabcn,jb->ijpcn", change, weight.astype(np.float64), change, optimize=True)
        return np.ascontiguousarray(planes.reshape(-1, panels, channels, lanes), dtype=np.float32)

    def program(self, module: tvm.IRModule) -> tuple[tvm.IRModule, int] | None:
        """See `Algorithm.program`. What stands before and after the convolution in the fused program stays."""
        function = module["main"]
        block = _convolution(module)
        if block is None:
            return None
        root = function.body.block
        source, weight, result = block.reads[0].source, block.reads[1].source, block.writes[0].source
        position = next((place for place, each in enumerate(function.params) if each.same_as(weight)), None)
        if position is None:
            return None
        planes, stages = _stages(self._tile, source, weight, result)
        statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
        place = next(index for index, each in enumerate(statements) if _first_block(each) == CONVOLUTION)
        statements[place : place + 1] = list(stages.body.seq)
        body = SBlock([], [], [], "root", tirx.SeqStmt(statements), alloc_buffers=[*root.alloc_buffers, *stages.alloc_buffers])
        parameters = [planes if place == position else each for place, each in enumerate(function.params)]
        changed = tirx.PrimFunc(parameters, SBlockRealize([], True, body), ret_type=function.ret_type, attrs=function.attrs)
        return tvm.IRModule({"main": changed}), position


def _convolution(module: tvm.IRModule) -> Any:
    """The program's 3x3 convolution of stride 1, if it has one."""
    body = module["main"].body
    if not isinstance(body, SBlockRealize) or str(body.block.name_hint) != "root":
        return None
    schedule = Schedule(module)
    blocks = [schedule.get(each) for each in schedule.get_child_blocks(schedule.get_sblock("root"))]
    found = [block for block in blocks if str(block.name_hint) == CONVOLUTION]
    if len(found) != 1:
        return None
    source, weight, result = (_shape(region) for region in (*found[0].reads[:2], found[0].writes[0]))
    taps, spans = weight[1:3], [source[axis] - result[axis] + 1 for axis in (1, 2)]
    # With another stride or dilation the input would not be just two longer, unless there is a single output.
    fits = taps == spans == [_TAPS, _TAPS] and weight[3] == source[3] and source[0] == 1 and min(result[1:3]) > 1
    return found[0] if fits else None


def _shape(region: Any) -> list[int]:
    return [int(extent) for extent in region.source.shape]


def _first_block(statement: Any) -> str:
    while not isinstance(statement, SBlockRealize):
        statement = statement.body
    return str(statement.block.name_hint)


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _combination(coefficients: Row, terms: Sequence[Any]) -> Any:
    """The sum of the terms, each times its coefficient."""
    total = None
    for coefficient, term in zip(coefficients, terms, strict=True):
        if coefficient == 0:
            continue
        scaled = term if abs(coefficient) == 1 else term * tirx.const(abs(coefficient), "float32")
        if total is None:
            total = scaled if coefficient > 0 else tirx.const(0.0, "float32") - scaled
        else:
            total = total + scaled if coefficient > 0 else total - scaled
    return total


def _transform(rows: Sequence[Row], square: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """`rows` times `square` times the transpose of `rows`; the product of the first two is bound to variables."""
    columns = list(zip(*square, strict=True))
    half = [[T.bind(_combination(row, column)) for column in columns] for row in rows]
    return [[_combination(row, line) for row in rows] for line in half]


def _stages(tile: int, source: Any, weight: Any, result: Any) -> tuple[Any, Any]:
    """The transformed weight's buffer and a root block of the stages from `source` (1, h, w, ci) to `result` (1, oh, ow, co)."""
    _, height, width, channels = (int(extent) for extent in source.shape)
    _, out_height, out_width, columns = (int(extent) for extent in result.shape)
    panels, lanes = int(weight.shape[0]), int(weight.shape[-1])
    down, across, side = -(-out_height // tile), -(-out_width // tile), tile + 2
    area, tiles = side * side, down * across
    full = (down * tile + 2, across * tile + 2)
    rows = matrices(tile)
    zero = tirx.const(0.0, "float32")

    def remap(kinds: str, loops: Any) -> Any:
        return T.axis.remap(kinds, list(loops), dtype="int64")

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        T.arg("source", source)
        planes = T.arg(f"{CONVOLUTION}_planes", _buffer(area, panels, channels, lanes))
        T.arg("result", result)
        padded = _workspace(*full, channels)
        inputs = _workspace(area, tiles, channels)
        products = _workspace(area, tiles, columns)
        outputs = _workspace(down * tile, across * tile, columns)
        with _grid(*full, channels) as loops, T.sblock(PAD):
            y, x, c = remap("SSS", loops)
            T.reads(source[0, y, x, c])
            T.writes(padded[y, x, c])
            value = source[0, y, x, c]
            if full != (height, width):
                value = tirx.if_then_else(tirx.all(y < _int(height), x < _int(width)), value, zero)
            T.buffer_store(padded, value, [y, x, c])
        # The axis of one: regions that begin at a multiple of an axis are what TVM's compute_at can solve for.
        with _grid(1, tiles, channels) as loops, T.sblock(INPUT):
            one, t, c = remap("SSS", loops)
            y, x = t // across * tile, t % across * tile
            T.reads(padded[y : y + side, x : x + side, c])
            T.writes(inputs[one * area : one * area + area, t, c])
            window = [[padded[y + row, x + column, c] for column in range(side)] for row in range(side)]
            for row, line in enumerate(_transform(rows.data, window)):
                for column, value in enumerate(line):
                    T.buffer_store(inputs, value, [one * area + row * side + column, t, c])
        with _grid(area, tiles, columns, channels) as loops, T.sblock(PRODUCT):
            p, t, o, k = remap("SSSR", loops)
            T.reads(inputs[p, t, k], planes[p, o // lanes, k, o % lanes])
            T.writes(products[p, t, o])
            with T.init():
                T.buffer_store(products, zero, [p, t, o])
            term = inputs[p, t, k] * planes[p, o // lanes, k, o % lanes]
            T.buffer_store(products, products[p, t, o] + term, [p, t, o])
        with _grid(down, across, columns) as loops, T.sblock(OUTPUT):
            y, x, o = remap("SSS", loops)
            t = y * across + x
            T.reads(products[0:area, t, o])
            T.writes(outputs[y * tile : y * tile + tile, x * tile : x * tile + tile, o])
            window = [[products[_int(row * side + column), t, o] for column in range(side)] for row in range(side)]
            for row, line in enumerate(_transform(rows.output, window)):
                for column, value in enumerate(line):
                    T.buffer_store(outputs, value, [y * tile + row, x * tile + column, o])
        with _grid(1, out_height, out_width, columns) as loops, T.sblock(CROP):
            n, y, x, o = remap("SSSS", loops)
            T.reads(outputs[y, x, o])
            T.writes(result[n, y, x, o])
            T.buffer_store(result, outputs[y, x, o], [n, y, x, o])
    return planes, builder.get().body.block


def _grid(*extents: int) -> Any:
    return T.grid(*(_int(extent) for extent in extents))


def _buffer(*shape: int) -> Any:
    return T.Buffer(tuple(_int(extent) for extent in shape), "float32")


def _workspace(*shape: int) -> Any:
    return T.sblock_alloc_buffer(tuple(_int(extent) for extent in shape), "float32")
