"""A virtual environment with nothing but the lock of the runtime runs bundles compiled elsewhere. Needs a package index."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvcompile import runtime

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"apache-tvm-ffi", "mvcompile", "numpy", "pip", "setuptools", "typing-extensions"}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs; the package is installed from its wheel."""
    folder = tmp_path_factory.mktemp("light")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    for arguments in (["--require-hashes", "-r", str(ROOT / "locks" / "runtime.txt")], ["--no-deps", str(wheel)]):
        install = [programs / "python", "-m", "pip", "install", "--quiet", *arguments]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return programs


@pytest.fixture
def run(light: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a program of the environment, away from the repository."""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def start(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(light / program), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return start


def test_it_holds_nothing_of_the_compiler(run: Callable[..., Any]) -> None:
    done = run("python", "-m", "pip", "list", "--format", "json")
    found = {package["name"].lower().replace("_", "-") for package in json.loads(done.stdout)}
    assert found <= ALLOWED
    assert {"apache-tvm-ffi", "mvcompile", "numpy"} <= found
    for name in ("tvm", "onnx", "onnxruntime", "xgboost"):
        assert run("python", "-c", f"import {name}").returncode != 0


def test_the_library_loads_and_runs_a_bundle(run: Callable[..., Any], tiny_variants: Path, tmp_path: Path) -> None:
    program = """
import sys
import mvcompile.runtime
with mvcompile.runtime.load(sys.argv[1]) as session:
    results = [mvcompile.runtime.selftest(session), *(each.result for each in mvcompile.runtime.selftest_switches(session))]
    print(all(result.passed for result in results), len(results))
"""
    done = run("python", "-W", "error", "-c", program, tiny_variants)
    assert (done.returncode, done.stderr) == (0, "")
    with runtime.load(tiny_variants) as session:
        switches = sum(len(variants) - 1 for variants in session.variants.values())
    assert done.stdout.split() == ["True", str(1 + switches)]


def test_inspect_run_and_validate_work(run: Callable[..., Any], tiny_variants: Path, tmp_path: Path) -> None:
    shown = run("mvcompile", "inspect", tiny_variants)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tiny-conv" in shown.stdout
    image = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "image.npy", image)
    done = run("mvcompile", "run", tiny_variants, "--input", "image=image.npy", "--output", "out.npz")
    assert (done.returncode, done.stderr) == (0, "")
    with runtime.load(tiny_variants) as session, np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["logits"], session.run({"image": image})["logits"])
    gate = run("mvcompile", "validate", tiny_variants, "--min-coverage", "0.1", "--junit", "report.xml")
    assert (gate.returncode, gate.stderr) == (0, "")
    assert (tmp_path / "report.xml").exists()


@pytest.mark.parametrize("arguments", [["compile", "model.onnx", "-o", "model.mvb"], ["zoo", "list"]], ids=" ".join)
def test_what_needs_the_compiler_says_what_to_install(run: Callable[..., Any], arguments: list[str]) -> None:
    done = run("mvcompile", *arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert "pip install 'mvcompile[compile]'" in done.stderr
    assert "Traceback" not in done.stderr
