"""Write registry.json from what the builders make now: `python -m model_zoo.update_registry`, after a builder was changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import onnx

from . import BUILT, SHIPPED, build, canonical, shipped

DESCRIPTIONS = {
    "alexnet": "AlexNet (Krizhevsky et al., 2012), as shipped in the onnx package",
    "bert-base": "BERT-base encoder with pooler, 128 tokens (Devlin et al., 2019), opset 17",
    "bert-base-384": "BERT-base encoder with pooler, 384 tokens (Devlin et al., 2019), opset 17",
    "bert-large": "BERT-large encoder with pooler, 128 tokens (Devlin et al., 2019), opset 17",
    "bert-large-384": "BERT-large encoder with pooler, 384 tokens (Devlin et al., 2019), opset 17",
    "densenet121": "DenseNet-121 (Huang et al., 2017), as shipped in the onnx package",
    "efficientnet-b0": "EfficientNet-B0 at 224x224 (Tan and Le, 2019), opset 17",
    "googlenet": "GoogLeNet = Inception v1 (Szegedy et al., 2015), as shipped in the onnx package",
    "inception-v2": "Inception v2 (Ioffe and Szegedy, 2015), as shipped in the onnx package",
    "mobilenet-v2": "MobileNet-V2 1.0 at 224x224 (Sandler et al., 2018), opset 17",
    "resnet50": "ResNet-50 (He et al., 2016), as shipped in the onnx package",
    "shufflenet": "ShuffleNet (Zhang et al., 2018), as shipped in the onnx package",
    "squeezenet": "SqueezeNet 1.0/1.1 family (Iandola et al., 2016), as shipped in the onnx package",
    "ssd-resnet34": "SSD with ResNet-34 for COCO at 300x300 (Liu et al., 2016; MLPerf training), opset 17",
    "tiny-conv": "six small convolutions, a residual sum, a depthwise one, a linear layer; for tests",
    "tiny-transformer": "one transformer block, 16 tokens of 64; for tests",
    "tiny-yolov2": "Tiny YOLOv2 for Pascal VOC at 416x416 (Redmon and Farhadi, 2017), opset 17",
    "vgg19": "VGG-19 (Simonyan and Zisserman, 2015), as shipped in the onnx package",
    "zfnet512": "ZFNet-512 (Zeiler and Fergus, 2014), as shipped in the onnx package",
}


def registry() -> dict[str, object]:
    """What registry.json should hold."""
    networks = {}
    for name in sorted([*SHIPPED, *BUILT]):
        model = build(name)
        networks[name] = {
            "description": DESCRIPTIONS[name],
            "parameters": canonical.parameters(model),
            "macs": canonical.macs(model),
            "source_sha256": hashlib.sha256(shipped.source(SHIPPED[name])).hexdigest() if name in SHIPPED else None,
            "sha256": canonical.digest(model),
        }
    return {"version": 1, "onnx": onnx.__version__, "networks": networks}


if __name__ == "__main__":
    Path(__file__).with_name("registry.json").write_text(json.dumps(registry(), indent=2) + "\n")
