"""Manifest <-> JSON: nothing is lost, and nothing of the wrong form gets in."""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvcompile.bundle.codec import decode_manifest, encode_manifest, to_plain
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import BundleError
from mvcompile.testing.bundles import put, tiny_manifest


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of type `hint` may have, built from the same type hints as the decoder."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(codec="utf-8"), max_size=8),
        int: st.integers(0, 2**63 - 1),
        float: st.floats(0, allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
    }
    if hint in simple:
        return simple[hint]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in fields(hint)})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    assert origin is types.UnionType
    return st.none() | values_of(arguments[0])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(values_of(Manifest))
def test_every_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    text = encode_manifest(manifest)
    assert decode_manifest(text) == manifest
    assert encode_manifest(decode_manifest(text)) == text


def test_text_is_canonical() -> None:
    manifest = replace(tiny_manifest(), toolchain={"b": "2", "a": "é"})
    text = encode_manifest(manifest)
    assert text.startswith(b'{"coverage":{"hypervolume_ratio":0.975,"tuned_share":0.75},"fingerprint":"fff')
    assert '"toolchain":{"a":"é","b":"2"}'.encode() in text
    assert encode_manifest(replace(manifest, toolchain={"a": "é", "b": "2"})) == text


def test_an_integer_in_a_number_field_is_encoded_as_a_number() -> None:
    manifest = tiny_manifest()
    task = replace(manifest.tasks[0], flops=512)
    changed = replace(manifest, tasks=(task, manifest.tasks[1]))
    assert encode_manifest(changed) == encode_manifest(manifest)
    assert isinstance(to_plain(changed)["tasks"][0]["flops"], float)


@pytest.mark.parametrize(
    ("arena_bytes", "found"),
    [(np.int64(128), r"np.int64\(128\)"), (128.0, "128.0"), (None, "None"), (-1, "-1"), (2**63, "9223372036854775808")],
)
def test_encoding_refuses_values_that_json_would_change(arena_bytes: Any, found: str) -> None:
    manifest = tiny_manifest()
    with pytest.raises(BundleError, match=rf"^manifest\.plan\.arena_bytes is {found}, expected an integer from 0"):
        encode_manifest(replace(manifest, plan=replace(manifest.plan, arena_bytes=arena_bytes)))


WRONG_FORM = [
    ("format_version", True, r"manifest\.format_version is True, expected an integer from 0 to 2\^63-1"),
    ("format_version", "1", r"manifest\.format_version is '1', expected an integer"),
    ("format_version", 1.0, r"manifest\.format_version is 1\.0, expected an integer"),
    ("plan.arena_bytes", -1, r"manifest\.plan\.arena_bytes is -1, expected an integer from 0"),
    ("plan.arena_bytes", 2**63, r"manifest\.plan\.arena_bytes is 9223372036854775808, expected an integer"),
    ("plan.steps[1].arguments[2]", None, r"manifest\.plan\.steps\[1\]\.arguments\[2\] is None, expected an integer"),
    ("plan.steps", {}, r"manifest\.plan\.steps is \{\}, expected an array"),
    ("plan", [], r"manifest\.plan is \[\], expected an object"),
    ("model.name", 3, r"manifest\.model\.name is 3, expected a string"),
    ("model.name", "\ud800", r"manifest\.model\.name is .*, expected a string of whole Unicode characters"),
    ("toolchain", [], r"manifest\.toolchain is \[\], expected an object"),
    ("toolchain.numpy", 2, r"manifest\.toolchain\['numpy'\] is 2, expected a string"),
    ("tasks[0].tuned", 1, r"manifest\.tasks\[0\]\.tuned is 1, expected true or false"),
    ("tasks[0].flops", "many", r"manifest\.tasks\[0\]\.flops is 'many', expected a finite number"),
    ("tasks[0].flops", True, r"manifest\.tasks\[0\]\.flops is True, expected a finite number"),
    ("tasks[0].flops", -0.5, r"manifest\.tasks\[0\]\.flops is -0\.5, expected a finite number that is not negative"),
    ("tasks[0].flops", 10**400, r"manifest\.tasks\[0\]\.flops is 1000.*, expected a finite number"),
    ("tasks[0].variants[1].objectives", 5, r"manifest\.tasks\[0\]\.variants\[1\]\.objectives is 5, expected an object"),
    ("selftest.extra", 1, r"manifest\.selftest has an unknown field 'extra', expected only input_offsets, "),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG_FORM)
def test_wrong_form_is_refused_by_path_value_and_expectation(path: str, value: object, message: str) -> None:
    plain = to_plain(tiny_manifest())
    put(path, value)(plain)
    with pytest.raises(BundleError, match=f"^{message}"):
        decode_manifest(json.dumps(plain).encode())


def test_a_missing_field_is_named() -> None:
    plain = to_plain(tiny_manifest())
    del plain["tasks"][1]["variants"][0]["symbol"]
    with pytest.raises(
        BundleError, match=r"^manifest\.tasks\[1\]\.variants\[0\]\.symbol is missing, expected the fields symbol, space"
    ):
        decode_manifest(json.dumps(plain).encode())


WRONG_TEXT = [
    (b"", "not JSON in UTF-8"),
    (b"\xff\xfe", "not JSON in UTF-8"),
    (b"{} {}", "not JSON in UTF-8"),
    (b"[" * 100_000, "manifest is"),
    (b"9" * 5000, "manifest is"),
    (b"[]", r"manifest is \[\], expected an object"),
    (b'{"x": NaN}', "manifest holds NaN, expected finite numbers only"),
    (b'{"x": -Infinity}', "manifest holds -Infinity"),
    (b'{"x": 1, "x": 2}', "two fields named 'x'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TEXT, ids=[repr(text[:20]) for text, _ in WRONG_TEXT])
def test_text_that_is_no_manifest_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        decode_manifest(text)


def test_a_number_that_overflows_to_infinity_is_refused() -> None:
    text = encode_manifest(tiny_manifest()).replace(b'"flops":512.0', b'"flops":1e999')
    with pytest.raises(BundleError, match=r"manifest\.tasks\[0\]\.flops is inf, expected a finite number"):
        decode_manifest(text)
