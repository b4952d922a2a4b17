#!/usr/bin/env python3
"""Latency of bundles against ONNX Runtime and OpenVINO on the same cores, interleaved in one run.

    scripts/bench/solo.py MODEL.onnx BUNDLE.mvb [MODEL.onnx BUNDLE.mvb ...] [--threads 1] [--rounds 30] [--json FILE]
    scripts/bench/solo.py FOLDER ...        # every NAME.onnx in it that has a NAME.mvb beside it

Every round times one call of each engine in turn. Figures are medians over rounds with the interquartile range over the median;
a ratio is the median of the rounds' own ratios, so that a drift of the machine's speed cancels. The best peer of a network is the
engine with the least median; the last line is the geometric mean of the ratios to it. All engines get the same float32 model and
inputs and run on the first `--threads` cores that this process may use, their helping threads pinned as a bundle's are; OpenVINO
gets its hints for float32 and latency. With several threads each call waits until the threads of the one before have gone to
sleep. With `--busy` a process that never waits shares the last of these cores. One network's engines are gone before the
next one's are made. OpenVINO is an optional extra (`bench`): without it the
comparison is with ONNX Runtime alone. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from figures import figure, paired_ratio

from mvcompile import runtime
from mvcompile.errors import MvcompileError
from mvcompile.frontend.reference import integer_limits, random_inputs

try:
    import openvino
except ImportError:
    openvino = None

WARM_UP = 3
SETTLE_S = 0.01
"""Idle threads of a pool look for work for up to 4 ms (a bundle's) before they sleep; the next engine must not pay for that."""
OURS = "mvcompile"
TITLES = {OURS: "mvcompile", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}

Calls = dict[str, Callable[[], Any]]
Row = dict[str, Any]


def pairs(paths: Sequence[Path]) -> list[tuple[Path, Path]]:
    """The models and bundles that the command line names. Raises ValueError that says what is wrong with it."""
    found, left = [], []
    for path in paths:
        if not path.is_dir():
            left.append(path)
            continue
        inside = [(model, model.with_suffix(".mvb")) for model in sorted(path.glob("*.onnx"))]
        there = [pair for pair in inside if pair[1].exists()]
        if not there:
            raise ValueError(f"{path} has no NAME.onnx with a NAME.mvb beside it")
        found += there
    models, bundles = left[::2], left[1::2]
    if len(models) != len(bundles) or any(path.suffix == ".mvb" for path in models):
        raise ValueError("name a model and its bundle in turn, or a folder that holds both: MODEL.onnx BUNDLE.mvb ...")
    return [*zip(models, bundles, strict=True), *found]


def engines(model: Path, session: runtime.Session, cores: Sequence[int]) -> Calls:
    """A call of each engine on the same inputs."""
    inputs = random_inputs(session.inputs, 0, integer_limits(onnx.load(model)))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = len(cores)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if len(cores) > 1:  # of all threads but the calling one; it counts cores from 1
        options.add_session_config_entry("session.intra_op_thread_affinities", ";".join(str(core + 1) for core in cores[1:]))
    reference = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    wanted = {info.name for info in reference.get_inputs()}
    fed = {name: value for name, value in inputs.items() if name in wanted}
    calls: Calls = {OURS: lambda: session.run(inputs), "onnxruntime": lambda: reference.run(None, fed)}
    if openvino is not None:
        hints = {
            "INFERENCE_NUM_THREADS": len(cores),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": len(cores) > 1,
        }
        request = openvino.Core().compile_model(str(model), "CPU", hints).create_infer_request()
        calls["openvino"] = lambda: request.infer(fed)
    return calls


def measure(calls: Calls, rounds: int, settle_s: float) -> dict[str, list[float]]:
    """Seconds of every round of every engine, taken in turn."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if settle_s:
                time.sleep(settle_s)
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def judge(name: str, seconds: Mapping[str, Sequence[float]]) -> Row:
    """What is shown of one network; `ours_over_best` compares with the fastest other engine."""
    rows: dict[str, Row] = {}
    for engine, values in seconds.items():
        found = figure(values)
        ratio = paired_ratio(seconds[OURS], values)
        rows[engine] = {"median_s": found.median, "spread": found.spread, "ours_over_this": ratio, "seconds": list(values)}
    best = min((engine for engine in rows if engine != OURS), key=lambda engine: rows[engine]["median_s"])
    return {"model": name, "engines": rows, "best_peer": best, "ours_over_best": rows[best]["ours_over_this"]}


def compare(model: Path, bundle: Path, cores: Sequence[int], rounds: int, copy_weights: bool) -> Row:
    """Measures one network, with engines that live no longer than that."""
    with runtime.load(bundle, cores=cores, copy_weights=copy_weights) as session:
        calls = engines(model, session, cores)
        row = judge(model.name, measure(calls, rounds, SETTLE_S if len(cores) > 1 else 0.0))
        row["bundle"], row["cpu"] = bundle.name, session.manifest.target.cpu_model
    del calls
    gc.collect()
    return row


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A process on `core` meanwhile that never waits and touches no memory."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile os.getppid() == {os.getpid()}: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def head() -> str:
    """The titles of the columns."""
    present = [title for engine, title in TITLES.items() if engine != "openvino" or openvino is not None]
    return f"{'network':<24}" + "".join(f"{title + ', ms':>22}" for title in present) + "  ours / best"


def line(row: Row) -> str:
    """One network for people."""
    times = "".join(f"{each['median_s'] * 1e3:14.3f} ({each['spread']:5.1%})" for each in row["engines"].values())
    return f"{Path(row['model']).stem[:23]:<24}{times}{row['ours_over_best']:13.3f}  {TITLES[row['best_peer']]}"


def main() -> int:
    """Prints a line for each network, then the geometric mean; writes the JSON file after every network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="MODEL.onnx BUNDLE.mvb", help="or a folder")
    parser.add_argument("--threads", type=int, default=1, help="of every engine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="of each network (default: %(default)s)")
    parser.add_argument("--copy-weights", action="store_true", help="of bundles to memory of their own (`runtime.load`)")
    parser.add_argument("--busy", action="store_true", help="beside a busy process on the last of several cores")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= options.threads <= len(allowed):
        parser.error(f"--threads is {options.threads}, this process may use 1 to {len(allowed)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    if options.busy and options.threads == 1:
        parser.error("--busy shares the last of several cores; give --threads 2 or more")
    try:
        networks = pairs(options.paths)
    except ValueError as error:
        parser.error(str(error))
    cores = allowed[: options.threads]
    os.sched_setaffinity(0, cores)  # threads that the engines start inherit it
    if openvino is None:
        print("OpenVINO is not installed (extra `bench`): compared with ONNX Runtime only", file=sys.stderr)
    shared = ", the last one shared with a busy process" if options.busy else ""
    print(f"{options.threads} thread(s), cores {', '.join(map(str, cores))}{shared}, {options.rounds} rounds, medians (spread)")
    print(head(), flush=True)
    rows: list[Row] = []
    for model, bundle in networks:
        try:
            with busy(cores[-1]) if options.busy else nullcontext():
                rows.append(compare(model, bundle, cores, options.rounds, options.copy_weights))
        except MvcompileError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        mean = math.exp(sum(math.log(row["ours_over_best"]) for row in rows) / len(rows))
        print(line(rows[-1]), flush=True)
        if options.json:
            result = {"threads": options.threads, "cores": cores, "busy": options.busy, "rounds": options.rounds}
            result["engines"] = _versions()
            options.json.write_text(json.dumps({**result, "geometric_mean": mean, "networks": rows}, indent=1) + "\n")
    if len(rows) > 1:
        print(f"geometric mean of ours / best peer: {mean:.3f}")
    return 0


def _versions() -> dict[str, str]:
    versions = {"onnxruntime": onnxruntime.__version__}
    return versions if openvino is None else {**versions, "openvino": openvino.__version__}


if __name__ == "__main__":
    sys.exit(main())
