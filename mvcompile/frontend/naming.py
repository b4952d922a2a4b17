"""Safe names inside, the model's own names outside.

ONNX names are any text: `conv1:0`, `/block.1/Add output`, Japanese, or nothing at all; tools rewrite, collide on and reject them.
Everything between reading and importing therefore works on a copy whose tensors are `t0, t1, ...` and whose nodes are
`n0, n1, ...`; inputs and outputs are known by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mvcompile.frontend.shapes import free_inputs


@dataclass(frozen=True, slots=True)
class Core:
    """A model under safe names.

    `inputs[i]` is the tensor of the model's i-th input, read by a node or not. `outputs[i]` is that of its i-th output: it may
    occur twice, and may be an input or an initializer. The graph itself lists each output that a node computes once, and each
    input that a node reads. `labels` says what the model calls a node, for messages.
    """

    proto: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: Mapping[str, str]


def canonicalize(model: onnx.ModelProto) -> Core:
    """Copy `model` under safe names. Its functions must have been inlined before."""
    graph = model.graph
    renamer = _Renamer()
    inputs = tuple(renamer.tensor(info.name) for info in free_inputs(graph))
    core = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    core.graph.name = "main"
    renamer.fill(core.graph, graph)
    outputs = tuple(renamer.tensor(info.name) for info in graph.output)
    infos = [*graph.value_info, *free_inputs(graph), *graph.output]
    types = {renamer.tensor(info.name): renamer.info(info) for info in infos}
    core.graph.value_info.extend(renamer.info(info) for info in graph.value_info)
    reconnect(core.graph, inputs, outputs, types)
    return Core(core, inputs, outputs, renamer.labels)


def reconnect(
    graph: onnx.GraphProto, inputs: tuple[str, ...], outputs: tuple[str, ...], types: Mapping[str, onnx.ValueInfoProto]
) -> None:
    """List in `graph` the inputs that its nodes read and the outputs that they compute, once each; `types` describes them."""
    read = set(_reads(graph))
    computed = {name for node in graph.node for name in node.output}
    del graph.input[:], graph.output[:]
    graph.input.extend(types[name] for name in inputs if name in read)
    graph.output.extend(types[name] for name in dict.fromkeys(outputs) if name in computed)


class _Renamer:
    """One numbering for a graph and its subgraphs, which see their surroundings' names and may not reuse them."""

    def __init__(self) -> None:
        self.names = {"": ""}
        self.labels: dict[str, str] = {}

    def tensor(self, name: str) -> str:
        return self.names.setdefault(name, f"t{len(self.names) - 1}")

    def info(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        copy = onnx.ValueInfoProto(name=self.tensor(info.name))
        copy.type.CopyFrom(info.type)
        return copy

    def fill(self, target: onnx.GraphProto, source: onnx.GraphProto) -> None:
        """Copy initializers and nodes of `source`, renamed; Constant nodes become initializers."""
        for tensor in source.initializer:
            copy = target.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = self.tensor(tensor.name)
        for node in source.node:
            values = _constant(node)
            if values is None:
                self._node(target.node.add(), node)
            else:
                target.initializer.append(onnx.numpy_helper.from_array(values, self.tensor(node.output[0])))

    def _node(self, copy: onnx.NodeProto, node: onnx.NodeProto) -> None:
        number = len(self.labels)
        copy.op_type, copy.domain, copy.name = node.op_type, node.domain, f"n{number}"
        self.labels[copy.name] = repr(node.name) if node.name else f"#{number} (no name, computes {', '.join(node.output)!r})"
        copy.input.extend(self.tensor(name) for name in node.input)
        copy.output.extend(self.tensor(name) for name in node.output)
        for attribute in node.attribute:
            renamed = copy.attribute.add()
            if attribute.type != onnx.AttributeProto.GRAPH:
                renamed.CopyFrom(attribute)
                continue
            renamed.name, renamed.type = attribute.name, attribute.type
            renamed.g.name = "branch"
            renamed.g.input.extend(self.info(info) for info in attribute.g.input)
            self.fill(renamed.g, attribute.g)
            renamed.g.output.extend(self.info(info) for info in attribute.g.output)


def _constant(node: onnx.NodeProto) -> NDArray[Any] | None:
    """The value of a Constant node of numbers, or None for any other node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or not node.attribute:
        return None
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        array: NDArray[Any] = onnx.numpy_helper.to_array(value)
        return array
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}.get(
        attribute.name
    )
    return None if dtype is None else np.array(value, dtype)


def _reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a node of the graph or of its subgraphs reads."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _reads(attribute.g)
                yield from (info.name for info in attribute.g.output)
