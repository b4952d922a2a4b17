from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.s_tir.schedule import Schedule

from mvcompile.target import detect_target, tvm_target
from mvcompile.testing.networks import AVX2, AVX512, NEON, SSE
from mvcompile.testing.programs import module_of
from mvcompile.types import HostTarget
from mvcompile.vectormath import FUNCTIONS, operator

Array = NDArray[Any]
INFINITY, NAN = math.inf, math.nan
LEAST_NORMAL, LEAST_SUBNORMAL = 2.0**-126, 2.0**-149
ULPS = {"exp": 1.0, "sigmoid": 2.5, "tanh": 2.5, "erf": 6.0}
LIBRARY = r"\b(expf|tanhf|erff|exp|tanh|erf)\b"


def kernel(name: str, count: int, lanes: int) -> tvm.IRModule:
    x = te.placeholder((count,), name="x")
    module = module_of(x, te.compute((count,), lambda i: tirx.call_intrin("float32", operator(name), x[i]), name="y"))
    if lanes == 1:
        return module
    schedule = Schedule(module)
    (loop,) = schedule.get_loops(schedule.get_sblock("y"))
    schedule.vectorize(schedule.split(loop, [None, lanes])[1])
    return schedule.mod


def values(name: str, x: Array, target: HostTarget, lanes: int) -> Array:
    compiled = tvm.compile(kernel(name, x.size, lanes), target=tvm_target(target)).mod["main"]
    result = tvm.runtime.tensor(np.full(x.shape, 77, np.float32))
    compiled(tvm.runtime.tensor(x), result)
    return result.numpy()


def exact(name: str, x: Array) -> Array:
    """In double precision, computed without the formulas of the module."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if name == "sigmoid":
            return np.exp(-np.logaddexp(0, -wide))
        return np.array([math.erf(each) for each in wide]) if name == "erf" else getattr(np, name)(wide)


def samples() -> Array:
    """Finite numbers of all magnitudes, and the range in which the functions are not constant more densely."""
    bits = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    everywhere = bits[np.isfinite(bits)]
    x = np.concatenate([everywhere, np.linspace(-110, 110, 60_000), np.linspace(-5, 5, 60_000)]).astype(np.float32)
    return x[: x.size // 16 * 16]


HOST = detect_target()
WIDTHS = {"host": (HOST, HOST.vector_bits // 32), "one element": (HOST, 1)}
if HOST.arch == "x86_64":
    WIDTHS["no fused multiply-add"] = (SSE, 4)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_precise_as_documented_for_numbers_of_all_magnitudes(name: str, width: str) -> None:
    x = samples()
    wanted, found = exact(name, x), values(name, x, *WIDTHS[width])
    with np.errstate(over="ignore"):
        rounded = wanted.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    normal = finite & (np.abs(rounded) >= LEAST_NORMAL)
    error = np.abs(np.where(finite, found, 0) - np.where(finite, wanted, 0))
    assert (error[normal] / np.spacing(np.abs(rounded[normal]))).max() <= ULPS[name]
    assert error[finite & ~normal].max() <= LEAST_SUBNORMAL
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    if name != "exp":
        assert np.abs(found).max() <= 1.0


ODD = [(0.0, 0.0), (-0.0, -0.0), (INFINITY, 1), (-INFINITY, -1), (NAN, NAN), (3e38, 1), (-3e38, -1), (1e-45, 1e-45)]
SPECIAL = {
    "exp": [(0.0, 1), (-0.0, 1), (INFINITY, INFINITY), (-INFINITY, 0), (NAN, NAN), (88.73, INFINITY), (-104, 0), (-3e38, 0)],
    "tanh": [*ODD, (9.2, 1), (-9.2, -1), (20, 1), (-20, -1)],
    "erf": [*ODD, (4, 1), (-4, -1), (20, 1), (-20, -1)],
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (INFINITY, 1), (-INFINITY, 0), (NAN, NAN), (200, 1), (-200, 0), (-3e38, 0)],
}


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_those_of_the_c_library(name: str, lanes: int) -> None:
    x, wanted = np.array(SPECIAL[name], np.float32).T
    found = values(name, np.ascontiguousarray(x), HOST, lanes)
    np.testing.assert_array_equal(found, wanted)
    signed = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[signed]), np.signbit(wanted[signed]))


VECTOR_PRODUCT = {
    "avx2": (AVX2, r"v(mul|fmadd\w+)ps\s.*%ymm"),
    "avx512": (AVX512, r"v(mul|fmadd\w+)ps\s.*%zmm"),
    "neon": (NEON, r"f(mul|mla)\s+v\d+\.4s"),
    "sse": (SSE, r"mulps\s.*%xmm"),
}


@pytest.mark.parametrize("target", VECTOR_PRODUCT)
def test_code_for_every_target_is_in_vectors_and_calls_no_library(target: str) -> None:
    host, instruction = VECTOR_PRODUCT[target]
    functions = {
        f"f_{name}": kernel(name, 64, host.vector_bits // 32)["main"].with_attr("global_symbol", f"f_{name}")
        for name in FUNCTIONS
    }
    assembly = tvm.compile(tvm.IRModule(functions), target=tvm_target(host)).mod.inspect_source("asm")
    assert len(re.findall(instruction, assembly)) >= 6 * len(FUNCTIONS)
    assert not re.search(rf"\b(call|callq|bl|b|jmp)\s+{LIBRARY}", assembly)
