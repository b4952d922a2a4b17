"""MobileNet-V2, width 1.0, 224x224 (Sandler et al., CVPR 2018, table 2), with its batch norms as separate nodes."""

from __future__ import annotations

import numpy as np

from .graph import Graph

BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, output channels, repetitions, stride of the first repetition."""


def build(name: str) -> Graph:
    """[1, 3, 224, 224] to 1000 logits; 3.50 M parameters, 300 M multiply-accumulates."""
    graph = Graph(name)
    x = graph.input("input", (1, 3, 224, 224))
    x = _conv(graph, x, "features.0", 3, 32, stride=2, gain=1.0)
    channels, index = 32, 1
    for expansion, outputs, repetitions, first_stride in BLOCKS:
        for repetition in range(repetitions):
            stride = first_stride if repetition == 0 else 1
            x = _block(graph, x, f"features.{index}", channels, outputs, expansion, stride)
            channels, index = outputs, index + 1
    x = _conv(graph, x, f"features.{index}", channels, 1280, size=1, gain=1.0)
    x = graph.node("GlobalAveragePool", [x], "/GlobalAveragePool")
    x = graph.node("Flatten", [x], "/Flatten", axis=1)
    weights = [graph.kernel("classifier.1.weight", (1000, 1280), 1280, 2.0), graph.bias("classifier.1.bias", (1000,))]
    graph.node("Gemm", [x, *weights], "/classifier/classifier.1/Gemm", "output", transB=1)
    graph.output("output", (1, 1000))
    return graph


def _block(graph: Graph, x: str, name: str, inputs: int, outputs: int, expansion: int, stride: int) -> str:
    """An inverted residual: expand (1x1), depthwise 3x3, project (1x1, linear); the sum where shapes allow it."""
    hidden = inputs * expansion
    inner = x if expansion == 1 else _conv(graph, x, f"{name}.expand", inputs, hidden, size=1, gain=1.0)
    inner = _conv(graph, inner, f"{name}.depthwise", hidden, hidden, stride=stride, groups=hidden)
    residual = stride == 1 and inputs == outputs
    inner = _conv(graph, inner, f"{name}.project", hidden, outputs, size=1, relu=False, around=0.5 if residual else 1.0)
    return graph.node("Add", [x, inner], f"/{name}/Add") if residual else inner


def _conv(
    graph: Graph, x: str, name: str, inputs: int, outputs: int, *,
    size: int = 3, stride: int = 1, groups: int = 1, relu: bool = True, gain: float = 2.0, around: float = 1.0,
) -> str:  # fmt: skip
    """Convolution without bias, batch norm, and ReLU6 (a Clip) unless linear."""
    x = graph.conv(x, f"{name}.0", inputs, outputs, size=size, stride=stride, groups=groups, gain=gain, path=name)
    x = graph.batch_norm(x, f"{name}.1", outputs, around=around, path=name)
    if not relu:
        return x
    bounds = [graph.constant("zero", np.array(0.0, np.float32)), graph.constant("six", np.array(6.0, np.float32))]
    return graph.node("Clip", [x, *bounds], f"/{name}/Clip")
