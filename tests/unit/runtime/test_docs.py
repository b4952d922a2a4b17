from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mvcompile.runtime import Session

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "runtime.md"


def test_the_example_runs(bundle: Path, python: Callable[..., str]) -> None:
    example = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert example is not None
    assert '"model.mvb"' in example[1]
    shapes, selection = python(example[1].replace('"model.mvb"', repr(str(bundle)))).splitlines()
    assert shapes == "{'y': (8, 16), 'hidden': (8, 16)}"
    assert selection == "(1, 1, 0)"


def test_every_public_name_of_a_session_is_described() -> None:
    text = DOCUMENT.read_text()
    public = [name for name in vars(Session) if not name.startswith("_")]
    assert [name for name in public if f"`{name}" not in text] == []
