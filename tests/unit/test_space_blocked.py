"""Blocks of the reduction for groups of panels, and the remainder of a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm.tirx import ForKind

from mvcompile import prefetch, traces
from mvcompile.measure.protocol import Candidate
from mvcompile.measure.traffic import estimate
from mvcompile.spaces import structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX512, Graph, network, only_task, run_kernels
from mvcompile.testing.tiles import loop_bodies, stores_vectors, tile_of, update_loops
from mvcompile.types import HostTarget

HOST = replace(detect_target(), l2_bytes=64 << 10)
"""With a second-level cache that is smaller than the inputs here."""
COLUMNS = 512
SHAPES = {"convolution": (1, 128, 6, 5), "matmul": (30, 768)}


def body(graph: Graph, x: Any) -> Any:
    return graph.relu(graph.bias(graph.conv(x, COLUMNS, 3)))


def product(graph: Graph, x: Any) -> Any:
    return graph.dense(x, COLUMNS)


BODIES: dict[str, Callable[..., Any]] = {"convolution": body, "matmul": product}


def a_task(name: str, target: HostTarget = HOST) -> Task:
    return only_task(network(BODIES[name], SHAPES[name]), target)


def in_groups(task: Task, target: HostTarget = HOST) -> list[Candidate]:
    candidates = structured_candidates(task.module, target)
    return [each for each in candidates if each.space == "dense" and each.trace.count('"SampleCategorical"') == 3]


@pytest.mark.parametrize("name", BODIES)
def test_blocks_for_groups_of_panels_are_right_and_their_traffic_is_known(name: str) -> None:
    task = a_task(name)
    candidates = in_groups(task)
    assert len(candidates) > 8
    modules = []
    for candidate in (candidates[0], candidates[len(candidates) // 2], candidates[-1]):
        scheduled = traces.replay(task.module, candidate.trace)
        traffic = estimate(scheduled.mod["main"], HOST)
        assert traffic.exact, traffic.note
        modules.append(prefetch.insert(scheduled.mod))
    expected, *found = run_kernels(task, [task.module, *modules], HOST)
    for outputs in found:
        assert abs(outputs[0] - expected[0]).max() <= 1e-4 * abs(expected[0]).max()


@pytest.mark.parametrize("name", BODIES)
def test_the_groups_are_shared_by_cores_and_each_passes_its_panels(name: str) -> None:
    task = a_task(name)
    for candidate in in_groups(task)[::7]:
        loops = update_loops(traces.replay(task.module, candidate.trace))
        groups, panels = loops[0], loops[-6]  # then tiles, steps of the reduction, and the tile
        assert int(groups.kind) == int(ForKind.PARALLEL)
        assert int(groups.extent) in (4, 8)
        assert int(groups.extent) * int(panels.extent) * task.parameters[1].shape[-1] == COLUMNS


def test_they_are_offered_for_inputs_that_leave_the_second_level_cache() -> None:
    large = replace(HOST, l2_bytes=4 << 20)
    assert not in_groups(a_task("matmul", large), large)
    narrow = only_task(network(lambda graph, x: graph.dense(x, 3 * 48), SHAPES["matmul"]), HOST)
    assert not in_groups(narrow)  # three panels, or nine: no four groups


@pytest.mark.parametrize("rows", [11, 12, 13])
def test_the_last_tile_has_a_loop_of_its_own(rows: int) -> None:
    """Tiles of 512-bit vectors, whose sums are not on the stack: LLVM has to take what differs in the last one out of loops."""
    task = only_task(network(product, (128, 768)), AVX512)
    traces_of = [each.trace for each in structured_candidates(task.module, AVX512) if each.space == "dense"]
    tall = [trace for trace in traces_of if tile_of(traces.replay(task.module, trace)) == (rows, 2)]
    assert tall
    for trace in (tall[0], tall[-1]):
        module = prefetch.insert(traces.replay(task.module, trace).mod)
        assembly = str(tvm.compile(module, target=tvm_target(AVX512)).mod.inspect_source("asm"))
        tiles = [each for each in loop_bodies(assembly) if each.count("vfmadd") >= 2 * rows]
        assert tiles
        assert not any(map(stores_vectors, tiles))
