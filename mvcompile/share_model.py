"""A MODEL of how long a variant takes with a share of the memory's bandwidth and of the last-level cache. Nothing here is
measured.

It is there for machines that starve earlier than the one that a bundle was profiled on: many cores on one memory channel. It
extrapolates from a variant's latency alone and the bytes it is estimated to move (docs/design/005-static-traffic.md).

    memory bytes   M(c) = K * miss(c) + (T - K) * lost(c)
    latency        t(b, c) = max( t0 + alpha * (M(c) / (b * B) - M(1) / B),  M(c) / (b * B) )

`b` and `c` are the shares, 1 when alone; `t0` the latency alone, s; `B` what one core gets out of memory alone, bytes/s; `T` what
a call moves between the private caches and what is shared, `K` what it has to move at least, bytes. `miss` is the part of the
model that does not fit in its share of the cache, `lost` the part of the call's own footprint that does not. Both are linear:
what fits, stays; a cache that evicts in the order of use would lose all at once.

The second term of the maximum is the memory roof of the roofline model (Williams, Waterman and Patterson, CACM 2009): no call is
faster than its bytes. The first one lets the part `alpha` of the time that memory takes longer than alone show, because
prefetchers and the order of instructions hide the rest: 0 is perfect overlap (the roofline itself), 1 none. Truth lies between
the two, and `fit` says where it was beside the neighbours of a profile. Bytes that would take longer than `t0` alone are
estimated too high, and count in proportion: the model meets what was measured where nothing else runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mvcompile.bundle.interference import CoreProfile, Interference
from mvcompile.bundle.schema import WEIGHTS, Manifest, Task, Variant
from mvcompile.errors import UsageError
from mvcompile.types import DTYPE_BYTES, UNLIMITED_BYTES_PER_S, Dials

EQUALS = 0.5
"""Share of the bandwidth that is left beside a neighbour that takes as much as it can."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a core has of what it has alone: of `bandwidth` (of one core's, not of the machine's) and of the last-level `cache`.
    More than 0, at most 1; UsageError otherwise."""

    bandwidth: float = 1.0
    cache: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bandwidth", "cache"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UsageError(f"the share of {name} is {value}; give more than 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of the host and the model: bytes/s of one core alone, bytes of the last-level cache, bytes that the model would like to
    keep there from run to run, and the exposed part `alpha` of memory's time, 0 to 1."""

    bytes_per_s: float
    llc_bytes: int
    model_bytes: int
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Of one call: seconds alone; bytes that it moves between private caches and what is shared, those of them that it has to
    move whatever the caches, and those that it wants to find in the last-level cache again meanwhile."""

    latency_s: float
    traffic_bytes: float
    compulsory_bytes: float
    footprint_bytes: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`parameters` with the `alpha` that explains a profile best; the medians of how many per cent (0.01) the steps' times at the
    other levels than `none` are off with it, `error`, and with alpha 0, `without`; and how many times these are."""

    parameters: Parameters
    error: float
    without: float
    times: int


def memory_bytes(demand: Demand, cache: float, parameters: Parameters) -> float:
    """What a call moves from and to memory, bytes, with the share `cache` of the last-level cache."""
    room = cache * parameters.llc_bytes
    miss = _rest(parameters.model_bytes, room)
    lost = _rest(demand.footprint_bytes, room)
    compulsory = min(demand.compulsory_bytes, demand.traffic_bytes)
    return compulsory * miss + (demand.traffic_bytes - compulsory) * lost


def exposed_s(demand: Demand, shares: Shares, parameters: Parameters) -> float:
    """Seconds that memory takes longer than alone, if nothing of it is hidden (`alpha` 1)."""
    return _memory_s(demand, shares, parameters) - _memory_s(demand, Shares(), parameters)


def latency(demand: Demand, shares: Shares, parameters: Parameters) -> float:
    """Seconds of a call with `shares`: never less than alone."""
    longer_s = parameters.alpha * exposed_s(demand, shares, parameters)
    return max(demand.latency_s + longer_s, _memory_s(demand, shares, parameters), demand.latency_s)


def run(demands: Sequence[Demand], shares: Shares, parameters: Parameters) -> float:
    """Seconds of one call of each."""
    return math.fsum(latency(each, shares, parameters) for each in demands)


def share_of_core(total_bytes_per_s: float, cores: int, bytes_per_s: float) -> float:
    """The share of the bandwidth that each of `cores` equal cores has, where memory gives `total_bytes_per_s` to all and one core
    takes `bytes_per_s` alone. Raises UsageError for what is not above 0."""
    if min(total_bytes_per_s, cores, bytes_per_s) <= 0:
        raise UsageError(f"{total_bytes_per_s} bytes/s for {cores} cores of {bytes_per_s} bytes/s: give numbers above 0")
    return min(1.0, total_bytes_per_s / (cores * bytes_per_s))


def demand_of(task: Task, variant: Variant, latency_s: float) -> Demand | None:
    """What one call of `variant` asks for, if it takes `latency_s` alone; None for a variant without objectives."""
    if variant.objectives is None:
        return None
    sizes = [math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in task.parameters]
    # A line that is written is fetched before, as in the estimate of the traffic.
    compulsory = sum(sizes) + sum(sizes[len(sizes) - task.num_outputs :])
    traffic = variant.objectives.traffic_bytes
    return Demand(latency_s, traffic, min(float(compulsory), traffic), variant.objectives.footprint_bytes)


def demands_of(manifest: Manifest, profile: CoreProfile) -> tuple[tuple[Demand | None, ...], ...]:
    """Per step and variant, with the profile's latencies at `none`."""
    found = []
    for step, row in zip(manifest.plan.steps, profile.latency_s[0], strict=True):
        task = manifest.tasks[step.task]
        found.append(tuple(demand_of(task, one, seconds) for one, seconds in zip(task.variants, row, strict=True)))
    return tuple(found)


def parameters_of(manifest: Manifest, found: Interference) -> Parameters:
    """Of the host where `found` was measured, `alpha` still 1. One core's bandwidth is what the neighbour read at most at a level
    (a line that it wrote is two transfers). Raises UsageError if it moved nothing at any level."""
    most = max((each.read_bytes_per_s + 2 * each.write_bytes_per_s for each in found.achieved), default=0.0)
    if most <= 0:
        raise UsageError("the profile has no level at which a neighbour used memory: profile the bundle with the default levels")
    weights = sum(member.length for member in manifest.members if member.name == WEIGHTS)
    return Parameters(most, manifest.target.llc_bytes, weights + manifest.plan.arena_bytes)


def shares_at(dials: Dials, parameters: Parameters) -> Shares:
    """What a level leaves to a core, as far as its dials say: a neighbour that takes as much bandwidth as it can leaves half,
    one with a rate leaves the rest but no less than that; of the cache it leaves what is not its resident set."""
    taken = dials.read_bytes_per_s + 2 * dials.write_bytes_per_s
    unlimited = max(dials.read_bytes_per_s, dials.write_bytes_per_s) >= UNLIMITED_BYTES_PER_S
    bandwidth = EQUALS if unlimited else max(EQUALS, 1 - taken / parameters.bytes_per_s)
    return Shares(bandwidth, max(1 - dials.resident_bytes / parameters.llc_bytes, 1 / 64))


def fit(manifest: Manifest, found: Interference, cores: int = 1) -> Fit:
    """The `alpha` with which the model comes nearest to the profile on `cores` cores: least squares of the steps' slowdowns at
    all levels, each weighted by its time.

    What a level leaves is taken from its dials (`shares_at`), and that is a guess: memory that has enough for both cores leaves
    more, and `alpha` is then so much too small. Raises UsageError if there is nothing to fit.
    """
    profile = next((each for each in found.profiles if each.cores == cores), None)
    if profile is None:
        raise UsageError(f"the bundle has no profile on {cores} cores: run `mvcompile profile --cores {cores}` on it")
    parameters = parameters_of(manifest, found)
    expected, seen, weight = _slowdowns(manifest, found, profile, parameters)
    scale = float(np.sum(weight * expected * expected))
    if scale <= 0:
        raise UsageError("no variant is estimated to use what is shared: there is nothing to fit")
    alpha = min(1.0, max(0.0, float(np.sum(weight * expected * seen)) / scale))
    return Fit(replace(parameters, alpha=alpha), _off(seen - alpha * expected), _off(seen), len(seen))


def _slowdowns(
    manifest: Manifest, found: Interference, profile: CoreProfile, parameters: Parameters
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of every step and variant at every level but the first: seconds longer than alone over seconds alone, as expected without
    overlap and as measured; and the seconds alone."""
    rows = []
    demands = demands_of(manifest, profile)
    for level, latencies in zip(found.levels[1:], profile.latency_s[1:], strict=True):
        shares = shares_at(level.dials, parameters)
        for asked, measured in zip(demands, latencies, strict=True):
            for demand, seconds in zip(asked, measured, strict=True):
                if demand is not None and demand.latency_s > 0:
                    alone_s = demand.latency_s
                    rows.append((exposed_s(demand, shares, parameters) / alone_s, seconds / alone_s - 1, alone_s))
    expected, seen, weight = np.array(rows).reshape(-1, 3).T
    return expected, seen, weight


def _off(rest: NDArray[np.float64]) -> float:
    return float(np.median(np.abs(rest)))


def _memory_s(demand: Demand, shares: Shares, parameters: Parameters) -> float:
    alone_s = memory_bytes(demand, 1.0, parameters) / parameters.bytes_per_s
    credible = min(1.0, demand.latency_s / alone_s) if alone_s > 0 else 1.0
    return credible * memory_bytes(demand, shares.cache, parameters) / (shares.bandwidth * parameters.bytes_per_s)


def _rest(size: float, room: float) -> float:
    return max(0.0, 1 - room / size) if size > 0 else 0.0
