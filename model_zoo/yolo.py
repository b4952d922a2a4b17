"""Tiny YOLOv2 for the 20 classes of Pascal VOC, 416x416 (Redmon and Farhadi, CVPR 2017; `yolov2-tiny-voc.cfg` of Darknet).

Nine convolutions, batch norms as separate nodes, LeakyRelu of slope 0.1; the last pool moves by one and pads at the far end only.
"""

from __future__ import annotations

from .graph import Graph

CHANNELS = (16, 32, 64, 128, 256, 512, 1024, 1024)
"""Of the 3x3 convolutions. A pool follows each of the first six."""

ANCHORS, CLASSES = 5, 20

SLOPE = 0.1
LEAKY_GAIN = 2 / (1 + SLOPE**2)

POOLED_GAIN = 1.2
"""The largest of four values has more than their second moment."""

HEAD_GAIN = LEAKY_GAIN / 4
"""Around zero, where only the absolute part of a tolerance counts, there are many of 21,125 outputs: they are small."""


def build(name: str) -> Graph:
    """[1, 3, 416, 416] to [1, 125, 13, 13]: box, confidence and classes of five anchors; 15.9 M parameters, 3.49 G
    multiply-accumulates."""
    graph = Graph(name)
    x, channels = graph.input("image", (1, 3, 416, 416)), 3
    for index, outputs in enumerate(CHANNELS):
        gain = 1.0 if index == 0 else POOLED_GAIN if index <= 6 else LEAKY_GAIN
        x = graph.conv(x, f"conv{index}.conv", channels, outputs, gain=gain)
        x = graph.batch_norm(x, f"conv{index}.bn", outputs)
        x = graph.node("LeakyRelu", [x], f"/conv{index}/LeakyRelu", alpha=SLOPE)
        if index < 5:
            x = graph.node("MaxPool", [x], f"/pool{index}/MaxPool", kernel_shape=[2, 2], strides=[2, 2])
        elif index == 5:
            x = graph.node("MaxPool", [x], "/pool5/MaxPool", kernel_shape=[2, 2], strides=[1, 1], auto_pad="SAME_UPPER")
        channels = outputs
    outputs = ANCHORS * (5 + CLASSES)
    weights = [
        graph.kernel("conv8.weight", (outputs, channels, 1, 1), channels, HEAD_GAIN),
        graph.bias("conv8.bias", (outputs,)),
    ]
    graph.node("Conv", [x, *weights], "/conv8/Conv", "grid", kernel_shape=[1, 1])
    graph.output("grid", (1, outputs, 13, 13))
    return graph
