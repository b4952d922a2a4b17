"""SqueezeNet, really tuned: every choice of variants is right, variants cost code only, and a broken kernel is caught."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from tvm import s_tir, tirx

from mvcompile import CompileConfig, TuningConfig, compile_model, runtime, traces, zoo
from mvcompile.build import Kernel, build_library
from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import KERNELS, TRACES
from mvcompile.bundle.writer import write_bundle
from mvcompile.frontend.onnx_import import load_model, to_relax
from mvcompile.frontend.prepare import prepare
from mvcompile.frontend.reference import random_inputs, with_logits
from mvcompile.target import detect_target
from mvcompile.tasks import extract

RTOL, ATOL = 1e-3, 1e-5
TRIALS = 150
VARIANTS = 5
SELECTIONS = 200

Outputs = dict[str, Any]


def require_close(found: Outputs, expected: Outputs, what: str) -> None:
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, rtol=RTOL, atol=ATOL, err_msg=f"{name} with {what}")


class Tuned:
    """SqueezeNet with the inputs of its softmax as a further output, tuned in a work directory that is kept."""

    def __init__(self, folder: Path) -> None:
        self.model, self.work, self.bundle = folder / "squeezenet.onnx", folder / "work", folder / "squeezenet.mvb"
        onnx.save(with_logits(onnx.load(zoo.get("squeezenet", folder / "zoo"))), self.model)
        self.compile(self.bundle, VARIANTS)
        session = onnxruntime.InferenceSession(str(self.model), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        with runtime.load(self.bundle) as loaded:
            self.inputs = [random_inputs(loaded.inputs, seed) for seed in (11, 12)]
        self.expected = [dict(zip(names, session.run(names, inputs), strict=True)) for inputs in self.inputs]

    def compile(self, output: Path, variants: int) -> Path:
        """A bundle from the records that there are, and from tuning as far as there are fewer than TRIALS."""
        tuning = TuningConfig(trials=TRIALS, variants=variants)
        return compile_model(self.model, output, CompileConfig(tuning, work_dir=str(self.work))).path

    def records(self) -> bytes:
        return (self.work / "records.jsonl").read_bytes()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return Tuned(tmp_path_factory.mktemp("squeezenet"))


@pytest.fixture
def session(tuned: Tuned) -> Iterator[runtime.Session]:
    with runtime.load(tuned.bundle) as session:
        yield session


@pytest.mark.slow
def test_layers_with_a_choice_keep_verified_variants(session: runtime.Session) -> None:
    several = [task for task in session.manifest.tasks if len(task.variants) > 1]
    print(f"{len(several)} of {len(session.manifest.tasks)} tasks have a choice: {[len(task.variants) for task in several]}")
    assert several, "no layer has a choice: the following tests say nothing"
    for task in session.manifest.tasks:
        assert len(task.variants) <= min(VARIANTS, len(task.front))
        assert len(task.front) <= task.measured
        for variant in task.variants:
            check = variant.verification
            assert check.max_abs_error < float("inf")
            assert variant.objectives is not None
            assert variant.objectives in task.front


@pytest.mark.slow
def test_every_single_layer_switch_is_right(tuned: Tuned, session: runtime.Session) -> None:
    for inputs, expected in zip(tuned.inputs, tuned.expected, strict=True):
        require_close(session.run(inputs), expected, "variant 0 everywhere")
        for layer, variants in session.variants.items():
            for variant in variants[1:]:
                session.select(layer, variant.index)
                require_close(session.run(inputs), expected, f"variant {variant.index} of {layer}")
            session.select(layer, 0)


@pytest.mark.slow
def test_random_selections_are_right(tuned: Tuned, session: runtime.Session) -> None:
    chance = random.Random(0)
    tried = set()
    for number in range(SELECTIONS):
        selection = [chance.randrange(len(variants)) for variants in session.variants.values()]
        tried.add(tuple(selection))
        session.select_all(selection)
        which = number % len(tuned.inputs)
        require_close(session.run(tuned.inputs[which]), tuned.expected[which], f"selection {selection}")
    print(f"{len(tried)} different selections")
    assert len(tried) > 1


@pytest.mark.slow
def test_variants_cost_code_and_the_same_records_give_the_same_bytes(tuned: Tuned, tmp_path: Path) -> None:
    records = tuned.records()
    again = tuned.compile(tmp_path / "again.mvb", VARIANTS)
    assert tuned.records() == records, "compiling again from the same records measured something"
    assert again.read_bytes() == tuned.bundle.read_bytes()
    single = tuned.compile(tmp_path / "single.mvb", 1)
    assert tuned.records() == records
    with open_bundle(single) as bundle:
        assert all(len(task.variants) == 1 for task in bundle.manifest.tasks)
    ratio = tuned.bundle.stat().st_size / single.stat().st_size
    print(f"{tuned.bundle.stat().st_size} bytes with variants, {single.stat().st_size} with one each: {ratio:.4f}")
    assert 1 < ratio <= 1.10


# A broken kernel


def scaled(function: Any) -> Any:
    """`function` with one more loop behind it, which makes its output 1 % larger."""
    output = function.params[-1]
    variables = [tirx.Var(f"i{axis}", "int64") for axis in range(len(output.shape))]
    loops = tirx.BufferStore(output, tirx.BufferLoad(output, variables) * tirx.const(1.01, "float32"), variables)
    for variable, extent in reversed(list(zip(variables, output.shape, strict=True))):
        loops = tirx.For(variable, tirx.const(0, "int64"), extent, tirx.ForKind.SERIAL, loops)
    root = function.body.block
    body = tirx.SeqStmt([root.body, loops])
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return function.with_body(s_tir.SBlockRealize([], True, block))


def with_broken_kernel(model: Path, source: Path, symbol: str, target: Path) -> None:
    """The bundle with the kernel `symbol` replaced by one that is off, and with digests and manifest as if nothing were wrong."""
    host = detect_target()
    modules = {task.key: task.module for task in extract(prepare(to_relax(load_model(model)), host)).tasks}
    library = target.with_suffix(".so")
    with open_bundle(source) as bundle:
        texts = json.loads(bytes(bundle.member(TRACES)))
        kernels = []
        for task in bundle.manifest.tasks:
            for variant in task.variants:
                module, trace = modules[task.key], texts[variant.trace_sha256]
                if variant.symbol == symbol:
                    module = tvm.IRModule({"main": scaled(traces.replay(module, trace).mod["main"])})
                    trace = "[[],[]]"
                kernels.append(Kernel(variant.symbol, module, trace))
        build_library(library, kernels, host)
        write_bundle(target, bundle.manifest, _members(bundle, library.read_bytes()))


def _members(bundle: Bundle, library: bytes) -> dict[str, bytes]:
    return {m.name: library if m.name == KERNELS else bytes(bundle.member(m.name)) for m in bundle.manifest.members}


def require_caught(mvcompile: Callable[..., Any], path: Path, layer: str, variant: int) -> None:
    junit = path.with_suffix(".xml")
    done = mvcompile("validate", path, "--json", "--junit", junit)
    assert done.code == 1
    report = json.loads(done.out)
    failed = [check for check in report["checks"] if not check["passed"]]
    subject = f"layer {layer}, variant {variant}"
    assert subject in [check["subject"] for check in failed]
    named = next(check for check in failed if check["subject"] == subject)
    assert "elements off" in named["measured"]
    assert named["threshold"]
    assert named["remedy"]
    suite = ElementTree.parse(junit).getroot()
    assert (suite.tag, int(suite.get("failures", "0"))) == ("testsuite", len(failed))
    cases = {case.get("name"): case.find("failure") for case in suite}
    failure = cases[subject]
    assert failure is not None
    assert "elements off" in failure.get("message", "")
    assert [name for name, found in cases.items() if found is not None] == [check["subject"] for check in failed]


def test_a_broken_kernel_is_caught(mvcompile: Callable[..., Any], tiny_model: Path, tiny_variants: Path, tmp_path: Path) -> None:
    with runtime.load(tiny_variants) as loaded:
        layer, variants = next((name, found) for name, found in loaded.variants.items() if len(found) > 1)
    path = tmp_path / "broken.mvb"
    with_broken_kernel(tiny_model, tiny_variants, variants[1].symbol, path)
    require_caught(mvcompile, path, layer, 1)


@pytest.mark.slow
def test_a_broken_kernel_of_a_tuned_bundle_is_caught(mvcompile: Callable[..., Any], tuned: Tuned, tmp_path: Path) -> None:
    with runtime.load(tuned.bundle) as loaded:
        layer, variants = next((name, found) for name, found in loaded.variants.items() if len(found) > 1)
    path = tmp_path / "broken.mvb"
    shutil.copy(tuned.bundle, tmp_path / "sound.mvb")
    assert mvcompile("validate", tmp_path / "sound.mvb").code == 0
    with_broken_kernel(tuned.model, tuned.bundle, variants[-1].symbol, path)
    require_caught(mvcompile, path, layer, len(variants) - 1)
