"""The host profile's file and text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile.errors import UsageError
from mvcompile.host_profile import (
    HOST_PROFILE_VERSION,
    PERF,
    RESCTRL,
    read_host_profile,
    to_json,
    write_host_profile,
)
from mvcompile.measure.host_report import describe
from mvcompile.testing.hosts import MIB, counter_model_of, host_profile_of
from mvcompile.types import HostView

PROFILE = host_profile_of(cpu="imagined")
MODEL = counter_model_of(PERF)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "host-profile.json"
    write_host_profile(path, PROFILE)
    assert read_host_profile(path) == PROFILE
    write_host_profile(path, replace(PROFILE, neighbour_core=None))
    assert read_host_profile(path).neighbour_core is None
    models = (MODEL, replace(counter_model_of(RESCTRL), intercept=(-0.5,), coefficients=((-1.0, 2.0, 0.0),)))
    write_host_profile(path, replace(PROFILE, counter_models=models))
    assert read_host_profile(path).counter_models == models
    assert list(tmp_path.iterdir()) == [path]


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(PROFILE)), **changes})


def with_model(**changes: Any) -> str:
    return edited(counter_models=[{**asdict(MODEL), **changes}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(version=HOST_PROFILE_VERSION + 1, more=1), r"version 3, this mvcompile reads versions up to 2: upgrade"),
        (edited(version=0), r"has version 0 .*calibrate"),
        (edited(verdict="fine"), r"verdict 'fine'.*calibrate"),
        (edited(noise=1), r"host profile.noise is 1, expected an object; .*calibrate"),
        (edited(levels=[]), r"has 0 levels of caches and memory.*calibrate"),
        (edited(counter_models=[asdict(MODEL)] * 2), r"has models of the counters perf, perf, which no host profile has"),
        (with_model(kind="eyes"), r"has models of the counters eyes, which"),
        (with_model(mean=[1.0]), r"a model of perf counters whose parts do not fit each other, which"),
        (with_model(scale=[0.0] * 5), r"whose parts do not fit each other"),
        (with_model(right=[]), r"whose parts do not fit each other"),
        (with_model(points=[[0.0, 0.0]] * 4), r"whose parts do not fit each other"),
        (with_model(coefficients=[[1.0]]), r"whose parts do not fit each other"),
        (with_model(coefficients=[[None]]), r"counter_models\[0\].coefficients\[0\]\[0\] is None, expected a finite number; "),
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
    assert lines[3].split()[:5] == ["LLC", "32", "MiB", "8", "MiB"]
    assert lines[4].split() == ["memory", "-", "-", "90.0", "ns", "16.0", "GB/s", "8.0", "GB/s"]
    assert "arithmetic 1.0%" in lines[5]
    assert lines[7].split("  ")[0] == "read"
    assert "7.9 GB/s of 8.0" in lines[7]
    assert "1.25 times +- 2.0%" in lines[7]
    assert lines[8:] == [
        "hardware counters: cycles (llc_misses: none)",
        "resctrl: none (resctrl is not mounted at /sys/fs/resctrl)",
        "interference: measurable",
        "note: the last-level cache looks like 8 MiB",
    ]
    assert "neighbour: none" in describe(replace(PROFILE, neighbour_core=None, effects=()))
    assert (
        "model of perf counters for tiny on 1 core: right in 95% of 40 windows that it had not seen (none 100%, llc 90%, "
        "read 100%, write 90%)" in describe(replace(PROFILE, counter_models=(MODEL,)))
    )


def test_profiling_gets_the_cache_as_seen_or_as_reported() -> None:
    assert PROFILE.view() == HostView("imagined", 0, 1, 8 * MIB, 6 * MIB)
    first, cache, memory = PROFILE.levels
    for seen, expected in ((0, 32), (48 * MIB, 32)):
        levels = (first, replace(cache, seen_bytes=seen), memory)
        assert replace(PROFILE, levels=levels).view().llc_bytes == expected * MIB
