"""Thousands of altered bundles with real kernels: refused, right, or found wrong by their own test; never a crash or a hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mvcompile import runtime
from mvcompile.bundle.interference import INTERFERENCE, encode_interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.writer import Source, write_bundle
from mvcompile.testing.profiles import interference_of

ALTERATIONS = Path(__file__).with_name("alterations.py")
PROCESSES = 2
UNSEALED = {
    "flip_header",
    "flip_manifest",
    "flip_member",
    "flip_gap",
    "truncate",
    "append",
    "insert",
    "remove",
    "zero",
    "exchange",
}


def outcomes(bundle: Path, count: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What became of the alterations of seeds 0 to `count` - 1."""
    environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}
    commands = [[sys.executable, str(ALTERATIONS), *map(str, (bundle, first, count, PROCESSES))] for first in range(PROCESSES)]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for c in commands]
    found = []
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err
        found += [json.loads(line) for line in out.splitlines()]
    return found


@pytest.fixture(scope="module")
def profiled(tiny_variants: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with a profile of four levels beside neighbours, with invented times: each level has a selection of its own."""
    path = tmp_path_factory.mktemp("profiled") / "tiny-profiled.mvb"
    with open_bundle(tiny_variants) as bundle:
        manifest = bundle.manifest
        factors = [[1.0, 1.1, 1.2, 1.3], [1.3, 1.1, 1.2, 1.3], [1.6, 1.4, 1.2, 1.3], [1.9, 1.7, 1.5, 1.3]]
        pressure = [[0.2 / (1 + number) for number in range(len(task.variants))] for task in manifest.tasks]
        found = interference_of(manifest, factors=factors, pressure=pressure)
        members: dict[str, Source] = {each.name: bundle.member(each.name) for each in manifest.members}
        write_bundle(path, manifest, {**members, INTERFERENCE: encode_interference(found)})
    return path


@pytest.mark.parametrize("count", [35, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["tiny_variants", "profiled"])
def test_altered_bundles_are_refused_or_run_right(
    request: pytest.FixtureRequest, tmp_path: Path, environment: dict[str, str], which: str, count: int
) -> None:
    source = request.getfixturevalue(which)
    with runtime.load(source) as session:
        assert sum(len(variants) > 1 for variants in session.variants.values()) > 2
        profile = session.interference
        assert (profile is not None) == (which == "profiled")
        assert profile is None or len({each.variants for each in profile.profiles[0].selections}) == 4
    bundle = Path(shutil.copy(source, tmp_path / "original.mvb"))
    found = outcomes(bundle, count, environment)
    assert sorted(each["seed"] for each in found) == list(range(count))
    bad = [each for each in found if each["outcome"] not in ("refused", "right", "caught")]
    assert not bad, f"{len(bad)} of {count}: {bad[:5]}"
    # What happens to files changes bytes that a digest covers: nothing of it may pass, not even if it would run right.
    assert [each for each in found if each["kind"] in UNSEALED and each["outcome"] != "refused"] == []
    counts = Counter(each["outcome"] for each in found)
    print(f"{count} altered bundles: {dict(counts)}")
    assert counts["refused"] > count / 2
    of_profiles = {each["outcome"] for each in found if each["kind"].startswith("profile_")}
    assert of_profiles <= {"refused", "right"}  # variants are all right, whatever a profile says of them
    if count >= 1000:
        assert counts["right"] + counts["caught"] > count / 100  # else only the first check of each file was tested
        assert which != "profiled" or of_profiles == {"refused", "right"}
    assert {path.name for path in tmp_path.iterdir()} == {os.fspath(bundle.name)}
