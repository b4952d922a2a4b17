"""What `mvcompile calibrate` found out about a host, and the JSON file it is kept in.

The file says nothing of when or where: two calibrations of one machine differ by its noise only. Every number has its unit in
its name; slowdowns, spreads and shares are ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from mvcompile.bundle.codec import decode, plain_of, version_of
from mvcompile.errors import BundleError, UsageError
from mvcompile.types import Dials

HOST_PROFILE_VERSION = 1
MEASURABLE = "measurable"
NOISY = "too noisy"
NO_EFFECT = "no effect"
TOO_FEW_CORES = "too few cores"
VERDICTS = (MEASURABLE, NOISY, NO_EFFECT, TOO_FEW_CORES)
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
class HostProfile:
    """The whole file. `verdict` is one of `VERDICTS`, `notes` are sentences for people; `neighbour_core` is null where there is
    none; `probe_chain_bytes` is the chain of a `Probe` on this host."""

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
    """Reads the file. Raises UsageError for one that cannot be read, is no host profile, or is newer than this package."""
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
        profile = decode(data, HostProfile, _ROOT)
    except BundleError as error:
        raise UsageError(f"{path}: {error}; {again}") from error
    if profile.version != HOST_PROFILE_VERSION or profile.verdict not in VERDICTS:
        raise UsageError(
            f"{path} has version {profile.version} and verdict {profile.verdict!r}, which no host profile has; {again}"
        )
    return profile
