"""Which nodes TVM's importer gets right. The others are refused with a reason, all at once, and never compiled wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from tvm.relax.frontend.onnx import onnx_frontend

from mvcompile.frontend.onnx_file import default_opset
from mvcompile.frontend.shapes import free_inputs, static_shape
from mvcompile.frontend.weights import is_placeholder

STANDARD = ("", "ai.onnx")
CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
IMPORTERS = frozenset(onnx_frontend._get_convert_map())
EXPANDED = ("Attention",)
"""Operators whose importer is for another one of the same name: that of com.microsoft."""

COORDINATES = ("align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel", "tf_crop_and_resize", "tf_half_pixel_for_nn")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why node `node` (its name in the graph; `label` is what to call it) of an operator cannot be imported."""

    node: str
    label: str
    operator: str
    opset: int
    reason: str


def expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with its own functions inlined, and with standard operators that have no importer written out where ONNX says how.

    The model is altered.
    """
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    opset = default_opset(model) or 0
    while expandable := sorted({(n.domain, n.op_type) for n in model.graph.node if _is_expandable(n, opset)}):
        try:
            expanded = onnx.inliner.inline_selected_functions(_typed(model), expandable, inline_schema_functions=True)
        except (
            RuntimeError
        ):  # it needs types that it does not infer, of omitted inputs among others: such nodes are reported later
            return model
        if len(expanded.graph.node) == len(model.graph.node):
            return model
        del model.graph.node[:]
        model.graph.node.extend(expanded.graph.node)
    return model


def _is_expandable(node: onnx.NodeProto, opset: int) -> bool:
    if node.domain not in STANDARD or (node.op_type in IMPORTERS and node.op_type not in EXPANDED):
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all initializers as inputs: the types of others are not looked at, and their values need not be copied."""
    typed = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    typed.graph.name = model.graph.name
    typed.graph.node.extend(model.graph.node)
    typed.graph.input.extend(free_inputs(model.graph))
    typed.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        typed.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return typed


def unsupported(model: onnx.ModelProto, labels: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    """Every node that must not be imported, in graph order. Shapes must have been inferred.

    Of nodes without a static shape only the first is listed, not those that get it from there.
    """
    versions = {entry.domain: int(entry.version) for entry in model.opset_import}
    opset = default_opset(model) or 0
    facts = _Facts(model.graph)
    problems = []
    for node in model.graph.node:
        reason = _reason(node, opset, facts)
        if reason:
            version = opset if node.domain in STANDARD else versions.get(node.domain, 0)
            problems.append(problem(node, version, reason, labels or {}))
    return tuple(problems)


def problem(node: onnx.NodeProto, opset: int, reason: str, labels: Mapping[str, str]) -> Problem:
    """A `Problem` of `node`."""
    name = node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
    unnamed = repr(node.name) if node.name else f"(no name, computes {', '.join(node.output)!r})"
    return Problem(node.name, labels.get(node.name, unnamed), name, opset, reason)


def report(problems: Iterable[Problem]) -> str:
    """The message that lists all problems, one a line."""
    lines = [f"  node {p.label}: {p.operator} (operator set {p.opset}): {p.reason}" for p in problems]
    return "\n".join([f"{len(lines)} node{'s' if len(lines) != 1 else ''} of the model cannot be compiled:", *lines])


def _reason(node: onnx.NodeProto, opset: int, facts: _Facts) -> str | None:
    """Why `node` is refused, or None."""
    if node.domain not in STANDARD:
        return "only operators of the standard domain are supported"
    if node.op_type in CONTROL_FLOW:
        return "control flow that depends on data is not supported"
    if node.op_type not in IMPORTERS:
        return "there is no importer for this operator"
    if any(name in facts.unknown for name in node.output):
        inherited = any(name in facts.unknown for name in node.input)
        return None if inherited else "the shape of its output depends on data"
    check = _CHECKS.get(node.op_type)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return check(node, attributes, opset, facts) if check else None


class _Facts:
    """What the checks need to know of a graph: types, constants, and which tensors are used."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        infos = [*graph.value_info, *graph.output, *graph.input]
        self.types = {info.name: info.type.tensor_type.elem_type for info in infos}
        self.shapes = {info.name: shape for info in infos if (shape := static_shape(info)) is not None}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
        self.shapes.update({tensor.name: tuple(tensor.dims) for tensor in graph.initializer})
        self.used = {name for node in graph.node for name in node.input} | {info.name for info in graph.output}
        self.unknown = {name for node in graph.node for name in node.output if name and name not in self.shapes}

    def dtype(self, name: str) -> np.dtype[Any]:
        dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(self.types[name])
        return dtype

    def constant(self, node: onnx.NodeProto, position: int) -> NDArray[Any] | None:
        """The value of an input, or None if it has none, is computed, or is a large weight."""
        name = node.input[position] if position < len(node.input) else ""
        tensor = self.constants.get(name)
        return None if tensor is None or is_placeholder(tensor) else onnx.numpy_helper.to_array(tensor)


_Check = Callable[[onnx.NodeProto, Mapping[str, Any], int, _Facts], "str | None"]


def _batch_normalization(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    if attributes.get("training_mode", 0) or any(name in facts.used for name in node.output[1:]):
        return "training is not supported"
    return "statistics per element (spatial = 0) are not supported" if attributes.get("spatial", 1) != 1 else None


def _dropout(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    trains = facts.constant(node, 2)
    if len(node.input) > 2 and node.input[2] and (trains is None or trains.any()):
        return "training is not supported"
    return "its mask is not supported" if any(name in facts.used for name in node.output[1:]) else None


def _dilated_same(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    dilated = any(dilation != 1 for dilation in attributes.get("dilations", ()))
    if dilated and attributes.get("auto_pad", b"NOTSET").startswith(b"SAME"):
        return "dilation under auto_pad = SAME means different things to ONNX and ONNX Runtime: give the pads"
    return None


def _bit_shift(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    shift = facts.constant(node, 1)
    if shift is None or (shift < 0).any() or (shift >= 8 * shift.dtype.itemsize).any():
        return "only shifts by constants smaller than the width are supported"
    return None


def _is_inf(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    both = attributes.get("detect_negative", 1) and attributes.get("detect_positive", 1)
    return None if both else "TVM's importer ignores detect_negative and detect_positive"


def _mod(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    floats = facts.dtype(node.input[0]).kind == "f"
    return "floats are supported with fmod = 1 only" if floats and not attributes.get("fmod", 0) else None


def _pow(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    return None if facts.dtype(node.input[0]).kind == "f" else "powers of integers are not supported"


def _reduce_extremum(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    return "booleans are not supported" if facts.dtype(node.input[0]).kind == "b" else None


def _rms_normalization(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    axis, rank = attributes.get("axis", -1), len(facts.shapes[node.input[0]])
    return "normalising over all axes is not supported" if axis % rank == 0 else None


def _top_k(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    if opset == 10:
        return "TVM's importer ignores the K of operator set 10"
    dtype = facts.dtype(node.input[0])
    return f"{dtype} is not supported" if dtype in ("uint64", "uint32", "uint16", "uint8") else None


def _roi_align(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    return "TVM's importer computes mode = max wrongly" if attributes.get("mode", b"avg") != b"avg" else None


def _space_to_depth(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    return "TVM's importer ignores its mode" if attributes.get("mode", b"DCR") != b"DCR" else None


def _resize(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    for name in ("antialias", "axes", "keep_aspect_ratio_policy"):
        if attributes.get(name, 0) not in (0, b"stretch"):
            return f"TVM's importer ignores {name}"
    mode = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
    if mode not in COORDINATES:
        return f"coordinate_transformation_mode {mode} is not supported"
    scales = facts.constant(node, 1 if opset < 11 else 2)
    if scales is None or not scales.size:
        return None
    return _uneven_scales(scales.tolist(), facts.shapes[node.input[0]])


def _upsample(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    scales = facts.constant(node, 1) if opset >= 9 else np.array(attributes["scales"])
    return None if scales is None else _uneven_scales(scales.tolist(), facts.shapes[node.input[0]])


def _uneven_scales(scales: Sequence[float], shape: Sequence[int]) -> str | None:
    """TVM derives the scale from the two extents, ONNX takes it as given: they agree where their product is whole."""
    for scale, extent in zip(scales, shape, strict=True):
        if round(scale * extent, 3) != int(scale * extent):
            return f"scale {scale} of an axis with {extent} elements gives no whole number, which TVM's importer gets wrong"
    return None


def _non_max_suppression(node: onnx.NodeProto, attributes: Mapping[str, Any], opset: int, facts: _Facts) -> str | None:
    return "the shape of its output depends on data"


_CHECKS: Mapping[str, _Check] = {
    "AveragePool": _dilated_same,
    "BatchNormalization": _batch_normalization,
    "BitShift": _bit_shift,
    "Conv": _dilated_same,
    "Dropout": _dropout,
    "IsInf": _is_inf,
    "LpPool": _dilated_same,
    "MaxPool": _dilated_same,
    "Mod": _mod,
    "NonMaxSuppression": _non_max_suppression,
    "Pow": _pow,
    "RMSNormalization": _rms_normalization,
    "ReduceMax": _reduce_extremum,
    "ReduceMin": _reduce_extremum,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "SpaceToDepth": _space_to_depth,
    "TopK": _top_k,
    "Upsample": _upsample,
}
"""What TVM's importer accepts and gets wrong, found by running ONNX's own operator tests through it (docs/design/003)."""
