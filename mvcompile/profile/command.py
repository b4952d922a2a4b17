"""A bundle that exists, profiled on this host: the same file with another `interference.json`."""

from __future__ import annotations

import os

from mvcompile.bundle.interference import INTERFERENCE, Interference, encode_interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import Manifest
from mvcompile.bundle.writer import Source, write_bundle
from mvcompile.config import ProfileConfig
from mvcompile.profile.stage import profile


def profile_bundle(
    path: str | os.PathLike[str], output: str | os.PathLike[str], config: ProfileConfig
) -> tuple[Manifest, Interference]:
    """Measures all variants of the bundle at `path` beside neighbours on this host, and writes the bundle with what was found to
    `output`, which may be the same file. Variants stay as they are; a selection of the level `none` may differ from all zeros.

    Raises EnvironmentProblem where nothing can be measured, UsageError, BundleError and IncompatibleBundleError as
    `runtime.load` does.
    """
    found = profile(path, config, None).interference
    with open_bundle(path) as bundle:
        members: dict[str, Source] = {each.name: bundle.member(each.name) for each in bundle.manifest.members}
        members[INTERFERENCE] = encode_interference(found)
        manifest = write_bundle(output, bundle.manifest, members)
    return manifest, found
