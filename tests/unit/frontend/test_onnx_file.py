from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from mvcompile.errors import ModelError, UsageError
from mvcompile.frontend.onnx_file import read
from mvcompile.frontend.onnx_import import load_model
from mvcompile.testing.onnx_models import make_model, run

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def linear() -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return make_model([node], {"x": ("float32", [1, 2])}, {"y": ("float32", [1, 3])}, {"w": WEIGHT})


def save_external(directory: Path, **entries: str) -> Path:
    """`linear` with its weight in w.bin behind 8 other bytes; `entries` replace those of the external data."""
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "8", "length": str(WEIGHT.nbytes), **entries}.items():
        tensor.external_data.add(key=key, value=value)
    (directory / "w.bin").write_bytes(b"\0" * 8 + WEIGHT.tobytes())
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "linear.onnx"
    path.write_bytes(linear().SerializeToString())
    model = load_model(path)
    assert model.name == "linear"
    assert model.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_external_data_is_read_beside_the_model_and_counts_for_the_digest(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    model = load_model(path)
    (found,) = run(model, {"x": np.array([[1, 2]], np.float32)})
    np.testing.assert_allclose(found, [[6, 9, 12]])

    (tmp_path / "w.bin").write_bytes(b"\0" * 8 + (WEIGHT + 1).tobytes())
    assert load_model(path).sha256 != model.sha256


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../w.bin"}, r"'\.\./w\.bin', which is outside its directory"),
        ({"location": "/etc/hostname"}, r"outside its directory"),
        ({"location": "link/w.bin"}, r"outside its directory"),
        ({"location": "missing.bin"}, r"'missing\.bin', but there is no file .*put it beside the model"),
        ({"offset": "16"}, r"tensor 'w' is bytes 16 to 40 of w\.bin, which has only 32"),
        ({"length": "many"}, r"no number"),
    ],
)
def test_external_data_that_cannot_be_trusted_is_refused(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 64)
    (tmp_path / "model" / "link").symlink_to(tmp_path)
    with pytest.raises(ModelError, match=message):
        read(save_external(tmp_path / "model", **entries))


@pytest.mark.parametrize("content", [b"", b"text, no model", b"\x08\x07", linear().SerializeToString()[:-9]])
def test_a_file_that_holds_no_model_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx is not "):
        read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the model .*missing\.onnx: No such file"):
        read(tmp_path / "missing.onnx")
    with pytest.raises(UsageError, match=r"cannot read the model .*Is a directory"):
        read(tmp_path)


def invalid(**changes: object) -> onnx.ModelProto:
    model = linear()
    if "opset" in changes:
        model.opset_import[0].version = changes["opset"]
    if "domain" in changes:
        model.opset_import[0].domain = "custom"
    if "input" in changes:
        model.graph.node[0].input[0] = "nowhere"
    if "weight" in changes:
        model.graph.initializer[0].raw_data = b"\0" * 5
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opset": 6}, r"uses operator set 6; supported are 7 to \d+: convert it with onnx\.version_converter"),
        ({"opset": 999}, r"uses operator set 999"),
        ({"domain": "custom"}, r"does not say which version"),
        ({"input": "nowhere"}, r"is not a valid ONNX model: .*nowhere"),
        ({"weight": "short"}, r"is not a valid ONNX model"),
    ],
)
def test_an_invalid_model_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "invalid.onnx"
    path.write_bytes(invalid(**changes).SerializeToString())
    with pytest.raises(ModelError, match=r"invalid\.onnx " + message):
        read(path)
