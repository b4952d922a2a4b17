"""What tests of whole compilations share."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from mvcompile import CompileConfig, TuningConfig
from mvcompile.tuning.loop import Progress


def untuned(work: Path | None = None, **options: Any) -> CompileConfig:
    options = {"profile": None, **options}
    return CompileConfig(TuningConfig(budget_s=0), work_dir=None if work is None else str(work), **options)


def tuned(work: Path, trials: int) -> CompileConfig:
    return CompileConfig(TuningConfig(trials=trials), work_dir=str(work), profile=None)


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class Watcher:
    """A reporter that remembers, and calls `on_progress`."""

    def __init__(self, on_progress: Callable[[int], None] = lambda count: None) -> None:
        self.stages: list[str] = []
        self.events: list[Progress] = []
        self.notes: list[str] = []
        self._on_progress = on_progress

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def progress(self, progress: Progress) -> None:
        self.events.append(progress)
        self._on_progress(len(self.events))

    def note(self, text: str) -> None:
        self.notes.append(text)
