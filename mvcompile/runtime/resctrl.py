"""Occupancy of the last-level cache and memory bandwidth, as Linux's resctrl shows them.

Source: Linux's `Documentation/filesystems/resctrl.rst` (`Documentation/arch/x86/resctrl.rst` before).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mvcompile.errors import EnvironmentProblem

RESCTRL_FEATURES = ("occupancy_bytes", "total_bytes_per_s", "local_bytes_per_s")
"""What `features` returns."""

_MOUNT = Path("/sys/fs/resctrl")
_FILES = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")
_REMEDY = "or use the residual monitor, which needs nothing of the kind"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of the last-level caches that are taken now, and bytes that memory has moved since counting began."""

    seconds: float
    occupancy_bytes: float
    total_bytes: float
    local_bytes: float


def features(before: Traffic, after: Traffic) -> tuple[float, ...]:
    """The values of `RESCTRL_FEATURES` between two moments."""
    seconds = after.seconds - before.seconds
    if seconds <= 0:
        return (after.occupancy_bytes, 0.0, 0.0)
    total = (after.total_bytes - before.total_bytes) / seconds
    return (after.occupancy_bytes, total, (after.local_bytes - before.local_bytes) / seconds)


class Resctrl:
    """What the monitoring group of `folder` (the root: all tasks of the machine that are in no other group) takes."""

    def __init__(self, folder: Path = _MOUNT) -> None:
        """Raises EnvironmentProblem that says why it cannot be read, and what to do."""
        try:
            self._domains = sorted((folder / "mon_data").iterdir())
        except OSError as error:
            raise EnvironmentProblem(
                f"{folder} cannot be read: {error.strerror}; where the CPU and the kernel have resctrl, mount it "
                f"(mount -t resctrl resctrl {folder}) and give this process read access, {_REMEDY}"
            ) from error
        if not self._domains:
            raise EnvironmentProblem(f"{folder}/mon_data is empty: this CPU monitors no cache, {_REMEDY}")
        self.read()

    def read(self) -> Traffic:
        """What it shows now, of all caches together. Raises EnvironmentProblem."""
        totals = [sum(_number(domain / name) for domain in self._domains) for name in _FILES]
        return Traffic(time.monotonic(), *totals)

    def close(self) -> None:
        """There is nothing to give back."""


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError) as error:  # `Unavailable`, or no such file: the CPU does not count that
        reason = error.strerror if isinstance(error, OSError) else "it holds no number"
        raise EnvironmentProblem(f"{path} cannot be read: {reason}; this CPU may not monitor that: {_REMEDY}") from error
