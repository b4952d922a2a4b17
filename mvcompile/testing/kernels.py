"""A small bundle with real kernels, compiled in about a second: what the runtime is tested on.

    hidden = scale * relu(x @ w0 + b0)          layer "dense0", task dense, 2 variants
    deep   = scale * relu(hidden @ w1 + b1)     layer "dense1", task dense, 2 variants
    y      = hidden + (deep if gate else x)     layer "merge",  task merge, 1 variant

with inputs x (float32) and gate (bool), outputs y and hidden. The loop over rows of the second variant of dense, and that of
merge, are parallel. `scales` gives each variant of dense its scale: with different ones the variants can be told apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import te, tirx

from mvcompile.build import runtime_objects, step_driver
from mvcompile.bundle import schema
from mvcompile.bundle.interference import INTERFERENCE, Interference, encode_interference
from mvcompile.bundle.schema import Manifest
from mvcompile.bundle.writer import Source, write_bundle
from mvcompile.runtime.driver import DRIVER
from mvcompile.types import OBJECTIVE_UNITS, HostTarget, Objectives, TensorSpec, Verification, align

ROWS, WIDTH = 8, 16
Scales = tuple[float, float]
"""Of the two variants of dense."""
Array = npt.NDArray[Any]

_TRACES = tuple(json.dumps({"tiny": number}) for number in range(3))
_RTOL, _ATOL = 1e-4, 1e-5


def write_kernel_bundle(
    path: str | os.PathLike[str],
    *,
    scales: Scales = (1.0, 1.0),
    driver: bool = True,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    kernels: bytes | None = None,
    interference: Callable[[Manifest], Interference | bytes] | None = None,
) -> Manifest:
    """Write the bundle to `path`, its manifest passed through `change` first, with `kernels` in place of the compiled library,
    or without a `driver` in that, and with what `interference` says of it (bytes are taken as they are)."""
    weights = b"".join(_padded(array) for array in tiny_weights())
    inputs = tiny_inputs(seed=7)
    outputs = tiny_reference(inputs)
    selftest, offsets = b"", []
    for array in (*inputs.values(), *outputs.values()):
        offsets.append(len(selftest))
        selftest += _padded(array)
    members: dict[str, Source] = {
        schema.KERNELS: tiny_kernels(scales, driver) if kernels is None else kernels,
        schema.WEIGHTS: weights,
        schema.RUNTIME_LIBRARY: Path(tvm.__file__).parent / "lib" / "libtvm_runtime.so",
        schema.RUNTIME_LICENSE: Path(tvm.__file__).parent / "LICENSE",
        schema.TRACES: json.dumps({_sha256(trace): trace for trace in _TRACES}).encode(),
        schema.SELFTEST: selftest,
    }
    test = schema.SelfTest(tuple(offsets[: len(inputs)]), tuple(offsets[len(inputs) :]), "numpy", _RTOL, _ATOL)
    manifest = change(_manifest(test))
    if interference is not None:
        found = interference(manifest)
        members[INTERFERENCE] = found if isinstance(found, bytes) else encode_interference(found)
    return write_bundle(path, manifest, members)


def tiny_inputs(seed: int) -> dict[str, Array]:
    """Random inputs."""
    random = np.random.default_rng(seed)
    gate = random.integers(0, 2, (ROWS, WIDTH)).astype(bool)
    return {"x": random.standard_normal((ROWS, WIDTH), np.float32), "gate": gate}


def tiny_weights() -> tuple[Array, Array, Array, Array]:
    """w0, b0, w1, b1."""
    random = np.random.default_rng(0)
    w0, b0, w1, b1 = (random.standard_normal(shape, np.float32) for shape in [(WIDTH, WIDTH), (WIDTH,)] * 2)
    return w0, b0, w1, b1


def tiny_reference(inputs: dict[str, Array], scales: Scales = (1.0, 1.0)) -> dict[str, Array]:
    """What the model makes of `inputs` in float64, with `scales` those of the variants that dense0 and dense1 run with."""
    w0, b0, w1, b1 = (array.astype(np.float64) for array in tiny_weights())
    hidden = scales[0] * np.maximum(inputs["x"] @ w0 + b0, 0)
    deep = scales[1] * np.maximum(hidden @ w1 + b1, 0)
    y = hidden + np.where(inputs["gate"], deep, inputs["x"])
    return {"y": y.astype(np.float32), "hidden": hidden.astype(np.float32)}


@functools.cache
def tiny_kernels(scales: Scales, driver: bool) -> bytes:
    """The shared library."""
    serial, parallel = (_dense(scale) for scale in scales)
    functions = {"dense_v0": serial, "dense_v1": _parallel_rows(parallel), "merge_v0": _parallel_rows(_merge())}
    if driver:
        functions[DRIVER] = step_driver()
    module = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in functions.items()})
    target = tvm.target.Target({"kind": "llvm", "mtriple": _triple(), "mcpu": _cpu(), "num-cores": 2})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, schema.KERNELS)
        extra = [str(each) for each in runtime_objects(Path(folder), _triple())] if driver else None
        tvm.compile(module, target=target).export_library(str(path), addons=extra)
        return path.read_bytes()


def _dense(scale: float) -> Any:
    x = te.placeholder((ROWS, WIDTH), name="x")
    w = te.placeholder((WIDTH, WIDTH), name="w")
    b = te.placeholder((WIDTH,), name="b")
    k = te.reduce_axis((0, WIDTH), name="k")
    product = te.compute((ROWS, WIDTH), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="product")
    zero, factor = (tirx.const(value, "float32") for value in (0, scale))
    out = te.compute((ROWS, WIDTH), lambda i, j: tirx.max(product[i, j] + b[j], zero) * factor, name="out")
    return te.create_prim_func([x, w, b, out])


def _merge() -> Any:
    x, hidden, deep = (te.placeholder((ROWS, WIDTH), name=name) for name in ("x", "hidden", "deep"))
    gate = te.placeholder((ROWS, WIDTH), dtype="bool", name="gate")
    out = te.compute((ROWS, WIDTH), lambda i, j: hidden[i, j] + tirx.Select(gate[i, j], deep[i, j], x[i, j]), name="out")
    return te.create_prim_func([x, gate, hidden, deep, out])


def _parallel_rows(function: Any) -> Any:
    schedule = tvm.s_tir.Schedule(function)
    row, _ = schedule.get_loops(schedule.get_sblock("out"))
    schedule.parallel(row)
    for block in schedule.get_producers(schedule.get_sblock("out")):
        schedule.compute_at(block, row)
    return schedule.mod["main"]


def _manifest(selftest: schema.SelfTest) -> Manifest:
    plane = ("float32", (ROWS, WIDTH))
    inputs = (TensorSpec("x", *plane), TensorSpec("gate", "bool", (ROWS, WIDTH)))
    outputs = (TensorSpec("y", *plane), TensorSpec("hidden", *plane))
    plane_bytes = align(inputs[0].nbytes)
    offsets = np.cumsum([0, *(align(array.nbytes) for array in tiny_weights())]).tolist()
    tensors = (
        schema.Tensor(schema.INPUT, 0, *plane),
        schema.Tensor(schema.INPUT, 1, "bool", (ROWS, WIDTH)),
        *(
            schema.Tensor(schema.CONSTANT, offset, "float32", array.shape)
            for offset, array in zip(offsets, tiny_weights(), strict=False)
        ),
        *(schema.Tensor(schema.ARENA, index * plane_bytes, *plane) for index in range(3)),  # hidden, deep, y
    )
    steps = (
        schema.Step("dense0", 0, (0, 2, 3, 6)),
        schema.Step("dense1", 0, (6, 4, 5, 7)),
        schema.Step("merge", 1, (0, 1, 6, 7, 8)),
    )
    return Manifest(
        format_version=schema.FORMAT_VERSION,
        model=schema.Model("tiny", None, inputs, outputs),
        target=_target(),
        tvm_ffi=tvm_ffi.__version__,
        toolchain={"apache-tvm": tvm.__version__, "apache-tvm-ffi": tvm_ffi.__version__},
        fingerprint=_sha256("tiny"),
        objectives=tuple(schema.ObjectiveInfo(name, unit, "estimated: invented") for name, unit in OBJECTIVE_UNITS.items()),
        tasks=(_dense_task(), _merge_task()),
        plan=schema.Plan(3 * plane_bytes, tensors, steps, outputs=(8, 6)),
        selftest=selftest,
        coverage=schema.Coverage(1.0, 0.9),
        members=(),
    )


def _dense_task() -> schema.Task:
    plane, weight, bias = (_parameter(shape) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    front = (Objectives(1e-6, 4096.0, 2048.0), Objectives(2e-6, 2048.0, 1024.0))
    variants = tuple(_variant(f"dense_v{index}", objectives, _TRACES[index]) for index, objectives in enumerate(front))
    flops = 2.0 * ROWS * WIDTH * WIDTH
    return schema.Task(
        "dense", _sha256("dense"), "dense", flops, (plane, weight, bias, plane), 1, 0.9, True, 2, front, 1.0, variants
    )


def _merge_task() -> schema.Task:
    plane = _parameter((ROWS, WIDTH))
    parameters = (plane, schema.Parameter("bool", (ROWS, WIDTH)), plane, plane, plane)
    variants = (_variant("merge_v0", None, _TRACES[2]),)
    return schema.Task("merge", _sha256("merge"), "elementwise", 128.0, parameters, 1, 0.1, False, 0, (), 1.0, variants)


def _parameter(shape: tuple[int, ...]) -> schema.Parameter:
    return schema.Parameter("float32", shape)


def _variant(symbol: str, objectives: Objectives | None, trace: str) -> schema.Variant:
    spread = None if objectives is None else 0.01
    return schema.Variant(symbol, "tiny", _sha256(trace), objectives, spread, Verification(1e-7, 1e-6, _RTOL, _ATOL))


def _target() -> HostTarget:
    baseline = ("sse2",) if platform.machine() == "x86_64" else ("neon",)
    return HostTarget(
        triple=_triple(),
        arch=platform.machine(),
        cpu=_cpu(),
        features=baseline,
        num_cores=2,
        l1d_bytes=32 * 1024,
        l2_bytes=512 * 1024,
        llc_bytes=8 * 2**20,
        vector_bits=128,
        vector_registers=16,
        cpu_model="any",
    )


def _triple() -> str:
    return f"{platform.machine()}-linux-gnu"


def _cpu() -> str:
    return "x86-64" if platform.machine() == "x86_64" else "generic"


def _padded(array: Array) -> bytes:
    data = array.tobytes()
    return data.ljust(align(len(data)), b"\0")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
