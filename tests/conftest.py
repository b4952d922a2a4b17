"""What every test gets."""

from __future__ import annotations

import os

from hypothesis import settings

# Shared machines stall: no deadline per example. In CI the same examples every time, so that a failure is the change's.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
