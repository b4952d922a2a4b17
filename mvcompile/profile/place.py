"""Where a profile is measured: which cores of this host, beside which neighbour, in which cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from mvcompile.errors import UsageError
from mvcompile.host_profile import read_host_profile
from mvcompile.runtime.cpus import neighbour_of
from mvcompile.runtime.host import cpu_model
from mvcompile.types import HostTarget, HostView


@dataclass(frozen=True, slots=True)
class Place:
    """`cores` in the order in which a model takes them: the measured one first, the neighbour's last, which is shared only by a
    model that runs on all. `llc_bytes` is the last-level cache as the system reports it, `chain_bytes` a probe's chain through it
    (None: a share of it)."""

    cores: tuple[int, ...]
    neighbour: int
    llc_bytes: int
    cpu_model: str
    chain_bytes: int | None

    @property
    def pair(self) -> tuple[int, int]:
        """The measured core and the neighbour's."""
        return self.cores[0], self.neighbour


def place_of(host: HostView | None, allowed: Sequence[int], target: HostTarget) -> Place:
    """Where to measure on the host that `target` describes, with at least two cores `allowed`: where `host` has it, which has to
    fit (see `unfit`), otherwise where `mvcompile calibrate` would."""
    measured = allowed[0] if host is None else host.measured_core
    neighbour = neighbour_of(measured, allowed) if host is None else host.neighbour_core
    assert neighbour is not None
    others = [core for core in allowed if core not in (measured, neighbour)]
    chain = None if host is None else min(host.chain_bytes, target.llc_bytes)
    return Place((measured, *others, neighbour), neighbour, target.llc_bytes, target.cpu_model, chain)


def unfit(host: HostView, allowed: Sequence[int]) -> str | None:
    """Why a host profile cannot be used by this process; None if it can."""
    again = "measure this host again (`mvcompile calibrate`)"
    here = cpu_model()
    if host.cpu_model != here:
        return f"the host profile is of {host.cpu_model}, this host has {here}: {again}"
    if host.neighbour_core is None:
        return f"the host profile was measured with one core and knows no neighbour: {again} with two cores or more"
    missing = {host.measured_core, host.neighbour_core} - set(allowed)
    if missing:
        cores = ", ".join(map(str, sorted(missing)))
        return f"the host profile uses core {cores}, which this process may not: widen the affinity mask, or {again}"
    return None


def read_host(path: str | os.PathLike[str]) -> HostView:
    """What profiling uses of the host profile at `path`.

    Raises UsageError for a file that cannot be read, or that is not of this host and the cores that this process may use.
    """
    host = read_host_profile(path).view()
    problem = unfit(host, sorted(os.sched_getaffinity(0)))
    if problem is not None:
        raise UsageError(f"{path}: {problem}")
    return host
