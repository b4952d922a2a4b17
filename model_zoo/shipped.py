"""The nine networks inside the `onnx` package (onnx/backend/test/data/light), with weights that mean something.

There nearly every weight is the constant 0.02, made by a ConstantOfShape node, so that almost any wrong kernel reproduces their
outputs (0.001 everywhere). Here each of those nodes becomes a seeded initializer, and so does each floating-point initializer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import resources

import onnx
from onnx import numpy_helper

from . import seeding

RECTIFIERS = ("Relu", "Clip", "Softmax")
TRANSPARENT = ("MaxPool", "AveragePool", "GlobalAveragePool", "Reshape", "Transpose", "Concat", "Dropout", "LRN")


def source(file_name: str) -> bytes:
    """The bytes of one of the package's networks."""
    return (resources.files("onnx") / "backend" / "test" / "data" / "light" / file_name).read_bytes()


def build(name: str, content: bytes) -> onnx.ModelProto:
    """The network in `content` with every weight seeded. Names, operators and operator set (9) stay as they are."""
    model = onnx.load_model_from_string(content)
    graph = model.graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    kept = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in weights}
    fills = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    for node in fills:
        shape = numpy_helper.to_array(kept.pop(node.input[0]))
        weights[node.output[0]] = tuple(int(extent) for extent in shape)
        graph.node.remove(node)
    seeder = _Seeder(name, graph)
    used = {tensor for node in graph.node for tensor in node.input}
    known = {tensor.name for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in known]
    del graph.initializer[:], graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(tensor for tensor in kept.values() if tensor.name in used)
    for key in sorted(weights):
        if key in used:
            values = seeder.seed(key, weights[key])
            graph.initializer.add(
                name=key, data_type=onnx.TensorProto.FLOAT, dims=values.shape, raw_data=values.astype("<f4", copy=False).tobytes()
            )
    model.ir_version = 4  # from here on an initializer need not be an input as well
    return model


class _Seeder:
    """Chooses a weight's distribution from the operator that reads it."""

    def __init__(self, network: str, graph: onnx.GraphProto) -> None:
        self.network = network
        self.producers = {output: node for node in graph.node for output in node.output}
        self.consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in graph.node:
            for position, tensor in enumerate(node.input):
                self.consumers.setdefault(tensor, []).append((node, position))

    def seed(self, tensor: str, shape: tuple[int, ...]) -> seeding.Weights:
        key = f"{self.network}/{tensor}"
        node, position = self._reader(tensor)
        if node.op_type == "Conv" and position == 1:
            return seeding.kernel(key, shape, math.prod(shape[1:]), self._gain(node))
        if node.op_type == "Gemm" and position == 1:
            return seeding.kernel(key, shape, shape[-1], self._gain(node))
        if node.op_type in ("Mul", "BatchNormalization") and position == 1:
            return seeding.scale(key, shape, self._share(node))
        if node.op_type == "BatchNormalization" and position == 4:
            return seeding.variance(key, shape)
        if node.op_type in ("Conv", "Gemm", "Add", "BatchNormalization"):
            return seeding.bias(key, shape)
        raise ValueError(f"{self.network}: no rule to seed {tensor}, input {position} of a {node.op_type} node")

    def _reader(self, tensor: str) -> tuple[onnx.NodeProto, int]:
        node, position = self.consumers[tensor][0]
        if node.op_type in ("Unsqueeze", "Reshape") and position == 0:
            return self._reader(node.output[0])
        return node, position

    def _readers(self, tensor: str) -> Iterator[onnx.NodeProto]:
        return (node for node, _ in self.consumers.get(tensor, []))

    def _share(self, node: onnx.NodeProto) -> float:
        for reader in self._readers(node.output[0]):
            if reader.op_type == "Sum":
                producers = [self.producers.get(tensor) for tensor in reader.input]
                projected = all(p is not None and p.op_type == "BatchNormalization" for p in producers)
                return seeding.PROJECTED if projected else seeding.RESIDUAL
        return 1.0

    def _gain(self, node: onnx.NodeProto) -> float:
        """2 behind a rectifier, which halves the second moment, 1 elsewhere; a quarter of it before the last softmax, so that no
        class takes all of it."""
        gain = 2.0 if self._rectified(node.input[0]) else 1.0
        return gain / 4 if any(reader.op_type == "Softmax" for reader in self._readers(node.output[0])) else gain

    def _rectified(self, tensor: str) -> bool:
        node = self.producers.get(tensor)
        if node is None:
            return False
        return node.op_type in RECTIFIERS or (node.op_type in TRANSPARENT and self._rectified(node.input[0]))
