from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te

from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime import memory


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4095, 2 * 2**20, 5 * 2**20 + 64])
def test_allocations_are_zero_and_aligned(nbytes: int) -> None:
    block = memory.allocate(nbytes)
    assert (block.size, block.any()) == (nbytes, False)
    assert nbytes == 0 or memory.address(block) % (4096 if nbytes < 2 * 2**20 else 2 * 2**20) == 0


@pytest.mark.parametrize("nbytes", [4096, 4 * 2**20])
def test_allocations_are_private_which_huge_pages_need(nbytes: int) -> None:
    block = memory.allocate(nbytes)
    ranges = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [
        kind
        for kind, (begin, end) in ((kind, (int(each, 16) for each in span.split("-"))) for span, kind in ranges)
        if begin <= memory.address(block) < end
    ]
    assert found == ["rw-p"]


def test_a_copy_is_aligned_read_only_and_the_same() -> None:
    data = bytes(range(256)) * 3
    copy = memory.copied(memoryview(data)[64:])
    assert copy.readonly
    assert bytes(copy) == data[64:]
    assert memory.address(np.frombuffer(copy, np.uint8)) % 64 == 0


@pytest.mark.parametrize("nbytes", [2**60, 2**63 - 1])
def test_more_memory_than_there_is(nbytes: int) -> None:
    with pytest.raises(EnvironmentProblem, match=f"no memory for {nbytes} bytes"):
        memory.allocate(nbytes)


def test_scalars_and_every_dtype() -> None:
    for dtype in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
    ):
        array = memory.allocate_array(dtype, ())
        tensor = memory.bindable(array)
        assert tensor is not None
        assert (str(tensor.dtype), tensor.shape) == (dtype, ())


def test_kernels_take_a_dimension_of_one_with_any_stride() -> None:
    x = te.placeholder((1, 16), name="x")
    function = te.create_prim_func([x, te.compute((1, 16), lambda i, j: x[i, j] * 2.0, name="y")])
    kernel = tvm.compile(function, target={"kind": "llvm", "num-cores": 1})["main"]
    wide = memory.allocate_array("float32", (4, 256))
    wide[:, :16] = np.arange(16)
    row, out = wide[:1, :16], memory.allocate_array("float32", (1, 16))
    assert row.strides == (1024, 4)
    kernel(memory.bindable(row), memory.tensor(out))
    np.testing.assert_array_equal(out[0], 2 * np.arange(16))
