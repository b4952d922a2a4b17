"""docs/bundle-v1.schema.json says what the package checks, and is never stricter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mvcompile.bundle.codec import decode_manifest, to_plain
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import BundleError
from mvcompile.testing.bundles import put, write_tiny

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads((ROOT / "docs/bundle-v1.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Any]:
    with open_bundle(write_tiny(tmp_path / "tiny.mvb")) as bundle:
        return to_plain(bundle.manifest)


def test_the_file_is_current() -> None:
    script = ROOT / "scripts/bundle-schema"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_sound_manifest_is_valid(validator: Any, plain: dict[str, Any]) -> None:
    validator.validate(plain)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format_version", 2),
        ("model.onnx_sha256", "abc"),
        ("model.inputs[0].dtype", "float33"),
        ("model.inputs[0].shape", [0]),
        ("plan.arena_bytes", -1),
        ("plan.arena_bytes", True),
        ("plan.arena_bytes", 2**63),
        ("plan.tensors[0].storage", "stack"),
        ("plan.more", 1),
        ("tasks[0].variants", []),
        ("tasks[0].variants[0].objectives", 1),
        ("tasks[0].variants[0].symbol", "a-b"),
        ("tasks[0].time_share", 1.5),
        ("members[0].offset", 4097),
        ("toolchain.numpy", 2),
    ],
)
def test_what_the_package_refuses_is_invalid(validator: Any, plain: dict[str, Any], path: str, value: object) -> None:
    put(path, value)(plain)
    assert not validator.is_valid(plain)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object with fixed fields in a manifest; of an array only the first item."""
    if isinstance(value, list):
        yield from objects(value[0] if value else None)
    if isinstance(value, dict):
        yield value
        for key, item in value.items():
            if key != "toolchain":
                yield from objects(item)


def test_no_field_may_be_missing(validator: Any, plain: dict[str, Any]) -> None:
    """Whatever is taken out of a manifest, decoder and schema refuse it alike."""
    for one in objects(plain):
        for key in list(one):
            value = one.pop(key)
            assert not validator.is_valid(plain), key
            with pytest.raises(BundleError, match=rf"\.{key} is missing"):
                decode_manifest(json.dumps(plain).encode())
            one[key] = value
