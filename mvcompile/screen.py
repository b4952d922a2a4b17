"""What `mvcompile compile` shows while it works: a bar for people, lines for logs, JSON for programs, or nothing."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

from mvcompile.tuning.loop import Progress

LINE_EVERY_S = 10.0


def milliseconds(seconds: float | None) -> str:
    """`1.234 ms`, or a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"


def _line(progress: Progress) -> str:
    left = "" if progress.left_s is None else f", {progress.left_s:.0f} s left"
    return (
        f"{progress.task}: best {milliseconds(progress.best_s)}, front {progress.front_size}; "
        f"{progress.trials} trials ({progress.failed} failed), sum of layers {milliseconds(progress.model_s)}{left}"
    )


class Lines:
    """Plain lines on a stream, for logs: every stage, and the tuning's state every ten seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._last = float("-inf")

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=self._stream, flush=True)

    def stage(self, name: str) -> None:
        """See `pipeline.Reporter`."""
        self._print(name)

    def progress(self, progress: Progress) -> None:
        """See `pipeline.Reporter`."""
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            self._print(_line(progress))

    def note(self, text: str) -> None:
        """See `pipeline.Reporter`."""
        self._print(f"note: {text}")


class Bar(Lines):
    """Stages as lines, tuning as one bar that fills with the budget."""

    def __init__(self, budget_s: float, trials: int | None) -> None:
        super().__init__()
        self._total = trials if trials is not None and budget_s == float("inf") else budget_s
        self._by_trials = self._total == trials
        self._bar: Any = None

    def stage(self, name: str) -> None:
        """See `pipeline.Reporter`."""
        self._end()
        super().stage(name)
        if name == "tune" and self._total:
            from tqdm import tqdm

            unit, form = ("trial", "") if self._by_trials else ("s", "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}")
            self._bar = tqdm(total=self._total, unit=unit, bar_format=form or None, file=sys.stderr, leave=True)

    def progress(self, progress: Progress) -> None:
        """See `pipeline.Reporter`."""
        if self._bar is not None:
            self._bar.n = min(self._total, progress.trials if self._by_trials else progress.elapsed_s)
            self._bar.set_postfix_str(_line(progress)[:120])

    def note(self, text: str) -> None:
        """See `pipeline.Reporter`."""
        self._end()
        super().note(text)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class JsonLines:
    """One JSON object a line on standard output; every object has `event`."""

    def event(self, event: str, **values: Any) -> None:
        """Writes one event."""
        print(json.dumps({"event": event, **values}), flush=True)

    def stage(self, name: str) -> None:
        """See `pipeline.Reporter`."""
        self.event("stage", name=name)

    def progress(self, progress: Progress) -> None:
        """See `pipeline.Reporter`."""
        values = {name: getattr(progress, name) for name in progress.__slots__}
        self.event("progress", **values)

    def note(self, text: str) -> None:
        """See `pipeline.Reporter`."""
        self.event("note", text=text)
