"""Simplification of a model before it is imported: onnxslim, and a comparison of its result with the original.

onnxslim folds constants and batch norms and drops what does nothing. It is trusted with no more than a proposal: its result has
to have the same outputs, and to compute the same values on random inputs, or the model is compiled as it came.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxslim

from mvcompile.errors import ModelError
from mvcompile.frontend.naming import Core
from mvcompile.frontend.onnx_file import default_opset
from mvcompile.frontend.reference import Array, integer_limits, random_inputs, reference_outputs
from mvcompile.frontend.shapes import infer_shapes, tensor_spec
from mvcompile.frontend.weights import Weights, is_large

UNFOLDABLE = {"Gather", "Gemm", "MatMul"}
"""Large weights that only these operators read are kept from onnxslim."""

SKIPPED = ("FusionGemm",)
"""MatMul and Add as a Gemm between two reshapes: the reshapes part the product from what could be fused with it."""

MOST_ROUNDS = 4
"""What onnxslim folds in one round gives it shapes for the next. It could infer those itself, copying all weights each time."""

RTOL, ATOL = 1e-3, 1e-5
"""|a - b| <= RTOL * |b| + ATOL * max|b|: folding a batch norm moves a float32 result by some last places per layer."""


def simplify(core: Core, weights: Weights) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A simpler model that computes the same outputs under the same names, with inferred shapes; warnings if there is none.

    `weights` holds those of `core`, and then those of the result as well.
    """
    try:
        simple = _checked(core.proto, weights)
    except Exception as error:  # onnxslim raises whatever it stumbles over; the model can be compiled as it is
        return core.proto, (f"not simplified by onnxslim {onnxslim.__version__}: {type(error).__name__}: {error}",)
    kept = {tensor.name for tensor in simple.graph.initializer}
    for tensor in core.proto.graph.initializer:
        if tensor.name in core.outputs and tensor.name not in kept:
            simple.graph.initializer.append(tensor)  # an output that is a constant is read by no node
    return simple, ()


def _checked(proto: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """onnxslim's version of `proto`. Raises `ModelError` if it computes something else, or if that could not be found out."""
    if not proto.graph.output:  # all outputs are inputs or constants, and no node is needed
        return onnx.ModelProto(
            ir_version=proto.ir_version,
            opset_import=proto.opset_import,
            graph=onnx.GraphProto(name=proto.graph.name, input=proto.graph.input),
        )
    inputs, expected = _expected(proto, weights)
    simple, kept = _without_unfoldable_weights(proto, weights)
    for _ in range(MOST_ROUNDS):
        nodes = len(simple.graph.node)
        simple = onnxslim.slim(simple, no_shape_infer=True, skip_fusion_patterns=list(SKIPPED))
        if default_opset(simple) != default_opset(proto):
            raise ModelError("the result is of another operator set")
        infer_shapes(simple)
        if len(simple.graph.node) == nodes:
            break
    _restore(simple, kept)
    simple = weights.take(simple)
    _compare(expected, reference_outputs(simple, inputs, weights=weights, optimize=False))
    return simple


def _without_unfoldable_weights(proto: onnx.ModelProto, weights: Weights) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy of `proto` in which large weights that only products and look-ups read are inputs, and those weights by
    name.

    onnxslim can fold nothing into them, and would copy all of them several times.
    """
    readers: dict[str, set[str]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    light = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    light.graph.CopyFrom(onnx.GraphProto(name=proto.graph.name, node=proto.graph.node, value_info=proto.graph.value_info))
    light.graph.input.extend(proto.graph.input)
    light.graph.output.extend(proto.graph.output)
    kept = {}
    for tensor in proto.graph.initializer:
        if is_large(tensor) and readers.get(tensor.name, set()) <= UNFOLDABLE:
            kept[tensor.name] = tensor
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            light.graph.initializer.append(weights.whole(tensor))
    return light, kept


def _restore(simple: onnx.ModelProto, kept: dict[str, onnx.TensorProto]) -> None:
    """Turn the inputs that stand for `kept` into initializers again."""
    inputs = list(simple.graph.input)
    del simple.graph.input[:]
    for info in inputs:
        if info.name in kept:
            simple.graph.initializer.append(kept[info.name])
        else:
            simple.graph.input.append(info)


def _expected(proto: onnx.ModelProto, weights: Weights) -> tuple[dict[str, Array], dict[str, Array]]:
    specs = [tensor_spec(info, "input") for info in proto.graph.input]
    inputs = random_inputs(specs, seed=0, limits=integer_limits(proto))
    return inputs, reference_outputs(proto, inputs, weights=weights, optimize=False)


def _compare(expected: dict[str, Array], found: dict[str, Array]) -> None:
    """Raise `ModelError` unless both hold the same outputs, with equal values up to rounding."""
    if list(expected) != list(found):
        raise ModelError(f"it has outputs {list(found)} instead of {list(expected)}")
    for name, want in expected.items():
        have = found[name]
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            raise ModelError(f"its output {name} is {have.dtype}{list(have.shape)} instead of {want.dtype}{list(want.shape)}")
        if want.dtype.kind != "f":
            close = np.array_equal(have, want)
        else:
            loose = 10.0 if want.dtype.itemsize < 4 else 1.0
            finite = np.abs(want[np.isfinite(want)])
            scale = float(finite.max()) if finite.size else 0.0
            close = np.allclose(have, want, rtol=RTOL * loose, atol=ATOL * loose * scale, equal_nan=True)
        if not close:
            raise ModelError(f"it changes output {name} by up to {np.max(np.abs(have.astype(float) - want.astype(float))):.3g}")
