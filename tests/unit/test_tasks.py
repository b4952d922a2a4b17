from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

from mvcompile.errors import ModelError
from mvcompile.frontend.prepare import PreparedModel
from mvcompile.tasks import Program, _kind, extract
from mvcompile.testing.networks import AVX2, Graph, network, only_task, programs_of

ROOT = Path(__file__).resolve().parents[2]


def program(body: Callable[..., Any], *shapes: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> Program:
    return programs_of(network(body, *shapes, dtypes=dtypes), AVX2)


def test_equal_layers_share_a_task_and_their_calls_are_counted() -> None:
    def body(graph: Graph, x: Any) -> Any:
        for _ in range(3):
            x = graph.relu(graph.bias(graph.dense(x, 16)))
        return graph.dense(x, 16)

    found = program(body, (4, 16))
    assert [(task.kind, task.calls) for task in found.tasks] == [("matmul_add_relu", 3), ("matmul", 1)]
    assert [layer.task for layer in found.layers] == [0, 0, 0, 1]
    assert [layer.name for layer in found.layers] == ["matmul_add_relu.0", "matmul_add_relu.1", "matmul_add_relu.2", "matmul.3"]
    assert found.tasks[0].flops >= 2 * 4 * 16 * 16


def test_operations_on_columns_that_only_fill_panels_do_not_count() -> None:
    product = only_task(network(lambda graph, x: graph.dense(x, 13), (4, 16)), AVX2)
    assert product.flops == 2 * 4 * 16 * 13
    grouped = only_task(network(lambda graph, x: graph.conv(x, 20, 3, padding=0, groups=2), (1, 8, 5, 6)), AVX2)
    assert grouped.flops == 2 * 3 * 4 * 20 * 9 * 4


def test_arguments_are_in_the_kernel_s_order_and_have_its_types() -> None:
    found = program(lambda graph, x, y: graph.add(graph.bias(graph.dense(x, 24)), y), (4, 16), (4, 24))
    (task,), (layer,) = found.tasks, found.layers
    assert len(layer.arguments) == len(task.parameters) == 5
    for parameter, index in zip(task.parameters, layer.arguments, strict=True):
        assert (found.values[index].dtype, found.values[index].shape) == (parameter.dtype, parameter.shape)
    assert layer.arguments[-1:] == found.outputs
    assert found.values[layer.arguments[0]].source == "input"


def test_constants_are_the_positions_that_hold_weights_in_every_call() -> None:
    def body(graph: Graph, x: Any) -> Any:
        scale = graph.weight(4, 16)
        twice = graph(relax.op.multiply(graph.relu(x), scale))
        return graph(relax.op.multiply(graph.dense(twice, 16), graph.dense(x, 16)))

    found = program(body, (4, 16))
    by_kind = {task.kind: task for task in found.tasks}
    assert by_kind["matmul"].constants == {1}
    assert by_kind["relu_multiply"].constants == {1}
    sizes = {value.data.nbytes for value in found.values if value.data is not None}
    assert found.weight_bytes == 4 * 16 * 4 + 2 * 16 * 16 * 4
    assert sizes == {256, 1024}


def test_a_position_that_is_a_weight_in_one_call_only_is_no_constant() -> None:
    def body(graph: Graph, x: Any, y: Any) -> Any:
        product = graph.dense(x, 16)
        kept = graph(relax.op.nn.softmax(product))
        return [graph(relax.op.subtract(kept, graph.weight(4, 16))), graph(relax.op.subtract(kept, y))]

    found = program(body, (4, 16), (4, 16))
    (difference,) = [task for task in found.tasks if task.kind == "subtract"]
    assert difference.calls == 2
    assert difference.constants == frozenset()


def test_a_reshape_between_layers_is_a_view() -> None:
    def body(graph: Graph, x: Any) -> Any:
        return graph.dense(graph(relax.op.reshape(graph.dense(x, 32), (2, 64))), 16)

    found = program(body, (4, 16))
    assert [layer.name for layer in found.layers] == ["matmul.0", "matmul.1"]
    view = found.values[found.layers[1].arguments[0]]
    assert (view.source, view.shape, view.root) == ("computed", (2, 64), found.layers[0].arguments[-1])


def test_a_reshaped_input_is_copied() -> None:
    """A plan binds an input's memory with the input's own shape."""
    found = program(lambda graph, x: graph.dense(graph(relax.op.reshape(x, (2, 8))), 16), (1, 4, 4))
    assert [layer.name for layer in found.layers] == ["reshape.0", "matmul.1"]
    assert found.values[found.layers[0].arguments[0]].shape == (1, 4, 4)
    assert found.values[found.layers[1].arguments[0]].shape == (2, 8)
    assert {value.shape for value in found.values if value.source == "input"} == {(1, 4, 4)}


def test_a_kernel_with_several_outputs_writes_its_last_parameters() -> None:
    def body(graph: Graph, x: Any) -> Any:
        parts = graph(relax.op.split(x, 3, axis=1))
        return [relax.TupleGetItem(parts, 2), relax.TupleGetItem(parts, 0)]

    found = program(body, (2, 12))
    (task,), (layer,) = found.tasks, found.layers
    assert task.num_outputs == 3
    assert [found.values[index].shape for index in layer.arguments] == [(2, 12), (2, 4), (2, 4), (2, 4)]
    assert found.outputs == (layer.arguments[3], layer.arguments[1])


def test_outputs_may_be_inputs_and_constants_and_there_may_be_no_layer() -> None:
    found = program(lambda graph, x, y: [y, relax.const(np.arange(3), "int64"), x, y], (2, 3), (4,), dtypes=("float32", "int32"))
    assert found.layers == ()
    assert found.tasks == ()
    values = [found.values[index] for index in found.outputs]
    assert [(each.source, each.index, each.dtype) for each in values] == [
        ("input", 1, "int32"),
        ("constant", 0, "int64"),
        ("input", 0, "float32"),
        ("input", 1, "int32"),
    ]
    np.testing.assert_array_equal(values[1].data, [0, 1, 2])


def test_every_unhandled_operation_is_listed() -> None:
    def body(graph: Graph, x: Any) -> Any:
        ordered = graph(relax.op.sort(x))
        largest = graph(relax.op.topk(ordered, 2))
        return [graph.relu(ordered), graph(relax.TupleGetItem(largest, 0))]

    with pytest.raises(ModelError, match="2 operation") as caught:
        program(body, (3, 8))
    assert "sort -> " in str(caught.value)
    assert "topk -> " in str(caught.value)
    assert "(3, 8)" in str(caught.value)


def test_a_dtype_that_no_bundle_can_hold_is_listed() -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        program(lambda graph, x: graph(relax.op.astype(x, "bfloat16")), (3, 8))


def chain(names: tuple[str, str, str], blocks: tuple[str, str] = ("inner", "outer")) -> PreparedModel:
    """(a + 1) * 2 as one kernel, under names of one's choice."""
    function, argument, variable = names
    source = te.placeholder((8, 8), name=argument)
    inner = te.compute((8, 8), lambda i, j: source[i, j] + 1.0, name=blocks[0])
    kernel = te.create_prim_func([source, te.compute((8, 8), lambda i, j: inner[i, j] * 2.0, name=blocks[1])])
    x = relax.Var(variable, relax.TensorType((8, 8), "float32"))
    builder = relax.BlockBuilder()
    symbol = builder.add_func(kernel, function)
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.call_tir(symbol, (x,), relax.TensorType((8, 8), "float32")))
        builder.emit_func_output(result)
    return PreparedModel(builder.get(), "", ())


def test_a_key_depends_on_structure_and_not_on_the_names_of_functions_and_variables() -> None:
    (one,), (other,) = extract(chain(("f", "a", "x"))).tasks, extract(chain(("fused_g3", "b", "data"))).tasks
    assert one.key == other.key
    assert (one.kind, other.kind) == ("f", "g")


def test_a_key_depends_on_the_names_of_blocks_since_traces_refer_to_them() -> None:
    (one,), (other,) = extract(chain(("f", "a", "x"))).tasks, extract(chain(("f", "a", "x"), ("add", "multiply"))).tasks
    assert one.key != other.key


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from mvcompile.testing.networks import AVX2, network, programs_of\n"
        "module = network(lambda g, x: g.relu(g.conv(x, 16, 3)), (1, 4, 6, 6))\n"
        "print(*(task.key for task in programs_of(module, AVX2).tasks))"
    )
    command = [sys.executable, "-c", code, str(ROOT), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    here = program(lambda graph, x: graph.relu(graph.conv(x, 16, 3)), (1, 4, 6, 6))
    assert done.stdout.split() == [task.key for task in here.tasks]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fused_conv2d3_add1_relu12", "conv2d_add_relu"),
        ("conv2d", "conv2d"),
        ("conv1d2", "conv1d"),
        ("max_pool2d1", "max_pool2d"),
        ("fused_conv2d_transpose4_add", "conv2d_transpose_add"),
        ("layer_norm", "layer_norm"),
        ("matmul10", "matmul"),
    ],
)
def test_a_kind_is_the_name_without_running_numbers(name: str, kind: str) -> None:
    assert _kind(name) == kind


def test_the_module_of_a_task_can_be_compiled_by_itself() -> None:
    (task,) = program(lambda graph, x: graph.relu(x), (2, 3)).tasks
    x, y = tvm.runtime.tensor(np.float32([[-1, 2, 3], [4, -5, 6]])), tvm.runtime.tensor(np.zeros((2, 3), np.float32))
    tvm.compile(task.module, target=tvm.target.Target("llvm")).mod["main"](x, y)
    np.testing.assert_array_equal(y.numpy(), [[0, 2, 3], [4, 0, 6]])
