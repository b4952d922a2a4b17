from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import te

from mvcompile.frontend.packing import pack_columns, packed_conv2d, packed_matmul, panel_width, vector_lanes
from mvcompile.testing.networks import AVX2, AVX512, NEON, SSE
from mvcompile.types import HostTarget

Array = NDArray[Any]
TARGETS = {"avx2": AVX2, "avx512": AVX512, "neon": NEON, "sse": SSE}


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def compute(result: te.Tensor, placeholders: Sequence[te.Tensor], *inputs: Array) -> Array:
    """`result` of the unscheduled program."""
    module = tvm.IRModule({"main": te.create_prim_func([*placeholders, result]).with_attr("global_symbol", "main")})
    output = np.full([int(extent) for extent in result.shape], 77, np.float32)
    tensors = [tvm.runtime.tensor(array) for array in (*inputs, output)]
    tvm.compile(module, target=tvm.target.Target("llvm")).mod["main"](*tensors)
    return tensors[-1].numpy()


def numpy_conv2d(
    data: Array, weight: Array, strides: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Array:
    """NHWC and HWIO, in float64."""
    top, left, bottom, right = padding
    padded = np.pad(data.astype(np.float64), [(0, 0), (top, bottom), (left, right), (0, 0)])
    height, width = (
        (padded.shape[axis + 1] - dilation[axis] * (weight.shape[axis] - 1) - 1) // strides[axis] + 1 for axis in (0, 1)
    )
    split = weight.astype(np.float64).reshape(*weight.shape[:3], groups, -1)
    result = np.zeros((len(data), height, width, groups, split.shape[-1]))
    for y, x in np.ndindex(*weight.shape[:2]):
        rows = slice(y * dilation[0], y * dilation[0] + (height - 1) * strides[0] + 1, strides[0])
        columns = slice(x * dilation[1], x * dilation[1] + (width - 1) * strides[1] + 1, strides[1])
        window = padded[:, rows, columns].reshape(*result.shape[:3], groups, -1)
        result += np.einsum("nhwgc,cgo->nhwgo", window, split[y, x])
    return result.reshape(*result.shape[:3], -1)


@pytest.mark.parametrize("rows", [1, 49])
@pytest.mark.parametrize("name", TARGETS)
def test_a_panel_is_whole_vectors_wastes_less_than_one_tile_and_leaves_registers_for_a_row(name: str, rows: int) -> None:
    target = TARGETS[name]
    lanes = vector_lanes(target)
    for columns in range(1, 1001):
        width = panel_width(columns, rows, target)
        assert width % lanes == 0
        if columns % (2 * lanes) == 0:
            assert columns % width == 0
        assert width > lanes or columns <= lanes
        assert -columns % width < max(2 * lanes, columns / 2)
        vectors = width // lanes
        # Accumulators of a row, the row of the panel (one vector at a time where no other row needs it again), a broadcast.
        assert vectors + (vectors if rows > 1 else 1) + 1 <= target.vector_registers


@pytest.mark.parametrize(
    ("target", "columns", "rows", "width"),
    [
        (AVX2, 64, 49, 16),
        (AVX2, 24, 49, 24),
        (AVX2, 40, 49, 40),
        (AVX2, 8, 49, 8),
        (AVX2, 20, 49, 24),
        (AVX2, 13, 49, 16),
        (AVX2, 34, 49, 40),  # 48 would leave a third of the work unused
        (AVX2, 56, 49, 16),  # seven vectors: one at a time is slower than eight in twos
        (AVX2, 136, 49, 24),  # as many as with two vectors, which load more
        (AVX2, 1024, 1, 64),  # a single row: as many independent accumulators as there are
        (AVX2, 1000, 1, 40),
        (AVX512, 64, 49, 32),
        (AVX512, 48, 49, 48),
        (AVX512, 24, 49, 32),
        (AVX512, 13, 49, 16),
        (NEON, 64, 49, 8),
        (NEON, 12, 49, 12),
        (NEON, 6, 49, 8),
    ],
)
def test_panel_width(target: HostTarget, columns: int, rows: int, width: int | None) -> None:
    assert panel_width(columns, rows, target) == width


def test_vector_lanes_count_elements_of_the_dtype() -> None:
    assert [vector_lanes(AVX2, dtype) for dtype in ("float32", "float64", "int8")] == [8, 4, 32]


@pytest.mark.parametrize(
    ("shape", "width", "groups"),
    [
        ((3, 3, 5, 32), 16, 1),
        ((1, 1, 7, 24), 8, 1),
        ((6, 16), 16, 1),
        ((6, 20), 8, 1),
        ((3, 1, 5, 40), 8, 4),
        ((1, 1, 5, 32), 8, 2),
    ],
)
def test_panels_hold_each_group_s_weight_in_the_order_it_is_read_and_zeros(
    shape: tuple[int, ...], width: int, groups: int
) -> None:
    weight, used = random(*shape), shape[-1] // groups
    panels = pack_columns(weight, width, groups)
    assert panels.shape == (groups * -(-used // width), *shape[:-1], width)
    assert panels.flags.c_contiguous
    filled = np.concatenate(list(panels), axis=-1).reshape(*shape[:-1], groups, -1)
    np.testing.assert_array_equal(filled[..., :used].reshape(shape), weight)
    assert not filled[..., used:].any()


@pytest.mark.parametrize(
    ("data", "weight", "strides", "padding", "dilation", "groups"),
    [
        pytest.param((1, 5, 6, 3), (1, 1, 3, 8), (1, 1), (0, 0, 0, 0), (1, 1), 1, id="pointwise"),
        pytest.param((2, 6, 5, 4), (3, 3, 4, 16), (1, 1), (1, 1, 1, 1), (1, 1), 1, id="batch"),
        pytest.param((1, 7, 8, 3), (3, 3, 3, 8), (2, 2), (0, 0, 1, 1), (1, 1), 1, id="strides, padding at one end"),
        pytest.param((1, 9, 4, 2), (3, 1, 2, 8), (1, 2), (2, 0, 1, 0), (1, 1), 1, id="unequal kernel, strides and padding"),
        pytest.param((1, 8, 9, 2), (3, 3, 2, 8), (1, 1), (2, 2, 2, 2), (2, 2), 1, id="dilation"),
        pytest.param((1, 5, 5, 6), (3, 3, 3, 16), (1, 1), (1, 1, 1, 1), (1, 1), 2, id="groups"),
        pytest.param((1, 9, 9, 8), (3, 3, 2, 32), (2, 2), (1, 0, 0, 1), (1, 2), 4, id="everything"),
        pytest.param((1, 3, 3, 4), (3, 3, 4, 8), (1, 1), (0, 0, 0, 0), (1, 1), 1, id="one pixel"),
        pytest.param((1, 4, 3, 5), (3, 3, 5, 13), (1, 1), (1, 1, 1, 1), (1, 1), 1, id="columns that panels do not divide"),
        pytest.param((1, 4, 3, 6), (1, 1, 2, 36), (1, 1), (0, 0, 0, 0), (1, 1), 3, id="groups that panels do not divide"),
    ],
)
def test_a_packed_convolution_computes_what_numpy_does(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
) -> None:
    image, kernel = random(*data), random(*weight)
    panels = pack_columns(kernel, 8, groups)
    inputs = te.placeholder(data, name="data"), te.placeholder(panels.shape, name="weight")
    result = packed_conv2d(*inputs, list(strides), list(padding), list(dilation), groups, weight[-1])
    expected = numpy_conv2d(image, kernel, strides, padding, dilation, groups)
    np.testing.assert_allclose(compute(result, inputs, image, panels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [24, 21])
@pytest.mark.parametrize("data", [(5, 7), (1, 9), (2, 3, 4)])
def test_a_packed_product_computes_what_numpy_does(data: tuple[int, ...], columns: int) -> None:
    left, right = random(*data), random(data[-1], columns)
    panels = pack_columns(right, 8)
    inputs = te.placeholder(data, name="data"), te.placeholder(panels.shape, name="weight")
    product = compute(packed_matmul(*inputs, columns), inputs, left, panels)
    np.testing.assert_allclose(product, left @ right, rtol=1e-4, atol=1e-5)
