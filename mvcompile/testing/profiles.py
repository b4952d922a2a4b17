"""Profiles of models beside neighbours, invented: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mvcompile.bundle.interference import INTERFERENCE_VERSION, CoreProfile, Interference, Selection, Table
from mvcompile.bundle.schema import Manifest
from mvcompile.runtime.host import cpu_model
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials, Level

Array = npt.NDArray[np.float64]

LEVELS = (
    Level("none", Dials()),
    Level("llc", Dials(resident_bytes=2**24)),
    Level("read", Dials(read_bytes_per_s=UNLIMITED_BYTES_PER_S)),
    Level("write", Dials(write_bytes_per_s=UNLIMITED_BYTES_PER_S)),
)


def profile_of_times(
    latency_s: Array, *, spread: float = 0.02, group: Sequence[int] | None = None, cores: int = 1, tasks: int = 1
) -> CoreProfile:
    """The profile of a model whose layers all have equally many variants, with `latency_s` (level, layer, variant); the selection
    for a level takes the fastest variant of each layer."""
    levels = len(latency_s)
    selections = tuple(
        Selection(tuple(at.argmin(axis=1).tolist()), float(at.min(axis=1).sum()), spread, float(at[:, 0].sum()))
        for at in latency_s
    )
    return CoreProfile(
        cores=cores,
        latency_s=_table(latency_s),
        spread=_table(np.full(latency_s.shape, spread)),
        selections=selections,
        group=tuple(range(levels)) if group is None else tuple(group),
        drift=0.0,
        regret=(1.0,) * tasks,
        compared=(1,) * tasks,
    )


def random_times(seed: int, layers: int = 40, levels: int = 4, variants: int = 2) -> Array:
    """Seconds per level, layer and variant: each level slows some layers, by up to 1.9 times, others by some percent; what is a
    little slower alone hardly notices."""
    random = np.random.default_rng(seed)
    alone = np.exp(random.uniform(np.log(1e-5), np.log(1e-3), layers))
    slower = np.array([1 + 0.12 * variant for variant in range(variants)])
    times = np.empty((levels, layers, variants))
    for level in range(levels):
        felt = random.random(layers) < 0.4
        factor = np.where(felt, random.uniform(1.1, 1.9, layers), random.uniform(1.0, 1.04, layers)) if level else np.ones(layers)
        times[level] = alone[:, None] * slower * (1 + (factor[:, None] - 1) / np.arange(1, variants + 1) ** 2)
    return times


def interference_of(
    manifest: Manifest,
    *,
    factors: Sequence[Sequence[float]] = ((1.0, 1.2), (1.5, 1.3), (2.0, 1.4), (2.5, 1.4)),
    seconds: Sequence[float] | None = None,
    cores: Sequence[int] = (1,),
    pressure: Sequence[Sequence[float]] = (),
    source: str = "measured: invented",
    cpu: str | None = None,
) -> Interference:
    """What a bundle with `manifest` may say: `seconds` per layer for variant 0 alone, times `factors` (level, variant; the last
    one stands for all variants after it), measured on `cpu` (default: this host). The selection of a level takes the fastest
    variants."""
    counts = [len(manifest.tasks[step.task].variants) for step in manifest.plan.steps]
    alone = [1e-5] * len(counts) if seconds is None else list(seconds)
    table = tuple(
        tuple(
            tuple(alone[step] * row[min(variant, len(row) - 1)] for variant in range(count)) for step, count in enumerate(counts)
        )
        for row in factors
    )
    spread = tuple(tuple(tuple(0.02 for _ in row) for row in rows) for rows in table)
    selections = tuple(
        Selection(tuple(row.index(min(row)) for row in rows), sum(map(min, rows)), 0.02, sum(row[0] for row in rows))
        for rows in table
    )
    tasks = len(manifest.tasks)
    levels = LEVELS[: len(factors)]
    profiles = tuple(
        CoreProfile(count, table, spread, selections, tuple(range(len(levels))), 0.0, (1.0,) * tasks, (1,) * tasks)
        for count in cores
    )
    return Interference(
        version=INTERFERENCE_VERSION,
        source=source,
        cpu_model=cpu_model() if cpu is None else cpu,
        levels=levels,
        achieved=tuple(level.dials for level in levels),
        profiles=profiles,
        pressure=tuple(tuple(row) for row in pressure),
    )


def _table(values: Array) -> Table:
    return tuple(tuple(tuple(row) for row in rows) for rows in values.tolist())
