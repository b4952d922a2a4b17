#!/usr/bin/env python3
"""Whole networks beside a neighbour: adaptive against fixed selections, ONNX Runtime and OpenVINO, on the same cores.

    scripts/bench/interference.py MODEL.onnx BUNDLE.mvb [MODEL.onnx BUNDLE.mvb ...] [--cores 1] [--visits 4] [--runs 5]
    scripts/bench/interference.py MODEL.onnx BUNDLE.mvb --varying 60 [--json FILE]

The bundle has to hold a profile (`mvcompile compile` or `mvcompile profile`). The neighbour runs on the last core that this
process may use, at the levels of the bundle's profile with the same dials. The engines:

    adaptive      the bundle with the adaptive policy and the residual monitor, as users run it
    <level>       the bundle with the selection of that level, fixed (`alone`: variant 0 everywhere)
    onnxruntime   the same model and inputs
    openvino

Every visit to a level gives each engine in turn a block of runs, of which the first ones fill caches (and let the monitor find
the level) and do not count; levels and engines alternate, so that what drifts, drifts for all. Figures are medians; ratios are
medians of the visits' own ratios of medians. `static` is the fixed selection with the least geometric mean over all levels: what
a compiler that knew of interference, but could not switch, would ship.

With `--varying SECONDS` the neighbour changes its level at random times instead. Each engine in turn sees the same scenes of some
seconds, SECONDS in all; figures are means and 99th percentiles of all its runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from solo import OURS, TITLES, engines, pairs

from mvcompile import runtime
from mvcompile.bundle.interference import CoreProfile, Interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import MvcompileError
from mvcompile.frontend.reference import integer_limits, random_inputs
from mvcompile.measure.generator import Generator
from mvcompile.profile.place import place_of
from mvcompile.target import detect_target
from mvcompile.types import Dials

ADAPTIVE, ALONE = "adaptive", "alone"
SETTLE_RUNS, SETTLE_S = 3, 0.12
"""Runs and time before a block counts, whichever is longer: what the monitor is allowed to find a level in."""
SCENE_S = 4.0
SHORTEST_S, LONGEST_S = 0.3, 2.0
"""Of a level in a scene."""

Calls = Mapping[str, Callable[[], Any]]
Row = dict[str, Any]


@contextmanager
def contestants(model: Path, bundle: Path, cores: Sequence[int]) -> Iterator[tuple[Calls, Interference, CoreProfile]]:
    """A call of each engine, and the bundle's profile."""
    with (
        runtime.load(bundle, cores=cores) as fixed,
        runtime.load(bundle, cores=cores, share_cores=True, policy="adaptive", monitor="residual") as adaptive,
    ):
        found = fixed.interference
        profile = next((each for each in found.profiles if each.cores == len(cores)), None) if found else None
        if found is None or profile is None:
            raise SystemExit(
                f"{bundle} has no profile on {len(cores)} core(s): run `mvcompile profile --cores {len(cores)}` on it"
            )
        theirs = engines(model, fixed, cores)
        ours = theirs.pop(OURS)  # type: ignore[attr-defined]
        vectors: dict[tuple[int, ...], str] = {(0,) * len(fixed.layers): ALONE}
        for level, selection in zip(found.levels, profile.selections, strict=True):
            vectors.setdefault(selection.variants, level.name)
        inputs = random_inputs(adaptive.inputs, 0, integer_limits(onnx.load(model)))
        selected: list[Any] = [None]

        def with_selection(vector: tuple[int, ...]) -> Callable[[], Any]:
            def call() -> Any:
                if selected[0] is not vector:
                    fixed.select_all(vector)
                    selected[0] = vector
                return ours()

            return call

        calls = {ADAPTIVE: lambda: adaptive.run(inputs), **{name: with_selection(v) for v, name in vectors.items()}, **theirs}
        yield calls, found, profile
        del calls, theirs
        gc.collect()


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def block(call: Callable[[], Any], runs: int) -> list[float]:
    """Seconds of `runs` calls after those that do not count."""
    begin, warm = time.perf_counter(), 0
    while warm < SETTLE_RUNS or time.perf_counter() - begin < SETTLE_S:
        call()
        warm += 1
    return [timed(call) for _ in range(runs)]


def at_levels(calls: Calls, found: Interference, neighbour: Generator, visits: int, runs: int, seed: int) -> dict[str, Any]:
    """Seconds per level, engine and visit."""
    order = random.Random(seed)
    seconds: dict[str, dict[str, list[list[float]]]] = {level.name: {name: [] for name in calls} for level in found.levels}
    for _ in range(visits):
        for level in order.sample(found.levels, len(found.levels)):
            neighbour.set(level.dials)
            for name in order.sample(list(calls), len(calls)):
                seconds[level.name][name].append(block(calls[name], runs))
    neighbour.set(Dials())
    return seconds


def judge(seconds: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], profile: CoreProfile, names: Sequence[str]) -> Row:
    """Medians, spreads and the ratios that are promised."""
    table = {level: {name: _figure(visits) for name, visits in found.items()} for level, found in seconds.items()}
    fixed = [name for name in next(iter(table.values())) if name not in (ADAPTIVE, *TITLES)]
    peers = [name for name in next(iter(table.values())) if name in TITLES]
    static = min(fixed, key=lambda name: _geomean([found[name]["median_s"] for found in table.values()]))
    ratios = {}
    for level, found in seconds.items():
        best = min(peers, key=lambda name: table[level][name]["median_s"])
        ratios[level] = {
            "adaptive_over_alone": _ratio(found[ADAPTIVE], found[ALONE]),
            "adaptive_over_static": _ratio(found[ADAPTIVE], found[static]),
            "adaptive_over_best_peer": _ratio(found[ADAPTIVE], found[best]),
            "best_peer": best,
        }
    groups = {name: names[group] for name, group in zip(names, profile.group, strict=True)}
    return {"levels": table, "static": static, "ratios": ratios, "groups": groups, "seconds": seconds}


def _figure(visits: Sequence[Sequence[float]]) -> dict[str, float]:
    values = [value for visit in visits for value in visit]
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median_s": middle, "spread": (high - low) / middle}


def _ratio(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(ones, others, strict=True))


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def scenes(found: Interference, seconds: float, seed: int) -> list[list[tuple[float, Dials]]]:
    """Scenes of SCENE_S: when to set which dials, from the scene's begin."""
    chance = random.Random(seed)
    made = []
    for _ in range(max(1, round(seconds / SCENE_S))):
        at, scene = 0.0, []
        while at < SCENE_S:
            scene.append((at, chance.choice(found.levels).dials))
            at += chance.uniform(SHORTEST_S, LONGEST_S)
        made.append(scene)
    return made


def varying(calls: Calls, found: Interference, neighbour: Generator, seconds: float, seed: int) -> dict[str, list[float]]:
    """Seconds of all runs of each engine, which all see the same scenes."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for scene in scenes(found, seconds, seed):
        for name, call in calls.items():
            neighbour.set(Dials())
            call()
            over = threading.Event()
            director = threading.Thread(target=_play, args=(scene, neighbour, over))
            begin = time.perf_counter()
            director.start()
            while time.perf_counter() - begin < SCENE_S:
                times[name].append(timed(call))
            over.set()
            director.join()
    neighbour.set(Dials())
    return times


def _play(scene: Sequence[tuple[float, Dials]], neighbour: Generator, over: threading.Event) -> None:
    os.sched_setaffinity(0, {neighbour.core})  # of this thread: not where something is timed
    begin = time.perf_counter()
    for at, dials in scene:
        if over.wait(max(0.0, at - (time.perf_counter() - begin))):
            return
        neighbour.set(dials)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)]


def show_levels(row: Row) -> None:
    """One network for people."""
    names = list(next(iter(row["levels"].values())))
    print(f"{row['model']}: ms, median (spread)")
    print(f"  {'level':<10}" + "".join(f"{name:>20}" for name in names) + "   adaptive / alone, static, best peer")
    for level, found in row["levels"].items():
        cells = "".join(f"{each['median_s'] * 1e3:12.3f} ({each['spread']:5.1%})" for each in found.values())
        ratio = row["ratios"][level]
        parts = (ratio["adaptive_over_alone"], ratio["adaptive_over_static"], ratio["adaptive_over_best_peer"])
        print(f"  {level:<10}{cells}   " + ", ".join(f"{part:.3f}" for part in parts) + f" ({ratio['best_peer']})")
    print(f"  best static selection: {row['static']}", flush=True)


def show_varying(row: Row) -> None:
    """One network for people."""
    print(f"{row['model']}: beside a neighbour that changes, ms")
    for name, found in row["varying"].items():
        print(f"  {name:<14} mean {found['mean_s'] * 1e3:9.3f}   p99 {found['p99_s'] * 1e3:9.3f}   runs {found['runs']}")
    sys.stdout.flush()


def measure(model: Path, bundle: Path, cores: Sequence[int], core: int, options: argparse.Namespace) -> Row:
    """One network."""
    with open_bundle(bundle) as opened:
        llc_bytes = opened.manifest.target.llc_bytes
    allowed = os.sched_getaffinity(0)
    with Generator(core, llc_bytes) as neighbour:
        os.sched_setaffinity(0, cores)  # threads that the engines start inherit it
        try:
            with contestants(model, bundle, cores) as (calls, found, profile):
                row: Row = {"model": model.stem, "cores": list(cores), "neighbour_core": core, "cpu": found.cpu_model}
                if options.varying:
                    times = varying(calls, found, neighbour, options.varying, options.seed)
                    row["varying"] = {
                        name: {"mean_s": statistics.fmean(t), "p99_s": _p99(t), "runs": len(t), "seconds": t}
                        for name, t in times.items()
                    }
                else:
                    seconds = at_levels(calls, found, neighbour, options.visits, options.runs, options.seed)
                    row |= judge(seconds, profile, [level.name for level in found.levels])
        finally:
            os.sched_setaffinity(0, allowed)
    return row


def main() -> int:
    """Prints a table for each network; writes the JSON file after every network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="MODEL.onnx BUNDLE.mvb", help="or a folder")
    parser.add_argument("--cores", type=int, default=1, help="of every engine (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=4, help="of each level (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="of each engine in a visit (default: %(default)s)")
    parser.add_argument("--varying", type=float, metavar="SECONDS", help="a neighbour that changes its level at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        parser.error("a neighbour needs a core of its own, and this process may use one only")
    if not 1 <= options.cores <= len(allowed):
        parser.error(f"--cores is {options.cores}, this process may use 1 to {len(allowed)}")
    try:
        networks = pairs(options.paths)
    except ValueError as error:
        parser.error(str(error))
    place = place_of(None, allowed, detect_target())
    cores = list(place.cores[: options.cores])
    rows: list[Row] = []
    for model, bundle in networks:
        try:
            rows.append(measure(model, bundle, cores, place.neighbour, options))
        except MvcompileError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        (show_varying if options.varying else show_levels)(rows[-1])
        if options.json:
            options.json.write_text(json.dumps({"options": vars(options) | {"paths": [], "json": None}, "networks": rows}) + "\n")
    if not options.varying:
        heavy = [r["adaptive_over_best_peer"] for row in rows for level, r in row["ratios"].items() if level != "none"]
        print(f"adaptive / best peer at the levels with a neighbour, geometric mean: {_geomean(heavy):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
