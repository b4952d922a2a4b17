from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from onnx import helper, numpy_helper

from mvcompile.frontend import simplify as simplification
from mvcompile.testing.onnx_models import load, make_model, run

X = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
OPERATORS = ["Conv", "Relu"]


def convolution() -> onnx.ModelProto:
    """Conv, batch norm, Identity, Dropout and ReLU, which simplify to Conv and ReLU."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "s", "s", "s"], ["n"]),
        helper.make_node("Identity", ["n"], ["i"]),
        helper.make_node("Dropout", ["i"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    weights = {"w": rng.standard_normal((3, 2, 3, 3)).astype(np.float32), "s": rng.random(3).astype(np.float32)}
    inputs = {"x": ("float32", [1, 2, 4, 4]), "unused": ("float32", [7])}
    return make_model(nodes, inputs, ["y"], weights)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_batch_norms_are_folded_and_copies_dropped() -> None:
    loaded = load(convolution())
    assert loaded.warnings == ()
    assert operators(loaded.proto) == OPERATORS
    assert [spec.name for spec in loaded.inputs] == ["x", "unused"]
    assert operators(loaded.original) == operators(convolution())


def raising(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    raise RuntimeError("no idea")


def with_other_weights(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.002), weight.name))
    return model


def with_renamed_output(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    name = model.graph.output[0].name
    model.graph.output[0].name = "renamed"
    model.graph.node[-1].output[0] = "renamed"
    assert name != "renamed"
    return model


def with_other_opset(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    model.opset_import[0].version = 18
    return model


@pytest.mark.parametrize(
    ("slim", "reason"),
    [
        (raising, "RuntimeError: no idea"),
        (with_other_weights, "it changes output t[0-9]+ by up to 0.0"),
        (with_renamed_output, r"it has outputs \['renamed'\] instead of"),
        (with_other_opset, "of another operator set"),
    ],
)
def test_a_simplification_that_fails_or_lies_is_not_used(slim: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxslim, "slim", slim)
    loaded = load(convolution())
    (warning,) = loaded.warnings
    assert warning.startswith("not simplified by onnxslim")
    assert re.search(reason, warning)
    assert operators(loaded.proto) == operators(convolution())
    monkeypatch.undo()
    inputs = {"x": X, "unused": np.zeros(7, np.float32)}
    np.testing.assert_allclose(run(loaded, inputs)[0], run(load(convolution()), inputs)[0], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_checked_is_not_simplified() -> None:
    foreign = make_model(
        [helper.make_node("Identity", ["x"], ["i"]), helper.make_node("Thing", ["i"], ["y"], domain="com.example")],
        {"x": ("float32", [2])},
        {"y": ("float32", [2])},
        domains={"com.example": 1},
    )
    (warning,) = load(foreign).warnings
    assert "ONNX Runtime" in warning


def test_large_weights_that_cannot_be_folded_are_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"table": (300, 256), "product": (256, 256), "moved": (256, 256), "small": (256, 2)}
    weights = {name: np.random.default_rng(2).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "product"], ["a"]),
        helper.make_node("Transpose", ["moved"], ["turned"]),
        helper.make_node("MatMul", ["a", "turned"], ["b"]),
        helper.make_node("MatMul", ["b", "small"], ["y"]),
    ]
    seen = []
    slim = onnxslim.slim

    def spying(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        seen.append([list(tensor.dims) for tensor in model.graph.initializer])
        return slim(model, **options)

    monkeypatch.setattr(onnxslim, "slim", spying)
    loaded = load(make_model(nodes, {"ids": ("int64", [3])}, ["y"], weights))
    assert loaded.warnings == ()
    assert seen[0] == [[256, 256], [256, 2]]
    assert operators(loaded.proto) == ["Gather", "MatMul", "MatMul", "MatMul"]
    assert sorted(list(tensor.dims) for tensor in loaded.proto.graph.initializer) == [
        [256, 2],
        [256, 256],
        [256, 256],
        [300, 256],
    ]
    assert len(loaded.proto.graph.input) == 1


@pytest.mark.parametrize(
    ("want", "have", "close"),
    [
        (np.float32([1, 100]), np.float32([1.0005, 100.05]), True),
        (np.float32([1, 100]), np.float32([1.01, 100]), False),
        (np.float32([0, 100]), np.float32([5e-4, 100]), True),
        (np.float16([1, 100]), np.float16([1.005, 100]), True),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), True),
        (np.float32([1, 2]), np.float32([np.nan, 2]), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.float32([1]), np.float64([1]), False),
        (np.float32([1]), np.float32([[1]]), False),
    ],
)
def test_outputs_are_compared_up_to_rounding(want: np.ndarray, have: np.ndarray, close: bool) -> None:
    if close:
        simplification._compare({"y": want}, {"y": have})
    else:
        with pytest.raises(simplification.ModelError, match="output y"):
            simplification._compare({"y": want}, {"y": have})
