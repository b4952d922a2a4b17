"""Arrays in files: .npy in, .npz out."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvcompile.errors import EnvironmentProblem, UsageError


def read(path: str | os.PathLike[str]) -> NDArray[Any]:
    """The array in a .npy file. Raises UsageError when there is none; pickled objects are refused."""
    try:
        value = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{os.fspath(path)} is no array in .npy format: {error}; write one with numpy.save") from error
    if not isinstance(value, np.ndarray):
        value.close()
        raise UsageError(f"{os.fspath(path)} holds several arrays (.npz); give one .npy file for each input")
    return value


def write(path: str | os.PathLike[str], values: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays to a .npz file, whole or not at all. Unlike numpy.savez it takes any name, `file` included."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.tmp")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, value in values.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)
        partial.replace(target)
    except OSError as error:
        kind = UsageError if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)) else EnvironmentProblem
        raise kind(f"cannot write {target}: {error.strerror}; name another file") from error
    finally:
        partial.unlink(missing_ok=True)
