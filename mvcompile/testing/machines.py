"""A machine that is not there: loads on its cores share a cache and memory by simple rules, and its clock only runs when told."""

from __future__ import annotations

from dataclasses import dataclass, field

from mvcompile.measure.load import Counters, Work
from mvcompile.types import HostTarget

MIB = 2**20
TARGET = HostTarget(
    triple="x86_64-unknown-linux-gnu",
    arch="x86_64",
    cpu="imagined",
    features=(),
    num_cores=2,
    l1d_bytes=32 * 1024,
    l2_bytes=MIB // 2,
    llc_bytes=32 * MIB,
    vector_bits=256,
    vector_registers=16,
    cpu_model="imagined",
)


@dataclass
class Machine:
    """Latencies in seconds of L1, L2, last-level cache and memory; `shared_bytes` of the cache are really there. A neighbour
    takes its resident set from them, and slows streams of `memory_bytes_per_s` by a factor of one and `crowding`. `shaking` is
    how much every second window of anything is slower than the others."""

    latencies_s: tuple[float, float, float, float] = (1e-9, 4e-9, 15e-9, 90e-9)
    shared_bytes: int = 32 * MIB
    memory_bytes_per_s: float = 16e9
    crowding: float = 0.5
    shaking: float = 0.0
    now_s: float = 0.0
    windows: int = 0
    loads: list[FakeLoad] = field(default_factory=list)

    def start(self, core: int, llc_bytes: int) -> FakeLoad:
        """In place of `LoadProcess`."""
        self.loads.append(FakeLoad(self, core))
        return self.loads[-1]

    def sleep(self, seconds: float) -> None:
        """Lets everything run for so long."""
        self.now_s += seconds
        self.windows += 1
        for load in self.loads:
            load.advance(seconds * (1 - self.shaking * (self.windows % 2)), seconds)

    def others(self, load: FakeLoad) -> list[Work]:
        """What runs besides `load`."""
        return [each.work for each in self.loads if each is not load and not each.stopped]


@dataclass
class FakeLoad:
    """A `Load` on a core of a `Machine`."""

    machine: Machine
    core: int
    work: Work = field(default_factory=Work)
    done: Counters = field(default_factory=Counters)
    applied: list[Work] = field(default_factory=list)
    stopped: bool = False

    def apply(self, work: Work) -> None:
        """See `Load`."""
        self.work, self.done = work, Counters()
        self.applied.append(work)

    def counters(self) -> Counters:
        """See `Load`."""
        return self.done

    def stop(self) -> None:
        """See `Load`."""
        self.stopped = True

    def advance(self, busy_s: float, seconds: float) -> None:
        """Works for `busy_s` of `seconds`."""
        if self.stopped or self.work == Work():
            return
        done = self.done
        read, write = (self._stream(rate, busy_s, seconds) for rate in (self.work.read_rate, self.work.write_rate))
        self.done = Counters(
            done.seconds + seconds,
            done.walked_bytes + (int(20e9 * busy_s) if self.work.resident_bytes else 0),
            done.read_bytes + read,
            done.written_bytes + write,
            done.chased_loads + (int(busy_s / self._load_s()) if self.work.chase_bytes else 0),
            done.counted_steps + (int(busy_s * 1e9) if self.work.counting else 0),
        )

    def _stream(self, rate: float, busy_s: float, seconds: float) -> int:
        others = sum(each.read_rate != 0 or each.write_rate != 0 for each in self.machine.others(self))
        fastest = self.machine.memory_bytes_per_s / (1 + self.machine.crowding * others)
        return int(fastest * busy_s) if rate < 0 else int(min(rate, fastest) * seconds)

    def _load_s(self) -> float:
        taken = sum(each.resident_bytes for each in self.machine.others(self))
        held = (TARGET.l1d_bytes, TARGET.l2_bytes, self.machine.shared_bytes - taken)
        within = (
            here for capacity, here in zip(held, self.machine.latencies_s, strict=False) if self.work.chase_bytes <= capacity
        )
        return next(within, self.machine.latencies_s[-1]) / (8 if self.work.parallel else 1)
