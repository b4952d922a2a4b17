"""Large weights are held once, and no longer than they are needed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from mvcompile.frontend.onnx_import import load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.weights import LARGE_WEIGHT, Weights, is_placeholder, values_of
from mvcompile.target import detect_target
from mvcompile.tasks import extract
from mvcompile.testing.onnx_models import assert_matches_reference, load, make_model, run

SIDE = 256
X = np.random.default_rng(0).standard_normal((3, SIDE)).astype(np.float32)
LARGE = np.random.default_rng(1).standard_normal((SIDE, SIDE)).astype(np.float32)


def product(weight: NDArray[Any] = LARGE) -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return make_model([node], {"x": ("float32", [3, SIDE])}, ["y"], {"w": weight})


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def constants(function: Any) -> list[NDArray[Any]]:
    found: list[NDArray[Any]] = []
    relax.analysis.post_order_visit(
        function, lambda expr: found.append(values_of(expr)) if hasattr(expr, "value") and hasattr(expr.value, "numpy") else None
    )
    return found


def test_one_array_is_the_weight_of_both_protos_and_of_the_module() -> None:
    loaded = load(product())
    (original,), (simplified,) = loaded.original.graph.initializer, loaded.proto.graph.initializer
    assert loaded.original.ByteSize() + loaded.proto.ByteSize() < LARGE.nbytes / 10
    assert is_placeholder(original)
    held = loaded.weights.array(original)
    assert loaded.weights.array(simplified) is held
    np.testing.assert_array_equal(held, LARGE)
    (constant,) = constants(to_relax(loaded)["main"])
    assert address(constant) == address(held)


def test_a_program_has_the_constants_of_the_prepared_module() -> None:
    prepared = prepare(to_relax(load(product())), detect_target())
    (value,) = [value for value in extract(prepared).values if value.data is not None]
    assert value.data is not None
    assert [address(constant) for constant in constants(prepared.module["main"])] == [address(value.data)]


def test_a_module_does_not_need_the_model_any_more() -> None:
    loaded = load(product())
    module = to_relax(loaded)
    del loaded
    np.testing.assert_array_equal(constants(module["main"])[0], LARGE)


def test_reading_holds_no_second_copy_of_the_file(tmp_path: Path) -> None:
    names = [f"w{index}" for index in range(8)]
    sources = ["x", *(f"y{name}" for name in names[:-1])]
    nodes = [helper.make_node("MatMul", [source, name], [f"y{name}"]) for source, name in zip(sources, names, strict=True)]
    outputs = {"yw7": ("float32", [3, SIDE])}
    path = tmp_path / "model.onnx"
    onnx.save(make_model(nodes, {"x": ("float32", [3, SIDE])}, outputs, dict.fromkeys(names, LARGE)), path)
    load_model(path)  # what is imported on first use is none of the model
    tracemalloc.start()
    try:
        load_model(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * path.stat().st_size


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("raw", [True, False])
def test_weights_are_taken_however_they_are_stored(dtype: type[np.generic], raw: bool) -> None:
    values = LARGE.astype(dtype)
    model = product(values)
    if not raw:
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        model.graph.initializer[0].CopyFrom(helper.make_tensor("w", kind, values.shape, values.ravel()))
    weights = Weights()
    light = weights.take(model)
    (tensor,) = light.graph.initializer
    assert is_placeholder(tensor)
    assert light.ByteSize() < LARGE_WEIGHT / 10
    assert (tensor.name, tensor.dims) == ("w", list(values.shape))
    assert address(weights.array(tensor)) % 64 == 0
    np.testing.assert_array_equal(weights.array(tensor), values)
    whole = weights.whole(tensor)
    assert whole.data_location == TensorProto.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(whole), values)
    assert weights.take(light) is light


@pytest.mark.parametrize("values", [LARGE[1:], LARGE.astype(np.int64)], ids=["small", "integers"])
def test_other_constants_stay_where_they_are(values: NDArray[Any]) -> None:
    model, weights = product(values), Weights()
    assert weights.take(model) is model
    (tensor,) = model.graph.initializer
    assert not is_placeholder(tensor)
    np.testing.assert_array_equal(weights.array(tensor), values)
    assert weights.whole(tensor) is tensor


def test_large_weights_are_folded_and_taken_again() -> None:
    generator = np.random.default_rng(2)
    weights = {
        "w": generator.standard_normal((64, 64, 4, 4)).astype(np.float32),
        **{name: generator.uniform(0.5, 2, 64).astype(np.float32) for name in ("scale", "bias", "mean", "variance")},
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "variance"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("float32", [1, 64, 5, 5])}, ["y"], weights)
    loaded = load(model)
    assert [node.op_type for node in loaded.proto.graph.node] == ["Conv"]
    folded = next(tensor for tensor in loaded.proto.graph.initializer if len(tensor.dims) == 4)
    assert is_placeholder(folded)
    assert not np.array_equal(loaded.weights.array(folded), weights["w"])
    assert_matches_reference(model)


def test_a_large_weight_can_be_an_output() -> None:
    types = {"y": ("float32", [3, SIDE]), "w": ("float32", [SIDE, SIDE])}
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    assert_matches_reference(make_model([node], {"x": ("float32", [3, SIDE])}, types, {"w": LARGE}))


def test_a_model_that_is_not_simplified_has_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxslim, "slim", lambda *_, **__: 1 / 0)
    loaded = load(product())
    assert "ZeroDivisionError" in loaded.warnings[0]
    np.testing.assert_allclose(run(loaded, {"x": X})[0], X @ LARGE, rtol=1e-3, atol=1e-3)
