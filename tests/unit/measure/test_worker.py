"""A worker's work, done in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, topi

from mvcompile import traces
from mvcompile.measure import references
from mvcompile.measure.references import read_reference, write_reference
from mvcompile.measure.worker import COARSE_ROUNDS, PRECISE_ROUNDS, Worker, _lines
from mvcompile.target import detect_target
from mvcompile.testing import programs
from mvcompile.types import Status

TARGET = detect_target()
MODULE = programs.fragile()
SUBJECT = programs.subject(MODULE, constants=(1,))
GOOD = programs.unscheduled(MODULE).trace
SPECS = [("float32", (programs.LENGTH,))]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    cores = os.sched_getaffinity(0)
    yield Worker(TARGET, tmp_path, min(cores), cores)
    os.sched_setaffinity(0, cores)


def stored(folder: Path) -> Path:
    return folder / f"{SUBJECT.key}.npz"


def reference(folder: Path) -> np.ndarray:
    found = read_reference(stored(folder), SPECS)
    assert found is not None
    return found[1][0]


def test_keeps_the_reference_for_the_next_worker(worker: Worker, tmp_path: Path) -> None:
    worker.load(SUBJECT)
    first = reference(tmp_path)
    assert np.isfinite(first).all()
    assert len(np.unique(first)) > 1
    write_reference(stored(tmp_path), False, [first + 1])
    Worker(TARGET, tmp_path, 0, {0}).load(SUBJECT)
    assert np.array_equal(reference(tmp_path), first + 1)


def damage_by_truncation(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_by_flipped_bits(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"output0") + 200] ^= 0xFF
    path.write_bytes(data)


def damage_by_emptying(path: Path) -> None:
    path.write_bytes(b"")


def damage_by_garbage(path: Path) -> None:
    path.write_bytes(b"nothing of ours" * 100)


def other_shape(path: Path) -> None:
    write_reference(path, False, [np.zeros(3, np.float32)])


def other_dtype(path: Path) -> None:
    write_reference(path, False, [np.zeros(programs.LENGTH, np.float64)])


def fewer_outputs(path: Path) -> None:
    write_reference(path, False, [])


def other_version(path: Path) -> None:
    np.savez(path, version=references.VERSION - 1, positive=False, output0=np.zeros(programs.LENGTH, np.float32))


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_truncation, damage_by_flipped_bits, damage_by_emptying, damage_by_garbage, other_shape, other_dtype,
        fewer_outputs, other_version,
    ],
)  # fmt: skip
def test_computes_a_reference_anew_that_is_no_use(damage: Any, worker: Worker, tmp_path: Path) -> None:
    worker.load(SUBJECT)
    first = reference(tmp_path)
    damage(stored(tmp_path))
    assert read_reference(stored(tmp_path), SPECS) is None
    again = Worker(TARGET, tmp_path, 0, {0})
    again.load(SUBJECT)
    assert np.array_equal(reference(tmp_path), first)
    assert again.build(GOOD) == (Status.OK, "")
    assert again.check(GOOD)[0]
    os.sched_setaffinity(0, worker._cores)


def test_many_write_and_read_one_reference_at_once(tmp_path: Path) -> None:
    path, outputs = tmp_path / "deep" / "key.npz", [np.arange(50_000, dtype=np.float32)]

    def write_then_read(_: int) -> bool:
        write_reference(path, True, outputs)
        found = read_reference(path, [("float32", (50_000,))])
        return found is not None and found[0] and np.array_equal(found[1][0], outputs[0])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write_then_read, range(64)))
    assert [entry.name for entry in path.parent.iterdir()] == ["key.npz"]


def test_leaves_nothing_of_a_reference_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_reference(tmp_path / "key.npz", False, [np.zeros(4)])
    assert not list(tmp_path.iterdir())


def test_takes_positive_arguments_where_others_have_no_result(worker: Worker, tmp_path: Path) -> None:
    source = te.placeholder((programs.LENGTH,), name="source")
    module = programs.module_of(source, te.compute(source.shape, lambda i: te.log(source[i]), name="logarithm"))
    worker.load(programs.subject(module))
    found = read_reference(stored(tmp_path), SPECS)
    assert found is not None
    positive, outputs = found
    assert positive
    assert np.isfinite(outputs[0]).all()
    again = Worker(TARGET, tmp_path, 0, {0})
    again.load(programs.subject(module))
    trace = programs.unscheduled(module).trace
    assert again.build(trace)[0] is Status.OK
    assert again.check(trace)[0]
    os.sched_setaffinity(0, worker._cores)


def test_checks_every_output(worker: Worker) -> None:
    source = te.placeholder((programs.LENGTH,), name="source")
    double = te.compute(source.shape, lambda i: source[i] * 2.0, name="double")
    positive = te.compute(source.shape, lambda i: source[i] > 0.0, name="positive")
    module = programs.module_of(source, double, positive)
    worker.load(programs.subject(module, outputs=2))
    trace = programs.unscheduled(module).trace
    assert worker.build(trace)[0] is Status.OK
    assert worker.check(trace)[0]
    assert worker._task is not None
    built = worker._task.kernels[trace]

    def forgets_to_write_the_second(source: Any, first: Any, second: Any) -> None:
        before = second.numpy()
        built.kernel(source, first, second)
        second.copyfrom(before)

    worker._task.kernels["forgets"] = replace(built, kernel=forgets_to_write_the_second)
    assert not worker.check("forgets")[0]


def test_a_kernel_that_writes_its_inputs_does_not_spoil_the_next_one(worker: Worker) -> None:
    worker.load(SUBJECT)
    worker.build(GOOD)
    assert worker._task is not None

    def overwrites(x: Any, w: Any, y: Any) -> None:
        for tensor in (x, w, y):
            tensor.copyfrom(np.zeros(programs.LENGTH, np.float32))

    worker._task.kernels["overwrites"] = replace(worker._task.kernels[GOOD], kernel=overwrites)
    assert worker.measure("overwrites", None)[0] is Status.WRONG_RESULT
    assert worker.build(GOOD)[0] is Status.OK
    assert worker.measure(GOOD, None)[0] is Status.OK


def test_times_coarsely_what_is_much_slower_than_the_best(worker: Worker) -> None:
    worker.load(SUBJECT)
    worker.build(GOOD)
    assert len(worker.measure(GOOD, None)[1]) == PRECISE_ROUNDS
    assert len(worker.measure(GOOD, 1e3)[1]) == PRECISE_ROUNDS
    alone = min(worker.time(GOOD, 5))
    assert len(worker.measure(GOOD, alone / 3)[1]) in (1, COARSE_ROUNDS)  # a call that was disturbed looks hopeless
    assert len(worker.measure(GOOD, 1e-12)[1]) == 1
    assert all(seconds > 0 for seconds in worker.time(GOOD, 5))


@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "bool"])
def test_warms_the_tensor_itself_once_per_cache_line(dtype: str) -> None:
    tensor = tvm.runtime.tensor(np.zeros((3, 128), dtype))
    lines = _lines(tensor)
    assert len(lines) == tensor.numpy().nbytes // 64
    lines[...] = 1
    assert np.count_nonzero(tensor.numpy()) == len(lines)


def test_builds_nothing_twice_and_forgets_when_told(worker: Worker) -> None:
    worker.load(SUBJECT)
    worker.build(GOOD)
    assert worker._task is not None
    kernel = worker._task.kernels[GOOD]
    worker.build(GOOD)
    assert worker._task.kernels[GOOD] is kernel
    worker.drop()
    assert not worker._task.kernels


def test_work_without_a_task_is_an_error(worker: Worker) -> None:
    worker.drop()
    with pytest.raises(RuntimeError, match="before a task was loaded"):
        worker.build(GOOD)


def test_tolerates_the_rounding_of_another_order_of_summation(worker: Worker) -> None:
    """The structure that the generic space makes: a sum in sixteen parts."""
    data, weight = te.placeholder((4, 4096), name="data"), te.placeholder((16, 4096), name="weight")
    module = programs.module_of(data, weight, topi.tanh(topi.nn.dense(data, weight)))
    schedule = tvm.s_tir.Schedule(module)
    block = schedule.get_sblock("T_matmul_NT")
    *_, reduction = schedule.get_loops(block)
    _, lanes = schedule.split(reduction, [None, 16])
    schedule.rfactor(lanes, factor_axis=0)
    trace = traces.dump(schedule.trace)
    worker.load(programs.subject(module, constants=(1,)))
    assert worker.build(trace) == (Status.OK, "")
    right, verification = worker.check(trace)
    assert right
    assert verification.max_abs_error > 0
