"""What cores this process may use: affinity mask, topology and cgroup quota, as Linux tells them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

_MASK_WORD_BYTES = ctypes.sizeof(ctypes.c_ulong)
_MOST_MASK_BYTES = 2**16


class PinError(Exception):
    """The calling thread could not be pinned to core `core`."""

    def __init__(self, core: int) -> None:
        super().__init__(core)
        self.core = core


def affinity() -> frozenset[int]:
    """The cores that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def mask_of(core: int) -> bytes:
    """The `cpu_set_t` that holds `core` alone, as long as this system's calls ask for (sched_getaffinity(2))."""
    get, nbytes = ctypes.CDLL(None).sched_getaffinity, 128
    while get(0, ctypes.c_size_t(nbytes), ctypes.create_string_buffer(nbytes)) != 0 and nbytes < _MOST_MASK_BYTES:
        nbytes *= 2
    word, bit = divmod(core, 8 * _MASK_WORD_BYTES)
    words = [1 << bit if index == word else 0 for index in range(nbytes // _MASK_WORD_BYTES)]
    return b"".join(value.to_bytes(_MASK_WORD_BYTES, sys.byteorder) for value in words)


def siblings(core: int, root: Path = Path("/")) -> frozenset[int]:
    """The logical CPUs that share `core`'s execution units (SMT), `core` among them; only `core` where Linux does not say."""
    try:
        text = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        return frozenset(_cpu_list(text)) | {core}
    except (OSError, ValueError):
        return frozenset({core})


def cache_sharers(core: int, root: Path = Path("/")) -> frozenset[int]:
    """The logical CPUs that share `core`'s last-level cache, `core` among them; all of the machine where Linux does not say."""
    found: dict[int, frozenset[int]] = {}
    for index in sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
        try:
            found[int((index / "level").read_text())] = frozenset(_cpu_list((index / "shared_cpu_list").read_text()))
        except (OSError, ValueError):
            continue
    return (found[max(found)] if found else frozenset(range(os.cpu_count() or 1))) | {core}


def neighbour_of(measured: int, allowed: Sequence[int], root: Path = Path("/")) -> int | None:
    """The last of the cores `allowed` that is another physical core and shares the last-level cache of `measured`; without such,
    the last other physical core, or the last other core; None if there is no other."""
    others = [core for core in allowed if core != measured]
    physical = [core for core in others if core not in siblings(measured, root)]
    sharing = [core for core in physical if core in cache_sharers(measured, root)]
    return next((group[-1] for group in (sharing, physical, others) if group), None)


def _cpu_list(text: str) -> Iterator[int]:
    """The CPUs of a list such as `0-3,8`."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' worth of time the cgroups of this process allow: the least of all levels, None without a limit.

    Reads cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us` and `cpu.cfs_period_us`). Source: Linux's
    `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/cgroups.rst`, proc_pid_mountinfo(5).
    """
    limits = [limit for folder in _cgroup_folders(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(allowed) / int(period) if allowed != "max" and int(allowed) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such controller at this level


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The folders of this process's CPU cgroups and of all their ancestors that are visible here."""
    mounts = list(_cgroup_mounts(root))
    for controllers, path in _memberships(root):
        for mount_controllers, mount_root, mount_point in mounts:
            if _has_cpu(controllers) and _has_cpu(mount_controllers) and bool(controllers) == bool(mount_controllers):
                yield from _between(root / mount_point.lstrip("/"), mount_root, path)


def _has_cpu(controllers: str) -> bool:
    return controllers == "" or "cpu" in controllers.split(",")


def _between(mount_point: Path, mount_root: str, path: str) -> Iterator[Path]:
    inside = PurePosixPath(path)
    # Without a cgroup namespace a container sees its host's path, of which only the part below the mount's root is mounted.
    try:
        parts = inside.relative_to(mount_root).parts
    except ValueError:
        parts = ()
    parts = tuple(part for part in parts if part not in ("/", ".."))
    for length in range(len(parts) + 1):
        yield mount_point.joinpath(*parts[:length])


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """(controllers, path) of each hierarchy this process is in; the controllers of v2 are the empty string."""
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[1], fields[2]


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """(controllers, root, mount point) of each mounted cgroup hierarchy; the controllers of v2 are the empty string."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        yield ("" if kind[0] == "cgroup2" else kind[2]), mount[3], mount[4]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
