"""Register tiles: in schedules, and in the assembly of their kernels."""

from __future__ import annotations

import math
import re
from typing import Any

from tvm.s_tir import Schedule
from tvm.tirx import ForKind


def update_loops(schedule: Schedule) -> list[Any]:
    """The loops around the sums of the packed operator, outermost first."""
    blocks = [schedule.get(block).name_hint for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    (name,) = [name for name in blocks if name in ("packed_conv2d_update", "packed_matmul_update")]
    return [schedule.get(loop) for loop in schedule.get_loops(schedule.get_sblock(name))]


def tile_of(schedule: Schedule) -> tuple[int, int]:
    """Rows, and vectors of a row, of the register tile."""
    *rows, vectors = [int(loop.extent) for loop in update_loops(schedule) if int(loop.kind) == int(ForKind.UNROLLED)]
    return math.prod(rows), vectors


def loop_bodies(assembly: str) -> list[str]:
    """What stands between each label and the next jump: the bodies of innermost loops are among them (x86-64)."""
    return [block.split("\tj")[0] for block in re.split(r"^\.LBB\w+:", assembly, flags=re.MULTILINE)]


def stores_vectors(body: str) -> bool:
    """Whether a body of `loop_bodies` stores 512-bit vectors."""
    return re.search(r"vmov[au]ps\s+%zmm\d+, ", body) is not None
