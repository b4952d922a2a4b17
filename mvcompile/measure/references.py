"""Reference outputs of tasks, kept in files so that an unscheduled program (slow code) runs once per work directory."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mvcompile.measure.verify import Array

VERSION = 2
"""Raised whenever tasks get other arguments than before: outputs that were stored for those are of no use."""


def read_reference(path: Path, specs: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[bool, list[Array]] | None:
    """What `write_reference` stored: whether the arguments were positive, and one output per (dtype, shape) of `specs`.

    None if there is no such file, and if it is damaged, of another version, or holds other tensors.
    """
    try:
        with path.open("rb") as file, np.load(file) as archive:  # given the path, it leaves a damaged file open
            version, positive = int(archive["version"]), bool(archive["positive"])
            outputs = [archive[f"output{index}"] for index in range(len(specs))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    found = [(str(output.dtype), output.shape) for output in outputs]
    return (positive, outputs) if version == VERSION and found == list(specs) else None


def write_reference(path: Path, positive: bool, outputs: Sequence[Array]) -> None:
    """Stores a reference in one step: several processes may write the same one at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.tmp.npz")
    named: dict[str, Any] = {f"output{index}": output for index, output in enumerate(outputs)}
    try:
        np.savez(partial, version=np.int64(VERSION), positive=np.bool_(positive), **named)
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()
