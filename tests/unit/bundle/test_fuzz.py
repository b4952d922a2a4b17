"""Thousands of altered manifests with digests that fit: each is refused with BundleError, or sound in every check and usable."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mvcompile.bundle.check import check_manifest
from mvcompile.bundle.codec import decode_manifest, to_plain
from mvcompile.bundle.inspect import describe, to_json
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import BundleError
from mvcompile.testing.bundles import replace_manifest, write_tiny

JUNK: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    64,
    2**31,
    2**63 - 1,
    2**63,
    10**30,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
]
JUNK += ["", "x", "float32", "arena", "input", "weights.bin", "0" * 64, "\ud800", "é\u202e\x1b[2J", [], [0], [[]], {}, {"x": 1}]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def mutate(plain: dict[str, Any], chance: random.Random) -> None:
    everywhere = list(places(plain))
    container, key = chance.choice(everywhere)
    kind = chance.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1:
        other, other_key = chance.choice(everywhere)
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 2 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 3 and type(container[key]) is int:
        container[key] += chance.choice([-4096, -64, -1, 1, 64, 4096])
    elif kind == 4 and isinstance(container, list):
        chance.shuffle(container)
    else:
        container[key] = copy.deepcopy(chance.choice(JUNK))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("bundle") / "tiny.mvb")


def test_mutated_manifests_raise_nothing_but_bundle_errors(tiny: Path) -> None:
    with open_bundle(tiny) as bundle:
        original, length = json.dumps(to_plain(bundle.manifest)), tiny.stat().st_size
    chance = random.Random(1)
    refused = 0
    for _ in range(2500):
        plain = json.loads(original)
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            mutate(plain, chance)
        try:
            check_manifest(decode_manifest(json.dumps(plain).encode("utf-8", "surrogatepass")), length)
        except BundleError:
            refused += 1
    assert 2000 < refused < 2500  # most break something, some change a name or a figure only


def test_mutated_files_are_refused_or_can_be_described(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    with open_bundle(tiny) as bundle:
        original = json.dumps(to_plain(bundle.manifest))
    path = tmp_path / "mutated.mvb"
    schema = json.loads((Path(__file__).parents[3] / "docs/bundle-v1.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    chance = random.Random(2)
    described = 0
    for _ in range(400):
        plain = json.loads(original)
        mutate(plain, chance)
        path.write_bytes(replace_manifest(data, json.dumps(plain).encode("utf-8", "surrogatepass")))
        try:
            bundle = open_bundle(path)
        except BundleError:
            continue
        with bundle:
            validator.validate(to_plain(bundle.manifest))  # the published schema is never stricter than the reader
            assert json.loads(json.dumps(to_json(bundle)))["manifest"] == to_plain(bundle.manifest)
            assert all(line.isprintable() for line in describe(bundle).split("\n"))
        described += 1
    assert described > 10


def test_mutated_bytes_of_the_manifest_raise_nothing_but_bundle_errors(tiny: Path) -> None:
    data = tiny.read_bytes()
    text = data[64 : 64 + int.from_bytes(data[16:24], "little")]
    chance = random.Random(3)
    for _ in range(2000):
        altered = bytearray(text)
        for _ in range(chance.choice([1, 2, 10])):
            altered[chance.randrange(len(altered))] = chance.randrange(256)
        cut = altered[: chance.choice([len(altered), chance.randrange(len(altered))])]
        try:
            check_manifest(decode_manifest(bytes(cut)), len(data))
        except BundleError:
            continue
