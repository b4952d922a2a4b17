"""The models of counters that `mvcompile calibrate --bundle` left in a host profile, and whether they are of this host and of
this bundle."""

from __future__ import annotations

import os

from mvcompile.bundle.reader import Bundle
from mvcompile.bundle.schema import KERNELS
from mvcompile.errors import UsageError
from mvcompile.host_profile import COUNTER_KINDS, PERF, CounterModel, HostProfile, read_host_profile
from mvcompile.runtime.host import cpu_model
from mvcompile.runtime.linear import Fitted, LinearModel


def model_for(path: str | os.PathLike[str], kind: str) -> LinearModel:
    """The model of `kind` (one of `COUNTER_KINDS`) in the host profile at `path`.

    Raises UsageError for a file that cannot be read or has no such model, and for one of another kind of CPU.
    """
    profile = _of_this_host(path)
    found = next((one for one in profile.counter_models if one.kind == kind), None)
    if found is None:
        support = profile.counters
        missing = support.perf_reason if kind == PERF else support.resctrl_reason
        reason = f" ({missing})" if missing else ""
        raise UsageError(
            f"{path} has no model of {kind} counters{reason}: fit one where they can be read with `mvcompile calibrate --bundle "
            "MODEL.mvb`, or use monitor='residual', which needs none"
        )
    return linear_of(found)


def any_model(path: str | os.PathLike[str]) -> LinearModel | None:
    """The first model there is, in the order of `COUNTER_KINDS`. Raises UsageError as `model_for`, but for a file without one."""
    found = {one.kind: one for one in _of_this_host(path).counter_models}
    return next((linear_of(found[kind]) for kind in COUNTER_KINDS if kind in found), None)


def require_fit(model: LinearModel, bundle: Bundle, cores: int) -> None:
    """Raises UsageError if `model` is known to have been fitted to other kernels than those of `bundle`, or on another number of
    cores: counters then show something else at the same level."""
    fitted = model.fitted
    if fitted is None:
        return
    again = f"fit one with `mvcompile calibrate --bundle {bundle.path}`"
    if fitted.kernels_sha256 != kernels_sha256(bundle):
        raise UsageError(
            f"the model of counters belongs to other kernels, those of {fitted.bundle!r}, than {bundle.path} has: {again}"
        )
    if fitted.cores != cores:
        raise UsageError(
            f"the model of counters was fitted on {fitted.cores} core(s), this session has {cores}: run on as many, or use "
            "monitor='residual', which needs no such model"
        )


def kernels_sha256(bundle: Bundle) -> str:
    """What a model of counters is bound to: profiling a bundle again leaves its kernels as they are."""
    return next(member.sha256 for member in bundle.manifest.members if member.name == KERNELS)


def linear_of(found: CounterModel) -> LinearModel:
    """The model as monitors use it."""
    return LinearModel(
        found.features,
        found.levels,
        found.points,
        found.mean,
        found.scale,
        found.coefficients,
        found.intercept,
        Fitted(found.bundle, found.kernels_sha256, found.cores),
    )


def _of_this_host(path: str | os.PathLike[str]) -> HostProfile:
    profile, here = read_host_profile(path), cpu_model()
    if profile.cpu_model != here:
        raise UsageError(
            f"{path} was measured on {profile.cpu_model}, this host has {here}, whose counters show something else: measure this "
            "host with `mvcompile calibrate --bundle MODEL.mvb`"
        )
    return profile
