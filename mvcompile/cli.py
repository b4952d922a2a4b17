"""The `mvcompile` command: parse, call the public door, print, exit.

Exit codes: 0 ok, 1 a gate failed, 2 bad usage, 3 environment or internal error (and interrupted).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mvcompile import __version__
from mvcompile.errors import EnvironmentProblem, GateError, MvcompileError, UsageError

INTERRUPTED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; the only place where errors become text."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.call(options)
        sys.stdout.flush()
    except MvcompileError as error:
        print(f"mvcompile: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `mvcompile inspect ... | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("mvcompile: interrupted; what was measured is kept, and the same command resumes", file=sys.stderr)
        return INTERRUPTED
    except MemoryError:
        print("mvcompile: out of memory; free some, or use a machine with more", file=sys.stderr)
        return EnvironmentProblem.exit_code
    except Exception as error:  # anything else is a defect of ours, and must not look like a failed gate
        traceback.print_exc()
        print(
            f"mvcompile: internal error ({type(error).__name__}: {error}); please report it with the lines above", file=sys.stderr
        )
        return EnvironmentProblem.exit_code
    return 0


def command() -> int:
    """The process of `main`. What is done is not interrupted any more: unloading the compiler's libraries takes a while, in which
    Ctrl-C would show tracebacks under a bundle that was written."""
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvcompile",
        description="Compile ONNX models into multi-version kernels, and run them.",
        epilog="exit codes: 0 ok, 1 a gate failed, 2 bad usage, 3 environment or internal error",
    )
    parser.add_argument("--version", action="version", version=f"mvcompile {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_compile(commands)
    _add_profile(commands)
    _add_calibrate(commands)
    _add_inspect(commands)
    _add_validate(commands)
    _add_run(commands)
    _add_zoo(commands)
    return parser


def _command(commands: Any, name: str, text: str, call: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(call=call)
    return parser


def _add_compile(commands: Any) -> None:
    parser = _command(commands, "compile", "compile an ONNX model into a bundle", _compile)
    parser.add_argument("model", metavar="MODEL.onnx")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.mvb")
    parser.add_argument(
        "--budget", metavar="TIME", help="tuning time, such as 90s or 10m; 0 for default schedules (default: 10m)"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="stop after N candidates")
    parser.add_argument(
        "--weight-growth",
        type=float,
        default=1.5,
        metavar="FACTOR",
        help="how large weights may get by further copies for faster algorithms (default: 1.5 times; 1: no copies)",
    )
    parser.add_argument("--variants", type=int, default=5, metavar="K", help="at most K variants per layer (default: 5)")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME:1x3x224x224", help="shape of an input; repeatable")
    parser.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="FILE.py",
        help="search this space too (docs/search-spaces.md); repeatable",
    )
    parser.add_argument("--work-dir", metavar="DIR", help="records and references (default: FILE.mvb.work)")
    parser.add_argument("--no-profile", action="store_true", help="do not measure the variants beside neighbours")
    _add_profile_options(parser, "--profile-budget")
    parser.add_argument("--name", help="the model's name in the bundle (default: the file's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default: 0)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print nothing but errors")
    shown.add_argument("--json", action="store_true", help="progress and result as JSON lines on standard output")


def _add_profile_options(parser: argparse.ArgumentParser, budget: str) -> None:
    parser.add_argument(
        budget, dest="profile_budget", metavar="TIME", help="time to measure variants beside neighbours (default: 60s)"
    )
    parser.add_argument(
        "--level",
        action="append",
        default=[],
        metavar="NAME:DIAL=VALUE,...",
        help="an interference level, such as half:resident=8M,read=4G (default: llc, read and write); repeatable",
    )
    parser.add_argument(
        "--cores", action="append", default=[], type=int, metavar="N", help="profile on N cores (default: 1); repeatable"
    )
    parser.add_argument(
        "--host",
        metavar="HOST.json",
        help="what `mvcompile calibrate` found: default levels for the cache as seen, and the same neighbour",
    )


def _profile_config(options: argparse.Namespace) -> Any:
    from mvcompile.config import DEFAULT_PROFILE_S, ProfileConfig, parse_duration
    from mvcompile.measure.levels import parse_level
    from mvcompile.profile.place import read_host

    host = None if options.host is None else read_host(options.host)
    budget = DEFAULT_PROFILE_S if options.profile_budget is None else parse_duration(options.profile_budget)
    return ProfileConfig(budget, tuple(map(parse_level, options.level)), tuple(options.cores) or (1,), host=host)


def _compile(options: argparse.Namespace) -> None:
    try:
        from mvcompile import pipeline, screen
        from mvcompile.frontend.shapes import parse_shape_option
    except ImportError as error:
        raise EnvironmentProblem(f"compiling needs {error.name}: pip install 'mvcompile[compile]'") from error
    from mvcompile.config import CompileConfig, TuningConfig, parse_duration

    budget = None if options.budget is None else parse_duration(options.budget)
    tuning = TuningConfig(budget, options.trials, options.variants, options.seed, weight_growth=options.weight_growth)
    shapes: dict[str, tuple[int, ...]] = {}
    for text in options.shape:
        name, shape = parse_shape_option(text)
        if shapes.setdefault(name, shape) != shape:
            raise UsageError(f"--shape gives input {name!r} two shapes; give it once")
    profile = None if options.no_profile else _profile_config(options)
    config = CompileConfig(tuning, shapes, options.work_dir, options.name, tuple(options.space), profile)
    lines = screen.JsonLines()
    reporter: pipeline.Reporter
    if options.quiet:
        reporter = pipeline.Silent()
    elif options.json:
        reporter = lines
    else:
        reporter = screen.Bar(tuning.seconds, tuning.trials) if sys.stderr.isatty() else screen.Lines()
    result = pipeline.compile_model(options.model, options.output, config, reporter=reporter)
    coverage = result.manifest.coverage
    if options.json:
        lines.event(
            "result",
            path=str(result.path),
            trials=result.trials,
            tuning_s=result.tuning_s,
            max_abs_error=result.max_abs_error,
            hypervolume_ratio=coverage.hypervolume_ratio,
            tuned_share=coverage.tuned_share,
        )
    elif not options.quiet:
        several = sum(len(result.manifest.tasks[step.task].variants) > 1 for step in result.manifest.plan.steps)
        print(
            f"{result.path}: {len(result.manifest.plan.steps)} layers, {several} with a choice of variants; "
            f"{result.trials} trials, {coverage.tuned_share:.0%} of the time in tuned layers; "
            f"largest error against the reference {result.max_abs_error:.3g}"
        )


def _add_profile(commands: Any) -> None:
    parser = _command(commands, "profile", "measure a bundle's variants beside neighbours on this host", _profile)
    parser.add_argument("bundle", metavar="FILE.mvb")
    parser.add_argument("-o", "--output", metavar="OUT.mvb", help="write the bundle with its profile here (default: in place)")
    _add_profile_options(parser, "--budget")
    parser.add_argument("--json", action="store_true", help="for programs: the profile as JSON")


def _profile(options: argparse.Namespace) -> None:
    try:
        from mvcompile.profile import command, report
    except ImportError as error:
        raise EnvironmentProblem(f"profiling needs {error.name}: pip install 'mvcompile[compile]'") from error

    output = options.output or options.bundle
    manifest, found = command.profile_bundle(options.bundle, output, _profile_config(options))
    print(json.dumps(report.to_json(found), indent=1) if options.json else report.describe(found, manifest), end="\n")


def _add_calibrate(commands: Any) -> None:
    parser = _command(
        commands, "calibrate", "measure this host: caches, memory, noise, and what a neighbour does to a probe", _calibrate
    )
    parser.add_argument(
        "-o", "--output", default="host-profile.json", metavar="FILE.json", help="where to write it (default: host-profile.json)"
    )
    parser.add_argument("--budget", default="60s", metavar="TIME", help="time to take, such as 30s or 2m (default: 60s)")
    parser.add_argument(
        "--bundle",
        metavar="FILE.mvb",
        help="fit the model from hardware counters to the levels of this bundle's profile too, in half as long again",
    )
    parser.add_argument("--json", action="store_true", help="for programs: the profile as JSON on standard output too")


def _calibrate(options: argparse.Namespace) -> None:
    try:
        from mvcompile import screen
        from mvcompile.calibrate import calibrate
        from mvcompile.target import detect_target
    except ImportError as error:
        raise EnvironmentProblem(f"calibrating needs {error.name}: pip install 'mvcompile[compile]'") from error
    from mvcompile.config import parse_duration
    from mvcompile.host_profile import to_json, write_host_profile
    from mvcompile.measure.host_report import describe

    found = calibrate(detect_target(), parse_duration(options.budget), bundle=options.bundle, stage=screen.Lines().stage)
    write_host_profile(options.output, found)
    print(to_json(found) if options.json else describe(found) + f"written to {options.output}\n", end="")


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "show what a bundle holds", _inspect)
    parser.add_argument("bundle", metavar="FILE.mvb")
    parser.add_argument("--json", action="store_true", help="for programs: the manifest as JSON")


def _inspect(options: argparse.Namespace) -> None:
    from mvcompile.bundle.inspect import describe, to_json
    from mvcompile.bundle.reader import open_bundle

    with open_bundle(options.bundle) as bundle:
        print(json.dumps(to_json(bundle), indent=1) if options.json else describe(bundle), end="\n" if options.json else "")


def _add_validate(commands: Any) -> None:
    parser = _command(commands, "validate", "check a bundle as a release gate, without timing anything", _validate)
    parser.add_argument("bundle", metavar="FILE.mvb")
    parser.add_argument(
        "--min-coverage", type=float, metavar="SHARE", help="hypervolume of kept variants over the measured front"
    )
    parser.add_argument("--min-tuned", type=float, metavar="SHARE", help="share of the model's time in tuned layers")
    parser.add_argument(
        "--max-regret",
        type=float,
        metavar="RATIO",
        help="best variant over the best candidate that was measured, of any task at any level",
    )
    parser.add_argument("--json", action="store_true", help="for programs: every check as JSON")
    parser.add_argument("--junit", metavar="FILE", help="write the checks as JUnit XML")


def _validate(options: argparse.Namespace) -> None:
    from mvcompile.validate import Thresholds, validate, write_junit

    report = validate(options.bundle, Thresholds(options.min_coverage, options.min_tuned, options.max_regret))
    if options.junit:
        write_junit(report, options.junit)
    print(json.dumps(report.to_json(), indent=1) if options.json else "\n".join(str(check) for check in report.checks))
    if not report.passed:
        failed = sum(not check.passed for check in report.checks)
        raise GateError(f"{failed} of {len(report.checks)} checks of {options.bundle} failed")


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", "run a bundle on arrays from .npy files", _run)
    parser.add_argument("bundle", metavar="FILE.mvb")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="an input; repeatable")
    parser.add_argument("--output", required=True, metavar="OUT.npz")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="cores to run on (default: 1)")
    parser.add_argument("--select", action="append", default=[], metavar="LAYER=VARIANT", help="variant of a layer; repeatable")


def _run(options: argparse.Namespace) -> None:
    from mvcompile import arrays, runtime

    with runtime.load(options.bundle, threads=options.threads) as session:
        names = [spec.name for spec in session.inputs]
        inputs = {}
        for text in options.input:
            name, path = _assignment(text, names)
            inputs[name] = arrays.read(path)
        for text in options.select:
            layer, variant = _assignment(text, session.layers)
            if not variant.isdecimal():
                raise UsageError(f"--select {text!r}: {variant!r} is not the number of a variant")
            session.select(layer, int(variant))
        outputs = session.run(inputs)
        arrays.write(options.output, outputs)
    for name, value in outputs.items():
        print(f"{name}: {value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}")


def _assignment(text: str, names: Sequence[str]) -> tuple[str, str]:
    """Splits `NAME=VALUE` where the name is a known one: both sides may have further equals signs."""
    splits = [(text[:i], text[i + 1 :]) for i, letter in enumerate(text) if letter == "="]
    for name, value in splits:
        if name in names:
            return name, value
    known = ", ".join(map(repr, names)) or "none"
    raise UsageError(f"{text!r} does not name an input or layer of this bundle (NAME=VALUE; known: {known})")


def _add_zoo(commands: Any) -> None:
    parser = _command(commands, "zoo", "list the networks this project is judged on, or write one as ONNX", _zoo_list)
    actions = parser.add_subparsers(required=True, metavar="list|get")
    _command(actions, "list", "list the networks", _zoo_list)
    get = _command(actions, "get", "write networks as ONNX files", _zoo_get)
    get.add_argument("names", nargs="+", metavar="NAME")
    get.add_argument("-d", "--directory", default=".", metavar="DIR")


def _zoo_list(_options: argparse.Namespace) -> None:
    zoo = _zoo()
    rows: list[Mapping[str, Any]] = [
        {
            "name": each.name,
            "parameters": f"{each.parameters / 1e6:.2f} M",
            "macs": f"{each.macs / 1e6:.0f} M",
            "text": each.description,
        }
        for each in zoo.entries()
    ]
    for row in rows:
        print(f"{row['name']:<18} {row['parameters']:>10} parameters {row['macs']:>8} MACs  {row['text']}")


def _zoo_get(options: argparse.Namespace) -> None:
    zoo = _zoo()
    for name in options.names:
        print(zoo.get(name, options.directory))


def _zoo() -> Any:
    try:
        import onnx  # noqa: F401  (the builders need it, listing would do without: one answer for both)

        from mvcompile import zoo
    except ImportError as error:
        raise EnvironmentProblem(f"the zoo needs {error.name}: pip install 'mvcompile[compile]'") from error
    return zoo


if __name__ == "__main__":
    sys.exit(command())
