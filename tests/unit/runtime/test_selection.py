from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import BundleError, UsageError
from mvcompile.runtime import Session, load
from mvcompile.runtime.driver import DRIVER
from mvcompile.runtime.native import Kernel, Library, ensure_tvm_runtime
from mvcompile.runtime.program import Kernels, Program
from mvcompile.runtime.steps import NativeSteps
from mvcompile.testing.kernels import tiny_inputs, tiny_reference, tiny_weights


def test_what_there_is_to_select(session: Session) -> None:
    assert session.layers == ("dense0", "dense1", "merge")
    assert {layer: [one.symbol for one in found] for layer, found in session.variants.items()} == {
        "dense0": ["dense_v0", "dense_v1"],
        "dense1": ["dense_v0", "dense_v1"],
        "merge": ["merge_v0"],
    }
    first, second = session.variants["dense0"]
    assert (first.index, second.index) == (0, 1)
    assert first.objectives is not None
    assert second.objectives is not None
    assert first.objectives.latency_s < second.objectives.latency_s
    assert session.variants["merge"][0].objectives is None


def test_every_way_to_select(session: Session) -> None:
    assert session.selection == (0, 0, 0)
    session.select("dense1", 1)
    assert session.selection == (0, 1, 0)
    session.select_all({"dense0": np.int64(1)})
    assert session.selection == (1, 1, 0)
    session.select_all([0, 1, 0])
    assert session.selection == (0, 1, 0)
    session.select_all(np.array([1, 0, 0]))
    assert session.selection == (1, 0, 0)
    session.select_all(1)  # merge has one variant only
    assert session.selection == (1, 1, 0)
    session.select_all(0)
    assert session.selection == (0, 0, 0)


def test_wrong_selections_change_nothing(session: Session) -> None:
    session.select_all([1, 0, 0])
    single: list[tuple[object, object, str]] = [
        ("dense9", 0, "there is no layer 'dense9': did you mean 'dense.'"),
        (0, 0, "there is no layer 0"),
        ("dense0", 2, r"layer 'dense0' has no variant 2: it has 2, 0 to 1 \(session.variants\)"),
        ("dense0", -1, "no variant -1"),
        ("dense0", True, "no variant True"),
        ("dense0", 0.0, "no variant 0.0"),
    ]
    for layer, variant, message in single:
        with pytest.raises(UsageError, match=message):
            session.select(layer, variant)  # type: ignore[arg-type]
    several: list[tuple[object, str]] = [
        ({"dense1": 1, "merge": 1}, "layer 'merge' has no variant 1"),
        ([1, 1], "selection has 2 variants, the model has 3 layers"),
        ([1, 1, 1], "layer 'merge' has no variant 1"),
        (2, "no layer has a variant 2: the most any has is 2, 0 to 1"),
        (-1, "no layer has a variant -1"),
        ("110", "selection is '110', expected a mapping"),
        (None, "selection is None"),
        (True, "selection is True"),
    ]
    for selection, message in several:
        with pytest.raises(UsageError, match=message):
            session.select_all(selection)  # type: ignore[arg-type]
    assert session.selection == (1, 0, 0)


def program_of(bundle: Path, kernels: Kernels, native: bool) -> Program:
    """The program of the bundle with other kernels."""
    with open_bundle(bundle) as opened:
        ensure_tvm_runtime(opened.member("libtvm_runtime.so"))
        driver = Library(opened.member("kernels.so")).function(DRIVER)
        assert driver is not None
        return Program(opened.manifest, kernels, memoryview(bytearray(opened.member("weights.bin"))), driver if native else None)


@pytest.mark.parametrize("native", [True, False])
def test_a_run_under_way_takes_up_a_selection_at_its_next_step(bundle: Path, native: bool) -> None:
    called = []

    def kernel(name: str, then: Callable[[], None] = lambda: None) -> Kernel:
        def call(*arguments: object) -> None:
            called.append(name)
            then()

        return tvm_ffi.convert_func(call)

    dense = (kernel("dense_v0", lambda: program.select(1, 1)), kernel("dense_v1"))
    program = program_of(bundle, (dense, (kernel("merge_v0"),)), native)
    program.run(list(tiny_inputs(1).values()))
    assert called == ["dense_v0", "dense_v1", "merge_v0"]
    assert program.selected() == (0, 1, 0)


@pytest.mark.parametrize("native", [True, False])
def test_steps_after_one_that_failed_are_not_run(bundle: Path, native: bool) -> None:
    called = []

    def fail(*arguments: object) -> None:
        called.append("dense")
        if len(called) > 1:
            raise ValueError("out of luck")

    dense, merge = tvm_ffi.convert_func(fail), tvm_ffi.convert_func(lambda *arguments: called.append("merge"))
    program = program_of(bundle, ((dense, dense), (merge,)), native)
    with pytest.raises(BundleError, match="the kernel of layer 'dense1' failed: out of luck") as caught:
        program.run(list(tiny_inputs(1).values()))
    assert isinstance(caught.value.__cause__, ValueError)
    assert "merge" not in called


def test_selecting_while_runs_are_under_way_never_gives_a_wrong_output(doubling: Path, two_cores: list[int]) -> None:
    inputs = tiny_inputs(6)
    possible = [tiny_reference(inputs, scales)["y"] for scales in itertools.product((1.0, 2.0), (1.0, 2.0))]
    stop = threading.Event()

    def hammer(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            session.select(f"dense{random.integers(2)}", int(random.integers(2)))
            session.select_all(int(random.integers(2)))

    with load(doubling, cores=two_cores) as session:
        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            outputs = [session.run(inputs)["y"] for _ in range(20)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    seen = [[np.allclose(output, one, rtol=1e-4, atol=1e-5) for one in possible] for output in outputs]
    assert all(any(matches) for matches in seen)


def test_weights_are_used_where_they_are_mapped(bundle: Path) -> None:
    with load(bundle) as session:
        mapped = np.frombuffer(session.member("weights.bin"), np.uint8)
        steps = session._program._steps
        assert isinstance(steps, NativeSteps)
        tensors = [argument for arguments in steps._arguments for argument in arguments if argument is not None]
        begin, end = mapped.__array_interface__["data"][0], mapped.__array_interface__["data"][0] + mapped.size
        inside = [tensor for tensor in tensors if begin <= tensor.data_ptr() < end]
        assert len(inside) == len(tiny_weights())
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
