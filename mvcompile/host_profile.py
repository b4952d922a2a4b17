"""What `mvcompile calibrate` found out about a host, and the JSON file it is kept in.

The file says nothing of when or where: two calibrations of one machine differ by its noise only. Every number has its unit in
its name; slowdowns, spreads and shares are ratios. Standard library only, because the runtime reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from mvcompile.bundle.codec import Signed, decode, plain_of, version_of
from mvcompile.errors import BundleError, UsageError
from mvcompile.types import Dials, HostView

HOST_PROFILE_VERSION = 2
"""2: `counter_models`. Files of version 1 have none."""
MEASURABLE = "measurable"
NOISY = "too noisy"
NO_EFFECT = "no effect"
TOO_FEW_CORES = "too few cores"
VERDICTS = (MEASURABLE, NOISY, NO_EFFECT, TOO_FEW_CORES)
PERF, RESCTRL = "perf", "resctrl"
COUNTER_KINDS = (PERF, RESCTRL)
"""Hardware counters through perf_event, and what resctrl monitors."""
_ROOT = "host profile"


@dataclass(frozen=True, slots=True)
class LevelFound:
    """A level of the memory hierarchy. `seen_bytes`: the largest working set three quarters of whose loads it serves (0: not
    told apart from the next level, or memory); `reported_bytes`: what the system says (0: memory); bandwidths are those of one
    core, 0 where not measured."""

    name: str
    reported_bytes: int
    seen_bytes: int
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Time per line, at random within a working set: `latency_s` of loads that depend on each other, `parallel_s` of loads that
    do not, and the interquartile range of their windows over them."""

    working_set_bytes: int
    latency_s: float
    latency_spread: float
    parallel_s: float
    parallel_spread: float


@dataclass(frozen=True, slots=True)
class Effect:
    """How many times slower the probe's two patterns are beside a neighbour with `dials`, medians of rounds, with the
    interquartile range over them; and what the neighbour really did."""

    name: str
    dials: Dials
    achieved: Dials
    walk_bytes_per_s: float
    cache_slowdown: float
    cache_spread: float
    memory_slowdown: float
    memory_spread: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Spread (interquartile range over median) of windows of arithmetic in registers, and of the probe's patterns alone; `floor`:
    the probe's slowdown that means nothing, from repeating it beside nobody; `drift`: the same from the first round to the last;
    `stolen`: share of the measured core's time that the hypervisor gave to others."""

    arithmetic: float
    cache: float
    memory: float
    floor: float
    drift: float
    stolen: float


@dataclass(frozen=True, slots=True)
class CounterSupport:
    """Hardware counters and resctrl monitors that can be read, and why not more (empty if nothing is missing)."""

    perf: tuple[str, ...]
    perf_reason: str
    resctrl: tuple[str, ...]
    resctrl_reason: str


@dataclass(frozen=True, slots=True)
class CounterModel:
    """The linear model from counters of one `kind` (one of `COUNTER_KINDS`) to the level, while the network `bundle`, whose
    kernels have the digest `kernels_sha256` (as in its manifest), runs on `cores` cores.

    `right` is the share of windows of each level that models of all other rounds classified right, of `windows` in all. The rest
    is what `runtime.LinearModel` has: names of features and levels, where each level lies, mean and scale of each feature, and
    per coordinate an intercept and a coefficient for each feature.
    """

    kind: str
    bundle: str
    kernels_sha256: str
    cores: int
    windows: int
    right: tuple[float, ...]
    features: tuple[str, ...]
    levels: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    coefficients: tuple[tuple[Signed, ...], ...]
    intercept: tuple[Signed, ...]


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The whole file. `verdict` is one of `VERDICTS`, `notes` are sentences for people; `neighbour_core` is null where there is
    none; `probe_chain_bytes` is the chain of a `Probe` on this host; `counter_models` has at most one of each kind."""

    version: int
    target_key: str
    cpu_model: str
    verdict: str
    notes: tuple[str, ...]
    measured_core: int
    neighbour_core: int | None
    probe_chain_bytes: int
    levels: tuple[LevelFound, ...]
    curve: tuple[CurvePoint, ...]
    effects: tuple[Effect, ...]
    noise: Noise
    counters: CounterSupport
    counter_models: tuple[CounterModel, ...]

    def view(self) -> HostView:
        """What profiling needs to know of the host. The cache is the last one, as seen, or as reported if it was not told
        apart."""
        last = self.levels[-2]
        seen = min(last.seen_bytes, last.reported_bytes) or last.reported_bytes
        return HostView(self.cpu_model, self.measured_core, self.neighbour_core, seen, self.probe_chain_bytes)


def to_json(profile: HostProfile) -> str:
    """The file's text."""
    return json.dumps(plain_of(profile, _ROOT), indent=1, sort_keys=True) + "\n"


def write_host_profile(path: str | os.PathLike[str], profile: HostProfile) -> None:
    """Writes the file, whole or not at all. Raises UsageError when it cannot be written there."""
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(to_json(profile), encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UsageError(f"the host profile cannot be written to {path}: {error.strerror}; name another file") from error


def read_host_profile(path: str | os.PathLike[str]) -> HostProfile:
    """Reads the file, also of an older version. Raises UsageError for one that cannot be read, is no host profile, or is newer
    than this package."""
    again = "measure this host again: `mvcompile calibrate`"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the host profile {path} cannot be read: {error.strerror}; {again}") from error
    try:
        version = version_of(data, _ROOT)
        if version > HOST_PROFILE_VERSION:
            raise UsageError(
                f"the host profile {path} has version {version}, this mvcompile reads versions up to {HOST_PROFILE_VERSION}: "
                f"upgrade mvcompile, or {again}"
            )
        profile = decode(_renewed(data) if version == 1 else data, HostProfile, _ROOT)
    except BundleError as error:
        raise UsageError(f"{path}: {error}; {again}") from error
    problem = _problem(profile)
    if problem is not None:
        raise UsageError(f"{path} has {problem}, which no host profile has; {again}")
    return profile


def _renewed(data: bytes) -> bytes:
    """A file of version 1 as one of the present version."""
    return json.dumps({"counter_models": [], **json.loads(data), "version": HOST_PROFILE_VERSION}).encode()


def _problem(profile: HostProfile) -> str | None:
    """What of it has the right form and makes no sense."""
    if profile.version != HOST_PROFILE_VERSION or profile.verdict not in VERDICTS:
        return f"version {profile.version} and verdict {profile.verdict!r}"
    if len(profile.levels) < 2:
        return f"{len(profile.levels)} levels of caches and memory"
    kinds = [model.kind for model in profile.counter_models]
    if len(set(kinds)) != len(kinds) or not set(kinds) <= set(COUNTER_KINDS):
        return f"models of the counters {', '.join(kinds)}"
    wrong = next((model.kind for model in profile.counter_models if not _fits_itself(model)), None)
    return None if wrong is None else f"a model of {wrong} counters whose parts do not fit each other"


def _fits_itself(model: CounterModel) -> bool:
    features, levels, places = len(model.features), len(model.levels), len(model.intercept)
    return (
        len(model.mean) == len(model.scale) == features
        and all(scale > 0 for scale in model.scale)
        and 0 < levels == len(model.points) == len(model.right)
        and all(len(point) == places for point in model.points)
        and len(model.coefficients) == places
        and all(len(row) == features for row in model.coefficients)
    )
