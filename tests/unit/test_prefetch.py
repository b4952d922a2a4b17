"""Prefetches change no result, fetch what they should, and are in the code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm_ffi import structural_equal, structural_walk

from mvcompile import prefetch, traces
from mvcompile.algorithms import Programs, transform
from mvcompile.spaces import structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, Graph, arguments_of, network, only_task, run_kernels
from mvcompile.types import HostTarget

HOST = detect_target()
SMALL_CACHE = replace(AVX2, l2_bytes=32 << 10)
"""Weights of tests are larger than this second-level cache."""
ROWS, COLUMNS, DEPTH = 49, 128, 96


def residual(graph: Graph, x: Any, other: Any) -> Any:
    return graph.relu(graph.add(graph.bias(graph.conv(x, COLUMNS, 1)), other))


def plain(graph: Graph, x: Any) -> Any:
    return graph.conv(x, COLUMNS, 3)


def a_task(body: Callable[..., Any], target: HostTarget, extent: int = 7) -> Task:
    shapes = [(1, DEPTH, extent, extent)]
    if body is residual:
        shapes.append((1, COLUMNS, extent, extent))
    return only_task(network(body, *shapes), target)


def members(task: Task, target: HostTarget, *, fetching: bool) -> list[str]:
    candidates = [each for each in structured_candidates(task.module, target) if each.space == "dense"]
    return [each.trace for each in candidates if (prefetch.NEXT_PANEL in each.trace) is fetching]


def fetches(module: tvm.IRModule) -> list[Any]:
    found: list[Any] = []
    structural_walk(module["main"].body, (tirx.Evaluate, found.append))
    return [each for each in found if "T.prefetch" in each.script()]


@pytest.mark.parametrize("body", [residual, plain])
@pytest.mark.parametrize("fetching", [False, True])
def test_results_are_those_of_the_unscheduled_program(body: Callable[..., Any], fetching: bool) -> None:
    small = replace(HOST, l2_bytes=SMALL_CACHE.l2_bytes)
    task = a_task(body, small)
    chosen = members(task, small, fetching=fetching)
    modules = [prefetch.insert(traces.replay(task.module, trace).mod) for trace in (chosen[0], chosen[-1])]
    assert all(fetches(module) for module in modules) or (body is plain and not fetching)
    expected, *found = run_kernels(task, [task.module, *modules], small)
    for outputs in found:
        assert abs(outputs[0] - expected[0]).max() <= 1e-4 * abs(expected[0]).max()


def test_every_line_of_the_next_panel_is_fetched_once_per_tile_step_and_evenly() -> None:
    task = a_task(plain, SMALL_CACHE)
    for trace in members(task, SMALL_CACHE, fetching=True):
        scheduled = traces.replay(task.module, trace)
        tiles = scheduled.get_loops(scheduled.get_sblock("packed_conv2d_update"))[1]
        count, name = int(scheduled.get(tiles).extent), scheduled.get(tiles).loop_var.name
        (fetch,) = fetches(prefetch.insert(scheduled.mod))
        text = fetch.script()
        assert text.endswith("0, 2, 1)")
        share = math.ceil(DEPTH / count)
        line = re.search(rf"{name} \* T.int64\({share}\) \+ (\w+) // T.int64\({count}\)", text)
        assert line is not None, text
        lines = {tile * share + step // count for tile in range(count) for step in range(DEPTH)}
        assert lines >= set(range(DEPTH))
        assert max(lines) < DEPTH + count


def test_the_lines_of_a_residual_are_fetched_before_the_sums() -> None:
    task = a_task(residual, AVX2)
    for trace in members(task, AVX2, fetching=False)[:6]:
        scheduled = traces.replay(task.module, trace)
        loops = [scheduled.get(loop) for loop in scheduled.get_loops(scheduled.get_sblock("packed_conv2d_update"))]
        unrolled = [int(loop.extent) for loop in loops if int(loop.kind) == int(tirx.ForKind.UNROLLED)]
        rows, vectors = math.prod(unrolled[:-1]), unrolled[-1]
        found = fetches(prefetch.insert(scheduled.mod))
        assert len(found) == rows * math.ceil(vectors * 8 / 16)
        assert len({each.script() for each in found}) == len(found)


def test_only_few_rows_of_large_weights_may_fetch_their_next_panel() -> None:
    assert members(a_task(plain, SMALL_CACHE), SMALL_CACHE, fetching=True)
    assert not members(a_task(plain, AVX2), AVX2, fetching=True)  # a second-level cache of 1 MiB
    assert not members(a_task(plain, SMALL_CACHE, extent=14), SMALL_CACHE, fetching=True)


def test_winograd_may_fetch_the_next_panel_of_large_transformed_weights() -> None:
    small = replace(HOST, l2_bytes=SMALL_CACHE.l2_bytes)
    task = a_task(plain, small)
    programs = Programs(task.module)
    candidates = [each for each in structured_candidates(task.module, small) if each.space.startswith("winograd")]
    fetching = [each for each in candidates if prefetch.NEXT_PANEL in each.trace]
    assert 0 < len(fetching) < len(candidates)
    expected = run_kernels(task, [task.module], small)[0][0]
    arrays = [*arguments_of(task), np.zeros(expected.shape, np.float32)]
    for candidate in {each.space: each for each in fetching}.values():
        module = prefetch.insert(traces.replay(programs.program(candidate.space), candidate.trace).mod)
        assert len(fetches(module)) == 1
        kernel = tvm.compile(module, target=tvm_target(small)).mod["main"]
        given = [tvm.runtime.tensor(transform(each.form, arrays[each.position])) for each in programs.arguments(candidate.space)]
        kernel(*given)
        assert abs(given[-1].numpy() - expected).max() <= 1e-4 * abs(expected).max()


def test_programs_without_tiles_stay_as_they_are() -> None:
    task = a_task(residual, AVX2)
    assert not fetches(prefetch.insert(task.module))
    assert structural_equal(prefetch.insert(task.module)["main"], task.module["main"])


def test_no_annotation_is_left_and_the_processor_is_asked() -> None:
    small = replace(HOST, l2_bytes=SMALL_CACHE.l2_bytes)
    task = a_task(plain, small)
    module = prefetch.insert(traces.replay(task.module, members(task, small, fetching=True)[0]).mod)
    assert prefetch.NEXT_PANEL not in module.script()
    assembly = tvm.compile(module, target=tvm_target(small)).mod.inspect_source("asm")
    assert re.search(r"prefetch|prfm", assembly)
