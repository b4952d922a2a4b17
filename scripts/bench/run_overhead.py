#!/usr/bin/env python3
"""What Session.run adds to the kernels' own time, and how long loading takes.

    scripts/bench/run_overhead.py model.mvb --output overhead.json

Each round runs the model plainly, with a clock at every kernel, and with inputs that have to be copied, in turn. What a run
adds is given twice: the median plain run less the median sum of kernels, and the median difference between a run with clocks and
the sum of its own kernels, in which noise of the kernels cancels out but the cost of the clocks is included. Nothing else should
run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mvcompile.errors import MvcompileError
from mvcompile.runtime import Session, load


def main() -> int:
    arguments = _arguments()
    try:
        result = measure(arguments.bundle, arguments.rounds, arguments.threads, arguments.cores)
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
    parser.add_argument("--rounds", type=int, default=200, help="runs of each kind (default 200)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], help="for example 0,1")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def measure(bundle: Path, rounds: int, threads: int, cores: list[int] | None) -> dict[str, Any]:
    """All times in seconds; `*_iqr_s` is the interquartile range of the value before it."""
    first_load_s, session = _timed(lambda: load(bundle, threads=threads, cores=cores))
    session.close()
    later_s = []
    for _ in range(9):
        seconds, session = _timed(lambda: load(bundle, threads=threads, cores=cores))
        later_s.append(seconds)
        session.close()
    with load(bundle, threads=threads, cores=cores) as session:
        times = _rounds(session, rounds)
        steps = len(session.layers)
        used = list(session.cores)
    run_s, kernels_s = statistics.median(times["run"]), statistics.median(kernels for _, kernels in times["profiled"])
    paired_s = statistics.median(wall - kernels for wall, kernels in times["profiled"])
    return {
        "bundle": bundle.name,
        "steps": steps,
        "cores": used,
        "rounds": rounds,
        "load_first_s": first_load_s,
        "load_later_s": statistics.median(later_s),
        "run_s": run_s,
        "run_iqr_s": _iqr(times["run"]),
        "copying_run_s": statistics.median(times["copying"]),
        "kernels_s": kernels_s,
        "kernels_iqr_s": _iqr([kernels for _, kernels in times["profiled"]]),
        "added_per_step_s": (run_s - kernels_s) / max(steps, 1),
        "added_per_step_paired_s": paired_s / max(steps, 1),
    }


def _rounds(session: Session, rounds: int) -> dict[str, list[Any]]:
    random = np.random.default_rng(0)
    inputs = session.input_buffers
    for array in inputs.values():
        array[...] = random.integers(0, 2, array.shape) if array.dtype.kind in "biu" else random.standard_normal(array.shape)
    unaligned = {name: _unaligned(array) for name, array in inputs.items()}
    times: dict[str, list[Any]] = {"run": [], "profiled": [], "copying": []}
    for number in range(rounds + 5):
        run_s, _ = _timed(lambda: session.run(inputs))
        wall_s, steps_s = _timed(lambda: session.run_profiled(inputs))
        copying_s, _ = _timed(lambda: session.run(unaligned))
        if number >= 5:  # the first ones touch the weights for the first time
            times["run"].append(run_s)
            times["profiled"].append((wall_s, sum(steps_s)))
            times["copying"].append(copying_s)
    return times


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
            f"{result['bundle']}: {result['steps']} steps on cores {result['cores']}, {result['rounds']} rounds",
            f"load                    {us['load_first_s'] / 1e3:10.1f} ms first, {us['load_later_s'] / 1e3:.1f} ms later",
            f"run                     {us['run_s']:10.1f} us (iqr {us['run_iqr_s']:.1f})",
            f"run, inputs copied      {us['copying_run_s']:10.1f} us",
            f"sum of kernels          {us['kernels_s']:10.1f} us (iqr {us['kernels_iqr_s']:.1f})",
            f"added per step          {us['added_per_step_s']:10.3f} us ({us['added_per_step_paired_s']:.3f} us paired)",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
