"""From an ONNX file to a Relax module whose parameters and results are the model's inputs and outputs, in order."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from mvcompile.errors import ModelError
from mvcompile.frontend import naming, operators, shapes
from mvcompile.frontend.conversions import CONVERSIONS, PREPARED
from mvcompile.frontend.onnx_file import default_opset, read
from mvcompile.frontend.simplify import simplify
from mvcompile.frontend.weights import Weights, is_placeholder
from mvcompile.types import TensorSpec


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A checked and simplified model.

    `inputs` and `outputs` carry the model's own names, in its order; unused inputs and repeated outputs are among them.
    `original` is the model as it came, with static shapes, for the reference. `proto` is what is compiled: the same model under
    safe names, where `input_tensors[i]` and `output_tensors[i]` stand for the i-th input and output. `labels` gives a node's
    name in the original. `warnings` says what could not be simplified, and why. `weights` holds what placeholders in both protos
    stand for.
    """

    name: str
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    original: onnx.ModelProto
    proto: onnx.ModelProto
    input_tensors: tuple[str, ...]
    output_tensors: tuple[str, ...]
    labels: Mapping[str, str]
    warnings: tuple[str, ...]
    weights: Weights


def load_model(path: str | os.PathLike[str], given: Mapping[str, tuple[int, ...]] | None = None) -> OnnxModel:
    """Read, check and simplify the model in `path`; `given` settles inputs with symbolic dimensions.

    Raises `UsageError` if a file cannot be read, and `ModelError` if it is no valid model, does not fit the given shapes, lacks a
    static shape (the message has the option to pass), or stores weights outside its directory.
    """
    weights = Weights()
    model, sha256 = read(path)
    model = weights.take(model)  # from here on nobody has the model with its weights in it
    return _simplified(model, weights, given or {}, Path(path).stem, sha256)


def from_proto(
    model: onnx.ModelProto, given: Mapping[str, tuple[int, ...]] | None = None, *, name: str, sha256: str
) -> OnnxModel:
    """`load_model` for a model in memory, which is altered."""
    weights = Weights()
    return _simplified(weights.take(model), weights, given or {}, name, sha256)


def _simplified(
    model: onnx.ModelProto, weights: Weights, given: Mapping[str, tuple[int, ...]], name: str, sha256: str
) -> OnnxModel:
    model = operators.expand(model)
    shapes.apply_shapes(model, given)
    shapes.infer_shapes(model)
    core = naming.canonicalize(model)
    proto, notes = simplify(core, weights)
    inputs = tuple(shapes.tensor_spec(info, "input") for info in shapes.free_inputs(model.graph))
    outputs = _output_specs(model, core, proto)
    _drop_repeated_names(model.graph)
    return OnnxModel(name, sha256, inputs, outputs, model, proto, core.inputs, core.outputs, core.labels, notes, weights)


def _drop_repeated_names(graph: onnx.GraphProto) -> None:
    """ONNX allows several nodes of one name, ONNX Runtime does not."""
    seen: set[str] = set()
    for node in graph.node:
        if node.name in seen:
            node.name = ""
        seen.add(node.name)


def _output_specs(model: onnx.ModelProto, core: naming.Core, proto: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """Specs of the model's outputs, whose shapes may be known only after simplification."""
    known = {info.name: info for info in [*core.proto.graph.output, *proto.graph.output]}
    infos = []
    for info, tensor in zip(model.graph.output, core.outputs, strict=True):
        found = onnx.ValueInfoProto(name=info.name)
        found.type.CopyFrom(known.get(tensor, info).type)
        infos.append(found)
    if any(shapes.static_shape(info) is None for info in infos):
        problems = operators.unsupported(proto, core.labels)
        if problems:
            raise ModelError(operators.report(problems))
    return tuple(shapes.tensor_spec(info, "output") for info in infos)


def to_relax(model: OnnxModel) -> tvm.IRModule:
    """Import `model`: `main` takes its inputs in order and returns a tuple of its outputs in order, even of a single one.

    Weights are constants of the module. Raises `ModelError` that lists every node which cannot be imported: name, operator,
    operator set, reason.
    """
    graph, labels = _with_interface(model)
    importer = _Importer(graph, labels, model.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names and missing shapes: both have been dealt with
        module = importer.run()
    module["main"] = _with_tuple(module["main"]) if len(model.outputs) == 1 else module["main"].without_attr("num_input")
    module = relax.transform.Normalize()(module)
    _require_types(module["main"], model)
    return module


def _with_tuple(function: relax.Function) -> relax.Function:
    """The function with its single result as a tuple of one."""
    body = function.body
    result = relax.SeqExpr(body.blocks, relax.Tuple([body.body]))
    return relax.Function(function.params, result, relax.TupleType([body.body.ty])).with_attr("global_symbol", "main")


def _with_interface(model: OnnxModel) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model to import, with all inputs and outputs in the order of the original, used or not, repeated or not; and the labels
    of its nodes, whose names are unique."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.input[:], proto.graph.output[:]
    proto.graph.input.extend(map(_value_info, model.input_tensors, model.inputs))
    proto.graph.output.extend(map(_value_info, model.output_tensors, model.outputs))
    used = {name for node in proto.graph.node for name in node.input} | set(model.output_tensors)
    labels = {}
    for index, node in enumerate(proto.graph.node):
        while len(node.output) > 1 and node.output[-1] not in used and node.op_type != "Split":
            node.output.pop()  # such as the mask of a Dropout: what nobody reads need not be importable
        made = f"{node.name!r} (made by simplification)"
        node.name, label = f"node{index}", model.labels.get(node.name, made)
        labels[node.name] = label
    return proto, labels


def _value_info(name: str, spec: TensorSpec) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape)


def _require_types(function: relax.Function, model: OnnxModel) -> None:
    """Raise `ModelError` unless `function` maps the model's inputs to its outputs, by dtype and shape."""
    found = [_type(variable.ty) for variable in function.params], [_type(field) for field in function.ret_ty.fields]
    wanted = [(s.dtype, s.shape) for s in model.inputs], [(s.dtype, s.shape) for s in model.outputs]
    if found != wanted:
        raise ModelError(f"the imported model maps {found[0]} to {found[1]}, but the model {wanted[0]} to {wanted[1]}")


def _type(ty: Any) -> tuple[str, tuple[int, ...]] | None:
    """dtype and static shape of a Relax type, or None if it is no tensor of a static shape."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    if not all(isinstance(extent, tvm.tirx.IntImm) for extent in ty.shape.values):
        return None
    return str(ty.dtype), tuple(int(extent) for extent in ty.shape.values)


class _Importer(ONNXGraphImporter):
    """TVM's importer, which goes on after a node that fails, so that all of them can be reported."""

    def __init__(self, proto: onnx.ModelProto, labels: Mapping[str, str], weights: Weights) -> None:
        super().__init__({}, {}, keep_params_in_input=False, sanitize=False)
        self.proto = proto
        self.weights = weights
        self.labels = labels
        self.nodes = {node.name: node for node in proto.graph.node}
        self.types = {info.name: info for info in [*proto.graph.value_info, *proto.graph.output]}
        self.problems = {problem.node: problem for problem in operators.unsupported(proto, labels)}
        self.missing = {name for key in self.problems for name in self.nodes[key].output}

    def run(self) -> tvm.IRModule:
        """The module. Raises `ModelError` that lists all nodes that could not be imported."""
        module, failure = None, ""
        try:
            module = self.from_onnx(self.proto.graph, default_opset(self.proto))
        except Exception as error:  # TVM's importer has no error class of its own
            self._close_blocks()
            failure = f"TVM's importer fails: {_first_line(error)}"
        if self.problems:
            raise ModelError(operators.report(self.problems.values()))
        if module is None:
            raise ModelError(failure)
        return module

    def _parse_array(self, tensor_proto: onnx.TensorProto) -> tvm.runtime.Tensor:
        if is_placeholder(tensor_proto):
            return tvm.runtime.from_dlpack(self.weights.array(tensor_proto))
        return super()._parse_array(tensor_proto)

    def _close_blocks(self) -> None:
        """End what the builder has open after a failure; it writes to stderr otherwise when it is dropped."""
        with contextlib.suppress(Exception):
            while True:
                self.bb._end_block()

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Done before, with reasons."""

    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        node = self.nodes[attrs["tvm_custom"]["name"]]
        if node.name in self.problems:
            return self._placeholder(node)
        try:
            if op_name in PREPARED:
                PREPARED[op_name](inputs, attrs)
            own = CONVERSIONS[op_name](self.bb, inputs, attrs) if op_name in CONVERSIONS else None
            result = super()._convert_operator(op_name, inputs, attrs, opset) if own is None else self.bb.normalize(own)
        except Exception as error:
            if not self.missing.intersection(node.input):
                self._refuse(node, opset, f"TVM's importer fails: {_first_line(error)}")
            self.missing.update(node.output)
            return self._placeholder(node)
        if self.missing.intersection(node.input):
            self.missing.update(node.output)
            return result
        self._compare_types(node, opset, result)
        return self._placeholder(node) if node.name in self.problems else result

    def _refuse(self, node: onnx.NodeProto, opset: int, reason: str) -> None:
        self.problems[node.name] = operators.problem(node, opset, reason, self.labels)

    def _placeholder(self, node: onnx.NodeProto) -> Any:
        """Stands for the results of a node that cannot be imported, with the types that ONNX gives them."""
        fields = []
        for name in node.output:
            info = self.types.get(name)
            shape = shapes.static_shape(info) if info is not None else None
            dtype = shapes.dtype_name(info.type.tensor_type.elem_type) if info is not None else "float32"
            extents = None if shape is None else relax.ShapeExpr(list(shape))  # an empty tuple would mean an unknown shape
            fields.append(relax.Var(f"{name}_missing", relax.TensorType(extents, dtype)))
        return fields[0] if len(fields) == 1 else relax.Tuple(fields)

    def _compare_types(self, node: onnx.NodeProto, opset: int, result: Any) -> None:
        """Refuse the node if the importer's results have other dtypes or shapes than ONNX infers: they mean something else."""
        types = list(result.ty.fields) if isinstance(result.ty, relax.TupleType) else [result.ty]
        if len(types) < len(node.output):
            self._refuse(node, opset, f"TVM's importer gives only the first {len(types)} of its {len(node.output)} outputs")
        for name, ty in zip(node.output, types, strict=False):
            info = self.types.get(name)
            if info is None or not isinstance(ty, relax.TensorType):
                continue
            found, wanted = _type(ty), (shapes.dtype_name(info.type.tensor_type.elem_type), shapes.static_shape(info))
            if found != wanted:
                self._refuse(node, opset, f"TVM's importer gives it {_text(found)}, but ONNX {_text(wanted)}")


def _text(found: tuple[str, tuple[int, ...] | None] | None) -> str:
    return "a shape that depends on data" if found is None else f"{found[0]}{list(found[1] or ())}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
