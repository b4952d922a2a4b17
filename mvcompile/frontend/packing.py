"""Packed weight panels: the one layout per layer that all its variants share (architecture rule 3).

A dense operator's constant right-hand side is stored as panels `[N/NR][reduction ...][NR]`, in the order a register-tiled kernel
reads it. Sequential panels are prefetched and strided rows are not: the measured gain is in docs/design/001-pipeline.md.
`NR` is the layer's, chosen here from its shape and the target; a schedule may use a narrower register tile than the panel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx, topi

from mvcompile.types import HostTarget

CONV_TAG = "packed_conv2d"
MATMUL_TAG = "packed_matmul"


def vector_lanes(target: HostTarget, dtype: str = "float32") -> int:
    """Elements of `dtype` in one vector register of `target`."""
    return target.vector_bits // (8 * np.dtype(dtype).itemsize)


def panel_width(columns: int, rows: int, target: HostTarget) -> int | None:
    """NR for a product with `rows` independent output rows and `columns` output columns; None when no panel divides it.

    Two vectors a row leave registers for a tile of 4 to 6 rows (12 to 14 with 32 registers), the best measured shape; widths
    that two vectors do not divide take the next best count. A single row is bound by the weight stream and wants many
    independent accumulators in one panel.
    """
    lanes = vector_lanes(target)
    counts = (8, 4, 5, 3, 2, 1) if rows == 1 else (2, 3, 5, 4, 1)
    widths = [lanes * count for count in counts]
    widths += [lanes // 2] if lanes > 4 else []
    return next((width for width in widths if columns % width == 0), None)


def pack_columns(weight: np.ndarray, width: int) -> np.ndarray:
    """`[reduction ..., N]` -> `[N/width, reduction ..., width]`, contiguous."""
    *reduction, columns = weight.shape
    split = weight.reshape(*reduction, columns // width, width)
    return np.ascontiguousarray(np.moveaxis(split, -2, 0))


def packed_conv2d(
    data: te.Tensor, weight: te.Tensor, strides: list[int], padding: list[int], dilation: list[int], groups: int
) -> te.Tensor:
    """NHWC convolution of `data` (n, h, w, c) with panels `(co/NR, kh, kw, ci/groups, NR)` -> (n, oh, ow, co).

    With groups, a panel never spans two groups (the caller guarantees that NR divides co/groups).
    """
    batch, height, width, _ = (int(extent) for extent in data.shape)
    panels, kernel_h, kernel_w, group_channels, lanes = (int(extent) for extent in weight.shape)
    top, left, bottom, right = padding
    out_channels = panels * lanes
    out_h = (height + top + bottom - dilation[0] * (kernel_h - 1) - 1) // strides[0] + 1
    out_w = (width + left + right - dilation[1] * (kernel_w - 1) - 1) // strides[1] + 1
    padded = data
    if any(padding):
        padded = topi.nn.pad(data, [0, top, left, 0], [0, bottom, right, 0], name="pad_temp")
    reduce_y = te.reduce_axis((0, kernel_h), name="ry")
    reduce_x = te.reduce_axis((0, kernel_w), name="rx")
    reduce_c = te.reduce_axis((0, group_channels), name="rc")

    def element(n: Any, y: Any, x: Any, c: Any) -> Any:
        first = 0 if groups == 1 else tirx.indexdiv(c, out_channels // groups) * group_channels
        return te.sum(
            padded[n, y * strides[0] + reduce_y * dilation[0], x * strides[1] + reduce_x * dilation[1], first + reduce_c]
            * weight[tirx.indexdiv(c, lanes), reduce_y, reduce_x, reduce_c, tirx.indexmod(c, lanes)],
            axis=[reduce_y, reduce_x, reduce_c],
        )

    return te.compute((batch, out_h, out_w, out_channels), element, name=CONV_TAG)


def packed_matmul(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """`data` (..., k) times panels `(n/NR, k, NR)` -> (..., n)."""
    *outer, reduction = (int(extent) for extent in data.shape)
    panels, _, lanes = (int(extent) for extent in weight.shape)
    axis = te.reduce_axis((0, reduction), name="rk")

    def element(*index: Any) -> Any:
        column = index[-1]
        term = weight[tirx.indexdiv(column, lanes), axis, tirx.indexmod(column, lanes)]
        return te.sum(data(*index[:-1], axis) * term, axis=[axis])

    return te.compute((*outer, panels * lanes), element, name=MATMUL_TAG)
