"""Which nodes TVM's importer gets right. The others are refused with a reason, all at once, and never compiled wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
from tvm.relax.frontend.onnx import onnx_frontend

from mvcompile.frontend.onnx_file import default_opset
from mvcompile.frontend.shapes import static_shape

STANDARD = ("", "ai.onnx")
CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why node `node` (its name in the graph; `label` is what to call it) of an operator cannot be imported."""

    node: str
    label: str
    operator: str
    opset: int
    reason: str


def unsupported(model: onnx.ModelProto, labels: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    """Every node that must not be imported, in graph order. Shapes must have been inferred."""
    versions = {entry.domain: int(entry.version) for entry in model.opset_import}
    opset = default_opset(model) or 0
    unknown = set(_without_static_shape(model.graph))
    problems = []
    for node in model.graph.node:
        reason = _reason(node, opset, unknown)
        if reason:
            version = opset if node.domain in STANDARD else versions.get(node.domain, 0)
            problems.append(problem(node, version, reason, labels or {}))
    return tuple(problems)


def problem(node: onnx.NodeProto, opset: int, reason: str, labels: Mapping[str, str]) -> Problem:
    """A `Problem` of `node`."""
    name = node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
    unnamed = repr(node.name) if node.name else f"(no name, computes {', '.join(node.output)!r})"
    return Problem(node.name, labels.get(node.name, unnamed), name, opset, reason)


def report(problems: Iterable[Problem]) -> str:
    """The message that lists all problems, one a line."""
    lines = [f"  node {p.label}: {p.operator} (operator set {p.opset}): {p.reason}" for p in problems]
    return "\n".join([f"{len(lines)} node{'s' if len(lines) != 1 else ''} of the model cannot be compiled:", *lines])


def _reason(node: onnx.NodeProto, opset: int, unknown: set[str]) -> str | None:
    """Why `node` is refused, or None."""
    if node.domain not in STANDARD:
        return "only operators of the standard domain are supported"
    if node.op_type in CONTROL_FLOW:
        return "control flow that depends on data is not supported"
    if node.op_type not in onnx_frontend._get_convert_map():
        return "there is no importer for this operator"
    hidden = [name for name in node.output if name in unknown]
    if hidden:
        return "the shape of its output depends on data"
    return None


def _without_static_shape(graph: onnx.GraphProto) -> Iterator[str]:
    known = {info.name for info in [*graph.value_info, *graph.output] if static_shape(info) is not None}
    for node in graph.node:
        yield from (name for name in node.output if name and name not in known)
