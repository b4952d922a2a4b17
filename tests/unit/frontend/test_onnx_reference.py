from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from mvcompile.errors import ModelError
from mvcompile.frontend.reference import integer_limits, random_inputs, reference_outputs, with_logits
from mvcompile.testing.onnx_models import Typed, make_model
from mvcompile.types import TensorSpec

LOGITS: Typed = ("float32", [1, 5])


def test_outputs_come_by_name_from_a_file_or_a_model(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x:0"], ["a b"]), helper.make_node("Neg", ["x:0"], ["n"])]
    model = make_model(nodes, {"x:0": ("float32", [2])}, ["n", "a b"])
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    x = np.array([1, -1], np.float32)
    for source in (model, path, str(path)):
        found = reference_outputs(source, {"x:0": x, "unknown": x}, threads=2)
        assert list(found) == ["n", "a b"]
        np.testing.assert_array_equal(found["a b"], [1, 0])


@pytest.mark.parametrize(("ir_version", "is_input"), [(3, True), (8, True), (8, False)])
def test_large_weights_are_read_in_place(ir_version: int, is_input: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    inputs: dict[str, Typed] = {"x": ("float32", [1, 64])} | ({"w": ("float32", [64, 64])} if is_input else {})
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = make_model([node], inputs, ["y"], {"w": weight}, ir_version=ir_version, opset=9)
    x = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(reference_outputs(model, {"x": x})["y"], x @ weight, rtol=1e-5)


def test_what_onnx_runtime_refuses_is_an_error_that_says_so() -> None:
    foreign = make_model([helper.make_node("Thing", ["x"], ["y"], domain="d")], {"x": LOGITS}, {"y": LOGITS}, domains={"d": 1})
    with pytest.raises(ModelError, match=r"ONNX Runtime .* cannot run the model"):
        reference_outputs(foreign, {"x": np.zeros((1, 5), np.float32)})
    with pytest.raises(ModelError, match=r"ONNX Runtime .* cannot run the model"):
        reference_outputs(make_model([helper.make_node("Neg", ["x"], ["y"])], {"x": LOGITS}, ["y"]), {})


def test_random_inputs_are_valid_for_their_dtype() -> None:
    dtypes = ("float32", "float16", "float64", "bool", "int64", "uint8", "int8")
    specs = [TensorSpec(dtype, dtype, (40, 5)) for dtype in dtypes] + [TensorSpec("scalar", "int32", ())]
    values = random_inputs(specs, seed=1, limits={"int64": 1000, "int8": 1000})
    for spec in specs:
        assert (str(values[spec.name].dtype), values[spec.name].shape) == (spec.dtype, spec.shape)
    assert values["float32"].std() == pytest.approx(1, rel=0.2)
    assert {*values["bool"].ravel().tolist()} == {False, True}
    assert {*values["uint8"].ravel().tolist()} == {0, 1}
    assert 500 < values["int64"].max() < 1000
    assert 60 < values["int8"].max() <= 127
    assert min(int(values[name].min()) for name in ("int64", "int8")) >= 0
    again = random_inputs(specs, seed=1, limits={"int64": 1000, "int8": 1000})
    assert all(np.array_equal(values[name], again[name]) for name in values)
    assert not np.array_equal(values["float32"], random_inputs(specs, seed=2)["float32"])


def test_integers_that_are_looked_up_stay_inside_what_they_look_up() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Cast", ["types"], ["long"], to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["wide", "long"], ["kinds"], axis=1),
        helper.make_node("Mul", ["mask", "mask"], ["squares"]),
        helper.make_node("Gather", ["table", "both"], ["more"]),
        helper.make_node("Add", ["both", "mask"], ["sum"]),
    ]
    weights = {"table": np.zeros((300, 4), np.float32), "wide": np.zeros((2, 7, 3), np.float32)}
    inputs: dict[str, Typed] = {name: ("int64", [2]) for name in ("ids", "mask", "both", "unused")}
    inputs["types"] = ("int32", [2])
    model = make_model(nodes, inputs, ["words", "kinds", "squares", "more", "sum"], weights)
    assert integer_limits(model) == {"ids": 300, "types": 7, "mask": 2, "both": 2}


def test_what_goes_into_the_last_softmax_becomes_an_output() -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["inner"]),
        helper.make_node("Mul", ["inner", "x"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"]),
        helper.make_node("Reshape", ["p", "shape"], ["probabilities"]),
        helper.make_node("LogSoftmax", ["scores"], ["logs"]),
    ]
    model = make_model(nodes, {"x": LOGITS}, ["logs", "probabilities"], {"shape": np.array([5])})
    names = [info.name for info in model.graph.output]
    extended = with_logits(model)
    assert [info.name for info in extended.graph.output] == [*names, "scores"]
    assert [info.name for info in model.graph.output] == names
    x = random_inputs([TensorSpec("x", "float32", (1, 5))], seed=0)["x"]
    found = reference_outputs(extended, {"x": x})
    exponentials = np.exp(found["scores"])
    np.testing.assert_allclose(found["probabilities"], (exponentials / exponentials.sum()).reshape(5), rtol=1e-5)


@pytest.mark.parametrize("operator", ["Relu", "Softmax"])
def test_a_model_without_a_last_softmax_stays_as_it_is(operator: str) -> None:
    nodes = [helper.make_node(operator, ["x"], ["a"]), helper.make_node("Exp", ["a"], ["y"])]
    model = make_model(nodes, {"x": LOGITS}, ["y"])
    assert with_logits(model) is model
