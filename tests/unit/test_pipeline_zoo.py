"""Whole compilations of the zoo's small networks, with real workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mvcompile import CompileResult, compile_model, runtime, zoo
from mvcompile.bundle.check import check_traces
from mvcompile.bundle.schema import TRACES
from mvcompile.frontend.reference import random_inputs, reference_outputs
from mvcompile.runtime.selftesting import selftest_switches
from mvcompile.testing.compiling import Watcher, contents, digest, tuned, untuned

# The zoo's small networks, without tuning and with some of it. One work directory each: what is measured once is not again.


@pytest.fixture(scope="module", params=["tiny-conv", "tiny-transformer"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.get(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(model: Path) -> CompileResult:
    return compile_model(model, model.with_name("plain.mvb"), untuned(model.with_name("work")))


@pytest.fixture(scope="module")
def rich(model: Path, plain: CompileResult) -> CompileResult:
    return compile_model(model, model.with_name("rich.mvb"), tuned(model.with_name("work"), 40))


def require_equal_to_onnxruntime(model: Path, bundle: Path) -> None:
    """On other inputs than those of the self-test, with every selection there is on one layer, and some on all."""
    generator = np.random.default_rng(0)
    with runtime.load(bundle, share_cores=True) as session:
        inputs = random_inputs(session.inputs, seed=77)
        expected = reference_outputs(str(model), inputs)
        assert all(np.std(value) > 0.01 for value in expected.values())
        counts = [len(session.variants[layer]) for layer in session.layers]
        selections: list[list[int]] = [[int(generator.integers(count)) for count in counts] for _ in range(10)]
        for place, count in enumerate(counts):
            selections += [[variant if i == place else 0 for i in range(len(counts))] for variant in range(count)]
        for selection in selections:
            session.select_all(selection)
            found = session.run(inputs)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5)
        session.select_all(0)
        assert runtime.selftest(session).passed
        assert all(switch.result.passed for switch in selftest_switches(session))


def test_without_tuning_a_bundle_is_right_and_complete(model: Path, plain: CompileResult) -> None:
    assert plain.path == model.with_name("plain.mvb")
    assert plain.trials == 0
    assert plain.max_abs_error < 1e-4
    manifest = plain.manifest
    assert manifest.model.name == model.stem
    assert manifest.model.onnx_sha256 == digest(model)
    assert manifest.coverage.tuned_share == 0.0
    assert manifest.coverage.hypervolume_ratio == 1.0
    assert sum(task.time_share for task in manifest.tasks) == pytest.approx(1.0)
    assert {(len(task.variants), task.measured, task.tuned) for task in manifest.tasks} == {(1, 1, False)}
    require_equal_to_onnxruntime(model, plain.path)


def test_with_tuning_every_variant_is_measured_verified_and_right(model: Path, rich: CompileResult) -> None:
    assert rich.trials == 40
    assert rich.tuning_s > 0
    manifest = rich.manifest
    assert 0 < manifest.coverage.tuned_share <= 1
    assert sum(task.measured for task in manifest.tasks) > len(manifest.tasks)
    for task in manifest.tasks:
        assert 1 <= len(task.variants) <= len(task.front) <= task.measured
        latencies = [variant.objectives.latency_s for variant in task.variants if variant.objectives is not None]
        assert len(latencies) == len(task.variants)
        assert latencies == sorted(latencies)
        assert min(latencies) > 0
        assert all(variant.objectives in task.front for variant in task.variants)
        for variant in task.variants:
            assert np.isfinite(variant.verification.max_abs_error)
    with runtime.load(rich.path, share_cores=True) as session:
        check_traces(session.manifest, session.member(TRACES))
    require_equal_to_onnxruntime(model, rich.path)


def test_the_same_records_give_the_same_bytes(model: Path, rich: CompileResult) -> None:
    watcher = Watcher()
    again = compile_model(model, model.with_name("again.mvb"), tuned(model.with_name("work"), 40), reporter=watcher)
    assert digest(again.path) == digest(rich.path)
    assert watcher.events == []  # nothing was measured
    assert watcher.stages == ["import", "prepare", "tune", "build", "verify"]
    assert again.tuning_s == rich.tuning_s
    assert contents(model.parent) == {model.name, "plain.mvb", "rich.mvb", "again.mvb", "work"}
