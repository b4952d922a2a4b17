"""Manifest <-> canonical JSON.

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
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from mvcompile.bundle.schema import Manifest
from mvcompile.errors import BundleError

INTEGER_LIMIT = 2**63
"""Integers of the manifest lie in 0 .. 2^63-1: what a signed 64-bit reader in any language can hold."""

ROOT = "manifest"

Decoder = Callable[[object, str], Any]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def fault(path: str, found: object, expected: str) -> BundleError:
    """The error for the value at `path` (JSON path from `manifest`) that is not as `expected`."""
    return BundleError(f"{path} is {_SHORT.repr(found)}, expected {expected}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON: UTF-8, keys sorted, no white space, shortest decimal form of numbers. Equal manifests give equal bytes.

    Raises BundleError, naming the JSON path, when a value is not of the type the schema gives it.
    """
    return json.dumps(to_plain(manifest), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def to_plain(manifest: Manifest) -> dict[str, Any]:
    """The manifest as `json.loads` would give it, with every float field a float. Raises BundleError as `encode_manifest`."""
    # The decoder doubles as the check of what callers built: numpy scalars, NaN and None are refused here, not by a later reader.
    return asdict(cast(Manifest, _decoder(Manifest)(asdict(manifest), ROOT)))


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in JSON text `data`. Raises BundleError that names the JSON path, the value found and what was expected."""
    try:
        plain = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise BundleError(f"{ROOT} is nested too deeply to be one") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise BundleError(f"{ROOT} is not JSON in UTF-8: {error}") from error
    return cast(Manifest, _decoder(Manifest)(plain, ROOT))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BundleError(f"{ROOT} holds an object with two fields named {_SHORT.repr(twice)}")
    return plain


def _constant(text: str) -> object:
    raise BundleError(f"{ROOT} holds {text}, expected finite numbers only")


@cache
def _decoder(hint: Any) -> Decoder:
    """Decodes a value of type `hint`: str, int, float, bool, X | None, tuple[X, ...], dict[str, X], a dataclass."""
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


def _string(value: object, path: str) -> str:
    if type(value) is not str:
        raise fault(path, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no one could print or write to a file
        raise fault(path, value, "a string of whole Unicode characters") from None
    return value


def _integer(value: object, path: str) -> int:
    if type(value) is not int or not 0 <= value < INTEGER_LIMIT:
        raise fault(path, value, "an integer from 0 to 2^63-1")
    return value


def _number(value: object, path: str) -> float:
    if type(value) is int and 0 <= value < INTEGER_LIMIT:
        return float(value)
    if type(value) is not float or not math.isfinite(value) or value < 0:
        raise fault(path, value, "a finite number that is not negative")
    return value


def _boolean(value: object, path: str) -> bool:
    if type(value) is not bool:
        raise fault(path, value, "true or false")
    return value


_PRIMITIVES: dict[Any, Decoder] = {str: _string, int: _integer, float: _number, bool: _boolean}


def _optional(decode: Decoder) -> Decoder:
    return lambda value, path: None if value is None else decode(value, path)


def _array(decode: Decoder) -> Decoder:
    def array(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise fault(path, value, "an array")
        return tuple([decode(item, f"{path}[{index}]") for index, item in enumerate(value)])

    return array


def _mapping(decode: Decoder) -> Decoder:
    def mapping(value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise fault(path, value, "an object")
        return {_string(key, f"a key of {path}"): decode(item, f"{path}[{_SHORT.repr(key)}]") for key, item in value.items()}

    return mapping


def _dataclass(cls: type) -> Decoder:
    hints = get_type_hints(cls)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields(cls)}

    def record(value: object, path: str) -> Any:
        if not isinstance(value, dict):
            raise fault(path, value, "an object")
        if value.keys() != decoders.keys():
            raise _wrong_fields(value, path, list(decoders))
        return cls(*[decode(value[name], f"{path}.{name}") for name, decode in decoders.items()])

    return record


def _wrong_fields(value: dict[str, object], path: str, names: list[str]) -> BundleError:
    missing = [name for name in names if name not in value]
    if missing:
        return BundleError(f"{path}.{missing[0]} is missing, expected the fields {', '.join(names)}")
    unknown = next(name for name in value if name not in names)
    return BundleError(f"{path} has an unknown field {_SHORT.repr(unknown)}, expected only {', '.join(names)}")
