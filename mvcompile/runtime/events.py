"""What a session that adapts tells about itself: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer that was switched from one variant to another."""

    layer: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of the level that is held to be the case, or of what runs because of it.

    `time_s` is `time.monotonic()`; `before` is None at the start; `log_likelihood_ratio` (of the new level over the one before)
    is None where there is none: at the start, and for monitors that do not reckon with likelihoods.
    """

    time_s: float
    before: str | None
    after: str
    log_likelihood_ratio: float | None
    layers: tuple[LayerChange, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """What a session has done since it began to adapt.

    Latencies are those of the kernels, of the last 1024 runs or fewer (of very short runs a sample), 0 if there are none.
    `switches` are the last 32. `level_s` are the seconds for which each level was held to be the case. `monitor_s` is what
    monitor and policy took in all, `monitor_share` that over the time of all runs; the stamps, 40 ns per layer, are in neither.
    """

    runs: int
    latency_mean_s: float
    latency_median_s: float
    latency_p99_s: float
    monitor: str
    level: str
    level_s: Mapping[str, float]
    switches: tuple[Switch, ...]
    monitor_s: float
    monitor_share: float
