from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mvcompile.runtime import load, native
from mvcompile.testing.kernels import tiny_inputs, tiny_reference

TEST = """
with load(sys.argv[1]) as session:
    print(selftest(session).passed)
"""


def test_tvm_imported_before(bundle: Path, python: Callable[..., str]) -> None:
    assert python("import sys, tvm; from mvcompile.runtime import load, selftest" + TEST, bundle) == "True"


def test_tvm_imported_after(bundle: Path, python: Callable[..., str]) -> None:
    program = "import sys; from mvcompile.runtime import load, selftest" + TEST
    program += "assert 'tvm' not in sys.modules\nimport tvm\nprint(tvm.compile is not None)" + TEST
    assert python(program, bundle).split() == ["True", "True", "True"]


def test_another_tvm_imported_after_is_refused_instead_of_aborting(bundle: Path, python: Callable[..., str]) -> None:
    """A TVM whose runtime library differs from the bundle's."""
    program = "import sys; from mvcompile.runtime import load, native, selftest; native._sha256 = lambda data: object()" + TEST
    program += "try: import tvm\nexcept ImportError as error: print(error)" + TEST
    first, message, last = python(program, bundle).splitlines()
    assert (first, last) == ("True", "True")
    assert "import tvm before the first mvcompile.runtime.load" in message


@pytest.mark.parametrize("memory_file", [True, False])
def test_two_bundles_with_the_same_symbols(
    bundle: Path, doubling: Path, memory_file: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not memory_file:
        monkeypatch.setattr(native, "_memory_file", lambda image, name, number: None)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inputs = tiny_inputs(1)
    with (
        load(bundle, share_cores=True) as one,
        load(doubling, share_cores=True) as other,
        load(bundle, share_cores=True) as third,
    ):
        for session, scale in ((one, 1.0), (other, 2.0), (third, 1.0)):
            session.select_all(1)
            np.testing.assert_allclose(
                session.run(inputs)["y"], tiny_reference(inputs, (scale, scale))["y"], rtol=1e-4, atol=1e-5
            )
    assert os.listdir(tmp_path) == []


def test_an_error_in_tvm_touches_no_file_that_has_a_librarys_descriptor(bundle: Path, python: Callable[..., str]) -> None:
    """TVM opens all loaded libraries by their paths to describe where an error came from. An empty file it maps is its end."""
    program = """
import sys, tempfile
sys.modules["tvm"] = None  # the bundle's runtime, not an installed one
import tvm_ffi
from mvcompile.runtime import load
with load(sys.argv[1]) as session:
    empty = [tempfile.TemporaryFile() for _ in range(20)]
    try:
        tvm_ffi.get_global_func("ffi.Module.load_from_file.so")("/missing.so", "so")
    except RuntimeError as error:
        print("missing.so" in str(error))
"""
    assert python(program, bundle) == "True"


def test_spellings_of_a_folder_are_distinct_and_short() -> None:
    spellings = {native._spelling(number) for number in range(1, 5000)}
    assert len(spellings) == 4999
    assert max(map(len, spellings)) < 50
    assert all(os.path.normpath(spelling) == "." for spelling in spellings)
