"""The host profile's file and text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mvcompile.errors import UsageError
from mvcompile.measure.host_profile import (
    HOST_PROFILE_VERSION,
    CounterSupport,
    CurvePoint,
    Effect,
    HostProfile,
    LevelFound,
    Noise,
    read_host_profile,
    to_json,
    write_host_profile,
)
from mvcompile.measure.host_report import describe
from mvcompile.types import Dials

MIB = 2**20
PROFILE = HostProfile(
    version=HOST_PROFILE_VERSION,
    target_key="0123456789abcdef",
    cpu_model="imagined",
    verdict="measurable",
    notes=("the last-level cache looks like 12 MiB",),
    measured_core=0,
    neighbour_core=1,
    probe_chain_bytes=6 * MIB,
    levels=(LevelFound("L1d", 32768, 32768, 1e-9, 0.0, 0.0), LevelFound("memory", 0, 0, 9e-8, 16e9, 8e9)),
    curve=(CurvePoint(8192, 1e-9, 0.01, 5e-10, 0.02),),
    effects=(Effect("read", Dials(0, 8e9), Dials(0, 7.9e9), 0.0, 1.25, 0.02, 1.5, 0.03),),
    noise=Noise(0.01, 0.02, 0.03, 0.04, 0.05, 0.0),
    counters=CounterSupport(("cycles",), "llc_misses: none", (), "resctrl is not mounted at /sys/fs/resctrl"),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "host-profile.json"
    write_host_profile(path, PROFILE)
    assert read_host_profile(path) == PROFILE
    write_host_profile(path, replace(PROFILE, neighbour_core=None))
    assert read_host_profile(path).neighbour_core is None
    assert list(tmp_path.iterdir()) == [path]


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(PROFILE)), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(version=HOST_PROFILE_VERSION + 1, more=1), r"version 2, this mvcompile reads versions up to 1: upgrade"),
        (edited(version=0), r"has version 0 .*calibrate"),
        (edited(verdict="fine"), r"verdict 'fine'.*calibrate"),
        (edited(noise=1), r"host profile.noise is 1, expected an object; .*calibrate"),
        ("{}", r"an object with the field version; .*calibrate"),
        ("no JSON", r"is not JSON.*calibrate"),
    ],
)
def test_what_is_no_profile_of_this_version_is_refused_with_a_remedy(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "host-profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_host_profile(path)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*cannot be read: No such file"):
        read_host_profile(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"cannot be written to .*: No such file"):
        write_host_profile(tmp_path / "nowhere" / "host-profile.json", PROFILE)


def test_the_text_has_a_line_for_everything_that_was_found() -> None:
    lines = describe(PROFILE).splitlines()
    assert lines[0] == "imagined, target 0123456789abcdef: probe on core 0, neighbour: core 1"
    assert lines[2].split() == ["L1d", "32", "KiB", "32", "KiB", "1.0", "ns", "-", "-"]
    assert lines[3].split() == ["memory", "-", "-", "90.0", "ns", "16.0", "GB/s", "8.0", "GB/s"]
    assert "arithmetic 1.0%" in lines[4]
    assert lines[6].split("  ")[0] == "read"
    assert "7.9 GB/s of 8.0" in lines[6]
    assert "1.25 times +- 2.0%" in lines[6]
    assert lines[7:] == [
        "hardware counters: cycles (llc_misses: none)",
        "resctrl: none (resctrl is not mounted at /sys/fs/resctrl)",
        "interference: measurable",
        "note: the last-level cache looks like 12 MiB",
    ]
    assert "neighbour: none" in describe(replace(PROFILE, neighbour_core=None, effects=()))
