"""How to build each network of the zoo. `registry.json` says what must come out; `mvcompile.zoo` is the door that checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import onnx

from . import bert, canonical, efficientnet, mobilenet, shipped, ssd, tiny, yolo
from .graph import Graph

__all__ = ["BUILT", "SHIPPED", "build", "canonical", "shipped", "ssd"]

SHIPPED: Mapping[str, str] = {
    "alexnet": "light_bvlc_alexnet.onnx",
    "densenet121": "light_densenet121.onnx",
    "googlenet": "light_inception_v1.onnx",
    "inception-v2": "light_inception_v2.onnx",
    "resnet50": "light_resnet50.onnx",
    "shufflenet": "light_shufflenet.onnx",
    "squeezenet": "light_squeezenet.onnx",
    "vgg19": "light_vgg19.onnx",
    "zfnet512": "light_zfnet512.onnx",
}
"""Networks taken from the `onnx` package, and their files there."""

BUILT: Mapping[str, Callable[[str], Graph]] = {
    "bert-base": partial(bert.build, size=bert.BASE, tokens=128),
    "bert-base-384": partial(bert.build, size=bert.BASE, tokens=384),
    "bert-large": partial(bert.build, size=bert.LARGE, tokens=128),
    "bert-large-384": partial(bert.build, size=bert.LARGE, tokens=384),
    "efficientnet-b0": efficientnet.build,
    "mobilenet-v2": mobilenet.build,
    "ssd-resnet34": partial(ssd.build, variant=ssd.TRAINING),
    "tiny-conv": tiny.convolutional,
    "tiny-transformer": tiny.transformer,
    "tiny-yolov2": yolo.build,
}
"""Networks written here, operator by operator. `model()` of what is returned makes the weights, `outline()` does without them."""


def build(name: str) -> onnx.ModelProto:
    """The network `name` with its seeded weights."""
    if name in SHIPPED:
        return shipped.build(name, shipped.source(SHIPPED[name]))
    return BUILT[name](name).model()
