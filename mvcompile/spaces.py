"""The door to `search_spaces/`: which schedules a task may have."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm.s_tir import SBlockRealize
from tvm.s_tir.schedule import Schedule, Trace

from mvcompile import traces
from mvcompile.algorithms import ALGORITHMS, Programs
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.measure.protocol import Candidate
from mvcompile.types import HostTarget

DEFAULT_SPACE = "default"
STRUCTURED_SPACES = ("dense", "depthwise", "batched")
GENERIC_SPACE = "generic"


@cache
def _module(name: str) -> ModuleType:
    """A file of search_spaces/, installed inside the package or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_search_spaces", here.parent / "search_spaces"):
        path = folder / f"{name}.py"
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"mvcompile_search_spaces.{name}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
    raise EnvironmentProblem(f"search space {name!r} is missing from the installation ({here}); reinstall mvcompile")


def default_candidate(module: tvm.IRModule, target: HostTarget) -> Candidate:
    """The schedule a task has before any search: the middle of its structured space, else the first fallback."""
    for space in STRUCTURED_SPACES if _has_blocks(module) else ():
        design = next(iter(_module(space).programs(Schedule(module), target)), None)
        if design is not None:
            return Candidate(_decided(design.trace, lambda options: (len(options) // 2,))[0], space)
    return fallback_candidates(module, target)[0]


def fallback_candidates(module: tvm.IRModule, target: HostTarget) -> list[Candidate]:
    """What a task can do with in place of its default, best first: the generic default, and the program as it is.

    A program that is not made of blocks (`scatter`), or that TVM's primitives fail on, has only the latter.
    """
    unscheduled = Candidate(traces.dump(Schedule(module).trace), DEFAULT_SPACE)
    if not _has_blocks(module):
        return [unscheduled]
    try:
        schedule = _module(DEFAULT_SPACE).schedule(Schedule(module), target)
    except Exception:  # a failed check inside a primitive is no ScheduleError, and leaves the schedule in an unknown state
        return [unscheduled]
    return [Candidate(traces.dump(schedule.trace), DEFAULT_SPACE), unscheduled]


@dataclass(frozen=True, slots=True)
class OwnSpace:
    """A user's search space: what candidates of it are called, the file, and its function `programs`."""

    name: str
    path: Path
    programs: Callable[[Schedule, HostTarget], Iterable[Schedule]]


def load_space(path: str | os.PathLike[str]) -> OwnSpace:
    """The search space in the file at `path` (docs/search-spaces.md says what it holds); its name is the file's stem.

    Raises UsageError for a file that cannot be read or run, that has no function `programs`, or that has a built-in space's name.
    """
    path = Path(path)
    name, code = path.stem, f"mvcompile_search_spaces.own.{path.stem}"
    if name in (DEFAULT_SPACE, GENERIC_SPACE, *STRUCTURED_SPACES, *ALGORITHMS):
        raise UsageError(f"search space {path} has the name of a built-in space, {name!r}: rename the file")
    spec = importlib.util.spec_from_file_location(code, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"search space {path} is no Python file: name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[code] = module  # dataclasses look for their module there
    try:
        # Not by the loader, which leaves its cache beside the user's file, and takes one that is as old as the file.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except Exception as error:  # whatever a user's code raises
        raise UsageError(f"search space {path} cannot be loaded: {type(error).__name__}: {error}") from error
    programs = getattr(module, "programs", None)
    if not callable(programs):
        raise UsageError(f"search space {path} has no function programs(sch, target): see docs/search-spaces.md")
    return OwnSpace(name, path, programs)


def own_candidates(module: tvm.IRModule, target: HostTarget, space: OwnSpace) -> list[Candidate]:
    """Every member of a user's space for this task. Raises UsageError if its code does."""
    if not _has_blocks(module):
        return []
    found: list[Candidate] = []
    try:
        for design in space.programs(Schedule(module), target):
            found += [Candidate(text, space.name) for text in _decided(design.trace)]
    except Exception as error:  # whatever a user's code raises
        reason = " ".join(str(error).split()[:60]) or "no message"
        raise UsageError(
            f"search space {space.path} failed on a program of blocks {block_names(module)}: {type(error).__name__}: {reason}; "
            "correct it and run again to resume"
        ) from error
    return list(dict.fromkeys(found))


def block_names(module: tvm.IRModule) -> list[str]:
    """The blocks of a program, in order: what tells a search space which kind of task it is."""
    sch = Schedule(module)
    return [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]


def structured_candidates(module: tvm.IRModule, target: HostTarget) -> list[Candidate]:
    """Every member of the structured spaces that know this kind of task, most promising designs first; empty when none does."""
    found: list[Candidate] = []
    if not _has_blocks(module):
        return found
    programs = Programs(module)
    for space in (*STRUCTURED_SPACES, *programs.alternatives()):
        for design in _module(_file(space)).programs(Schedule(programs.program(space)), target):
            found += [Candidate(text, space) for text in _decided(design.trace)]
    return list(dict.fromkeys(found))


def _file(space: str) -> str:
    """The file that describes `space`. All tile sizes of Winograd's algorithm have the same one."""
    return "winograd" if space in ALGORITHMS else space


def _has_blocks(module: tvm.IRModule) -> bool:
    """Whether `main` is a root block around blocks with loops, which is what schedules are about."""
    body = module["main"].body
    return isinstance(body, SBlockRealize) and str(body.block.name_hint) == "root"


def _decided(trace: Trace, choose: Callable[[list[Any]], Iterable[int]] = lambda options: range(len(options))) -> list[str]:
    """A design's texts with every combination of its decisions, of those that `choose` returns for a decision's options.

    They are what `traces.dump` gives, which takes 15 ms and is called once.
    """
    instructions, _ = json.loads(traces.dump(trace))
    places = [place for place, each in enumerate(instructions) if each[0] == "SampleCategorical"]
    chosen = itertools.product(*(choose(instructions[place][2][0]) for place in places))
    return [traces.text(instructions, [list(each) for each in zip(places, decisions, strict=True)]) for decisions in chosen]
