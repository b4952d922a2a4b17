"""mvcompile: ahead-of-time compilation of ONNX models into multi-version kernels.

`compile_model` and `compile_module` need the extra `compile`; `mvcompile.runtime` needs numpy and apache-tvm-ffi only, so nothing
of the compiler is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mvcompile.config import CompileConfig, ProfileConfig, TuningConfig
    from mvcompile.pipeline import CompileResult, compile_model, compile_module

_HOMES = {
    "CompileConfig": "mvcompile.config",
    "CompileResult": "mvcompile.pipeline",
    "ProfileConfig": "mvcompile.config",
    "TuningConfig": "mvcompile.config",
    "compile_model": "mvcompile.pipeline",
    "compile_module": "mvcompile.pipeline",
}

__all__ = ["CompileConfig", "CompileResult", "ProfileConfig", "TuningConfig", "__version__", "compile_model", "compile_module"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mvcompile' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
