#!/usr/bin/env python3
"""Latency of a bundle against ONNX Runtime (and OpenVINO, if installed) on the same cores, interleaved in one run.

    scripts/bench/solo.py MODEL.onnx BUNDLE.mvb [--threads 1] [--rounds 30] [--json FILE]

Every round times one call of each engine in turn; figures are medians over rounds with the interquartile range over the median,
and the ratio is the median of the rounds' own ratios, so that a drift of the machine's speed cancels. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from mvcompile import runtime
from mvcompile.frontend.reference import integer_limits, random_inputs

WARM_UP = 3


def engines(model: Path, bundle: Path, threads: int) -> tuple[dict[str, Callable[[], Any]], runtime.Session]:
    """A call of each engine on the same inputs."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    session = runtime.load(bundle, cores=cores)
    inputs = random_inputs(session.inputs, 0, integer_limits(onnx.load(model)))
    os.sched_setaffinity(0, cores)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    reference = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    calls: dict[str, Callable[[], Any]] = {
        "mvcompile": lambda: session.run(inputs),
        "onnxruntime": lambda: reference.run(None, inputs),
    }
    try:
        import openvino
    except ImportError:
        return calls, session
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(str(model), "CPU", hints).create_infer_request()
    calls["openvino"] = lambda: request.infer(inputs)
    return calls, session


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every engine, taken in turn."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    calls, session = engines(options.model, options.bundle, options.threads)
    with session:
        seconds = measure(calls, options.rounds)
        cpu = session.manifest.target.cpu_model
    ours = seconds["mvcompile"]
    rows = {}
    for name, values in seconds.items():
        quartiles = statistics.quantiles(values, n=4)
        ratio = statistics.median(a / b for a, b in zip(ours, values, strict=True))
        median = statistics.median(values)
        rows[name] = {"median_s": median, "spread": (quartiles[2] - quartiles[0]) / median, "ours_over_this": ratio}
        print(f"{name:<12} {median * 1e3:9.3f} ms  spread {rows[name]['spread']:5.1%}  mvcompile / this {ratio:.3f}")
    if options.json:
        result = {"model": options.model.name, "threads": options.threads, "rounds": options.rounds, "cpu": cpu, "engines": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
