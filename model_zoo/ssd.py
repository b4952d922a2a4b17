"""SSD with a ResNet-34 backbone for the 80 classes of COCO (Liu et al., ECCV 2016), as in the benchmarks of MLPerf.

MLPerf has it twice, with weights of the same shapes: for images of 300x300 (training) and of 1200x1200 (inference), where the
heads have stride 3. Of the backbone, the last stage is left out and the one before keeps its resolution. Batch norms are nodes of
their own. The result is what the heads compute; decoding boxes and suppressing overlaps, whose shapes depend on data, come after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import seeding
from .graph import Graph

CLASSES = 81
"""With the background."""

BACKBONE = ((64, 3, 1), (128, 4, 2), (256, 6, 1))
"""Channels, residual blocks, stride of the first block: conv2 to conv4 of ResNet-34 (He et al., CVPR 2016, table 1)."""

EXTRAS = ((256, 512), (256, 512), (128, 256), (128, 256), (128, 256))
"""Channels of the 1x1 and of the 3x3 convolution of each block behind the backbone."""

ANCHORS = (4, 6, 6, 6, 4, 4)
"""Default boxes at each place, for each of the six feature maps."""

HEAD_GAIN = 1 / 64
"""Around zero, where only the absolute part of a tolerance counts, there are many of 742,220 outputs: they are small."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Extent of the image, stride of the heads, and strides of the blocks behind the backbone, the first three padded."""

    extent: int
    head_stride: int
    strides: tuple[int, ...]


TRAINING = Variant(300, head_stride=1, strides=(2, 2, 2, 1, 1))
INFERENCE = Variant(1200, head_stride=3, strides=(2, 2, 2, 2, 1))


def build(name: str, variant: Variant) -> Graph:
    """[1, 3, extent, extent] to offsets of boxes [1, 4, n] and scores of classes [1, 81, n]: n = 8732 for 300, 15130 for 1200;
    20.0 M parameters, 15.9 G or 216 G multiply-accumulates."""
    graph = Graph(name, "ssd-resnet34")
    x, extent = _backbone(graph, graph.input("image", (1, 3, variant.extent, variant.extent)), variant.extent)
    features = [(x, 256, extent)]
    for index, ((squeezed, outputs), stride) in enumerate(zip(EXTRAS, variant.strides, strict=True)):
        block, pad = f"additional_blocks.{index}", int(index < 3)
        x = _relu(graph, graph.conv(x, f"{block}.0", features[-1][1], squeezed, size=1, bias=True), f"{block}.1")
        x = _relu(graph, graph.conv(x, f"{block}.2", squeezed, outputs, stride=stride, pad=pad, bias=True), f"{block}.3")
        extent = _extent(extent, stride, pad)
        features.append((x, outputs, extent))
    boxes = sum(
        anchors * _extent(extent, variant.head_stride) ** 2 for anchors, (_, _, extent) in zip(ANCHORS, features, strict=True)
    )
    for head, values in (("loc", 4), ("conf", CLASSES)):
        parts = []
        shape = graph.constant(f"{head}_shape", np.array([1, values, -1], np.int64))
        for index, (anchors, (x, channels, _)) in enumerate(zip(ANCHORS, features, strict=True)):
            outputs, stride = anchors * values, variant.head_stride
            x = graph.conv(x, f"{head}.{index}", channels, outputs, stride=stride, gain=HEAD_GAIN, bias=True)
            parts.append(graph.node("Reshape", [x, shape], f"/{head}.{index}/Reshape"))
        graph.node("Concat", parts, f"/{head}/Concat", head, axis=2)
        graph.output(head, (1, values, boxes))
    return graph


def _backbone(graph: Graph, x: str, extent: int) -> tuple[str, int]:
    """256 feature maps and their extent."""
    x = graph.batch_norm(graph.conv(x, "model.conv1", 3, 64, size=7, stride=2, gain=0.5), "model.bn1", 64)
    x = _relu(graph, x, "model.relu")
    x = graph.node("MaxPool", [x], "/model.maxpool/MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    extent, inputs = _extent(_extent(extent, 2), 2), 64
    for stage, (channels, blocks, first_stride) in enumerate(BACKBONE, start=1):
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            x = _block(graph, x, f"model.layer{stage}.{index}", inputs, channels, stride)
            extent, inputs = _extent(extent, stride), channels
    return x, extent


def _block(graph: Graph, x: str, name: str, inputs: int, outputs: int, stride: int) -> str:
    """Two 3x3 convolutions; the sum with the input, projected (1x1) where its shape is another; Relu."""
    projected = stride != 1 or inputs != outputs
    around = seeding.PROJECTED if projected else seeding.RESIDUAL
    inner = graph.batch_norm(graph.conv(x, f"{name}.conv1", inputs, outputs, stride=stride), f"{name}.bn1", outputs)
    inner = graph.conv(_relu(graph, inner, f"{name}.relu"), f"{name}.conv2", outputs, outputs)
    inner = graph.batch_norm(inner, f"{name}.bn2", outputs, around=around)
    if projected:
        x = graph.conv(x, f"{name}.downsample.0", inputs, outputs, size=1, stride=stride)
        x = graph.batch_norm(x, f"{name}.downsample.1", outputs, around=around)
    return _relu(graph, graph.node("Add", [inner, x], f"/{name}/Add"), f"{name}.relu_1")


def _relu(graph: Graph, x: str, name: str) -> str:
    return graph.node("Relu", [x], f"/{name}/Relu")


def _extent(extent: int, stride: int, pad: int = 1) -> int:
    """What a window of 3 padded by 1, or of 7 padded by 3, leaves of it (or of 3 without padding)."""
    return (extent + 2 * pad - 3) // stride + 1
