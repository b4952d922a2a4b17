"""Interference levels: the default set, and how people write their own."""

from __future__ import annotations

import re

from mvcompile.bundle.interference import NONE
from mvcompile.errors import UsageError
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials, Level

_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DIALS = {"resident": "resident_bytes", "read": "read_bytes_per_s", "write": "write_bytes_per_s"}
MAX_LEVELS = 16


def default_levels(llc_bytes: int) -> tuple[Level, ...]:
    """`none`, and one heavy level of each kind: a neighbour that keeps half of the last-level cache (`llc_bytes`) to itself, one
    that reads memory as fast as one core can, and one that writes it."""
    return (
        Level(NONE, Dials()),
        Level("llc", Dials(resident_bytes=llc_bytes // 2)),
        Level("read", Dials(read_bytes_per_s=UNLIMITED_BYTES_PER_S)),
        Level("write", Dials(write_bytes_per_s=UNLIMITED_BYTES_PER_S)),
    )


def parse_level(text: str) -> Level:
    """The level of `NAME:dial=value,...`: dials `resident` (bytes), `read` and `write` (bytes per second, or `max`); K, M and G
    count in powers of 1024. Example: `half:resident=8M,read=4G`. Raises UsageError for anything else."""
    name, colon, rest = text.partition(":")
    if not name or not colon or not rest:
        raise UsageError(f"level {text!r} is not NAME:dial=value,..., such as half:resident=8M,read=4G")
    values: dict[str, float] = {}
    for part in rest.split(","):
        dial, _, value = part.partition("=")
        if dial not in _DIALS or dial in values:
            raise UsageError(
                f"level {text!r}: {dial!r} is {'given twice' if dial in values else 'no dial'}; dials: resident, read, write"
            )
        values[dial] = _value(text, dial, value)
    return Level(name, Dials(int(values.get("resident", 0)), values.get("read", 0.0), values.get("write", 0.0)))


def _value(text: str, dial: str, value: str) -> float:
    if value == "max" and dial != "resident":
        return UNLIMITED_BYTES_PER_S
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", value)
    if match is None:
        raise UsageError(
            f"level {text!r}: {dial} is {value!r}; give a number with K, M or G, such as 8M"
            + ("" if dial == "resident" else ", or max")
        )
    return float(match[1]) * _SUFFIXES[match[2]]


def checked_levels(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """`levels` with `none` first. Raises UsageError for two of one name, or too many."""
    named = [level for level in levels if level.name != NONE]
    names = [level.name for level in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"level {twice!r} is given twice; give each level a name of its own")
    if len(named) >= MAX_LEVELS:
        raise UsageError(
            f"{len(named)} levels are given; at most {MAX_LEVELS - 1} besides {NONE!r} can be measured in useful time"
        )
    if any(level.name == NONE and level.dials != Dials() for level in levels):
        raise UsageError(f"level {NONE!r} is the one at which nothing else runs; give a level with dials another name")
    return (Level(NONE, Dials()), *named)
