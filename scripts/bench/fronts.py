#!/usr/bin/env python3
"""Fronts of the structured spaces against those of MetaSchedule's generic search, at as many trials, on the same tasks.

    scripts/bench/fronts.py MODEL.onnx [MODEL.onnx ...] [--tasks 12] [--trials 48] [--json FILE]

The tasks are the ones with the most work (FLOPs x calls) that a structured space knows, as many of each model as of the others.
Each is searched twice, both times as `mvcompile compile` would: the structured spaces by their pool and cost model, and TVM's
generic CPU rules by MetaSchedule's evolution and cost model. Batches of the two alternate, measured by the same processes. Then
the members of both fronts are measured again, interleaved, and compared: best latency, and hypervolume of the objectives
(latency, footprint, traffic) against one corner: the worst footprint and traffic of both, and twice the best latency of the
slower search. How long each search took to the best latency that the generic one found is shown as well, by the end of the batch
that had it: proposing, building and measuring. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from mvcompile import pareto, spaces
from mvcompile.frontend.onnx_import import load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.measure.pool import PoolMeasurer
from mvcompile.measure.protocol import Candidate, Subject
from mvcompile.measure.residence import stays
from mvcompile.search.strategy import PoolStrategy, Strategy
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task, extract
from mvcompile.tuning.decisions import DecisionModel
from mvcompile.tuning.fronts import MAX_SLOWDOWN, NOISE
from mvcompile.tuning.metaschedule import EvolutionStrategy
from mvcompile.types import HostTarget, Objectives

BATCH = 16
COMPARED = 8
"""Members of each front that are measured again."""


@dataclass(slots=True)
class Search:
    """One search of one task: its strategy, what it measured, and the seconds that proposing, building and measuring took.

    `progress`: after each batch, the seconds so far and the best latency."""

    strategy: Strategy[Candidate]
    found: dict[Candidate, Objectives]
    trials: int = 0
    seconds: float = 0.0
    progress: list[tuple[float, float]] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """The best latency so far."""
        return min((each.latency_s for each in self.found.values()), default=math.inf)

    def seconds_to(self, latency_s: float) -> float:
        """Until it had found something as fast; infinite if it never did."""
        return next((seconds for seconds, best_s in self.progress if best_s <= latency_s), math.inf)


def chosen(models: Sequence[Path], count: int, target: HostTarget) -> list[tuple[str, Task, bool]]:
    """(model, task, whether the model's weights leave the last-level cache between two runs) of `count` tasks."""
    found: list[tuple[str, Task, bool]] = []
    for number, path in enumerate(models):
        program = extract(prepare(to_relax(load_model(path)), target))
        heaviest = sorted(program.tasks, key=lambda task: -task.flops * task.calls)
        known = (task for task in heaviest if spaces.structured_candidates(task.module, target))
        share = count * (number + 1) // len(models) - count * number // len(models)
        cold = not stays(program.weight_bytes, target, min(os.sched_getaffinity(0)))
        found += [(path.stem, task, cold) for task in itertools.islice(known, share)]
    return found


def search(subject: Subject, one: Search, measurer: PoolMeasurer, trials: int) -> bool:
    """One batch; False when there is nothing left to try."""
    start = time.monotonic()
    candidates = one.strategy.ask(min(BATCH, trials - one.trials))
    if not candidates:
        return False
    outcomes = measurer.measure(subject, candidates, one.best_s if one.found else None)
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if outcome.objectives is not None:
            one.found[candidate] = outcome.objectives
    one.strategy.tell([(candidate, each.objectives) for candidate, each in zip(candidates, outcomes, strict=True)])
    one.trials += len(candidates)
    one.seconds += time.monotonic() - start
    one.progress.append((one.seconds, one.best_s))
    return True


def front(found: dict[Candidate, Objectives]) -> dict[Candidate, Objectives]:
    """The members of a front, fastest first."""
    order = sorted(found, key=lambda candidate: found[candidate].vector())
    points = np.array([found[candidate].vector() for candidate in order])
    return {order[int(index)]: found[order[int(index)]] for index in pareto.front(points, rtol=NOISE)}


def judge(task: Task, cold: bool, measurer: PoolMeasurer, target: HostTarget, trials: int) -> dict[str, Any]:
    """Both searches of a task."""
    subject = Subject(task.key, tvm.ir.save_json(task.module), tuple(sorted(task.constants)), task.num_outputs, cold)
    start, machine = time.monotonic(), tvm_target(target)
    pool = spaces.structured_candidates(task.module, target)
    structured = Search(PoolStrategy(pool, seed=0, model=DecisionModel(0)), {})
    structured.seconds = time.monotonic() - start
    start = time.monotonic()
    generic = Search(EvolutionStrategy(task.module, machine, seed=0, batch=BATCH), {})
    generic.seconds = time.monotonic() - start
    going = [structured, generic]
    while going:
        going = [one for one in going if one.trials < trials and search(subject, one, measurer, trials)]
    fronts = [front(structured.found), front(generic.found)]
    members = [candidate for each in fronts for candidate in list(each)[:COMPARED]]
    again = dict(zip(members, measurer.compare(subject, members), strict=True))
    measured = [
        [outcome.objectives for candidate in each if (outcome := again.get(candidate)) is not None and outcome.objectives]
        for each in fronts
    ]
    points = np.array([each.vector() for members in measured for each in members])
    best = [min((each.latency_s for each in members), default=math.inf) for members in measured]
    corner = points.max(axis=0) * 1.05
    corner[0] = MAX_SLOWDOWN * max(each for each in best if each < math.inf)
    volumes = [pareto.hypervolume([each.vector() for each in members], corner) if members else 0.0 for members in measured]
    return {
        "pool": len(pool),
        "trials": [structured.trials, generic.trials],
        "seconds": [structured.seconds, generic.seconds],
        "seconds_to_generic_best": [each.seconds_to(generic.best_s) for each in (structured, generic)],
        "best_s": best,
        "gflops": [task.flops / each / 1e9 for each in best],
        "front": [len(each) for each in fronts],
        "hypervolume_ratio": volumes[0] / volumes[1] if volumes[1] else math.inf,
    }


def main() -> int:
    """Judges the tasks one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--tasks", type=int, default=12, help="tasks in all (default: 12)")
    parser.add_argument("--trials", type=int, default=48, help="candidates of each search of a task (default: 48)")
    parser.add_argument("--json", type=Path, help="write the results to this file, after every task")
    options = parser.parse_args()
    target, rows = detect_target(), []
    print(f"{'':45} {'best, ms':>17} {'GFLOP/s':>13} {'front':>7} {'to theirs, s':>13}  hypervolume, ours / theirs")
    with tempfile.TemporaryDirectory() as folder, PoolMeasurer(target, Path(folder)) as measurer:
        for model, task, cold in chosen(options.models, options.tasks, target):
            row = {"model": model, "task": task.kind, "key": task.key, **judge(task, cold, measurer, target, options.trials)}
            rows.append(row)
            best, rates, sizes, seconds = row["best_s"], row["gflops"], row["front"], row["seconds_to_generic_best"]
            print(
                f"{model + ' ' + task.kind:45} {1e3 * best[0]:8.3f} {1e3 * best[1]:8.3f} {rates[0]:6.0f} {rates[1]:6.0f} "
                f"{sizes[0]:3} {sizes[1]:3} {seconds[0]:6.0f} {seconds[1]:6.0f}  {row['hypervolume_ratio']:.2f}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps({"trials": options.trials, "tasks": rows}, indent=1) + "\n")
    ratios = [row["hypervolume_ratio"] for row in rows]
    print(f"hypervolume ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}")
    times = [row["seconds_to_generic_best"] for row in rows]
    faster = [theirs / ours for ours, theirs in times]
    whole = sum(theirs for _, theirs in times) / sum(ours for ours, _ in times)
    print(f"time to the generic search's best, theirs / ours: median {statistics.median(faster):.1f}, of all tasks {whole:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
