"""Search spaces of users: the one in the documentation, and files that are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tvm import relax

from mvcompile import CompileConfig, TuningConfig, compile_module, spaces, traces
from mvcompile.errors import UsageError
from mvcompile.target import detect_target
from mvcompile.testing.networks import network, only_task, run_kernels

HOST = detect_target()
ROOT = Path(__file__).resolve().parents[2]
NETWORK = network(lambda graph, x: graph(relax.op.nn.softmax(x)), (24, 64))


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The worked example of the documentation, as a file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "search-spaces.md").read_text(), re.S)
    (text,) = (block for block in blocks if "STAGES" in block)
    path = tmp_path / "softmax_rows.py"
    path.write_text(text)
    return path


def test_the_example_of_the_documentation_is_right(example: Path) -> None:
    task = only_task(NETWORK, HOST)
    candidates = spaces.own_candidates(task.module, HOST, spaces.load_space(example))
    assert len(candidates) == 4
    assert {candidate.space for candidate in candidates} == {"softmax_rows"}
    expected, *found = run_kernels(
        task, [task.module, *(traces.replay(task.module, each.trace).mod for each in candidates)], HOST
    )
    for outputs in found:
        assert abs(outputs[0] - expected[0]).max() < 1e-6
    other = only_task(network(lambda graph, x: graph.relu(x), (24, 64)), HOST)
    assert spaces.own_candidates(other.module, HOST, spaces.load_space(example)) == []


def test_a_bundle_names_the_space_and_needs_no_file_later(example: Path, tmp_path: Path) -> None:
    config = CompileConfig(TuningConfig(trials=6), spaces=(str(example),), profile=None)
    result = compile_module(NETWORK, tmp_path / "a.mvb", config)
    assert result.trials == 6
    records = (tmp_path / "a.mvb.work" / "records.jsonl").read_text()
    assert records.count('"space":"softmax_rows"') >= 4  # 4 are all there are; the rest are MetaSchedule's
    assert '"space":"generic"' in records
    example.unlink()
    again = compile_module(NETWORK, tmp_path / "a.mvb", CompileConfig(TuningConfig(trials=6), profile=None))
    assert again.trials == 6


BROKEN = {
    "def programs(:\n": "SyntaxError",
    "import nothing_of_this_name\n": "ModuleNotFoundError",
    "x = 1\n": "no function programs",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_space_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"mine.py .*{BROKEN[text]}"):
        compile_module(NETWORK, tmp_path / "a.mvb", CompileConfig(TuningConfig(budget_s=0), spaces=(str(path),)))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "reason"), [("absent.py", "cannot be loaded"), ("dense.py", "built-in"), ("mine.txt", "no Python")]
)
def test_a_file_that_is_absent_or_badly_named_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    if name != "absent.py":
        (tmp_path / name).write_text("def programs(sch, target):\n    return []\n")
    with pytest.raises(UsageError, match=reason):
        spaces.load_space(tmp_path / name)


def test_an_error_in_a_space_says_where_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def programs(sch, target):\n    yield sch.copy()\n    raise KeyError('tile')\n")
    config = CompileConfig(TuningConfig(trials=2), spaces=(str(path),), profile=None)
    with pytest.raises(UsageError, match=r"mine.py failed on a program of blocks .*T_softmax_maxelem.*KeyError.*resume"):
        compile_module(NETWORK, tmp_path / "a.mvb", config)
    assert '"status":"ok"' in (tmp_path / "a.mvb.work" / "records.jsonl").read_text()
