from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, tirx

from mvcompile.errors import ModelError
from mvcompile.frontend import prepare as module
from mvcompile.frontend.onnx_import import from_proto, to_relax
from mvcompile.frontend.packing import pack_columns
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.reference import reference_outputs
from mvcompile.tasks import Program, extract
from mvcompile.testing.networks import (
    AVX2,
    AVX512,
    Array,
    Graph,
    checked_program,
    kinds_of,
    network,
    programs_of,
    run_here,
)

ROOT = Path(__file__).resolve().parents[3]


def constants(program: Program, kind: str) -> list[Array]:
    """The weights of the first layer of that kind."""
    layer = next(layer for layer in program.layers if layer.name.startswith(f"{kind}."))
    values = [program.values[index] for index in layer.arguments]
    return [value.data for value in values if value.data is not None]


def random(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def test_convolution_bias_residual_and_activation_are_one_kernel() -> None:
    def body(graph: Graph, x: Any) -> Any:
        x = graph.relu(graph.bias(graph.conv(x, 16, 3)))
        return graph.relu(graph.add(graph.bias(graph.conv(x, 16, 3)), x))

    assert kinds_of(checked_program(body, (1, 8, 6, 6))) == ["conv2d_add_relu", "conv2d_add_add_relu"]


def test_no_transpose_is_left_between_layers() -> None:
    def body(graph: Graph, x: Any) -> Any:
        x = graph.relu(graph.bias(graph.conv(x, 16, 3)))
        x = graph(relax.op.nn.max_pool2d(x, (2, 2), (2, 2)))
        x = graph(relax.op.concat([x, graph.conv(x, 8, 1)], axis=1))
        return graph.conv(x, 16, 1)

    layers = checked_program(body, (1, 3, 8, 8)).layers
    assert [layer.name for layer in layers if "transpose" in layer.name] == [layers[0].name, layers[-1].name]


@pytest.mark.parametrize(
    ("options", "columns", "width"),
    [
        ({"kernel": 1}, 32, 16),
        ({"kernel": 3}, 24, 24),
        ({"kernel": 3, "stride": 2}, 40, 40),
        ({"kernel": 3, "groups": 4}, 32, 8),
        ({"kernel": 5, "dilation": 2}, 20, 24),
        ({"kernel": 3, "groups": 4}, 12, 8),
        ({"kernel": 1, "groups": 2}, 26, 16),
        ({"kernel": 6, "padding": 0}, 64, 64),  # one pixel: a single row
    ],
    ids=str,
)
def test_weights_of_convolutions_are_constants_in_panels(options: dict[str, Any], columns: int, width: int) -> None:
    weights: list[Array] = []

    def body(graph: Graph, x: Any) -> Any:
        call = graph.conv(x, columns, **options)
        weights.append(graph.last_weight)
        return call

    (panels,) = constants(checked_program(body, (1, 8, 6, 6)), "conv2d")
    np.testing.assert_array_equal(panels, pack_columns(weights[-1].transpose(2, 3, 1, 0), width, options.get("groups", 1)))


@pytest.mark.parametrize(("columns", "panels"), [(48, (3, 6, 16)), (13, (1, 6, 16)), (56, (4, 6, 16))])
def test_a_matrix_is_a_constant_in_panels_however_many_axes_the_other_side_has(columns: int, panels: tuple[int, ...]) -> None:
    (found,) = constants(checked_program(lambda graph, x: graph.dense(x, columns), (2, 5, 6)), "matmul")
    assert found.shape == panels


def onnx_model(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, ...]], weights: dict[str, Array], shape: tuple[int, ...]
) -> onnx.ModelProto:
    """One output, `y`, of this shape."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, extents) for name, extents in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(data, name) for name, data in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check_onnx(model: onnx.ModelProto, **inputs: Array) -> Program:
    """The prepared model, which computes what ONNX Runtime does."""
    (expected,) = reference_outputs(model, inputs).values()
    program = extract(prepare(to_relax(from_proto(model, name="test", sha256="0" * 64)), AVX2))
    np.testing.assert_allclose(run_here(program, list(inputs.values()))[0], expected, rtol=1e-4, atol=1e-5)
    return program


def test_a_transposed_gemm_is_one_kernel_with_panels() -> None:
    weights = {"w": random(16, 12), "b": random(16)}
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["g"], transB=1), helper.make_node("Relu", ["g"], ["y"])]
    program = check_onnx(onnx_model(nodes, {"x": (3, 12)}, weights, (3, 16)), x=random(3, 12))
    assert kinds_of(program) == ["matmul_add_relu"]
    panels = constants(program, "matmul_add_relu")[0]
    np.testing.assert_array_equal(panels, pack_columns(weights["w"].T, 16))


def test_batch_normalisation_is_folded_into_the_convolution() -> None:
    weights = {"w": random(16, 4, 3, 3), "scale": random(16), "shift": random(16), "mean": random(16)}
    weights["variance"] = np.abs(random(16)) + 0.5
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    program = check_onnx(onnx_model(nodes, {"x": (1, 4, 6, 6)}, weights, (1, 16, 6, 6)), x=random(1, 4, 6, 6))
    assert kinds_of(program) == ["conv2d_add_relu"]


@pytest.mark.parametrize("slope", [0.1, 0.0, 1.5, -0.5])
def test_a_leaky_relu_is_in_the_kernel_of_its_convolution_if_it_is_a_maximum(slope: float) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("LeakyRelu", ["c"], ["a"], alpha=slope),
        helper.make_node("Conv", ["a", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = {"w": random(8, 8, 3, 3) / np.float32(8)}
    program = check_onnx(onnx_model(nodes, {"x": (1, 8, 5, 5)}, weights, (1, 8, 5, 5)), x=random(1, 8, 5, 5))
    assert (kinds_of(program) == ["conv2d_multiply_maximum", "conv2d"]) == (0 < slope < 1)


def test_a_sum_of_two_is_an_addition_in_the_convolution_s_kernel() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "w"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Sum", ["d", "c"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    weights = {"w": random(8, 8, 3, 3) / np.float32(8)}
    program = check_onnx(onnx_model(nodes, {"x": (1, 8, 5, 5)}, weights, (1, 8, 5, 5)), x=random(1, 8, 5, 5))
    assert kinds_of(program) == ["conv2d", "conv2d_add_relu"]


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        pytest.param(lambda g, x, y: g(relax.op.matmul(x, y)), [(2, 5, 6), (2, 6, 8)], id="product of activations"),
        pytest.param(lambda g, x: g(relax.op.matmul(g.weight(3, 6), x)), [(6, 8)], id="constant on the left"),
        pytest.param(lambda g, x: g.dense(x, 16), [(6,)], id="vector times matrix"),
        pytest.param(lambda g, x: g.conv(x, 16, 3, groups=16), [(1, 16, 5, 5)], id="depthwise"),
        pytest.param(lambda g, x: g.conv(x, 32, 3, groups=16), [(1, 16, 5, 5)], id="depthwise with two results a channel"),
    ],
)
def test_what_cannot_be_packed_is_computed_as_it_is(body: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    program = checked_program(body, *shapes)
    parameters = [len(each.shape) for task in program.tasks for each in task.parameters if task.kind != "transpose"]
    assert max(parameters) <= 4  # panels of a convolution have five axes
    assert not any("packed" in task.module.script() for task in program.tasks)


def test_64_bit_constants_stay_64_bit() -> None:
    def body(graph: Graph, x: Any) -> Any:
        indices = relax.const(np.arange(6).reshape(2, 3), "int64")
        return graph(relax.op.add(x, graph(relax.op.permute_dims(indices))))

    model = network(body, (3, 2), dtypes=("int64",))
    program = programs_of(model, AVX2)
    assert {value.dtype for value in program.values} == {"int64"}
    (found,) = run_here(program, [np.full((3, 2), 2**40)])
    np.testing.assert_array_equal(found, 2**40 + np.arange(6).reshape(2, 3).T)


def test_a_reduction_to_a_scalar_is_one_kernel() -> None:
    program = checked_program(lambda graph, x: graph(relax.op.sum(x)), (3, 4, 5))
    assert [layer.name for layer in program.layers] == ["sum.0"]


def test_a_module_that_cannot_be_lowered_is_a_model_error() -> None:
    height = tirx.Var("height", "int64")
    image = relax.Var("x", relax.TensorType((1, 3, height, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [image]):
        with builder.dataflow():
            weight = relax.const(random(8, 3, 3, 3))
            result = builder.emit_output(relax.Tuple([builder.emit(relax.op.nn.conv2d(image, weight))]))
        builder.emit_func_output(result)
    with pytest.raises(ModelError, match="cannot be lowered"):
        prepare(builder.get(), AVX2)


def fingerprint(**changes: Any) -> str:
    return prepare(network(lambda graph, x: graph.relu(x), (2, 3)), replace(AVX2, **changes)).fingerprint


def test_the_fingerprint_is_that_of_target_versions_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fingerprint()
    assert fingerprint() == known
    assert fingerprint(num_cores=64) != known
    assert fingerprint(cpu="znver3") != known
    assert prepare(network(lambda graph, x: graph.relu(x), (2, 3)), AVX512).fingerprint != known
    with monkeypatch.context() as patch:
        patch.setattr(module, "PREPARE_VERSION", module.PREPARE_VERSION + 1)
        assert fingerprint() != known
    with monkeypatch.context() as patch:
        patch.setattr(tvm, "__version__", "0.0")
        assert fingerprint() != known
    with monkeypatch.context() as patch:
        passes = module._passes
        patch.setattr(module, "_passes", lambda target: passes(target)[:-1])
        assert fingerprint() != known


def test_the_fingerprint_does_not_depend_on_the_model() -> None:
    other = prepare(network(lambda graph, x: graph.dense(x, 8), (2, 3)), AVX2)
    assert other.fingerprint == fingerprint()
    assert len(other.passes) > 10


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from mvcompile.frontend.prepare import prepare\n"
        "from mvcompile.testing.networks import AVX2, network\n"
        "print(prepare(network(lambda graph, x: graph.relu(x), (2, 3)), AVX2).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(ROOT), *sys.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == fingerprint()
