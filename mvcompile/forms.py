"""Further forms of weights: which tasks may have one, and the model with those that its variants use.

A variant of another algorithm (`mvcompile.algorithms`) takes a weight in another form, which every layer of the task needs a copy
of. A task's variants share one further form at most, and all copies together are limited: what they gain per byte decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mvcompile.algorithms import ALGORITHMS, Programs, transform
from mvcompile.build import Kernel
from mvcompile.bundle.schema import Parameter
from mvcompile.tasks import Layer, Program, Task, Value
from mvcompile.types import DTYPE_BYTES, Argument, Record, Status

LEAST_GAIN = 0.03
"""A form is worth its bytes only if it makes the task faster by more than this share: medians repeat to 2 %."""


def form_of(space: str) -> str:
    """The form of a weight that schedules of `space` take; empty for the weight as it is."""
    return space if space in ALGORITHMS else ""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a form would bring to a task: seconds per run of the model less, for bytes more."""

    task: int
    form: str
    gain_s: float
    nbytes: int


def choose_forms(program: Program, records: Sequence[Sequence[Record]], growth: float) -> list[str]:
    """The further form that each task's variants may take; empty for none.

    All constants and their further forms take at most `growth` times the bytes of the constants. Greedy by gain per byte, as for
    a multiple-choice knapsack (Sinha and Zoltners 1979): a task's form may be replaced by one that gains more.
    """
    left = (growth - 1.0) * program.weight_bytes
    offers = [offer for index, task in enumerate(program.tasks) for offer in _offers(program, index, task, records[index])]
    chosen: dict[int, _Offer] = {}
    while True:
        steps = []
        for offer in offers:
            had = chosen.get(offer.task, _Offer(offer.task, "", 0.0, 0))
            gain, cost = offer.gain_s - had.gain_s, offer.nbytes - had.nbytes
            if gain > 0 and cost <= left:
                steps.append((math.inf if cost <= 0 else gain / cost, gain, offer, cost))
        if not steps:
            return [chosen[index].form if index in chosen else "" for index in range(len(program.tasks))]
        _, _, best, cost = max(steps, key=lambda step: step[:2])
        chosen[best.task] = best
        left -= cost


def _offers(program: Program, index: int, task: Task, records: Sequence[Record]) -> list[_Offer]:
    fastest: dict[str, float] = {}
    for record in {each.trace_sha256: each for each in records}.values():  # the last one of a trace counts
        if record.status is Status.OK and record.objectives is not None:
            form = form_of(record.space)
            fastest[form] = min(fastest.get(form, math.inf), record.objectives.latency_s)
    if "" not in fastest:
        return []
    programs = Programs(task.module)
    found = []
    for form, latency_s in fastest.items():
        if form and latency_s < (1.0 - LEAST_GAIN) * fastest[""]:
            argument = next(each for each in programs.arguments(form) if each.form)
            weights = {layer.arguments[argument.position] for layer in program.layers if layer.task == index}
            copy = _parameter(programs, argument)
            nbytes = len(weights) * math.prod(copy.shape) * DTYPE_BYTES[copy.dtype]
            found.append(_Offer(index, form, task.calls * (fastest[""] - latency_s), nbytes))
    return found


def weight_bytes(program: Program, spaces: Sequence[Collection[str]]) -> int:
    """Bytes of the weights that layers take in the forms that kernels of `spaces` (per task) read: a weight that is used in its
    further form alone counts in that."""
    tasks = [_task(task, used) for task, used in zip(program.tasks, spaces, strict=True)]
    sizes: dict[tuple[int, str], int] = {}
    for layer in program.layers:
        task = tasks[layer.task]
        for argument, parameter in zip(task.arguments, task.parameters, strict=True):
            root = program.values[layer.arguments[argument.position]].root
            if program.values[root].source == "constant":
                sizes[root, argument.form] = math.prod(parameter.shape) * DTYPE_BYTES[parameter.dtype]
    return sum(sizes.values())


def with_forms(program: Program, spaces: Sequence[Collection[str]]) -> Program:
    """`program` with the weights that kernels of `spaces`, the kept variants' spaces per task, take: further forms added, and
    weights left out that only their further form is used of."""
    values = list(program.values)
    made: dict[tuple[int, str], int] = {}
    tasks = [_task(task, used) for task, used in zip(program.tasks, spaces, strict=True)]

    def value(layer: Layer, argument: Argument) -> int:
        index = layer.arguments[argument.position]
        key = (index, argument.form)
        if argument.form and key not in made:
            data = values[values[index].root].data
            assert data is not None
            copy = transform(argument.form, np.reshape(data, values[index].shape))
            made[key] = len(values)
            values.append(Value("constant", str(copy.dtype), copy.shape, len(values), data=copy))
        return made[key] if argument.form else index

    layers = tuple(
        replace(layer, arguments=tuple(value(layer, argument) for argument in tasks[layer.task].arguments))
        for layer in program.layers
    )
    return Program(tuple(tasks), layers, tuple(values), program.outputs)


def kernel(symbol: str, task: Task, space: str, trace: str) -> Kernel:
    """The kernel that a trace of `space` describes, called with `task.arguments` like the other kernels of the task."""
    programs = Programs(task.module)
    own = programs.arguments(form_of(space))
    unread = [(place, task.parameters[place]) for place, argument in enumerate(task.arguments) if argument not in own]
    return Kernel(symbol, programs.program(space), trace, tuple(unread))


def _task(task: Task, spaces: Collection[str]) -> Task:
    programs = Programs(task.module)
    taken = {argument for space in spaces for argument in programs.arguments(form_of(space))}
    arguments = tuple(sorted(taken or task.arguments))
    return replace(task, arguments=arguments, parameters=tuple(_parameter(programs, argument) for argument in arguments))


def _parameter(programs: Programs, argument: Argument) -> Parameter:
    found = programs.parameter(argument)
    return Parameter(str(found.dtype), tuple(int(extent) for extent in found.shape))
