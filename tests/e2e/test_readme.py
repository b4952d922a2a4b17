"""The README's tour and example are run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def between(start: str, end: str) -> str:
    """The fenced block between two marker comments."""
    match = re.search(rf"<!-- {start}.*?-->\s*```\w+\n(.*?)```\s*<!-- end of {end} -->", README.read_text(), re.DOTALL)
    assert match is not None, f"README.md has no block marked {start!r}"
    return match[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tour has been taken."""
    folder = tmp_path_factory.mktemp("tour")
    commands = [line.removeprefix("$ ") for line in between("tour", "tour").splitlines() if line.startswith("$ ")]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "mvcompile", command
        done = subprocess.run([sys.executable, "-m", "mvcompile.cli", *words[1:]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return folder


def test_the_tour_leaves_a_bundle(folder: Path) -> None:
    assert (folder / "tiny-conv.mvb").stat().st_size > 0


def test_the_example_runs_on_it(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", between("example", "example")], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
