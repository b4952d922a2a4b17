from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from mvcompile import zoo
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.frontend.reference import integer_limits, random_inputs, reference_outputs, with_logits
from mvcompile.frontend.shapes import tensor_spec

SMALL = (
    "efficientnet-b0", "mobilenet-v2", "shufflenet", "squeezenet", "ssd-resnet34", "tiny-conv", "tiny-transformer", "tiny-yolov2",
)  # fmt: skip
"""Networks that are made in a moment; the others are compared with the registry by the slow tests."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def outputs(model: onnx.ModelProto, seed: int = 1) -> dict[str, np.ndarray]:
    return reference_outputs(with_logits(model), inputs(model, seed))


def inputs(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    return random_inputs([tensor_spec(info, "input") for info in model.graph.input], seed, integer_limits(model))


@pytest.mark.parametrize("name", SMALL)
def test_what_is_built_is_what_the_registry_says(name: str, directory: Path) -> None:
    path = zoo.get(name, directory)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    canonical = builders().canonical
    entry = zoo.entry(name)
    assert path == directory / f"{name}.onnx"
    assert (canonical.digest(model), canonical.parameters(model), canonical.macs(model)) == (
        entry.sha256, entry.parameters, entry.macs,
    )  # fmt: skip
    assert [other.name for other in directory.iterdir() if other.name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in zoo.entries() if entry.name not in SMALL])
def test_every_large_network_is_what_the_registry_says(name: str, tmp_path: Path) -> None:
    assert builders().canonical.digest(onnx.load(zoo.get(name, tmp_path))) == zoo.entry(name).sha256


@pytest.mark.parametrize("name", SMALL)
def test_outputs_vary_and_no_class_takes_all(name: str, directory: Path) -> None:
    model = onnx.load(zoo.get(name, directory))
    found = list(outputs(model).values())
    other = list(outputs(model, seed=2).values())
    for values, others in zip(found, other, strict=True):
        assert np.isfinite(values).all()
        assert np.unique(values).size > 0.8 * values.size
        assert np.abs(values - others).max() > 1e-2 * np.abs(values).max()
    logits = found[-1]
    assert 0.1 < logits.std() < 10
    probabilities = np.exp(logits - logits.max())
    assert probabilities.max() / probabilities.sum() < 0.9


@pytest.mark.parametrize("name", ["tiny-conv", "tiny-transformer"])
def test_two_references_agree(name: str, directory: Path) -> None:
    model = onnx.load(zoo.get(name, directory))
    values = inputs(model, seed=3)
    found = reference_outputs(model, values)
    expected = ReferenceEvaluator(model).run(list(found), values)
    for have, want in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def with_swapped_channels(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a kernel computes that mixes up two input channels of one convolution."""
    broken = onnx.ModelProto.FromString(model.SerializeToString())
    convolution = next(node for node in broken.graph.node if node.name == "/down2/Conv")
    tensor = next(t for t in broken.graph.initializer if t.name == convolution.input[1])
    values = numpy_helper.to_array(tensor).copy()
    values[:, [0, 1]] = values[:, [1, 0]]
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return broken


def test_a_wrong_kernel_shows_in_the_outputs_and_would_not_if_all_weights_were_equal(directory: Path) -> None:
    model = onnx.load(zoo.get("tiny-conv", directory))
    broken = with_swapped_channels(model)
    for good, bad in zip(outputs(model).values(), outputs(broken).values(), strict=True):
        assert not np.allclose(bad, good, rtol=1e-3, atol=1e-5)

    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), 0.02, np.float32), tensor.name))
    broken = with_swapped_channels(model)
    for good, bad in zip(outputs(model).values(), outputs(broken).values(), strict=True):
        np.testing.assert_allclose(bad, good, rtol=1e-3, atol=1e-5)


def test_a_file_that_holds_the_network_is_left_alone_and_any_other_is_replaced(tmp_path: Path) -> None:
    path = zoo.get("tiny-conv", tmp_path)
    os.utime(path, (1, 1))
    assert zoo.get("tiny-conv", tmp_path).stat().st_mtime == 1

    model = onnx.load(path)
    for damaged in (b"", b"not a model", path.read_bytes()[:-100], with_flipped_weight(model).SerializeToString()):
        path.write_bytes(damaged)
        zoo.get("tiny-conv", tmp_path)
        assert onnx.load(path) == model


def with_flipped_weight(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    raw = bytearray(changed.graph.initializer[0].raw_data)
    raw[0] ^= 1
    changed.graph.initializer[0].raw_data = bytes(raw)
    return changed


def test_the_digest_is_of_the_graph_and_its_weights_not_of_the_encoding(directory: Path) -> None:
    digest = builders().canonical.digest
    model = onnx.load(zoo.get("tiny-conv", directory))
    wanted = digest(model)
    relabelled = onnx.shape_inference.infer_shapes(model)
    relabelled.producer_name, relabelled.doc_string = "another", "text"
    tensor = relabelled.graph.initializer[0]
    values = numpy_helper.to_array(tensor)
    del tensor.float_data[:]
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values.ravel().tolist())
    assert digest(relabelled) == wanted

    assert digest(with_flipped_weight(model)) != wanted
    stride = onnx.ModelProto.FromString(model.SerializeToString())
    next(a for a in stride.graph.node[0].attribute if a.name == "strides").ints[0] = 2
    assert digest(stride) != wanted


def test_the_weights_do_not_depend_on_what_was_made_before() -> None:
    seeding = builders().seeding
    first = seeding.uniform("net/weight", (3, 5), -1.0, 1.0)
    seeding.uniform("net/other", (100_001,), 0.0, 1.0)
    again = seeding.uniform("net/weight", (3, 5), -1.0, 1.0)
    assert first.tobytes() == again.tobytes()
    long = seeding.uniform("net/weight", (200_001,), -1.0, 1.0)
    assert long[:15].tobytes() == first.tobytes()
    assert long.min() >= -1.0
    assert long.max() < 1.0
    assert abs(long.mean()) < 0.01
    assert long.var() == pytest.approx(1 / 3, rel=0.01)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no network 'resnet'.*resnet50"):
        zoo.get("resnet", tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file.*another directory"):
        zoo.get("tiny-conv", tmp_path / "file" / "below")


@pytest.mark.parametrize("field", ["sha256", "source_sha256"])
def test_another_digest_is_an_error_that_names_both(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = zoo.entry("squeezenet")
    values = {"sha256": actual.sha256, "source_sha256": actual.source_sha256, field: "f" * 64}
    changed = zoo.Entry(actual.name, actual.description, actual.parameters, actual.macs, **values)  # type: ignore[arg-type]
    monkeypatch.setattr(zoo, "entry", lambda name: changed)
    with pytest.raises(EnvironmentProblem, match=f"{getattr(actual, field)}.*{'f' * 64}"):
        zoo.get("squeezenet", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_installed_package_brings_its_own_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mvcompile" / "_model_zoo").mkdir(parents=True)
    (tmp_path / "mvcompile" / "_model_zoo" / "registry.json").write_text('{"networks": {}}')
    monkeypatch.setattr(zoo, "__file__", str(tmp_path / "mvcompile" / "zoo.py"))
    zoo._directory.cache_clear()
    try:
        assert zoo.entries() == ()
        (tmp_path / "mvcompile" / "_model_zoo" / "registry.json").unlink()
        zoo._directory.cache_clear()
        with pytest.raises(EnvironmentProblem, match="reinstall"):
            zoo.entries()
    finally:
        monkeypatch.undo()
        zoo._directory.cache_clear()


def test_every_shipped_network_is_in_the_onnx_package() -> None:
    light = importlib.resources.files("onnx") / "backend" / "test" / "data" / "light"
    shipped = {entry.name for entry in zoo.entries() if entry.source_sha256 is not None}
    assert shipped == set(builders().SHIPPED)
    assert len(shipped) == 9
    assert all((light / file).is_file() for file in builders().SHIPPED.values())


def builders() -> ModuleType:
    package: ModuleType = zoo._package()
    return package
