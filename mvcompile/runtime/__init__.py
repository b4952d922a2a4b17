"""Load bundles and run them: numpy, apache-tvm-ffi and the standard library only, nothing of TVM's compiler."""

from mvcompile.runtime.selftesting import OutputCheck, SelfTestResult, SwitchResult, selftest, selftest_inputs, selftest_switches
from mvcompile.runtime.session import Session, VariantInfo, load

__all__ = [
    "OutputCheck",
    "SelfTestResult",
    "Session",
    "SwitchResult",
    "VariantInfo",
    "load",
    "selftest",
    "selftest_inputs",
    "selftest_switches",
]
