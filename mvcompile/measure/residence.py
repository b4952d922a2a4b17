"""Whether a model's weights stay in the last-level cache from one run to the next: the cache state in which candidates are timed.

What the system reports as last-level cache need not be had: a virtual machine of two cores that reports 480 MiB sees 64 to
130 MiB of it, the rest belongs to other tenants. So the question is put to the machine: does a set of bytes as large as the
model, read over and over, come as fast as one that surely stays in the cache, or as slowly as one that surely does not?
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.hierarchy import MISSES, TOLD_APART
from mvcompile.measure.load import STREAM_FACTOR, Counters, Load, LoadProcess, Work
from mvcompile.measure.probe import rate
from mvcompile.types import HostTarget

NEAR_FACTOR = 4
"""A set of this many second-level caches is beyond these and well within the last level."""
WINDOW_S = 0.15


def stays(
    model_bytes: int,
    target: HostTarget,
    core: int,
    *,
    start: Callable[[int, int], Load] = LoadProcess,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether `model_bytes`, touched once per run, are in the last-level cache when they are touched again; takes a few seconds
    unless the reported sizes of the caches answer that.

    Most of them have to be there: three quarters, by the time that reading takes. Raises what `LoadProcess` raises.
    """
    if model_bytes > target.llc_bytes:
        return False
    near_bytes = NEAR_FACTOR * target.l2_bytes
    if model_bytes <= near_bytes:
        return True
    load = start(core, model_bytes)  # whose buffers for reading are STREAM_FACTOR times as large
    try:
        near, here, far = (
            1.0 / max(rate(load, Work(read_rate=-1.0, read_window=size), _read, WINDOW_S, sleep).per_s, 1.0)
            for size in (near_bytes, model_bytes, STREAM_FACTOR * model_bytes)
        )
    finally:
        load.stop()
    return far < TOLD_APART * near or here <= near + MISSES * (far - near)


def kept_answer(path: Path) -> bool | None:
    """The answer that `stays_as_before` keeps at `path`; None if there is none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        answer = json.loads(path.read_text())["stays"]
        if isinstance(answer, bool):
            return answer
    return None


def stays_as_before(path: Path, measure: Callable[[], bool]) -> bool:
    """What `measure` said when it was first asked, which is kept at `path`: whoever resumes has to find the same records, though
    the machine may look otherwise by then. Raises EnvironmentProblem if the file cannot be written."""
    kept = kept_answer(path)
    if kept is not None:
        return kept
    answer = measure()
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(json.dumps({"stays": answer}))
        os.replace(partial, path)
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written: {error.strerror}; free space and run again to resume") from error
    return answer


def _read(counters: Counters) -> int:
    return counters.read_bytes
