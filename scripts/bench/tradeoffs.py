#!/usr/bin/env python3
"""How many layers of each network have a real trade-off, and of what kind; from the bundles alone, nothing is run.

    scripts/bench/tradeoffs.py BUNDLE.mvb [BUNDLE.mvb ...] [--json FILE]

A layer has a choice if its task keeps several variants. Kinds (a layer may count in several):

    traffic      some variant moves at least 10 % fewer bytes to the shared levels than the fastest
    footprint    some variant occupies at least 10 % less of the last-level cache
    algorithm    variants differ in algorithm (Winograd against direct)
    level        in the running network, another variant than the fastest alone is faster by more than 3 % at some level of
                 interference (bundles with a profile)

`front` counts layers whose measured front has several members, whatever was kept. `share` is the part of the model's time that
the layers with a choice take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mvcompile.bundle.interference import Interference, interference_of
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest, Task

LESS = 0.9
FASTER = 0.97
KINDS = ("traffic", "footprint", "algorithm", "level")


def kinds(task: Task) -> set[str]:
    """What the variants of a task trade, by their objectives."""
    first = task.variants[0].objectives
    if len(task.variants) < 2 or first is None:
        return set()
    others = [variant.objectives for variant in task.variants[1:] if variant.objectives is not None]
    found = set()
    if any(other.traffic_bytes <= LESS * first.traffic_bytes for other in others):
        found.add("traffic")
    if any(other.footprint_bytes <= LESS * first.footprint_bytes for other in others):
        found.add("footprint")
    if len({variant.space.startswith("winograd") for variant in task.variants}) > 1:
        found.add("algorithm")
    return found


def felt(found: Interference, step: int) -> bool:
    """Whether some level of interference wants another variant of a step than the one that is fastest alone."""
    for profile in found.profiles:
        alone = profile.latency_s[0][step]
        first = alone.index(min(alone))
        if any(min(level[step]) < FASTER * level[step][first] for level in profile.latency_s[1:]):
            return True
    return False


def tradeoffs(manifest: Manifest, found: Interference | None) -> dict[str, Any]:
    """The row of a network."""
    calls = Counter(step.task for step in manifest.plan.steps)
    counts: Counter[str] = Counter()
    share = 0.0
    for number, step in enumerate(manifest.plan.steps):
        task = manifest.tasks[step.task]
        counts["front"] += len(task.front) > 1
        counts["choice"] += len(task.variants) > 1
        share += task.time_share / calls[step.task] if len(task.variants) > 1 else 0.0
        counts.update(kinds(task))
        counts["level"] += len(task.variants) > 1 and found is not None and felt(found, number)
    row = {name: counts[name] for name in ("front", "choice", *KINDS)}
    return {
        "network": manifest.model.name,
        "layers": len(manifest.plan.steps),
        **row,
        "share": share,
        "profiled": found is not None,
    }


def main() -> int:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE.mvb")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    print(f"{'network':<20}{'layers':>7}{'front':>7}{'choice':>7}{'share':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    for path in options.bundles:
        with open_bundle(path, verify=False) as bundle:
            row = tradeoffs(bundle.manifest, interference_of(bundle))
        rows.append(row)
        cells = "".join(f"{row[kind] if kind != 'level' or row['profiled'] else '-':>11}" for kind in KINDS)
        print(f"{row['network'][:19]:<20}{row['layers']:>7}{row['front']:>7}{row['choice']:>7}{row['share']:>8.1%}{cells}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
