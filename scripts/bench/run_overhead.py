#!/usr/bin/env python3
"""What Session.run adds to the kernels' own time, and how long loading takes.

    scripts/bench/run_overhead.py model.mvb --output overhead.json

Every run, of whatever kind, is timed twice: by the caller, around the call, and by the bundle's driver, which reads the clock
before the first kernel and after each one. What a run adds is the difference of the two in the same run, so the noise of the
kernels, which is a hundred times larger, is not in it. The kernels' part holds 12 ns per step for the driver's loop, which belong
to what is added, and 40 ns for the clock, which do not.

Five kinds of run take turns. Before each one that is timed there is another of its kind, so that it finds the caches that it
finds in a loop of such runs:

    run       session.run(session.input_buffers), from a thread that is pinned to the session's core
    roaming   the same from a thread that is not: two system calls more
    copying   run with inputs that have to be copied
    call      nothing but the bundle's driver, called by way of tvm-ffi: no session, no checks, no output. What is left is the way
              from the caller's clock to the first kernel and back, through tvm-ffi and the interpreter lock
    enter     nothing but the native function that `run` calls first, which checks inputs and returns outputs; the same as `call`
              if the bundle has none

and a sixth that runs nothing: an empty function of Python, timed the same way, after a `call`. That is what the measurement
itself adds, or the least of it: its last part is done in warmer caches than those that a run leaves.

The first three figures are what is added to the sum of kernel times. `run` less `enter`, in the same round, is what Session.run
adds to the least that Python can do with the kernels. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mvcompile.errors import MvcompileError, UsageError
from mvcompile.runtime import Session, load
from mvcompile.runtime.entrance import Enter
from mvcompile.runtime.steps import NativeSteps

WARM_UP = 5


def main() -> int:
    arguments = _arguments()
    try:
        result = measure(arguments.bundle, arguments.rounds, arguments.core)
    except MvcompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(report(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=300, help="runs of each kind (default 300)")
    parser.add_argument("--core", type=int, help="where to run (default: any)")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def measure(bundle: Path, rounds: int, core: int | None) -> dict[str, Any]:
    """All times in seconds: medians, but for `added_mean_s`; `*_iqr_s` is the interquartile range of the value before it."""
    cores = None if core is None else [core]
    first_load_s, session = _timed(lambda: load(bundle, cores=cores))
    session.close()
    later_s = []
    for _ in range(9):
        seconds, session = _timed(lambda: load(bundle, cores=cores))
        later_s.append(seconds)
        session.close()
    with load(bundle, cores=cores) as session:
        times = _rounds(session, rounds)
        steps = len(session.layers)
        used = list(session.cores)
    added = {kind: [wall - kernels for wall, kernels in pairs] for kind, pairs in times.items()}
    beyond = [run - least for run, least in zip(added["run"], added["enter"], strict=True)]
    return {
        "bundle": bundle.name,
        "steps": steps,
        "cores": used,
        "rounds": rounds,
        "load_first_s": first_load_s,
        "load_later_s": statistics.median(later_s),
        "run_s": statistics.median(wall for wall, _ in times["run"]),
        "kernels_s": statistics.median(kernels for _, kernels in times["run"]),
        "added_s": statistics.median(added["run"]),
        "added_iqr_s": _iqr(added["run"]),
        "added_mean_s": statistics.mean(added["run"]),
        "added_roaming_s": statistics.median(added["roaming"]),
        "added_copying_s": statistics.median(added["copying"]),
        "call_s": statistics.median(added["call"]),
        "call_iqr_s": _iqr(added["call"]),
        "enter_s": statistics.median(added["enter"]),
        "enter_iqr_s": _iqr(added["enter"]),
        "empty_s": statistics.median(added["empty"]),
        "beyond_enter_s": statistics.median(beyond),
        "beyond_enter_iqr_s": _iqr(beyond),
        "added_per_step_s": statistics.median(added["run"]) / max(steps, 1),
        "beyond_enter_per_step_s": statistics.median(beyond) / max(steps, 1),
    }


def _rounds(session: Session, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Per kind of run, per round: the caller's seconds and the kernels'."""
    inputs = session.input_buffers
    random = np.random.default_rng(0)
    for array in inputs.values():
        array[...] = random.integers(0, 2, array.shape) if array.dtype.kind in "biu" else random.standard_normal(array.shape)
    unaligned = {name: _unaligned(array) for name, array in inputs.items()}
    call, enter, kernels = _inside(session)
    everywhere, pinned = os.sched_getaffinity(0), set(session.cores)
    kinds: dict[str, tuple[Callable[[], object], set[int]]] = {
        "run": (lambda: session.run(inputs), pinned),
        "roaming": (lambda: session.run(inputs), everywhere),
        "copying": (lambda: session.run(unaligned), pinned),
        "call": (call, pinned),
        "enter": ((lambda: enter(inputs) or session.run(inputs)) if enter else call, pinned),
        "empty": (lambda: None, pinned),
    }
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds + WARM_UP):
        for kind, (function, affinity) in kinds.items():
            os.sched_setaffinity(0, affinity)
            (call if kind == "empty" else function)()
            wall, _ = _timed(function)
            if number >= WARM_UP:  # the first ones touch the weights for the first time
                times[kind].append((wall, 0.0 if kind == "empty" else kernels()))
    os.sched_setaffinity(0, everywhere)
    return times


def _inside(session: Session) -> tuple[Callable[[], object], Enter | None, Callable[[], float]]:
    """The bare call of the driver, the native function that takes the inputs (None if there is none), and a function that tells
    the seconds that all kernels of the last run took.

    From here on the driver reads the clock in every run of the session. None of this can be had from outside: no other script
    may look into a session.
    """
    steps = session._program._steps
    if not isinstance(steps, NativeSteps):
        raise UsageError(f"{session!r} runs without a driver, from Python: compile the model again")
    steps.time_every_run()
    driver, run, times, stamps = steps._driver, steps.run_address, steps._times_address, steps._times
    entrance = session._program.entrance
    if entrance is not None:
        entrance.stamp(times)

    def kernels() -> float:
        seconds, nanoseconds = (stamps[-1] - stamps[0]).tolist()
        return float(seconds + nanoseconds * 1e-9)

    return lambda: driver(run, 0, times), None if entrance is None else entrance.enter, kernels


def _unaligned(array: Any) -> Any:
    block = np.empty(array.nbytes + 64, np.uint8)
    begin = -block.ctypes.data % 64 + (16 if array.nbytes else 0)
    copy = block[begin % 64 : begin % 64 + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = function()
    return time.perf_counter() - begin, value


def _iqr(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def report(result: dict[str, Any]) -> str:
    """The result for people."""
    us = {name: 1e6 * value for name, value in result.items() if name.endswith("_s")}
    return "\n".join(
        [
            f"{result['bundle']}: {result['steps']} steps on core {result['cores'][0]}, {result['rounds']} rounds",
            f"load                       {us['load_first_s'] / 1e3:9.1f} ms first, {us['load_later_s'] / 1e3:.1f} ms later",
            f"run                        {us['run_s']:9.1f} us, its kernels {us['kernels_s']:.1f} us",
            f"added                      {us['added_s']:9.1f} us (iqr {us['added_iqr_s']:.1f}, mean {us['added_mean_s']:.1f})",
            f"  from a roaming thread    {us['added_roaming_s']:9.1f} us",
            f"  inputs copied            {us['added_copying_s']:9.1f} us",
            f"  by the driver alone      {us['call_s']:9.1f} us (iqr {us['call_iqr_s']:.1f}), by way of tvm-ffi",
            f"  by the entrance alone    {us['enter_s']:9.1f} us (iqr {us['enter_iqr_s']:.1f})",
            f"  beyond the entrance      {us['beyond_enter_s']:9.1f} us (iqr {us['beyond_enter_iqr_s']:.1f})",
            f"an empty function          {us['empty_s']:9.1f} us",
            f"added per step             {us['added_per_step_s']:9.3f} us",
            f"  beyond the entrance      {us['beyond_enter_per_step_s']:9.3f} us",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
