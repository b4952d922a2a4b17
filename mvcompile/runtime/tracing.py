"""Traces of runs that open in Perfetto (ui.perfetto.dev) and chrome://tracing.

Source of the format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mvcompile.errors import UsageError
from mvcompile.runtime.events import Switch
from mvcompile.runtime.memory import Array
from mvcompile.runtime.policy import Variants

_RUN, _STEPS, _LEVEL = 1, 2, 3
"""Numbers of the tracks."""


class Trace:
    """The last `runs` runs, and every change of the level, until `write`."""

    def __init__(self, model: str, layers: Sequence[str], levels: Sequence[str], runs: int) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._levels = tuple(levels)
        self._runs: deque[tuple[list[int], Variants | None]] = deque(maxlen=runs)
        self._changes: list[dict[str, Any]] = []
        self._process = os.getpid()

    def run(self, stamps_ns: Array, variants: Variants | None) -> None:
        """A run with its stamps; `variants` is None if they changed during it."""
        self._runs.append((stamps_ns.tolist(), variants))

    def level(self, at_ns: int, level: str) -> None:
        """The level that is held to be the case from `at_ns` on."""
        values = {name: int(name == level) for name in self._levels}
        self._changes.append({**self._event("level", "C", at_ns, _LEVEL), "args": values})

    def switch(self, switch: Switch) -> None:
        """A change of level or variants."""
        at_ns = int(switch.time_s * 1e9)
        self.level(at_ns, switch.after)
        arguments = {
            "before": switch.before,
            "after": switch.after,
            "reason": switch.reason,
            "log_likelihood_ratio": switch.log_likelihood_ratio,
            "layers": {one.layer: f"{one.before} -> {one.after}" for one in switch.layers},
        }
        self._changes.append({**self._event(f"switch: {switch.after}", "i", at_ns, _RUN), "s": "p", "args": arguments})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what there is. Raises UsageError if the file cannot be written."""
        try:
            with Path(path).open("w") as file:
                file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
                file.write(",\n".join(json.dumps(event) for event in self._events()))
                file.write("\n]}\n")
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {path}: {error.strerror}; name another file") from error

    def _events(self) -> Iterator[dict[str, Any]]:
        yield {"name": "process_name", "ph": "M", "pid": self._process, "args": {"name": f"mvcompile {self._model}"}}
        for track, name in ((_RUN, "runs"), (_STEPS, "layers")):
            yield {"name": "thread_name", "ph": "M", "pid": self._process, "tid": track, "args": {"name": name}}
        yield from self._changes
        for stamps, variants in self._runs:
            yield {**self._event("run", "X", stamps[0], _RUN), "dur": (stamps[-1] - stamps[0]) / 1e3}
            for step, layer in enumerate(self._layers):
                arguments = {"variant": variants[step]} if variants is not None else {"variant": "switched during this run"}
                event = self._event(layer, "X", stamps[step], _STEPS)
                yield {**event, "dur": (stamps[step + 1] - stamps[step]) / 1e3, "args": arguments}

    def _event(self, name: str, phase: str, at_ns: int, track: int) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": self._process, "tid": track, "ts": at_ns / 1e3}
