#!/usr/bin/env python3
"""How fast each task of a bundle runs on one core, against what that core can do, measured in the same run.

    scripts/bench/tasks.py BUNDLE.mvb [--core N] [--rounds 15] [--json FILE]

The fastest variant (by the bundle's own figures) of every task is called through the bundle's library: on the weights of its
first layer, where they are mapped, and random activations. A round times, one after the other: a loop of multiply-adds, which
gives the core's peak at that moment (`machine.py` says how); a call that follows another one of the same task (warm); a call
after the weights were flushed from all caches (cold). GFLOP/s are medians over rounds; percentages of peak are medians of the
rounds' own (with the interquartile range over the median), so that a drift of the machine's speed cancels; the rounds are spread
over the whole run. How fast L2, last-level cache and memory are read is measured before every task.

    x        how often the model calls it
    bound    the most that reading allows, in % of peak, warm/cold, where that is less than all: arguments come from the smallest
             level that holds them all, flushed weights from memory, reading overlaps with computing
    GB/s     the same tasks: bytes of the arguments, each once, over the time, warm/cold
    share    of the model's time: calls and their times, cold where the model does not fit the last-level cache
    e        the rate is effective: the variant is a Winograd algorithm, which does fewer operations than the direct sum that is
             counted here, and may exceed the peak

Dense convolutions and matmuls of at least 50 MFLOP are marked below 90 % of peak warm and 85 % cold, with `bandwidth` if reading
allows no more, else with `kernel`. Only one thread is measured. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm  # first: a process has one copy of TVM's runtime
from figures import Figure, figure
from machine import LEVELS, Machine

from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import CONSTANT, KERNELS, RUNTIME_LIBRARY, WEIGHTS, Manifest, Task, Variant
from mvcompile.errors import MvcompileError
from mvcompile.runtime import memory
from mvcompile.runtime.host import check_host, this_host
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Kernel, Library, configure_thread_pool, ensure_tvm_runtime

BIG_FLOPS = 50e6
WANTED = {"warm": 0.90, "cold": 0.85}
"""Of peak, from big dense tasks."""
SAMPLE_S = 2e-4
"""What is faster is called several times per sample, so that the call from Python and the clock do not count."""
PASSES = 3
"""Over all tasks, with a part of the rounds each: a neighbour that is busy for a second must not decide about a task."""
_TITLES = "{:>9}  GFLOP/s  peak      "


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls in one state of the caches. `of_peak` is the achieved share of peak, `bound` the most that reading allows."""

    seconds: Figure
    flops_per_s: float
    of_peak: Figure
    bound: float


@dataclass(frozen=True, slots=True)
class Result:
    """One task. `cold` is None if it has no weights; `nbytes` of all arguments that the variant reads or writes."""

    task: str
    kind: str
    space: str
    calls: int
    flops: float
    nbytes: int
    weight_bytes: int
    effective: bool
    dense: bool
    warm: Rate
    cold: Rate | None

    @property
    def weak(self) -> dict[str, str]:
        """The states in which a big dense task falls short, each with what bounds it: `bandwidth` or `kernel`."""
        if not self.dense or self.flops < BIG_FLOPS:
            return {}
        rates = {"warm": self.warm, "cold": self.cold}
        return {
            state: "bandwidth" if rate.bound < WANTED[state] else "kernel"
            for state, rate in rates.items()
            if rate is not None and rate.of_peak.median < WANTED[state]
        }


class Call:
    """The fastest variant of a task with its arguments in memory."""

    def __init__(self, manifest: Manifest, number: int, library: Library, weights: Array) -> None:
        self.task = manifest.tasks[number]
        self.variant = fastest(self.task)
        kernel = library.function(self.variant.symbol)
        assert kernel is not None, self.variant.symbol
        self._kernel: Kernel = kernel
        steps = [
            [manifest.plan.tensors[index] for index in step.arguments] for step in manifest.plan.steps if step.task == number
        ]
        self.calls = len(steps)
        random = np.random.default_rng(0)
        self._arrays: list[Array] = []
        constants = []
        for position, parameter in enumerate(self.task.parameters):
            if all(step[position].storage == CONSTANT for step in steps):
                constants.append(position)
                self._arrays.append(memory.array_at(weights, steps[0][position].offset, parameter.dtype, parameter.shape))
                continue
            array = memory.allocate_array(parameter.dtype, parameter.shape)
            if array.dtype.kind == "f":  # integers are indices: 0 is always one
                array[...] = random.standard_normal(parameter.shape)
            self._arrays.append(array)
        self._tensors = [memory.tensor(array) for array in self._arrays]
        unread = {position for position in constants if len(constants) > 1 and not self._reads(position)}
        self.weights = [self._tensors[position] for position in constants if position not in unread]
        self.weight_bytes = sum(self._arrays[position].nbytes for position in constants if position not in unread)
        self.nbytes = sum(array.nbytes for position, array in enumerate(self._arrays) if position not in unread)

    def __call__(self) -> None:
        self._kernel(*self._tensors)

    def _reads(self, position: int) -> bool:
        """Whether the outputs change with this weight: a task has it in the forms of all its variants' algorithms."""
        array = self._arrays[position]
        if array.dtype.kind != "f":
            return True
        negative = memory.allocate_array(str(array.dtype), array.shape)
        np.negative(array, out=negative)
        tensors = self._tensors.copy()
        tensors[position] = memory.tensor(negative)
        written = self._arrays[-self.task.num_outputs :]
        self()
        before = [array.copy() for array in written]
        self._kernel(*tensors)
        return any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(before, written, strict=True))


def fastest(task: Task) -> Variant:
    """The variant with the least measured latency; the first one if nothing was measured."""
    return min(task.variants, key=lambda variant: variant.objectives.latency_s if variant.objectives else math.inf)


@dataclass(slots=True)
class Samples:
    """Of one task: seconds warm and cold, and the peak before them, per round."""

    peaks: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)


def sample(call: Call, machine: Machine, rounds: int, samples: Samples) -> None:
    """Adds `rounds` rounds to `samples`."""
    flush = _flusher(call.weights)
    call()
    repeats = max(1, math.ceil(SAMPLE_S / _seconds(call, 1)))
    for _ in range(rounds):
        samples.peaks.append(machine.flops_per_second())
        samples.warm.append(_seconds(call, repeats))
        if call.weights:
            flush()
            samples.cold.append(_seconds(call, 1))
            call()


def judge(call: Call, samples: Samples, near: float, memory_speed: float) -> Result:
    """The task's result; its arguments are read at `near` bytes per second, flushed weights at `memory_speed`."""
    task, variant, peaks, cold = call.task, call.variant, samples.peaks, samples.cold
    warm_reading_s = call.nbytes / near
    cold_reading_s = (call.nbytes - call.weight_bytes) / near + call.weight_bytes / memory_speed
    return Result(
        task=task.name,
        kind=task.kind,
        space=variant.space,
        calls=call.calls,
        flops=task.flops,
        nbytes=call.nbytes,
        weight_bytes=call.weight_bytes,
        effective=variant.space.startswith("winograd"),
        dense=any(word in task.kind for word in ("conv", "matmul", "dense")) and variant.space != "depthwise",
        warm=_rate(task.flops, samples.warm, peaks, warm_reading_s),
        cold=_rate(task.flops, cold, peaks, cold_reading_s) if cold else None,
    )


def _rate(flops: float, seconds: Sequence[float], peaks: Sequence[float], reading_s: float) -> Rate:
    found, peak = figure(seconds), figure(peaks).median
    of_peak = figure([flops / one / two for one, two in zip(seconds, peaks, strict=True)])
    return Rate(found, flops / found.median, of_peak, min(1.0, flops / reading_s / peak))


def _seconds(call: Callable[[], None], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _flusher(weights: Sequence[Any]) -> Callable[[], None]:
    flush = tvm.get_global_func("cache_flush_cpu_non_first_arg")
    first = memory.tensor(memory.allocate_array("float32", (16,)))
    return lambda: flush(first, *weights)


def measure_bundle(bundle: Bundle, core: int, rounds: int) -> dict[str, Any]:
    """All figures, as plain values: rates per second, times in seconds, shares 0 to 1."""
    manifest = bundle.manifest
    check_host(manifest, this_host())
    os.sched_setaffinity(0, [core])
    ensure_tvm_runtime(bundle.member(RUNTIME_LIBRARY))
    configure_thread_pool([core])
    library, weights = Library(bundle.member(KERNELS)), np.frombuffer(bundle.member(WEIGHTS), np.uint8)
    machine = Machine(manifest.target)
    calls = [Call(manifest, number, library, weights) for number in range(len(manifest.tasks))]
    samples = [Samples() for _ in calls]
    reading: dict[str, list[float]] = {level: [] for level in LEVELS}
    for number in range(PASSES):
        for call, taken in zip(calls, samples, strict=True):
            for level, values in reading.items():
                values.append(machine.bytes_per_second(level))
            sample(call, machine, len(range(number, rounds, PASSES)), taken)
    speeds = {level: figure(values) for level, values in reading.items()}
    results = [
        judge(call, taken, speeds[machine.level(call.nbytes)].median, speeds["memory"].median)
        for call, taken in zip(calls, samples, strict=True)
    ]
    from_memory = weights.size + manifest.plan.arena_bytes > manifest.target.llc_bytes
    times = [one.calls * (one.cold if from_memory and one.cold else one.warm).seconds.median for one in results]
    rows = [{**asdict(one), "share": each / sum(times), "weak": one.weak} for one, each in zip(results, times, strict=True)]
    return {
        "bundle": bundle.path.name,
        "cpu": manifest.target.cpu_model,
        "core": core,
        "rounds": rounds,
        "peak_flops_per_s": asdict(figure([peak for taken in samples for peak in taken.peaks])),
        "reading_bytes_per_s": {level: asdict(speed) for level, speed in speeds.items()},
        "model_state": "cold" if from_memory else "warm",
        "tasks": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The result for people."""
    peak, reading = result["peak_flops_per_s"], result["reading_bytes_per_s"]
    speeds = ", ".join(f"{each['median'] / 1e9:.1f} ({each['spread']:.0%}) from {level}" for level, each in reading.items())
    lines = [
        f"{result['bundle']} on core {result['core']} ({result['cpu']}), {result['rounds']} rounds, medians (spread)",
        f"peak {peak['median'] / 1e9:.1f} GFLOP/s ({peak['spread']:.0%}); reading, GB/s: {speeds}",
        "",
        f"{'task':<38} {'space':<11}{'x':>3}{'MFLOP':>8} {_TITLES.format('warm us')}  {_TITLES.format('cold us')}"
        f"{'bound':>10}{'GB/s':>12}{'share':>7}",
        *(_line(row) for row in result["tasks"]),
    ]
    weak = [row for row in result["tasks"] if row["weak"]]
    big = sum(row["dense"] and row["flops"] >= BIG_FLOPS for row in result["tasks"])
    lines += ["", f"{big - len(weak)} of {big} dense tasks of at least 50 MFLOP reach 90 % of peak warm and 85 % cold"]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    warm, cold = row["warm"], row["cold"]
    rates = [rate for rate in (warm, cold) if rate]
    bound = moved = ""
    if any(rate["bound"] < 1 for rate in rates):
        bound = "/".join(f"{rate['bound']:.0%}" for rate in rates)
        moved = "/".join(f"{row['nbytes'] / rate['seconds']['median'] / 1e9:.1f}" for rate in rates)
    notes = ", ".join(f"{state} below {WANTED[state]:.0%} ({why})" for state, why in row["weak"].items())
    mark = "e" if row["effective"] else " "
    return (
        f"{row['task'][:38]:<38} {row['space'][:10]:<11}{row['calls']:3}{row['flops'] / 1e6:8.1f} {_columns(warm, mark)}  "
        f"{_columns(cold, mark)}{bound:>10}{moved:>12}{row['share']:7.1%}  {notes}"
    ).rstrip()


def _columns(rate: dict[str, Any] | None, mark: str) -> str:
    if rate is None:
        return f"{'-':>9}{'':>21}"
    found = rate["of_peak"]
    seconds, speed = rate["seconds"]["median"], rate["flops_per_s"]
    return f"{seconds * 1e6:9.1f}{speed / 1e9:9.1f}{mark}{found['median']:5.0%} ({found['spread']:3.0%})"


def main() -> int:
    """Prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="where to run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of each task (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.core not in os.sched_getaffinity(0):
        parser.error(f"this process may not use core {options.core}, only {sorted(os.sched_getaffinity(0))}")
    if options.rounds < PASSES:
        parser.error(f"--rounds is {options.rounds}, expected at least {PASSES}")
    try:
        with open_bundle(options.bundle) as bundle:
            result = measure_bundle(bundle, options.core, options.rounds)
    except MvcompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
