"""Every command as a person or a script meets it: exit codes, what is printed where, odd names."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mvcompile import __version__, pipeline, runtime, zoo
from mvcompile.bundle.schema import HEADER_BYTES
from mvcompile.records import DiskStore
from mvcompile.testing.bundles import put, reseal

Command = Callable[..., Any]
OK, GATE, USAGE, ENVIRONMENT = 0, 1, 2, 3


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An input for the small convolutional network."""
    path = tmp_path / "image.npy"
    np.save(path, np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32))
    return path


@pytest.fixture
def altered(tiny_bundle: Path, tmp_path: Path) -> Callable[[Callable[[bytes], bytes]], Path]:
    """A copy of the bundle with its bytes passed through a function."""

    def make(change: Callable[[bytes], bytes]) -> Path:
        path = tmp_path / "altered.mvb"
        path.write_bytes(change(tiny_bundle.read_bytes()))
        return path

    return make


# The command itself


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["compile", "--help"], ["zoo", "get", "--help"]])
def test_help_and_version_go_to_standard_output(mvcompile: Command, arguments: list[str]) -> None:
    done = mvcompile(*arguments)
    assert (done.code, done.err) == (OK, "")
    assert done.out.startswith(f"mvcompile {__version__}" if arguments == ["--version"] else "usage: mvcompile")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["tune"],
        ["compile"],
        ["compile", "m.onnx"],
        ["compile", "m.onnx", "-o", "m.mvb", "--trials", "many"],
        ["compile", "m.onnx", "-o", "m.mvb", "--quiet", "--json"],
        ["inspect"],
        ["inspect", "m.mvb", "--colour"],
        ["validate", "m.mvb", "--min-coverage", "most"],
        ["run", "m.mvb"],
        ["zoo"],
        ["zoo", "get"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_parsed_is_bad_usage(mvcompile: Command, arguments: list[str]) -> None:
    done = mvcompile(*arguments)
    assert (done.code, done.out) == (USAGE, "")
    assert done.err.startswith("usage: mvcompile")
    assert "error: " in done.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), ENVIRONMENT, "interrupted"),
        (MemoryError(), ENVIRONMENT, "out of memory"),
        (RuntimeError("a defect"), ENVIRONMENT, "internal error (RuntimeError: a defect); please report it"),
    ],
)
def test_what_is_not_foreseen_is_no_failed_gate(
    mvcompile: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "compile_model", fail)
    done = mvcompile("compile", "m.onnx", "-o", "m.mvb")
    assert (done.code, done.out) == (code, "")
    assert text in done.err
    assert ("Traceback" in done.err) == isinstance(error, RuntimeError)


def test_a_reader_that_goes_away_is_no_error(process: Command, tiny_bundle: Path) -> None:
    done = process(
        f"'{sys.executable}' -m mvcompile.cli inspect '{tiny_bundle}' --json | head -n 1", prefix=["bash", "-o", "pipefail", "-c"]
    )
    assert (done.code, done.out, done.err) == (OK, "{\n", "")


# compile


def test_compile_says_what_it_made(tiny_bundle: Path, tiny_model: Path, tmp_path: Path, mvcompile: Command) -> None:
    output = tmp_path / "again.mvb"
    done = mvcompile("compile", tiny_model, "-o", output, "--budget", 0, "--work-dir", f"{tiny_bundle}.work")
    assert done.code == OK
    assert done.out.startswith(f"{output}: 11 layers, 0 with a choice of variants; 0 trials")
    stages = [line.split("] ")[1] for line in done.err.splitlines()]
    assert stages == ["import", "prepare", "tune", "build", "verify"]
    assert output.read_bytes() == tiny_bundle.read_bytes()  # the same inputs and records


def test_quiet_prints_nothing_and_odd_file_names_work(
    process: Command, small_model: Path, tmp_path: Path, mvcompile: Command
) -> None:
    folder = tmp_path / "a folder: größe=1"
    folder.mkdir()
    shutil.copy(small_model, folder / "-o=mødel 1.onnx")
    done = process(
        "compile", "--quiet", "-o", "-out=1 é.mvb"[1:], "--shape", "b:2=x:3x4", "--budget=0", "--", "-o=mødel 1.onnx", cwd=folder
    )
    assert (done.code, done.out, done.err) == (OK, "", "")
    assert sorted(path.name for path in folder.iterdir()) == ["-o=mødel 1.onnx", "out=1 é.mvb", "out=1 é.mvb.work"]
    with runtime.load(folder / "out=1 é.mvb") as session:
        assert session.manifest.model.name == "-o=mødel 1"
    assert mvcompile("inspect", folder / "out=1 é.mvb").code == OK


@pytest.fixture(scope="session")
def small_compiled(process: Command, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The small model compiled by the command in JSON mode: the bundle and how the command ended."""
    path = tmp_path_factory.mktemp("compiled") / "-small.mvb"
    done = process("compile", small_model, f"--output={path.name}", "--shape=b:2=x:3x4", "--trials=4", "--json", cwd=path.parent)
    return path, done


def test_json_mode_is_one_object_a_line(small_compiled: tuple[Path, Any]) -> None:
    path, done = small_compiled
    assert (done.code, done.err) == (OK, "")
    events = [json.loads(line) for line in done.out.splitlines()]
    stages = " ".join(each["name"] for each in events if each["event"] == "stage")
    assert stages.replace(" profile", "") == "import prepare tune build verify"  # four timings decide whether there is a choice
    trials = [each["trials"] for each in events if each["event"] == "progress"]
    assert (events[-1]["event"], events[-1]["path"], events[-1]["trials"]) == ("result", path.name, trials[-1])
    assert 1 <= trials[-1] <= 4


@pytest.fixture
def models(small_model: Path, tmp_path: Path) -> dict[str, Path]:
    """Files that cannot be compiled as they are."""
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "garbage.onnx").write_bytes(b"no model at all")
    (tmp_path / "empty.onnx").write_bytes(b"")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["h"], name="first"),
        helper.make_node("Fancy", ["h"], ["y"], domain="example"),
    ]
    graph = helper.make_graph(nodes, "odd", value[:1], value[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), tmp_path / "operators.onnx")
    paths = {name: tmp_path / f"{name}.onnx" for name in ("missing", "folder", "garbage", "empty", "operators")}
    return {**paths, "small": small_model}


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("missing", [], "missing.onnx"),
        ("folder", [], "folder.onnx"),
        ("garbage", [], "garbage.onnx"),
        ("empty", [], "empty.onnx"),
        ("operators", [], "RandomNormalLike"),
        ("operators", [], "Fancy"),
        ("small", [], "pass --shape"),
        ("small", ["--shape", "b:2=x:3x5"], "the model fixes it to 4"),
        ("small", ["--shape", "c:3x4"], "no input 'c'"),
        ("small", ["--shape", "3x4"], "expected NAME:1x3x224x224"),
        ("small", ["--shape", "b:2=x:3x4", "--shape", "b:2=x:2x4"], "two shapes"),
        ("small", ["--budget", "soon"], "budget 'soon' is not a duration"),
        ("small", ["--budget=-1"], "budget '-1' is not a duration"),
        ("small", ["--trials", "-1"], "trials is -1"),
        ("small", ["--variants", "0"], "variants is 0"),
        ("small", ["--variants", "33"], "variants is 33"),
        ("small", ["--seed", "-1"], "seed is -1"),
    ],
)  # fmt: skip
def test_compile_refuses_what_it_cannot_use(
    mvcompile: Command, models: dict[str, Path], tmp_path: Path, model: str, options: list[str], text: str
) -> None:
    output = tmp_path / "out.mvb"
    done = mvcompile("compile", models[model], "-o", output, *options)
    assert (done.code, done.out) == (USAGE, "")
    assert text in done.err
    assert "Traceback" not in done.err
    assert not output.exists()


@pytest.mark.parametrize(
    ("output", "text"),
    [("missing/out.mvb", "create"), ("folder", "is a folder"), ("model.onnx", "the model"), ("link.onnx", "the model")],
)
def test_compile_refuses_outputs_it_must_not_write(
    mvcompile: Command, small_model: Path, tmp_path: Path, output: str, text: str
) -> None:
    (tmp_path / "folder").mkdir()
    model = shutil.copy(small_model, tmp_path / "model.onnx")
    os.link(model, tmp_path / "link.onnx")
    done = mvcompile("compile", model, "-o", tmp_path / output, "--shape", "b:2=x:3x4", "--budget", 0)
    assert (done.code, done.out) == (USAGE, "")
    assert text in done.err
    assert Path(model).read_bytes() == small_model.read_bytes()


def test_compile_refuses_a_work_directory_it_cannot_use(mvcompile: Command, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    arguments = ["compile", small_model, "-o", tmp_path / "out.mvb", "--shape", "b:2=x:3x4", "--budget", 0, "--quiet"]
    done = mvcompile(*arguments, "--work-dir", tmp_path / "file")
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert str(tmp_path / "file") in done.err
    with DiskStore(tmp_path / "busy"):
        done = mvcompile(*arguments, "--work-dir", tmp_path / "busy")
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert "already open" in done.err


@pytest.mark.parametrize("package", ["tvm", "onnx", "onnxruntime", "xgboost"])
def test_without_the_compiler_the_command_says_what_to_install(process: Command, small_model: Path, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from mvcompile.cli import main; sys.exit(main(sys.argv[1:]))"
    prefix = [sys.executable, "-c", program]
    done = process(
        "compile", small_model, "-o", small_model.with_suffix(".mvb"), "--trials=9", "--shape=b:2=x:3x4", prefix=prefix
    )
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert package in done.err
    assert "pip install 'mvcompile[compile]'" in done.err
    assert "Traceback" not in done.err


# Bundles that cannot be used, by every command that reads one


def truncated(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def newer(data: bytes) -> bytes:
    return data[:8] + (2).to_bytes(4, "little") + data[12:]


def foreign(data: bytes) -> bytes:
    return reseal(data, put("target.arch", "sparc64"))


def other_abi(data: bytes) -> bytes:
    return reseal(data, put("tvm_ffi", "0.9.9"))


def no_bundle(data: bytes) -> bytes:
    return b"#!/bin/sh\n" + data[10:]


def empty(_data: bytes) -> bytes:
    return b""


READERS: dict[str, list[str]] = {"inspect": [], "validate": [], "run": ["--output", "out.npz"]}


@pytest.mark.parametrize("reader", READERS)
def test_a_bundle_that_is_no_file_is_bad_usage(mvcompile: Command, tmp_path: Path, reader: str) -> None:
    for path in (tmp_path / "missing.mvb", tmp_path):
        done = mvcompile(reader, path, *READERS[reader])
        assert (done.code, done.out) == (USAGE, "")
        assert str(path) in done.err


@pytest.mark.parametrize("reader", ["inspect", "run"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (truncated, "truncated"),
        (flipped, "SHA-256 of member"),
        (newer, "format version 2"),
        (no_bundle, "no bundle"),
        (empty, "empty"),
    ],
)  # fmt: skip
def test_a_damaged_or_newer_bundle_is_refused(
    mvcompile: Command, altered: Callable[[Callable[[bytes], bytes]], Path], tmp_path: Path, reader: str, change: Any, text: str
) -> None:
    path, output = altered(change), tmp_path / "out.npz"
    done = mvcompile(reader, path, *(["--output", output] if reader == "run" else []))
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert text in done.err
    assert str(path) in done.err
    assert not output.exists()


@pytest.mark.parametrize(("change", "text"), [(foreign, "sparc64"), (other_abi, "0.9.9")])
def test_a_bundle_for_another_host_is_shown_but_does_not_run(
    mvcompile: Command, altered: Callable[[Callable[[bytes], bytes]], Path], image: Path, change: Any, text: str
) -> None:
    path = altered(change)
    assert text in mvcompile("inspect", path, "--json").out
    done = mvcompile("run", path, "--input", f"image={image}", "--output", path.with_suffix(".npz"))
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert text in done.err
    done = mvcompile("validate", path)
    assert done.code == GATE
    assert f"FAIL target: {path.name}; " in done.out


# inspect


def test_inspect_shows_the_same_to_people_and_programs(mvcompile: Command, tiny_bundle: Path) -> None:
    done = mvcompile("inspect", tiny_bundle)
    assert (done.code, done.err) == (OK, "")
    shown = mvcompile("inspect", tiny_bundle, "--json")
    assert (shown.code, shown.err) == (OK, "")
    manifest = json.loads(shown.out)["manifest"]
    assert manifest["model"]["name"] == "tiny-conv"
    assert len(manifest["plan"]["steps"]) == 11
    for expected in (
        "tiny-conv",
        *(step["layer"] for step in manifest["plan"]["steps"]),
        *(m["name"] for m in manifest["members"]),
    ):
        assert expected in done.out


# validate


def test_validate_passes_a_sound_bundle(mvcompile: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    done = mvcompile("validate", tiny_bundle, "--min-coverage", "1", "--junit", junit)
    assert (done.code, done.err) == (OK, "")
    assert {line[:5] for line in done.out.splitlines()} == {"ok   "}
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), int(suite.get("tests", "0"))) == ("0", len(done.out.splitlines()))


def test_validate_names_the_threshold_that_was_not_met(mvcompile: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    done = mvcompile("validate", tiny_bundle, "--min-tuned", "0.5", "--json", "--junit", junit)
    assert done.code == GATE
    assert "1 of " in done.err
    report = json.loads(done.out)
    assert not report["passed"]
    (failed,) = [check for check in report["checks"] if not check["passed"]]
    assert (failed["name"], failed["measured"], failed["threshold"]) == ("tuned", "0.0000", "at least 0.5")
    assert "--budget" in failed["remedy"]
    (case,) = [case for case in ElementTree.parse(junit).getroot() if case.find("failure") is not None]
    assert case.get("classname") == "mvcompile.tuned"


@pytest.mark.parametrize("change", [truncated, flipped, newer, no_bundle])
def test_validate_fails_a_damaged_bundle(mvcompile: Command, altered: Callable[..., Path], change: Any) -> None:
    done = mvcompile("validate", altered(change))
    assert done.code == GATE
    assert done.out.startswith("FAIL integrity: altered.mvb; ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--min-coverage", "1.5"], "min-coverage is 1.5"),
        (["--min-tuned", "nan"], "min-tuned is nan"),
        (["--junit", "missing/report.xml"], "missing/report.xml"),
    ],
)
def test_validate_refuses_options_it_cannot_use(mvcompile: Command, tiny_bundle: Path, options: list[str], text: str) -> None:
    done = mvcompile("validate", tiny_bundle, *options)
    assert (done.code, done.out) == (USAGE, "")
    assert text in done.err


# run


def test_run_gives_what_the_session_gives(mvcompile: Command, tiny_bundle: Path, image: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    done = mvcompile("run", tiny_bundle, "--input", f"image={image}", "--output", output)
    assert (done.code, done.out, done.err) == (OK, "logits: float32 1x10\n", "")
    with runtime.load(tiny_bundle) as session, np.load(output) as archive:
        np.testing.assert_array_equal(archive["logits"], session.run({"image": np.load(image)})["logits"])


def test_run_takes_several_inputs_with_odd_names_and_a_selection(
    mvcompile: Command, small_compiled: tuple[Path, Any], tmp_path: Path
) -> None:
    bundle, _ = small_compiled
    with runtime.load(bundle) as session:
        (layer,) = session.layers
        last = len(session.variants[layer]) - 1
    a, b = (np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in ((0, (3, 8)), (1, (3, 4))))
    np.save(tmp_path / "a=1.npy", a)
    np.save(tmp_path / "b:2=x.npy", b)
    inputs = ["--input", f"a=1={tmp_path / 'a=1.npy'}", "--input", f"b:2=x={tmp_path / 'b:2=x.npy'}"]
    output = tmp_path / "-out=1.npz"
    done = mvcompile("run", bundle, *inputs, "--output", output, "--select", f"{layer}={last}")
    assert (done.code, done.out, done.err) == (OK, "out/y=0: float32 3x4\n", "")
    with runtime.load(bundle) as session, np.load(output) as archive:
        session.select(layer, last)
        (name,) = archive.files
        np.testing.assert_array_equal(archive[name], session.run({"a=1": a, "b:2=x": b})["out/y=0"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "input 'image' is missing"),
        (["--input", "image"], "'image' does not name an input"),
        (["--input", "picture=image.npy"], "'picture=image.npy' does not name an input"),
        (["--input", "image=missing.npy"], "cannot read missing.npy"),
        (["--input", "image=text.npy"], "text.npy is no array"),
        (["--input", "image=several.npz"], "several.npz holds several arrays"),
        (["--input", "image=objects.npy"], "objects.npy is no array"),
        (["--input", "image=double.npy"], "float64 [1, 3, 32, 32], expected float32"),
        (["--input", "image=flat.npy"], "float32 [3072], expected float32 [1, 3, 32, 32]"),
        (["--input", "image=image.npy", "--select", "conv=0"], "'conv=0' does not name"),
        (["--input", "image=image.npy", "--select", "transpose.0=1"], "transpose.0"),
        (["--input", "image=image.npy", "--select", "transpose.0=fast"], "'fast' is not the number of a variant"),
        (["--input", "image=image.npy", "--threads", "0"], "threads"),
        (["--input", "image=image.npy", "--threads", "100000"], "100000"),
    ],
)
def test_run_refuses_what_it_cannot_use(
    mvcompile: Command,
    tiny_bundle: Path,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(image.parent)
    Path("text.npy").write_text("no array")
    np.savez("several.npz", a=np.zeros(1), b=np.zeros(1))
    np.save("objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.save("double.npy", np.load(image).astype(np.float64))
    np.save("flat.npy", np.load(image).reshape(-1))
    done = mvcompile("run", tiny_bundle, "--output", "out.npz", *options)
    assert (done.code, done.out) == (USAGE, "")
    assert text in done.err
    assert "Traceback" not in done.err
    assert not Path("out.npz").exists()


@pytest.mark.parametrize("output", ["missing/out.npz", "."])
def test_run_says_where_it_cannot_write(mvcompile: Command, tiny_bundle: Path, image: Path, tmp_path: Path, output: str) -> None:
    done = mvcompile("run", tiny_bundle, "--input", f"image={image}", "--output", tmp_path / output)
    assert (done.code, done.out) == (USAGE, "")
    assert "cannot write" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["image.npy"]


# zoo


def test_zoo_lists_and_writes_networks(mvcompile: Command, tmp_path: Path) -> None:
    done = mvcompile("zoo", "list")
    assert (done.code, done.err) == (OK, "")
    assert [line.split()[0] for line in done.out.splitlines()] == [entry.name for entry in zoo.entries()]
    done = mvcompile("zoo", "get", "tiny-conv", "tiny-transformer", "-d", tmp_path / "new folder")
    assert (done.code, done.err) == (OK, "")
    for line in done.out.splitlines():
        onnx.checker.check_model(onnx.load(line))
    assert len(done.out.splitlines()) == 2


def test_zoo_refuses_what_it_does_not_have_and_where_it_cannot_write(mvcompile: Command, tmp_path: Path) -> None:
    done = mvcompile("zoo", "get", "lenet", "-d", tmp_path)
    assert (done.code, done.out) == (USAGE, "")
    assert "no network 'lenet'; it has: alexnet" in done.err
    (tmp_path / "file").touch()
    done = mvcompile("zoo", "get", "tiny-conv", "-d", tmp_path / "file")
    assert (done.code, done.out) == (USAGE, "")
    assert "cannot write" in done.err


def test_headers_are_as_long_as_the_tests_assume(tiny_bundle: Path) -> None:
    assert tiny_bundle.read_bytes()[HEADER_BYTES : HEADER_BYTES + 1] == b"{"
