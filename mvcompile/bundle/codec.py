"""Manifest (and what else a bundle says in JSON) <-> canonical JSON.

Decoding is strict and driven by the type hints of the dataclasses in `schema.py`: there is no second description of the
format that could disagree with them. What it checks is form (types, missing and unknown fields, finite numbers); what the
values mean together is checked in `check.py`. Only the standard library is imported, because the runtime decodes.
"""

from __future__ import annotations

import json
import math
import reprlib
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mvcompile.bundle.schema import Manifest
from mvcompile.errors import BundleError

INTEGER_LIMIT = 2**63
"""Integers of the manifest lie in 0 .. 2^63-1: what a signed 64-bit reader in any language can hold."""

_ROOT = "manifest"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

Signed = NewType("Signed", float)
"""A number that may be negative; a field of type float may not."""

Decoder = Callable[[Any], Any]
Decoded = TypeVar("Decoded")


class _Mismatch(Exception):
    """A value of the wrong form. `trail` is its path from the innermost step outwards: paths are put together only when needed,
    which halves the time of decoding."""

    def __init__(self, problem: str, *trail: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.trail = list(trail)


def fault(path: str, found: object, expected: str) -> BundleError:
    """The error for the value at `path` (JSON path from `manifest`) that is not as `expected`."""
    return BundleError(f"{path} {_problem(found, expected)}")


def mismatch(path: str, found: str, expected: str) -> BundleError:
    """The same as `fault` for what is described in words and not quoted."""
    return BundleError(f"{path} is {found}, expected {expected}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON: UTF-8, keys sorted, no white space, shortest decimal form of numbers. Equal manifests give equal bytes.

    Raises BundleError, naming the JSON path, when a value is not of the type the schema gives it.
    """
    return encode(manifest, _ROOT)


def to_plain(manifest: Manifest) -> dict[str, Any]:
    """The manifest as `json.loads` would give it, with every float field a float. Raises BundleError as `encode_manifest`."""
    return plain_of(manifest, _ROOT)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in JSON text `data`. Raises BundleError that names the JSON path, the value found and what was expected."""
    return decode(data, Manifest, _ROOT)


def encode(value: Any, root: str) -> bytes:
    """Canonical JSON of a dataclass that errors call `root`. Raises BundleError as `encode_manifest`."""
    plain = plain_of(value, root)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def plain_of(value: Any, root: str) -> dict[str, Any]:
    """A dataclass that errors call `root` as `json.loads` would give it. Raises BundleError as `encode_manifest`."""
    # The decoder doubles as the check of what callers built: numpy scalars, NaN and None are refused here, not by a later reader.
    return cast(dict[str, Any], _plain(_from_plain(_plain(value), type(value), root)))


def decode(data: bytes, cls: type[Decoded], root: str) -> Decoded:
    """The `cls` in JSON text `data`, which errors call `root`. Raises BundleError as `decode_manifest`."""
    return _from_plain(_parse(data, root), cls, root)


def version_of(data: bytes, root: str) -> int:
    """The field `version` of the object in JSON text `data`, whatever else it holds. Raises BundleError."""
    plain = _parse(data, root)
    if not isinstance(plain, dict) or "version" not in plain:
        raise fault(root, plain, "an object with the field version")
    return _from_plain(plain["version"], int, f"{root}.version")


def _parse(data: bytes, root: str) -> object:
    try:
        plain: object = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise BundleError(f"{root} is nested too deeply to be one") from None
    except _Mismatch as error:
        raise BundleError(f"{root} {error.problem}") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise BundleError(f"{root} is not JSON in UTF-8: {error}") from error
    return plain


def _from_plain(plain: object, cls: type[Decoded], root: str) -> Decoded:
    try:
        return cast(Decoded, _decoder(cast(Any, cls))(plain))
    except _Mismatch as error:
        raise BundleError(f"{root}{''.join(reversed(error.trail))} {error.problem}") from None


def _plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists; `dataclasses.asdict` does it too, but copies every number and string."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Mismatch(f"holds an object with two fields named {_SHORT.repr(twice)}")
    return plain


def _constant(text: str) -> object:
    raise _Mismatch(f"holds {text}, expected finite numbers only")


def _problem(found: object, expected: str) -> str:
    return f"is {_SHORT.repr(found)}, expected {expected}"


@cache
def _decoder(hint: Any) -> Decoder:
    """Decodes a value of type `hint`: str, int, float, Signed, bool, X | None, tuple[X, ...], dict[str, X], a dataclass."""
    primitive = _PRIMITIVES.get(hint)
    if primitive is not None:
        return primitive
    if is_dataclass(hint):
        return _dataclass(cast(type, hint))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _array(_decoder(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _mapping(_decoder(arguments[1]))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(_decoder(arguments[0]))
    raise TypeError(f"a manifest field cannot be of type {hint}")


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _Mismatch(_problem(value, "a string"))
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no one could print or write to a file
            raise _Mismatch(_problem(value, "a string of whole Unicode characters")) from None
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < INTEGER_LIMIT:
        raise _Mismatch(_problem(value, "an integer from 0 to 2^63-1"))
    return value


def _number(value: Any) -> float:
    if type(value) is int and 0 <= value < INTEGER_LIMIT:
        return float(value)
    if type(value) is not float or not 0 <= value < math.inf:
        raise _Mismatch(_problem(value, "a finite number that is not negative"))
    return value


def _signed(value: Any) -> float:
    if type(value) is int and -INTEGER_LIMIT < value < INTEGER_LIMIT:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _Mismatch(_problem(value, "a finite number"))
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _Mismatch(_problem(value, "true or false"))
    return value


_PRIMITIVES: dict[Any, Decoder] = {str: _string, int: _integer, float: _number, Signed: _signed, bool: _boolean}


def _optional(decode: Decoder) -> Decoder:
    return lambda value: None if value is None else decode(value)


def _array(decode: Decoder) -> Decoder:
    def array(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Mismatch(_problem(value, "an array"))
        done: list[Any] = []
        try:
            for item in value:
                done.append(decode(item))
        except _Mismatch as error:
            error.trail.append(f"[{len(done)}]")
            raise
        return tuple(done)

    return array


def _mapping(decode: Decoder) -> Decoder:
    def mapping(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _Mismatch(_problem(value, "an object"))
        done: dict[str, Any] = {}
        for key, item in value.items():
            try:
                done[_string(key)] = decode(item)
            except _Mismatch as error:
                error.trail.append(f"[{_SHORT.repr(key)}]")
                raise
        return done

    return mapping


def _dataclass(cls: type) -> Decoder:
    hints = get_type_hints(cls)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields(cls)}

    def record(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch(_problem(value, "an object"))
        if value.keys() != decoders.keys():
            raise _wrong_fields(value, list(decoders))
        name = ""
        values: list[Any] = []
        try:
            for name, decode in decoders.items():
                values.append(decode(value[name]))
        except _Mismatch as error:
            error.trail.append(f".{name}")
            raise
        return cls(*values)

    return record


def _wrong_fields(value: dict[str, object], names: list[str]) -> _Mismatch:
    missing = [name for name in names if name not in value]
    if missing:
        return _Mismatch(f"is missing, expected the fields {', '.join(names)}", f".{missing[0]}")
    unknown = next(name for name in value if name not in names)
    return _Mismatch(f"has an unknown field {_SHORT.repr(unknown)}, expected only {', '.join(names)}")
