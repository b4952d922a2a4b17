"""From what `Session.adapt` is called with to an `Adaptation`: which policy, which monitor, and whether the bundle has what they
need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvcompile.bundle.interference import INTERFERENCE, Interference, interference_of
from mvcompile.bundle.reader import Bundle
from mvcompile.errors import BundleError, IncompatibleBundleError, UsageError
from mvcompile.runtime.adaptation import Adaptation
from mvcompile.runtime.calibrated import require_fit
from mvcompile.runtime.events import Switch
from mvcompile.runtime.monitors import Manual, MonitorSpec, model_of, monitor_spec, start
from mvcompile.runtime.policy import PROFILE, Costs, Fixed, Policy, Variants, costs_of, policy_named
from mvcompile.runtime.program import Program
from mvcompile.runtime.residual import Residual


@dataclass(frozen=True, slots=True)
class Adapting:
    """How a session adapts."""

    policy: Policy
    monitor: MonitorSpec
    on_switch: Callable[[Switch], object] | None
    needs_profile: bool

    def costs(self, bundle: Bundle, interference: Interference | None, cores: int) -> Costs:
        """What the policy chooses from. Raises UsageError if it needs a profile for `cores` cores that the bundle has not, or if
        the monitor's model of counters is of other kernels or another number of cores."""
        model = model_of(self.monitor)
        if model is not None:
            require_fit(model, bundle, cores)
        if not self.needs_profile:
            there = interference is not None and any(profile.cores == cores for profile in interference.profiles)
            return costs_of(bundle.manifest, interference if there else None, cores)
        if interference is None:
            raise UsageError(f"{bundle.path} has no profile ({INTERFERENCE}), without which nothing can be adapted: {PROFILE}")
        try:
            return costs_of(bundle.manifest, interference, cores)
        except UsageError as error:
            raise UsageError(f"{bundle.path}: {error}") from error

    def begin(
        self, program: Program, layers: Sequence[str], costs: Costs, interference: Interference | None, cores: Sequence[int]
    ) -> Adaptation:
        """All of it, ready to start. To be called in the thread that runs: counters may belong to it.

        Raises UsageError if the bundle does not fit the monitor, EnvironmentProblem for counters that cannot be read.
        """
        monitor = start(self.monitor, interference, costs.levels, cores)
        return Adaptation(program, layers, costs, self.policy, monitor, self.on_switch)


def adapting(policy: str | Policy, monitor: str | MonitorSpec | None, on_switch: Callable[[Switch], object] | None) -> Adapting:
    """What is meant. Raises UsageError for what does not exist."""
    chosen = policy_named(policy)
    if monitor is not None:
        return Adapting(chosen, monitor_spec(monitor), on_switch, needs_profile=True)
    if isinstance(chosen, Fixed):
        return Adapting(chosen, Manual(), on_switch, needs_profile=False)
    return Adapting(chosen, Residual(), on_switch, needs_profile=True)


def fastest_alone(bundle: Bundle, cores: int) -> Variants:
    """The selection that the bundle's profile for `cores` cores has for `none`; variant 0 everywhere if there is no such profile,
    or none that can be read: a bundle runs without."""
    try:
        found = read_interference(bundle)
    except BundleError:
        found = None
    profiles = () if found is None else found.profiles
    zeros = (0,) * len(bundle.manifest.plan.steps)
    return next((profile.selections[0].variants for profile in profiles if profile.cores == cores), zeros)


def read_interference(bundle: Bundle) -> Interference | None:
    """What the bundle says of its variants beside neighbours, None if nothing.

    Raises BundleError if that is damaged, IncompatibleBundleError if it is newer than this package.
    """
    try:
        return interference_of(bundle)
    except IncompatibleBundleError as error:
        raise IncompatibleBundleError(f"{bundle.path}: {error}") from error
    except BundleError as error:
        raise BundleError(f"{bundle.path}: {error}; profile the bundle again (`mvcompile profile`)") from error
