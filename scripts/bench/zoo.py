#!/usr/bin/env python3
"""Compiles networks of the zoo and compares what they compute with ONNX Runtime: right, within 3 minutes, within 8 GiB?

    scripts/bench/zoo.py [NAME ...] [--budget 0] [--inputs 3] [--json FILE] [--keep DIR]

Each network gets the inputs of its final softmax as further outputs (after it a comparison says little), is compiled by the
command `mvcompile compile` and compared by `compare.py`, each in a process of its own. Memory is the sum of the resident sets of
the whole process tree, ten times a second: pages that processes share count once for each, so it errs high. Exit code 1 if one
network fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import psutil

from mvcompile import zoo
from mvcompile.bundle.reader import open_bundle
from mvcompile.frontend.reference import with_logits

MAX_SECONDS = 180.0
MAX_MIB = 8 * 1024.0
SAMPLE_S = 0.1
COMPARE = Path(__file__).with_name("compare.py")


@dataclass(slots=True)
class Run:
    """A command that ended: exit code, output, wall and CPU seconds, peak memory of its process tree in MiB."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass(slots=True)
class Result:
    """One network. Figures are absent when it did not get that far."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mib: float = 0.0
    bundle_bytes: int = 0
    layers: int = 0
    tasks: int = 0
    variants: int = 0
    trials: int = 0
    outputs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


def run_watched(command: Sequence[str], limit_s: float) -> Run:
    """Runs `command` while a thread samples the memory of its process tree; kills it after `limit_s` seconds."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak, ended = [0], threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, ended), daemon=True)
    sampler.start()
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end when their pipes close
        stdout, stderr = process.communicate()
        stderr += f"\nkilled after {limit_s:.0f} s"
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    ended.set()
    sampler.join()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(process.returncode, stdout, stderr, seconds, cpu, peak[0] / 2**20)


def _sample(root: int, peak: list[int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        total = 0
        try:
            parent = psutil.Process(root)
            for process in [parent, *parent.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
        except psutil.Error:
            continue
        peak[0] = max(peak[0], total)


def export(name: str, folder: Path) -> Path:
    """The network with the inputs of its final softmax as further outputs, as a file."""
    model = onnx.load(zoo.get(name, folder))
    path = folder / f"{name}-logits.onnx"
    onnx.save(with_logits(model), path)
    return path


def judge(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Compiles and compares one network."""
    result = Result(name)
    model, bundle = export(name, folder), folder / f"{name}.mvb"
    command = [
        sys.executable,
        "-m",
        "mvcompile.cli",
        "compile",
        str(model),
        "-o",
        str(bundle),
        "--budget",
        options.budget,
        "--json",
    ]
    run = run_watched(command, limit_s=MAX_SECONDS * 5 if options.budget == "0" else 24 * 3600.0)
    result.seconds, result.cpu_seconds, result.peak_mib = run.seconds, run.cpu_seconds, run.peak_mib
    if run.code != 0:
        result.problems.append(f"compile exited {run.code}: {run.stderr.strip()[-600:]}")
        return result
    events = [json.loads(line) for line in run.stdout.splitlines()]
    tuned_s = next(event["tuning_s"] for event in events if event["event"] == "result")
    if run.seconds - tuned_s > MAX_SECONDS:
        result.problems.append(f"took {run.seconds - tuned_s:.0f} s besides tuning, at most {MAX_SECONDS:.0f} allowed")
    if run.peak_mib > MAX_MIB:
        result.problems.append(f"needed {run.peak_mib:.0f} MiB, at most {MAX_MIB:.0f} allowed")
    result.trials = next(event["trials"] for event in events if event["event"] == "result")
    _describe(bundle, result)
    _compare(model, bundle, options.inputs, result)
    return result


def _describe(bundle: Path, result: Result) -> None:
    result.bundle_bytes = bundle.stat().st_size
    with open_bundle(bundle) as opened:
        result.layers, result.tasks = len(opened.manifest.plan.steps), len(opened.manifest.tasks)
        result.variants = sum(len(task.variants) for task in opened.manifest.tasks)


def _compare(model: Path, bundle: Path, inputs: int, result: Result) -> None:
    found = bundle.with_suffix(".json")
    several = result.variants > result.tasks
    command = [sys.executable, str(COMPARE), str(model), str(bundle), "--inputs", str(inputs), "--json", str(found)]
    run = run_watched([*command, "--selections", "20" if several else "0"], limit_s=600.0)
    if not found.exists():
        result.problems.append(f"comparing exited {run.code}: {run.stderr.strip()[-600:]}")
        return
    result.outputs = json.loads(found.read_text())
    for output in result.outputs:
        if output["errors"]:
            result.problems.append(
                f"output {output['output']}: {output['errors']} errors, {output['of_tolerance']:.3g} of the tolerance"
            )
        if not output["telling"]:
            result.problems.append(
                f"output {output['output']} says nothing: std {output['std']:.3g}, {output['distinct']} distinct values"
            )


def show(result: Result) -> None:
    """One line for the network, one for each output and each problem."""
    print(
        f"{'ok  ' if result.passed else 'FAIL'} {result.name:<17} {result.seconds:6.1f} s ({result.cpu_seconds:6.1f} s CPU) "
        f"{result.peak_mib:6.0f} MiB  bundle {result.bundle_bytes / 2**20:6.1f} MiB  {result.layers:3} layers "
        f"{result.tasks:3} tasks {result.variants:3} variants {result.trials:4} trials",
        flush=True,
    )
    for one in result.outputs:
        print(
            f"       {one['output']}: {one['errors']} of {one['elements']} off; largest error {one['max_abs_error']:.2g} "
            f"absolute, {one['max_rel_error']:.2g} relative, {one['of_tolerance']:.2g} of the tolerance; std {one['std']:.3g}, "
            f"{one['distinct']} distinct"
        )
    for problem in result.problems:
        print(f"       {problem}")
    sys.stdout.flush()


def main() -> int:
    """Judges the networks one after another."""
    known = [entry.name for entry in zoo.entries()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"networks (default: all: {', '.join(known)})")
    parser.add_argument("--budget", default="0", help="tuning time of each (default: 0)")
    parser.add_argument("--inputs", type=int, default=3, help="sets of random inputs (default: 3)")
    parser.add_argument("--json", type=Path, help="write the results to this file, after every network")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep models and bundles in this folder")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(f"the zoo has no network {name!r}; it has: {', '.join(known)}")
    results = []
    for name in options.names or known:
        with tempfile.TemporaryDirectory(prefix="mvcompile-zoo-") as folder:
            place = options.keep or Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            results.append(judge(name, place, options))
        show(results[-1])
        if options.json:
            rows = [{**asdict(result), "passed": result.passed} for result in results]
            machine = {"cores": len(os.sched_getaffinity(0)), "cpu": _cpu_model()}
            options.json.write_text(json.dumps({"budget": options.budget, "machine": machine, "networks": rows}, indent=1) + "\n")
    failed = [result.name for result in results if not result.passed]
    print(
        f"{len(results) - len(failed)} of {len(results)} networks passed" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
