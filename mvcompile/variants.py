"""Which variants a bundle gets: those of the fronts, and of them those that are worth keeping beside neighbours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from mvcompile import assemble
from mvcompile.build import build_library, make_plan
from mvcompile.bundle.interference import Interference, decode_interference, encode_interference
from mvcompile.bundle.schema import Manifest
from mvcompile.config import CompileConfig, ProfileConfig
from mvcompile.errors import BundleError, EnvironmentProblem, VerificationError
from mvcompile.forms import choose_forms, form_of, kernel, weight_bytes, with_forms
from mvcompile.measure.pool import PoolMeasurer
from mvcompile.measure.protocol import Subject
from mvcompile.profile.stage import Profiled, keep_of, levels_of, profile, restrict, why_not
from mvcompile.records import DiskStore
from mvcompile.tasks import Program
from mvcompile.tuning.fronts import ParetoSet, contenders, pareto_set, with_kept
from mvcompile.types import HostTarget, Record, Status, Verification, digest_json

REBUILDS = 3

Allowed = Callable[[Record], bool]
Choose = Callable[[Sequence[Record], Allowed], ParetoSet]
"""Keeps some of a task's records that are allowed."""


class Reporter(Protocol):
    """Who is told what happens: see `pipeline.Reporter`."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def note(self, text: str) -> None:
        """Something a person should know; the compilation goes on."""


@dataclass(slots=True, eq=False)
class Builder:
    """Selects, links and checks variants; what is wrong in a linked library is recorded as such, and the rest selected anew."""

    program: Program
    subjects: Sequence[Subject]
    target: HostTarget
    config: CompileConfig
    known: dict[str, list[Record]]
    store: DiskStore
    measurer: PoolMeasurer
    work: Path
    linked: int = 0
    forms: Sequence[str] | None = None
    """The further form of weights that each task may use; decided once, so that what is measured first can be kept later."""

    def build(self, choose: Choose) -> assemble.Built:
        """The model with the records that `choose` keeps of each task's allowed ones."""
        for _ in range(REBUILDS):
            sets = self._select(choose)
            _require_variants(self.program, sets)
            extended = with_forms(self.program, [{record.space for record in pareto.kept} for pareto in sets])
            kernels = [
                kernel(assemble.symbol(task, number), task, record.space, record.trace)
                for task, pareto in zip(extended.tasks, sets, strict=True)
                for number, record in enumerate(pareto.kept)
            ]
            library = self.work / f"kernels-{self.linked}.so"  # a new name: the checking process still holds the one before
            self.linked += 1
            try:
                build_library(library, kernels, self.target)
            except OSError as error:
                raise EnvironmentProblem(
                    f"the kernels cannot be linked: {error}; free disk space and run again to resume"
                ) from error
            checks, wrong = self._check(extended, sets, library)
            if not wrong:
                return assemble.Built(extended, make_plan(extended), sets, checks, library)
            self.store.append(wrong)
            for record in wrong:
                self.known[record.task_key].append(record)
        raise VerificationError(
            f"variants still differ from their reference after {REBUILDS} builds: see the records in {self.work}"
        )

    def _select(self, choose: Choose) -> list[ParetoSet]:
        """The variants of each task, which share one further form of a weight at most."""
        if self.forms is None:
            self.forms = self._choose_forms(choose)
        return self._with_forms(self.forms, choose)

    def _with_forms(self, forms: Sequence[str], choose: Choose) -> list[ParetoSet]:
        tasks = self.program.tasks
        return [choose(self.known[task.key], partial(_takes, form)) for task, form in zip(tasks, forms, strict=True)]

    def _choose_forms(self, choose: Choose) -> list[str]:
        """The forms for which there is room. A weight that no variant takes as it is leaves its room to others."""
        growth = self.config.tuning.weight_growth
        limit = growth * self.program.weight_bytes
        known = [self.known[task.key] for task in self.program.tasks]
        forms = choose_forms(self.program, known, growth)
        while True:
            growth += (limit - self._weight_bytes(forms, choose)) / max(self.program.weight_bytes, 1)
            more = choose_forms(self.program, known, growth)
            if more == forms or self._weight_bytes(more, choose) > limit:
                return forms
            forms = more

    def _weight_bytes(self, forms: Sequence[str], choose: Choose) -> int:
        return weight_bytes(self.program, [{record.space for record in each.kept} for each in self._with_forms(forms, choose)])

    def _check(
        self, extended: Program, sets: Sequence[ParetoSet], library: Path
    ) -> tuple[list[list[Verification]], list[Record]]:
        """A verification for each kept record, and new records for those that are wrong."""
        checks: list[list[Verification]] = []
        wrong: list[Record] = []
        for task, subject, pareto in zip(extended.tasks, self.subjects, sets, strict=True):
            symbols = [assemble.symbol(task, number) for number in range(len(pareto.kept))]
            outcomes = self.measurer.verify(subject, library, symbols, task.arguments)
            checks.append([outcome.verification for outcome in outcomes if outcome.verification is not None])
            wrong += [
                _rejected(record, outcome.status, outcome.message)
                for record, outcome in zip(pareto.kept, outcomes, strict=True)
                if outcome.status is not Status.OK
            ]
        return checks, wrong


def profiled_variants(
    builder: Builder,
    identity: assemble.Identity,
    expectation: assemble.Expectation,
    config: ProfileConfig | None,
    reporter: Reporter,
) -> tuple[assemble.Built, Interference | None]:
    """The model with the variants that are worth keeping, and what was measured of them beside neighbours.

    More candidates than are kept are built and compared in the running network; without `config`, or where nothing can be
    measured or chosen, the front alone decides."""
    variants = builder.config.tuning.variants
    if config is not None and (problem := why_not(sorted(os.sched_getaffinity(0)), config)) is not None:
        reporter.note(f"not profiled beside neighbours: {problem}")
        config = None
    if config is None:
        return builder.build(lambda records, allowed: pareto_set(records, variants, allowed)), None
    most = max(config.candidates, variants)
    wide = builder.build(lambda records, allowed: contenders(records, most, allowed))
    if all(len(pareto.kept) == 1 for pareto in wide.sets):
        return wide, None
    reporter.stage("profile")
    bundle = builder.work / "profiled.mvb"
    try:
        manifest = assemble.write(bundle, identity, builder.target, wide, expectation)
        found = _measured(bundle, manifest, config, variants, builder.work)
    finally:
        with suppress(OSError):
            bundle.unlink()
    kept = [[pareto.kept[i] for i in chosen] for pareto, chosen in zip(wide.sets, found.kept, strict=True)]
    if all(len(records) == len(pareto.kept) for records, pareto in zip(kept, wide.sets, strict=True)):
        return wide, found.interference
    digests = {record.trace_sha256 for records in kept for record in records}

    def choose(records: Sequence[Record], allowed: Allowed) -> ParetoSet:
        full = contenders(records, most, allowed)
        return with_kept(full, [record for record in full.kept if record.trace_sha256 in digests])

    built = builder.build(choose)
    indices = tuple(
        tuple(sorted(pareto.kept.index(record) for record in final.kept))
        for pareto, final in zip(wide.sets, built.sets, strict=True)
    )
    return built, restrict(found.interference, manifest, indices)


def _measured(bundle: Path, manifest: Manifest, config: ProfileConfig, variants: int, work: Path) -> Profiled:
    """The profile of `bundle`, measured once: the same bundle and options give the same answer when a compilation is resumed."""
    levels = [asdict(level) for level in levels_of(config, manifest.target.llc_bytes)]
    identity = [manifest.fingerprint, [asdict(member) for member in manifest.members], levels, asdict(config), variants]
    path = work / f"profile-{digest_json(identity)[:16]}.json"
    with suppress(OSError, BundleError):
        return Profiled(found := decode_interference(path.read_bytes(), manifest), keep_of(found, manifest, variants))
    measured = profile(bundle, config, variants)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_interference(measured.interference))
    temporary.replace(path)
    return measured


def _takes(form: str, record: Record) -> bool:
    return form_of(record.space) in ("", form)


def _require_variants(program: Program, sets: Sequence[ParetoSet]) -> None:
    for task, pareto in zip(program.tasks, sets, strict=True):
        if not pareto.kept:
            raise VerificationError(f"task {task.name} ({task.key}) has no schedule whose result is right; see its records")


def _rejected(record: Record, status: Status, message: str) -> Record:
    return Record(
        record.task_key, record.target_key, record.fingerprint, record.trace, record.space, status, message=message or "differs"
    )
