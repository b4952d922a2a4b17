from __future__ import annotations

import numpy as np
import pytest
from onnx import TypeProto, helper

from mvcompile.errors import ModelError, UsageError
from mvcompile.frontend.shapes import format_shape_option, parse_shape_option
from mvcompile.testing.onnx_models import Typed, load, make_model


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        ("data:1x3x224x224", "data", (1, 3, 224, 224)),
        ("input:0:1x8", "input:0", (1, 8)),
        ("入力 a/b:7", "入力 a/b", (7,)),
        ("scalar:", "scalar", ()),
    ],
)
def test_a_shape_option_is_split_at_the_last_colon(text: str, name: str, shape: tuple[int, ...]) -> None:
    assert parse_shape_option(text) == (name, shape)


@pytest.mark.parametrize(
    "text", ["data", ":1x2", "", "data:0", "data:1x", "data:x1", "data:-1", "data:1x2.5", "data:1,2", "data:²"]
)
def test_a_bad_shape_option_is_shown_with_the_form_it_should_have(text: str) -> None:
    with pytest.raises(UsageError, match=r"NAME:1x3x224x224"):
        parse_shape_option(text)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("data_0:1", "--shape data_0:1:1x2"),
        ("a b", "--shape 'a b:1x2'"),
        ("it's", "--shape 'it'\\''s:1x2'"),
        ("入力", "--shape '入力:1x2'"),
    ],
)
def test_a_formatted_option_can_be_pasted_into_a_shell(name: str, option: str) -> None:
    assert format_shape_option(name, (1, 2)) == option


def add(*inputs: tuple[str, Typed], output: Typed | None = None) -> object:
    node = helper.make_node("Add", [inputs[0][0], inputs[-1][0]], ["sum"])
    return make_model([node], dict(inputs), ["sum"] if output is None else {"sum": output})


def test_given_shapes_settle_symbols_in_every_input_and_output() -> None:
    model = add(("x", ("float32", ["batch", 3])), ("y", ("float32", ["batch", 3])), output=("float32", ["batch", 3]))
    loaded = load(model, {"x": (2, 3)})
    assert [spec.shape for spec in loaded.inputs] == [(2, 3), (2, 3)]
    assert [spec.shape for spec in loaded.outputs] == [(2, 3)]


def test_an_input_of_unknown_rank_takes_the_given_shape() -> None:
    loaded = load(add(("x", ("float32", None)), ("y", ("float32", [4]))), {"x": (2, 4)})
    assert loaded.inputs[0].shape == (2, 4)
    assert loaded.outputs[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("shape", "option"),
    [
        (["N", 3, None], r"--shape x:1x3x1, with your extents for those unknown in x\[N, 3, \?\]"),
        (None, r"--shape x:1, with the extents of input 'x'"),
    ],
)
def test_an_unresolved_input_names_the_option_to_pass(shape: list[int | str | None] | None, option: str) -> None:
    with pytest.raises(ModelError, match=option):
        load(add(("x", ("float32", shape))))


def test_all_unresolved_inputs_are_named_at_once() -> None:
    with pytest.raises(ModelError, match=r"--shape x:1x3.*--shape 'y z:1x3'"):
        load(add(("x", ("float32", ["N", 3])), ("y z", ("float32", ["M", 3]))))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"z": (1, 3)}, r"no input 'z'.*'x', 'y'"),
        ({"x": (1, 3, 3)}, r"--shape x:1x3x3 has rank 3, but the model gives this input rank 2: x\[N, 3\]"),
        ({"x": (1, 4)}, r"--shape x:1x4 has extent 4 on axis 1, but the model fixes it to 3"),
        ({"x": (1, 3), "y": (2, 3)}, r"--shape y:2x3 makes dimension 'N' 2, but it is 1 in input 'x'"),
    ],
)
def test_a_given_shape_that_does_not_fit_says_why(given: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(add(("x", ("float32", ["N", 3])), ("y", ("float32", ["N", 3]))), given)


def test_an_initializer_is_no_input_that_could_be_given_a_shape() -> None:
    node = helper.make_node("Add", ["x", "w"], ["sum"])
    types: dict[str, Typed] = {"x": ("float32", ["N"]), "w": ("float32", [1])}
    model = make_model([node], types, ["sum"], {"w": np.ones(1, np.float32)}, ir_version=3, opset=9)
    with pytest.raises(ModelError, match="no input 'w'"):
        load(model, {"w": (1,)})
    assert load(model, {"x": (5,)}).outputs[0].shape == (5,)


def test_shapes_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ModelError, match="do not fit together"):
        load(add(("x", ("float32", [2, 3])), ("y", ("float32", [4, 5]))))


def test_an_empty_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"input 'x' has extent 0 on axis 1; empty tensors"):
        load(add(("x", ("float32", [2, 0]))))


def test_a_sequence_is_refused() -> None:
    model = make_model([helper.make_node("SequenceLength", ["x"], ["n"])], {"x": ("float32", [2])}, ["n"])
    model.graph.input[0].type.CopyFrom(TypeProto(sequence_type=TypeProto.Sequence(elem_type=model.graph.input[0].type)))
    with pytest.raises(ModelError, match=r"input 'x' is a sequence, not a tensor"):
        load(model)


def test_a_dtype_that_bundles_cannot_hold_is_refused() -> None:
    model = make_model([helper.make_node("Identity", ["x"], ["y"])], {"x": ("float32", [2])}, ["y"])
    model.graph.input[0].type.tensor_type.elem_type = helper.TensorProto.BFLOAT16
    with pytest.raises(ModelError, match=r"input 'x' holds bfloat16; supported are bool, float16"):
        load(model)
