"""Frozen options of a compilation, validated where they are made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mvcompile.errors import UsageError
from mvcompile.types import HostView, Level

MAX_VARIANTS = 32
DEFAULT_BUDGET_S = 600.0
DEFAULT_PROFILE_S = 60.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `1.5h`. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if match is None:
        raise UsageError(f"budget {text!r} is not a duration; write seconds, or a number with s, m or h, such as 90s or 10m")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """How long to search, and how many variants to keep.

    `budget_s`: seconds of tuning (0: default schedules only); `trials`: candidates to measure; whichever ends first. Without
    either, ten minutes. `seed` decides every random choice but the machine's own noise. `batch`: candidates per round of a task.
    `weight_growth`: with the further forms that some fast kernels need (Winograd), weights may take this many times their size.
    """

    budget_s: float | None = None
    trials: int | None = None
    variants: int = 5
    seed: int = 0
    batch: int = 16
    weight_growth: float = 1.5

    def __post_init__(self) -> None:
        if self.budget_s is not None and not 0 <= self.budget_s < float("inf"):
            raise UsageError(f"budget is {self.budget_s} s; give 0 or more seconds")
        if self.trials is not None and self.trials < 0:
            raise UsageError(f"trials is {self.trials}; give 0 or more")
        if not 1 <= self.variants <= MAX_VARIANTS:
            raise UsageError(f"variants is {self.variants}; give 1 to {MAX_VARIANTS}")
        if not 1.0 <= self.weight_growth < float("inf"):
            raise UsageError(f"weight growth is {self.weight_growth}; give 1 (weights once) or more")
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}; give 1 or more")
        if not 0 <= self.seed < 2**30:
            raise UsageError(f"seed is {self.seed}; give 0 to {2**30 - 1}")

    @property
    def seconds(self) -> float:
        """The time limit in force: unlimited when only trials are given."""
        if self.budget_s is not None:
            return self.budget_s
        return float("inf") if self.trials is not None else DEFAULT_BUDGET_S


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """How variants are measured beside neighbours.

    `budget_s`: seconds, of which a few rounds over all levels are the least; `levels`: what to measure besides `none` (empty: the
    default set); `cores`: on how many cores the model runs, one measurement for each; `seed` decides the order of runs.
    `candidates`: how many candidates of a task are compared at most, of which the kept variants are chosen. `pressure_s`: seconds
    on top of the budget for what variants take from others, but not more than a third of the budget (0: it stays an estimate).
    `host`: what `mvcompile calibrate` found (`profile.place.read_host`): the default levels then are for the last-level cache as
    it was seen there, and cores and the probe's chain are the same (None: the cache as the system reports it).
    """

    budget_s: float = DEFAULT_PROFILE_S
    levels: tuple[Level, ...] = ()
    cores: tuple[int, ...] = (1,)
    seed: int = 0
    candidates: int = 8
    pressure_s: float = 20.0
    host: HostView | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.budget_s < float("inf"):
            raise UsageError(f"profile budget is {self.budget_s} s; give 0 or more seconds")
        if not self.cores or min(self.cores) < 1 or len(set(self.cores)) != len(self.cores):
            raise UsageError(f"cores is {self.cores}; give different numbers of at least 1")
        if not 0 <= self.pressure_s < float("inf"):
            raise UsageError(f"pressure_s is {self.pressure_s} s; give 0 or more seconds")
        if not 1 <= self.candidates <= MAX_VARIANTS:
            raise UsageError(f"candidates is {self.candidates}; give 1 to {MAX_VARIANTS}")


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """Options of a whole compilation.

    `shapes`: static shapes for inputs with symbolic dimensions; `work_dir`: where records and references live (default: next to
    the bundle, `<bundle>.work`); `name`: the model's name in the bundle (default: the file's stem); `spaces`: files of search
    spaces (docs/search-spaces.md) that are searched besides the built-in ones; `profile`: None: nothing is measured beside
    neighbours.
    """

    tuning: TuningConfig = field(default_factory=TuningConfig)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    work_dir: str | None = None
    name: str | None = None
    spaces: tuple[str, ...] = ()
    profile: ProfileConfig | None = field(default_factory=ProfileConfig)
