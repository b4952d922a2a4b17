from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from mvcompile import spaces
from mvcompile.algorithms import Programs
from mvcompile.build import build_library, make_plan
from mvcompile.config import CompileConfig, TuningConfig
from mvcompile.forms import LEAST_GAIN, choose_forms, form_of, kernel, weight_bytes, with_forms
from mvcompile.target import detect_target
from mvcompile.tasks import Program
from mvcompile.testing.networks import network, programs_of, reference, run_plan
from mvcompile.tuning.fronts import pareto_set
from mvcompile.types import Argument, Objectives, Record, Status
from mvcompile.variants import Builder

HOST = detect_target()


def body(graph: Any, x: Any) -> Any:
    """Two layers of one task, and one of another."""
    first = graph.relu(graph.conv(x, 16, 3))
    second = graph.relu(graph.conv(first, 16, 3))
    return graph.relu(graph.conv(second, 32, 3))


NETWORK = network(body, (1, 16, 8, 8))
PROGRAM = programs_of(NETWORK, HOST)
NARROW, WIDE = (
    next(i for i, task in enumerate(PROGRAM.tasks) if task.parameters[-1].shape[-1] == n and task.constants) for n in (16, 32)
)
NARROW_BYTES = 4 * 9 * 16 * 16
"""Of one of the two weights of the first task."""


def record(task: int, space: str, latency_s: float, status: Status = Status.OK) -> Record:
    objectives = Objectives(latency_s, 0.0, 1e6) if status is Status.OK else None
    return Record(PROGRAM.tasks[task].key, HOST.key, "f", f"{space}", space, status, objectives)


def chosen(records: dict[int, list[Record]], growth: float) -> dict[int, str]:
    forms = choose_forms(PROGRAM, [records.get(index, []) for index in range(len(PROGRAM.tasks))], growth)
    return {index: form for index, form in enumerate(forms) if form}


def test_a_form_is_taken_where_it_gains_and_there_is_room() -> None:
    records = {NARROW: [record(NARROW, "dense", 1e-3), record(NARROW, "winograd2", 5e-4), record(NARROW, "winograd4", 4e-4)]}
    small = 2 * NARROW_BYTES * 16 / 9 / PROGRAM.weight_bytes
    assert chosen(records, 1.0) == {}
    assert chosen(records, 1.0 + small * 0.99) == {}
    assert chosen(records, 1.0 + small * 1.01) == {NARROW: "winograd2"}
    assert chosen(records, 1.0 + small * 36 / 16 * 1.01) == {NARROW: "winograd4"}


def test_what_gains_most_for_its_bytes_comes_first() -> None:
    records = {
        NARROW: [record(NARROW, "dense", 1e-3), record(NARROW, "winograd2", 9e-4)],
        WIDE: [record(WIDE, "dense", 2e-3), record(WIDE, "winograd2", 1e-3)],
    }
    room_for_one = 2 * NARROW_BYTES * 16 / 9 / PROGRAM.weight_bytes  # both tasks have as many bytes of weights
    assert chosen(records, 1.0 + room_for_one * 1.01) == {WIDE: "winograd2"}
    assert chosen(records, 1.0 + 2 * room_for_one * 1.01) == {NARROW: "winograd2", WIDE: "winograd2"}


@pytest.mark.parametrize(
    "other",
    [
        record(NARROW, "winograd2", 1e-3 * (1 - LEAST_GAIN / 2)),
        record(NARROW, "winograd2", 2e-3),
        record(NARROW, "winograd2", 0.0, Status.WRONG_RESULT),
    ],
)
def test_a_form_that_gains_nothing_is_left_out(other: Record) -> None:
    assert chosen({NARROW: [record(NARROW, "dense", 1e-3), other]}, 100.0) == {}


def test_a_later_record_of_a_trace_replaces_the_earlier_one() -> None:
    records = [record(NARROW, "dense", 1e-3), record(NARROW, "winograd2", 5e-4), record(NARROW, "winograd2", 2e-3)]
    assert chosen({NARROW: records}, 100.0) == {}


def candidates(task: int, *names: str) -> list[Any]:
    found = spaces.structured_candidates(PROGRAM.tasks[task].module, HOST)
    return [next(each for each in found if each.space == name) for name in names]


@pytest.mark.parametrize("names", [("dense",), ("winograd2",), ("dense", "winograd4"), ("winograd3", "dense")])
def test_the_model_with_further_forms_computes_the_same(names: tuple[str, ...], tmp_path: Path) -> None:
    variants = {index: candidates(index, *names) for index in (NARROW, WIDE)}
    used = [{each.space for each in variants.get(index, [])} for index in range(len(PROGRAM.tasks))]
    extended = with_forms(PROGRAM, used)
    defaults = [spaces.default_candidate(task.module, HOST) for task in PROGRAM.tasks]
    kernels = [
        kernel(f"t{index}_{number}", task, candidate.space, candidate.trace)
        for index, task in enumerate(extended.tasks)
        for number, candidate in enumerate(variants.get(index, [defaults[index]]))
    ]
    library = tmp_path / "k.so"
    build_library(library, kernels, HOST)
    loaded = tvm_ffi.load_module(str(library))
    x = np.random.default_rng(0).standard_normal((1, 16, 8, 8), dtype=np.float32)
    (expected,) = reference(NETWORK, [x])
    for number in range(len(names)):
        functions = [loaded[f"t{index}_{min(number, len(variants.get(index, [0])) - 1)}"] for index in range(len(extended.tasks))]
        (found,) = run_plan(make_plan(extended), functions, [x])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def sizes(program: Program) -> list[int]:
    return sorted(array.nbytes for _, array in make_plan(program).weights)


def test_each_weight_has_one_copy_of_each_form_in_use() -> None:
    def used(names: set[str]) -> list[set[str]]:
        return [names if index == NARROW else {"dense"} for index in range(len(PROGRAM.tasks))]

    direct, both, transformed = (with_forms(PROGRAM, used(names)) for names in ({"dense"}, {"dense", "winograd2"}, {"winograd2"}))
    assert sizes(direct) == sizes(PROGRAM) == [NARROW_BYTES, NARROW_BYTES, 2 * NARROW_BYTES]
    copies = [NARROW_BYTES * 16 // 9] * 2
    assert sizes(both) == sorted(sizes(direct) + copies)
    assert sizes(transformed) == sorted([*copies, 2 * NARROW_BYTES])
    for model, names in ((direct, {"dense"}), (both, {"dense", "winograd2"}), (transformed, {"winograd2"})):
        assert weight_bytes(PROGRAM, used(names)) == sum(sizes(model))
    task = both.tasks[NARROW]
    assert task.arguments[:3] == (Argument(0), Argument(1), Argument(1, "winograd2"))
    assert [4 * math.prod(parameter.shape) for parameter in task.parameters[1:3]] == [NARROW_BYTES, copies[0]]


def test_a_weight_that_is_used_in_its_further_form_alone_leaves_its_room_to_others() -> None:
    records = {
        NARROW: [record(NARROW, "dense", 1e-3), record(NARROW, "winograd2", 4e-4)],
        WIDE: [record(WIDE, "dense", 2e-3), record(WIDE, "winograd2", 1.5e-3)],
    }
    known = {task.key: records.get(index, [record(index, "dense", 1e-3)]) for index, task in enumerate(PROGRAM.tasks)}
    copies = 2 * NARROW_BYTES * 16 / 9

    def forms(extra: float, variants: int) -> set[str]:
        config = CompileConfig(TuningConfig(weight_growth=1.0 + extra / PROGRAM.weight_bytes))
        builder = Builder(PROGRAM, [], HOST, config, known, None, None, Path())  # type: ignore[arg-type]
        sets = builder._select(lambda found, allowed: pareto_set(found, variants, allowed))
        assert weight_bytes(PROGRAM, [{each.space for each in one.kept} for one in sets]) <= PROGRAM.weight_bytes + extra
        return {PROGRAM.tasks[index].key for index, form in enumerate(builder.forms or ()) if form}

    narrow, wide = PROGRAM.tasks[NARROW].key, PROGRAM.tasks[WIDE].key
    assert forms(copies * 1.01, 1) == {narrow}  # the fastest variant alone: the weight as it is goes, but that is not enough
    assert forms(2 * copies - 2 * NARROW_BYTES, 1) == {narrow, wide}


def test_only_algorithms_have_forms() -> None:
    assert form_of("dense") == form_of("generic") == ""
    assert all(form_of(name) == name for name in Programs(PROGRAM.tasks[NARROW].module).alternatives())
