from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

from mvcompile import traces
from mvcompile.measure.protocol import Candidate
from mvcompile.measure.traffic import estimate
from mvcompile.measure.verify import RTOL, absolute_tolerance, compare, reduction_length
from mvcompile.spaces import default_candidate, structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, AVX512, NEON, SSE, VECTOR_FMA, network, only_task, programs_of, run_kernels

HOST = detect_target()
UNROLLED, VECTORIZED = 3, 2
MEMBERS = 3
RIGHT_ORDERS = {
    "rows of columns": (0, 1, 2, 3),
    "transposed": (0, 1, 3, 2),
    "heads inside": (0, 2, 1, 3),
    "heads inside, transposed": (0, 3, 1, 2),
}
"""How the right operand [batch, heads, K, columns] may lie in memory."""


def product(batch: int, rows: int, columns: int, depth: int, epilogue: bool = True) -> Task:
    """Scores of attention: scaled, with a mask for the columns, if there is an epilogue."""

    def body(graph: Any, x: Any, y: Any, *mask: Any) -> Any:
        result = graph(relax.op.matmul(x, y))
        return graph.add(graph(relax.op.divide(result, relax.const(8.0))), mask[0]) if mask else result

    shapes = [(2, batch, rows, depth), (2, batch, depth, columns)]
    return only_task(network(body, *shapes, *([(2, 1, 1, columns)] if epilogue else [])), HOST)


def stored(order: str, columns: int) -> Task:
    """A product whose right operand lies in memory as RIGHT_ORDERS says."""
    axes, shape, k = RIGHT_ORDERS[order], (2, 3, 12, columns), te.reduce_axis((0, 12), "k")
    left, right = te.placeholder((2, 3, 11, 12), name="x"), te.placeholder([shape[axis] for axis in axes], name="y")

    def element(b: Any, h: Any, i: Any, j: Any) -> Any:
        return te.sum(left[b, h, i, k] * right[tuple((b, h, k, j)[axis] for axis in axes)], k)

    function = te.create_prim_func([left, right, te.compute((2, 3, 11, columns), element, name="product")])
    builder = relax.BlockBuilder()
    inputs = [relax.Var(each.op.name, relax.TensorType([int(n) for n in each.shape], "float32")) for each in (left, right)]
    with builder.function("main", inputs):
        with builder.dataflow():
            called = relax.call_tir(
                builder.add_func(function, "product"), inputs, relax.TensorType((2, 3, 11, columns), "float32")
            )
            output = builder.emit_output(relax.Tuple([builder.emit(called)]))
        builder.emit_func_output(output)
    return only_task(builder.get(), HOST)


def random_case(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return (int(rng.integers(1, 4)), *(int(each) for each in rng.integers(4, 50, 3)), bool(rng.integers(0, 2)))


CASES: dict[str, Any] = {
    "scores": (3, 32, 32, 16),
    "values": (3, 32, 16, 32, False),
    "nothing divides": (3, 19, 19, 13),
    "fewer columns than lanes": (2, 9, 3, 7),
    "one row": (2, 1, 32, 24),
    **{f"random {seed}": random_case(seed) for seed in range(2)},
}


def batched(task: Task, target: Any) -> list[Candidate]:
    candidates = structured_candidates(task.module, target)
    assert candidates
    assert {each.space for each in candidates} == {"batched"}
    assert len(set(candidates)) == len(candidates) < 150
    return candidates


def check(task: Task, members: int = MEMBERS) -> None:
    """Members replay, are estimated exactly, and compute what the unscheduled program does."""
    candidates = batched(task, HOST)
    places = np.linspace(0, len(candidates) - 1, min(members, len(candidates))).round().astype(int)
    schedules = [traces.replay(task.module, candidates[place].trace) for place in places]
    for schedule, place in zip(schedules, places, strict=True):
        assert traces.dump(schedule.trace) == candidates[place].trace
        moved = estimate(schedule.mod["main"], HOST)
        assert moved.exact, moved.note
        assert moved.compulsory_bytes >= sum(4 * math.prod(each.shape) for each in task.parameters)
    expected, *found = run_kernels(task, [task.module, *(each.mod for each in schedules)], HOST)
    for outputs in found:
        same, verification = compare(
            outputs[0], expected[0], RTOL, absolute_tolerance(expected[0], reduction_length(task.module))
        )
        assert same, verification


@pytest.mark.parametrize("name", CASES)
def test_members_replay_and_compute_what_the_program_does(name: str) -> None:
    check(product(*CASES[name]))


def test_one_product_without_a_batch() -> None:
    check(only_task(network(lambda g, x, y: g(relax.op.matmul(x, y)), (11, 9), (9, 19)), HOST))


def test_one_matrix_for_the_whole_batch() -> None:
    check(only_task(network(lambda g, x, y: g(relax.op.matmul(x, y)), (3, 11, 9), (1, 9, 32)), HOST))


@pytest.mark.parametrize(("order", "columns"), [*((order, 16) for order in RIGHT_ORDERS), ("heads inside, transposed", 19)])
def test_right_operands_are_copied_from_any_order(order: str, columns: int) -> None:
    task = stored(order, columns)
    check(task)
    copied = ['"CacheRead"' in each.trace or '"PadEinsum"' in each.trace for each in batched(task, HOST)]
    assert all(copied) == (order.endswith("transposed") or columns == 19)


def accumulators(schedule: Any, name: str) -> tuple[int, int]:
    """Vectors in a tile of results, and vectors in one row of it."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(schedule.get_sblock(f"{name}_update"))]
    assert int(loops[-1].kind) == VECTORIZED
    unrolled = [int(loop.extent) for loop in loops if int(loop.kind) == UNROLLED]
    return math.prod(unrolled), unrolled[-1]


@pytest.mark.parametrize(
    ("target", "columns"),
    [(AVX2, 128), (AVX2, 197), (AVX512, 128), (NEON, 197), (SSE, 128)],
    ids=["avx2", "avx2, odd", "avx512", "neon, odd", "sse"],
)
def test_tiles_fit_the_registers_and_copies_the_cache(target: Any, columns: int) -> None:
    task = product(3, columns, columns, 64)
    tiles = []
    candidates = batched(task, target)
    for candidate in candidates[:: max(1, len(candidates) // 6)]:
        schedule = traces.replay(task.module, candidate.trace)
        vectors, row = accumulators(schedule, "matmul")
        assert vectors + row + 1 <= target.vector_registers
        tiles.append(vectors)
        lanes = target.vector_bits // 32
        whole = 4 * 64 * (columns + 4 * lanes)
        assert estimate(schedule.mod["main"], target).workspace_bytes <= whole + 4 * 16 * (columns + 4 * lanes)
    assert max(tiles) >= target.vector_registers // 4


def test_a_space_offers_copies_of_panels_and_matrices_and_none() -> None:
    task = product(3, 128, 128, 64)
    candidates = batched(task, AVX2)
    moved = [estimate(traces.replay(task.module, each.trace).mod["main"], AVX2) for each in candidates]
    assert {0, 4 * 64 * 16, 4 * 64 * 128} <= {each.workspace_bytes for each in moved}
    assert default_candidate(task.module, AVX2) in candidates


OTHERS = {
    "integers": (lambda g, x, y: g(relax.op.matmul(x, y)), "int32"),
    "softmax": (lambda g, x, y: g(relax.op.nn.softmax(g.add(x, y))), "float32"),
    "largest": (lambda g, x, y: g(relax.op.max(g.add(x, y), -1)), "float32"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_are_no_products(name: str) -> None:
    body, dtype = OTHERS[name]
    for task in programs_of(network(body, (2, 16, 16), (2, 16, 16), dtypes=(dtype, dtype)), AVX2).tasks:
        assert not any(each.space == "batched" for each in structured_candidates(task.module, AVX2))


@pytest.mark.parametrize(("name", "columns"), [("avx2", 37), ("avx512", 32), ("neon", 32), ("sse", 37)])
def test_default_code_uses_the_vectors_of_the_target(name: str, columns: int) -> None:
    target, instruction = VECTOR_FMA[name]
    task = product(2, 24, columns, 16)
    module = traces.replay(task.module, default_candidate(task.module, target).trace).mod
    assembly = tvm.compile(module, target=tvm_target(target)).mod.inspect_source("asm")
    assert len(re.findall(instruction, assembly)) >= 8
