"""Conversions that are done here instead of by TVM's importer, because its own are wrong, unsafe or slow for static shapes.

Each takes the block builder, the node's inputs (None where omitted) and its attributes, and returns a Relax expression, or None
to leave the node to TVM's importer. `PREPARED` are no conversions: they put attributes or inputs into a form that TVM's importer
gets right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from mvcompile.frontend.weights import values_of

Conversion = Callable[[Any, Any, "dict[str, Any]"], Any]


def constant(expression: Any) -> NDArray[Any] | None:
    """The value of a constant expression, or None."""
    return values_of(expression) if isinstance(expression, tvm.ir.GenericConst) else None


def static_shape(expression: Any) -> tuple[int, ...]:
    """The shape of a tensor expression, every extent of which is known."""
    return tuple(int(extent) for extent in expression.ty.shape)


def _pairwise(operator: Callable[[Any, Any], Any]) -> Conversion:
    """Two inputs at a time. TVM's importer stacks all and reduces, which is slow and is fused with nothing."""

    def convert(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
        return functools.reduce(lambda left, right: builder.normalize(operator(left, right)), inputs)

    return convert


def _clip(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """Maximum and minimum for constant bounds of floats: they fuse with a convolution of any layout, TVM's own clip with none.
    TVM's importer makes functions of its own for each bound."""
    bounds = []
    for position, (name, unbounded) in enumerate((("min", -np.inf), ("max", np.inf)), start=1):
        value = np.array(attributes.get(name, unbounded)) if inputs[position] is None else constant(inputs[position])
        if value is None or np.isnan(value).any():
            return None
        bounds.append(float(value.reshape(())))
    if bounds[0] > bounds[1] or not str(inputs[0].ty.dtype).startswith("float"):
        return None  # crossed bounds mean the upper one to ONNX, the lower one to TVM
    result, dtype = inputs[0], str(inputs[0].ty.dtype)
    for operation, bound in zip((relax.op.maximum, relax.op.minimum), bounds, strict=True):
        if np.isfinite(bound):
            result = builder.normalize(operation(result, relax.const(np.array(bound, dtype), dtype)))
    return result


def _leaky_relu(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """The larger of x and x times the slope, which fuses with a convolution of any layout; TVM's own operator does not."""
    slope, dtype = attributes.get("alpha", 0.01), str(inputs[0].ty.dtype)
    if not 0 < slope < 1:
        return None
    scaled = builder.normalize(relax.op.multiply(inputs[0], relax.const(np.array(slope, dtype), dtype)))
    return relax.op.maximum(inputs[0], scaled)


def _batch_normalization(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """x * a + b per channel, computed in float64 here. TVM's operator divides each element by a square root."""
    parameters = [constant(value) for value in inputs[1:5]]
    if any(value is None for value in parameters):
        return None
    scale, bias, mean, variance = (np.asarray(value, np.float64) for value in parameters)
    factor = scale / np.sqrt(variance + attributes.get("epsilon", 1e-5))
    shape = (-1, *[1] * (len(static_shape(inputs[0])) - 2))
    dtype = str(inputs[0].ty.dtype)
    product = builder.normalize(relax.op.multiply(inputs[0], relax.const(factor.reshape(shape).astype(dtype), dtype)))
    return relax.op.add(product, relax.const((bias - mean * factor).reshape(shape).astype(dtype), dtype))


def _dropout(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """Its input: training is refused, as is the mask."""
    return inputs[0]


def _shape(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """A constant, as all shapes are static."""
    extents = static_shape(inputs[0])[attributes.get("start", 0) : attributes.get("end")]
    return relax.const(np.array(extents, np.int64), "int64")


def _size(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    return relax.const(math.prod(static_shape(inputs[0])), "int64")


def _gather(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    data, indices = inputs[0], inputs[1]
    if constant(data) is not None and constant(indices) is not None:
        return None
    axis = attributes.get("axis", 0) % len(static_shape(data))
    indices = within(builder, indices, static_shape(data)[axis], clamp=False)
    return relax.op.take(data, indices, axis, mode="clip")


def _gather_elements(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    axis = attributes.get("axis", 0) % len(static_shape(inputs[0]))
    return relax.op.gather_elements(inputs[0], within(builder, inputs[1], static_shape(inputs[0])[axis]), axis)


def _gather_nd(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    batch = attributes.get("batch_dims", 0)
    extents = static_shape(inputs[0])[batch : batch + static_shape(inputs[1])[-1]]
    return relax.op.gather_nd(inputs[0], within(builder, inputs[1], extents), batch)


def _scatter_elements(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    axis = attributes.get("axis", 0) % len(static_shape(inputs[0]))
    indices = within(builder, inputs[1], static_shape(inputs[0])[axis])
    return relax.op.scatter_elements(inputs[0], indices, inputs[2], axis, _reduction(attributes))


def _scatter_nd(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    extents = static_shape(inputs[0])[: static_shape(inputs[1])[-1]]
    return relax.op.scatter_nd(inputs[0], within(builder, inputs[1], extents), inputs[2], _reduction(attributes))


def _reduction(attributes: dict[str, Any]) -> str:
    reduction: str = attributes.get("reduction", b"none").decode()
    return "update" if reduction == "none" else reduction


def within(builder: Any, indices: Any, extents: int | Sequence[int], *, clamp: bool = True) -> Any:
    """`indices` counted from the front, and none of them outside [0, extent): kernels do not check, and would read or write past
    the tensor. ONNX does not define what an index outside means; here it means the nearest one, and `ValueError` in a constant.
    """
    value = constant(indices)
    limit = np.asarray(extents)
    if value is not None:
        if (value < -limit).any() or (value >= limit).any():
            raise ValueError(f"an index is outside of its axis, which has {limit.tolist()} elements")
        return relax.const(np.where(value < 0, value + limit, value), str(value.dtype))
    dtype = str(indices.ty.dtype)
    zero, extent, last = (relax.const(np.asarray(number, dtype), dtype) for number in (0, limit, limit - 1))
    if not dtype.startswith("u"):
        shifted = builder.normalize(relax.op.add(indices, extent))
        indices = builder.normalize(relax.op.where(relax.op.less(indices, zero), shifted, indices))
    if not clamp:
        return indices
    return builder.normalize(relax.op.minimum(builder.normalize(relax.op.maximum(indices, zero)), last))


def _pow(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """The exponent in the dtype of the base, as TVM wants it, and a square as a product, which is faster."""
    base, exponent, value = inputs[0], inputs[1], constant(inputs[1])
    if value is not None and value.size == 1 and value.reshape(()) == 2 and len(value.shape) <= len(static_shape(base)):
        return relax.op.multiply(base, base)
    if base.ty.dtype != exponent.ty.dtype:
        exponent = builder.normalize(relax.op.astype(exponent, str(base.ty.dtype)))
    return relax.op.power(base, exponent)


def _upsample(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    """Upsample, and Resize of operator set 10, which is the same: the source of x is x / scale, rounded down by `nearest`."""
    scales = attributes.get("scales") if inputs[1] is None else constant(inputs[1])
    shape = static_shape(inputs[0])
    if scales is None or len(shape) != 4 or scales[0] != 1 or scales[1] != 1:
        raise ValueError("only constant scales of the two last axes of four are supported")
    size = relax.ShapeExpr([int(extent * scale) for extent, scale in zip(shape[2:], scales[2:], strict=True)])
    method = {b"nearest": "nearest_neighbor", b"linear": "linear", b"bilinear": "linear"}[attributes.get("mode", b"nearest")]
    settings = {"method": method, "coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}
    return relax.op.image.resize2d(inputs[0], size, layout="NCHW", **settings)


def _resize(builder: Any, inputs: Any, attributes: dict[str, Any]) -> Any:
    return _upsample(builder, inputs, attributes) if len(inputs) == 2 else None


CONVERSIONS: Mapping[str, Conversion] = {
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Dropout": _dropout,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "LeakyRelu": _leaky_relu,
    "Max": _pairwise(relax.op.maximum),
    "Min": _pairwise(relax.op.minimum),
    "Pow": _pow,
    "Resize": _resize,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Size": _size,
    "Sum": _pairwise(relax.op.add),
    "Upsample": _upsample,
}
"""By operator. All of them mean the same in every operator set that is imported."""


def _explicit_pads(inputs: Any, attributes: dict[str, Any]) -> None:
    """`auto_pad` as the pads it stands for: TVM's importer miscounts them for SAME_LOWER and for dilated windows."""
    mode = attributes.get("auto_pad", b"NOTSET")
    if mode == b"NOTSET":
        return
    spatial = static_shape(inputs[0])[2:]
    rank = len(spatial)
    window = attributes.get("kernel_shape") or static_shape(inputs[1])[2:]
    strides, dilations = attributes.get("strides", (1,) * rank), attributes.get("dilations", (1,) * rank)
    before, after = [0] * rank, [0] * rank
    if mode != b"VALID":
        for axis, (extent, size, stride, dilation) in enumerate(zip(spatial, window, strides, dilations, strict=True)):
            total = max((-(-extent // stride) - 1) * stride + (size - 1) * dilation + 1 - extent, 0)
            small, large = total // 2, total - total // 2
            before[axis], after[axis] = (large, small) if mode == b"SAME_LOWER" else (small, large)
    attributes["auto_pad"], attributes["pads"] = b"NOTSET", (*before, *after)


def _slice_inputs(inputs: Any, attributes: dict[str, Any]) -> None:
    """Up to operator set 9, a slice's bounds are attributes; TVM's importer reads inputs."""
    if "starts" in attributes:
        axes = attributes.get("axes", range(len(attributes["starts"])))
        inputs.extend(
            relax.const(np.array(values, np.int64), "int64") for values in (attributes["starts"], attributes["ends"], axes)
        )


PREPARED: Mapping[str, Callable[[Any, dict[str, Any]], None]] = {
    "AveragePool": _explicit_pads,
    "Conv": _explicit_pads,
    "LpPool": _explicit_pads,
    "MaxPool": _explicit_pads,
    "Slice": _slice_inputs,
}
