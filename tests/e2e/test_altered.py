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


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_altered_bundles_are_refused_or_run_right(
    tiny_variants: Path, tmp_path: Path, environment: dict[str, str], count: int
) -> None:
    with runtime.load(tiny_variants) as session:
        assert sum(len(variants) > 1 for variants in session.variants.values()) > 2
    bundle = Path(shutil.copy(tiny_variants, tmp_path / "original.mvb"))
    found = outcomes(bundle, count, environment)
    assert sorted(each["seed"] for each in found) == list(range(count))
    bad = [each for each in found if each["outcome"] not in ("refused", "right", "caught")]
    assert not bad, f"{len(bad)} of {count}: {bad[:5]}"
    # What happens to files changes bytes that a digest covers: nothing of it may pass, not even if it would run right.
    assert [each for each in found if each["kind"] in UNSEALED and each["outcome"] != "refused"] == []
    counts = Counter(each["outcome"] for each in found)
    print(f"{count} altered bundles: {dict(counts)}")
    assert counts["refused"] > count / 2
    assert counts["right"] + counts["caught"] > count / 100  # else only the first check of each file was tested
    assert {path.name for path in tmp_path.iterdir()} == {os.fspath(bundle.name)}
