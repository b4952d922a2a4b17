"""One root exception. A message says what is wrong, names the value and says what to do next.

Only the CLI turns an exception into an exit code and a line on stderr.
"""

from __future__ import annotations


class MvcompileError(Exception):
    """Root of every error this package raises on purpose. `exit_code` is what the CLI exits with."""

    exit_code = 3


class UsageError(MvcompileError):
    """The caller passed something that cannot be used: a bad option, file, shape or input."""

    exit_code = 2


class ModelError(UsageError):
    """The model cannot be compiled: invalid ONNX, unsupported operators, unresolved dimensions."""


class InputError(UsageError):
    """An input tensor of a run has the wrong name, dtype or shape."""


class GateError(MvcompileError):
    """A check that a release is gated on did not hold."""

    exit_code = 1


class BundleError(MvcompileError):
    """The bundle is truncated, altered, or breaks its format."""


class IncompatibleBundleError(BundleError):
    """The bundle is sound, but this host or this version of the runtime cannot run it."""


class ProfileWarning(UserWarning):
    """A warning: a profile is used on another kind of CPU than it was measured on."""


class EnvironmentProblem(MvcompileError):
    """Something the program needs from its host is missing: a linker, a library, cores, disk space."""


class StoreError(MvcompileError):
    """The work directory's records cannot be used: locked, altered, or written by a newer version."""


class VerificationError(MvcompileError):
    """The compiled model's output differs from the reference."""
