from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from mvcompile.tasks import Program
from mvcompile.testing.networks import AVX2, Array, Graph, checked_program, kinds_of, network, programs_of, run_here


def constants(program: Program) -> list[Array]:
    return [value.data for value in program.values if value.data is not None]


def test_a_normalisation_of_what_others_read_too_is_one_product_and_sum_in_the_image_s_layout() -> None:
    def body(graph: Graph, x: Any) -> list[Any]:
        x = graph.conv(x, 8, 3)
        return [graph.conv(graph.normalised(x), 8, 1), graph.conv(x, 8, 1)]

    program = checked_program(body, (1, 4, 6, 6))
    assert sorted(kinds_of(program)[:-1]) == ["conv2d"] * 3 + ["multiply_add_relu"]


def test_a_normalisation_of_a_convolution_is_in_its_weights_and_bias() -> None:
    program = checked_program(lambda graph, x: graph.normalised(graph.conv(x, 8, 3)), (1, 4, 6, 6))
    assert kinds_of(program) == ["conv2d_add_relu"]


def test_a_convolution_that_others_read_too_keeps_its_weights() -> None:
    def body(graph: Graph, x: Any) -> list[Any]:
        x = graph.conv(x, 8, 3)
        return [graph(relax.op.multiply(x, graph.weight(1, 8, 1, 1))), graph.relu(x)]

    assert kinds_of(checked_program(body, (1, 4, 6, 6))).count("conv2d") == 1


def test_a_factor_for_each_pixel_is_none_of_the_weights() -> None:
    program = checked_program(
        lambda graph, x: graph(relax.op.multiply(graph.conv(x, 8, 3), graph.weight(1, 1, 6, 6))), (1, 4, 6, 6)
    )
    assert kinds_of(program) == ["conv2d_multiply"]


def test_a_constant_that_broadcasts_the_other_operand_is_no_factor_of_it() -> None:
    def body(graph: Graph, x: Any) -> Any:
        x = graph(relax.op.multiply(x, graph.weight(1, 1, 1)))
        return graph(relax.op.multiply(x, graph.weight(4, 3, 5)))

    checked_program(body, (1, 1, 5))


@pytest.mark.parametrize("exponent", [30, -30])
def test_factors_whose_product_a_float_cannot_hold_stay_apart(exponent: int) -> None:
    def body(graph: Graph, x: Any) -> Any:
        for _ in range(2):
            x = graph(relax.op.multiply(x, relax.const(np.float32(10.0**exponent))))
        return x

    assert kinds_of(checked_program(body, (2, 3))) == ["multiply_multiply"]


def test_sums_with_constants_are_one() -> None:
    program = checked_program(lambda graph, x: graph.bias(graph.bias(x)), (2, 3))
    assert kinds_of(program) == ["add"]
    assert [value.shape for value in constants(program)] == [(3,)]


def test_integers_are_left_alone() -> None:
    def body(graph: Graph, x: Any) -> Any:
        for _ in range(2):
            x = graph(relax.op.multiply(x, relax.const(np.full((3,), 2**20), "int64")))
        return x

    program = programs_of(network(body, (2, 3), dtypes=("int64",)), AVX2)
    (found,) = run_here(program, [np.arange(6).reshape(2, 3)])
    np.testing.assert_array_equal(found, np.arange(6).reshape(2, 3) * 2**40)
