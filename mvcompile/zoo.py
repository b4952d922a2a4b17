"""The networks this project is judged on: list them, and write one as an ONNX file that is checked against the registry.

Their builders and `registry.json` are in `model_zoo/`, which stands beside the package in the repository and inside it, as
`mvcompile/_model_zoo`, once installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mvcompile.errors import EnvironmentProblem, UsageError

_PACKAGE = "mvcompile._model_zoo"


@dataclass(frozen=True, slots=True)
class Entry:
    """One network. `macs` counts multiply-accumulates of convolutions and matrix products at batch 1; `sha256` is the digest of
    graph and weights, `source_sha256` that of the file inside the `onnx` package it is made from, if any."""

    name: str
    description: str
    parameters: int
    macs: int
    sha256: str
    source_sha256: str | None


def entries() -> tuple[Entry, ...]:
    """All networks, by name."""
    networks: dict[str, dict[str, Any]] = json.loads((_directory() / "registry.json").read_text())["networks"]
    return tuple(Entry(name=name, **values) for name, values in sorted(networks.items()))


def entry(name: str) -> Entry:
    """The network `name`. Raises `UsageError` for an unknown name."""
    known = entries()
    for candidate in known:
        if candidate.name == name:
            return candidate
    raise UsageError(f"the zoo has no network {name!r}; it has: {', '.join(candidate.name for candidate in known)}")


def get(name: str, directory: str | os.PathLike[str] = ".") -> Path:
    """Write network `name` to `directory`/`name`.onnx and return that path; a file that already holds it is left alone.

    The file appears whole or not at all. Raises `UsageError` for an unknown name or a directory that cannot be written, and
    `EnvironmentProblem` when what was built (or the `onnx` package's file it is built from) is not what the registry records.
    """
    wanted = entry(name)
    path = Path(directory) / f"{name}.onnx"
    if _holds(path, wanted):
        return path
    zoo = _package()
    if wanted.source_sha256 is not None:
        content = zoo.shipped.source(zoo.SHIPPED[name])
        _expect(f"{zoo.SHIPPED[name]} in the onnx package", wanted.source_sha256, hashlib.sha256(content).hexdigest())
    model = zoo.build(name)
    _expect(f"network {name}", wanted.sha256, zoo.canonical.digest(model))
    _write(path, model.SerializeToString(deterministic=True))
    return path


def _expect(what: str, wanted: str, found: str) -> None:
    if wanted != found:
        raise EnvironmentProblem(
            f"{what} has digest {found}, but the registry records {wanted}: install the versions of onnx and numpy this release "
            "pins, or, after a deliberate change, run `python -m model_zoo.update_registry` in the repository"
        )


def _holds(path: Path, wanted: Entry) -> bool:
    """Whether the file at `path` is this network, whatever its encoding."""
    if not path.is_file():
        return False
    import onnx
    from google.protobuf.message import DecodeError

    try:
        found: str = _package().canonical.digest(onnx.load(path))
    except (DecodeError, OSError, ValueError, TypeError):
        return False
    return found == wanted.sha256


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}; choose another directory") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise UsageError(f"cannot write {path}: {error}; free some space or choose another directory") from error


@cache
def _directory() -> Path:
    package = Path(__file__).resolve().parent
    for candidate in (package / "_model_zoo", package.parent / "model_zoo"):
        if (candidate / "registry.json").is_file():
            return candidate
    raise EnvironmentProblem(f"the model zoo is neither in {package / '_model_zoo'} nor beside the package: reinstall mvcompile")


def _package() -> Any:
    """The zoo's builders, under the name they have in an installed wheel, wherever they are."""
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    directory = _directory()
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    if spec is None or spec.loader is None:
        raise EnvironmentProblem(f"{directory} is not a Python package: reinstall mvcompile")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[_PACKAGE]
        raise EnvironmentProblem(f"the model zoo needs the packages of mvcompile[compile]: {error}") from error
    return module
