"""A small writer of ONNX graphs for the networks that are built here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from . import seeding

OPSET = 17
IR_VERSION = 8


@dataclass(frozen=True, slots=True)
class Seeded:
    """A float32 weight whose values are made only when they are wanted: there may be more than a gigabyte of them."""

    shape: tuple[int, ...]
    make: Callable[[], seeding.Weights]


class Graph:
    """Collects nodes, weights, inputs and outputs. Nodes are named by the caller's path, as exporters do (`/block/conv`).

    Weights are keyed by `key` (the name if not given) and their own names: graphs with one key share what they name alike.
    """

    def __init__(self, name: str, key: str | None = None) -> None:
        self.name = name
        self.key = key or name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto | Seeded] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def node(self, operator: str, inputs: Sequence[str], name: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node with one output; returns the output's name."""
        result = output or f"{name}_output_0"
        self.nodes.append(helper.make_node(operator, list(inputs), [result], name=name, **attributes))
        return result

    def constant(self, name: str, values: NDArray[Any]) -> str:
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def kernel(self, name: str, shape: Sequence[int], fan_in: int, gain: float = 1.0) -> str:
        return self._seeded(name, shape, functools.partial(seeding.kernel, fan_in=fan_in, gain=gain))

    def bias(self, name: str, shape: Sequence[int]) -> str:
        return self._seeded(name, shape, seeding.bias)

    def scale(self, name: str, shape: Sequence[int], around: float = 1.0) -> str:
        return self._seeded(name, shape, functools.partial(seeding.scale, around=around))

    def variance(self, name: str, shape: Sequence[int]) -> str:
        return self._seeded(name, shape, seeding.variance)

    def _seeded(self, name: str, shape: Sequence[int], make: Callable[[str, Sequence[int]], seeding.Weights]) -> str:
        self.weights.setdefault(name, Seeded(tuple(shape), functools.partial(make, f"{self.key}/{name}", shape)))
        return name

    def conv(
        self, x: str, name: str, inputs: int, outputs: int, *, size: int = 3, stride: int = 1, pad: int | None = None,
        groups: int = 1, gain: float = 2.0, bias: bool = False, path: str | None = None,
    ) -> str:  # fmt: skip
        """A square convolution, padded by half its window unless `pad` is given. `path` names the node, `name` the weights."""
        weights = [self.kernel(f"{name}.weight", (outputs, inputs // groups, size, size), inputs // groups * size * size, gain)]
        if bias:
            weights.append(self.bias(f"{name}.bias", (outputs,)))
        pads = [size // 2 if pad is None else pad] * 4
        window: dict[str, Any] = {"kernel_shape": [size, size], "strides": [stride, stride], "pads": pads, "group": groups}
        return self.node("Conv", [x, *weights], f"/{path or name}/Conv", **window)

    def batch_norm(self, x: str, name: str, channels: int, *, around: float = 1.0, path: str | None = None) -> str:
        """Batch normalisation as a node of its own, with scales whose mean square is `around` squared."""
        statistics = [
            self.scale(f"{name}.weight", (channels,), around),
            self.bias(f"{name}.bias", (channels,)),
            self.bias(f"{name}.running_mean", (channels,)),
            self.variance(f"{name}.running_var", (channels,)),
        ]
        path = f"/{path or name}/BatchNormalization"
        return self.node("BatchNormalization", [x, *statistics], path, epsilon=1e-5, momentum=0.9)

    def linear(self, x: str, name: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        """x [..., inputs] times a weight matrix, plus bias: [..., outputs]."""
        product = self.node("MatMul", [x, self.kernel(f"{name}.weight", (inputs, outputs), inputs, gain)], f"/{name}/MatMul")
        return self.node("Add", [product, self.bias(f"{name}.bias", (outputs,))], f"/{name}/Add")

    def layer_norm(self, x: str, name: str, size: int, epsilon: float, output: str | None = None) -> str:
        parameters = [self.scale(f"{name}.weight", (size,)), self.bias(f"{name}.bias", (size,))]
        path = f"/{name}/LayerNormalization"
        return self.node("LayerNormalization", [x, *parameters], path, output, axis=-1, epsilon=epsilon)

    def gelu(self, x: str, name: str) -> str:
        """x / 2 * (1 + erf(x / sqrt(2))), written out as exporters do below opset 20."""
        root = self.constant("sqrt_2", np.array(2.0**0.5, np.float32))
        one = self.constant("one", np.array(1.0, np.float32))
        half = self.constant("half", np.array(0.5, np.float32))
        erf = self.node("Erf", [self.node("Div", [x, root], f"/{name}/Div")], f"/{name}/Erf")
        product = self.node("Mul", [x, self.node("Add", [erf, one], f"/{name}/Add")], f"/{name}/Mul")
        return self.node("Mul", [product, half], f"/{name}/Mul_1")

    def attention(self, x: str, name: str, sequence: int, hidden: int, heads: int, mask: str | None = None) -> str:
        """Multi-head self-attention of x [1, sequence, hidden] without its output projection; `mask` is added to the scores."""
        depth = hidden // heads
        split = self.constant("split_heads", np.array([1, sequence, heads, depth], np.int64))
        merge = self.constant("merge_heads", np.array([1, sequence, hidden], np.int64))
        parts = []
        for part, order in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
            projected = self.linear(x, f"{name}.{part}", hidden, hidden)
            reshaped = self.node("Reshape", [projected, split], f"/{name}/{part}/Reshape")
            parts.append(self.node("Transpose", [reshaped], f"/{name}/{part}/Transpose", perm=list(order)))
        scores = self.node("MatMul", parts[:2], f"/{name}/MatMul")
        root = self.constant("sqrt_depth", np.array(depth**0.5, np.float32))
        scores = self.node("Div", [scores, root], f"/{name}/Div")
        if mask is not None:
            scores = self.node("Add", [scores, mask], f"/{name}/Add")
        weights = self.node("Softmax", [scores], f"/{name}/Softmax", axis=-1)
        context = self.node("MatMul", [weights, parts[2]], f"/{name}/MatMul_1")
        context = self.node("Transpose", [context], f"/{name}/Transpose", perm=[0, 2, 1, 3])
        return self.node("Reshape", [context, merge], f"/{name}/Reshape")

    def model(self) -> onnx.ModelProto:
        """The network with all its weights."""
        return self._model(
            [numpy_helper.from_array(w.make(), n) if isinstance(w, Seeded) else w for n, w in self.weights.items()]
        )

    def outline(self) -> onnx.ModelProto:
        """The network whose seeded weights have a shape but no values: all it takes to count them, in no time and memory."""
        return self._model(
            [
                TensorProto(name=name, data_type=TensorProto.FLOAT, dims=weight.shape) if isinstance(weight, Seeded) else weight
                for name, weight in self.weights.items()
            ]
        )

    def _model(self, weights: list[onnx.TensorProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, weights)
        operators = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, producer_name="mvcompile", ir_version=IR_VERSION, opset_imports=operators)
