"""The member interference.json: read back as written, refused when newer or wrong, shown, and judged by the gate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mvcompile.bundle.inspect import describe, to_json
from mvcompile.bundle.interference import (
    INTERFERENCE,
    INTERFERENCE_VERSION,
    Interference,
    decode_interference,
    encode_interference,
    interference_of,
)
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.writer import write_bundle
from mvcompile.errors import BundleError, IncompatibleBundleError, UsageError
from mvcompile.testing.bundles import tiny_manifest, tiny_members, write_tiny
from mvcompile.testing.profiles import interference_of as invented
from mvcompile.validate import Thresholds, _figures

MANIFEST = tiny_manifest()


def made() -> Interference:
    return invented(MANIFEST)


def write(path: Path, found: Interference) -> Path:
    write_bundle(path, MANIFEST, {**tiny_members(), INTERFERENCE: encode_interference(found)})
    return path


def test_reads_what_was_written(tmp_path: Path) -> None:
    with open_bundle(write(tmp_path / "a.mvb", made())) as bundle:
        assert interference_of(bundle) == made()
        assert "Beside neighbours" in describe(bundle)
        assert json.loads(json.dumps(to_json(bundle)))["interference"]["levels"][0]["name"] == "none"


def test_a_bundle_may_be_without(tmp_path: Path) -> None:
    with open_bundle(write_tiny(tmp_path / "a.mvb")) as bundle:
        assert interference_of(bundle) is None
        assert "Beside neighbours" not in describe(bundle)
        assert to_json(bundle)["interference"] is None


def test_a_newer_version_is_refused_by_name_and_remedy_whatever_it_holds() -> None:
    newer = json.dumps({"version": INTERFERENCE_VERSION + 1, "unheard": "of"}).encode()
    with pytest.raises(IncompatibleBundleError, match=r"version 2, this mvcompile reads versions up to 1.*mvcompile profile"):
        decode_interference(newer, MANIFEST)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", r"interference.json is \[\], expected an object"),
        (b"{", "interference.json is not JSON"),
        (b'{"version": "1"}', "interference.json.version is '1', expected an integer"),
        (b'{"version": 1}', "interference.json.source is missing"),
        (b'{"version": 1, "version": 1}', "two fields named 'version'"),
        (b'{"version": NaN}', "holds NaN"),
    ],
)
def test_what_is_no_profile_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        decode_interference(data, MANIFEST)


def test_lengths_and_numbers_are_checked_against_the_manifest() -> None:
    good = made()
    (profile,) = good.profiles
    wrong = [
        replace(good, version=0),
        replace(good, source="somehow"),
        replace(good, levels=good.levels[1:]),
        replace(good, achieved=good.achieved[1:]),
        replace(good, profiles=(profile, profile)),
        replace(good, profiles=(replace(profile, cores=0),)),
        replace(good, profiles=(replace(profile, spread=profile.spread[1:]),)),
        replace(good, profiles=(replace(profile, group=profile.group[1:]),)),
        replace(good, profiles=(replace(profile, group=(*profile.group[1:], len(profile.group))),)),
        replace(good, profiles=(replace(profile, regret=()),)),
        replace(good, pressure=((0.1,),)),
    ]
    for one in wrong:
        with pytest.raises(BundleError, match=r"interference\.json"):
            decode_interference(encode_interference(one), MANIFEST)


def test_the_gate_asks_for_regret(tmp_path: Path) -> None:
    (profile,) = made().profiles
    lossy = replace(made(), profiles=(replace(profile, regret=(1.2, 1.0)),))
    path = write(tmp_path / "a.mvb", lossy)
    failed = [check for check in _figures(path, Thresholds(max_regret=1.05)) if check.name == "regret" and not check.passed]
    assert [check.subject for check in failed] == ["dense, 1 core(s)", "worst task, 1 core(s)"]
    assert "1.2000" in failed[0].measured
    assert all(check.passed for check in _figures(path, Thresholds(max_regret=1.25)) if check.name == "regret")
    without = [
        check
        for check in _figures(write_tiny(tmp_path / "b.mvb"), Thresholds(max_regret=1.05))
        if check.name == "regret" and not check.passed
    ]
    assert "mvcompile profile" in without[0].remedy
    with pytest.raises(UsageError, match=r"max-regret is 0.5; give a ratio of at least 1"):
        Thresholds(max_regret=0.5)
