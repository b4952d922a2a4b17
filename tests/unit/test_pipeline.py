"""Whole compilations, with real workers: what is in a bundle, what is refused, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from mvcompile import CompileConfig, CompileResult, TuningConfig, compile_model, compile_module, pipeline, runtime, spaces
from mvcompile import variants as variants_stage
from mvcompile.build import Kernel, build_library
from mvcompile.bundle.schema import MAGIC
from mvcompile.errors import EnvironmentProblem, ModelError, StoreError, UsageError, VerificationError
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.reference import random_inputs
from mvcompile.frontend.relax_module import interface, module_outputs
from mvcompile.measure.protocol import Outcome
from mvcompile.records import DiskStore
from mvcompile.target import detect_target
from mvcompile.tasks import Program, extract
from mvcompile.testing import programs
from mvcompile.testing.compiling import Watcher, contents, tuned, untuned
from mvcompile.traces import replay
from mvcompile.tuning.clock import FileClock
from mvcompile.types import HostTarget, Objectives, Record, Status

TARGET = detect_target()
NETWORK = programs.small_network()


# A network of three tasks, with records as if it had been tuned: compiling it takes seconds.


def program_of(module: tvm.IRModule, target: HostTarget = TARGET) -> tuple[Program, str]:
    prepared = prepare(module, target)
    return extract(prepared), f"{prepared.fingerprint}-warm"  # as records of a model that stays in the cache name it


LATENCIES_S = (1e-3, 1.2e-3, 1.5e-3, 1.8e-3)


def forge_records(work: Path) -> None:
    """Records of a tuning that is finished: the convolution has a front of several candidates, the other tasks have their
    defaults. Each twice, as if they had been compared."""
    program, fingerprint = program_of(NETWORK)
    records = []
    for task in program.tasks:
        candidates = [spaces.default_candidate(task.module, TARGET)]
        if task.kind.startswith("conv2d"):
            candidates = spaces.structured_candidates(task.module, TARGET)[: len(LATENCIES_S)]
            assert len(candidates) == len(LATENCIES_S)
        for place, candidate in enumerate(candidates):
            objectives = Objectives(LATENCIES_S[place], 0.0, 1e6 / (1 + place))
            record = Record(task.key, TARGET.key, fingerprint, candidate.trace, candidate.space, Status.OK, objectives, 0.01)
            records += [record, record]
    with DiskStore(work) as store:
        store.append(records)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory to copy records from."""
    work = tmp_path_factory.mktemp("forged")
    forge_records(work)
    return work


@pytest.fixture
def work(forged: Path, tmp_path: Path) -> Path:
    """A work directory of its own, with those records."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "records.jsonl").write_bytes((forged / "records.jsonl").read_bytes())
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder for bundles."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def conv_task(result: CompileResult) -> Any:
    return next(task for task in result.manifest.tasks if task.kind.startswith("conv2d"))


def records_of(work: Path) -> list[Record]:
    program, fingerprint = program_of(NETWORK)
    with DiskStore(work) as store:
        return [record for task in program.tasks for record in store.records(task.key, TARGET.key, fingerprint)]


def test_compiles_a_relax_module(work: Path, out: Path) -> None:
    link = out / "link.mvb"
    link.symlink_to("real.mvb")
    watcher = Watcher()
    result = compile_module(NETWORK, link, untuned(work, name='odd "name": a/b\n☃'), reporter=watcher)
    assert result.path == link
    assert watcher.events == []
    assert watcher.stages == ["prepare", "tune", "build", "verify"]
    assert link.is_symlink()
    assert contents(out) == {"link.mvb", "real.mvb"}
    assert result.manifest.model.name == 'odd "name": a/b\n☃'
    assert result.manifest.model.onnx_sha256 is None
    assert len(conv_task(result).variants) == len(LATENCIES_S)
    with runtime.load(link, share_cores=True) as session:
        assert [spec.name for spec in session.inputs] == ["image"]
        assert [spec.name for spec in session.outputs] == ["output_0"]
        inputs = random_inputs(session.inputs, seed=5)
        (expected,) = module_outputs(NETWORK, inputs)
        for variant in range(len(LATENCIES_S)):
            session.select_all(variant)
            np.testing.assert_allclose(session.run(inputs)["output_0"], expected, rtol=1e-4, atol=1e-5)


def broken(kernels: Sequence[Kernel], suffix: str) -> list[Kernel]:
    """The kernels whose symbol has this suffix write zeros."""
    return [
        Kernel(kernel.symbol, module := programs.zeros_of(kernel.module), programs.unscheduled(module).trace)
        if kernel.symbol.startswith("conv2d") and kernel.symbol.endswith(suffix)
        else kernel
        for kernel in kernels
    ]


def test_a_variant_that_is_wrong_in_the_library_is_recorded_and_left_out(
    work: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Path] = []
    convolutions: list[int] = []

    def breaks_once(path: Path, kernels: Sequence[Kernel], target: HostTarget) -> None:
        build_library(path, kernels if builds else broken(kernels, "_v1"), target)
        builds.append(path)
        convolutions.append(sum(kernel.symbol.startswith("conv2d") for kernel in kernels))

    monkeypatch.setattr(variants_stage, "build_library", breaks_once)
    config = CompileConfig(TuningConfig(budget_s=0, variants=3), work_dir=str(work), profile=None)
    task = conv_task(compile_module(NETWORK, out / "a.mvb", config))
    assert len(set(builds)) == 2  # under one name, the checking process would have taken the first one for the second
    assert convolutions == [3, 3]  # no more variants than wanted, and the one that had no room took the wrong one's place
    assert (len(task.front), task.measured, task.tuned) == (3, 3, True)
    variants = task.variants
    assert variants[0].objectives.latency_s == LATENCIES_S[0]
    rejected = [record for record in records_of(work) if record.status is not Status.OK]
    assert [record.status for record in rejected] == [Status.WRONG_RESULT]
    assert rejected[0].message
    assert rejected[0].trace_sha256 not in {variant.trace_sha256 for variant in variants}


def test_a_task_without_a_right_variant_gives_no_bundle(work: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(path: Path, kernels: Sequence[Kernel], target: HostTarget) -> None:
        build_library(path, broken(kernels, ""), target)

    monkeypatch.setattr(variants_stage, "build_library", breaks)
    with pytest.raises(VerificationError, match=r"conv2d.*no schedule whose result is right"):
        compile_module(NETWORK, out / "a.mvb", untuned(work))
    assert contents(out) == set()


@pytest.mark.parametrize("suffix", ["_v0", "_v2"], ids=["fastest", "one in the middle"])
def test_the_finished_bundle_is_tested_whatever_was_tested_before(
    suffix: str, work: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(path: Path, kernels: Sequence[Kernel], target: HostTarget) -> None:
        build_library(path, broken(kernels, suffix), target)

    def blind(measurer: Any, subject: Any, library: Path, *what: Any) -> list[Outcome]:
        return [replace(outcome, status=Status.OK) for outcome in real(measurer, subject, library, *what)]

    real = variants_stage.PoolMeasurer.verify
    monkeypatch.setattr(variants_stage, "build_library", breaks)
    monkeypatch.setattr(variants_stage.PoolMeasurer, "verify", blind)
    output = out / "a.mvb"
    output.write_bytes(b"")
    with pytest.raises(VerificationError, match=r"'output_0' differs from tvm .* in 32 of 32 elements .*no bundle was written"):
        compile_module(NETWORK, output, untuned(work))
    assert contents(out) == {"a.mvb"}
    assert output.read_bytes() == b""


def test_an_interrupted_compilation_goes_on_where_it_stopped(tmp_path: Path, out: Path) -> None:
    def interrupt(count: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    work, watcher = tmp_path / "work", Watcher()
    with pytest.raises(KeyboardInterrupt):
        compile_module(NETWORK, out / "a.mvb", untuned(work), reporter=Watcher(interrupt))
    assert contents(out) == set()
    assert len(records_of(work)) == 2
    result = compile_module(NETWORK, out / "a.mvb", untuned(work), reporter=watcher)
    assert len(watcher.events) == len(result.manifest.tasks) - 2
    assert len(records_of(work)) == len(result.manifest.tasks)
    assert contents(out) == {"a.mvb"}


def test_what_was_tuned_with_cold_weights_is_found_again_without_tuning(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "stays", lambda *arguments: False)
    work, first, again = tmp_path / "work", Watcher(), Watcher()
    compile_module(NETWORK, out / "a.mvb", tuned(work, 1), reporter=first)
    assert any("do not stay in the last-level cache" in note for note in first.notes)
    result = compile_module(NETWORK, out / "a.mvb", untuned(work), reporter=again)
    assert again.events == []
    assert result.trials == 1


def test_records_of_another_target_are_left_alone(work: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(TARGET, cpu_model="another one with the same instructions")
    before = records_of(work)
    monkeypatch.setattr(pipeline, "detect_target", lambda: other)
    watcher = Watcher()
    result = compile_module(NETWORK, out / "a.mvb", untuned(work), reporter=watcher)
    assert result.manifest.target == other
    assert len(watcher.events) == len(result.manifest.tasks)
    assert len(conv_task(result).variants) == 1
    assert records_of(work) == before


def test_a_work_directory_in_use_is_refused(work: Path, out: Path) -> None:
    with DiskStore(work), pytest.raises(StoreError, match="already open"):
        compile_module(NETWORK, out / "a.mvb", untuned(work))
    assert contents(out) == set()


@contextmanager
def largest_file(length: int) -> Iterator[None]:
    """A disk that is full after `length` bytes, nearly."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(work: Path, out: Path) -> None:
    with largest_file(1 << 20), pytest.raises(EnvironmentProblem, match=r"bytes free in .*out"):
        compile_module(NETWORK, out / "a.mvb", untuned(work))
    assert contents(out) == set()


def test_a_full_disk_while_linking_is_an_environment_problem(work: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(variants_stage, "build_library", fail)
    with pytest.raises(EnvironmentProblem, match=r"No space left on device.*free disk space"):
        compile_module(NETWORK, out / "a.mvb", untuned(work))
    assert contents(out) == set()


def test_what_the_reference_cannot_run_is_said_before_the_work(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("the reference cannot run the model")

    monkeypatch.setattr(pipeline, "module_outputs", refuse)
    with pytest.raises(ModelError, match="cannot run"):
        compile_module(NETWORK, out / "a.mvb", untuned())
    assert contents(out) == set()


def test_a_missing_linker_is_said_before_the_work(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> list[str]:
        raise EnvironmentProblem("no C compiler was found")

    monkeypatch.setattr(pipeline, "find_linker", missing)
    with pytest.raises(EnvironmentProblem, match="no C compiler"):
        compile_module(NETWORK, out / "a.mvb", untuned())
    assert contents(out) == set()


def test_a_module_without_layers(out: Path) -> None:
    value = relax.Var("value", relax.TensorType((2, 3), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [value]):
        builder.emit_func_output(relax.Tuple([value, value]))
    result = compile_module(builder.get(), out / "identity.mvb", untuned())
    assert result.manifest.tasks == ()
    assert contents(out) == {"identity.mvb", "identity.mvb.work"}
    with runtime.load(result.path, share_cores=True) as session:
        inputs = {"value": np.arange(6).reshape(2, 3)}
        outputs = session.run(inputs)
        assert np.array_equal(outputs["output_0"], inputs["value"])
        assert np.array_equal(outputs["output_1"], inputs["value"])


def function_of(parameters: Sequence[Any], name: str = "main") -> tvm.IRModule:
    builder = relax.BlockBuilder()
    with builder.function(name, list(parameters)):
        builder.emit_func_output(parameters[0])
    return builder.get()


def tensor(name: str, shape: Sequence[Any] = (2,), dtype: str = "float32") -> Any:
    return relax.Var(name, relax.TensorType(shape, dtype))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (function_of([tensor("x")], name="forward"), r"no Relax function main \(it has: forward\)"),
        (programs.fragile(), "no Relax function main"),
        (function_of([tensor("x", [tvm.tirx.Var("n", "int64"), 4])]), "x of main has the shape .*n.*static"),
        (function_of([tensor("x"), tensor("x")]), "several inputs named 'x'"),
        (function_of([tensor("x", dtype="float8_e4m3fn")]), "x of main has dtype float8_e4m3fn; supported are float64"),
        (function_of([relax.Var("x", relax.TensorType(dtype="float32", ndim=2))]), "x of main is .*static shape"),
        (function_of([relax.Var("x", relax.TupleType([relax.TensorType((2,), "float32")]))]), "x of main is .*static shape"),
    ],
    ids=["other name", "no relax", "symbolic", "same names", "dtype", "unknown shape", "tuple"],
)
def test_refuses_modules_that_cannot_be_a_model(module: tvm.IRModule, text: str, out: Path) -> None:
    with pytest.raises(ModelError, match=text):
        compile_module(module, out / "a.mvb", untuned())
    assert contents(out) == set()


def test_interface_of_a_module() -> None:
    inputs, outputs = interface(NETWORK)
    assert [(spec.name, spec.dtype, spec.shape) for spec in inputs] == [("image", "float32", (1, 16, 14, 14))]
    assert [(spec.name, spec.dtype, spec.shape) for spec in outputs] == [("output_0", "float32", (1, 32))]


# Outputs and names, with an ONNX model that compiles in two seconds.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
        [weight],
    )
    path = tmp_path_factory.mktemp("small") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("missing/a.mvb", "create .*missing"),
        ("folder", "is a folder"),
        ("model.onnx", "is the model itself"),
        ("link.onnx", "is the model itself"),
        ("hard.onnx", "is the model itself"),
        ("notes.txt", "is no bundle"),
        ("device", "is no bundle"),
        ("pipe", "is no bundle"),
        ("dangling", "create .*nowhere"),
    ],
)
def test_refuses_outputs_that_must_not_be_written(output: str, text: str, small: Path, out: Path) -> None:
    (out / "model.onnx").write_bytes(small.read_bytes())
    (out / "link.onnx").symlink_to("model.onnx")
    (out / "hard.onnx").hardlink_to(out / "model.onnx")
    (out / "folder").mkdir()
    (out / "notes.txt").write_text("of years")
    (out / "device").symlink_to(os.devnull)
    (out / "dangling").symlink_to("nowhere/a.mvb")
    os.mkfifo(out / "pipe")
    before = contents(out)
    with pytest.raises(UsageError, match=text):
        compile_model(out / "model.onnx", out / output, untuned())
    assert contents(out) == before
    assert (out / "model.onnx").read_bytes() == small.read_bytes()
    assert (out / "notes.txt").read_text() == "of years"


def test_refuses_a_work_directory_that_is_the_output(small: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="both"):
        compile_model(small, out / "a.mvb", untuned(out / "folder" / ".." / "a.mvb"))
    assert contents(out) == set()


def test_replaces_a_bundle_and_what_a_killed_run_left(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has what names can have. A kill at the worst moment is played by not letting the file be removed."""
    name = os.fsdecode(b"\xff m\xc3\xb6del: 'quoted'\n.mvb")
    (out / name).write_bytes(MAGIC + b"an old bundle")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(pipeline, "_verify", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compile_model(small, out / name, untuned(out / "work"))
    assert (out / name).read_bytes() == MAGIC + b"an old bundle"
    assert len(contents(out)) == 3
    compile_model(small, out / name, untuned(out / "work"))
    assert contents(out) == {name, "work"}
    assert (out / name).stat().st_size > 100_000


def test_models_may_have_odd_names(small: Path, out: Path) -> None:
    """Long ones too, and ones that are not of whole characters, which no manifest could hold."""
    path = out / os.fsdecode(b"-\xff caf\xc3\xa9 \xe2\x98\x83:\n" + b"x" * 230 + b".onnx")
    path.write_bytes(small.read_bytes())
    result = compile_model(path, out / "a.mvb", untuned(small.with_name("work")))
    with runtime.load(result.path, share_cores=True) as session:
        assert session.manifest.model.name == "-? café ☃:\n" + "x" * 230
        assert runtime.selftest(session).passed


# The clock of a model.


def test_a_clock_goes_on_and_forgives_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    for seconds in (1.5, 2.5):
        FileClock(path).add(seconds)
    assert FileClock(path).spent_s == 4.0
    for text in ("", "{}", "[]", '{"spent_s": "x"}', '{"spent_s": NaN}', '{"spent_s": -5}', '{"spent_s": Infinity}'):
        path.write_text(text)
        assert FileClock(path).spent_s == 0.0
    assert contents(tmp_path) == {"clock.json"}


def test_a_clock_that_cannot_be_written_is_an_environment_problem(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"clock\.json cannot be written"):
        FileClock(tmp_path / "missing" / "clock.json").add(1.0)


def test_models_that_share_a_work_directory_have_their_own_clocks() -> None:
    config = CompileConfig()
    keys = [
        pipeline._tuning_key(program_of(module)[0], "prepared", config)
        for module in (NETWORK, programs.small_network(), programs.small_network(extent=12))
    ]
    assert keys[0] == keys[1] != keys[2]
    other_seed = CompileConfig(TuningConfig(seed=1))
    assert pipeline._tuning_key(program_of(NETWORK)[0], "prepared", other_seed) != keys[0]


def test_forged_candidates_are_schedules_of_the_task(forged: Path) -> None:
    program, _ = program_of(NETWORK)
    traces: Mapping[str, Record] = {record.trace: record for record in records_of(forged)}
    for task in program.tasks:
        for record in traces.values():
            if record.task_key == task.key:
                replay(task.module, record.trace)
