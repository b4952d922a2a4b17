"""Shapes of a model's inputs: parse them from the command line, apply them to symbolic dimensions, infer the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from mvcompile.errors import ModelError, UsageError
from mvcompile.frontend.onnx_file import skeleton
from mvcompile.types import DTYPE_BYTES, TensorSpec

Shape = tuple[int, ...]


def parse_shape_option(text: str) -> tuple[str, Shape]:
    """Parse `NAME:1x3x224x224`; the name may hold colons itself, and nothing behind the last one means rank 0.

    Raises `UsageError` unless every extent is a positive integer.
    """
    name, colon, extents = text.rpartition(":")
    parts = extents.split("x") if extents else []
    if not colon or not name or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--shape {text}: expected NAME:1x3x224x224, a name and positive extents joined by 'x'")
    return name, tuple(int(part) for part in parts)


def format_shape_option(name: str, shape: Iterable[int]) -> str:
    """The option that `parse_shape_option` reads back, quoted for a shell where needed."""
    option = f"{name}:{'x'.join(str(extent) for extent in shape)}"
    plain = all(character.isascii() and (character.isalnum() or character in "._:/-") for character in option)
    return f"--shape {option}" if plain else "--shape '" + option.replace("'", "'\\''") + "'"


def apply_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
    """Give every input of `model` the static shape that `shapes` says, in place.

    A symbolic dimension that one input settles is settled for all inputs that name it. Raises `ModelError` for an input that is
    unknown, of another rank, contradicts a fixed or an equally named dimension, or stays without a shape; the message has the
    option to pass.
    """
    inputs = {info.name: info for info in free_inputs(model.graph)}
    symbols: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            known = ", ".join(repr(known) for known in inputs) or "none"
            raise ModelError(f"the model has no input {name!r} to give a shape to; its inputs are: {known}")
        _bind(inputs[name], shape, symbols)
    unresolved = []
    for name, info in inputs.items():
        _require_tensor(info)
        if name in shapes:
            _set_shape(info, shapes[name])
        elif not _resolve(info, symbols):
            unresolved.append(_unresolved(info))
    if unresolved:
        raise ModelError("the model's inputs need static shapes; " + "; ".join(unresolved))
    for info in inputs.values():
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.dim_value <= 0:
                raise ModelError(
                    f"input {info.name!r} has extent {dim.dim_value} on axis {axis}; empty tensors are not supported"
                )


def free_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs that no initializer gives a value to (up to IR version 3 every initializer is an input as well)."""
    initialised = {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}
    return [info for info in graph.input if info.name not in initialised]


def infer_shapes(model: onnx.ModelProto) -> None:
    """Fill in the shapes of all tensors that follow from the inputs', in place; large weights are not copied.

    Raises `ModelError` where the graph contradicts itself.
    """
    copy = skeleton(model)
    for info in copy.graph.output:  # symbols of the original model would contradict the shapes given to the inputs
        for dim in info.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.Clear()
    inferred = _infer(copy)
    while hints := _hints(inferred):
        copy.graph.value_info.extend(hints)
        inferred = _infer(copy)
    graph = model.graph
    del graph.value_info[:], graph.output[:]
    graph.value_info.extend(inferred.value_info)
    graph.output.extend(inferred.output)


def _infer(model: onnx.ModelProto) -> onnx.GraphProto:
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    except onnx.shape_inference.InferenceError as error:
        # It also fails inside the definitions of operators such as MeanVarianceNormalization; what matters are known shapes.
        lenient = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        if any(static_shape(info) is None for info in lenient.output):
            raise ModelError(f"the model's shapes do not fit together: {str(error).strip()}") from error
        return lenient


def _hints(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Types of tensors that ONNX's inference leaves open although they are those of their operator's input."""
    known = {info.name: info for info in [*graph.input, *graph.value_info, *graph.output] if static_shape(info) is not None}
    hints = []
    for node in graph.node:
        if node.op_type == "GroupNormalization" and node.input[0] in known and node.output[0] not in known:
            hint = onnx.ValueInfoProto(name=node.output[0])
            hint.type.CopyFrom(known[node.input[0]].type)
            hints.append(hint)
    return hints


def static_shape(info: onnx.ValueInfoProto) -> Shape | None:
    """The shape of a tensor, or None if it is not known in full."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)


def dtype_name(element_type: int) -> str:
    """numpy's spelling of an ONNX element type, or ONNX's own where models may not have it."""
    name: str = onnx.TensorProto.DataType.Name(element_type).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def tensor_spec(info: onnx.ValueInfoProto, role: str) -> TensorSpec:
    """Name, dtype and shape of an input or output. Raises `ModelError` if it is none that can be compiled; `role` says which."""
    dtype, shape = dtype_name(info.type.tensor_type.elem_type), static_shape(info)
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{role} {info.name!r} holds {dtype}; supported are {', '.join(sorted(DTYPE_BYTES))}")
    if shape is None:
        raise ModelError(f"{role} {info.name!r} has a shape that depends on data; only static shapes can be compiled")
    if 0 in shape:
        raise ModelError(f"{role} {info.name!r} has shape {list(shape)}; empty tensors are not supported")
    return TensorSpec(info.name, dtype, shape)


def _require_tensor(info: onnx.ValueInfoProto) -> None:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ModelError(f"input {info.name!r} is a {str(kind).removesuffix('_type')}, not a tensor; only tensors can be passed")


def _bind(info: onnx.ValueInfoProto, shape: Shape, symbols: dict[str, tuple[int, str]]) -> None:
    """Check `shape` against what the model says of this input, and note the symbols it settles (extent, input)."""
    _require_tensor(info)
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return
    given = format_shape_option(info.name, shape)
    if len(tensor.shape.dim) != len(shape):
        raise ModelError(
            f"{given} has rank {len(shape)}, but the model gives this input rank {len(tensor.shape.dim)}: {_text(info)}"
        )
    for axis, (dim, extent) in enumerate(zip(tensor.shape.dim, shape, strict=True)):
        if dim.HasField("dim_value") and dim.dim_value != extent:
            raise ModelError(
                f"{given} has extent {extent} on axis {axis}, but the model fixes it to {dim.dim_value}: {_text(info)}"
            )
        if dim.dim_param:
            bound, by = symbols.setdefault(dim.dim_param, (extent, info.name))
            if bound != extent:
                raise ModelError(f"{given} makes dimension {dim.dim_param!r} {extent}, but it is {bound} in input {by!r}")


def _resolve(info: onnx.ValueInfoProto, symbols: Mapping[str, tuple[int, str]]) -> bool:
    """Replace settled symbols in place; whether the shape is static now."""
    for dim in info.type.tensor_type.shape.dim:
        if dim.dim_param in symbols:
            dim.dim_value = symbols[dim.dim_param][0]
    return static_shape(info) is not None


def _set_shape(info: onnx.ValueInfoProto, shape: Shape) -> None:
    tensor = info.type.tensor_type
    tensor.shape.Clear()
    tensor.shape.SetInParent()  # rank 0 is a shape without extents, which is not the same as no shape
    for extent in shape:
        tensor.shape.dim.add().dim_value = extent


def _unresolved(info: onnx.ValueInfoProto) -> str:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return f"pass {format_shape_option(info.name, (1,))}, with the extents of input {info.name!r} (its rank is unknown, too)"
    extents = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in tensor.shape.dim]
    return f"pass {format_shape_option(info.name, extents)}, with your extents for those unknown in {_text(info)}"


def _text(info: onnx.ValueInfoProto) -> str:
    extents = [
        str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in info.type.tensor_type.shape.dim
    ]
    return f"{info.name}[{', '.join(extents)}]"
