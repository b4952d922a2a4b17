"""Of a model that is being compiled only the packed weights are left when the tuning begins."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from mvcompile import compile_model, pipeline
from mvcompile.frontend.onnx_import import OnnxModel, load_model
from mvcompile.testing.compiling import Watcher, untuned
from mvcompile.testing.onnx_models import make_model


class Stop(Exception):
    """Ends a compilation that has shown enough."""


class Looking(Watcher):
    """Notes at each stage which of `held` still exist, and ends the compilation when the tuning begins."""

    def __init__(self, held: dict[str, weakref.ref[Any]]) -> None:
        super().__init__()
        self.held = held
        self.alive: dict[str, set[str]] = {}

    def stage(self, name: str) -> None:
        super().stage(name)
        gc.collect()
        self.alive[name] = {key for key, reference in self.held.items() if reference() is not None}
        if name == "tune":
            raise Stop


def test_the_model_is_gone_when_the_tuning_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = tmp_path / "model.onnx"
    onnx.save(make_model([node], {"x": ("float32", [3, 256])}, {"y": ("float32", [3, 256])}, {"w": weight}), path)
    held: dict[str, weakref.ref[Any]] = {}

    def loading(*arguments: Any) -> OnnxModel:
        model = load_model(*arguments)
        held["weights"] = weakref.ref(model.weights)
        held["array"] = weakref.ref(model.weights.array(model.original.graph.initializer[0]))
        return model

    monkeypatch.setattr(pipeline, "load_model", loading)
    reporter = Looking(held)
    with pytest.raises(Stop):
        compile_model(path, tmp_path / "model.mvb", untuned(), reporter=reporter)
    assert reporter.alive == {"import": set(), "prepare": {"weights", "array"}, "tune": set()}
