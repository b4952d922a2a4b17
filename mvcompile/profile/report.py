"""A profile for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mvcompile.bundle.interference import CoreProfile, Interference
from mvcompile.bundle.schema import Manifest
from mvcompile.profile.stage import task_latency
from mvcompile.types import Dials


def to_json(found: Interference) -> dict[str, Any]:
    """The profile as JSON values."""
    return asdict(found)


def describe(found: Interference, manifest: Manifest) -> str:
    """Levels, whole runs and every task that has a choice, as tables."""
    lines = [f"{found.source}; {found.cpu_model}", "", "levels: what the neighbour took"]
    lines += [f"  {level.name:<12} {_dials(taken)}" for level, taken in zip(found.levels, found.achieved, strict=True)]
    for profile in found.profiles:
        lines += ["", *_runs(found, profile), "", *_tasks(found, profile, manifest)]
    return "\n".join(lines)


def _dials(dials: Dials) -> str:
    return (
        f"{dials.resident_bytes / 2**20:.1f} MiB of cache, reads {dials.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"writes {dials.write_bytes_per_s / 1e9:.1f} GB/s"
    )


def _runs(found: Interference, profile: CoreProfile) -> Iterator[str]:
    yield f"whole runs on {profile.cores} core{'s' if profile.cores > 1 else ''} (drift of `none`: {profile.drift:.1%})"
    yield f"  {'level':<12} {'fastest alone':>14} {'selection':>12} {'gain':>7} {'spread':>7} {'switched':>9}  same as"
    for level, selection, group in zip(found.levels, profile.selections, profile.group, strict=True):
        gain = selection.fastest_alone_s / selection.latency_s if selection.latency_s else 1.0
        switched = sum(variant != 0 for variant in selection.variants)
        same = "" if found.levels[group] is level else found.levels[group].name
        yield (
            f"  {level.name:<12} {selection.fastest_alone_s * 1e3:>11.3f} ms {selection.latency_s * 1e3:>9.3f} ms "
            f"{gain:>6.3f}x {selection.spread:>7.1%} {switched:>9}  {same}"
        )


def _tasks(found: Interference, profile: CoreProfile, manifest: Manifest) -> Iterator[str]:
    """Seconds of a task's layers together, per variant and level; regret against all candidates that were compared."""
    names = [level.name for level in found.levels]
    yield "tasks with a choice: all layers of one, ms in the running network"
    yield f"  {'task':<34} {'variant':>7} " + " ".join(f"{name:>10}" for name in names) + f" {'regret':>7} {'of':>3}"
    for index, task in enumerate(manifest.tasks):
        if len(task.variants) < 2:
            continue
        latency = task_latency(manifest, profile.latency_s, index)
        for variant in range(len(task.variants)):
            tail = f" {profile.regret[index]:>7.3f} {profile.compared[index]:>3}" if variant == 0 else ""
            yield f"  {task.name[:34] if variant == 0 else '':<34} {variant:>7} " + _row(latency[:, variant].tolist()) + tail


def _row(seconds: Sequence[float]) -> str:
    return " ".join(f"{value * 1e3:>10.3f}" for value in seconds)
