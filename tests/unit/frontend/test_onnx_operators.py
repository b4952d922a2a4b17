"""What is refused because TVM's importer gets it wrong, and what is converted here and has to be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from mvcompile.errors import ModelError
from mvcompile.frontend import onnx_import
from mvcompile.frontend.onnx_import import to_relax
from mvcompile.testing.onnx_models import Array, assert_matches_reference, load, make_model, run

IMAGE = np.random.default_rng(0).standard_normal((1, 4, 7, 8)).astype(np.float32)


def node(operator: str, inputs: Sequence[str], output: str | Sequence[str], **attributes: Any) -> onnx.NodeProto:
    outputs = [output] if isinstance(output, str) else list(output)
    return helper.make_node(operator, list(inputs), outputs, name=f"{operator} of {outputs[0]}", **attributes)


def model(
    nodes: Sequence[onnx.NodeProto], weights: dict[str, Any] | None = None, *, opset: int = 17, **inputs: Array
) -> onnx.ModelProto:
    types = {name: (str(value.dtype), list(value.shape)) for name, value in (inputs or {"x": IMAGE}).items()}
    outputs = [part.output[0] for part in nodes]
    return make_model(nodes, types, outputs, {name: np.asarray(value) for name, value in (weights or {}).items()}, opset=opset)


SCALES = {"s": np.array([1, 1, 2, 2], np.float32)}
UNEVEN = {"s": np.array([1, 1, 1.3, 2], np.float32)}
CHANNELS = {"w": IMAGE[0, :, 0, 0]}
BOXES = {"b": IMAGE[0, :1, :, :4], "c": IMAGE[:, :1, 0, :7], "n": np.array([1]), "t": np.array([0.5], np.float32)}


@pytest.fixture
def unsimplified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import models as they are: simplification folds some of what is looked at here."""
    monkeypatch.setattr(onnx_import, "simplify", lambda core, weights: (core.proto, ()))


@pytest.mark.usefixtures("unsimplified")
def test_pads_of_windows_are_those_of_auto_pad() -> None:
    weights = {"w": np.random.default_rng(1).standard_normal((3, 4, 3, 3)).astype(np.float32)}
    window = {"kernel_shape": [3, 3], "strides": [2, 2]}
    nodes = []
    for mode in ("SAME_LOWER", "SAME_UPPER", "VALID", "NOTSET"):
        nodes.append(node("Conv", ["x", "w"], f"conv {mode}", auto_pad=mode, strides=[2, 2]))
        nodes.append(node("MaxPool", ["x"], f"max {mode}", auto_pad=mode, **window))
        nodes.append(node("AveragePool", ["x"], f"average {mode}", auto_pad=mode, **window))
        nodes.append(node("AveragePool", ["x"], f"padded average {mode}", auto_pad=mode, count_include_pad=1, **window))
    assert_matches_reference(model(nodes, weights), {"x": IMAGE})


@pytest.mark.usefixtures("unsimplified")
def test_elementwise_conversions() -> None:
    nodes = [
        node("BatchNormalization", ["x", "scale", "bias", "mean", "variance"], "normalised", epsilon=1e-3),
        node("Clip", ["x", "low", "high"], "clipped"),
        node("Clip", ["x", "", "high"], "clipped above"),
        node("Clip", ["x", "high", "low"], "clipped with crossed bounds"),
        node("Clip", ["x", "nan", "high"], "clipped with an unknown bound"),
        node("Sum", ["x", "channels", "x"], "sum"),
        node("Sum", ["x"], "sum of one"),
        node("Max", ["x", "channels"], "largest"),
        node("Min", ["x", "channels", "high"], "smallest"),
        node("Pow", ["x", "two"], "square"),
        node("Pow", ["x", "three"], "cube"),
        node("Dropout", ["x", "half"], "kept"),
        node("Shape", ["x"], "shape", start=1, end=-1),
        node("Size", ["x"], "size"),
    ]
    parameters = np.random.default_rng(2).random((4, 4)).astype(np.float32)
    weights = dict(zip(("scale", "bias", "mean", "variance"), parameters, strict=True))
    weights |= {"low": np.float32(-0.5), "high": np.float32(0.25), "nan": np.float32("nan"), "half": np.float32(0.5)}
    weights |= {"two": np.int64(2), "three": np.int32(3), "channels": parameters.reshape(16)[:4].reshape(4, 1, 1)}
    nan = nodes.pop(4)  # ONNX Runtime returns NaN there, TVM's importer treats the bound as absent: only that it imports
    assert_matches_reference(model(nodes, weights), {"x": IMAGE})
    assert np.isfinite(run(load(model([nan], weights)), {"x": IMAGE})[0]).all()


@pytest.mark.usefixtures("unsimplified")
def test_indices_count_from_both_ends_constant_or_not() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    indices = {"i": np.array([-4, 3, -1]), "pairs": np.array([[-1, 0], [1, -3]]), "grid": np.array([[0, -1, 1], [-4, 2, 3]])}
    updates = {"updates": np.array([10, 20], np.float32), "many": np.ones((2, 3), np.float32)}

    def nodes(suffix: str) -> list[onnx.NodeProto]:
        return [
            node("Gather", ["x", "i"], f"rows{suffix}"),
            node("Gather", ["x", "pairs"], f"columns{suffix}", axis=-1),
            node("GatherElements", ["x", "grid"], f"elements{suffix}"),
            node("GatherND", ["x", "pairs"], f"points{suffix}"),
            node("ScatterElements", ["x", "grid", "many"], f"scattered{suffix}", reduction="add"),
            node("ScatterND", ["x", "pairs", "updates"], f"scattered points{suffix}"),
        ]

    assert_matches_reference(model(nodes(""), indices | updates, x=table), {"x": table})
    assert_matches_reference(model(nodes(""), updates, x=table, **indices), {"x": table, **indices})


def test_an_index_outside_stays_inside_at_run_time_and_is_refused_in_a_constant() -> None:
    table = np.arange(4, dtype=np.float32)
    outside = np.array([10**9, -(10**9), 2])
    nodes = [
        node("Gather", ["x", "i"], "taken"),
        node("GatherElements", ["x", "i"], "elements"),
        node("ScatterElements", ["x", "i", "u"], "written"),
    ]
    weights = {"u": np.array([7, 8, 9], np.float32)}
    taken, elements, written = run(load(model(nodes, weights, x=table, i=outside)), {"x": table, "i": outside})
    np.testing.assert_array_equal(taken, [3, 0, 2])
    np.testing.assert_array_equal(elements, [3, 0, 2])
    np.testing.assert_array_equal(written, [8, 1, 9, 7])

    with pytest.raises(ModelError, match=r"'Gather of taken'.*an index is outside of its axis, which has 4 elements"):
        to_relax(load(model(nodes[:1], {"i": outside}, x=table)))


@pytest.mark.usefixtures("unsimplified")
@pytest.mark.parametrize(
    ("opset", "nodes", "weights"),
    [
        (
            7,
            [
                node("Slice", ["x"], "slice", starts=[1, -5], ends=[3, 9999], axes=[1, 3]),
                node("Upsample", ["x"], "upsampled", scales=[1.0, 1.0, 2.0, 3.0]),
                node("Clip", ["x"], "clipped", min=-0.5, max=0.5),
                node("Dropout", ["x"], "kept", ratio=0.3),
            ],
            {},
        ),
        (
            9,
            [
                node("Slice", ["x"], "slice", starts=[0, 1], ends=[1, 3]),
                node("Upsample", ["x", "scales"], "upsampled", mode="linear"),
                node("Softmax", ["x"], "softmax over all behind the axis", axis=2),
                node("ReduceSum", ["x"], "reduced", axes=[1, 2]),
            ],
            {"scales": np.array([1, 1, 2, 1.5], np.float32)},
        ),
        (
            10,
            [node("Resize", ["x", "scales"], "resized"), node("Resize", ["x", "scales"], "smooth", mode="linear")],
            {"scales": np.array([1, 1, 3, 0.5], np.float32)},
        ),
        (
            13,
            [
                node("Resize", ["x", "", "scales"], "resized", mode="nearest", nearest_mode="floor"),
                node("Resize", ["x", "", "scales"], "smooth", mode="linear", coordinate_transformation_mode="align_corners"),
            ],
            {"scales": np.array([1, 1, 2, 1.5], np.float32)},
        ),
    ],
)  # fmt: skip
def test_old_operator_sets_mean_what_they_meant(opset: int, nodes: list[onnx.NodeProto], weights: dict[str, Array]) -> None:
    image = IMAGE[:, :, :6]
    small = model(nodes, weights, opset=opset, x=image)
    assert_matches_reference(small, {"x": image})


def test_an_operator_without_importer_is_written_out_where_onnx_says_how() -> None:
    assert_matches_reference(model([node("Celu", ["x"], "y", alpha=0.5)]), {"x": IMAGE})
    heads = np.random.default_rng(3).standard_normal((1, 2, 5, 4)).astype(np.float32)
    attention = model([node("Attention", ["q", "k", "v"], "y")], opset=23, q=heads, k=heads + 1, v=heads - 1)
    assert_matches_reference(attention, {"q": heads, "k": heads + 1, "v": heads - 1})


@pytest.mark.parametrize(
    ("part", "weights", "opset", "reason"),
    [
        (node("Resize", ["x", "", "s"], "y"), UNEVEN, 17, "gives no whole number"),
        (node("Resize", ["x", "", "s"], "y", antialias=1, mode="linear"), SCALES, 18, "ignores antialias"),
        (node("Resize", ["x", "", "s"], "y", axes=[3, 2]), {"s": np.float32([2, 2])}, 18, "ignores axes"),
        (
            node("Resize", ["x", "", "s"], "y", coordinate_transformation_mode="half_pixel_symmetric"),
            SCALES,
            19,
            "symmetric is not",
        ),
        (
            node("MaxPool", ["x"], "y", kernel_shape=[2, 2], auto_pad="SAME_UPPER", dilations=[2, 2]),
            {},
            17,
            "dilation under auto_pad",
        ),
        (node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2]), {}, 17, "only the first 1 of its 2 outputs"),
        (node("BatchNormalization", ["x", *"wwww"], ["y", "m", "v"], training_mode=1), CHANNELS, 17, "training"),
        (node("Dropout", ["x", "", "t"], "y"), {"t": np.array(True)}, 17, "training"),
        (node("Dropout", ["x"], ["y", "m"]), {}, 17, "mask"),
        (node("IsInf", ["x"], "y", detect_positive=0), {}, 17, "ignores detect_negative and detect_positive"),
        (node("TopK", ["x", "k"], ["y", "i"]), {"k": np.array([2])}, 10, "ignores the K"),
        (node("LpNormalization", ["x"], "y"), {}, 17, "no importer"),
        (node("LayerNormalization", ["x", "s"], ["y", "m"]), {"s": IMAGE[0, 0, 0]}, 17, "but ONNX float32.1, 4, 7, 1"),
        (node("NonMaxSuppression", [*"bcntt"], "y"), BOXES, 17, "depends on data"),
    ],
)
@pytest.mark.usefixtures("unsimplified")
def test_what_would_be_compiled_wrongly_is_refused(
    part: onnx.NodeProto, weights: dict[str, Array], opset: int, reason: str
) -> None:
    whole = model([part], weights, opset=opset)
    for name in part.output[1:]:
        whole.graph.output.append(helper.make_empty_tensor_value_info(name))
    with pytest.raises(ModelError, match=rf"'{part.op_type} of y': {part.op_type} \(operator set {opset}\): .*{reason}"):
        to_relax(load(whole))


@pytest.mark.parametrize(
    ("part", "value", "weight", "opset", "reason"),
    [
        (node("Mod", ["x", "w"], "y"), IMAGE, np.float32(2), 28, "fmod = 1 only"),
        (node("Pow", ["x", "w"], "y"), np.arange(3), np.array(2), 17, "powers of integers"),
        (node("BitShift", ["x", "w"], "y", direction="LEFT"), np.arange(3, dtype=np.uint8), np.uint8(8), 17, "width"),
        (node("ReduceMax", ["x"], "y"), np.array([True, False]), None, 20, "booleans"),
        (node("TopK", ["x", "w"], ["y", "i"]), np.arange(3, dtype=np.uint64), np.array([1]), 17, "uint64"),
        (node("SpaceToDepth", ["x"], "y", blocksize=2, mode="CRD"), IMAGE[:, :, :6], None, 28, "ignores its mode"),
    ],
)
@pytest.mark.usefixtures("unsimplified")
def test_dtypes_and_values_that_fail_later_are_refused(
    part: onnx.NodeProto, value: Array, weight: Array | None, opset: int, reason: str
) -> None:
    weights = {} if weight is None else {"w": weight}
    with pytest.raises(ModelError, match=reason):
        to_relax(load(model([part], weights, opset=opset, x=value)))
