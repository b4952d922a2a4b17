"""How records of older format versions become today's.

`MIGRATIONS[v]` turns the JSON object of a record of version v into that of version v + 1; it raises `ValueError` if it cannot.
Version 1 is the first, so there is none yet. A change of the record's fields adds one here, raises `codec.VERSION`, and adds
a file of the old version to the tests.
"""

from __future__ import annotations

from collections.abc import Callable

from mvcompile.records.codec import VERSION

Migration = Callable[[dict[str, object]], dict[str, object]]

MIGRATIONS: dict[int, Migration] = {}


def has_path(version: int) -> bool:
    """Whether records of `version` (at most today's) can be brought to today's."""
    return all(step in MIGRATIONS for step in range(version, VERSION))


def migrate(value: object, version: int) -> object:
    """Today's form of a record's JSON value of `version`. Raises `ValueError`."""
    for step in range(version, VERSION):
        if not isinstance(value, dict):
            raise ValueError(f"record is {type(value).__name__}, expected an object")
        value = MIGRATIONS[step](value)
    return value
