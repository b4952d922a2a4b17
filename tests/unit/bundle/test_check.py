"""Each rule of check_manifest: a manifest that breaks it, and the error that names what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mvcompile.bundle.check import check_manifest, check_traces
from mvcompile.bundle.codec import decode_manifest, to_plain
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import TRACES, Manifest
from mvcompile.errors import BundleError
from mvcompile.testing.bundles import Change, put, tiny_manifest, tiny_members, write_tiny


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, int]:
    """The tiny bundle's manifest with its members, and the length of its file."""
    path = write_tiny(tmp_path_factory.mktemp("bundle") / "tiny.mvb")
    with open_bundle(path) as bundle:
        return bundle.manifest, path.stat().st_size


def judge(sealed: tuple[Manifest, int], *changes: Change) -> None:
    manifest, length = sealed
    plain = to_plain(manifest)
    for change in changes:
        change(plain)
    check_manifest(decode_manifest(json.dumps(plain).encode()), length)


def arena(offset: int, *shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"storage": "arena", "offset": offset, "dtype": dtype, "shape": list(shape)}


def second_output(name: str, tensor: int) -> tuple[Change, ...]:
    spec = {"name": name, "dtype": "float32", "shape": [1, 16]}
    return put("model.outputs[1]", spec), put("plan.outputs[1]", tensor), put("selftest.output_offsets[1]", 0)


def drop(path: str, index: int) -> Change:
    def change(plain: dict[str, Any]) -> None:
        target = plain
        for step in path.split("."):
            target = target[step]
        del target[index]  # type: ignore[arg-type]

    return change


DENSE, RELU = "tasks[0]", "tasks[1]"
FASTER = {"latency_s": 1e-6, "footprint_bytes": 1.0, "traffic_bytes": 1.0}
INPUT_SPEC = {"name": "x", "dtype": "int8", "shape": []}
MAIN = [
    ("format_version", 2, "manifest.format_version is 2, expected 1"),
    ("tvm_ffi", "", "manifest.tvm_ffi is ''"),
    ("fingerprint", "", "manifest.fingerprint is ''"),
    ("model.onnx_sha256", "F" * 64, "manifest.model.onnx_sha256 is 'FFFF"),
    ("model.inputs[0].dtype", "float33", "manifest.model.inputs[0].dtype is 'float33', expected one of float64"),
    ("model.inputs[0].shape", [0, 16], "manifest.model.inputs[0].shape is (0, 16), expected dimensions of at least 1"),
    (
        "model.inputs[0].shape",
        [2**31, 2**31, 2],
        "manifest.model.inputs[0].shape is (2147483648, 2147483648, 2), expected fewer than",
    ),
    ("model.inputs[0].shape", [1] * 33, "manifest.model.inputs[0].shape is (1, 1, 1, 1, 1, 1, ...), expected at most 32"),
    ("model.inputs[1]", INPUT_SPEC, "manifest.model.inputs[1].name is 'x', which manifest.model.inputs[0].name is too"),
    ("model.outputs", [], "manifest.model.outputs is (), expected at least one"),
    ("model.outputs[0].dtype", "str", "manifest.model.outputs[0].dtype is 'str'"),
    ("target.triple", "", "manifest.target.triple is ''"),
    ("target.num_cores", 0, "manifest.target.num_cores is 0, expected at least 1"),
    ("target.features", ["b", "a"], "manifest.target.features is ('b', 'a'), expected features in ascending order"),
    ("target.features", ["a", "a"], "manifest.target.features is ('a', 'a')"),
    ("objectives", [], "manifest.objectives is (), expected the objectives latency_s, footprint_bytes, traffic_bytes"),
    ("objectives[0].name", "energy_j", "manifest.objectives is ('energy_j', "),
    ("objectives[0].unit", "ms", "manifest.objectives[0].unit is 'ms', expected 's'"),
    ("objectives[1].source", "guessed", "manifest.objectives[1].source is 'guessed'"),
    ("selftest.reference", "", "manifest.selftest.reference is ''"),
    ("selftest.input_offsets", [], "manifest.selftest.input_offsets is (), expected 1 offsets"),
    ("selftest.output_offsets[0]", 96, "manifest.selftest.output_offsets[0] is 96, expected an offset that is a multiple of 64"),
    ("selftest.output_offsets[0]", 128, "manifest.selftest.output_offsets[0] is offset 128 and length 64"),
    ("coverage.hypervolume_ratio", 1.5, "manifest.coverage.hypervolume_ratio is 1.5, expected a share from 0 to 1"),
    ("coverage.tuned_share", 1.5, "manifest.coverage.tuned_share is 1.5"),
]
TASKS = [
    (f"{DENSE}.name", "", "manifest.tasks[0].name is ''"),
    (f"{DENSE}.kind", "", "manifest.tasks[0].kind is ''"),
    (f"{DENSE}.key", "e" * 16, "manifest.tasks[1].key is 'eeeeeeeeeeeeeeee', which manifest.tasks[0].key is too"),
    (f"{DENSE}.parameters[1].dtype", "complex64", "manifest.tasks[0].parameters[1].dtype is 'complex64'"),
    (f"{DENSE}.parameters[1].shape", [16, 0], "manifest.tasks[0].parameters[1].shape is (16, 0)"),
    (f"{DENSE}.num_outputs", 0, "manifest.tasks[0].num_outputs is 0, expected 1 to 3"),
    (f"{DENSE}.num_outputs", 4, "manifest.tasks[0].num_outputs is 4, expected 1 to 3"),
    (f"{RELU}.parameters", [], "manifest.tasks[1].num_outputs is 1, expected 1 to 0"),
    (f"{DENSE}.time_share", 1.1, "manifest.tasks[0].time_share is 1.1"),
    (f"{DENSE}.time_share", 0.8, "the sum of manifest.tasks[*].time_share is 1.05"),
    (f"{DENSE}.hypervolume_ratio", 1.0001, "manifest.tasks[0].hypervolume_ratio is 1.0001"),
    (f"{DENSE}.front", [], "manifest.tasks[0].front is 0 vectors, expected 1 to 12"),
    (f"{RELU}.front", [FASTER], "manifest.tasks[1].front is 1 vectors, expected none"),
    (f"{DENSE}.measured", 2, "manifest.tasks[0].front is 3 vectors, expected 1 to 2"),
    (f"{RELU}.tuned", True, "manifest.tasks[1].measured is 0, expected at least 1 for a tuned task"),
    (f"{DENSE}.variants", [], "manifest.tasks[0].variants is (), expected at least one"),
    (f"{DENSE}.variants[0].symbol", "", "manifest.tasks[0].variants[0].symbol is '', expected an identifier"),
    (f"{DENSE}.variants[0].symbol", "a-b", "manifest.tasks[0].variants[0].symbol is 'a-b'"),
    (f"{DENSE}.variants[0].symbol", "é", "manifest.tasks[0].variants[0].symbol is 'é'"),
    (f"{DENSE}.variants[0].symbol", "x\n", "manifest.tasks[0].variants[0].symbol is 'x\\n'"),
    (f"{RELU}.variants[0].symbol", "dense_1", "manifest.tasks[1].variants[0].symbol is 'dense_1', expected a symbol of its own"),
    (f"{DENSE}.variants[1].trace_sha256", "0" * 63, "manifest.tasks[0].variants[1].trace_sha256 is '0000"),
    (
        f"{DENSE}.variants[1].objectives",
        FASTER,
        "manifest.tasks[0].variants[0].objectives.latency_s is 1e-05, expected the least",
    ),
    (f"{DENSE}.variants[1].objectives", None, "manifest.tasks[0].variants[1].objectives is None, expected objectives for all"),
    (f"{RELU}.variants[0].latency_spread", 0.1, "manifest.tasks[1].variants[0].latency_spread is 0.1, expected null"),
]
PLAN = [
    ("plan.tensors[0].storage", "stack", "manifest.plan.tensors[0].storage is 'stack', expected one of input, constant, arena"),
    ("plan.tensors[0].offset", 1, "manifest.plan.tensors[0].offset is 1, expected the index of one of the model's 1 inputs"),
    (
        "plan.tensors[0].shape",
        [16],
        "manifest.plan.tensors[0] is float32 16, expected float32 1x16 as manifest.model.inputs[0]",
    ),
    ("plan.tensors[0].dtype", "int32", "manifest.plan.tensors[0] is int32 1x16, expected float32 1x16"),
    ("plan.tensors[1].offset", 32, "manifest.plan.tensors[1].offset is 32, expected an offset that is a multiple of 64"),
    ("plan.tensors[3].offset", 1088, "manifest.plan.tensors[3].offset is offset 1088 and length 1024, expected an end within"),
    ("plan.tensors[2].offset", 8, "manifest.plan.tensors[2].offset is 8, expected an offset that is a multiple of 64"),
    (
        "plan.tensors[4].offset",
        128,
        "manifest.plan.tensors[4].offset is offset 128 and length 64, expected an end within the 128",
    ),
    ("plan.tensors[4].dtype", "half", "manifest.plan.tensors[4].dtype is 'half'"),
    ("plan.tensors[4].shape", [2**62], "manifest.plan.tensors[4].shape is (4611686018427387904,), expected fewer than 2^63"),
    ("plan.arena_bytes", 64, "manifest.plan.tensors[4].offset is offset 64 and length 64"),
    ("plan.arena_bytes", 2**40, "manifest.plan.arena_bytes is 1099511627776, expected at most 4096"),
    ("plan.steps[0].task", 2, "manifest.plan.steps[0].task is 2, expected the index of one of 2 tasks"),
    ("plan.steps[0].task", 1, "manifest.plan.steps[0].arguments is (0, 1, 2), expected 2 arguments"),
    ("plan.steps[2].arguments", [4, 5, 0], "manifest.plan.steps[2].arguments is (4, 5, 0), expected 2 arguments"),
    ("plan.steps[0].arguments[0]", 6, "manifest.plan.steps[0].arguments[0] is 6, expected the index of one of 6 tensors"),
    (
        "plan.steps[0].arguments[0]",
        1,
        "manifest.plan.steps[0].arguments[0] is tensor 1 of float32 16x16, expected float32 1x16",
    ),
    ("plan.tensors[4].dtype", "int32", "manifest.plan.steps[1].arguments[2] is tensor 4 of int32 1x16, expected float32 1x16"),
    (
        "plan.steps[0].arguments[2]",
        0,
        "manifest.plan.steps[0].arguments[2] is tensor 0 in storage input, expected a tensor in the arena",
    ),
    (
        "plan.steps[1].arguments[2]",
        2,
        "manifest.plan.steps[1].arguments[2] is tensor 2, expected a range that does not overlap",
    ),
    ("plan.steps[0].layer", "", "manifest.plan.steps[0].layer is ''"),
    ("plan.steps[2].layer", "dense:0", "manifest.plan.steps[2].layer is 'dense:0', expected a name of its own, step 0"),
    ("plan.outputs", [], "manifest.plan.outputs is (), expected 1 tensors"),
    ("plan.outputs[0]", 6, "manifest.plan.outputs[0] is 6, expected the index"),
    (
        "plan.outputs[0]",
        1,
        "manifest.plan.outputs[0] is tensor 1 of float32 16x16, expected float32 1x16 as manifest.model.outputs[0]",
    ),
    (
        "plan.outputs[0]",
        2,
        "manifest.plan.outputs[0] is tensor 2, expected a tensor that an earlier step wrote and no later one",
    ),
    (
        "plan.steps[0].arguments[0]",
        5,
        "manifest.plan.steps[0].arguments[2] is tensor 2, expected a range that does not overlap",
    ),
    (
        "plan.steps[0].arguments[0]",
        4,
        "manifest.plan.steps[0].arguments[0] is tensor 4, expected a tensor that an earlier step wrote",
    ),
]
MEMBERS = [
    ("members[0].name", "kernels.dll", "manifest.members is ['kernels.dll', "),
    ("members[1].name", "kernels.so", "manifest.members[1].name is 'kernels.so', which manifest.members[0].name is too"),
    ("members[5].offset", 28673, "manifest.members[5] is 28673, expected an offset that is a multiple of 4096"),
    (
        "members[5].length",
        2049,
        "manifest.members[5] is offset 28672 and length 2049, expected an end within the 30720 bytes of the file",
    ),
    ("members[5].offset", 2**62, "manifest.members[5] is offset 4611686018427387904 and length 2048"),
    ("members[5].length", 2047, "the end of the last of manifest.members is 30719, expected the file's length of 30720"),
    ("members[0].length", 4097, "manifest.members[1].offset is 12288, expected at least 12289, where kernels.so ends"),
    ("members[0].offset", 0, "manifest.members[0].offset is 0, expected at least 64, where the manifest ends"),
    ("members[0].sha256", "0" * 65, "manifest.members[0].sha256 is '0000"),
    ("members[6]", {"name": "../up", "offset": 32768, "length": 0, "sha256": "0" * 64}, "manifest.members[6].name is '../up'"),
]


@pytest.mark.parametrize(("path", "value", "message"), MAIN + TASKS + PLAN + MEMBERS)
def test_one_wrong_value_is_refused_by_name(sealed: tuple[Manifest, int], path: str, value: object, message: str) -> None:
    with pytest.raises(BundleError, match=f"^{re.escape(message)}"):
        judge(sealed, put(path, value))


def test_the_tiny_manifest_passes(sealed: tuple[Manifest, int]) -> None:
    judge(sealed)


def test_members_must_not_reach_into_the_manifest(sealed: tuple[Manifest, int]) -> None:
    manifest, length = sealed
    check_manifest(manifest, length, 8192)
    with pytest.raises(BundleError, match=r"members\[0\]\.offset is 8192, expected at least 8193, where the manifest ends"):
        check_manifest(manifest, length, 8193)


def test_a_missing_member_is_named(sealed: tuple[Manifest, int]) -> None:
    with pytest.raises(BundleError, match=r"^manifest\.members is \[.*\], expected also weights\.bin"):
        judge(sealed, drop("members", 5))


def test_a_member_unknown_to_this_version_is_let_in(sealed: tuple[Manifest, int]) -> None:
    manifest, _ = sealed
    judge((manifest, 32768), put("members[6]", {"name": "NOTES.txt", "offset": 32768, "length": 0, "sha256": "0" * 64}))


@pytest.mark.parametrize("tensor", [0, 5], ids=["input", "arena"])
def test_a_model_may_have_several_outputs(sealed: tuple[Manifest, int], tensor: int) -> None:
    judge(sealed, *second_output("z", tensor))


def test_an_output_may_be_listed_twice(sealed: tuple[Manifest, int]) -> None:
    judge(sealed, *second_output("y", 5))


def test_two_outputs_of_one_name_are_refused(sealed: tuple[Manifest, int]) -> None:
    with pytest.raises(BundleError, match=r"^manifest\.model\.outputs\[1\]\.name is 'y', expected another name"):
        judge(sealed, *second_output("y", 0))


def test_a_model_without_steps_passes(sealed: tuple[Manifest, int]) -> None:
    judge(sealed, put("plan.steps", []), put("plan.outputs", [0]), put("tasks", []), put("plan.arena_bytes", 0), drop_arena)


def drop_arena(plain: dict[str, Any]) -> None:
    plain["plan"]["tensors"] = [tensor for tensor in plain["plan"]["tensors"] if tensor["storage"] != "arena"]


def test_a_view_of_written_bytes_may_be_read(sealed: tuple[Manifest, int]) -> None:
    """What a reshape becomes in a plan: a second tensor over the same bytes."""
    judge(sealed, put("plan.tensors[6]", arena(64, 1, 16)), put("plan.steps[2].arguments[0]", 6))


def test_a_view_of_two_tensors_side_by_side_may_be_read(sealed: tuple[Manifest, int]) -> None:
    """What a concatenation that copies nothing becomes."""
    wide = [arena(0, 2, 16), arena(128, 2, 16)]
    changes = [put(f"{RELU}.parameters[{i}].shape", [2, 16]) for i in (0, 1)]
    changes += [put(f"plan.tensors[{6 + i}]", tensor) for i, tensor in enumerate(wide)]
    changes += [put("plan.steps[2].arguments", [6, 7]), put("model.outputs[0].shape", [2, 16]), put("plan.outputs[0]", 7)]
    changes += [put("plan.arena_bytes", 256), put("selftest.output_offsets[0]", 0)]
    judge(sealed, *changes)


@pytest.mark.parametrize("half", [arena(64, 2, 16), arena(0, 3, 16)], ids=["nothing behind", "a hole at the end"])
def test_a_view_of_bytes_that_nothing_wrote_is_refused(sealed: tuple[Manifest, int], half: dict[str, Any]) -> None:
    shape = half["shape"]
    changes = [put(f"{RELU}.parameters[{i}].shape", shape) for i in (0, 1)]
    changes += [put("plan.tensors[6]", half), put("plan.tensors[7]", arena(256, *shape)), put("plan.steps[2].arguments", [6, 7])]
    changes += [put("model.outputs[0].shape", shape), put("plan.outputs[0]", 7), put("plan.arena_bytes", 512)]
    with pytest.raises(
        BundleError, match=r"^manifest\.plan\.steps\[2\]\.arguments\[0\] is tensor 6, expected a tensor that an earlier"
    ):
        judge(sealed, *changes)


def test_a_tensor_that_was_overwritten_is_refused(sealed: tuple[Manifest, int]) -> None:
    again = {"layer": "relu:1", "task": 1, "arguments": [2, 4]}  # tensor 2 shares its bytes with 5, which relu:0 wrote
    with pytest.raises(
        BundleError, match=r"^manifest\.plan\.steps\[3\]\.arguments\[0\] is tensor 2, expected a tensor that an earlier"
    ):
        judge(sealed, put("plan.steps[3]", again))


def test_steps_in_another_order_are_refused(sealed: tuple[Manifest, int]) -> None:
    with pytest.raises(
        BundleError, match=r"^manifest\.plan\.steps\[0\]\.arguments\[0\] is tensor 2, expected a tensor that an earlier"
    ):
        judge(sealed, lambda plain: plain["plan"]["steps"].reverse(), lambda plain: plain["plan"]["steps"].pop(0))


TRACE_CASES = [
    (b"\xff", "traces.json is not JSON in UTF-8"),
    (b"[" * 100_000, "traces.json is "),
    (b"[]", r"traces\.json is \[\], expected an object"),
    (b'{"00": "x"}', r"traces\.json\['00'\] is 'x', expected the text with this SHA-256"),
    (b'{"00": 1}', r"traces\.json\['00'\] is 1, expected the text"),
    (b"{}", r"manifest\.tasks\[0\]\.variants\[0\]\.trace_sha256 is .*, expected the digest of a trace in traces\.json"),
]


@pytest.mark.parametrize(("data", "message"), TRACE_CASES, ids=[repr(data[:12]) for data, _ in TRACE_CASES])
def test_traces_that_do_not_belong_to_the_variants_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=f"^{message}"):
        check_traces(tiny_manifest(), data)


def test_the_traces_of_the_variants_pass() -> None:
    check_traces(tiny_manifest(), memoryview(tiny_members()[TRACES]))
