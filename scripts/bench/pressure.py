#!/usr/bin/env python3
"""What variants take from others: static estimates against a probe, and what the policy `kind` spares a neighbour.

    scripts/bench/pressure.py BUNDLE.mvb [BUNDLE.mvb ...] [--seconds 60] [--all] [--json FILE]
    scripts/bench/pressure.py --kind BATCH.mvb NEIGHBOUR.mvb [--rounds 12] [--block 1.0] [--json FILE]
    scripts/bench/pressure.py --kind BATCH.mvb probe

The first form measures every kept variant of the tasks that have several (`--all`: of all tasks) anew, as `mvcompile profile`
does (docs/interference.md) but without drawing what was measured towards the estimates, and prints Spearman's rank correlation of
the probe's slowdown with each estimate, over all variants of a family of tasks and over all. `reliability` is the share of the
figures' variance that their errors do not explain: a perfect estimate would reach its square root, the `ceiling`, and no more.
Where that is low, the slope of a weighted straight line says more: how many of its own errors it is above 0.

The second form runs the bundle BATCH in a process of its own on the first core that this process may use, with the policy
`kind` (allowance 5 %) and with variant 0 everywhere, in blocks that alternate with blocks in which it rests; beside it, on the
last core, the bundle NEIGHBOUR runs all the time, or a probe follows its chain and writes its stream. Figures are medians over
blocks of each block's median; ratios are medians of the rounds' own. A gain is called one if the rounds' differences say so
(`mvcompile.regret.clearly_better`).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from figures import figure, paired_ratio

from mvcompile import regret, runtime
from mvcompile.bundle.interference import interference_of
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import EnvironmentProblem, MvcompileError
from mvcompile.measure.load import LoadProcess, Work
from mvcompile.profile.place import place_of
from mvcompile.profile.pressure import Felt, measure, patterns, worth_knowing
from mvcompile.runtime.policy import costs_of, kindest
from mvcompile.target import detect_target

ALLOWANCE = 0.05
REST, FIXED, KIND = "rest", "fixed", "kind"
MODES = (REST, FIXED, KIND)
END = "end"
"""Of a block."""
SETTLE_S = 0.1
"""Of a block, what does not count: the batch tenant's policy and the caches settle."""
LEAST = 5
"""Variants of a family for a rank correlation."""

Row = dict[str, Any]


def estimates(manifest: Manifest, felt: Mapping[tuple[int, int], Felt], bundle: str) -> list[Row]:
    """What is known of each measured variant that has objectives."""
    rows = []
    for (number, variant), each in felt.items():
        task = manifest.tasks[number]
        known = task.variants[variant].objectives
        if known is not None:
            row = {
                "bundle": bundle,
                "task": task.name,
                "family": task.kind,
                "variant": variant,
                "space": task.variants[variant].space,
            }
            row |= {"pressure": each.pressure, "error": each.error, "cache": each.cache, "memory": each.memory}
            row |= {"call_s": each.call_s, "traffic_bytes": known.traffic_bytes, "footprint_bytes": known.footprint_bytes}
            rows.append(row | {"traffic_bytes_per_s": known.traffic_bytes / each.call_s if each.call_s else 0.0})
    return rows


STATIC = ("traffic_bytes_per_s", "traffic_bytes", "footprint_bytes")


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, equal values sharing the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return below + (equal - 1) / 2


def spearman(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """The correlation of ranks; None if all values of one are equal."""
    first, second = ranks(ones), ranks(others)
    spread = float(first.std() * second.std())
    return float(np.mean((first - first.mean()) * (second - second.mean()))) / spread if spread > 0 else None


def judge(rows: Sequence[Row]) -> Row:
    """Correlations and reliability of some variants."""
    pressure = [row["pressure"] for row in rows]
    variance = float(np.var(pressure, ddof=1)) if len(rows) > 1 else 0.0
    errors = float(np.mean([row["error"] ** 2 for row in rows]))
    reliability = max(0.0, 1 - errors / variance) if variance > 0 else 0.0
    found: Row = {"variants": len(rows), "reliability": reliability, "ceiling": math.sqrt(reliability)}
    found["median_pressure"], found["most"] = statistics.median(pressure), max(pressure)
    found["error"] = math.sqrt(errors)
    for name in STATIC:
        found[name] = spearman([row[name] for row in rows], pressure) if len(rows) >= LEAST else None
        found[f"{name}_slope"], found[f"{name}_slope_error"] = slope(rows, name)
    return found


def slope(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Of the straight line of pressure over an estimate, weighted by errors; and its error, with the scatter about the line."""
    x, p, e = (np.array([row[key] for row in rows], dtype=np.float64) for key in (name, "pressure", "error"))
    weight = e**-2
    x -= np.sum(weight * x) / np.sum(weight)
    square = float(np.sum(weight * x * x))
    if square <= 0 or len(rows) < LEAST:
        return 0.0, math.inf
    found = float(np.sum(weight * x * p)) / square
    rest = p - np.sum(weight * p) / np.sum(weight) - found * x
    return found, math.sqrt(max(1.0, float(np.sum(weight * rest**2)) / (len(rows) - 2)) / square)


def families(rows: Sequence[Row]) -> dict[str, Row]:
    """`judge` of each family with at least `LEAST` variants, of the members of which it is named, and of all."""
    names = sorted({row["family"] for row in rows})
    found = {name: judge(some) for name in names if len(some := [row for row in rows if row["family"] == name]) >= LEAST}
    return {**found, "all": judge(rows)} if rows else found


def show_families(found: Mapping[str, Row]) -> None:
    """For people."""
    titles = ("traffic/s", "traffic", "footprint")
    print("static estimates against the probe's slowdown: Spearman's rank correlation (slope of a straight line over its error)")
    print(
        f"  {'family':<28}{'variants':>9}"
        + "".join(f"{title:>16}" for title in titles)
        + "  ceiling  slowdown: median, most, error"
    )
    for name, each in found.items():
        cells = "".join(f"{_correlation(each, key):>16}" for key in STATIC)
        tail = f"{each['median_pressure']:8.1%}{each['most']:8.1%}{each['error']:8.1%}"
        print(f"  {name[:27]:<28}{each['variants']:>9}{cells}{each['ceiling']:>9.2f}  {tail}")


def _correlation(found: Row, name: str) -> str:
    if found[name] is None:
        return "-"
    return f"{found[name]:.2f} ({found[f'{name}_slope'] / found[f'{name}_slope_error']:+.1f})"


def correlate(options: argparse.Namespace, cores: tuple[int, int]) -> Row:
    """The first form."""
    rows: list[Row] = []
    for path in options.bundles:
        with open_bundle(path) as bundle:
            manifest = bundle.manifest
        every = [range(len(task.variants)) for task in manifest.tasks]
        ones = worth_knowing(manifest.tasks, every)
        if options.all:
            ones += [(number, 0) for number, task in enumerate(manifest.tasks) if len(task.variants) == 1]
        felt = measure(path, ones, cores, options.seconds, options.seed)
        rows += estimates(manifest, felt, path.name)
        print(f"{path.name}: {len(felt)} of {len(ones)} variants in {options.seconds:.0f} s", flush=True)
    found = families(rows)
    show_families(found)
    return {"families": found, "variants": rows}


def batch(pipe: Any, path: Path, core: int) -> None:
    """The batch tenant's process: does what it is told to until it is told to end, and then says how long its runs took."""
    try:
        _serve(pipe, path, core)
    except MvcompileError as error:
        pipe.send(str(error))


def _serve(pipe: Any, path: Path, core: int) -> None:
    os.sched_setaffinity(0, {core})
    with (
        runtime.load(path, cores=[core]) as fixed,
        runtime.load(path, cores=[core], share_cores=True, policy=runtime.kind(ALLOWANCE), monitor="residual") as kind,
    ):
        sessions = {FIXED: fixed, KIND: kind}
        inputs = {name: runtime.selftest_inputs(session) for name, session in sessions.items()}
        for name, session in sessions.items():
            session.run(inputs[name])
        pipe.send([])
        while (mode := pipe.recv()) is not None:
            seconds: list[float] = []
            while mode != REST and not pipe.poll():
                begin = time.perf_counter()
                sessions[mode].run(inputs[mode])
                seconds.append(time.perf_counter() - begin)
            pipe.recv()
            pipe.send(seconds)
        pipe.send(kind.selection)


@contextmanager
def neighbour(what: str, core: int, llc_bytes: int) -> Iterator[Callable[[float], float]]:
    """What takes seconds and gives how long something takes in them: a run, or the probe for its work (ns for a load, and for 64
    bytes to memory, of which the geometric mean)."""
    if what == "probe":
        load = LoadProcess(core, llc_bytes)

        def probe(seconds: float) -> float:
            return math.sqrt(math.prod(_each_ns(load, work, seconds / 2) for work in patterns(llc_bytes))) * 1e-9

        try:
            yield probe
        finally:
            load.stop()
        return
    with runtime.load(what, cores=[core]) as session:
        inputs = runtime.selftest_inputs(session)

        def run(seconds: float) -> float:
            times: list[float] = []
            until = time.perf_counter() + seconds
            while not times or time.perf_counter() < until:
                begin = time.perf_counter()
                session.run(inputs)
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        yield run


def _each_ns(load: LoadProcess, work: Work, seconds: float) -> float:
    load.apply(work)
    time.sleep(0.02)
    before = load.counters()
    time.sleep(seconds)
    after = load.counters()
    load.apply(Work())
    done = after.chased_loads - before.chased_loads + (after.written_bytes - before.written_bytes) / 64
    return (after.seconds - before.seconds) * 1e9 / max(done, 1)


def alternate(
    pipe: Any, beside: Callable[[float], float], rounds: int, block_s: float, seed: int, settle_s: float = SETTLE_S
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per mode of the batch tenant, a figure for each round: the neighbour's, and the batch tenant's own median."""
    chance = random.Random(seed)
    theirs: dict[str, list[float]] = {mode: [] for mode in MODES}
    own: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in chance.sample(MODES, len(MODES)):
            pipe.send(mode)
            beside(settle_s)
            theirs[mode].append(beside(block_s))
            pipe.send(END)
            times = pipe.recv()
            own[mode].append(statistics.median(times) if times else 0.0)
    return theirs, own


def kindness(theirs: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]]) -> Row:
    """Medians, ratios and what is beyond noise."""
    found: Row = {"neighbour": {}, "batch": {}}
    for name, figures in (("neighbour", theirs), ("batch", own)):
        for mode in MODES:
            each = figure(figures[mode])
            found[name][mode] = {"median_s": each.median, "spread": each.spread, "seconds": list(figures[mode])}
    found["neighbour_fixed_over_rest"] = paired_ratio(theirs[FIXED], theirs[REST])
    found["neighbour_kind_over_rest"] = paired_ratio(theirs[KIND], theirs[REST])
    found["neighbour_kind_over_fixed"] = paired_ratio(theirs[KIND], theirs[FIXED])
    found["batch_kind_over_fixed"] = paired_ratio(own[KIND], own[FIXED])
    better = regret.clearly_better(np.subtract(theirs[FIXED], theirs[KIND]))
    worse = regret.clearly_better(np.subtract(theirs[KIND], theirs[FIXED]))
    found["verdict"] = "kinder" if better else "less kind" if worse else "within noise"
    return found


def show_kindness(found: Row) -> None:
    """For people."""
    print(f"{found['batch_name']} as the batch tenant beside {found['neighbour_name']}: ms, median of blocks (spread)")
    print(f"  {'batch tenant':<14}{'its run':>20}{'the neighbour':>24}")
    for mode in MODES:
        one, other = found["batch"][mode], found["neighbour"][mode]
        mine = "-" if mode == REST else f"{one['median_s'] * 1e3:.3f} ({one['spread']:.1%})"
        print(f"  {mode:<14}{mine:>20}{other['median_s'] * 1e3:>15.6f} ({other['spread']:5.1%})")
    fixed, kind = found["neighbour_fixed_over_rest"], found["neighbour_kind_over_rest"]
    print(f"  the neighbour against alone: {fixed:.3f} beside fixed, {kind:.3f} beside kind")
    theirs, own = found["neighbour_kind_over_fixed"], found["batch_kind_over_fixed"]
    print(f"  kind / fixed: the neighbour {theirs:.3f}, the batch tenant {own:.3f}")
    print(f"  layers that kind runs with another variant: {found['switched']} of {found['layers']}; {found['verdict']}")


def be_kind(options: argparse.Namespace, cores: tuple[int, int]) -> Row:
    """The second form."""
    path, other = options.kind
    with open_bundle(path) as bundle:
        manifest, known = bundle.manifest, interference_of(bundle)
    costs = costs_of(manifest, known, 1)
    expected = kindest(costs, 0, ALLOWANCE)
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=batch, args=(end, Path(path), cores[0]), daemon=True)
    process.start()
    end.close()
    try:
        os.sched_setaffinity(0, {cores[1]})
        with neighbour(other, cores[1], manifest.target.llc_bytes) as beside:
            refused = pipe.recv()
            if refused:
                raise EnvironmentProblem(f"the batch tenant cannot run: {refused}")
            theirs, own = alternate(pipe, beside, options.rounds, options.block, options.seed)
        pipe.send(None)
        ran = pipe.recv()
    except EOFError:
        raise SystemExit(f"the batch tenant of {path} has ended; its error is above") from None
    finally:
        os.sched_setaffinity(0, cores)
        process.join(timeout=10)
    found = kindness(theirs, own)
    found |= {
        "batch_name": Path(path).stem,
        "neighbour_name": Path(other).stem,
        "layers": len(expected),
        "measured": costs.per_second,
    }
    found |= {"switched": sum(variant != 0 for variant in ran), "switched_at_none": sum(variant != 0 for variant in expected)}
    show_kindness(found)
    return found


def main() -> int:
    """Prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*", metavar="BUNDLE.mvb")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each bundle (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="tasks with one variant too")
    parser.add_argument("--kind", nargs=2, metavar=("BATCH.mvb", "NEIGHBOUR.mvb"), help="or `probe` for the neighbour")
    parser.add_argument("--rounds", type=int, default=12, help="with --kind (default: %(default)s)")
    parser.add_argument("--block", type=float, default=1.0, help="seconds of a block, with --kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        parser.error("a neighbour needs a core of its own, and this process may use one only")
    if bool(options.bundles) == bool(options.kind):
        parser.error("give bundles, or --kind with two")
    try:
        result = (be_kind if options.kind else correlate)(options, place_of(None, allowed, detect_target()).pair)
    except MvcompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
