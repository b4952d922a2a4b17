"""Schedules as text: the form in which they are stored, sent to workers, and travel in a bundle."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm.s_tir.schedule import Schedule, Trace


def dump(trace: Trace) -> str:
    """`trace` with its decisions as canonical JSON text."""
    return text(*trace.as_json())


def text(instructions: Any, decisions: Any) -> str:
    """The same of the two parts of a trace's JSON form."""
    return json.dumps([instructions, decisions], separators=(",", ":"), allow_nan=False, default=_number)


def _number(node: Any) -> int | float:
    """Decisions come back from TVM as immediate expressions."""
    return node.value  # type: ignore[no-any-return]


def replay(module: tvm.IRModule, text: str) -> Schedule:
    """A schedule of `module` with the trace applied. Raises whatever TVM raises for a trace that does not fit the module."""
    schedule = Schedule(module)
    Trace.apply_json_to_schedule(json.loads(text), schedule)
    return schedule
