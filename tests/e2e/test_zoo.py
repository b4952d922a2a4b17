"""The networks of the zoo, compiled without tuning, compute what ONNX Runtime computes, within 3 minutes and 8 GiB each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mvcompile import zoo

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "zoo.py"
FAST = ("tiny-conv",)
NAMES = [pytest.param(entry.name, marks=() if entry.name in FAST else pytest.mark.slow) for entry in zoo.entries()]


@pytest.mark.parametrize("name", NAMES)
def test_a_network_compiles_and_is_right(name: str, tmp_path: Path, environment: dict[str, str]) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), name, "--json", str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (network,) = json.loads(found.read_text())["networks"]
    assert network["passed"]
    assert network["layers"] >= network["tasks"] > 0
    assert network["outputs"]
    for output in network["outputs"]:
        assert output["errors"] == 0
        assert output["telling"]


def test_an_unknown_network_is_bad_usage(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "lenet"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no network 'lenet'" in done.stderr
