"""Load bundles and run them: numpy, apache-tvm-ffi and the standard library only, nothing of TVM's compiler."""

from mvcompile.errors import ProfileWarning
from mvcompile.runtime.counters import PERF_FEATURES
from mvcompile.runtime.events import LayerChange, Stats, Switch
from mvcompile.runtime.linear import Fitted, LinearModel, Sample, fit_linear, points_of
from mvcompile.runtime.monitors import Auto, Manual, Perf, ResctrlMonitor
from mvcompile.runtime.policy import Costs, Decision, Policy, Situation, adaptive, fixed, kind
from mvcompile.runtime.resctrl import RESCTRL_FEATURES
from mvcompile.runtime.residual import Residual
from mvcompile.runtime.selftesting import OutputCheck, SelfTestResult, SwitchResult, selftest, selftest_inputs, selftest_switches
from mvcompile.runtime.session import Session, VariantInfo, load

__all__ = [
    "PERF_FEATURES",
    "RESCTRL_FEATURES",
    "Auto",
    "Costs",
    "Decision",
    "Fitted",
    "LayerChange",
    "LinearModel",
    "Manual",
    "OutputCheck",
    "Perf",
    "Policy",
    "ProfileWarning",
    "ResctrlMonitor",
    "Residual",
    "Sample",
    "SelfTestResult",
    "Session",
    "Situation",
    "Stats",
    "Switch",
    "SwitchResult",
    "VariantInfo",
    "adaptive",
    "fit_linear",
    "fixed",
    "kind",
    "load",
    "points_of",
    "selftest",
    "selftest_inputs",
    "selftest_switches",
]
