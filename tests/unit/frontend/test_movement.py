from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from mvcompile.testing.networks import Graph, checked_program, kinds_of


def shuffled(graph: Graph, x: Any, groups: int) -> Any:
    batch, channels, height, width = (int(extent) for extent in x.ty.shape)
    x = graph(relax.op.reshape(x, (batch, groups, channels // groups, height, width)))
    x = graph(relax.op.permute_dims(x, [0, 2, 1, 3, 4]))
    return graph(relax.op.reshape(x, (batch, channels, height, width)))


def test_an_exchange_of_channels_between_groups_is_one_kernel() -> None:
    program = checked_program(lambda g, x: g.conv(shuffled(g, g.conv(x, 12, 1), 3), 8, 1), (2, 4, 5, 6))
    assert kinds_of(program) == ["conv2d", "transpose", "conv2d"]


def test_a_fully_connected_layer_takes_a_channels_last_image_as_it_is() -> None:
    program = checked_program(lambda g, x: g.dense(g(relax.op.reshape(g.conv(x, 8, 3), (2, 240))), 16), (2, 4, 5, 6))
    assert kinds_of(program) == ["conv2d", "matmul"]


def test_a_matrix_product_of_rows_of_an_image_keeps_its_weights() -> None:
    program = checked_program(lambda g, x: g.dense(g(relax.op.reshape(g.conv(x, 8, 3), (16, 30))), 16), (2, 4, 5, 6))
    assert kinds_of(program) == ["conv2d", "transpose", "matmul"]


def test_a_transpose_there_and_back_is_nothing() -> None:
    def body(graph: Graph, x: Any) -> Any:
        x = graph(relax.op.permute_dims(graph.relu(x), [2, 0, 1]))
        return graph.relu(graph(relax.op.permute_dims(x, [1, 2, 0])))

    assert kinds_of(checked_program(body, (2, 3, 4))) == ["relu_relu"]


def test_movement_of_constants_is_done_ahead() -> None:
    def body(graph: Graph, x: Any) -> Any:
        weight = graph(relax.op.permute_dims(graph(relax.op.reshape(graph.weight(12), (4, 3)))))
        return graph(relax.op.add(x, weight))

    program = checked_program(body, (3, 4))
    assert kinds_of(program) == ["add"]
    (value,) = [value.data for value in program.values if value.data is not None]
    assert value.shape == (3, 4)
    assert np.unique(value).size == 12
