from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir.schedule import Schedule
from tvm_ffi import structural_equal

from mvcompile import spaces, traces
from mvcompile.errors import EnvironmentProblem
from mvcompile.frontend.packing import vector_lanes
from mvcompile.measure.protocol import Candidate
from mvcompile.measure.traffic import estimate
from mvcompile.measure.verify import RTOL, absolute_tolerance, compare, reduction_length
from mvcompile.spaces import default_candidate, fallback_candidates, structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, VECTOR_FMA, Graph, network, only_task, programs_of, run_kernels
from mvcompile.types import HostTarget

Body = Callable[..., Any]
Shapes = list[tuple[int, ...]]
SAMPLES = 2
REPLAYED = 5
WHOLE = ("3x3", "1 row", "5 rows")
"""Spaces whose every member is replayed; of the others, `REPLAYED`."""
UNROLLED, VECTORIZED = 3, 2

HOST = detect_target()


def conv(columns: int, kernel: int, shape: tuple[int, ...], epilogue: bool = True, **options: Any) -> tuple[Body, Shapes]:
    """A convolution of an NCHW image, with a bias, a residual and an activation if there is an epilogue."""
    extents = [_extent(each, kernel, **options) for each in shape[2:]]
    residual = (shape[0], columns, *extents)

    def body(graph: Graph, x: Any, *others: Any) -> Any:
        result = graph.conv(x, columns, kernel, **options)
        return graph.relu(graph.add(graph.bias(result), others[0])) if others else result

    return body, [shape, residual] if epilogue else [shape]


def _extent(extent: int, kernel: int, stride: int = 1, padding: int | None = None, dilation: int = 1, groups: int = 1) -> int:
    around = dilation * (kernel // 2) if padding is None else padding
    return (extent + 2 * around - dilation * (kernel - 1) - 1) // stride + 1


def dense(rows: int, columns: int, epilogue: bool = True, depth: int = 12) -> tuple[Body, Shapes]:
    def body(graph: Graph, x: Any, *others: Any) -> Any:
        result = graph.dense(x, columns)
        return graph.relu(graph.add(graph.bias(result), others[0])) if others else result

    return body, [(rows, depth), (rows, columns)] if epilogue else [(rows, depth)]


STRUCTURED = {
    "1x1": conv(32, 1, (1, 8, 9, 10)),
    "1x1, no epilogue": conv(32, 1, (1, 8, 9, 10), epilogue=False),
    "1x1, stride 2": conv(16, 1, (1, 8, 9, 10), stride=2),
    "3x3": conv(32, 3, (1, 8, 9, 10)),
    "3x3, no epilogue": conv(16, 3, (1, 8, 6, 7), epilogue=False),
    "3x3, stride 2": conv(16, 3, (1, 8, 11, 10), stride=2),
    "3x3, dilation": conv(16, 3, (1, 8, 9, 9), dilation=2),
    "7x7, stride 2, 3 channels": conv(16, 7, (1, 3, 20, 22), stride=2, epilogue=False),
    "5x5, 24 columns": conv(24, 5, (1, 8, 8, 8)),
    "groups": conv(32, 3, (1, 16, 7, 7), groups=2),
    "20 columns": conv(20, 3, (1, 8, 7, 7)),
    "13 columns": conv(13, 3, (1, 3, 5, 5), epilogue=False),
    "56 columns, wide": conv(56, 3, (1, 4, 3, 70)),
    "34 columns in each of 4 groups": conv(136, 1, (1, 32, 5, 5), groups=4),
    "20 columns in each of 2 groups": conv(40, 3, (1, 16, 7, 7), groups=2, epilogue=False),
    "20 columns, long reduction": conv(20, 3, (1, 128, 6, 7)),
    "width 111": conv(16, 3, (1, 3, 3, 111), epilogue=False),
    "width 55": conv(8, 3, (1, 4, 3, 55)),
    "width 27": conv(8, 3, (1, 4, 4, 27)),
    "width 13": conv(16, 3, (1, 4, 13, 13)),
    "width 7": conv(16, 3, (1, 8, 7, 7)),
    "batch": conv(16, 3, (2, 8, 6, 6)),
    "3x3, long reduction": conv(16, 3, (1, 128, 6, 7)),
    "one pixel": conv(64, 3, (1, 8, 3, 3), padding=0),
    "1 row": dense(1, 1000),
    "1 row, 24 columns": dense(1, 24, epilogue=False),
    "5 rows": dense(5, 48),
    "5 rows, 24 columns": dense(5, 24, epilogue=False),
    "49 rows": dense(49, 40),
    "1 row, 10 columns": dense(1, 10),
    "5 rows, 27 columns": dense(5, 27, epilogue=False),
    "49 rows, 56 columns": dense(49, 56),
    "9 rows, 20 columns, long reduction": dense(9, 20, depth=1024),
    "9 rows, long reduction": dense(9, 32, depth=1024),
    "128 rows": dense(128, 1000, epilogue=False),
}


def dense_candidates(module: tvm.IRModule, target: HostTarget) -> list[Candidate]:
    return [candidate for candidate in structured_candidates(module, target) if candidate.space == "dense"]


def sample(candidates: list[Candidate], count: int) -> list[Candidate]:
    """`count` of them, the first and the last included."""
    places = np.linspace(0, len(candidates) - 1, min(count, len(candidates))).round().astype(int)
    return [candidates[place] for place in places]


def accumulators(schedule: Schedule, operator: str) -> tuple[int, int]:
    """Vectors in a tile of results, and vectors in one row of it."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(schedule.get_sblock(f"{operator}_update"))]
    assert int(loops[-1].kind) == VECTORIZED
    unrolled = [int(loop.extent) for loop in loops if int(loop.kind) == UNROLLED]
    return math.prod(unrolled), unrolled[-1]


def registers(schedule: Schedule, operator: str) -> int:
    """What a tile needs: accumulators, a row of the panel (one vector at a time if no other row needs it again), a broadcast."""
    vectors, row = accumulators(schedule, operator)
    return vectors + (row if vectors > row else 1) + 1


def check_outputs(task: Task, scheduled: list[tvm.IRModule]) -> None:
    """Every schedule of the task computes what the unscheduled program does."""
    expected, *found = run_kernels(task, [task.module, *scheduled], HOST)
    terms = max(2, reduction_length(task.module))
    for outputs in found:
        for actual, wanted in zip(outputs, expected, strict=True):
            same, verification = compare(actual, wanted, RTOL, absolute_tolerance(wanted, terms))
            assert same, verification


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_members_of_a_structured_space_replay_fit_the_registers_and_are_right(name: str) -> None:
    body, shapes = STRUCTURED[name]
    task = only_task(network(body, *shapes), HOST)
    candidates = dense_candidates(task.module, HOST)
    assert candidates
    assert len({candidate.trace for candidate in candidates}) == len(candidates)
    operator = "packed_matmul" if task.kind.startswith("matmul") else "packed_conv2d"
    width = task.parameters[1].shape[-1]
    for candidate in candidates if name in WHOLE else sample(candidates, REPLAYED):
        schedule = traces.replay(task.module, candidate.trace)
        assert traces.dump(schedule.trace) == candidate.trace
        assert registers(schedule, operator) <= HOST.vector_registers
        traffic = estimate(schedule.mod["main"], HOST)
        assert traffic.exact, traffic.note
        # The estimate knows every byte that must be moved: arguments are read once, results written.
        assert traffic.traffic_bytes >= sum(4 * math.prod(each.shape) for each in task.parameters)
    assert width % min(width, vector_lanes(HOST)) == 0
    chosen = [traces.replay(task.module, candidate.trace) for candidate in sample(candidates, SAMPLES)]
    again = traces.replay(task.module, traces.dump(chosen[0].trace))
    assert structural_equal(again.mod["main"], chosen[0].mod["main"])
    check_outputs(task, [schedule.mod for schedule in chosen])


def test_a_space_offers_dataflows_orders_and_tiles() -> None:
    body, shapes = STRUCTURED["3x3"]
    task = only_task(network(body, *shapes), AVX2)
    candidates = dense_candidates(task.module, AVX2)
    gathered = [candidate for candidate in candidates if '"ReIndex"' in candidate.trace]
    assert 0 < len(gathered) < len(candidates)
    assert len(candidates) > 20
    schedules = [traces.replay(task.module, candidate.trace) for candidate in sample(candidates, 16)]
    assert {accumulators(schedule, "packed_conv2d")[1] for schedule in schedules} == {1, 2}
    assert max(accumulators(schedule, "packed_conv2d")[0] for schedule in schedules) >= 12


def test_windows_are_gathered_once_for_all_columns_or_not_at_all() -> None:
    """A grouped convolution reads other channels for other columns: gathered, each column would have its own copy."""
    for name in ("3x3", "groups", "7x7, stride 2, 3 channels"):
        body, shapes = STRUCTURED[name]
        task = only_task(network(body, *shapes), AVX2)
        _, height, width, _ = task.parameters[-1].shape
        window = math.prod(task.parameters[1].shape[1:-1])
        members = sample(dense_candidates(task.module, AVX2), REPLAYED)
        spaces_taken = [estimate(traces.replay(task.module, each.trace).mod["main"], AVX2).workspace_bytes for each in members]
        assert max(spaces_taken) <= 4 * (height * width * window + math.prod(task.parameters[-1].shape))


@pytest.mark.parametrize(
    "name", ["13 columns", "34 columns in each of 4 groups", "20 columns, long reduction", "49 rows, 56 columns"]
)
def test_columns_that_vectors_do_not_divide_are_multiplied_in_whole_vectors(name: str) -> None:
    body, shapes = STRUCTURED[name]
    task = only_task(network(body, *shapes), AVX2)
    operator = "packed_matmul" if task.kind.startswith("matmul") else "packed_conv2d"
    for candidate in sample(dense_candidates(task.module, AVX2), REPLAYED):
        schedule = traces.replay(task.module, candidate.trace)
        lane = schedule.get_loops(schedule.get_sblock(f"{operator}_update"))[-1]
        assert int(schedule.get(lane).extent) == vector_lanes(AVX2)


def test_long_reductions_may_be_cut_into_blocks() -> None:
    for name, cut in (("9 rows, long reduction", True), ("3x3, long reduction", True), ("5 rows", False)):
        body, shapes = STRUCTURED[name]
        candidates = structured_candidates(only_task(network(body, *shapes), AVX2).module, AVX2)
        assert any(candidate.trace.count('"SampleCategorical"') == 2 for candidate in candidates) == cut


def test_a_trace_that_does_not_fit_is_refused() -> None:
    cases = [STRUCTURED[name] for name in ("1x1", "1 row")]
    task, other = (only_task(network(body, *shapes), AVX2) for body, shapes in cases)
    with pytest.raises(Exception, match="block"):
        traces.replay(other.module, structured_candidates(task.module, AVX2)[0].trace)


NOT_STRUCTURED = {
    "depthwise with two results a channel": conv(32, 3, (1, 16, 9, 10), groups=16),
    "depthwise, 13 channels": conv(13, 3, (1, 13, 9, 10), groups=13, stride=2),
    "gate": (
        lambda g, x, y: g(
            relax.op.multiply(g(relax.op.nn.relu(x)), g(relax.op.sigmoid(g.conv(g(relax.op.mean(y, [2, 3], True)), 16, 1))))
        ),
        [(1, 16, 5, 6), (1, 16, 5, 6)],
    ),
    "gate of 12 channels": (
        lambda g, x, y: g(relax.op.multiply(x, g(relax.op.sigmoid(g.conv(g(relax.op.mean(y, [2, 3], True)), 12, 1))))),
        [(1, 12, 5, 6), (1, 12, 5, 6)],
    ),
    "product spread over a batch": (lambda g, x: g.add(g.dense(x, 16), g.weight(2, 4, 16)), [(4, 12)]),
    "max pool": (lambda g, x: g(relax.op.nn.max_pool2d(x, (3, 3), (2, 2), 1, layout="NHWC")), [(1, 9, 10, 16)]),
    "average pool": (lambda g, x: g(relax.op.nn.avg_pool2d(x, (3, 3), (1, 1), 1)), [(1, 5, 9, 10)]),
    "mean of an image": (lambda g, x: g(relax.op.mean(x, [1, 2], True)), [(1, 7, 7, 24)]),
    "mean of a row": (lambda g, x: g(relax.op.mean(x, -1)), [(3, 4, 32)]),
    "sum": (lambda g, x: g(relax.op.sum(x)), [(3, 4, 16)]),
    "variance": (lambda g, x: g(relax.op.variance(x, [0, 1])), [(3, 16)]),
    "softmax": (lambda g, x: g(relax.op.nn.softmax(x)), [(3, 4, 32)]),
    "softmax, odd": (lambda g, x: g(relax.op.nn.softmax(x, axis=1)), [(3, 7, 5)]),
    "layer norm": (lambda g, x: g(relax.op.nn.layer_norm(x, g.weight(24), g.weight(24), axes=[-1])), [(1, 6, 24)]),
    "concatenation": (lambda g, x, y: g(relax.op.concat([x, y], 3)), [(1, 3, 5, 16), (1, 3, 5, 8)]),
    "concatenation, odd": (lambda g, x, y: g(relax.op.concat([x, y], 3)), [(1, 3, 5, 3), (1, 3, 5, 4)]),
    "transpose": (lambda g, x: g(relax.op.permute_dims(x, [0, 2, 3, 1])), [(1, 24, 6, 10)]),
    "transpose, back": (lambda g, x: g(relax.op.permute_dims(x, [0, 3, 1, 2])), [(1, 7, 5, 16)]),
    "sum and activation": (lambda g, x, y: g.relu(g.add(x, y)), [(2, 5, 16), (2, 5, 16)]),
    "error function": (lambda g, x: g(relax.op.erf(x)), [(3, 5)]),
    "batch of products": (lambda g, x, y: g(relax.op.matmul(x, y)), [(2, 6, 8), (2, 8, 16)]),
    "batch of odd products": (lambda g, x, y: g(relax.op.matmul(x, y)), [(2, 5, 7), (2, 7, 3)]),
    "transposed convolution": (
        lambda g, x: g(relax.op.nn.conv2d_transpose(x, g.weight(4, 8, 2, 2), strides=2)),
        [(1, 4, 5, 5)],
    ),
    "resize": (lambda g, x: g(relax.op.image.resize2d(x, (10, 12), method="linear")), [(1, 4, 5, 6)]),
    "padding": (lambda g, x: g(relax.op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])), [(1, 3, 4, 5)]),
    "split": (lambda g, x: g(relax.op.split(x, 3, axis=1)), [(2, 24)]),
    "scalars": (lambda g, x, y: g.add(x, y), [(), ()]),
    "scatter": (
        lambda g, x: g(relax.op.scatter_elements(x, relax.const(np.zeros((2, 8)), "int64"), g.weight(2, 8))),
        [(5, 8)],
    ),
    "empty": (lambda g, x: g.relu(x), [(0, 4)]),
}
NOT_FLOAT = {
    "rows of a table": (lambda g, x: g(relax.op.take(g.weight(9, 16), x, axis=0)), [(2, 3)], "int64"),
    "largest": (lambda g, x: g(relax.op.argmax(x, axis=-1)), [(3, 16)], "float32"),
    "integer sum": (lambda g, x: g(relax.op.sum(x, 1)), [(3, 32)], "int64"),
    "integer product": (lambda g, x: g(relax.op.matmul(x, relax.const(np.ones((8, 16)), "int32"))), [(3, 8)], "int32"),
    "bytes": (lambda g, x: g(relax.op.maximum(x, relax.const(3, "int8"))), [(3, 32)], "int8"),
    "cast": (lambda g, x: g(relax.op.astype(x, "float32")), [(3, 32)], "uint8"),
    "booleans": (lambda g, x: g(relax.op.logical_not(x)), [(3, 16)], "bool"),
    "double precision": (lambda g, x: g(relax.op.matmul(x, relax.const(np.ones((8, 16)), "float64"))), [(3, 8)], "float64"),
}
BATCHED = ("batch of products", "batch of odd products")
"""What the space of products knows: the default without it, which stands in for it, is right, too."""
GATES = ("gate", "gate of 12 channels")
"""What comes before the product is in a structured space."""
AS_THEY_ARE = ("scalars", "scatter")
"""Programs without loops that could be arranged."""


def check_default(name: str, task: Task) -> None:
    scheduled = []
    for candidate in dict.fromkeys([default_candidate(task.module, HOST), fallback_candidates(task.module, HOST)[0]]):
        schedule = traces.replay(task.module, candidate.trace)
        assert traces.dump(schedule.trace) == candidate.trace
        scheduled.append(schedule.mod)
    check_outputs(task, scheduled)


@pytest.mark.parametrize("name", NOT_STRUCTURED)
def test_the_default_schedule_is_right(name: str) -> None:
    body, shapes = NOT_STRUCTURED[name]
    for task in programs_of(network(body, *shapes), HOST).tasks:
        assert structured_candidates(task.module, HOST) == [] or name in (*GATES, *BATCHED)
        check_default(name, task)


@pytest.mark.parametrize("name", NOT_FLOAT)
def test_the_default_schedule_of_other_dtypes_is_right(name: str) -> None:
    body, shapes, dtype = NOT_FLOAT[name]
    for task in programs_of(network(body, *shapes, dtypes=(dtype,)), HOST).tasks:
        check_default(name, task)


@pytest.mark.parametrize("name", ["1x1", "3x3", "width 13", "20 columns", "34 columns in each of 4 groups", "1 row"])
def test_the_default_of_a_dense_operator_is_a_member_of_its_space(name: str) -> None:
    body, shapes = STRUCTURED[name]
    task = only_task(network(body, *shapes), AVX2)
    default = default_candidate(task.module, AVX2)
    assert default.space == "dense"
    assert default in structured_candidates(task.module, AVX2)


LARGE = {
    "depthwise": conv(32, 3, (1, 32, 112, 112), groups=32),
    "max pool": (lambda g, x: g(relax.op.nn.max_pool2d(x, (3, 3), (2, 2), 1, layout="NHWC")), [(1, 112, 112, 64)]),
    "mean of an image": (lambda g, x: g(relax.op.mean(x, [1, 2], True)), [(1, 7, 7, 2048)]),
    "layer norm": (lambda g, x: g(relax.op.nn.layer_norm(x, g.weight(768), g.weight(768), axes=[-1])), [(1, 128, 768)]),
    "softmax": (lambda g, x: g(relax.op.nn.softmax(x)), [(12, 128, 128)]),
    "concatenation": (lambda g, x, y: g(relax.op.concat([x, y], 3)), [(1, 28, 28, 128), (1, 28, 28, 32)]),
    "batch of products": (lambda g, x, y: g(relax.op.matmul(x, y)), [(12, 128, 64), (12, 64, 128)]),
    "transpose": (lambda g, x: g(relax.op.permute_dims(x, [0, 2, 3, 1])), [(1, 128, 12, 64)]),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_programs_run_in_parallel_and_in_vectors_by_default(name: str) -> None:
    body, shapes = LARGE[name]
    task = only_task(network(body, *shapes), AVX2) if name != "transpose" else programs_of(network(body, *shapes), AVX2).tasks[0]
    schedule = traces.replay(task.module, default_candidate(task.module, AVX2).trace)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    kinds = [{int(schedule.get(loop).kind) for loop in schedule.get_loops(block)} for block in blocks]
    assert any(VECTORIZED in each for each in kinds)
    elements = [math.prod(int(schedule.get(loop).extent) for loop in schedule.get_loops(block)) for block in blocks]
    assert 1 in kinds[elements.index(max(elements))]


def test_small_programs_do_not_pay_for_threads() -> None:
    (task,) = programs_of(network(lambda g, x: g.relu(x), (8, 32)), AVX2).tasks
    assert '"Parallel"' not in default_candidate(task.module, AVX2).trace


def test_a_failed_primitive_leaves_the_program_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sch: Schedule, target: HostTarget) -> Schedule:
        sch.get_sblock("T_relu")
        raise RuntimeError("a check inside a primitive failed")

    monkeypatch.setattr(spaces._module("default"), "schedule", fail)
    (task,) = programs_of(network(lambda g, x: g.relu(x), (8, 32)), AVX2).tasks
    candidate = default_candidate(task.module, AVX2)
    assert structural_equal(traces.replay(task.module, candidate.trace).mod["main"], task.module["main"])


def test_a_missing_space_is_a_broken_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spaces, "__file__", str(tmp_path / "package" / "spaces.py"))
    with pytest.raises(EnvironmentProblem, match=r"'unheard-of'.*reinstall"):
        spaces._module("unheard-of")


@pytest.mark.parametrize("case", ["3x3", "5 rows"])
@pytest.mark.parametrize("name", VECTOR_FMA)
def test_candidates_use_the_vectors_of_the_target(name: str, case: str) -> None:
    target, instruction = VECTOR_FMA[name]
    body, shapes = STRUCTURED[case]
    task = only_task(network(body, *shapes), target)
    candidates = dense_candidates(task.module, target)
    assert default_candidate(task.module, target) in candidates
    functions = {}
    for index, candidate in enumerate(sample(candidates, SAMPLES)):
        schedule = traces.replay(task.module, candidate.trace)
        assert registers(schedule, "packed_matmul" if case == "5 rows" else "packed_conv2d") <= target.vector_registers
        functions[f"f{index}"] = schedule.mod["main"].with_attr("global_symbol", f"f{index}")
    assembly = tvm.compile(tvm.IRModule(functions), target=tvm_target(target)).mod.inspect_source("asm")
    for symbol in functions:
        # A parallel loop's body is a function of its own; between two symbols lies the code of the first.
        assert symbol in assembly
    assert len(re.findall(instruction, assembly)) >= 2 * SAMPLES
