"""The benchmarks of single networks and tasks: they run on a tiny bundle and say what they should of made-up figures."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from mvcompile.testing.bundles import tiny_target
from mvcompile.testing.kernels import ROWS, WIDTH, write_kernel_bundle

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "bench"
AVX2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "tiny.mvb"
    write_kernel_bundle(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs and outputs of the bundle; what it computes does not matter here."""
    shape = [ROWS, WIDTH]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("gate", TensorProto.BOOL, shape),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("y", "hidden")]
    nodes = [helper.make_node("Relu", ["x"], ["hidden"]), helper.make_node("Where", ["gate", "hidden", "x"], ["y"])]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs)
    path = tmp_path_factory.mktemp("models") / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run(script: str, *arguments: object, first: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    environment = {"PYTHONPATH": f"{first}:{ROOT}".lstrip(":"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_tasks_are_timed_warm_and_cold_against_the_peak(bundle: Path, tmp_path: Path) -> None:
    done = run("tasks.py", bundle, "--rounds", 3, "--json", tmp_path / "tasks.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 of 0 dense tasks of at least 50 MFLOP reach" in done.stdout
    result = json.loads((tmp_path / "tasks.json").read_text())
    assert result["peak_flops_per_s"]["median"] > 0
    assert list(result["reading_bytes_per_s"]) == ["L2", "LLC", "memory"]
    dense, merge = result["tasks"]
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert (dense["task"], dense["calls"], dense["flops"]) == ("dense", 2, 2.0 * ROWS * WIDTH * WIDTH)
    assert (dense["weight_bytes"], dense["nbytes"]) == (weights, weights + 2 * 4 * ROWS * WIDTH)
    assert dense["cold"]["seconds"]["median"] > 0
    assert (merge["weight_bytes"], merge["cold"], merge["calls"]) == (0, None, 1)
    assert dense["share"] + merge["share"] == pytest.approx(1)
    for task in result["tasks"]:
        assert task["warm"]["flops_per_s"] == pytest.approx(task["flops"] / task["warm"]["seconds"]["median"])


def test_a_weight_that_the_variant_does_not_read_is_not_counted(bundle: Path, scripts: None) -> None:
    """merge adds to `hidden` either `deep` or `x`, as the gate says: here never `deep`."""
    tasks: Any = importlib.import_module("tasks")
    with tasks.open_bundle(bundle) as opened:
        manifest = opened.manifest
        weights = tasks.np.zeros(1 << 16, tasks.np.uint8)
        weights[: 4 * WIDTH * WIDTH].view("float32")[:] = 1.0
        plan = manifest.plan
        tensors = list(plan.tensors)
        for index in (6, 7):  # `hidden` and `deep`; the gate is all zeros
            tensors[index] = replace(tensors[index], storage="constant", offset=0)
        manifest = replace(manifest, plan=replace(plan, tensors=tuple(tensors)))
        tasks.ensure_tvm_runtime(opened.member("libtvm_runtime.so"))
        call = tasks.Call(manifest, 1, tasks.Library(opened.member("kernels.so")), weights)
        del opened
    plane = 4 * ROWS * WIDTH
    assert (call.weight_bytes, call.nbytes) == (plane, 3 * plane + ROWS * WIDTH)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"warm": "kernel", "cold": "bandwidth"}),
        ({"flops": 49e6}, {}),
        ({"dense": False}, {}),
        ({"cold": None}, {"warm": "kernel"}),
    ],
)
def test_only_big_dense_tasks_are_weak_and_the_reason_is_told(
    changes: dict[str, Any], expected: dict[str, str], scripts: None
) -> None:
    tasks: Any = importlib.import_module("tasks")
    seconds = tasks.figure([1e-3])
    warm, cold = tasks.Rate(seconds, 80e9, tasks.figure([0.89]), 1.0), tasks.Rate(seconds, 70e9, tasks.figure([0.84]), 0.8)
    fields = {"task": "t", "kind": "conv2d", "space": "dense", "calls": 1, "nbytes": 8, "weight_bytes": 4, "effective": False}
    values = {**fields, "flops": 50e6, "dense": True, "warm": warm, "cold": cold, **changes}
    assert tasks.Result(**values).weak == expected


def test_what_reaches_the_mark_is_not_weak_and_an_effective_rate_says_so(scripts: None) -> None:
    tasks: Any = importlib.import_module("tasks")
    rate = tasks.Rate(tasks.figure([1e-3]), 200e9, tasks.figure([1.9]), 1.0)
    result = tasks.Result("t", "conv2d", "winograd4", 1, 2e8, 8, 4, True, True, rate, rate)
    assert result.weak == {}
    assert "200.0e 190%" in tasks._line({**tasks.asdict(result), "share": 1.0, "weak": {}})


@pytest.mark.parametrize(
    ("bits", "registers", "features", "instruction", "register"),
    [
        (128, 16, (), "mulps", "%xmm"),
        (256, 16, AVX2, "vfmadd", "%ymm"),
        (512, 32, (*AVX2, "avx512f"), "vfmadd", "%zmm"),
    ],
)
def test_the_peak_loop_keeps_its_accumulators_in_registers(
    bits: int, registers: int, features: tuple[str, ...], instruction: str, register: str, scripts: None
) -> None:
    machine: Any = importlib.import_module("machine")
    target = replace(tiny_target(), vector_bits=bits, vector_registers=registers, features=features, llc_bytes=1 << 20)
    lines = machine.Machine(target).module.inspect_source("asm").splitlines()
    found = [number for number, line in enumerate(lines) if instruction in line and register in line]
    assert len(found) % (registers - 4) == 0
    assert len(found) > 0
    loop = lines[found[0] : found[-1]]
    assert not any("%rsp" in line or "%rbp" in line for line in loop)


def test_networks_are_compared_with_their_best_peer(bundle: Path, model: Path, tmp_path: Path) -> None:
    """Two networks: a pair, and a folder with another; a model without a bundle is left out."""
    for source, name in [(model, "other.onnx"), (bundle, "other.mvb"), (model, "alone.onnx")]:
        (tmp_path / name).write_bytes(source.read_bytes())
    threads = min(2, len(os.sched_getaffinity(0)))
    done = run("solo.py", model, bundle, tmp_path, "--rounds", 3, "--threads", threads, "--json", tmp_path / "solo.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "solo.json").read_text())
    assert (result["threads"], len(result["cores"]), result["rounds"]) == (threads, threads, 3)
    assert [network["model"] for network in result["networks"]] == ["tiny.onnx", "other.onnx"]
    ratios = []
    for network in result["networks"]:
        peers = {name: each["median_s"] for name, each in network["engines"].items() if name != "mvcompile"}
        assert "onnxruntime" in peers
        assert network["best_peer"] == min(peers, key=lambda name: peers[name])
        ratios.append(network["ours_over_best"])
    assert result["geometric_mean"] == pytest.approx(math.prod(ratios) ** 0.5)
    assert f"geometric mean of ours / best peer: {result['geometric_mean']:.3f}" in done.stdout


def test_without_openvino_it_says_so_and_goes_on(bundle: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "openvino.py").write_text("raise ImportError")
    done = run("solo.py", model, bundle, "--rounds", 2, first=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "OpenVINO is not installed" in done.stderr
    assert "ONNX Runtime" in done.stdout
    assert "OpenVINO" not in done.stdout


def test_ratios_are_of_the_same_round(scripts: None) -> None:
    """Something disturbs one call of the third round: its ratio is off, not the median of the ratios."""
    solo: Any = importlib.import_module("solo")
    row = solo.judge("m", {"mvcompile": [1, 2, 30], "onnxruntime": [2, 4, 3], "openvino": [9, 3, 9]})
    assert (row["best_peer"], row["ours_over_best"]) == ("onnxruntime", 0.5)
    assert row["engines"]["openvino"]["ours_over_this"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(["a.onnx"], "MODEL.onnx BUNDLE.mvb"), (["a.mvb", "a.onnx"], "MODEL.onnx BUNDLE.mvb"), (["."], "NAME.mvb beside it")],
)
def test_a_command_line_without_pairs_is_refused(wrong: list[str], message: str, tmp_path: Path, scripts: None) -> None:
    solo: Any = importlib.import_module("solo")
    with pytest.raises(ValueError, match=message):
        solo.pairs([tmp_path / name for name in wrong])


def test_convergence_is_read_from_the_logs_of_a_compilation(tmp_path: Path) -> None:
    sums = [(0.0, 0.5), (0.0, 1.0), (2.0, 0.8), (4.0, 0.515), (6.0, 0.51), (8.0, 0.5), (9.0, 0.52)]
    events = [{"event": "progress", "elapsed_s": at, "model_s": model, "trials": 16 * i} for i, (at, model) in enumerate(sums)]
    lines = [json.dumps({"event": "stage", "name": "tune"}), "a warning", *map(json.dumps, events)]
    (tmp_path / "tiny.log").write_text("\n".join(lines))
    done = run("convergence.py", tmp_path / "tiny.log", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.json").read_text())["models"]
    assert found == {"name": "tiny", "first_s": 1.0, "best_s": 0.5, "reached_s": 4.0, "tuned_s": 9.0, "trials": 96}
    (tmp_path / "empty.log").write_text(json.dumps(events[0]))
    for name, said in {"empty.log": "holds no progress", "none.log": "cannot be read"}.items():
        done = run("convergence.py", tmp_path / name)
        assert done.returncode == 2
        assert said in done.stderr
