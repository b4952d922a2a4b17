"""How long a model has been tuned, in a file of its work directory."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from mvcompile.errors import EnvironmentProblem


class FileClock:
    """A tuning `Clock` that goes on where the last run stopped. A file that cannot be read only means that time counts anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spent_s = 0.0
        with suppress(OSError, ValueError, KeyError, TypeError):
            spent = float(json.loads(path.read_text())["spent_s"])
            self.spent_s = spent if math.isfinite(spent) and spent > 0 else 0.0

    def add(self, seconds: float) -> None:
        """See `Clock`. Raises EnvironmentProblem if the file cannot be written."""
        self.spent_s += seconds
        partial = self._path.with_suffix(".tmp")
        try:
            partial.write_text(json.dumps({"spent_s": self.spent_s}))
            os.replace(partial, self._path)
        except OSError as error:
            raise EnvironmentProblem(
                f"{self._path} cannot be written: {error.strerror}; free space and run again to resume"
            ) from error
