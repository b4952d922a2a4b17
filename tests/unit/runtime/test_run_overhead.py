from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "bench" / "run_overhead.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False)


def test_the_benchmark_prints_and_writes_its_figures(bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    done = run(bundle, "--rounds", 3, "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert "added per step" in done.stdout
    result = json.loads(output.read_text())
    assert (result["bundle"], result["steps"], result["rounds"]) == ("tiny.mvb", 3, 3)
    assert result["run_s"] > result["kernels_s"] > 0
    assert min(result["added_s"], result["call_s"], result["enter_s"], result["empty_s"]) > 0
    assert result["added_per_step_s"] == pytest.approx(result["added_s"] / 3)
    assert result["beyond_enter_per_step_s"] == pytest.approx(result["beyond_enter_s"] / 3)
    assert result["load_first_s"] > 0
    assert result["load_later_s"] > 0


def test_the_benchmark_passes_on_what_is_wrong_with_a_bundle(tmp_path: Path) -> None:
    done = run(tmp_path / "none.mvb")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "none.mvb cannot be read" in done.stderr


def test_a_bundle_without_a_driver_cannot_be_measured(plain: Path) -> None:
    done = run(plain)
    assert (done.returncode, done.stdout) == (2, "")
    assert "runs without a driver, from Python: compile the model again" in done.stderr
