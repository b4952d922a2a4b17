"""A record as a JSON object and back. Strict: what is not exactly a record raises `ValueError` with the reason."""

from __future__ import annotations

import json
import math
from typing import TypeVar

from mvcompile.types import Objectives, Record, Status, Verification

VERSION = 1
"""Version of the record's fields and of the file's framing."""

_TEXTS = ("task_key", "target_key", "fingerprint", "trace", "space", "message")
_FIELDS = frozenset((*_TEXTS, "version", "status", "objectives", "latency_spread", "verification"))
_OBJECTIVES = ("latency_s", "footprint_bytes", "traffic_bytes")
_VERIFICATION = ("max_abs_error", "max_rel_error", "rtol", "atol")
_Value = TypeVar("_Value", Objectives, Verification)


def encode(record: Record) -> dict[str, object]:
    """The record's JSON object. Raises `ValueError` if `decode` would not give back an equal record."""
    if record.version != VERSION:
        raise ValueError(f"its version is {record.version}, this program writes version {VERSION}")
    texts = {name: _text(getattr(record, name), name) for name in _TEXTS}
    return {
        "version": VERSION,
        **texts,
        "status": Status(record.status).value,
        "objectives": _encode_numbers(record.objectives, _OBJECTIVES),
        "latency_spread": None if record.latency_spread is None else _number(record.latency_spread, "latency_spread"),
        "verification": _encode_numbers(record.verification, _VERIFICATION),
    }


def decode(value: object) -> Record:
    """The record of a JSON object. Raises `ValueError` for a missing or unknown field and for a wrong type or range."""
    fields = _object(value, _FIELDS, "record")
    if type(fields["version"]) is not int or fields["version"] != VERSION:
        raise ValueError(f"record version {fields['version']!r}, expected {VERSION}")
    spread = fields["latency_spread"]
    return Record(
        **{name: _text(fields[name], name) for name in _TEXTS},
        status=Status(_text(fields["status"], "status")),
        objectives=_decode_numbers(fields["objectives"], Objectives, _OBJECTIVES, "objectives"),
        latency_spread=None if spread is None else _number(spread, "latency_spread"),
        verification=_decode_numbers(fields["verification"], Verification, _VERIFICATION, "verification"),
        version=VERSION,
    )


def dumps(value: object) -> bytes:
    """Canonical JSON on one line, ASCII. Raises `ValueError` for what JSON cannot say."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(text: bytes) -> object:
    """The value of a JSON text. Raises `ValueError`, also for NaN, infinities, and a name that stands twice in an object."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return result


def _object(value: object, names: frozenset[str], what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, expected an object")
    if value.keys() != names:
        missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
        raise ValueError(f"{what} lacks {missing} and has unknown {unknown}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, expected a text")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, expected a finite number")
    return number


def _encode_numbers(value: Objectives | Verification | None, names: tuple[str, ...]) -> dict[str, float] | None:
    return None if value is None else {name: _number(getattr(value, name), name) for name in names}


def _decode_numbers(value: object, kind: type[_Value], names: tuple[str, ...], what: str) -> _Value | None:
    if value is None:
        return None
    fields = _object(value, frozenset(names), what)
    return kind(**{name: _number(fields[name], name) for name in names})
