"""Models and bundles that the end-to-end tests share, and the command line as a function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mvcompile import CompileConfig, TuningConfig, cli, compile_model, zoo
from mvcompile.frontend.onnx_import import load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.measure.protocol import Candidate
from mvcompile.records import DiskStore
from mvcompile.spaces import structured_candidates
from mvcompile.target import detect_target
from mvcompile.tasks import extract
from mvcompile.types import Objectives, Record, Status, Verification

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def mvcompile(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, run in this process: `mvcompile("inspect", path)`."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way out
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """What a process of another interpreter needs to find this package, whatever its working directory."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def process(environment: dict[str, str]) -> Command:
    """The command line in a process of its own."""

    def run(*arguments: object, prefix: Sequence[str] = (sys.executable, "-m", "mvcompile.cli"), cwd: Path | None = None) -> Done:
        command = [*prefix, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=900, check=False)
        return Done(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's small convolutional network."""
    return zoo.get("tiny-conv", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, compiled without tuning."""
    path = tmp_path_factory.mktemp("bundles") / "tiny-conv.mvb"
    compile_model(tiny_model, path, CompileConfig(TuningConfig(budget_s=0)))
    return path


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """relu(a @ w + b), compiled in two seconds. Its names hold what separates names from values in options."""
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["a=1", "w"], ["product"]),
        helper.make_node("Add", ["product", "b:2=x"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["out/y=0"]),
    ]
    inputs = [
        helper.make_tensor_value_info("a=1", TensorProto.FLOAT, [3, 8]),
        helper.make_tensor_value_info("b:2=x", TensorProto.FLOAT, ["rows", 4]),
    ]
    outputs = [helper.make_tensor_value_info("out/y=0", TensorProto.FLOAT, [3, 4])]
    graph = helper.make_graph(nodes, "small", inputs, outputs, [weight])
    path = tmp_path_factory.mktemp("small") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def invent_variants(model: Path, work: Path, count: int) -> None:
    """Gives each task with a choice of schedules `count` records that trade latency for traffic, so that all of them are kept.

    The schedules are real: those that were measured, else those of the structured spaces. Their figures are invented: what is
    kept is then the same on every machine and does not hang on noise.
    """
    lines = (work / "records.jsonl").read_text().splitlines()[1:]
    known: dict[str, list[dict[str, Any]]] = {}
    for record in (json.loads(line)["record"] for line in lines):
        known.setdefault(record["task_key"], []).append(record)
    target = detect_target()
    with DiskStore(work) as store:
        for task in extract(prepare(to_relax(load_model(model)), target)).tasks:
            identity = [known[task.key][0][name] for name in ("task_key", "target_key", "fingerprint")]
            measured = [Candidate(record["trace"], record["space"]) for record in known[task.key] if record["status"] == "ok"]
            candidates = list(dict.fromkeys([*measured, *structured_candidates(task.module, target)]))[:count]
            for number, candidate in enumerate(candidates if len(candidates) > 1 else []):
                objectives = Objectives(1e-9 * (1 + 0.1 * number), 0.0, 1e6 / (1 + number))
                check = Verification(0.0, 0.0, 1e-3, 1e-5)
                record = Record(*identity, candidate.trace, candidate.space, Status.OK, objectives, 0.01, check)
                store.append([record, record])  # twice: a front whose members were compared is not measured again


@pytest.fixture(scope="session")
def more_variants() -> Callable[[Path, Path, int], None]:
    """See `invent_variants`."""
    return invent_variants


@pytest.fixture(scope="session")
def tiny_variants(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small convolutional network with four variants of its convolutions, and no time spent on tuning."""
    folder = tmp_path_factory.mktemp("variants")
    path = folder / "tiny-variants.mvb"
    config = CompileConfig(TuningConfig(budget_s=0), work_dir=str(folder / "work"), profile=None)
    compile_model(tiny_model, path, config)
    invent_variants(tiny_model, folder / "work", 4)
    compile_model(tiny_model, path, config)
    return path
