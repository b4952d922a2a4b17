from __future__ import annotations

from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import mvcompile

ALLOWED = {"mvcompile", "numpy", "tvm_ffi", "typing_extensions"}
# What tvm_ffi takes if it is there; modules that Cython-compiled extensions register.
TOLERATED = {"ml_dtypes", "torch", "cython_runtime"}

LIST_IMPORTS = """
import sys
before = set(sys.modules)
import mvcompile.runtime
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
"""


def test_what_importing_the_runtime_imports(python: Callable[..., str]) -> None:
    found = {name for name in python(LIST_IMPORTS).split() if not name.startswith("_cython")} - TOLERATED
    assert found <= ALLOWED
    assert found >= {"mvcompile", "numpy", "tvm_ffi"}


RUN = """
import importlib.util, sys
sys.path[:] = [one for one in sys.path if "site-packages" not in one] + [sys.argv[1]]
assert importlib.util.find_spec("tvm") is None
assert importlib.util.find_spec("onnx") is None
from mvcompile.runtime import load, selftest, selftest_switches
with load(sys.argv[2]) as session:
    print(selftest(session).passed, all(one.result.passed for one in selftest_switches(session)))
"""


def test_a_bundle_runs_where_only_numpy_and_tvm_ffi_are_installed(
    tmp_path: Path, bundle: Path, python: Callable[..., str]
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("numpy", "apache-tvm-ffi", "typing-extensions"):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(metadata.distribution(name).locate_file(top))
    (packages / "mvcompile").symlink_to(Path(mvcompile.__file__).parent)
    assert python(RUN, packages, bundle, options=("-I", "-S")) == "True True"
    assert util.find_spec("tvm") is not None
