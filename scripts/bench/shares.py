#!/usr/bin/env python3
"""A model, not a measurement: whole runs of bundles with 1, 1/2, 1/4 and 1/8 of a core's memory bandwidth and cache.

    scripts/bench/shares.py BUNDLE.mvb [BUNDLE.mvb ...] [--cores 1] [--json FILE]

`mvcompile.share_model` says what is assumed. For each bundle with a profile: the milliseconds of a run with variant 0 everywhere,
with the selection of the profile's heaviest level, and with the variants that the model itself finds fastest; each with perfect
overlap of memory and arithmetic, with the part that the profile was found to expose (`alpha`), and with no overlap at all. Below
it, what the model says of the profile's own levels, beside what was measured there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mvcompile import share_model
from mvcompile.bundle.interference import CoreProfile, Interference, interference_of
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import MvcompileError, UsageError
from mvcompile.share_model import Demand, Parameters, Shares

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8)
Row = dict[str, Any]
Demands = Sequence[Sequence[Demand | None]]


def seconds(
    demands: Demands, alone: Sequence[Sequence[float]], chosen: Sequence[int] | None, at: Shares, host: Parameters
) -> float:
    """Of a run with the variants `chosen`, or with the fastest ones at these shares; without estimates: as alone."""
    total = []
    for step, (asked, times) in enumerate(zip(demands, alone, strict=True)):
        found = [time if one is None else share_model.latency(one, at, host) for one, time in zip(asked, times, strict=True)]
        total.append(min(found) if chosen is None else found[chosen[step]])
    return math.fsum(total)


def predict(manifest: Manifest, found: Interference, profile: CoreProfile) -> Row:
    """All figures of a bundle."""
    host = share_model.parameters_of(manifest, found)
    row: Row = {"alpha": None}
    try:
        fitted = share_model.fit(manifest, found, profile.cores)
        host = fitted.parameters
        row = {"alpha": host.alpha, "error": fitted.error, "without": fitted.without, "times": fitted.times}
    except UsageError as error:
        row["note"] = str(error)
    demands, alone = share_model.demands_of(manifest, profile), profile.latency_s[0]
    zeros = (0,) * len(alone)
    heaviest = max(profile.selections, key=lambda each: each.fastest_alone_s)
    ways = {"alone": zeros, "heaviest": heaviest.variants, "model": None}
    alphas = {"overlap": 0.0, **({} if row["alpha"] is None else {"fitted": host.alpha}), "none": 1.0}
    row["host"] = asdict(host)
    row["runs"] = []
    for share in SHARES:
        for name, alpha in alphas.items():
            at, exposes = Shares(share, share), replace(host, alpha=alpha)
            run = {way: seconds(demands, alone, chosen, at, exposes) for way, chosen in ways.items()}
            row["runs"].append({"share": share, "overlap": name, **run})
    alone_s = math.fsum(each[0] for each in alone)
    row["levels"] = []
    for level, times in zip(found.levels, profile.latency_s, strict=True):
        model_s = seconds(demands, alone, zeros, share_model.shares_at(level.dials, host), host)
        measured_s = math.fsum(each[0] for each in times)
        row["levels"].append({"level": level.name, "measured": measured_s / alone_s, "model": model_s / alone_s})
    return row


def show(name: str, row: Row) -> None:
    """For people."""
    exposed = row.get("note", "")
    if row["alpha"] is not None:
        exposed = f"alpha {row['alpha']:.2f}; steps off by {row['error']:.1%} with it, {row['without']:.1%} without"
    print(f"{name}: MODEL, not measured ({exposed})")
    titles = f"{'fastest alone':>15} {'heaviest level':>15} {'by the model':>13}"
    print(f"  {'share':>6} {'overlap':>8} {titles}   fastest alone / by the model")
    for run in row["runs"]:
        print(
            f"  {run['share']:>6.3f} {run['overlap']:>8} {run['alone'] * 1e3:>12.3f} ms {run['heaviest'] * 1e3:>12.3f} ms "
            f"{run['model'] * 1e3:>10.3f} ms   {run['alone'] / run['model']:.3f}"
        )
    cells = ", ".join(f"{each['level']} {each['measured']:.3f} ({each['model']:.3f})" for each in row["levels"])
    print(f"  slowdown of variant 0 at the profile's levels, measured (model): {cells}", flush=True)


def main() -> int:
    """Prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE.mvb")
    parser.add_argument("--cores", type=int, default=1, help="whose profile (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    rows: dict[str, Row] = {}
    try:
        for path in options.bundles:
            with open_bundle(path) as bundle:
                manifest, found = bundle.manifest, interference_of(bundle)
            profile = next((each for each in found.profiles if each.cores == options.cores), None) if found else None
            if found is None or profile is None:
                raise UsageError(f"{path} has no profile on {options.cores} core(s): run `mvcompile profile` on it")
            rows[path.stem] = predict(manifest, found, profile)
            show(path.stem, rows[path.stem])
    except MvcompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
