"""A bundle measured beside neighbours: tables, the variants worth keeping, and a selection for every level."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mvcompile import pareto, regret, runtime
from mvcompile.bundle.interference import INTERFERENCE_VERSION, CoreProfile, Interference, Table
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest
from mvcompile.config import ProfileConfig
from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.generator import Generator
from mvcompile.measure.levels import checked_levels, default_levels
from mvcompile.profile.network import Bench, Floats, Samples, sample
from mvcompile.profile.place import Place, place_of, unfit
from mvcompile.profile.pressure import Rows, measure, rows_of, worth_knowing
from mvcompile.profile.selections import by_table, refine
from mvcompile.target import detect_target
from mvcompile.types import Level

NOISE = 0.02
"""Regrets and whole runs that differ by less are equal, as objectives are (`tuning.fronts.NOISE`)."""
DISTINCT = 2.0
"""Levels are told apart if whole runs differ by more than this many interquartile ranges of them: by less, a host that is shared
does of its own what the neighbour does."""
SAMPLING_SHARE = 0.6
"""Of the budget: the rest goes to whole runs of selections."""
PRESSURE_SHARE = 1 / 3
"""Of the budget, on top of it, what the reporter gets at most."""

Kept = tuple[tuple[int, ...], ...]
"""Per task: the variants kept, in rising order, 0 first."""
Report = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Profiled:
    """What was measured of a bundle, in the numbering of its variants, and which of them are to be kept."""

    interference: Interference
    kept: Kept


def levels_of(config: ProfileConfig, llc_bytes: int) -> tuple[Level, ...]:
    """The levels to measure: the configured ones, or the default set for the last-level cache as the host profile has it, or of
    this size."""
    return checked_levels(config.levels or default_levels(llc_bytes if config.host is None else config.host.llc_bytes))


def why_not(allowed: Sequence[int], config: ProfileConfig) -> str | None:
    """Why nothing can be measured on the cores `allowed`; None if it can."""
    if len(allowed) < 2:
        return (
            f"this process may use {len(allowed)} core, and a neighbour needs one of its own: nothing can be measured; "
            "widen the affinity mask (taskset, cpuset), or profile the bundle on a machine with more cores (`mvcompile profile`)"
        )
    if max(config.cores) > len(allowed):
        return f"a profile on {max(config.cores)} cores is asked for, this process may use {len(allowed)}; ask for fewer"
    return None if config.host is None else unfit(config.host, allowed)


def profile(
    path: str | os.PathLike[str], config: ProfileConfig, variants: int | None, report: Report = lambda share: None
) -> Profiled:
    """Measures the bundle at `path` on this host and says which `variants` (at most, None: all) of each task to keep.

    The session runs on the first cores that this process may use, the neighbour on another that shares their last-level cache
    (see `place_of`). Raises EnvironmentProblem if there are too few or if they are not those of the host profile, and what
    `runtime.load` raises.
    """
    allowed = sorted(os.sched_getaffinity(0))
    problem = why_not(allowed, config)
    if problem is not None:
        raise EnvironmentProblem(problem)
    samples: list[Samples] = []
    share = config.budget_s / len(config.cores)
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    place = place_of(config.host, allowed, detect_target())  # not the bundle's target: it may have been compiled elsewhere
    levels = levels_of(config, place.llc_bytes)
    tasks = [step.task for step in manifest.plan.steps]
    with Generator(place.neighbour, place.llc_bytes) as neighbour:

        def bench(session: runtime.Session) -> Bench:
            return Bench(session, _inputs(session), neighbour, levels)

        for cores in config.cores:
            with runtime.load(path, cores=place.cores[:cores], share_cores=True, verify=False) as session:
                samples.append(sample(bench(session), SAMPLING_SHARE * share, config.seed, report))
        tables = [each.tables() for each in samples]
        kept = keep(manifest, [latency for latency, _ in tables], variants)
        profiles = []
        for cores, found, (latency, spread) in zip(config.cores, samples, tables, strict=True):
            may = [kept[task] for task in tasks]
            vectors = by_table(latency, spread, may, found.timings)
            with runtime.load(path, cores=place.cores[:cores], share_cores=True, verify=False) as session:
                selections = refine(bench(session), latency, tasks, may, vectors, (1 - SAMPLING_SHARE) * share)
            noise = max(NOISE, DISTINCT * found.run_spread())
            grouped = regret.groups([sum(row[0] for row in rows) for rows in latency], noise)
            ones = (1.0,) * len(manifest.tasks)
            compared = tuple(len(task.variants) for task in manifest.tasks)
            profiles.append(CoreProfile(cores, latency, spread, selections, grouped, found.drift(), ones, compared))
    source = f"measured: {samples[0].rounds} rounds in the running network, neighbour on a core of its own"
    pressure = _pressure(path, manifest, kept, place, config)
    return Profiled(
        Interference(INTERFERENCE_VERSION, source, place.cpu_model, levels, samples[0].taken(), tuple(profiles), pressure),
        kept,
    )


def _pressure(path: str | os.PathLike[str], manifest: Manifest, kept: Kept, place: Place, config: ProfileConfig) -> Rows:
    """What the kept variants of tasks with a choice take from others, on one core."""
    budget_s = min(config.pressure_s, PRESSURE_SHARE * config.budget_s)
    ones = worth_knowing(manifest.tasks, kept)
    return rows_of(measure(path, ones, place.pair, budget_s, config.seed, place.chain_bytes), manifest)


def keep_of(found: Interference, manifest: Manifest, variants: int | None) -> Kept:
    """What to keep of the bundle with `manifest` by what was measured of it (see `keep`)."""
    return keep(manifest, [profile.latency_s for profile in found.profiles], variants)


def keep(manifest: Manifest, tables: Sequence[Table], variants: int | None) -> Kept:
    """Per task, the at most `variants` ones with the least worst regret over all levels and `tables`, variant 0 among them, and
    of equal sets the one with the largest hypervolume of objectives."""
    kept = []
    for index, task in enumerate(manifest.tasks):
        count = len(task.variants)
        if variants is None or count <= variants:
            kept.append(tuple(range(count)))
            continue
        latency = np.concatenate([task_latency(manifest, table, index) for table in tables])
        vectors = np.array([each.objectives.vector() for each in task.variants if each.objectives is not None])
        corner = pareto.reference_point(vectors)

        def worth(chosen: Sequence[int], vectors: np.ndarray = vectors, corner: np.ndarray = corner) -> float:
            return pareto.hypervolume(vectors[list(chosen)], corner)

        kept.append(tuple(regret.choose(latency, variants, 0, NOISE, worth)))
    return tuple(kept)


def task_latency(manifest: Manifest, table: Table, task: int) -> Floats:
    """Seconds that all layers of a task take in a run, shape (levels, variants)."""
    steps = [number for number, step in enumerate(manifest.plan.steps) if step.task == task]
    seconds: Floats = np.array([[rows[step] for step in steps] for rows in table]).sum(axis=1)
    return seconds


def restrict(found: Interference, manifest: Manifest, kept: Kept) -> Interference:
    """What was measured of the bundle with `manifest`, for one that holds its `kept` variants only. The regrets say what that
    lost."""
    tasks = [step.task for step in manifest.plan.steps]

    def rows(table: Table) -> Table:
        return tuple(tuple(tuple(row[i] for i in kept[task]) for row, task in zip(level, tasks, strict=True)) for level in table)

    def one(profile: CoreProfile) -> CoreProfile:
        lost = tuple(
            regret.worst(task_latency(manifest, profile.latency_s, task), kept[task]) for task in range(len(manifest.tasks))
        )
        selections = tuple(
            replace(each, variants=tuple(kept[task].index(variant) for task, variant in zip(tasks, each.variants, strict=True)))
            for each in profile.selections
        )
        return replace(
            profile, latency_s=rows(profile.latency_s), spread=rows(profile.spread), selections=selections, regret=lost
        )

    pressure = tuple(tuple(row[i] for i in chosen) for row, chosen in zip(found.pressure, kept, strict=False))
    return replace(found, profiles=tuple(map(one, found.profiles)), pressure=pressure)


def _inputs(session: runtime.Session) -> dict[str, np.ndarray]:
    """The self-test's inputs, in the session's own buffers."""
    buffers = session.input_buffers
    for name, array in runtime.selftest_inputs(session).items():
        np.copyto(buffers[name], array)
    return buffers
