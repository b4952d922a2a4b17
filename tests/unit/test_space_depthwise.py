from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from mvcompile import traces
from mvcompile.measure.traffic import estimate
from mvcompile.measure.verify import RTOL, absolute_tolerance, compare, reduction_length
from mvcompile.spaces import default_candidate, structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, AVX512, NEON, SSE, VECTOR_FMA, Graph, network, only_task, programs_of, run_kernels

HOST = detect_target()
UNROLLED, VECTORIZED = 3, 2
MEMBERS = 4


def depthwise(channels: int, height: int, width: int, kernel: int, epilogue: bool = True, batch: int = 1, **options: Any) -> Any:
    def body(graph: Graph, x: Any) -> Any:
        result = graph.conv(x, channels, kernel, groups=channels, **options)
        return graph.relu(graph.bias(result)) if epilogue else result

    return network(body, (batch, channels, height, width))


def random_case(seed: int) -> tuple[Any, ...]:
    """Channels that some vector divides; extents, window, stride, padding and dilation at random."""
    rng = np.random.default_rng(seed)
    kernel, dilation = int(rng.choice([1, 2, 3, 5])), int(rng.choice([1, 1, 2]))
    height, width = (int(rng.integers(kernel * dilation + 1, 20)) for _ in range(2))
    padding = [int(each) for each in rng.integers(0, 3, 4)]
    options = {"stride": int(rng.integers(1, 3)), "padding": padding, "dilation": dilation, "batch": int(rng.integers(1, 3))}
    return int(rng.choice([8, 16, 24, 40, 48])), height, width, kernel, bool(rng.integers(0, 2)), options


CASES: dict[str, Any] = {
    "3x3": (32, 14, 14, 3, True, {}),
    "3x3, stride 2": (32, 14, 14, 3, True, {"stride": 2}),
    "3x3, 7x7 pixels": (48, 7, 7, 3, True, {}),
    "5x5": (16, 9, 28, 5, True, {}),
    "5x5, stride 2, no epilogue": (24, 15, 13, 5, False, {"stride": 2}),
    "no padding": (16, 10, 9, 3, True, {"padding": 0}),
    "half a vector": (20, 6, 11, 3, True, {}),
    "one pixel": (32, 3, 3, 3, False, {"padding": 0}),
    **{f"random {seed}": random_case(seed) for seed in range(5)},
}


def task_of(name: str, target: Any) -> Task:
    *shape, options = CASES[name]
    return only_task(depthwise(*shape, **options), target)


@pytest.mark.parametrize("name", CASES)
def test_members_replay_and_compute_what_the_program_does(name: str) -> None:
    task = task_of(name, HOST)
    candidates = structured_candidates(task.module, HOST)
    assert candidates
    assert {each.space for each in candidates} == {"depthwise"}
    places = np.linspace(0, len(candidates) - 1, min(MEMBERS, len(candidates))).round().astype(int)
    schedules = [traces.replay(task.module, candidates[place].trace) for place in places]
    for schedule, place in zip(schedules, places, strict=True):
        assert traces.dump(schedule.trace) == candidates[place].trace
    expected, *found = run_kernels(task, [task.module, *(each.mod for each in schedules)], HOST)
    for outputs in found:
        tolerance = absolute_tolerance(expected[0], reduction_length(task.module))
        same, verification = compare(outputs[0], expected[0], RTOL, tolerance)
        assert same, verification


@pytest.mark.parametrize("target", [AVX2, AVX512, NEON, SSE], ids=["avx2", "avx512", "neon", "sse"])
def test_tiles_fit_the_registers_and_windows_are_unrolled(target: Any) -> None:
    task = task_of("3x3", target)
    for candidate in structured_candidates(task.module, target):
        schedule = traces.replay(task.module, candidate.trace)
        loops = [schedule.get(loop) for loop in schedule.get_loops(schedule.get_sblock("group_conv2d_nhwc_update"))]
        assert int(loops[-1].kind) == VECTORIZED
        unrolled = math.prod(int(loop.extent) for loop in loops if int(loop.kind) == UNROLLED)
        assert unrolled % 9 == 0
        assert unrolled // 9 <= target.vector_registers - 4


def test_a_space_offers_both_dataflows_and_row_blocks() -> None:
    task = task_of("3x3", AVX2)
    candidates = structured_candidates(task.module, AVX2)
    assert {each.trace.count('"SampleCategorical"') for each in candidates} == {1, 2}
    assert default_candidate(task.module, AVX2) in candidates
    assert len({each.trace for each in candidates}) == len(candidates) < 100


def test_no_padded_copy_is_made() -> None:
    task = task_of("3x3", AVX2)
    for candidate in structured_candidates(task.module, AVX2):
        moved = estimate(traces.replay(task.module, candidate.trace).mod["main"], AVX2)
        assert moved.workspace_bytes <= 4 * 32 * 16


OTHERS = {
    "two results a channel": lambda g, x: g.conv(x, 32, 3, groups=16),
    "groups": lambda g, x: g.conv(x, 12, 3, groups=4),
    "9x9 window": lambda g, x: g.conv(x, 16, 9, groups=16),
    "pool": lambda g, x: g(relax.op.nn.max_pool2d(x, (3, 3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_not_depthwise(name: str) -> None:
    for task in programs_of(network(OTHERS[name], (1, 16, 12, 12)), AVX2).tasks:
        assert not any(each.space == "depthwise" for each in structured_candidates(task.module, AVX2))


@pytest.mark.parametrize("name", VECTOR_FMA)
def test_default_code_uses_the_vectors_of_the_target(name: str) -> None:
    target, instruction = VECTOR_FMA[name]
    task = task_of("3x3", target)
    module = traces.replay(task.module, default_candidate(task.module, target).trace).mod
    assembly = tvm.compile(module, target=tvm_target(target)).mod.inspect_source("asm")
    assert len(re.findall(instruction, assembly)) >= 9 * 4
