from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.support import cc

from mvcompile import build, spaces
from mvcompile.build import Kernel, build_library, find_linker, make_plan
from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime.driver import DRIVER
from mvcompile.runtime.entrance_ir import ENTRANCE
from mvcompile.target import detect_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import AVX2, Graph, network, only_task, programs_of, reference, run_plan
from mvcompile.types import HostTarget

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def host() -> HostTarget:
    return detect_target()


def kernel(symbol: str, task: Task, target: HostTarget) -> Kernel:
    return Kernel(symbol, task.module, spaces.default_candidate(task.module, target).trace)


def dense(host: HostTarget) -> Task:
    return only_task(network(lambda graph, x: graph.relu(graph.dense(x, 24)), (5, 16)), host)


def test_one_program_under_two_symbols(tmp_path: Path, host: HostTarget) -> None:
    task = dense(host)
    candidates = spaces.structured_candidates(task.module, host)
    kernels = [Kernel(f"v{i}", task.module, candidates[i].trace) for i in (0, -1)]
    build_library(tmp_path / "k.so", kernels, host)
    library = tvm_ffi.load_module(str(tmp_path / "k.so"))
    assert all(library.implements_function(symbol) for symbol in (DRIVER, ENTRANCE))
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(each.shape, dtype=np.float32) for each in task.parameters[:2])
    expected = np.maximum(x @ np.concatenate(list(weight), axis=-1)[:, :24], 0)  # wide vectors: the panels hold more columns
    for each in kernels:
        arguments = [tvm.runtime.tensor(array) for array in (x, weight, np.zeros((5, 24), np.float32))]
        library[each.symbol](*arguments)
        np.testing.assert_allclose(arguments[-1].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("triple", "machine"), [("x86_64-unknown-linux-gnu", 62), ("aarch64-unknown-linux-gnu", 183)])
def test_what_the_runtime_adds_is_for_the_target(tmp_path: Path, triple: str, machine: int) -> None:
    codes = [path.read_bytes() for path in build.runtime_objects(tmp_path, triple)]
    assert {(code[:4], code[18]) for code in codes} == {(b"\x7fELF", machine)}
    symbols = [b"__tvm_ffi_mvcompile_entrance", b"__tvm_ffi_mvcompile_team"]
    assert [symbol in code for symbol, code in zip(symbols, codes, strict=True)] == [True, True]


LIBRARY = """
from mvcompile import spaces
from mvcompile.build import Kernel, build_library
from mvcompile.testing.networks import AVX2, network, programs_of

def build(path):
    tasks = programs_of(network(lambda g, x: g.dense(g.relu(g.dense(x, 24)), 16), (70, 16)), AVX2).tasks
    traces = [spaces.default_candidate(task.module, AVX2).trace for task in tasks]
    build_library(path, [Kernel(f"f{i}", task.module, traces[i]) for i, task in enumerate(tasks)], AVX2)
"""


def test_the_same_kernels_give_the_same_bytes(tmp_path: Path) -> None:
    """In another process too: there, addresses and the order of hashes differ."""
    here, there = tmp_path / "here.so", tmp_path / "folder" / "there.so"
    there.parent.mkdir()
    names: dict[str, Any] = {}
    exec(LIBRARY, names)
    names["build"](here)
    code = f"import pathlib, sys; sys.path[:] = sys.argv[2:]\n{LIBRARY}\nbuild(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(there), str(ROOT), *sys.path], check=True)
    assert here.stat().st_size > 1000
    assert here.read_bytes() == there.read_bytes()


def test_no_kernel_still_gives_a_library_that_loads(tmp_path: Path, host: HostTarget) -> None:
    build_library(tmp_path / "k.so", [], host)
    assert tvm_ffi.load_module(str(tmp_path / "k.so")) is not None


def test_without_a_compiler_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"apt-get install gcc.*pip install ziglang.*CC"):
        find_linker()
    with pytest.raises(EnvironmentProblem, match="no C compiler"):
        build_library(tmp_path / "k.so", [], AVX2)


def test_the_compiler_that_a_python_package_brings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    assert find_linker() == [sys.executable, "-m", "ziglang", "cc"]


@pytest.mark.parametrize(
    ("linker", "message"),
    [
        (["sh", "-c", "echo no room left >&2; exit 4"], "exited 4): no room left"),
        (["false"], "it printed nothing"),
        (["/no/such/linker"], "/no/such/linker"),
    ],
    ids=["says why", "silent", "missing"],
)
def test_a_linker_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: HostTarget, linker: list[str], message: str
) -> None:
    monkeypatch.setattr(build, "find_linker", lambda: linker)
    with pytest.raises(EnvironmentProblem) as caught:
        build_library(tmp_path / "k.so", [], host)
    assert message in str(caught.value)


def residual(graph: Graph, x: Any) -> Any:
    x = graph.relu(graph.bias(graph.conv(x, 16, 1)))
    y = graph.add(graph.conv(x, 16, 3), x)
    y = graph(relax.op.nn.max_pool2d(graph.relu(y), (2, 2), (2, 2)))
    y = graph(relax.op.reshape(y, (1, 16 * 4 * 4)))
    return graph(relax.op.nn.softmax(graph.bias(graph.dense(y, 10))))


def attention(graph: Graph, x: Any, mask: Any) -> Any:
    def heads(order: list[int]) -> Any:
        split = graph(relax.op.reshape(graph.bias(graph.dense(x, 32)), (1, 6, 4, 8)))
        return graph(relax.op.permute_dims(split, order))

    scores = graph(relax.op.matmul(heads([0, 2, 1, 3]), heads([0, 2, 3, 1])))
    weights = graph(relax.op.nn.softmax(graph.add(scores, mask)))
    mixed = graph(relax.op.permute_dims(graph(relax.op.matmul(weights, heads([0, 2, 1, 3]))), [0, 2, 1, 3]))
    result = graph.add(graph.dense(graph(relax.op.reshape(mixed, (1, 6, 32))), 32), x)
    return [graph(relax.op.nn.layer_norm(result, graph.weight(32), graph.weight(32), axes=[-1])), x]


def reshaped(graph: Graph, x: Any) -> Any:
    halves = graph(relax.op.split(graph(relax.op.reshape(x, (6, 8))), 2, axis=1))
    left, right = (graph(relax.TupleGetItem(halves, i)) for i in (0, 1))
    return [graph(relax.op.reshape(graph.add(left, right), (3, 8))), right, relax.const(np.float32([1, 2])), graph.relu(left)]


@pytest.mark.parametrize(
    ("body", "shapes"),
    [(residual, [(1, 3, 8, 8)]), (attention, [(1, 6, 32), (1, 1, 1, 6)]), (reshaped, [(2, 3, 8)])],
    ids=["convolutions", "attention", "views, several outputs, constants"],
)
def test_a_planned_model_computes_what_the_model_does(
    tmp_path: Path, host: HostTarget, body: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    model = network(body, *shapes)
    program = programs_of(model, host)
    symbols = [f"{task.kind}_{task.key}" for task in program.tasks]
    kernels = [kernel(symbol, task, host) for symbol, task in zip(symbols, program.tasks, strict=True)]
    build_library(tmp_path / "k.so", kernels, host)
    library = tvm_ffi.load_module(str(tmp_path / "k.so"))
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
    found = run_plan(make_plan(program), [library[symbol] for symbol in symbols], inputs)
    for one, expected in zip(found, reference(model, inputs), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)
