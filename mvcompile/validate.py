"""The gate for CI: is a bundle sound, does it fit this host, is every variant right, does it cover its fronts?

No timing, so it is deterministic on shared runners; no TVM, so it runs where bundles run.
"""

from __future__ import annotations

import math
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mvcompile import runtime
from mvcompile.bundle.check import check_traces
from mvcompile.bundle.interference import Interference, interference_of
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import TRACES, Manifest, Task
from mvcompile.errors import BundleError, UsageError
from mvcompile.tuning.fronts import hypervolume_ratio
from mvcompile.types import Objectives

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a release must reach; None is not asked for. Coverage and the tuned share are 0 to 1; `max_regret` is a task's best
    variant over the best candidate that was measured, at the worst level, at least 1."""

    min_coverage: float | None = None
    min_tuned: float | None = None
    max_regret: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_coverage", "min_tuned"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{name.replace('_', '-')} is {value}; give a share from 0 to 1")
        if self.max_regret is not None and not 1 <= self.max_regret < math.inf:
            raise UsageError(f"max-regret is {self.max_regret}; give a ratio of at least 1, such as 1.05")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked: `measured` against `threshold`, and what to do when it did not hold."""

    name: str
    subject: str
    passed: bool
    measured: str = ""
    threshold: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        parts = [f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {self.subject}"]
        parts += [f"{self.measured}"] if self.measured else []
        parts += [f"required: {self.threshold}"] if self.threshold else []
        parts += [self.remedy] if self.remedy and not self.passed else []
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one bundle, in the order they were made."""

    path: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check held."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values for programs."""
        return {"path": self.path, "passed": self.passed, "checks": [asdict(check) for check in self.checks]}


def validate(path: str | os.PathLike[str], thresholds: Thresholds | None = None) -> Report:
    """Checks the bundle at `path`; a check that fails is in the report. Raises UsageError when there is no such file."""
    thresholds = thresholds or Thresholds()
    checks: list[Check] = []
    for part in (_integrity, _fits_host, lambda p: _figures(p, thresholds), _selftests):
        try:
            checks += part(path)
        except BundleError as error:
            checks.append(Check(_title(part), Path(path).name, passed=False, measured=str(error), remedy="compile it again here"))
            break
    return Report(os.fspath(path), tuple(checks))


def _title(part: Callable[..., object]) -> str:
    return {"_integrity": "integrity", "_fits_host": "target", "_selftests": "self-test"}.get(part.__name__, "figures")


def _integrity(path: str | os.PathLike[str]) -> Iterator[Check]:
    with open_bundle(path, verify=True) as bundle:
        check_traces(bundle.manifest, bundle.member(TRACES))
        found = interference_of(bundle)
        yield Check("integrity", bundle.path.name, True, f"format version {bundle.manifest.format_version}, all digests agree")
        if found is not None:
            yield Check("interference", f"{len(found.levels)} levels", True, found.source)


def _fits_host(path: str | os.PathLike[str]) -> Iterator[Check]:
    with runtime.load(path, share_cores=True, verify=False) as session:
        target = session.manifest.target
        yield Check("target", f"{target.arch}, {target.cpu}", True, "this host has what the kernels need")


def _figures(path: str | os.PathLike[str], thresholds: Thresholds) -> Iterator[Check]:
    """Verification results and coverage, from the manifest; ratios are computed again from the objective vectors."""
    with open_bundle(path, verify=False) as bundle:
        manifest, found = bundle.manifest, interference_of(bundle)
    ratios = [_ratio(task) for task in manifest.tasks]
    calls = [sum(step.task == index for step in manifest.plan.steps) for index in range(len(manifest.tasks))]
    unverified = [
        variant.symbol
        for task in manifest.tasks
        for variant in task.variants
        if not math.isfinite(variant.verification.max_abs_error)
    ]
    count = sum(len(task.variants) for task in manifest.tasks)
    yield Check(
        "verified",
        f"{count} variants",
        not unverified,
        ", ".join(unverified),
        "",
        "compile again: these differ from their reference",
    )
    for task, ratio in zip(manifest.tasks, ratios, strict=True):
        if abs(ratio - task.hypervolume_ratio) > ROUNDING:
            yield Check("coverage", task.name, False, f"{ratio:.6f} by its vectors", f"{task.hypervolume_ratio:.6f} as stated",
                        "the manifest contradicts itself: compile again")  # fmt: skip
    yield from _coverage_checks(manifest, ratios, calls, thresholds)
    if thresholds.max_regret is not None:
        yield from _regret_checks(manifest, found, thresholds.max_regret)


def _ratio(task: Task) -> float:
    kept: list[Objectives] = [variant.objectives for variant in task.variants if variant.objectives is not None]
    return hypervolume_ratio(kept, task.front)


def _coverage_checks(manifest: Manifest, ratios: list[float], calls: list[int], thresholds: Thresholds) -> Iterator[Check]:
    if thresholds.min_coverage is not None:
        wanted = f"at least {thresholds.min_coverage:g}"
        for step in manifest.plan.steps:
            ratio = ratios[step.task]
            if ratio < thresholds.min_coverage:
                kept = len(manifest.tasks[step.task].variants)
                yield Check("coverage", f"layer {step.layer}", False, f"{ratio:.4f} with {kept} variants", wanted,
                            f"keep more variants (--variants {kept + 1} or more), or lower --min-coverage")  # fmt: skip
        total = sum(task.time_share for task in manifest.tasks)
        weighted = sum(t.time_share * r for t, r in zip(manifest.tasks, ratios, strict=True)) / total if total else 1.0
        yield Check("coverage", "the model, weighted by time", weighted >= thresholds.min_coverage, f"{weighted:.4f}", wanted,
                    "keep more variants (--variants)")  # fmt: skip
    if thresholds.min_tuned is not None:
        share = manifest.coverage.tuned_share
        slack = sorted(
            ((t.time_share, t.name, n) for t, n in zip(manifest.tasks, calls, strict=True) if not t.tuned), reverse=True
        )
        named = ", ".join(f"{name} ({part:.1%}, {n} layers)" for part, name, n in slack[:3])
        yield Check("tuned", "share of the model's time in tuned layers", share >= thresholds.min_tuned, f"{share:.4f}",
                    f"at least {thresholds.min_tuned:g}", f"tune longer (--budget); not tuned: {named}")  # fmt: skip


def _regret_checks(manifest: Manifest, found: Interference | None, most: float) -> Iterator[Check]:
    if found is None or not found.profiles:
        yield Check("regret", "the model", False, "not profiled beside neighbours", f"at most {most:g}",
                    "run `mvcompile profile`, or compile without --no-profile")  # fmt: skip
        return
    for profile in found.profiles:
        for task, regret, compared in zip(manifest.tasks, profile.regret, profile.compared, strict=True):
            if regret > most:
                yield Check("regret", f"{task.name}, {profile.cores} core(s)", False, f"{regret:.4f} of {compared} candidates",
                            f"at most {most:g}", "keep more variants (--variants), or profile longer")  # fmt: skip
        worst = max(profile.regret, default=1.0)
        yield Check("regret", f"worst task, {profile.cores} core(s)", worst <= most, f"{worst:.4f}", f"at most {most:g}")


def _selftests(path: str | os.PathLike[str]) -> Iterator[Check]:
    with runtime.load(path, share_cores=True, verify=False) as session:
        session.select_all(0)
        result = runtime.selftest(session)
        yield _selftest_check("variant 0 everywhere", result)
        switched = failed = 0
        for switch in runtime.selftest_switches(session):
            switched += 1
            if not switch.result.passed:
                failed += 1
                yield _selftest_check(f"layer {switch.layer}, variant {switch.variant}", switch.result)
        yield Check("self-test", f"{switched} single-layer switches", failed == 0, f"{failed} differ from the reference")


def _selftest_check(subject: str, result: runtime.SelfTestResult) -> Check:
    worst = max(result.outputs, key=lambda output: (output.errors, output.max_abs_error))
    measured = f"output {worst.name}: {worst.errors} of {worst.elements} elements off, largest error {worst.max_abs_error:.3g}"
    tolerance = f"|a-b| <= {result.atol:g} + {result.rtol:g} |b| of {result.reference}"
    return Check("self-test", subject, result.passed, measured, tolerance, "compile again; do not ship this bundle")


def write_junit(report: Report, path: str | os.PathLike[str]) -> None:
    """The report as JUnit XML, which CI systems show. Raises UsageError when the file cannot be written."""
    failures = sum(not check.passed for check in report.checks)
    suite = ElementTree.Element("testsuite", name="mvcompile validate", tests=str(len(report.checks)), failures=str(failures))
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=f"mvcompile.{check.name}", name=_xml(check.subject))
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", message=_xml(f"{check.measured}; required: {check.threshold}"))
            failure.text = _xml(str(check))
    try:
        ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror}; name another file with --junit") from error


def _xml(text: str) -> str:
    """Without the characters XML 1.0 has no way to write."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
