"""The repository's own rules."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CODE = ("mvcompile", "model_zoo", "search_spaces", "scripts", "tests")
LOCKS = ("runtime", "compile", "dev", "bench")
MAX_LINES = 500


def sources() -> list[Path]:
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


def lock_lines(name: str) -> list[str]:
    return (ROOT / "locks" / f"{name}.txt").read_text().splitlines()


def pinned(name: str) -> set[str]:
    """The requirements of a lock, with their markers."""
    return {line.removesuffix(" \\") for line in lock_lines(name) if not line.startswith(" ")}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_scripts_can_be_run() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    assert {path.name for path in scripts} >= {"check", "lock", "test", "test-slow"}
    for path in [*scripts, ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), f"chmod +x {path}"
        assert path.read_text().startswith("#!/usr/bin/env "), path


@pytest.mark.parametrize("name", LOCKS)
def test_locks_pin_and_hash_everything_and_name_no_address(name: str) -> None:
    lines = lock_lines(name)
    for requirement in pinned(name):
        assert re.match(r"[a-z0-9-]+==[^ ]+( ;|$)", requirement)
    for line, following in pairwise(lines):
        assert line.startswith(" ") or following.startswith("    --hash=sha256:"), line
    text = "\n".join(lines)
    assert not re.search(r"://|index-url|find-links|\b[a-z0-9-]+\.(org|com|net|io)\b", text)


def test_each_lock_holds_the_one_before_it() -> None:
    for smaller, larger in pairwise(LOCKS):
        assert pinned(smaller) <= pinned(larger), f"run scripts/lock: {smaller} and {larger} differ"


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("runtime", []), ("compile", ["compile"]), ("dev", ["compile", "dev"]), ("bench", ["compile", "dev", "bench"])],
)
def test_locks_have_what_the_project_asks_for(lock: str, extras: list[str]) -> None:
    metadata = project()["project"]
    wanted = [*metadata["dependencies"], *(line for extra in extras for line in metadata["optional-dependencies"][extra])]
    locked = pinned(lock)
    for requirement in wanted:
        name, exact = re.split(r"[=>\[]", requirement)[0], "==" in requirement
        found = [line for line in locked if line.startswith(f"{requirement} " if exact else f"{name}==")]
        assert found or name == "mvcompile", f"run scripts/lock: {requirement} is not in locks/{lock}.txt"


def test_the_build_backend_is_the_locked_one() -> None:
    settings = project()
    assert set(settings["build-system"]["requires"]) <= set(settings["dependency-groups"]["build"])


def packages() -> list[str]:
    """The package and its subpackages that export something."""
    files = [path for path in (ROOT / "mvcompile").rglob("__init__.py") if "__all__" in path.read_text()]
    return sorted(".".join(path.parent.relative_to(ROOT).parts) for path in files)


@pytest.mark.parametrize("name", packages())
def test_what_a_package_exports_is_what_is_visible(name: str) -> None:
    module = importlib.import_module(name)
    names = [each for each in dir(module) if not each.startswith("_") and each != "annotations"]
    visible = {each for each in names if not inspect.ismodule(getattr(module, each)) or each in module.__all__}
    assert sorted(visible) == sorted(each for each in module.__all__ if not each.startswith("_"))
    for each in module.__all__:
        assert getattr(module, each) is not None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_package_the_spaces_and_the_zoo_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = {"mvcompile": "mvcompile", "mvcompile/_search_spaces": "search_spaces", "mvcompile/_model_zoo": "model_zoo"}
    expected = {
        f"{inside}/{path.relative_to(ROOT / outside).as_posix()}"
        for inside, outside in folders.items()
        for path in (ROOT / outside).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"mvcompile/py.typed", "mvcompile/_model_zoo/registry.json"} <= found


def test_the_wheel_has_its_license_and_its_command(wheel: zipfile.ZipFile) -> None:
    information = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "licenses/LICENSE" in information
    assert "mvcompile = mvcompile.cli:command" in wheel.read(information["entry_points.txt"]).decode()
    requires = [line for line in wheel.read(information["METADATA"]).decode().splitlines() if line.startswith("Requires-Dist:")]
    base = {line.removeprefix("Requires-Dist: ") for line in requires if "extra ==" not in line}
    assert base == {"apache-tvm-ffi==0.1.14.post0", "numpy>=1.26"}
