from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mvcompile.runtime import Session, load
from mvcompile.testing.kernels import write_kernel_bundle

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose variants all compute the same."""
    path = tmp_path_factory.mktemp("bundle") / "tiny.mvb"
    write_kernel_bundle(path)
    return path


@pytest.fixture(scope="session")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose variant 1 of dense gives twice what variant 0 gives; its symbols are those of `bundle`."""
    path = tmp_path_factory.mktemp("bundle") / "doubling.mvb"
    write_kernel_bundle(path, scales=(1.0, 2.0))
    return path


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle `bundle`, but without the driver."""
    path = tmp_path_factory.mktemp("bundle") / "plain.mvb"
    write_kernel_bundle(path, driver=False)
    return path


@pytest.fixture(params=["native", "python"])
def session(bundle: Path, plain: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session whose steps the bundle's driver runs, and one whose steps Python runs."""
    with load(bundle if request.param == "native" else plain) as session:
        yield session


@pytest.fixture(scope="session")
def two_cores() -> list[int]:
    """Two cores of this process, or its only one."""
    return sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Run a program in a fresh interpreter; return what it prints. It fails the test if the program fails or writes to stderr."""

    def run(program: str, *arguments: object, options: tuple[str, ...] = (), path: Path = ROOT) -> str:
        command = [sys.executable, *options, "-c", program, *map(str, arguments)]
        environment = {"PYTHONPATH": str(path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    return run
