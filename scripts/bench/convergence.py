#!/usr/bin/env python3
"""How long tuning took to come close to the best it found, from the logs of `mvcompile compile --json`; nothing is run.

    mvcompile compile MODEL.onnx -o model.mvb --json > model.log
    scripts/bench/convergence.py LOG [LOG ...] [--within 0.03] [--json FILE]

The figure that is followed is the sum of the best measured times of all layers (`model_s` of the events), the least of which is
the best. A run that went on from an earlier one with the same work directory is given as several logs joined in their order
(`cat first.log second.log`). Seconds are those of the tuning, builds of candidates included; measuring the schedules that tasks
begin with, and building the bundle, come on top.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Convergence:
    """Of one log. Seconds of tuning; the model's times are sums over its layers."""

    name: str
    first_s: float
    best_s: float
    reached_s: float
    tuned_s: float
    trials: int


def read(path: Path) -> list[dict[str, float]]:
    """The progress of a log, in order; lines that are no events are skipped."""
    events = []
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "progress":
            events.append(event)
    return events


def judge(name: str, events: Sequence[dict[str, float]], within: float) -> Convergence:
    """When the model's time was first less than (1 + `within`) times its best."""
    searched = [event for event in events if event["elapsed_s"] > 0]
    best = min(event["model_s"] for event in searched)
    reached = next(event["elapsed_s"] for event in searched if event["model_s"] <= (1 + within) * best)
    before = [event for event in events if event["elapsed_s"] == 0] or searched
    return Convergence(name, before[-1]["model_s"], best, reached, searched[-1]["elapsed_s"], int(searched[-1]["trials"]))


def main() -> int:
    """Prints one line for each log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--within", type=float, default=0.03, help="of the best (default: 0.03)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    found = []
    print(f"{'':24} {'untuned, ms':>12} {'best, ms':>10} {'trials':>7} {'tuned, s':>9}  within {options.within:.0%} after, s")
    for path in options.logs:
        try:
            events = read(path)
        except OSError as error:
            parser.error(f"{path} cannot be read: {error.strerror}")
        if not any(event["elapsed_s"] > 0 for event in events):
            parser.error(f"{path} holds no progress of a search: give what `mvcompile compile --json` printed")
        one = judge(path.stem, events, options.within)
        found.append(one)
        figures = f"{1e3 * one.first_s:12.2f} {1e3 * one.best_s:10.2f} {one.trials:7} {one.tuned_s:9.0f} {one.reached_s:12.0f}"
        print(f"{one.name:24} {figures}")
    if options.json:
        rows = [asdict(one) for one in found]
        options.json.write_text(json.dumps({"within": options.within, "models": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
