"""The benchmarks of interference and trade-offs say what they should of made-up figures."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile.bundle.interference import INTERFERENCE, encode_interference
from mvcompile.bundle.writer import write_bundle
from mvcompile.testing.bundles import tiny_manifest, tiny_members, write_tiny
from mvcompile.testing.profiles import interference_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "bench"
MANIFEST = tiny_manifest()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("interference")


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False)


def test_tradeoffs_are_counted_by_kind(tmp_path: Path) -> None:
    write_tiny(tmp_path / "plain.mvb")
    found = interference_of(MANIFEST)
    write_bundle(tmp_path / "profiled.mvb", MANIFEST, {**tiny_members(), INTERFERENCE: encode_interference(found)})
    done = run("tradeoffs.py", tmp_path / "plain.mvb", tmp_path / "profiled.mvb", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    plain, profiled = json.loads((tmp_path / "out.json").read_text())
    # dense, dense, relu: the two calls of dense have a variant that is slower and smaller, and relu has none.
    assert (plain["layers"], plain["choice"], plain["level"]) == (3, 2, 0)
    assert plain["footprint"] == 2
    assert plain["algorithm"] == 0
    assert profiled["level"] == 2  # beside every neighbour the second variant is faster


def test_another_algorithm_is_a_tradeoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tradeoffs = importlib.import_module("tradeoffs")
    dense = MANIFEST.tasks[0]
    other = replace(dense, variants=(dense.variants[0], replace(dense.variants[1], space="winograd2")))
    assert "algorithm" in tradeoffs.kinds(other)
    assert "algorithm" not in tradeoffs.kinds(dense)
    assert tradeoffs.kinds(replace(dense, variants=dense.variants[:1])) == set()


def test_ratios_are_of_the_same_visit_and_static_is_the_best_over_levels(script: Any) -> None:
    profile = interference_of(MANIFEST).profiles[0]
    # The machine is twice as slow in the second visit; beside a writer `alone` takes twice as long, `write` is 10 % slower alone.
    seconds = {
        "none": {"adaptive": [[1.0], [2.0]], "alone": [[1.0], [2.0]], "write": [[1.1], [2.2]], "onnxruntime": [[2.0], [4.0]]},
        "write": {"adaptive": [[1.3], [2.6]], "alone": [[2.0], [4.0]], "write": [[1.3], [2.6]], "onnxruntime": [[2.6], [5.2]]},
    }
    profile = replace(profile, group=(0, 1))
    row = script.judge(seconds, profile, ["none", "write"])
    assert row["static"] == "write"
    assert row["ratios"]["none"] == pytest.approx(
        {"adaptive_over_alone": 1.0, "adaptive_over_static": 1 / 1.1, "adaptive_over_best_peer": 0.5, "best_peer": "onnxruntime"}
    )
    assert row["ratios"]["write"]["adaptive_over_alone"] == pytest.approx(0.65)
    assert row["groups"] == {"none": "none", "write": "write"}


def test_scenes_fill_the_time_and_repeat_by_seed(script: Any) -> None:
    found = interference_of(MANIFEST)
    made = script.scenes(found, 60.0, seed=3)
    assert made == script.scenes(found, 60.0, seed=3) != script.scenes(found, 60.0, seed=4)
    assert len(made) * script.SCENE_S == 60.0
    for scene in made:
        times = [at for at, _ in scene]
        assert times[0] == 0.0
        assert all(script.SHORTEST_S <= b - a <= script.LONGEST_S for a, b in itertools.pairwise(times))
    assert {dials for scene in made for _, dials in scene} == {level.dials for level in found.levels}


def test_the_99th_percentile_is_a_run(script: Any) -> None:
    assert script._p99([float(i) for i in range(1, 101)]) == 99.0
    assert script._p99([5.0]) == 5.0


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("monitor")


def test_the_script_of_a_neighbour_repeats_no_level(monitor: Any) -> None:
    changes = monitor.script(4, 100.0, seed=1)
    levels = [level for _, level in changes]
    assert levels[0] == 0
    assert set(levels) == {0, 1, 2, 3}
    assert all(a != b for a, b in itertools.pairwise(levels))


def test_runs_in_the_window_of_a_change_do_not_count_and_those_after_do(monitor: Any) -> None:
    changes = [(0.0, 0), (10.0, 1)]
    # A run a second; the level is found in the second run after the change, and lost again in the last.
    held = [0] * 10 + [0, 1, 1, 1, 0]
    seen = [(index + 1.0, 0.9, level) for index, level in enumerate(held)]
    found = monitor.judge(seen, changes, (0, 1))
    assert found["counted"] == (10 - 3) + (5 - 3)
    assert found["right"] == pytest.approx(8 / 9)
    assert found["delay_runs"] == [2]
    assert found["delay_s"] == [pytest.approx(2.0)]
    assert found["missed"] == 0
    assert monitor.judge(seen, changes, (0, 0))["right"] == 1.0  # one group: nothing to tell apart


def test_a_level_that_is_never_found_is_missed(monitor: Any) -> None:
    seen = [(index + 1.0, 0.9, 0) for index in range(20)]
    found = monitor.judge(seen, [(0.0, 0), (10.0, 1)], (0, 1))
    assert (found["missed"], found["changes"], found["delay_s"]) == (1, 1, [])
    assert found["right"] == pytest.approx(7 / 14)
