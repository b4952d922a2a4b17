"""Two networks small enough to compile and run in a unit test, made of what the large ones are made of."""

from __future__ import annotations

from .graph import Graph


def convolutional(name: str) -> Graph:
    """3x32x32 image to 10 logits: 3x3 convolutions (strides 1 and 2), a residual sum, a depthwise one, pools, a linear layer."""
    graph = Graph(name)
    x = graph.input("image", (1, 3, 32, 32))
    x = _conv(graph, x, "stem", 3, 16, gain=1.0)
    x = _conv(graph, x, "down1", 16, 32, stride=2)
    branch = _conv(graph, x, "block.conv1", 32, 32)
    branch = _conv(graph, branch, "block.conv2", 32, 32, relu=False)
    x = graph.node("Relu", [graph.node("Add", [branch, x], "/block/Add")], "/block/Relu")
    x = _conv(graph, x, "depthwise", 32, 32, groups=32)
    x = _conv(graph, x, "pointwise", 32, 32, size=1)
    x = graph.node("MaxPool", [x], "/pool/MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    x = _conv(graph, x, "down2", 32, 32, stride=2)
    x = graph.node("GlobalAveragePool", [x], "/pool/GlobalAveragePool")
    x = graph.node("Flatten", [x], "/Flatten", axis=1)
    weights = [graph.kernel("fc.weight", (10, 32), 32, 2.0), graph.bias("fc.bias", (10,))]
    graph.node("Gemm", [x, *weights], "/fc/Gemm", "logits", transB=1)
    graph.output("logits", (1, 10))
    return graph


def _conv(
    graph: Graph, x: str, name: str, inputs: int, outputs: int, *,
    size: int = 3, stride: int = 1, groups: int = 1, relu: bool = True, gain: float = 2.0,
) -> str:  # fmt: skip
    x = graph.conv(x, name, inputs, outputs, size=size, stride=stride, groups=groups, gain=gain, bias=True)
    return graph.node("Relu", [x], f"/{name}/Relu") if relu else x


def transformer(name: str) -> Graph:
    """One pre-norm transformer block on [1, 16, 64]: 4 heads, feed-forward of 256 with GELU, and a last layer norm."""
    sequence, hidden, heads = 16, 64, 4
    graph = Graph(name)
    x = graph.input("tokens", (1, sequence, hidden))
    inner = graph.attention(graph.layer_norm(x, "norm1", hidden, 1e-5), "attention", sequence, hidden, heads)
    x = graph.node("Add", [x, graph.linear(inner, "attention.output", hidden, hidden)], "/attention/residual/Add")
    inner = graph.linear(graph.layer_norm(x, "norm2", hidden, 1e-5), "feed_forward.up", hidden, 4 * hidden)
    inner = graph.linear(graph.gelu(inner, "feed_forward/gelu"), "feed_forward.down", 4 * hidden, hidden, gain=2.0)
    x = graph.node("Add", [x, inner], "/feed_forward/residual/Add")
    graph.layer_norm(x, "norm3", hidden, 1e-5, "features")
    graph.output("features", (1, sequence, hidden))
    return graph
