from __future__ import annotations

import gc
import itertools
import signal
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mvcompile.bundle.schema import Manifest
from mvcompile.errors import BundleError, InputError
from mvcompile.runtime import Session, load
from mvcompile.runtime.memory import address
from mvcompile.testing.kernels import ROWS, WIDTH, Array, tiny_inputs, tiny_reference, write_kernel_bundle


def assert_close(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def aligned_copy(array: Array, skew: int = 0) -> Array:
    """A C-contiguous copy that starts `skew` bytes after a multiple of 64."""
    block = np.zeros(array.nbytes + 128, np.uint8)
    begin = -address(block) % 64 + skew
    copy = block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def strided_copy(array: Array) -> Array:
    wide = np.zeros((array.shape[0], 2 * array.shape[1]), array.dtype)
    wide[:, ::2] = array
    return wide[:, ::2]


def read_only(array: Array) -> Array:
    copy = aligned_copy(array)
    copy.flags.writeable = False
    return copy


LAYOUTS = {
    "aligned": aligned_copy,
    "read-only": read_only,
    "4 bytes off": lambda array: aligned_copy(array, 4),
    "32 bytes off": lambda array: aligned_copy(array, 32),
    "columns first": np.asfortranarray,
    "every other column": strided_copy,
    "backwards": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "one row for all": lambda array: np.broadcast_to(array[:1], array.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_in_any_layout_give_the_right_outputs(session: Session, layout: str) -> None:
    inputs = {name: LAYOUTS[layout](array) for name, array in tiny_inputs(1).items()}
    assert_close(session.run(inputs), tiny_reference(inputs))


def test_an_odd_address_is_copied(session: Session) -> None:
    inputs = tiny_inputs(1)
    block = np.zeros(inputs["x"].nbytes + 65, np.uint8)
    begin = -address(block) % 64 + 1
    x = block[begin : begin + inputs["x"].nbytes].view(np.float32).reshape(inputs["x"].shape)
    x[...] = inputs["x"]
    assert_close(session.run({**inputs, "x": x}), tiny_reference(inputs))


def test_an_aligned_input_is_used_in_place(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: aligned_copy(array) for name, array in tiny_inputs(1).items()}
    monkeypatch.setattr("mvcompile.runtime.program.np.copyto", None)
    assert_close(session.run(inputs), tiny_reference(inputs))
    with pytest.raises(TypeError, match="NoneType"):
        session.run({**inputs, "x": aligned_copy(inputs["x"], 4)})


def test_the_buffers_of_the_session_can_be_filled_and_passed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        inputs = tiny_inputs(seed)
        for name, buffer in session.input_buffers.items():
            buffer[...] = inputs[name]
        with monkeypatch.context() as patch:
            patch.setattr("mvcompile.runtime.memory.bindable", None)
            assert_close(session.run(session.input_buffers), tiny_reference(inputs))
        aligned = {name: aligned_copy(array) for name, array in tiny_inputs(9).items()}  # used in place once, then no more
        assert_close(session.run(aligned), tiny_reference(aligned))


def test_inputs_are_let_go_after_the_run(session: Session) -> None:
    inputs = {name: aligned_copy(array) for name, array in tiny_inputs(1).items()}
    gone = weakref.ref(inputs["x"])
    session.run(inputs)
    del inputs
    gc.collect()
    session.run(session.input_buffers)  # the worker has dropped what it was called with
    assert gone() is None


def test_read_only_inputs_with_a_numpy_that_does_not_lend_them(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mvcompile.runtime.memory._VERSIONED_DLPACK", False)
    for copy in (aligned_copy, read_only):
        inputs = {name: copy(array) for name, array in tiny_inputs(1).items()}
        assert_close(session.run(inputs), tiny_reference(inputs))


def test_copied_weights_give_the_same_outputs(bundle: Path) -> None:
    with load(bundle, copy_weights=True) as session:
        inputs = tiny_inputs(0)
        assert_close(session.run(inputs), tiny_reference(inputs))


@pytest.mark.parametrize("selection", list(itertools.product((0, 1), (0, 1), (0,))))
def test_each_selection_runs_its_variants(doubling: Path, selection: tuple[int, ...]) -> None:
    inputs = tiny_inputs(2)
    with load(doubling) as session:
        session.select_all(selection)
        assert session.selection == selection
        assert_close(session.run(inputs), tiny_reference(inputs, (1.0 + selection[0], 1.0 + selection[1])))


def test_parallel_loops_on_two_cores(bundle: Path, two_cores: list[int]) -> None:
    with load(bundle, cores=two_cores) as session:
        session.select_all(1)
        for seed in range(200):
            inputs = tiny_inputs(seed)
            assert_close(session.run(inputs), tiny_reference(inputs))


def test_outputs_belong_to_the_caller(session: Session) -> None:
    first = session.run(tiny_inputs(3))
    kept = {name: array.copy() for name, array in first.items()}
    session.run(tiny_inputs(4))
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_outputs_made_ahead_are_given_out_once(session: Session) -> None:
    outputs = [session.run(tiny_inputs(seed)) for seed in range(40)]
    for seed, one in enumerate(outputs):
        assert_close(one, tiny_reference(tiny_inputs(seed)))
    assert len({address(one["y"]) for one in outputs}) == 40


def test_outputs_go_where_the_caller_says(session: Session) -> None:
    block = np.zeros((2, ROWS, WIDTH), np.float32)
    out = {"hidden": block[1], "y": block[0]}
    for inputs in (tiny_inputs(5), session.input_buffers):
        block[...] = 0
        outputs = session.run(inputs, out=out)
        assert_close(outputs, tiny_reference(inputs))
        assert outputs["y"] is out["y"]
        assert outputs["hidden"] is out["hidden"]


def test_outputs_that_cannot_be_written_are_refused(session: Session) -> None:
    y, hidden = (np.zeros((ROWS, WIDTH), np.float32) for _ in range(2))
    fixed = hidden.copy()
    fixed.flags.writeable = False
    wrong: list[tuple[object, str]] = [
        ([y, hidden], "out is a list, expected a mapping from output names to arrays: the model's outputs are 'y'"),
        ({"y": y}, "output 'hidden' is missing"),
        ({"y": y, "hidden": hidden, "z": y}, "there is no output 'z'"),
        ({"y": y, "hidden": hidden.astype(np.float64)}, r"output 'hidden' is float64 \[8, 16\], expected float32 \[8, 16\]"),
        ({"y": y[:, :8], "hidden": hidden}, r"output 'y' is float32 \[8, 8\], expected"),
        ({"y": y, "hidden": strided_copy(hidden)}, "output 'hidden' is not C-contiguous"),
        ({"y": y, "hidden": fixed}, "output 'hidden' is read-only"),
    ]
    for out, message in wrong:
        with pytest.raises(InputError, match=message):
            session.run(tiny_inputs(1), out=out)  # type: ignore[arg-type]
    assert not y.any()


def test_outputs_that_are_inputs_or_constants(tmp_path: Path) -> None:
    def pass_through(manifest: Manifest) -> Manifest:
        x, gate = manifest.model.inputs
        outputs = (replace(x, name="same"), replace(gate, name="gate"), replace(x, name="w0", shape=(WIDTH, WIDTH)))
        plan = replace(manifest.plan, outputs=(0, 1, 2))
        offsets = manifest.selftest.input_offsets
        selftest = replace(manifest.selftest, output_offsets=(offsets[0], offsets[1], 0))
        return replace(manifest, model=replace(manifest.model, outputs=outputs), plan=plan, selftest=selftest)

    path = tmp_path / "pass.mvb"
    write_kernel_bundle(path, change=pass_through)
    inputs = {name: strided_copy(array) for name, array in tiny_inputs(5).items()}
    in_place = {name: aligned_copy(array) for name, array in tiny_inputs(6).items()}
    with load(path) as session:
        for given in (inputs, in_place, inputs):
            outputs = session.run(given)
            np.testing.assert_array_equal(outputs["same"], given["x"])
            np.testing.assert_array_equal(outputs["gate"], given["gate"])
            assert outputs["w0"].shape == (WIDTH, WIDTH)
            assert not np.shares_memory(outputs["same"], given["x"])


def test_a_plan_without_steps(tmp_path: Path) -> None:
    def no_steps(manifest: Manifest) -> Manifest:
        x = manifest.model.inputs[0]
        plan = replace(manifest.plan, steps=(), outputs=(0,), tensors=manifest.plan.tensors[:1], arena_bytes=0)
        selftest = replace(manifest.selftest, output_offsets=manifest.selftest.input_offsets[:1])
        model = replace(manifest.model, outputs=(replace(x, name="same"),))
        return replace(manifest, model=model, plan=plan, tasks=(), selftest=selftest)

    path = tmp_path / "nothing.mvb"
    write_kernel_bundle(path, change=no_steps)
    inputs = tiny_inputs(5)
    with load(path) as session:
        assert (session.layers, session.selection) == ((), ())
        session.select_all(0)
        np.testing.assert_array_equal(session.run(inputs)["same"], inputs["x"])


def test_wrong_inputs_are_refused_by_name(session: Session) -> None:
    good = tiny_inputs(1)
    x, gate = good["x"], good["gate"]
    cases: list[tuple[object, str]] = [
        ({}, r"input 'x' is missing: the model's inputs are 'x' \(float32 \[8, 16\]\), 'gate' \(bool \[8, 16\]\)"),
        ({"x": x}, "input 'gate' is missing"),
        ({**good, "z": x}, "there is no input 'z': the model's inputs are 'x'"),
        ({**good, "x": x.astype(np.float64)}, r"input 'x' is float64 \[8, 16\], expected float32 \[8, 16\]"),
        ({**good, "x": x.astype(">f4")}, r"input 'x' is >f4 \[8, 16\], expected float32"),
        ({**good, "gate": gate.astype(np.uint8)}, r"input 'gate' is uint8 \[8, 16\], expected bool"),
        ({**good, "x": x[:4]}, r"input 'x' is float32 \[4, 16\], expected float32 \[8, 16\]"),
        ({**good, "x": x.reshape(-1)}, r"input 'x' is float32 \[128\]"),
        ({**good, "x": x.tolist()}, "input 'x' is a list, expected a numpy array of float32"),
        ({**good, "x": None}, "input 'x' is a NoneType"),
        ([x, gate], "inputs is a list, expected a mapping"),
        (None, "inputs is a NoneType"),
    ]
    for inputs, message in cases:
        with pytest.raises(InputError, match=message):
            session.run(inputs)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message):
            session.run_profiled(inputs)  # type: ignore[arg-type]
    assert_close(session.run(good), tiny_reference(good))


def test_a_kernel_that_refuses_its_arguments_is_an_error_that_names_the_layer(tmp_path: Path) -> None:
    def misshapen(manifest: Manifest) -> Manifest:
        tensors = [replace(one, shape=(ROWS, 2 * WIDTH)) if one.shape == (WIDTH, WIDTH) else one for one in manifest.plan.tensors]
        dense, merge = manifest.tasks
        parameters = (dense.parameters[0], replace(dense.parameters[1], shape=(ROWS, 2 * WIDTH)), *dense.parameters[2:])
        return replace(
            manifest, tasks=(replace(dense, parameters=parameters), merge), plan=replace(manifest.plan, tensors=tuple(tensors))
        )

    path = tmp_path / "misshapen.mvb"
    write_kernel_bundle(path, change=misshapen)
    with load(path) as session:
        for run in (session.run, session.run_profiled):
            with pytest.raises(BundleError, match=r"the kernel of layer 'dense0' failed: .*dense_v0"):
                run(tiny_inputs(1))


def test_profile_has_a_time_for_every_layer(session: Session) -> None:
    seconds = session.run_profiled(tiny_inputs(1))
    assert len(seconds) == len(session.layers)
    assert all(0 < second < 60 for second in seconds)


def test_runs_from_several_threads_take_turns(session: Session) -> None:
    wrong: list[int] = []

    def run(seed: int) -> None:
        inputs = tiny_inputs(seed)
        expected = tiny_reference(inputs)["y"]
        for _ in range(200):
            if not np.allclose(session.run(inputs)["y"], expected, rtol=1e-4, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interrupted_run_does_not_answer_the_next_one(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    slow = threading.Event()
    original = session._program._take

    def take(index: int, array: Array) -> bool:
        slow.wait(10)
        return original(index, array)

    monkeypatch.setattr(session._program, "_take", take)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupt):
            session.run(tiny_inputs(1))
    finally:
        signal.signal(signal.SIGALRM, before)
        slow.set()
    inputs = tiny_inputs(2)
    assert_close(session.run(inputs), tiny_reference(inputs))
