"""The schedule of a task that no search has improved: producers inlined, outer loops in parallel, inner loops in vectors.

One candidate, no sampled decisions; works for any tensor program (a primitive that does not apply is left out).
"""

from __future__ import annotations

import math
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError

from mvcompile.types import HostTarget

PARALLEL_ELEMENTS = 1 << 15
"""Below this many elements a parallel launch (1 to 40 microseconds) costs more than it gains."""
UNROLL_EXTENT = 16


def schedule(sch: Schedule, target: HostTarget) -> Schedule:
    """Applies the default to `sch` in place and returns it."""
    lanes = target.vector_bits // 32
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _try_inline(sch, block)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _schedule_block(sch, block, lanes)
    return sch


def _try_inline(sch: Schedule, block: Any) -> None:
    """Inlines an element-wise or padding block into its only consumer; work shared by two consumers is not repeated."""
    if len(sch.get_consumers(block)) != 1 or any(_is_reduction(each) for each in sch.get(block).iter_vars):
        return
    try:
        sch.compute_inline(block)
    except ScheduleError:
        return


def _is_reduction(iter_var: Any) -> bool:
    return int(iter_var.iter_type) == 2


def _schedule_block(sch: Schedule, block: Any, lanes: int) -> None:
    loops, kinds = sch.get_loops(block), sch.get(block).iter_vars
    if not loops or len(loops) != len(kinds):
        return
    reductions = [loop for loop, kind in zip(loops, kinds, strict=True) if _is_reduction(kind)]
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if not _is_reduction(kind)]
    if not spatial:
        return
    elements = math.prod(int(sch.get(loop).extent) for loop in loops)
    *outer, inner = spatial
    vector = None
    if int(sch.get(inner).extent) % lanes == 0:
        inner, vector = sch.split(inner, [None, lanes])
    sch.reorder(*outer, inner, *reductions, *([vector] if vector is not None else []))
    _run_in_parallel(sch, [*outer, inner], elements)
    if vector is not None:
        sch.vectorize(vector)
    if reductions:
        sch.decompose_reduction(block, reductions[0])


def _run_in_parallel(sch: Schedule, loops: list[Any], elements: int) -> None:
    if elements < PARALLEL_ELEMENTS:
        return
    wide = next((loop for loop in loops if int(sch.get(loop).extent) > 1), None)
    if wide is None:
        return
    try:
        sch.parallel(wide)
    except ScheduleError:
        return
