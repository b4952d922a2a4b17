"""Small tensor programs, with schedules that keep their meaning and schedules that break it, for tests of measuring."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.s_tir.schedule import Schedule

from mvcompile import traces
from mvcompile.measure.protocol import Candidate, Subject

LENGTH = 64
SEGMENTATION_FAULT = 11
FOREVER_S = 100_000


def subject(module: tvm.IRModule, key: str = "0123456789abcdef", constants: tuple[int, ...] = (), outputs: int = 1) -> Subject:
    """`module["main"]` as a task whose weights are cold."""
    return Subject(key, tvm.ir.save_json(module), constants, outputs, weights_cold=True)


def module_of(*tensors: te.Tensor) -> tvm.IRModule:
    """The program of a tensor expression: arguments, then results."""
    return tvm.IRModule({"main": te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")})


def fragile() -> tvm.IRModule:
    """y = x * w, and some calls of the C library that do nothing as long as the program's meaning is kept.

    Each of its intermediates has a row 0, which is read, and a row 1, which does harm. A schedule that stores both rows in the
    same place (see `breaking`) makes row 1 be read: the signal that is raised is then a segmentation fault and not 0, the time it
    sleeps is forever and not 0, and the factor is off by one.
    """
    x, w = te.placeholder((LENGTH,), name="x"), te.placeholder((LENGTH,), name="w")
    rows = (2, LENGTH)
    signal = te.compute(rows, lambda row, i: tirx.Select(row == 0, 0, SEGMENTATION_FAULT).astype("int32"), name="signal")
    seconds = te.compute(rows, lambda row, i: tirx.Select(row == 0, 0, FOREVER_S).astype("int32"), name="seconds")
    factor = te.compute(rows, lambda row, i: tirx.Select(row == 0, x[i], x[i] + 1.0), name="factor")

    def value(i: Any) -> Any:
        raised = tirx.call_extern("int32", "raise", signal[0, i]).astype("float32")
        slept = tirx.call_extern("int32", "sleep", seconds[0, i]).astype("float32")
        return factor[0, i] * w[i] + raised + slept

    return module_of(x, w, te.compute((LENGTH,), value, name="y"))


def unscheduled(module: tvm.IRModule) -> Candidate:
    """No change at all."""
    return Candidate(traces.dump(Schedule(module).trace), "test")


def splitting(module: tvm.IRModule, block: str, factor: int) -> Candidate:
    """A harmless schedule: splits the last loop of `block`."""
    schedule = Schedule(module)
    schedule.split(schedule.get_loops(schedule.get_sblock(block))[-1], [None, factor])
    return Candidate(traces.dump(schedule.trace), "test")


def parallel(module: tvm.IRModule, block: str) -> Candidate:
    """Runs the first loop of `block` in parallel."""
    schedule = Schedule(module)
    schedule.parallel(schedule.get_loops(schedule.get_sblock(block))[0])
    return Candidate(traces.dump(schedule.trace), "test")


def breaking(module: tvm.IRModule, block: str) -> Candidate:
    """A schedule that stores all rows of what `block` computes in the same place, on the (false) word that no two meet there."""
    schedule = Schedule(module)
    schedule.transform_layout(schedule.get_sblock(block), ("write", 0), lambda row, i: [i], assume_injective_transform=True)
    return Candidate(traces.dump(schedule.trace), "test")


def not_compilable(module: tvm.IRModule, block: str) -> Candidate:
    """A valid schedule for a GPU, which no code for a CPU can be made of."""
    schedule = Schedule(module)
    schedule.bind(schedule.get_loops(schedule.get_sblock(block))[0], "threadIdx.x")
    return Candidate(traces.dump(schedule.trace), "test")


def endless_to_compile() -> tuple[tvm.IRModule, Candidate]:
    """A program, and a schedule that makes millions of statements of it."""
    source = te.placeholder((1 << 22,), name="source")
    module = module_of(source, te.compute((1 << 22,), lambda i: source[i] * source[i] + 1.0, name="result"))
    schedule = Schedule(module)
    schedule.unroll(schedule.get_loops(schedule.get_sblock("result"))[0])
    return module, Candidate(traces.dump(schedule.trace), "test")


def marking_then_hanging(path: str) -> tvm.IRModule:
    """Makes the folder `path`, then sleeps for ever: whoever waits for the folder knows when it hangs."""
    source = te.placeholder((1,), name="source")

    def value(i: Any) -> Any:
        made = tirx.call_extern("int32", "mkdir", path, 0o700)
        return source[i] + tirx.call_extern("int32", "sleep", FOREVER_S + made).astype("float32")  # an argument comes first

    return module_of(source, te.compute((1,), value, name="result"))


def small_network(channels: int = 16, extent: int = 14) -> tvm.IRModule:
    """A Relax module: a convolution of 3x3 with seeded weights, a rectifier, and a maximum over all pixels."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((2 * channels, channels, 3, 3), dtype=np.float32) / np.float32(3 * channels**0.5)
    image = relax.Var("image", relax.TensorType((1, channels, extent, extent), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [image]):
        with builder.dataflow():
            inner = builder.emit(relax.op.nn.conv2d(image, relax.const(weight), padding=1))
            inner = builder.emit(relax.op.nn.relu(inner))
            result = builder.emit_output(relax.op.max(inner, axis=[2, 3]))
        builder.emit_func_output(result)
    return builder.get()


def zeros_of(module: tvm.IRModule, outputs: int = 1) -> tvm.IRModule:
    """A program with the parameters of `module["main"]` that writes zeros: what a wrong kernel may look like."""
    kinds = [(tuple(int(extent) for extent in each.shape), str(each.dtype)) for each in module["main"].params]

    def zeros(shape: tuple[int, ...], dtype: str) -> te.Tensor:
        return te.compute(shape, lambda *_: tirx.const(0, dtype), name="zeros")

    inputs = [te.placeholder(shape, dtype, name=f"in{i}") for i, (shape, dtype) in enumerate(kinds[:-outputs])]
    return module_of(*inputs, *(zeros(*kind) for kind in kinds[-outputs:]))
