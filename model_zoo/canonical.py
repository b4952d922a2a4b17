"""A digest of what a model is (graph and weights, not its encoding), and its parameter and operation counts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper


def digest(model: onnx.ModelProto) -> str:
    """SHA-256 (hex) over operator sets, inputs, outputs, nodes and weights, in the order they are stored.

    Encoding, producer, documentation and inferred shapes do not count, so rewriting the file leaves the digest alone.
    """
    sha = hashlib.sha256()
    for item in _items(model):
        sha.update(json.dumps(item, separators=(",", ":"), sort_keys=True).encode())
        sha.update(b"\n")
    return sha.hexdigest()


def parameters(model: onnx.ModelProto) -> int:
    """Trainable values: all floating-point initializers but the running statistics of batch normalisation."""
    statistics = {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}
    return sum(
        math.prod(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 0 and tensor.name not in statistics
    )


def macs(model: onnx.ModelProto) -> int:
    """Multiply-accumulate operations of convolutions and matrix products, for the model's static shapes."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(_without_large_weights(model), data_prop=True).graph
    for info in [*inferred.value_info, *inferred.input, *inferred.output]:
        shapes[info.name] = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
    total = 0
    for node in model.graph.node:
        if node.op_type == "Conv":
            total += math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "Gemm":
            transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
            total += math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if transposed else 1]
        elif node.op_type == "MatMul":
            total += math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
    return total


def _without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with large initializers turned into inputs, so that inferring shapes does not copy them."""
    small = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    small.graph.name = model.graph.name
    small.graph.node.extend(model.graph.node)
    small.graph.input.extend(model.graph.input)
    small.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 1024:
            small.graph.initializer.append(tensor)
        else:
            small.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return small


def _items(model: onnx.ModelProto) -> Iterator[Any]:
    graph = model.graph
    yield ["opset", sorted([entry.domain, entry.version] for entry in model.opset_import)]
    for kind, infos in (("input", graph.input), ("output", graph.output)):
        for info in infos:
            tensor = info.type.tensor_type
            yield [kind, info.name, tensor.elem_type, [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]]
    for node in graph.node:
        attributes = {attribute.name: _attribute(attribute) for attribute in node.attribute}
        yield ["node", node.domain, node.op_type, node.name, list(node.input), list(node.output), attributes]
    for weight in graph.initializer:
        yield ["initializer", weight.name, *_tensor(weight)]


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return _tensor(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, int):
        return value
    return [item.hex() if isinstance(item, (bytes, float)) else int(item) for item in value]


def _tensor(tensor: onnx.TensorProto) -> list[Any]:
    array = np.asarray(numpy_helper.to_array(tensor), order="C")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [tensor.data_type, list(tensor.dims), hashlib.sha256(little.reshape(-1).data).hexdigest()]
