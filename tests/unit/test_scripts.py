"""What scripts/lib.sh does before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "cut", "dirname", "env", "ls", "sha256sum", "uname")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH that holds what the scripts call, and no Python yet."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (directory / tool).symlink_to(found)
    return directory


def put_python(path: Path, name: str, version: str, *, venv: bool = True, runs: bool = True) -> None:
    """An interpreter that knows its version and whether it has the venv module."""
    script = path / name
    answer = f'case "$2" in *ensurepip*) exit {0 if venv else 1};; *) echo {version};; esac' if runs else "exit 127"
    script.write_text(f"#!/usr/bin/env bash\n{answer}\n")
    script.chmod(0o755)


def source(path: Path, commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f". '{ROOT}/scripts/lib.sh'; {commands}"],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
    )


def test_the_newest_python_that_runs_is_taken(path: Path) -> None:
    put_python(path, "python3.13", "3.13", runs=False)
    put_python(path, "python3.12", "3.12", venv=False)
    put_python(path, "python3.10", "3.10")
    put_python(path, "python3", "3.11")
    assert source(path, "find_python").stdout == "python3.10\n"
    assert source(path, "find_python", PYTHON="python3").stdout == "python3\n"


@pytest.mark.parametrize(
    ("name", "version", "venv", "message"),
    [
        ("python3.9", "3.9", True, "no python3 on the PATH"),
        ("python3", "3.9", True, "python3 is Python 3.9, and 3.10 to 3.14 is needed"),
        ("python3", "3.15", True, "python3 is Python 3.15"),
        ("python3", "3.11", False, "apt-get install python3.11-venv"),
    ],
)
def test_without_a_suitable_python_it_says_what_to_install(path: Path, name: str, version: str, venv: bool, message: str) -> None:
    put_python(path, name, version, venv=venv)
    result = source(path, "find_python")
    assert result.returncode == 3
    assert message in result.stderr
    assert "apt-get install python3 python3-venv" in result.stderr


def test_a_directory_of_someone_else_is_left_alone(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("")
    put_python(path, "python3", "3.11")
    result = source(path, "use_environment dev", MVCOMPILE_VENV=str(theirs))
    assert result.returncode == 3
    assert "was not made by these scripts" in result.stderr
    assert [file.name for file in theirs.iterdir()] == ["file"]


def test_an_environment_is_stale_when_its_lock_changed_or_its_python_is_gone(path: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    put_python(venv / "bin", "python", "3.11")

    def state() -> str:
        return source(path, "state_of dev", MVCOMPILE_VENV=str(venv)).stdout.strip()

    assert state() == "absent"
    (venv / ".lock-dev").write_text(source(path, "digest locks/dev.txt").stdout)
    assert state() == "current"
    os.remove(venv / "bin" / "python")
    assert state() == "stale"
    put_python(venv / "bin", "python", "3.11")
    (venv / ".lock-dev").write_text("of another lock\n")
    assert state() == "stale"
