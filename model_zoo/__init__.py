"""How to build each network of the zoo. `registry.json` says what must come out; `mvcompile.zoo` is the door that checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from . import bert, canonical, mobilenet, shipped, tiny

__all__ = ["BUILT", "SHIPPED", "build", "canonical", "shipped"]

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

BUILT: Mapping[str, Callable[[str], onnx.ModelProto]] = {
    "bert-base": bert.build,
    "mobilenet-v2": mobilenet.build,
    "tiny-conv": tiny.convolutional,
    "tiny-transformer": tiny.transformer,
}
"""Networks written here, operator by operator."""


def build(name: str) -> onnx.ModelProto:
    """The network `name` with its seeded weights."""
    if name in SHIPPED:
        return shipped.build(name, shipped.source(SHIPPED[name]))
    return BUILT[name](name)
