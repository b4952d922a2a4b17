"""Packed weight panels: the one layout per layer that all its variants share (architecture rule 3).

A dense operator's constant right-hand side is stored as panels `[N/NR][reduction ...][NR]`, in the order a register-tiled kernel
reads it. Sequential panels are prefetched and strided rows are not: the measured gain is in docs/design/001-pipeline.md.
Columns (of each group) that NR does not divide are filled up with zeros, which are computed and not stored.
`NR` is the layer's, chosen here from its shape and the target; a schedule may use a narrower register tile than the panel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx, topi
from tvm.s_tir import SBlock
from tvm_ffi import structural_walk

from mvcompile.types import HostTarget

CONV_TAG = "packed_conv2d"
MATMUL_TAG = "packed_matmul"
COLUMNS_TAG = "packed_columns"
"""The block after it, which leaves out the columns that fill up the last panel (of each group), if any do."""

_ROWS = {2: 1.0, 3: 1.0, 5: 0.9, 4: 0.85, 1: 0.55}
_ONE_ROW = {8: 1.0, 4: 0.9, 5: 0.95, 3: 0.85, 2: 0.8, 1: 0.6}
"""Rates of tiles by the vectors in a row, relative to the best; of counts that divide the columns, the first is taken."""
_REDUCED = 2
"""The kind of a block's axis over which it adds up."""


def vector_lanes(target: HostTarget, dtype: str = "float32") -> int:
    """Elements of `dtype` in one vector register of `target`."""
    return target.vector_bits // (8 * np.dtype(dtype).itemsize)


def panel_width(columns: int, rows: int, target: HostTarget) -> int:
    """NR for a product with `rows` independent output rows and `columns` output columns (of one group).

    Two or three vectors a row leave registers for a tile of 4 to 6 rows (12 to 14 with 32 registers), the best measured shapes;
    a single vector loads as often as it multiplies. Widths that several vectors divide take the best of those counts, others
    are filled up with zeros: what is wasted is weighed against the counts' measured rates. A single row is bound by the weight
    stream and wants many independent accumulators in one panel.
    """
    lanes = vector_lanes(target)
    rates = _ONE_ROW if rows == 1 else _ROWS
    exact = next((count for count in rates if count > 1 and columns % (lanes * count) == 0), None)
    if exact is not None:
        return lanes * exact
    return lanes * min(rates, key=lambda count: (-(-columns // (lanes * count)) * count / rates[count], -count))


def pack_columns(weight: np.ndarray, width: int, groups: int = 1) -> np.ndarray:
    """`[reduction ..., N]` -> `[panels, reduction ..., width]`, contiguous; each group's columns filled up with zeros."""
    *reduction, columns = weight.shape
    grouped = weight.reshape(*reduction, groups, columns // groups)
    missing = -(columns // groups) % width
    filled = np.pad(grouped, [(0, 0)] * (grouped.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(np.moveaxis(filled.reshape(*reduction, -1, width), -2, 0))


def packed_conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    strides: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    columns: int,
) -> te.Tensor:
    """NHWC convolution of `data` (n, h, w, c) with panels `(panels, kh, kw, ci/groups, NR)` -> (n, oh, ow, columns).

    A panel never spans two groups: each has as many panels, the last of which may be filled up with zeros.
    """
    batch, height, width, _ = (int(extent) for extent in data.shape)
    panels, kernel_h, kernel_w, group_channels, lanes = (int(extent) for extent in weight.shape)
    top, left, bottom, right = padding
    filled = panels * lanes // groups
    out_h = (height + top + bottom - dilation[0] * (kernel_h - 1) - 1) // strides[0] + 1
    out_w = (width + left + right - dilation[1] * (kernel_w - 1) - 1) // strides[1] + 1
    padded = data
    if any(padding):
        padded = topi.nn.pad(data, [0, top, left, 0], [0, bottom, right, 0], name="pad_temp")
    reduce_y = te.reduce_axis((0, kernel_h), name="ry")
    reduce_x = te.reduce_axis((0, kernel_w), name="rx")
    reduce_c = te.reduce_axis((0, group_channels), name="rc")

    def element(n: Any, y: Any, x: Any, c: Any) -> Any:
        first = 0 if groups == 1 else tirx.indexdiv(c, filled) * group_channels
        return te.sum(
            padded[n, y * strides[0] + reduce_y * dilation[0], x * strides[1] + reduce_x * dilation[1], first + reduce_c]
            * weight[tirx.indexdiv(c, lanes), reduce_y, reduce_x, reduce_c, tirx.indexmod(c, lanes)],
            axis=[reduce_y, reduce_x, reduce_c],
        )

    result = te.compute((batch, out_h, out_w, panels * lanes), element, name=CONV_TAG)
    return _used_columns(result, groups, columns)


def _used_columns(result: te.Tensor, groups: int, columns: int) -> te.Tensor:
    """`result` without the columns that fill up each group's last panel."""
    *outer, computed = (int(extent) for extent in result.shape)
    if computed == columns:
        return result
    used, filled = columns // groups, computed // groups

    def element(*index: Any) -> Any:
        column = index[-1]
        place = column if groups == 1 else tirx.indexdiv(column, used) * filled + tirx.indexmod(column, used)
        return result(*index[:-1], place)

    return te.compute((*outer, columns), element, name=COLUMNS_TAG)


def packed_matmul(data: te.Tensor, weight: te.Tensor, columns: int) -> te.Tensor:
    """`data` (..., k) times panels `(panels, k, NR)` -> (..., columns)."""
    *outer, reduction = (int(extent) for extent in data.shape)
    panels, _, lanes = (int(extent) for extent in weight.shape)
    axis = te.reduce_axis((0, reduction), name="rk")

    def element(*index: Any) -> Any:
        column = index[-1]
        term = weight[tirx.indexdiv(column, lanes), axis, tirx.indexmod(column, lanes)]
        return te.sum(data(*index[:-1], axis) * term, axis=[axis])

    return _used_columns(te.compute((*outer, panels * lanes), element, name=MATMUL_TAG), 1, columns)


def unused_flops(module: tvm.IRModule) -> float:
    """Operations of `module["main"]` on columns that only fill up the last panel (of each group)."""
    found: list[Any] = []
    structural_walk(module["main"].body, (SBlock, found.append), order="pre")
    blocks = {str(block.name_hint): block for block in found}
    product, columns = blocks.get(CONV_TAG, blocks.get(MATMUL_TAG)), blocks.get(COLUMNS_TAG)
    if product is None or columns is None:
        return 0.0
    computed, used = (math.prod(int(extent) for extent in block.writes[0].source.shape) for block in (product, columns))
    terms = math.prod(int(axis.dom.extent) for axis in product.iter_vars if int(axis.iter_type) == _REDUCED)
    return 2.0 * (computed - used) * terms
