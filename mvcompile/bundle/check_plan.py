"""The part of `check.py` about the plan: storage, arguments and the order of writes and reads."""

from __future__ import annotations

from collections.abc import Iterable

from mvcompile.bundle.codec import fault, mismatch
from mvcompile.bundle.extents import checked_nbytes, require_range
from mvcompile.bundle.schema import (
    ARENA,
    CONSTANT,
    INPUT,
    PAGE_BYTES,
    STORAGES,
    WEIGHTS,
    Model,
    Parameter,
    Plan,
    Step,
    Task,
    Tensor,
)
from mvcompile.types import ALIGNMENT_BYTES, TensorSpec, align

Range = tuple[int, int]
"""First byte in the arena, and the byte after the last."""


def check_plan(plan: Plan, model: Model, tasks: tuple[Task, ...], weights_bytes: int) -> None:
    """Check that the plan's tensors lie in their storage, that its steps call tasks with the arguments these were compiled for,
    and that what a step or the caller reads was written before. `weights_bytes` is the length of weights.bin.

    Raises BundleError.
    """
    ranges = _check_tensors(plan, model.inputs, weights_bytes)
    for index, step in enumerate(plan.steps):
        _check_step(step, plan, tasks, ranges, f"manifest.plan.steps[{index}]")
    _check_layer_names(plan.steps)
    if len(plan.outputs) != len(model.outputs):
        raise fault("manifest.plan.outputs", plan.outputs, f"{len(model.outputs)} tensors, one for each of the model's outputs")
    for index, (tensor, spec) in enumerate(zip(plan.outputs, model.outputs, strict=True)):
        _require_like(plan, tensor, spec, f"manifest.plan.outputs[{index}]", f"manifest.model.outputs[{index}]")
    _check_output_names(plan, model)
    _check_dataflow(plan, tasks, ranges)


def _check_tensors(plan: Plan, inputs: tuple[TensorSpec, ...], weights_bytes: int) -> dict[int, Range]:
    """The byte ranges of the tensors that lie in the arena, by tensor index."""
    ranges: dict[int, Range] = {}
    for index, tensor in enumerate(plan.tensors):
        path = f"manifest.plan.tensors[{index}]"
        nbytes = checked_nbytes(tensor.dtype, tensor.shape, path)
        if tensor.storage == INPUT:
            _check_input(tensor, inputs, path)
        elif tensor.storage == CONSTANT:
            require_range(tensor.offset, nbytes, ALIGNMENT_BYTES, weights_bytes, f"{path}.offset", WEIGHTS)
        elif tensor.storage == ARENA:
            require_range(tensor.offset, nbytes, ALIGNMENT_BYTES, plan.arena_bytes, f"{path}.offset", "the arena")
            ranges[index] = (tensor.offset, tensor.offset + nbytes)
        else:
            raise fault(f"{path}.storage", tensor.storage, f"one of {', '.join(STORAGES)}")
    # An arena larger than its tensors is memory that a damaged number makes every session allocate.
    end = align(max((end for _, end in ranges.values()), default=0), PAGE_BYTES)
    if plan.arena_bytes > end:
        raise fault(
            "manifest.plan.arena_bytes", plan.arena_bytes, f"at most {end}, the end of its last tensor rounded up to {PAGE_BYTES}"
        )
    return ranges


def _check_input(tensor: Tensor, inputs: tuple[TensorSpec, ...], path: str) -> None:
    if not 0 <= tensor.offset < len(inputs):
        raise fault(f"{path}.offset", tensor.offset, f"the index of one of the model's {len(inputs)} inputs")
    spec = inputs[tensor.offset]
    if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
        raise mismatch(path, _kind(tensor), f"{_kind(spec)} as manifest.model.inputs[{tensor.offset}]")


def _check_step(step: Step, plan: Plan, tasks: tuple[Task, ...], ranges: dict[int, Range], path: str) -> None:
    if not 0 <= step.task < len(tasks):
        raise fault(f"{path}.task", step.task, f"the index of one of {len(tasks)} tasks")
    task = tasks[step.task]
    if len(step.arguments) != len(task.parameters):
        raise fault(
            f"{path}.arguments", step.arguments, f"{len(task.parameters)} arguments, one for each parameter of task {task.name}"
        )
    for index, (tensor, parameter) in enumerate(zip(step.arguments, task.parameters, strict=True)):
        _require_like(plan, tensor, parameter, f"{path}.arguments[{index}]", f"manifest.tasks[{step.task}].parameters[{index}]")
    first_output = len(step.arguments) - task.num_outputs
    for index in range(first_output, len(step.arguments)):
        written = step.arguments[index]
        if written not in ranges:
            found = f"tensor {written} in storage {plan.tensors[written].storage}"
            raise mismatch(f"{path}.arguments[{index}]", found, "a tensor in the arena, because the task writes it")
        # Kernels are compiled for arguments that do not alias.
        others = [other for position, other in enumerate(step.arguments) if position != index and other in ranges]
        clash = next((other for other in others if _overlap(ranges[written], ranges[other])), None)
        if clash is not None:
            raise mismatch(
                f"{path}.arguments[{index}]", f"tensor {written}", f"a range that does not overlap argument tensor {clash}"
            )


def _check_layer_names(steps: tuple[Step, ...]) -> None:
    seen: dict[str, int] = {}
    for index, step in enumerate(steps):
        if not step.layer or step.layer in seen:
            expected = f"a name of its own, step {seen[step.layer]} has the same" if step.layer else "a string that is not empty"
            raise fault(f"manifest.plan.steps[{index}].layer", step.layer, expected)
        seen[step.layer] = index


def _check_output_names(plan: Plan, model: Model) -> None:
    """ONNX lets a graph list one value twice as an output; two values of one name would hide each other."""
    seen: dict[str, int] = {}
    for index, (spec, tensor) in enumerate(zip(model.outputs, plan.outputs, strict=True)):
        if seen.setdefault(spec.name, tensor) != tensor:
            raise fault(f"manifest.model.outputs[{index}].name", spec.name, "another name than that of a different output")


def _require_like(plan: Plan, tensor: int, wanted: Parameter | TensorSpec, path: str, wanted_path: str) -> None:
    if not 0 <= tensor < len(plan.tensors):
        raise fault(path, tensor, f"the index of one of {len(plan.tensors)} tensors")
    found = plan.tensors[tensor]
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        raise mismatch(path, f"tensor {tensor} of {_kind(found)}", f"{_kind(wanted)} as {wanted_path}")


def _check_dataflow(plan: Plan, tasks: tuple[Task, ...], ranges: dict[int, Range]) -> None:
    """Follow the steps and keep the tensors whose bytes are whole since they were written.

    A tensor that some step writes must be whole when it is read. A tensor that no step writes is another view (a reshape, a
    slice, a concatenation) of bytes that must all belong to whole tensors.
    """
    produced = {tensor for step in plan.steps for tensor in _written(step, tasks)}
    whole: dict[int, Range] = {}
    for index, step in enumerate(plan.steps):
        written = _written(step, tasks)
        for position, tensor in enumerate(step.arguments[: -len(written)]):
            if tensor in ranges:
                _require_whole(tensor, ranges[tensor], whole, produced, f"manifest.plan.steps[{index}].arguments[{position}]")
        for tensor in written:
            begin, end = ranges[tensor]
            for other in [other for other, (a, b) in whole.items() if a < end and begin < b]:
                del whole[other]
            whole[tensor] = (begin, end)
    for index, tensor in enumerate(plan.outputs):
        if tensor in ranges:
            _require_whole(tensor, ranges[tensor], whole, produced, f"manifest.plan.outputs[{index}]")


def _written(step: Step, tasks: tuple[Task, ...]) -> tuple[int, ...]:
    return step.arguments[-tasks[step.task].num_outputs :]


def _require_whole(tensor: int, wanted: Range, whole: dict[int, Range], produced: set[int], path: str) -> None:
    if tensor in whole or (tensor not in produced and _covered(wanted, whole.values())):
        return
    raise mismatch(path, f"tensor {tensor}", "a tensor that an earlier step wrote and no later one overwrote")


def _covered(wanted: Range, ranges: Iterable[Range]) -> bool:
    begin, end = wanted
    for first, last in sorted(ranges):
        if first > begin:
            return False
        begin = max(begin, last)
        if begin >= end:
            return True
    return False


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _kind(value: Tensor | TensorSpec | Parameter) -> str:
    return f"{value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"
