"""EfficientNet-B0, 224x224 (Tan and Le, ICML 2019, table 1), with its batch norms as separate nodes.

Squeeze-and-excitation (Hu et al., CVPR 2018) to a quarter of the block's input channels, SiLU as Sigmoid and Mul, windows padded
by half their size: the layout of torchvision's port of the authors' weights.
"""

from __future__ import annotations

from .graph import Graph

BLOCKS = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1), (6, 5, 192, 4, 2), (6, 3, 320, 1, 1),
)  # fmt: skip
"""Expansion, window, output channels, repetitions, stride of the first repetition."""

SILU_GAIN, GATED_GAIN, POOLED_GAIN = 2.4, 9.0, 4.0
"""Behind SiLU, behind SiLU and a gate, behind a global average. SiLU keeps between 0.25 (of small values) and 0.5 (of large ones)
of the second moment and a gate about 0.27, so that no gains hold it for ever. With these, root mean squares stay between 0.2 and
1.8 through all 16 blocks, and gates vary by 0.1 to 0.25 around one half."""


def build(name: str) -> Graph:
    """[1, 3, 224, 224] to 1000 logits; 5.29 M parameters, 386 M multiply-accumulates."""
    graph = Graph(name)
    x = graph.input("input", (1, 3, 224, 224))
    x = _conv(graph, x, "features.0", 3, 32, size=3, stride=2, gain=1.0)
    channels = 32
    for stage, (expansion, size, outputs, repetitions, first_stride) in enumerate(BLOCKS, start=1):
        for repetition in range(repetitions):
            stride = first_stride if repetition == 0 else 1
            x = _block(graph, x, f"features.{stage}.{repetition}", channels, outputs, expansion, size, stride)
            channels = outputs
    x = _conv(graph, x, "features.8", channels, 1280, size=1, gain=1.0)
    x = graph.node("GlobalAveragePool", [x], "/avgpool/GlobalAveragePool")
    x = graph.node("Flatten", [x], "/Flatten", axis=1)
    weights = [graph.kernel("classifier.1.weight", (1000, 1280), 1280, POOLED_GAIN), graph.bias("classifier.1.bias", (1000,))]
    graph.node("Gemm", [x, *weights], "/classifier/classifier.1/Gemm", "output", transB=1)
    graph.output("output", (1, 1000))
    return graph


def _block(graph: Graph, x: str, name: str, inputs: int, outputs: int, expansion: int, size: int, stride: int) -> str:
    """Expand (1x1), depthwise convolution, squeeze-and-excitation, project (1x1, linear); the sum where shapes allow it."""
    hidden = inputs * expansion
    inner = x if expansion == 1 else _conv(graph, x, f"{name}.expand", inputs, hidden, size=1, gain=1.0)
    inner = _conv(graph, inner, f"{name}.depthwise", hidden, hidden, size=size, stride=stride, groups=hidden)
    inner = _excite(graph, inner, f"{name}.se", hidden, inputs // 4)
    residual = stride == 1 and inputs == outputs
    inner = graph.conv(inner, f"{name}.project.0", hidden, outputs, size=1, gain=GATED_GAIN)
    inner = graph.batch_norm(inner, f"{name}.project.1", outputs, around=0.5 if residual else 1.0)
    return graph.node("Add", [inner, x], f"/{name}/Add") if residual else inner


def _excite(graph: Graph, x: str, name: str, channels: int, squeezed: int) -> str:
    """x times a gate for each channel, which two fully connected layers compute from the channels' averages."""
    gate = graph.node("GlobalAveragePool", [x], f"/{name}/avgpool/GlobalAveragePool")
    gate = graph.conv(gate, f"{name}.fc1", channels, squeezed, size=1, gain=POOLED_GAIN, bias=True)
    gate = graph.conv(_silu(graph, gate, f"{name}.act"), f"{name}.fc2", squeezed, channels, size=1, gain=SILU_GAIN, bias=True)
    gate = graph.node("Sigmoid", [gate], f"/{name}/scale_activation/Sigmoid")
    return graph.node("Mul", [gate, x], f"/{name}/Mul")


def _conv(
    graph: Graph, x: str, name: str, inputs: int, outputs: int, *,
    size: int, stride: int = 1, groups: int = 1, gain: float = SILU_GAIN,
) -> str:  # fmt: skip
    """Convolution without bias, batch norm, SiLU."""
    x = graph.conv(x, f"{name}.0", inputs, outputs, size=size, stride=stride, groups=groups, gain=gain)
    return _silu(graph, graph.batch_norm(x, f"{name}.1", outputs), f"{name}.2")


def _silu(graph: Graph, x: str, name: str) -> str:
    """x times its sigmoid; one operator of its own only from operator set 24 on."""
    return graph.node("Mul", [x, graph.node("Sigmoid", [x], f"/{name}/Sigmoid")], f"/{name}/Mul")
