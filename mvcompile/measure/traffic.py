"""What a schedule takes from shared caches and memory, estimated from its loop nest (docs/design/005-static-traffic.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from mvcompile.measure.traffic_lines import Footprints
from mvcompile.measure.traffic_reader import read_nest
from mvcompile.measure.traffic_reuse import ReuseCurve, reuse_curve
from mvcompile.types import HostTarget

NEAR_COMPULSORY = 0.05
"""Memory traffic up to this share above the compulsory one counts as near it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per call of one kernel on one thread, caches cold at the start and flushed at the end.

    `working_set_bytes` is the smallest cache that keeps the traffic below it within 5 % of `compulsory_bytes`; 0 if L1 does.
    `footprint_bytes` is the last-level cache that the schedule needs for that: the working set, or 0 if the private L2 holds it.
    `traffic_bytes` crosses from the private L2 to the shared levels: lines fetched plus dirty lines written back.
    `level_bytes` are the same for L1, L2 and last-level caches. `compulsory_bytes` is what no cache size avoids: each line
    once, each written line back once, workspaces included. `workspace_bytes` are intermediate buffers.
    `exact` is False if part of the function was bounded and not analysed; `note` then says what.
    """

    footprint_bytes: int
    traffic_bytes: int
    compulsory_bytes: int
    workspace_bytes: int
    working_set_bytes: int
    level_bytes: tuple[int, int, int]
    exact: bool
    note: str = ""


def estimate(func: tirx.PrimFunc, target: HostTarget) -> Traffic:
    """The memory behaviour of a scheduled (not lowered) function with static shapes on `target`.

    Pure, deterministic, a few milliseconds. It raises nothing: what cannot be analysed is counted as if every buffer had to
    stay in the last-level cache, with `exact` False.
    """
    try:
        footprints, curve = analyse(func, target.vector_registers * target.vector_bits // 8, target.l1d_bytes)
    except Exception as error:
        # A candidate that the model cannot read must cost the tuner a poor estimate and never the run.
        return _fallback(func, str(error))
    working_set = curve.working_set_bytes(NEAR_COMPULSORY)
    levels = tuple(round(curve.bytes_below(size)) for size in (target.l1d_bytes, target.l2_bytes, target.llc_bytes))
    notes = footprints.nest.notes
    return Traffic(
        footprint_bytes=round(working_set) if working_set > target.l2_bytes else 0,
        traffic_bytes=levels[1],
        compulsory_bytes=round(curve.compulsory_bytes),
        workspace_bytes=footprints.workspace_bytes(),
        working_set_bytes=round(working_set),
        level_bytes=(levels[0], levels[1], levels[2]),
        exact=not notes,
        note="; ".join(notes),
    )


def analyse(func: tirx.PrimFunc, register_bytes: int = 0, smallest_cache: int = 0) -> tuple[Footprints, ReuseCurve]:
    """The loop tree of `func` with its footprints, and its traffic as a function of cache capacity.

    Intermediate buffers of at most `register_bytes` count as nothing; the curve holds from `smallest_cache` bytes on. Raises
    `traffic_reader.Unanalysable` for statements and shapes outside the model.
    """
    footprints = Footprints(read_nest(func), register_bytes)
    return footprints, reuse_curve(footprints, smallest_cache)


def _fallback(func: Any, note: str) -> Traffic:
    total = 0
    for param in func.params:
        shape = getattr(param.ty, "shape", None)
        if shape is None:
            continue
        size = -(-param.ty.dtype.dtype.bits // 8)
        for dim in shape:
            size *= getattr(dim, "value", 1)
        total += size
    return Traffic(total, total, total, 0, total, (total, total, total), False, note)
