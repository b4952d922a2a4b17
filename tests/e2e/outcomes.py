"""What becomes of a bundle that may be altered, used in a forked child, so that a crash or a hang ends nothing else.

Used is: opened, described, loaded, run with every layer on its first and on its last variant, self-tested on both and on every
single-layer switch, and run while it adapts to each level of its profile.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mvcompile.bundle.inspect import describe, to_json
from mvcompile.bundle.interference import INTERFERENCE
from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import SELFTEST
from mvcompile.errors import BundleError, EnvironmentProblem, UsageError
from mvcompile.runtime import Session, load, selftest, selftest_switches

RTOL, ATOL = 1e-3, 1e-5
LIMIT_S = 60.0


class Expected:
    """Inputs and outputs of the original bundle's self-test, in the model's order. Nothing of its code is loaded: a forked child
    inherits what its parent has loaded."""

    def __init__(self, path: Path) -> None:
        with open_bundle(path) as bundle:
            test, model = bundle.manifest.selftest, bundle.manifest.model
            block = np.frombuffer(bytes(bundle.member(SELFTEST)), np.uint8)

        def arrays(offsets: tuple[int, ...], specs: Any) -> list[Any]:
            return [block[o : o + s.nbytes].view(s.dtype).reshape(s.shape) for o, s in zip(offsets, specs, strict=True)]

        self.inputs, self.outputs = arrays(test.input_offsets, model.inputs), arrays(test.output_offsets, model.outputs)


def _close(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a.shape == b.shape and bool((np.abs(a - b) <= ATOL + RTOL * np.abs(b)).all())
        for a, b in zip(found, expected, strict=True)
    )


def use(path: Path, expected: Expected, core: int) -> tuple[str, str]:
    """What happens when the bundle is used: `refused`, `right`, `caught` (its own test finds it wrong) or `silent` (it does
    not). Any other error than one of a bundle or of the host is for the caller."""
    try:
        with open_bundle(path) as bundle:
            profile_error = _show(bundle)
        with load(path, cores=[core]) as session:
            outcome = _run(session, expected)
    except (BundleError, EnvironmentProblem) as error:
        return "refused", f"{type(error).__name__}: {error}"
    return ("refused", profile_error) if profile_error and outcome[0] == "right" else outcome


def _show(bundle: Bundle) -> str:
    """What is wrong with the profile, of which a bundle that shows everything else can run without it; empty if nothing is."""
    try:
        describe(bundle)
        json.dumps(to_json(bundle))
    except BundleError as error:
        if INTERFERENCE not in str(error):
            raise
        return f"{type(error).__name__}: {error}"
    return ""


def _run(session: Session, expected: Expected) -> tuple[str, str]:
    inputs = {spec.name: array for spec, array in zip(session.inputs, expected.inputs, strict=False)}

    def right() -> bool:
        return _close(list(session.run(inputs).values()), expected.outputs)

    wrong = []
    last = [len(variants) - 1 for variants in session.variants.values()]
    for choice, selection in (("on its first variants", 0), ("on its last variants", last)):
        session.select_all(selection)
        here, passed = right(), selftest(session).passed
        if not here:
            wrong.append((choice, passed))
    switches = [switch for switch in selftest_switches(session) if not switch.result.passed]
    adapted = [right() for _ in _adaptations(session)]
    if not all(adapted):
        wrong.append(("while it adapts", not switches and all(passed for _, passed in wrong)))
    if any(passed for _, passed in wrong):
        return "silent", f"wrong {wrong[0][0]}, and its self-test passes"
    if wrong:
        return "caught", f"wrong {wrong[0][0]}, and its self-test says so"
    return "right", f"{len(switches)} switches fail its self-test" if switches else ""


def _adaptations(session: Session) -> Iterator[None]:
    """The session as each policy sets it at each level, and as it finds the level itself; nothing if its profile is refused."""
    for policy, monitor in (("adaptive", "manual"), ("kind", "manual"), ("adaptive", "residual")):
        try:
            session.adapt(policy, monitor)
        except (BundleError, UsageError):  # no profile, or none for one core, or without times
            return
        for level in session.stats().level_s:
            if monitor == "manual":
                session.set_level(level)
            yield


def watch(path: Path, expected: Expected, core: int) -> tuple[str, str]:
    """The outcome of `use` in a forked child, or `crash`, `hang` or `exception`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            outcome = use(path, expected, core)
        except BaseException:
            outcome = "exception", traceback.format_exc()[-2000:]
        with suppress(OSError):
            os.write(writing, json.dumps(outcome).encode()[:60000])
        os._exit(0)
    os.close(writing)
    answer, deadline = b"", time.monotonic() + LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reading, 65536)
        if not chunk:
            break
        answer += chunk
    else:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.waitpid(child, 0)
        return "hang", f"killed after {LIMIT_S:.0f} s"
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "crash", signal.Signals(os.WTERMSIG(status)).name
    kind, detail = json.loads(answer)
    return kind, detail
