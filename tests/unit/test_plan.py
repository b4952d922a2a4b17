from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mvcompile.build import make_plan
from mvcompile.bundle.schema import ARENA, CONSTANT, INPUT
from mvcompile.plan import Lifetime, assign_offsets
from mvcompile.tasks import Layer, Program, Value
from mvcompile.types import ALIGNMENT_BYTES, align

LIFETIMES = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=40,
)


@given(LIFETIMES)
def test_buffers_that_live_at_the_same_step_do_not_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, total = assign_offsets(lifetimes)
    placed = list(zip(lifetimes, offsets, strict=True))
    for index, (life, offset) in enumerate(placed):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= 0
        assert offset + life.size <= total
        for other, start in placed[:index]:
            if other.first <= life.last and life.first <= other.last:
                assert offset + life.size <= start or start + other.size <= offset


@given(LIFETIMES)
def test_the_arena_is_at_least_what_lives_at_once_and_at_most_everything(lifetimes: list[Lifetime]) -> None:
    _, total = assign_offsets(lifetimes)
    live = [sum(align(life.size) for life in lifetimes if life.first <= step <= life.last) for step in range(42)]
    assert max(live, default=0) <= total <= sum(align(life.size) for life in lifetimes)


def test_a_chain_takes_the_space_of_its_two_largest_neighbours() -> None:
    sizes = [64, 128, 64, 256, 64]
    offsets, total = assign_offsets([Lifetime(size, step, step + 1) for step, size in enumerate(sizes)])
    assert total == 64 + 256
    assert len(set(offsets)) < len(sizes)


def test_nothing_needs_no_arena() -> None:
    assert assign_offsets([]) == ([], 0)


class Model:
    """A Program put together by hand: no tasks are needed for a plan."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.layers: list[Layer] = []

    def _add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def input(self, *shape: int) -> int:
        index = sum(value.source == "input" for value in self.values)
        return self._add(Value("input", "float32", shape, len(self.values), index))

    def constant(self, data: np.ndarray[Any, Any]) -> int:
        return self._add(Value("constant", str(data.dtype), data.shape, len(self.values), data=data))

    def view(self, of: int, *shape: int) -> int:
        origin = self.values[of]
        return self._add(Value(origin.source, origin.dtype, shape, origin.root))

    def layer(self, *arguments: int, shape: tuple[int, ...] = (16,)) -> int:
        result = self._add(Value("computed", "float32", shape, len(self.values)))
        self.layers.append(Layer(f"layer.{len(self.layers)}", 0, (*arguments, result)))
        return result

    def program(self, *outputs: int) -> Program:
        return Program((), tuple(self.layers), tuple(self.values), outputs)


def test_equal_constants_are_stored_once() -> None:
    model = Model()
    x = model.input(16)
    ones, same = model.constant(np.ones(16, np.float32)), model.constant(np.ones(16, np.float32))
    integers = model.constant(np.zeros(16, np.int32))
    zeros = model.constant(np.zeros(16, np.float32))  # equal bytes, another dtype
    planned = make_plan(model.program(model.layer(x, ones, same, integers, zeros)))
    constants = [tensor for tensor in planned.plan.tensors if tensor.storage == CONSTANT]
    assert [tensor.offset for tensor in constants] == [0, 0, 64, 128]
    assert [(offset, data.dtype) for offset, data in planned.weights] == [(0, np.float32), (64, np.int32), (128, np.float32)]
    assert planned.weights_bytes == 192


def test_a_view_shares_the_storage_of_what_it_is_a_view_of() -> None:
    model = Model()
    x, weight = model.input(16), model.constant(np.ones((4, 4), np.float32))
    first = model.layer(x, model.view(weight, 16))
    second = model.layer(model.view(first, 4, 4), shape=(4, 4))
    third = model.layer(second)
    plan = make_plan(model.program(model.view(third, 2, 8), first)).plan
    produced, reshaped = plan.tensors[plan.steps[0].arguments[-1]], plan.tensors[plan.steps[1].arguments[0]]
    assert (reshaped.storage, reshaped.offset, reshaped.shape) == (ARENA, produced.offset, (4, 4))
    assert plan.tensors[plan.outputs[0]].offset == plan.tensors[plan.steps[2].arguments[-1]].offset
    assert plan.tensors[plan.steps[0].arguments[1]].shape == (16,)


def test_a_tensor_lives_until_its_last_view_is_read() -> None:
    model = Model()
    first = model.layer(model.input(16))
    kept = model.view(first, 4, 4)
    second = model.layer(first)
    third = model.layer(second)
    plan = make_plan(model.program(model.layer(third, kept))).plan
    written = [plan.tensors[step.arguments[-1]].offset for step in plan.steps]
    assert written[0] not in written[1:3]


def test_outputs_live_to_the_end() -> None:
    model = Model()
    early = model.layer(model.input(16))
    later = model.layer(model.layer(model.layer(early)))
    plan = make_plan(model.program(early, later)).plan
    written = [plan.tensors[step.arguments[-1]].offset for step in plan.steps]
    assert written.count(written[0]) == 1


def test_outputs_may_be_inputs_and_constants_and_repeat() -> None:
    model = Model()
    x, weight = model.input(3), model.constant(np.arange(5, dtype=np.int64))
    planned = make_plan(model.program(weight, x, weight))
    assert [(tensor.storage, tensor.offset, tensor.dtype) for tensor in planned.plan.tensors] == [
        (INPUT, 0, "float32"),
        (CONSTANT, 0, "int64"),
    ]
    assert planned.plan.outputs == (1, 0, 1)
    assert planned.plan.arena_bytes == 0


def test_what_no_step_and_no_output_uses_is_left_out() -> None:
    model = Model()
    x, _unused = model.input(16), model.constant(np.ones(16, np.float32))
    planned = make_plan(model.program(model.layer(x)))
    assert planned.weights == ()
    assert len(planned.plan.tensors) == 2
