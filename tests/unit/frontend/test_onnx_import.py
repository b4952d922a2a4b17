from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper

from mvcompile import zoo
from mvcompile.errors import ModelError
from mvcompile.frontend.onnx_import import load_model, to_relax
from mvcompile.frontend.reference import random_inputs, reference_outputs
from mvcompile.testing.onnx_models import Typed, assert_matches_reference, load, make_model, run

X = np.array([[1.0, -2.0, 3.0]], np.float32)
FLOATS: Typed = ("float32", [1, 3])


@pytest.mark.parametrize("name", ["tiny-conv", "tiny-transformer"])
def test_a_network_of_the_zoo_computes_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    model = load_model(zoo.get(name, tmp_path))
    assert model.warnings == ()
    inputs = random_inputs(model.inputs, seed=1)
    expected = reference_outputs(model.original, inputs)
    for spec, found in zip(model.outputs, run(model, inputs), strict=True):
        np.testing.assert_allclose(found, expected[spec.name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        ("data:0", "/block.1/Add output", "入力 & 出力", "weight\n"),
        ("a.b", "a_b", "a/b", "a:b"),
        ("1", "2", "0", "t0"),
        ("for", "lambda", "main", "None"),
    ],
)
def test_any_names_work_and_come_back(names: tuple[str, ...]) -> None:
    x, y, total, weight = names
    nodes = [helper.make_node("Mul", [x, weight], ["t1"], name=total), helper.make_node("Sub", ["t1", y], [total], name=total)]
    model = make_model(nodes, {x: FLOATS, y: FLOATS}, [total], {weight: np.full((1, 3), 2, np.float32)})
    loaded = load(model)
    assert [spec.name for spec in loaded.inputs] == [x, y]
    assert [spec.name for spec in loaded.outputs] == [total]
    (found,) = run(loaded, {x: X, y: X + 1})
    np.testing.assert_allclose(found, X - 1)


def test_main_takes_all_inputs_in_order_and_returns_a_tuple_of_all_outputs_in_order() -> None:
    nodes = [helper.make_node("Add", ["c", "a"], ["sum"]), helper.make_node("Relu", ["a"], ["positive"])]
    inputs: dict[str, Typed] = {"a": FLOATS, "unused": ("int32", [4]), "c": FLOATS}
    module = to_relax(load(make_model(nodes, inputs, ["positive", "sum"])))
    types = [(str(p.ty.dtype), [int(e) for e in p.ty.shape]) for p in module["main"].params]
    assert types == [("float32", [1, 3]), ("int32", [4]), ("float32", [1, 3])]
    single = to_relax(load(make_model(nodes[:1], inputs, ["sum"])))
    assert [isinstance(m["main"].ret_ty, tvm.relax.TupleType) for m in (module, single)] == [True, True]
    assert len(single["main"].ret_ty.fields) == 1


def test_initializers_that_are_also_inputs_are_constants() -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    model = make_model([node], {"w": FLOATS, "x": FLOATS}, ["y"], {"w": X}, ir_version=3, opset=9)
    loaded = load(model)
    assert [spec.name for spec in loaded.inputs] == ["x"]
    np.testing.assert_allclose(run(loaded, {"x": X})[0], 2 * X)


def test_outputs_may_repeat_and_be_inputs_or_constants() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Constant", [], ["k"], value_ints=[3, 4]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Add", ["w", "w"], ["folded"]),
    ]
    weights = {"w": X}
    types = {"y": FLOATS, "x": FLOATS, "w": FLOATS, "k": ("int64", [2]), "same": FLOATS, "folded": FLOATS}
    model = make_model(nodes, {"x": FLOATS}, types, weights)
    model.graph.output.append(model.graph.output[0])
    loaded = load(model)
    assert [spec.name for spec in loaded.outputs] == ["y", "x", "w", "k", "same", "folded", "y"]
    found = run(loaded, {"x": -X})
    for have, want in zip(found, [np.maximum(-X, 0), -X, X, [3, 4], -X, 2 * X, np.maximum(-X, 0)], strict=True):
        np.testing.assert_allclose(have, want)


def test_a_graph_without_nodes_hands_on_its_inputs() -> None:
    model = make_model([], {"x": FLOATS, "flag": ("bool", [])}, {"flag": ("bool", []), "x": FLOATS})
    flag, x = run(load(model), {"x": X, "flag": np.array(True)})
    assert flag.shape == ()
    assert bool(flag) is True
    np.testing.assert_allclose(x, X)


def test_integers_booleans_and_scalars_go_in_and_out() -> None:
    nodes = [
        helper.make_node("Where", ["mask", "ids", "minus"], ["chosen"]),
        helper.make_node("Not", ["mask"], ["inverse"]),
        helper.make_node("Cast", ["scalar"], ["rounded"], to=onnx.TensorProto.INT32),
        helper.make_node("Gather", ["table", "byte"], ["row"]),
    ]
    inputs: dict[str, Typed] = {"mask": ("bool", [3]), "ids": ("int64", [3]), "scalar": ("float32", []), "byte": ("uint8", [])}
    del inputs["byte"]
    inputs["byte"] = ("int32", [])
    weights = {"minus": np.array(-1, np.int64), "table": np.arange(8, dtype=np.float32).reshape(4, 2)}
    model = make_model(nodes, inputs, ["chosen", "inverse", "rounded", "row"], weights)
    values = {
        "mask": np.array([True, False, True]),
        "ids": np.array([5, 6, 7]),
        "scalar": np.array(2.7, np.float32),
        "byte": np.array(-2, np.int32),
    }
    assert_matches_reference(model, values)
    assert [(s.dtype, s.shape) for s in load(model).outputs] == [
        ("int64", (3,)),
        ("bool", (3,)),
        ("int32", ()),
        ("float32", (2,)),
    ]


def test_nodes_without_names_and_with_one_name_work() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="n"), helper.make_node("Neg", ["a"], ["b"], name="n")]
    nodes.append(helper.make_node("Exp", ["b"], ["y"]))
    loaded = load(make_model(nodes, {"x": FLOATS}, ["y"]))
    expected = np.exp(-np.maximum(X, 0))
    np.testing.assert_allclose(run(loaded, {"x": X})[0], expected, rtol=1e-6)
    np.testing.assert_allclose(reference_outputs(loaded.original, {"x": X})["y"], expected, rtol=1e-6)


def test_outputs_that_nobody_reads_are_no_problem() -> None:
    nodes = [
        helper.make_node("Dropout", ["x"], ["kept", "mask"]),
        helper.make_node("LayerNormalization", ["kept", "w"], ["normal", "mean", "deviation"]),
        helper.make_node("Split", ["normal"], ["first", "second", "third"], axis=1),
        helper.make_node("TopK", ["normal", "k"], ["largest", "positions"]),
    ]
    weights = {"w": np.ones(3, np.float32), "k": np.array([2])}
    assert_matches_reference(make_model(nodes, {"x": FLOATS}, ["second", "largest"], weights), {"x": X})


def test_functions_of_the_model_are_inlined() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    function = helper.make_function("local", "Twist", ["a"], ["c"], body, [helper.make_opsetid("", 17)])
    node = helper.make_node("Twist", ["x"], ["y"], domain="local")
    model = make_model([node], {"x": FLOATS}, {"y": FLOATS}, domains={"local": 1})
    model.functions.append(function)
    np.testing.assert_allclose(run(load(model), {"x": X})[0], X * X + X)


def test_shapes_that_the_model_computes_are_constants() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["channels"]),
        helper.make_node("Div", ["channels", "two"], ["half"]),
        helper.make_node("Unsqueeze", ["half", "zero"], ["half1"]),
        helper.make_node("Concat", ["minus", "half1"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    weights = {name: np.array(value, np.int64) for name, value in {"one": 1, "two": 2, "zero": [0], "minus": [-1]}.items()}
    model = make_model(nodes, {"x": ("float32", ["N", 6, 4])}, ["y"], weights)
    loaded = load(model, {"x": (2, 6, 4)})
    assert loaded.outputs[0].shape == (16, 3)
    assert [node.op_type for node in loaded.proto.graph.node] == ["Reshape"]


def test_every_node_that_cannot_be_compiled_is_listed_at_once() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="fine"),
        helper.make_node("FusedThing", ["a"], ["b"], name="foreign one", domain="com.example"),
        helper.make_node("Det", ["square"], ["d"], name="det/1"),
        helper.make_node("IsInf", ["a"], ["e"], detect_negative=0),
        helper.make_node("TopK", ["square", "one"], ["f", "i"], name="fails inside", sorted=0),
        helper.make_node("NonZero", ["x"], ["n"], name="dynamic"),
        helper.make_node("Neg", ["f"], ["g"], name="only behind a failure"),
        helper.make_node("Shape", ["n"], ["s"], name="only behind an unknown shape"),
        helper.make_node("Neg", ["s"], ["m"], name="further behind"),
    ]
    inputs: dict[str, Typed] = {"x": FLOATS, "square": ("float32", [2, 2])}
    outputs: dict[str, Typed] = {
        "b": FLOATS,
        "d": ("float32", []),
        "e": ("bool", [1, 3]),
        "g": ("float32", [2, 1]),
        "m": ("int64", [2]),
    }
    weights = {"one": np.array([1])}
    model = make_model(nodes, inputs, outputs, weights, domains={"com.example": 3})
    with pytest.raises(ModelError) as caught:
        to_relax(load(model))
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 nodes of the model cannot be compiled:"
    assert [line.split(": ", 2)[:2] for line in lines[1:]] == [
        ["  node 'foreign one'", "com.example.FusedThing (operator set 3)"],
        ["  node 'det/1'", "Det (operator set 17)"],
        ["  node #3 (no name, computes 'e')", "IsInf (operator set 17)"],
        ["  node 'dynamic'", "NonZero (operator set 17)"],
        ["  node 'fails inside'", "TopK (operator set 17)"],
    ]
    assert "only operators of the standard domain" in lines[1]
    assert "TVM's importer fails: ValueError: TopK sorted must be 1" in lines[5]


def test_an_output_whose_shape_depends_on_data_names_the_node_that_makes_it_so() -> None:
    model = make_model([helper.make_node("NonZero", ["x"], ["n"], name="find")], {"x": FLOATS}, ["n"])
    with pytest.raises(ModelError, match=r"node 'find': NonZero \(operator set 17\): the shape of its output depends on data"):
        load(model)


def test_control_flow_that_folds_is_compiled_and_other_is_refused() -> None:
    def branch(operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["x"], [f"{operator} result"])
        return helper.make_graph([node], operator, [], [helper.make_tensor_value_info(f"{operator} result", 1, [1, 3])])

    node = helper.make_node("If", ["flag"], ["y"], name="if", then_branch=branch("Neg"), else_branch=branch("Exp"))
    model = make_model([node], {"x": FLOATS}, {"y": FLOATS}, {"flag": np.array(True)})
    np.testing.assert_allclose(run(load(model), {"x": X})[0], -X)

    model = make_model([node], {"x": FLOATS, "flag": ("bool", [])}, {"y": FLOATS})
    with pytest.raises(ModelError, match=r"node 'if': If \(operator set 17\): control flow"):
        to_relax(load(model))
