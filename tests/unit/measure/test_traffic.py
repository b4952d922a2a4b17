"""Footprint and traffic of schedules whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.script import tirx as T  # noqa: N812

from mvcompile.measure.traffic import Traffic, analyse, estimate
from mvcompile.testing.loop_nests import (
    flat_conv,
    function,
    gather,
    matmul,
    packed_conv,
    scheduled,
    strip_conv,
    with_symbolic_rows,
)
from mvcompile.types import HostTarget

LINE = 64
TARGET = HostTarget("x86_64-unknown-linux-gnu", "x86_64", "znver4", (), 2, 32 << 10, 1 << 20, 32 << 20, 512, 32, "test")


def lines_moved(func: tirx.PrimFunc, capacity_lines: int, register_bytes: int = 0) -> float:
    return analyse(func, register_bytes)[1].bytes_below(capacity_lines * LINE) / LINE


# A 32 x 32 matrix of float32 has 64 lines, a row 2.
@pytest.mark.parametrize(
    ("order", "capacity", "expected"),
    [
        # Everything fits: three matrices fetched, one written back.
        ("ijk", 80, 3 * 64 + 64),
        # B's columns (32 lines) stay for the 16 columns that share their lines, B as a whole does not: fetched for every row.
        ("ijk", 48, 64 + 32 * 64 + 64 + 64),
        # Not even a column fits: a line of B for every multiplication, A's row again for every column of C.
        ("ijk", 16, 32 * 32 * 2 + 32**3 + 64 + 64),
        # Columns of A and C are walked, and nothing of them is left when the next one starts.
        ("jki", 16, 32**3 + 32 * 32 + 2 * 32**3),
        # Rows are walked: B is fetched for every row of C, everything else once.
        ("ikj", 16, 64 + 32 * 64 + 64 + 64),
    ],
)
def test_matmul_traffic_by_hand(order: str, capacity: int, expected: int) -> None:
    assert lines_moved(function(matmul(32, 32, 32, order)), capacity) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ijk", 64 + 2 + 2 + 2),  # B, and between uses of a line of it parts of two rows of A and of C, which together are
        ("kij", 64 + 32 + 2 + 2),  # C, a column of A, and a row of B before and one after
    ],
)
def test_matmul_working_set_by_hand(order: str, expected: int) -> None:
    curve = analyse(function(matmul(32, 32, 32, order)))[1]
    assert curve.working_set_bytes(0.05) / LINE == pytest.approx(expected, abs=3)


def test_a_producer_is_read_from_the_cache_only_if_what_lies_between_fits() -> None:
    a = te.placeholder((1024,), name="A")
    b = te.compute((1024,), lambda i: a[i] + 1.0, name="B")
    func = function(scheduled([a, te.compute((1024,), lambda i: b[i] * 2.0, name="C")]))
    compulsory = 64 + (64 + 64) + (64 + 64)
    assert lines_moved(func, 128) == compulsory
    assert lines_moved(func, 120) == compulsory + 64


def conv(order: str) -> tirx.PrimFunc:
    """3x3, 512 to 512 channels, 7x7 pixels: 9.4 MB of weights in panels of 0.6 MB, 0.17 MB of padded input."""
    return function(packed_conv(7, 512, 512, 3, 1, 7, 32, order))


WEIGHTS = 3 * 3 * 512 * 512 * 4
PANEL = WEIGHTS // 16
PADDED = 9 * 9 * 512 * 4


def test_weights_that_are_streamed_once_need_no_cache_and_weights_used_again_need_it_all() -> None:
    streamed, again = estimate(conv("cyx"), TARGET), estimate(conv("yxc"), TARGET)
    assert PADDED + PANEL < streamed.footprint_bytes < PADDED + 3 * PANEL
    assert WEIGHTS <= again.footprint_bytes < 1.1 * WEIGHTS
    assert streamed.traffic_bytes < 1.5 * WEIGHTS
    assert again.traffic_bytes > 6.5 * WEIGHTS  # once for each of the seven rows
    assert again.level_bytes[2] == pytest.approx(again.compulsory_bytes, rel=0.05)


def test_a_working_set_that_l2_holds_leaves_no_footprint() -> None:
    func = function(packed_conv(14, 256, 1024, 1, 1, 14, 32, "cyx"))
    fits, smaller = estimate(func, TARGET), estimate(func, replace(TARGET, l2_bytes=128 << 10))
    data, panel = 14 * 14 * 256 * 4, 256 * 32 * 4
    assert fits.footprint_bytes == 0
    assert fits.traffic_bytes == fits.compulsory_bytes
    assert data + panel < fits.working_set_bytes < data + 4 * panel
    assert smaller.footprint_bytes == smaller.working_set_bytes == fits.working_set_bytes
    assert smaller.traffic_bytes > fits.traffic_bytes


def test_levels_are_ordered_and_the_result_is_pure() -> None:
    func = conv("yxc")
    before = tvm.ir.save_json(func)
    first = estimate(func, TARGET)
    assert first == estimate(func, TARGET)
    assert tvm.ir.save_json(func) == before
    l1, l2, llc = first.level_bytes
    assert l1 >= l2 >= llc >= first.compulsory_bytes
    assert first.traffic_bytes == l2
    assert first.exact
    assert first.note == ""


def test_a_register_tile_counts_as_nothing() -> None:
    func = function(packed_conv(7, 64, 64, 1, 1, 7, 32, "cyx"))
    data, weights = 7 * 7 * 64 * 4, 64 * 64 * 4
    held = estimate(func, TARGET)
    assert held.workspace_bytes == 0
    assert held.compulsory_bytes == data + weights + 2 * data
    small = estimate(func, replace(TARGET, vector_registers=8, vector_bits=256))
    assert small.workspace_bytes == 7 * 32 * 4
    assert small.compulsory_bytes == held.compulsory_bytes + 2 * 7 * 32 * 4


def test_a_strip_of_input_is_a_small_workspace() -> None:
    func = function(strip_conv(56, 64, 64, 4, 32))
    assert estimate(func, replace(TARGET, vector_bits=256)).workspace_bytes == 6 * 58 * 64 * 4


def test_the_last_tile_is_not_charged_for_rows_it_does_not_have() -> None:
    func = function(packed_conv(4, 64, 64, 1, 1, 3, 16, "yxc"))  # rows of 4 pixels in tiles of 3 and 1
    tiles, weights, data = 8, 256, 64
    assert lines_moved(func, 128, register_bytes=4096) == pytest.approx(tiles * weights + data + 2 * data)


def test_panels_wider_than_the_tile_are_followed_through_quotients() -> None:
    half, whole = (function(packed_conv(6, 64, 64, 1, 1, 6, 16, "yxc", panel=panel)) for panel in (32, 16))
    for capacity in (64, 128, 512):
        assert lines_moved(half, capacity, 4096) == pytest.approx(lines_moved(whole, capacity, 4096), rel=0.1)


def copied(index: Callable[[Any], Any]) -> tirx.PrimFunc:
    """B[i] = A[index(i)] for 64 float32 each."""
    a = te.placeholder((64,), name="A")
    return function(scheduled([a, te.compute((64,), lambda i: a[index(i)], name="B")]))


@pytest.mark.parametrize(
    ("index", "lines"),
    [
        (lambda i: i // 2, 2),
        (lambda i: 63 - i, 4),
        (lambda i: i % 16, 1),
        (lambda i: te.min(i + 1, 63), 4),
        (lambda i: te.max(i, 32), 2),
        (lambda i: tirx.Select(i < 32, i, 63 - i), 4),
        (lambda i: (i * 7) % 64, 4),
        (lambda i: (i + 5) // 7, 1),
        (lambda i: i.astype("int64") + tirx.const(0, "int64"), 4),
    ],
)
def test_index_forms(index: Callable[[Any], Any], lines: int) -> None:
    traffic = estimate(copied(index), TARGET)
    assert traffic.exact
    assert traffic.compulsory_bytes == (lines + 2 * 4) * LINE


def test_guards_keep_padding_inside_its_buffer() -> None:
    a = te.placeholder((8, 16), name="A")
    padded = te.compute((12, 16), lambda i, j: te.if_then_else(te.all(i >= 2, i < 10), a[i - 2, j], 0.0), name="P")
    assert estimate(function(scheduled([a, padded])), TARGET).compulsory_bytes == (8 + 2 * 12) * LINE


def test_fused_loops_over_two_layouts_stay_exact() -> None:
    a, b = te.placeholder((3072, 16), name="A"), te.placeholder((2048, 24), name="B")
    both = te.compute((49152,), lambda i: a[i // 16, i % 16] + b[i // 24, i % 24], name="C")
    traffic = estimate(function(scheduled([a, b, both])), TARGET)
    assert traffic.exact
    assert traffic.compulsory_bytes == traffic.level_bytes[0] == 4 * 3072 * LINE


def test_a_diagonal_has_as_many_lines_as_elements() -> None:
    a = te.placeholder((64, 64), name="A")
    func = function(scheduled([a, te.compute((8, 64), lambda _, i: a[i, i], name="B")]))
    assert estimate(func, TARGET).compulsory_bytes == (64 + 2 * 8 * 4) * LINE


def test_pixels_of_a_1x1_convolution_are_rows_of_a_matmul() -> None:
    flat = function(flat_conv(7, 32, 64, 1, 6, 16))  # tiles of 6 pixels in rows of 7
    rows = function(matmul(49, 64, 32, "jikIJ", {"i": 6, "j": 16}))
    for capacity in (16, 32, 64, 128):
        assert lines_moved(flat, capacity) == pytest.approx(lines_moved(rows, capacity), rel=0.05)


def test_indices_that_wrap_are_reused_after_a_period() -> None:
    # 24 lines of A, taken four at a time in a circle; the circle closes after 24 lines of A and 24 of C.
    a = te.placeholder((24, 16), name="A")
    func = function(scheduled([a, te.compute((64, 4, 16), lambda i, j, k: a[(4 * i + j) % 24, k], name="C")]))
    assert lines_moved(func, 40) == pytest.approx(256 + 2 * 256)
    assert lines_moved(func, 60) == pytest.approx(24 + 2 * 256)


@T.prim_func(private=True)
def neighbours(
    A: T.Buffer((4096,), "float32"),  # noqa: N803
    B: T.Buffer((1024,), "float32"),  # noqa: N803
    C: T.Buffer((1024,), "float32"),  # noqa: N803
) -> None:
    for i in range(1024):
        B[i] = A[i]
        C[i] = A[i + 16]


def test_accesses_that_overlap_are_counted_once() -> None:
    assert lines_moved(neighbours, 1000) == 65 + 2 * 2 * 64
    assert lines_moved(neighbours, 8) == pytest.approx(65 + 2 * 2 * 64, rel=0.01)


# P has 32 lines, C 100, D one; with 64 lines of cache, P is lost while C is written.
@T.prim_func(private=True)
def written_once_a_round(
    P: T.Buffer((512,), "float32"),  # noqa: N803
    C: T.Buffer((1600,), "float32"),  # noqa: N803
    D: T.Buffer((16,), "float32"),  # noqa: N803
) -> None:
    for _ in range(8):
        for i in range(512):
            P[i] = T.float32(1)
        for i in range(1600):
            C[i] = T.float32(1)
        for i in range(512):
            D[0] = D[0] + P[i]


@T.prim_func(private=True)
def written_twice(
    P: T.Buffer((512,), "float32"),  # noqa: N803
    C: T.Buffer((1600,), "float32"),  # noqa: N803
    D: T.Buffer((16,), "float32"),  # noqa: N803
) -> None:
    for i in range(512):
        P[i] = T.float32(1)
    for i in range(1600):
        C[i] = T.float32(1)
    for i in range(512):
        D[0] = D[0] + P[i]
    for i in range(512):
        P[i] = T.float32(2)


@pytest.mark.parametrize(
    ("func", "fetched", "written_back"),
    [
        # P is read back every round, and found by the next round's stores; all that is stored is written back every round.
        (written_once_a_round, 32 + 8 * (32 + 100 + 1), 8 * (32 + 100 + 1)),
        (written_twice, 32 + 100 + 1 + 32, 32 + 100 + 1 + 32),
    ],
)
def test_a_line_is_written_back_for_each_stay_it_was_stored_to(func: tirx.PrimFunc, fetched: int, written_back: int) -> None:
    assert lines_moved(func, 64) == pytest.approx(fetched + written_back)
    assert lines_moved(func, 140) == pytest.approx(2 * (32 + 100 + 1))


def test_data_dependent_rows_are_bounded_by_the_visits() -> None:
    traffic = estimate(gather(rows=30_000, width=64, picked=16), TARGET)
    assert not traffic.exact
    assert "depends on data" in traffic.note
    assert traffic.compulsory_bytes == (16 * 4 + 1 + 2 * 16 * 4) * LINE


@T.prim_func(private=True)
def triangle(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64, 64), "float32")) -> None:  # noqa: N803
    for i in range(64):
        for j in range(i + 1):
            B[i, j] = A[i, j] + T.float32(1)


@T.prim_func(private=True)
def halving(A: T.Buffer((64, 16), "float32"), B: T.Buffer((1,), "int32")) -> None:  # noqa: N803
    B[0] = 64
    while B[0] > 1:
        A[B[0] - 1, 0] = A[B[0] // 2, 0]
        B[0] = B[0] // 2


@pytest.mark.parametrize(
    ("func", "note", "compulsory"),
    [(triangle, "extent that varies", 3 * 256), (halving, "while loop", 2 * 64 + 2 * 1)],
)
def test_what_cannot_be_counted_is_bounded_and_said(func: tirx.PrimFunc, note: str, compulsory: int) -> None:
    traffic = estimate(func, TARGET)
    assert not traffic.exact
    assert note in traffic.note
    assert traffic.compulsory_bytes == compulsory * LINE


def test_a_function_that_cannot_be_read_needs_all_its_buffers() -> None:
    traffic = estimate(with_symbolic_rows(), TARGET)
    known = 2 * 16 * 4  # the extents that are numbers
    assert traffic == Traffic(known, known, known, 0, known, (known, known, known), False, traffic.note)
    assert "symbolic" in traffic.note
