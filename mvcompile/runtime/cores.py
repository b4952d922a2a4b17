"""Leases of cores: two sessions of one process do not run on the same cores unless they were told to share."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mvcompile.errors import UsageError
from mvcompile.runtime import cpus
from mvcompile.runtime.integers import integer

_REMEDIES = "close that session, name other cores=..., or pass share_cores=True"


@dataclass(frozen=True, slots=True)
class Lease:
    """Cores that `holder` (the path of its bundle) runs on. `key` tells leases with equal cores apart."""

    key: int
    holder: str
    cores: tuple[int, ...]


class CoreRegistry:
    """The leases of a process. All methods may be called from any thread; `release` also from a destructor."""

    def __init__(
        self,
        affinity: Callable[[], frozenset[int]] = cpus.affinity,
        quota: Callable[[], float | None] = cpus.quota,
        siblings: Callable[[int], frozenset[int]] = cpus.siblings,
    ) -> None:
        self._affinity = affinity
        self._quota = quota
        self._siblings = siblings
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        self._keys = itertools.count()

    def lease(self, holder: str, threads: int, cores: Sequence[int] | None, share: bool, instead: Lease | None = None) -> Lease:
        """Lease `cores`, or `threads` cores of the affinity mask that no one holds. With `share`, held cores may be taken too.
        The cores of `instead` count as free: it is about to be released.

        Raises UsageError that names the cores, who holds them and the remedies.
        """
        threads = _positive(threads)
        wanted = None if cores is None else _core_list(cores, threads)
        mask = self._affinity()
        with self._lock:
            held = [one for one in self._held.values() if one is not instead]
            if wanted is None:
                chosen = self._choose(threads, mask, held, share)
            else:
                chosen = wanted
                _require_allowed(chosen, mask)
                if not share:
                    _require_free(chosen, held)
            lease = Lease(next(self._keys), holder, chosen)
            self._held[lease.key] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give the cores back. A second call does nothing.

        Takes no lock: the garbage collector may call this in a thread that is inside `lease`.
        """
        self._held.pop(lease.key, None)

    def forget(self) -> None:
        """Start anew in a forked child: its parent's threads, one of which may hold the lock, do not exist there."""
        self._lock = threading.Lock()
        self._held = {}

    def _choose(self, threads: int, mask: frozenset[int], held: list[Lease], share: bool) -> tuple[int, ...]:
        if threads > len(mask):
            raise UsageError(
                f"{threads} threads were asked for, this process may use the {_name(mask)} only: "
                f"use threads={len(mask)} or fewer, or widen its affinity mask (taskset, cpuset)"
            )
        users = Counter(core for lease in held for core in lease.cores)
        self._require_quota(threads, held, share)
        free = [core for core in mask if not users[core]]
        if len(free) < threads and not share:
            raise UsageError(
                f"{_count(threads, 'core')} needed, {_free(free)} of the {_name(mask)} this process may use: "
                f"{_holders(held, mask)}; {_REMEDIES}"
            )
        return self._least_used(threads, mask, users)

    def _least_used(self, threads: int, mask: frozenset[int], users: Counter[int]) -> tuple[int, ...]:
        """The cores with the fewest users, and among them those whose SMT siblings are idle first: two threads on one physical
        core run at about half speed each."""
        chosen: list[int] = []
        while len(chosen) < threads:
            busy = {core for core, count in users.items() if count} | set(chosen)
            left = sorted(mask.difference(chosen))
            chosen.append(min(left, key=lambda core: (users[core], len((self._siblings(core) - {core}) & busy), core)))
        return tuple(sorted(chosen))

    def _require_quota(self, threads: int, held: list[Lease], share: bool) -> None:
        quota = self._quota()
        if quota is None:
            return
        allowed = max(1, math.floor(quota))
        taken = 0 if share else sum(len(lease.cores) for lease in held)
        if threads + taken > allowed:
            others = f", and {_holders(held)}" if taken else ""
            remedies = _REMEDIES if taken else f"use threads={allowed} or fewer, name cores=..., or raise the quota"
            raise UsageError(
                f"{_count(threads, 'thread')} asked for, the cgroup's quota of {quota:g} CPUs is enough for {allowed}{others}: "
                f"threads beyond the quota are throttled; {remedies}"
            )


def _positive(threads: int) -> int:
    number = integer(threads)
    if number is None or number < 1:
        raise UsageError(f"threads is {threads!r}, expected an integer of at least 1")
    return number


def _core_list(cores: Sequence[int], threads: int) -> tuple[int, ...]:
    numbers = [integer(core) for core in cores] if isinstance(cores, Iterable) else [None]
    found = tuple(number for number in numbers if number is not None and number >= 0)
    if not found or len(found) != len(numbers) or len(set(found)) != len(found):
        raise UsageError(f"cores is {cores!r}, expected one or more distinct core numbers")
    if threads not in (1, len(found)):
        raise UsageError(f"threads is {threads}, but cores names {len(found)}: leave threads out, each core gets one thread")
    return found


def _require_allowed(cores: tuple[int, ...], mask: frozenset[int]) -> None:
    outside = [core for core in cores if core not in mask]
    if outside:
        raise UsageError(
            f"{_name(outside)} cannot be used, this process may use the {_name(mask)}: "
            "name cores among these, or widen its affinity mask (taskset, cpuset)"
        )


def _require_free(cores: tuple[int, ...], held: list[Lease]) -> None:
    taken = [lease for lease in held if set(lease.cores) & set(cores)]
    if taken:
        raise UsageError(f"{_name(cores)} cannot be leased: {_holders(taken, frozenset(cores))}; {_REMEDIES}")


def _holders(held: list[Lease], among: frozenset[int] | None = None) -> str:
    """Who holds which of the cores `among` (all if None), for a message."""
    parts = [(lease.holder, [core for core in lease.cores if among is None or core in among]) for lease in held]
    return ", ".join(f"{_name(cores)} {'is' if len(cores) == 1 else 'are'} held by {holder}" for holder, cores in parts if cores)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"


def _free(free: list[int]) -> str:
    return "none is free" if not free else f"only {len(free)} {'is' if len(free) == 1 else 'are'} free"


def _name(cores: Iterable[int]) -> str:
    numbers = sorted(cores)
    return f"core{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
