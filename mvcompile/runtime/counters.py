"""Hardware counters of cores or of the calling thread, by perf_event_open(2).

Source: Linux's `include/uapi/linux/perf_event.h`, perf_event_open(2), and `Documentation/admin-guide/perf-security.rst`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mvcompile.errors import EnvironmentProblem

PERF_FEATURES = ("llc_misses_per_s", "llc_references_per_s", "llc_miss_rate", "instructions_per_cycle", "misses_per_instruction")
"""What `features` returns."""

EVENTS = {"cycles": 0, "instructions": 1, "llc_references": 2, "llc_misses": 3}
"""Of PERF_TYPE_HARDWARE: PERF_COUNT_HW_CPU_CYCLES, _INSTRUCTIONS, _CACHE_REFERENCES, _CACHE_MISSES."""

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES = struct.Struct("<IIQQQQQ64x")  # perf_event_attr, version 5: 112 bytes
_TIMES, _GROUP = 1 | 2, 8  # PERF_FORMAT_TOTAL_TIME_ENABLED and _TOTAL_TIME_RUNNING, PERF_FORMAT_GROUP
_INHERIT, _EXCLUDE_KERNEL_AND_HYPERVISOR = 1 << 1, 1 << 5 | 1 << 6
_CLOSE_ON_EXEC = 8
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")

Open = Callable[[bytes, int, int, int], int]
"""Attributes, process, CPU, leader of the group (-1 none): a descriptor. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted since counting began, on all cores together, and seconds of that."""

    seconds: float
    cycles: float
    instructions: float
    llc_references: float
    llc_misses: float


def features(before: Counts, after: Counts) -> tuple[float, ...]:
    """The values of `PERF_FEATURES` between two moments; 0 where nothing was counted."""
    seconds = after.seconds - before.seconds
    cycles, instructions = after.cycles - before.cycles, after.instructions - before.instructions
    references, misses = after.llc_references - before.llc_references, after.llc_misses - before.llc_misses
    return (
        _ratio(misses, seconds),
        _ratio(references, seconds),
        _ratio(misses, references),
        _ratio(instructions, cycles),
        _ratio(misses, instructions),
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else 0.0


class PerfCounters:
    """The counters of `cores` where this process may see them, else of the calling thread and the threads that it starts later;
    `scope` says which. Give them back with `close`; the garbage collector does it too."""

    def __init__(self, cores: Sequence[int], opener: Open | None = None) -> None:
        """Raises EnvironmentProblem that says why there are none, and what to do."""
        opener = _perf_event_open if opener is None else opener
        self._groups: list[list[int]] = []
        self._finalizer = weakref.finalize(self, _close, self._groups)
        try:
            self.scope = "cores"
            try:
                for core in cores:
                    self._open(opener, -1, core, inherit=False)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM):
                    raise
                self._close_groups()
                self.scope = "thread"
                self._open(opener, 0, -1, inherit=True)
        except OSError as error:
            self._close_groups()
            raise _unavailable(error) from error

    def _open(self, opener: Open, process: int, core: int, inherit: bool) -> None:
        group: list[int] = []
        self._groups.append(group)
        for event in EVENTS.values():
            leader = group[0] if group else -1
            # What threads inherit cannot be read as a group before Linux 6.13: such events are opened and read one by one.
            flags = _EXCLUDE_KERNEL_AND_HYPERVISOR | (_INHERIT if inherit else 0)
            form = _TIMES if inherit else _TIMES | _GROUP
            attributes = _ATTRIBUTES.pack(0, _ATTRIBUTES.size, event, 0, 0, form, flags)
            group.append(opener(attributes, process, core, -1 if inherit else leader))

    def read(self) -> Counts:
        """What was counted so far, each scaled up if the CPU had to share its counters among more events than it has."""
        totals = [0.0] * len(EVENTS)
        for group in self._groups:
            found = _read_each(group) if self.scope == "thread" else _read_group(group)
            totals = [total + value for total, value in zip(totals, found, strict=True)]
        cycles, instructions, references, misses = totals
        return Counts(time.monotonic(), cycles, instructions, references, misses)

    def close(self) -> None:
        """Stop counting. A second call does nothing."""
        self._finalizer()

    def _close_groups(self) -> None:
        _close(self._groups)


def _read_group(group: list[int]) -> list[float]:
    size = 8 * (3 + len(group))
    _, enabled, running, *values = struct.unpack(f"<{size // 8}Q", os.read(group[0], size))
    return [_scaled(value, enabled, running) for value in values]


def _read_each(group: list[int]) -> list[float]:
    return [_scaled(*struct.unpack("<3Q", os.read(descriptor, 24))) for descriptor in group]


def _scaled(value: int, enabled: int, running: int) -> float:
    return value * enabled / running if running else 0.0


def _close(groups: list[list[int]]) -> None:
    for group in groups:
        for descriptor in group:
            os.close(descriptor)
    groups.clear()


def _perf_event_open(attributes: bytes, process: int, core: int, leader: int) -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"unknown on {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    found = int(library.syscall(number, attributes, process, core, leader, ctypes.c_ulong(_CLOSE_ON_EXEC)))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def _unavailable(error: OSError) -> EnvironmentProblem:
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS):
        reason = "this machine shows no such counters (virtual machines often do not)"
        remedy = "use the residual monitor, which needs none"
    elif error.errno in (errno.EACCES, errno.EPERM):
        try:
            level = _PARANOID.read_text().strip()
        except OSError:
            level = "unknown"
        reason = f"this process may not read them (kernel.perf_event_paranoid is {level})"
        remedy = (
            "set that to 2 for the counters of its own threads or to 0 for those of cores, give it CAP_PERFMON, "
            "or use the residual monitor, which needs none"
        )
    else:
        reason, remedy = f"the system refuses them: {error.strerror}", "use the residual monitor, which needs none"
    return EnvironmentProblem(f"hardware counters cannot be read: {reason}; {remedy}")
