"""Prefetches change no result, fetch what they should, and are in the code."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm_ffi import structural_equal, structural_map, structural_walk

from mvcompile import prefetch, traces
from mvcompile.algorithms import Programs, transform
from mvcompile.spaces import structured_candidates
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, AVX512, Graph, arguments_of, network, only_task, run_kernels
from mvcompile.testing.tiles import loop_bodies, stores_vectors, tile_of
from mvcompile.types import HostTarget

HOST = detect_target()
SMALL_CACHE = replace(AVX2, l2_bytes=32 << 10)
"""Weights of tests are larger than this second-level cache."""
WIDE = replace(AVX512, l2_bytes=SMALL_CACHE.l2_bytes)
COLUMNS, DEPTH = 128, 128
VARIABLE = type(tirx.Var("x", "int64"))


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
    return [each.trace for each in candidates if ("mvcompile.prefetch_next" in each.trace) is fetching]


def decisions(trace: str) -> int:
    return trace.count('"SampleCategorical"')


def fetches(module: tvm.IRModule) -> list[Any]:
    found: list[Any] = []
    structural_walk(module["main"].body, (tirx.Evaluate, found.append))
    return [each for each in found if "mvcompile_prefetch" in each.script()]


def loops_around(module: tvm.IRModule, fetch: Any) -> list[Any]:
    """Outermost first."""
    found: list[Any] = []
    structural_walk(module["main"].body, (tirx.For, found.append), order="pre")

    def inside(loop: Any) -> bool:
        statements: list[Any] = []
        structural_walk(loop.body, (tirx.Evaluate, statements.append))
        return any(each.same_as(fetch) for each in statements)

    return [loop for loop in found if inside(loop)]


def place_of(fetch: Any, shape: Sequence[int], values: Mapping[Any, int]) -> int:
    """The element, in a buffer of that shape, whose line is fetched when the loops' variables have `values`."""
    bound = {variable: tirx.IntImm("int64", value) for variable, value in values.items()}
    address = fetch.value.args[1].args[0]
    indices = [structural_map(each, (VARIABLE, lambda each: bound.get(each, each))) for each in address.indices]
    simplified = [int(tvm.sym.Analyzer().simplify(each)) for each in indices]
    return sum(index * math.prod(shape[axis + 1 :]) for axis, index in enumerate(simplified))


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


@pytest.mark.parametrize("wish", [prefetch.NEXT_PANEL, prefetch.NEXT_BLOCK])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 10])
@pytest.mark.parametrize(("target", "extent"), [(SMALL_CACHE, 7), (WIDE, 7), (WIDE, 3)])
def test_every_line_of_what_is_next_is_fetched_in_order_and_evenly(
    wish: str, columns: int, target: HostTarget, extent: int
) -> None:
    """Nine rows may be one tile of 512-bit vectors: then there are more lines than steps."""
    task = a_task(lambda graph, x: graph.conv(x, columns, 3), target, extent)
    traces_of = [trace for trace in members(task, target, fetching=True) if wish in trace]
    assert traces_of
    for trace in traces_of:
        module = prefetch.insert(traces.replay(task.module, trace).mod)
        found = fetches(module)
        shape = [int(extent) for extent in found[0].value.args[1].args[0].source.shape]
        loops = loops_around(module, found[0])
        whole = wish == prefetch.NEXT_PANEL and decisions(trace) == 1  # the reduction is not cut
        tiles, steps = loops[1 if whole else -2], loops[-1]
        assert len(found) == math.ceil(shape[-1] / 16 / int(tiles.extent))
        read = int(steps.extent) * shape[-1]  # elements of the panel (at one place of the window), or of the block
        others = [loop.loop_var for loop in loops]
        places = [
            place_of(fetch, shape, {**dict.fromkeys(others, 0), tiles.loop_var: tile, steps.loop_var: step})
            for tile in range(int(tiles.extent))
            for step in range(int(steps.extent))
            for fetch in found
        ]
        next_one = math.prod(shape[1:]) if wish == prefetch.NEXT_PANEL else read
        assert places == sorted(places)
        assert sorted(set(places)) == list(range(next_one, next_one + read, 16))
        counts = Counter(places).values()
        assert max(counts) - min(counts) <= 1


def test_the_lines_of_a_residual_are_fetched_before_the_sums() -> None:
    task = a_task(residual, AVX2)
    for trace in members(task, AVX2, fetching=False)[:6]:
        scheduled = traces.replay(task.module, trace)
        rows, vectors = tile_of(scheduled)
        found = fetches(prefetch.insert(scheduled.mod))
        assert len(found) == rows * math.ceil(vectors * 8 / 16)
        assert len({each.script() for each in found}) == len(found)


def test_only_few_rows_of_large_weights_may_fetch_what_is_next() -> None:
    assert members(a_task(plain, SMALL_CACHE), SMALL_CACHE, fetching=True)
    large = replace(AVX2, l2_bytes=4 << 20)
    assert not members(a_task(plain, large), large, fetching=True)
    many = members(a_task(plain, SMALL_CACHE, extent=17), SMALL_CACHE, fetching=True)
    assert not [trace for trace in many if decisions(trace) < 3]  # groups of panels cut the reduction, and always fetch


@pytest.mark.parametrize("wish", [prefetch.NEXT_PANEL, prefetch.NEXT_BLOCK])
def test_sums_stay_in_registers_beside_prefetches(wish: str) -> None:
    """The tile has 14 rows of two 512-bit vectors, more than TVM keeps on the stack, and a remainder."""
    task = a_task(plain, WIDE)
    tall = [
        trace
        for trace in members(task, WIDE, fetching=True)
        if wish in trace and tile_of(traces.replay(task.module, trace)) == (14, 2)
    ]
    assert tall
    module = prefetch.insert(traces.replay(task.module, tall[0]).mod)
    assembly = str(tvm.compile(module, target=tvm_target(WIDE)).mod.inspect_source("asm"))
    fetching = [each for each in loop_bodies(assembly) if each.count("vfmadd") >= 14 and "prefetcht1" in each]
    assert fetching
    assert not any(map(stores_vectors, fetching))


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
        assert fetches(module)
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
