from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from mvcompile import traces
from mvcompile.spaces import default_candidate
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Task
from mvcompile.testing.networks import network, only_task, programs_of

Array = NDArray[Any]
HOST = detect_target()
LIBRARY = ("T.exp(", "T.tanh(", "T.erf(", "T.sigmoid(")


def results(task: Task, x: Array) -> Array:
    """What the task's default schedule computes."""
    module = traces.replay(task.module, default_candidate(task.module, HOST).trace).mod
    kind = task.parameters[-1]
    y = tvm.runtime.tensor(np.full(kind.shape, 77).astype(kind.dtype))
    tvm.compile(module, target=tvm_target(HOST)).mod["main"](tvm.runtime.tensor(x), y)
    return y.numpy()


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Array], Array], str]] = {
    "exp": (lambda g, x: g(relax.op.exp(x)), np.exp, "exp"),
    "tanh": (lambda g, x: g(relax.op.tanh(x)), np.tanh, "tanh"),
    "erf": (lambda g, x: g(relax.op.erf(x)), np.vectorize(math.erf), "erf"),
    "sigmoid": (lambda g, x: g(relax.op.sigmoid(x)), lambda x: 1 / (1 + np.exp(-x)), "sigmoid"),
    "silu": (lambda g, x: g(relax.op.nn.silu(x)), lambda x: x / (1 + np.exp(-x)), "sigmoid"),
    "gelu": (lambda g, x: g(relax.op.nn.gelu(x)), gelu, "erf"),
    "gelu of parts": (
        lambda g, x: g(relax.op.multiply(x, g(relax.op.add(g(relax.op.erf(x)), relax.const(1.0))))),
        lambda x: x * (1 + np.vectorize(math.erf)(x)),
        "erf",
    ),
    "softmax": (lambda g, x: g(relax.op.nn.softmax(x)), softmax, "exp"),
    "halves changed about": (
        lambda g, x: g(relax.op.concat([g(relax.op.tanh(each)) for each in (g(relax.op.split(x, 2, 1))[1], x)], 1)),
        lambda x: np.tanh(np.concatenate([x[:, x.shape[1] // 2 :], x], 1)),
        "tanh",
    ),
}


@pytest.mark.parametrize("columns", [32, 18])
@pytest.mark.parametrize("name", CASES)
def test_functions_of_a_model_are_the_vectorisable_ones_and_right(name: str, columns: int) -> None:
    body, reference, function = CASES[name]
    x = 4 * np.random.default_rng(3).standard_normal((5, columns), dtype=np.float32)
    program = programs_of(network(body, x.shape), HOST)
    script = "".join(task.module.script() for task in program.tasks)
    assert f"mvcompile.{function}" in script
    assert not any(each in script for each in LIBRARY)
    if len(program.tasks) == 1:
        found, wanted = results(program.tasks[0], x), reference(x.astype(np.float64))
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=4e-7 * np.abs(wanted).max())


def test_masked_scores_have_no_weight() -> None:
    x = np.random.default_rng(3).standard_normal((4, 32), dtype=np.float32)
    x[0, 5:], x[1, ::2], x[2, 0], x[3] = -np.inf, np.finfo(np.float32).min, 1e30, -np.inf
    found = results(only_task(network(CASES["softmax"][0], x.shape), HOST), x)
    np.testing.assert_allclose(found[:3], softmax(x[:3].astype(np.float64)), rtol=2e-6, atol=1e-12)
    assert not found[0, 5:].any()
    assert not found[1, ::2].any()
    assert np.isnan(found[3]).all()  # as in ONNX Runtime and numpy: no score is left


def test_gates_close_for_large_negative_inputs_and_let_nan_through() -> None:
    x = np.array([[-1e4, -1e30, -3e38, 3e38, np.nan, 90.0, -0.0, 0.0] * 4], np.float32)
    for name in ("silu", "gelu"):
        found = results(only_task(network(CASES[name][0], x.shape), HOST), x)[0, :8]
        np.testing.assert_array_equal(found, [0, 0, 0, np.float32(3e38), np.nan, 90, 0, 0])


def test_other_dtypes_keep_the_library_s_functions() -> None:
    task = only_task(network(CASES["exp"][0], (3, 8), dtypes=("float64",)), HOST)
    assert "T.exp(" in task.module.script()
    x = np.linspace(-700, 700, 24).reshape(3, 8)
    np.testing.assert_allclose(results(task, x), np.exp(x), rtol=1e-14)


def test_programs_with_these_functions_survive_being_stored() -> None:
    task = only_task(network(CASES["silu"][0], (4, 32)), HOST)
    again = tvm.ir.load_json(tvm.ir.save_json(task.module))
    tvm.ir.assert_structural_equal(again, task.module)


EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1e-42, 3e38]


@pytest.mark.parametrize("exponent", [0.75, -0.75, 0.5, -0.25, 1.75, 2.5])
def test_powers_of_quarters_are_square_roots(exponent: float) -> None:
    """As precise as the C library's to 4 units in the last place, and alike at all edges."""
    task = only_task(network(lambda g, x: g(relax.op.power(x, relax.const(np.float32(exponent)))), (4, 256)), HOST)
    assert "quarter_power" in str(task.module)
    x = np.abs(np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32))
    x.flat[: len(EDGES)] = EDGES
    with np.errstate(all="ignore"):
        wanted = np.array([_power(float(each), exponent) for each in x.flat]).reshape(x.shape)
        rounded = wanted.astype(np.float32)
    found = results(task, x)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    assert (np.abs(found[finite] - wanted[finite]) / np.spacing(np.abs(rounded[finite]))).max() <= 4.0


def _power(base: float, exponent: float) -> float:
    if base == 0.0 and exponent < 0.0:
        return math.inf
    return math.nan if base < 0.0 and math.isfinite(base) else math.pow(base, exponent)


@pytest.mark.parametrize("exponent", [0.3, 3.0, -1.0, 7.75])
def test_other_powers_stay(exponent: float) -> None:
    task = only_task(network(lambda g, x: g(relax.op.power(x, relax.const(np.float32(exponent)))), (4, 16)), HOST)
    assert "quarter_power" not in str(task.module)
