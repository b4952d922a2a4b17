"""Whether a kernel's output equals its reference: inputs, tolerance, comparison."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm.s_tir import SBlockRealize
from tvm.s_tir.schedule import Schedule

from mvcompile.types import Verification

Array = NDArray[Any]

RTOL = 1e-5


def reduction_length(module: tvm.IRModule) -> int:
    """The largest number of terms that one block of `module["main"]` adds up; 1 when nothing is reduced, and for a program
    that is not made of blocks (`sort`, `cumsum`), which no schedule changes."""
    body = module["main"].body
    if not isinstance(body, SBlockRealize) or str(body.block.name_hint) != "root":
        return 1
    schedule = Schedule(module)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    lengths = [math.prod(int(each.dom.extent) for each in block.iter_vars if int(each.iter_type) == 2) for block in blocks]
    return max(lengths, default=1)


def random_arguments(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    seed: int,
    positive: bool = False,
    weights: Collection[int] = (),
    terms: int = 1,
) -> list[Array]:
    """One array per (dtype, shape): standard normal floats (their magnitude when `positive`), integers and booleans 0 or 1.

    Floats at the positions `weights` are divided by sqrt(`terms`), so that a sum of products is as large as one of its inputs.
    Otherwise nine of ten values would be at the ends of an activation behind it (tanh, a clip), where no error shows, and the
    rounding of those between would be that of a sum much larger than any output.
    """
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for position, (dtype, shape) in enumerate(shapes):
        if dtype.startswith("float"):
            values: Array = rng.standard_normal(shape, dtype=np.float32)
            values = np.abs(values) + 0.1 if positive else values
            arrays.append((values / math.sqrt(terms) if position in weights else values).astype(dtype))
        else:
            arrays.append(rng.integers(0, 2, shape).astype(dtype))
    return arrays


def absolute_tolerance(reference: Array, terms: int) -> float:
    """Rounding error that two orders of adding `terms` terms may differ by: 4 eps sqrt(terms) of the largest magnitude.

    Errors of a sum grow with the square root of its length when roundings are independent (Higham and Mary 2019); the
    factor leaves room for fused multiply-add against separate rounding. Integers must be equal.
    """
    if not np.issubdtype(reference.dtype, np.floating):
        return 0.0
    finite = np.abs(reference[np.isfinite(reference)])
    largest = float(finite.max()) if finite.size else 0.0
    return 4.0 * float(np.finfo(reference.dtype).eps) * math.sqrt(terms) * largest


def compare(actual: Array, reference: Array, rtol: float, atol: float) -> tuple[bool, Verification]:
    """Whether |actual - reference| <= atol + rtol |reference| everywhere, NaN and infinity only where the reference has them."""
    if not np.issubdtype(reference.dtype, np.floating):
        equal = bool(np.array_equal(actual, reference))
        return equal, Verification(0.0 if equal else 1.0, 0.0 if equal else 1.0, 0.0, 0.0)
    finite = np.isfinite(reference)
    same_special = bool(np.array_equal(np.isfinite(actual), finite)) and bool(
        np.array_equal(actual[~finite], reference[~finite], equal_nan=True)
    )
    if not same_special:
        largest = float(np.finfo(np.float64).max)
        return False, Verification(largest, largest, rtol, atol)
    error = np.abs(actual[finite].astype(np.float64) - reference[finite])
    if not error.size:
        return True, Verification(0.0, 0.0, rtol, atol)
    scale = np.abs(reference[finite].astype(np.float64))
    relative = float((error / np.maximum(scale, np.finfo(np.float32).tiny)).max()) if error.max() else 0.0
    within = bool(np.all(error <= atol + rtol * scale))
    return within, Verification(float(error.max()), relative, rtol, atol)
