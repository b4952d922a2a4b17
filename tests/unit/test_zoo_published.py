"""The networks of the zoo are the published ones: their parameters and multiply-accumulates agree. No weights are made here."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import onnx
import pytest

from mvcompile import zoo

M, G = 1e6, 1e9


@dataclass(frozen=True, slots=True)
class Published:
    """What `source` says. Multiply-accumulates are half of the operations where it counts products and sums."""

    source: str
    parameters: float
    macs: float
    within: float = 0.005


SEVEN = {
    "bert-base": Published(
        "Jiao et al., Findings of EMNLP 2020 (TinyBERT), table 1: 109M, 22.5B at 128 tokens", 109 * M, 11.25 * G, 0.01
    ),
    "bert-large-384": Published("Open Model Zoo, bert-large-uncased-whole-word-masking-squad-0001", 333.96 * M, 246.93 / 2 * G),
    "efficientnet-b0": Published(
        "Tan and Le, ICML 2019, table 2 (5.3M, 0.39B), and torchvision's port of it", 5_288_548, 0.386 * G
    ),
    "googlenet": Published("Szegedy et al., CVPR 2015, table 1, sum of its rounded rows", 6.7977 * M, 1.502 * G, 0.05),
    "mobilenet-v2": Published("Sandler et al., CVPR 2018, table 4 (3.4M, 300M), and torchvision's", 3_504_872, 300 * M),
    "resnet50": Published(
        "He et al., CVPR 2016, table 1, with strides as in torchvision's ResNet50_Weights", 25_557_032, 4.089 * G
    ),
    "tiny-yolov2": Published(
        "Darknet, table of YOLOv2: 6.97 Bn; Open Model Zoo, yolo-v2-tiny-ava-sparse-30-0001: 15.8587M", 15.8587 * M, 6.97 / 2 * G
    ),
}
"""The networks of VELTAIR but the one whose published form is not the one registered (SSD, below)."""

OTHERS = {
    "alexnet": (61.0, None),
    "densenet121": (8.0, 2834),
    "inception-v2": (11.2, None),
    "shufflenet": (1.4, 124),
    "squeezenet": (1.24, 349),
    "vgg19": (143.67, 19632),
}
"""Millions of parameters and of multiply-accumulates, from the papers or torchvision's documentation."""

BUILT = [entry.name for entry in zoo.entries() if entry.source_sha256 is None]


def builders() -> ModuleType:
    package: ModuleType = zoo._package()
    return package


def folded(model: onnx.ModelProto) -> int:
    """Parameters once batch norms are folded into the convolutions: one offset for each channel in place of two factors."""
    channels = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 1}
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    count: int = builders().canonical.parameters(model) - sum(channels[node.input[1]] for node in norms)
    return count


@pytest.mark.parametrize("name", SEVEN)
def test_counts_are_the_published_ones(name: str) -> None:
    entry, published = zoo.entry(name), SEVEN[name]
    assert entry.parameters == pytest.approx(published.parameters, rel=published.within), published.source
    assert entry.macs == pytest.approx(published.macs, rel=published.within), published.source


def test_counts_of_the_other_networks_are_the_published_ones() -> None:
    for name, (parameters, macs) in OTHERS.items():
        entry = zoo.entry(name)
        assert entry.parameters / M == pytest.approx(parameters, rel=0.01), name
        assert macs is None or entry.macs / M == pytest.approx(macs, rel=0.01), name
    unpublished = {"bert-base-384", "bert-large", "ssd-resnet34", "zfnet512", "tiny-conv", "tiny-transformer"}
    assert {entry.name for entry in zoo.entries()} == {*SEVEN, *OTHERS, *unpublished}


@pytest.mark.parametrize(("name", "millions"), [("efficientnet-b0", 5.268), ("tiny-yolov2", 15.8587)])
def test_folded_networks_have_the_parameters_that_open_model_zoo_counts(name: str, millions: float) -> None:
    # Its pages of efficientnet-b0 and yolo-v2-tiny-ava-sparse-30-0001.
    digits = len(str(millions).partition(".")[2])
    assert round(folded(builders().BUILT[name](name).outline()) / M, digits) == millions


@pytest.mark.parametrize("name", BUILT)
def test_the_registry_counts_what_is_built(name: str) -> None:
    canonical, outline = builders().canonical, builders().BUILT[name](name).outline()
    entry = zoo.entry(name)
    assert (canonical.parameters(outline), canonical.macs(outline)) == (entry.parameters, entry.macs)
    assert {opset.version for opset in outline.opset_import} == {17}
    assert outline.ByteSize() < 1 << 20


def test_every_network_fits_a_single_file() -> None:
    assert all(4 * entry.parameters < (1 << 31) - (1 << 24) for entry in zoo.entries())


@pytest.mark.parametrize(
    ("variant", "boxes", "extents"),
    [("TRAINING", 8732, [38, 19, 10, 5, 3, 1]), ("INFERENCE", 15130, [50, 25, 13, 7, 3, 3])],
)
def test_ssd_has_the_feature_maps_of_mlperf(variant: str, boxes: int, extents: list[int]) -> None:
    model = builders().ssd.build("ssd", getattr(builders().ssd, variant)).outline()
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.output}
    assert shapes == {"loc": [1, 4, boxes], "conf": [1, 81, boxes]}
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=onnx.GraphProto(name="ssd"))
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    for tensor in model.graph.initializer:
        light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    inferred = onnx.shape_inference.infer_shapes(light, strict_mode=True).graph.value_info
    found = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in inferred}
    for index, (anchors, extent) in enumerate(zip((4, 6, 6, 6, 4, 4), extents, strict=True)):
        assert found[f"/loc.{index}/Conv_output_0"] == [1, anchors * 4, extent, extent]
        assert found[f"/conf.{index}/Conv_output_0"] == [1, anchors * 81, extent, extent]


def test_ssd_for_large_images_has_the_published_counts_and_the_registered_one_its_weights() -> None:
    # Open Model Zoo, ssd-resnet34-1200-onnx: 433.411 GFLOPs; 20.058 MParams, among them six values for each of the default boxes.
    ssd, canonical = builders().ssd, builders().canonical
    large = ssd.build("ssd-resnet34-1200", ssd.INFERENCE).outline()
    assert round((folded(large) + 6 * 15130) / M, 3) == 20.058
    assert 2 * canonical.macs(large) == pytest.approx(433.411 * G, rel=0.005)
    small = ssd.build("ssd-resnet34", ssd.TRAINING)
    assert weights(small.outline()) == weights(large)


def weights(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "tokens"),
    [
        ("bert-base", 12, 768, 128),
        ("bert-base-384", 12, 768, 384),
        ("bert-large", 24, 1024, 128),
        ("bert-large-384", 24, 1024, 384),
    ],
)
def test_bert_is_counted_by_its_formula(name: str, layers: int, hidden: int, tokens: int) -> None:
    # Per layer (Vaswani et al., NeurIPS 2017, table 1): four projections, twice four times as wide, and two products of tokens.
    entry = zoo.entry(name)
    assert entry.macs == layers * (12 * tokens * hidden**2 + 2 * tokens**2 * hidden) + hidden**2
    # Devlin et al., NAACL 2019, section 3: 110M and 340M.
    assert entry.parameters / M == pytest.approx({768: 110, 1024: 340}[hidden], rel=0.015)


def test_bert_large_is_that_of_open_model_zoo_but_for_its_ends() -> None:
    # That one has 384 positions instead of 512, no pooler, and two outputs for each token: 333.96 MParams.
    pooler, positions, outputs = 1024 * 1024 + 1024, (512 - 384) * 1024, 2 * 1024 + 2
    assert round((zoo.entry("bert-large-384").parameters - pooler - positions + outputs) / M, 2) == 333.96


@pytest.mark.parametrize(("short", "long"), [("bert-base", "bert-base-384"), ("bert-large", "bert-large-384")])
def test_bert_is_one_model_for_any_number_of_tokens(short: str, long: str) -> None:
    one, other = (builders().BUILT[name](name) for name in (short, long))
    assert weights(one.outline()).keys() == weights(other.outline()).keys()
    name = "encoder.layer.5.output.dense.bias"
    assert one.weights[name].make().tobytes() == other.weights[name].make().tobytes()
    assert one.weights[name].make().tobytes() != one.weights["encoder.layer.4.output.dense.bias"].make().tobytes()
