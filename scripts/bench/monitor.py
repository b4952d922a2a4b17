#!/usr/bin/env python3
"""Does the residual monitor find the level, keep quiet when nothing runs, and cost little?

    scripts/bench/monitor.py BUNDLE.mvb [BUNDLE.mvb ...] [--seconds 40] [--idle 10000] [--pairs 12] [--json FILE]

The bundle has to hold a profile for one core. Three measurements of each:

    found   a neighbour on another core starts, changes kind and stops at random times for `--seconds`; after every run the level
            that the session holds to be the case is compared with the truth. A change may take 3 runs or 100 ms, whichever is
            longer; outside these windows the share of runs that are right is `right`, and `delay` is how long it took to find a
            new level (median, longest). Levels of one group of the profile count as one. A network whose levels are all one group
            has nothing to find, and the line says so
    idle    `--idle` runs beside nothing: how often the level left the group of `none`
    cost    blocks of runs with the monitor and without, in alternation: median of the blocks' own ratios

Nothing else should run meanwhile; on a shared host an idle neighbour may be a real one that this program knows nothing of.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mvcompile import runtime
from mvcompile.bundle.interference import Interference
from mvcompile.errors import MvcompileError
from mvcompile.measure.generator import Generator
from mvcompile.profile.place import place_of
from mvcompile.target import detect_target
from mvcompile.types import Dials

RUNS, SECONDS = 3, 0.1
"""What a change may take: runs or time, whichever is longer."""
SHORTEST_S, LONGEST_S = 0.6, 3.0
BLOCK_S, LEAST_RUNS = 0.5, 8

Change = tuple[float, int]
"""When (time.monotonic), and to which level."""


def script(levels: int, seconds: float, seed: int) -> list[Change]:
    """Times from the begin and levels: never the same level twice in a row."""
    chance = random.Random(seed)
    at, level, changes = 0.0, 0, []
    while at < seconds:
        level = chance.choice([other for other in range(levels) if other != level]) if changes else 0
        changes.append((at, level))
        at += chance.uniform(SHORTEST_S, LONGEST_S)
    return changes


def play(changes: Sequence[Change], found: Interference, neighbour: Generator, done: list[Change], over: threading.Event) -> None:
    """Plays the script, in a thread on the neighbour's core; `done` gets when each change was made."""
    os.sched_setaffinity(0, {neighbour.core})
    begin = time.monotonic()
    for at, level in changes:
        if over.wait(max(0.0, at - (time.monotonic() - begin))):
            return
        neighbour.set(found.levels[level].dials)
        done.append((time.monotonic(), level))


def follow(session: runtime.Session, inputs: Any, found: Interference, neighbour: Generator, seconds: float, seed: int) -> Any:
    """(end of a run, its seconds, level held) of every run, and the changes as they were made."""
    numbers = {level.name: index for index, level in enumerate(found.levels)}
    done: list[Change] = []
    over = threading.Event()
    director = threading.Thread(target=play, args=(script(len(found.levels), seconds, seed), found, neighbour, done, over))
    seen = []
    begin = time.monotonic()
    director.start()
    while time.monotonic() - begin < seconds:
        started = time.monotonic()
        session.run(inputs)
        ended = time.monotonic()
        seen.append((ended, ended - started, numbers[session.stats().level]))
    over.set()
    director.join()
    neighbour.set(Dials())
    return seen, done


def judge(seen: Sequence[tuple[float, float, int]], changes: Sequence[Change], group: Sequence[int]) -> dict[str, Any]:
    """Right outside the windows, and how long changes took."""
    right = counted = 0
    delays: list[tuple[int, float]] = []
    missed = 0
    for index, (at, level) in enumerate(changes):
        end = changes[index + 1][0] if index + 1 < len(changes) else seen[-1][0] + 1.0
        inside = [(ended, seconds, group[held] == group[level]) for ended, seconds, held in seen if at < ended <= end]
        whole = [entry for entry in inside if entry[0] - entry[1] >= at]  # runs that began after the change
        new = index == 0 or group[level] != group[changes[index - 1][1]]
        allowed = [i for i, (ended, _, _) in enumerate(whole) if new and (i < RUNS or ended - at <= SECONDS)]
        outside = whole[len(allowed) :]
        right += sum(good for _, _, good in outside)
        counted += len(outside)
        if new and index:
            first = next((i for i, (_, _, good) in enumerate(whole) if good), None)
            if first is None:
                missed += 1
            else:
                delays.append((first + 1, whole[first][0] - at))
    return {
        "runs": len(seen),
        "counted": counted,
        "right": right / counted if counted else 1.0,
        "changes": len(delays) + missed,
        "missed": missed,
        "delay_s": [seconds for _, seconds in delays],
        "delay_runs": [runs for runs, _ in delays],
    }


def idle(session: runtime.Session, inputs: Any, found: Interference, group: Sequence[int], runs: int) -> dict[str, Any]:
    """How often the level left the group of `none` in `runs` runs."""
    away = {level.name for level, number in zip(found.levels, group, strict=True) if number != group[0]}
    alarms, wrong, before = 0, 0, False
    for _ in range(runs):
        session.run(inputs)
        now = session.stats().level in away
        alarms += now and not before
        wrong += now
        before = now
    return {"runs": runs, "alarms": alarms, "runs_in_alarm": wrong}


def cost(session: runtime.Session, inputs: Any, pairs: int) -> dict[str, Any]:
    """Blocks of runs with the monitor and without, both with variant 0 everywhere."""
    ratios = []
    session.select_all(0)
    for number in range(pairs):
        medians = {}
        for watched in (True, False) if number % 2 else (False, True):
            session.adapt("fixed" if watched else None, "residual" if watched else None)
            session.run(inputs)  # the first one after a change pays for new memory
            times: list[float] = []
            begin = time.perf_counter()
            while time.perf_counter() - begin < BLOCK_S or len(times) < LEAST_RUNS:
                started = time.perf_counter()
                session.run(inputs)
                times.append(time.perf_counter() - started)
            medians[watched] = statistics.median(times)
        ratios.append(medians[True] / medians[False])
    session.adapt(None)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"ratio": statistics.median(ratios), "quartiles": [low, high], "pairs": pairs}


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of one bundle."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise SystemExit("a neighbour needs a core of its own, and this process may use one only")
    place = place_of(None, allowed, detect_target())
    with runtime.load(path, cores=place.cores[:1]) as session:
        found = session.interference
        profile = next((each for each in found.profiles if each.cores == 1), None) if found else None
        if found is None or profile is None:
            raise SystemExit(f"{path} has no profile on 1 core: run `mvcompile profile` on it")
        inputs = session.input_buffers
        for name, array in runtime.selftest_inputs(session).items():
            inputs[name][...] = array
        with Generator(place.neighbour, place.llc_bytes) as neighbour:
            session.adapt("adaptive", "residual")
            seen, changes = follow(session, inputs, found, neighbour, options.seconds, options.seed)
        session.adapt("adaptive", "residual")
        quiet = idle(session, inputs, found, profile.group, options.idle)
        share = session.stats().monitor_share
        return {
            "model": session.manifest.model.name,
            "levels": [level.name for level in found.levels],
            "group": list(profile.group),
            "found": judge(seen, changes, profile.group),
            "idle": quiet,
            "cost": cost(session, inputs, options.pairs),
            "monitor_share": share,
        }


def line(row: dict[str, Any]) -> str:
    """One network for people."""
    found, quiet, price = row["found"], row["idle"], row["cost"]
    groups: dict[int, list[str]] = {}
    for name, number in zip(row["levels"], row["group"], strict=True):
        groups.setdefault(number, []).append(name)
    told = " | ".join("=".join(names) for names in groups.values())
    text = f"{row['model']}: levels told apart: {told}"
    if len(groups) > 1 and found["delay_s"]:
        runs, delay_ms = statistics.median(found["delay_runs"]), [1e3 * each for each in found["delay_s"]]
        text += (
            f"; right in {found['right']:.1%} of {found['counted']} runs; found after {runs:g} runs, "
            f"{statistics.median(delay_ms):.0f} ms (longest {max(delay_ms):.0f} ms), "
            f"missed {found['missed']} of {found['changes']}"
        )
    else:
        text += "; nothing to find"
    text += f"; {quiet['alarms']} false alarms in {quiet['runs']} idle runs"
    return text + f"; cost {price['ratio'] - 1:+.2%} ({price['quartiles'][0] - 1:+.2%} to {price['quartiles'][1] - 1:+.2%})"


def main() -> int:
    """Prints a line for each bundle; writes the JSON file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE.mvb")
    parser.add_argument("--seconds", type=float, default=40.0, help="beside a neighbour that changes (default: %(default)s)")
    parser.add_argument("--idle", type=int, default=10_000, help="runs beside nothing (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=12, help="of blocks with and without (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("a neighbour needs a core of its own, and this process may use one only")
    rows = []
    for path in options.bundles:
        try:
            rows.append(measure(path, options))
        except MvcompileError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        print(line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
