from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.s_tir.schedule import Schedule

from mvcompile import spaces, traces
from mvcompile.algorithms import ALGORITHMS, Programs, transform
from mvcompile.algorithms.winograd import matrices
from mvcompile.measure.traffic import estimate
from mvcompile.measure.verify import RTOL, absolute_tolerance, compare, random_arguments, reduction_length
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import VECTOR_FMA, network, only_task
from mvcompile.types import Argument, HostTarget

HOST = detect_target()
TILES = (2, 3, 4)


def convolution(
    shape: tuple[int, ...], columns: int, *, epilogue: bool = False, target: HostTarget = HOST, **options: Any
) -> Task:
    """A convolution, 3x3 unless the options say otherwise, of an NCHW image; bias, residual and activation as an epilogue."""
    kernel = options.pop("kernel", 3)

    def body(graph: Any, x: Any, *others: Any) -> Any:
        result = graph.conv(x, columns, kernel, **options)
        return graph.relu(graph.add(graph.bias(result), others[0])) if others else result

    return only_task(network(body, shape, *([(shape[0], columns, *shape[2:])] if epilogue else [])), target)


@pytest.mark.parametrize("tile", TILES)
def test_the_transforms_compute_a_correlation_exactly(tile: int) -> None:
    data, weight, output = (np.array(rows) for rows in matrices(tile))
    random = np.random.default_rng(tile)
    signal, taps = random.standard_normal(tile + 2), random.standard_normal(3)
    found = output @ ((weight @ taps) * (data @ signal))
    np.testing.assert_allclose(found, np.correlate(signal, taps, "valid"), rtol=0, atol=1e-13)


SHAPES = {
    "tiles divide": ((1, 16, 12, 24), 32, {}),
    "epilogue": ((1, 16, 12, 12), 32, {"epilogue": True}),
    "7 pixels": ((1, 32, 7, 7), 16, {"epilogue": True}),
    "13 pixels": ((1, 16, 13, 13), 48, {"epilogue": True}),
    "56 columns": ((1, 16, 12, 12), 56, {"epilogue": True}),
    "narrow vectors": ((1, 24, 12, 12), 20, {"epilogue": True}),
    "5 by 27": ((1, 16, 5, 27), 16, {}),
    "no padding": ((1, 16, 9, 8), 16, {"padding": 0}),
    "odd padding": ((1, 16, 6, 7), 16, {"padding": (2, 0, 1, 3)}),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_members_of_the_space_are_right(algorithm: str, name: str) -> None:
    shape, columns, options = SHAPES[name]
    task = convolution(shape, columns, **options)
    programs = Programs(task.module)
    terms = reduction_length(task.module)
    specs = [(each.dtype, each.shape) for each in task.parameters]
    arrays = random_arguments(specs, 1, weights=task.constants, terms=terms)
    expected = outputs(task.module, arrays)
    arguments = programs.arguments(algorithm)
    given = [transform(each.form, arrays[each.position]) for each in arguments]
    candidates = [each for each in spaces.structured_candidates(task.module, HOST) if each.space == algorithm]
    designs = {re.sub(r"\[\[\d+,\d+\].*", "", each.trace): each for each in candidates}
    for candidate in [candidates[0], *designs.values(), candidates[-1]]:
        schedule = traces.replay(programs.program(algorithm), candidate.trace)
        assert traces.dump(schedule.trace) == candidate.trace
        same, verification = compare(outputs(schedule.mod, given), expected, RTOL, absolute_tolerance(expected, terms))
        assert same, verification
        moved = estimate(schedule.mod["main"], HOST)
        assert moved.exact, moved.note
        assert moved.traffic_bytes >= sum(each.nbytes for each in given)


def outputs(module: tvm.IRModule, arrays: list[Any]) -> Any:
    """The last argument after a call, which starts as something else."""
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tensors[-1].copyfrom(np.full(arrays[-1].shape, 77, np.float32))
    tvm.compile(module, target=tvm_target(HOST)).mod["main"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 16, 9, 9), {"kernel": 1}),
        ((1, 16, 9, 9), {"kernel": 5}),
        ((1, 16, 9, 9), {"stride": 2}),
        ((1, 16, 9, 9), {"dilation": 2}),
        ((1, 16, 9, 9), {"groups": 2}),
        ((2, 16, 9, 9), {}),
        ((1, 16, 3, 3), {"padding": 0}),
    ],
)
def test_other_convolutions_are_not_computed_this_way(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    task = convolution(shape, 32, **options)
    assert Programs(task.module).alternatives() == []
    assert not any(each.space in ALGORITHMS for each in spaces.structured_candidates(task.module, HOST))


def test_channels_that_fill_no_vector_have_no_candidates() -> None:
    for task in (convolution((1, 3, 12, 12), 32), convolution((1, 16, 12, 12), 18)):
        assert not any(each.space in ALGORITHMS for each in spaces.structured_candidates(task.module, HOST))


def test_the_program_takes_the_planes_in_place_of_the_weight() -> None:
    task = convolution((1, 16, 12, 12), 32, epilogue=True)
    programs = Programs(task.module)
    assert programs.arguments("dense") == tuple(Argument(position) for position in range(len(task.parameters)))
    for name, tile in zip(ALGORITHMS, TILES, strict=True):
        (argument,) = (each for each in programs.arguments(name) if each.form)
        assert (argument.position, argument.form) == (1, name)
        weight = np.random.default_rng(0).standard_normal(task.parameters[1].shape, dtype=np.float32)
        planes = transform(name, weight)
        found = programs.parameter(argument)
        assert planes.shape == tuple(int(extent) for extent in found.shape)
        assert planes.nbytes == weight.nbytes * (tile + 2) ** 2 // 9
    with pytest.raises(ValueError, match="winograd2 cannot compute this task"):
        Programs(convolution((1, 16, 9, 9), 32, stride=2).module).program("winograd2")


@pytest.mark.parametrize("name", VECTOR_FMA)
def test_kernels_use_the_vectors_of_the_target_and_fit_its_registers(name: str) -> None:
    target, instruction = VECTOR_FMA[name]
    task = convolution((1, 32, 24, 24), 64, target=target)
    programs = Programs(task.module)
    candidates = [each for each in spaces.structured_candidates(task.module, target) if each.space == "winograd4"]
    schedules = [traces.replay(programs.program("winograd4"), each.trace) for each in candidates]
    largest = max(schedules, key=tile_vectors)
    assert tile_vectors(largest) <= target.vector_registers
    functions = {"main": largest.mod["main"]}
    assembly = str(tvm.compile(tvm.IRModule(functions), target=tvm_target(target)).mod.inspect_source("asm"))
    assert len(re.findall(instruction, assembly)) >= tile_vectors(largest)


def tile_vectors(schedule: Schedule) -> int:
    """Accumulators of a register tile."""
    loops = [schedule.get(loop) for loop in schedule.get_loops(schedule.get_sblock("winograd_product_update"))]
    return math.prod(int(loop.extent) for loop in loops if int(loop.kind) == 3)
