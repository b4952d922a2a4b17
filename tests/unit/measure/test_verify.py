"""Inputs, tolerance and comparison of kernels with their reference."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, topi

from mvcompile.measure.verify import RTOL, Array, absolute_tolerance, compare, random_arguments, reduction_length
from mvcompile.testing.programs import module_of


def differs(actual: Array, reference: Array, terms: int = 1) -> bool:
    return not compare(actual, reference, RTOL, absolute_tolerance(reference, terms))[0]


def test_tolerance_grows_with_the_root_of_the_reduction_and_with_the_magnitude() -> None:
    reference = np.array([0.5, -2.0], np.float32)
    one = absolute_tolerance(reference, 1)
    assert one == pytest.approx(4 * np.finfo(np.float32).eps * 2.0)
    assert absolute_tolerance(reference, 10_000) == pytest.approx(100 * one)
    assert absolute_tolerance(reference * 8, 1) == pytest.approx(8 * one)
    assert absolute_tolerance(reference.astype(np.float64), 1) < 1e-6 * one
    assert absolute_tolerance(reference.astype(np.float16), 1) > 1000 * one


@pytest.mark.parametrize("reference", [np.zeros(0, np.float32), np.array([np.nan, np.inf], np.float32), np.ones(3, np.int64)])
def test_tolerance_of_nothing_finite_or_no_floats_is_zero(reference: Array) -> None:
    assert absolute_tolerance(reference, 100) == 0.0


@pytest.mark.parametrize("terms", [9, 147, 576, 4608])
@pytest.mark.parametrize("function", [lambda x: x, np.tanh, lambda x: np.clip(x, 0, 6)], ids=["linear", "tanh", "relu6"])
def test_any_order_of_adding_is_right_and_a_thousandth_in_one_element_is_wrong(terms: int, function: object) -> None:
    assert callable(function)
    data, weights = random_arguments([("float32", (1, terms)), ("float32", (terms, 500))], 3, weights=(1,), terms=terms)
    products = data.T * weights
    forward, backward = np.zeros(500, np.float32), np.zeros(500, np.float32)
    for one, other in zip(products, products[::-1], strict=True):
        forward, backward = forward + one, backward + other
    reference, actual = function(forward), function(backward)
    assert not np.array_equal(reference, actual)
    assert not differs(actual, reference, terms)
    sizes = np.abs(reference)
    place = np.abs(sizes - np.median(sizes[sizes > 0])).argmin()  # an element of usual size
    actual[place] *= 1.001
    assert differs(actual, reference, terms)


def test_arguments_keep_sums_in_the_range_where_activations_are_not_flat() -> None:
    shapes = [("float32", (1, 4608)), ("float32", (4608, 100))]
    scaled, plain = random_arguments(shapes, 0, weights=(1,), terms=4608), random_arguments(shapes, 0)
    assert 0.7 < np.std(scaled[0] @ scaled[1]) < 1.4
    assert np.std(plain[0] @ plain[1]) > 50
    assert np.array_equal(scaled[0], plain[0])


def test_arguments_have_their_dtypes_and_are_the_same_each_time() -> None:
    shapes = [(dtype, (4, 50)) for dtype in ("float16", "float32", "float64", "int8", "uint8", "int64", "bool")]
    arrays, again = random_arguments(shapes, 7), random_arguments(shapes, 7)
    for (dtype, shape), array, same in zip(shapes, arrays, again, strict=True):
        assert str(array.dtype) == dtype
        assert array.shape == shape
        assert np.array_equal(array, same)
        assert len(np.unique(array)) > 1
    assert set(np.unique(arrays[5])) == {0, 1}
    assert not np.array_equal(arrays[1], random_arguments(shapes, 8)[1])
    assert min(array.min() for array in random_arguments(shapes[:3], 7, positive=True)) >= 0.09


def test_special_values_must_be_where_the_reference_has_them() -> None:
    reference = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert not differs(reference.copy(), reference)
    for place, value in [(0, np.nan), (0, np.inf), (1, 1.0), (1, np.inf), (2, np.nan), (2, 1e30), (2, -np.inf), (3, np.inf)]:
        actual = reference.copy()
        actual[place] = value
        right, verification = compare(actual, reference, RTOL, 1e30)
        assert not right
        assert np.isfinite(verification.max_abs_error)  # it has to be stored as JSON


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool"])
def test_integers_and_booleans_must_be_equal(dtype: str) -> None:
    reference = np.array([0, 1, 1, 0], dtype)
    assert not differs(reference.copy(), reference)
    actual = reference.copy()
    actual[3] = 1
    right, verification = compare(actual, reference, 1.0, 1.0)
    assert not right
    assert verification.atol == verification.rtol == 0.0


def test_large_integers_that_a_float_cannot_tell_apart_differ() -> None:
    assert differs(np.array([2**62 + 1]), np.array([2**62]))


def test_reports_the_largest_errors() -> None:
    reference, actual = np.array([2.0, 0.0, 100.0]), np.array([2.5, 0.0, 101.0])
    right, verification = compare(actual, reference, 0.01, 0.5)
    assert right
    assert verification.max_abs_error == 1.0
    assert verification.max_rel_error == 0.25
    assert (verification.rtol, verification.atol) == (0.01, 0.5)
    assert not compare(actual, reference, 0.01, 0.4)[0]


def test_an_error_where_the_reference_is_zero_is_finite() -> None:
    right, verification = compare(np.array([1e-3], np.float32), np.array([0.0], np.float32), RTOL, 1e-6)
    assert not right
    assert np.isfinite(verification.max_rel_error)


def test_empty_outputs_are_equal() -> None:
    assert not differs(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))


def test_reduction_length_is_that_of_the_longest_sum_of_any_block() -> None:
    data, weight = te.placeholder((4, 36), name="data"), te.placeholder((8, 36), name="weight")
    product = topi.nn.dense(data, weight)
    assert reduction_length(module_of(data, weight, topi.nn.relu(product))) == 36
    axes = [te.reduce_axis((0, 4), name="row"), te.reduce_axis((0, 8), name="column")]
    total = te.compute((1,), lambda i: te.sum(product[axes[0], axes[1]], axis=axes), name="total")
    assert reduction_length(module_of(data, weight, total)) == 36
    assert reduction_length(module_of(data, topi.nn.relu(data))) == 1
    assert reduction_length(module_of(data, topi.nn.softmax(data))) == 36
    assert reduction_length(module_of(data, topi.cumsum(data, axis=1))) == 1
