"""Integers as callers write them."""

from __future__ import annotations

import operator


def integer(value: object) -> int | None:
    """`value` as an int if it is an integer of any kind (numpy's too) but no bool, else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
