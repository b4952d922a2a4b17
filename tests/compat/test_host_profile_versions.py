"""Host profiles of every format version that was ever released are read."""

from __future__ import annotations

from pathlib import Path

from mvcompile.host_profile import HOST_PROFILE_VERSION, read_host_profile
from mvcompile.testing.hosts import MIB, host_profile_of

V1 = Path(__file__).parent / "host-profile-v1.json"


def test_version_1_is_read_as_one_without_models_of_counters() -> None:
    found = read_host_profile(V1)
    assert found == host_profile_of(cpu="imagined")
    assert (found.version, found.counter_models, found.view().llc_bytes) == (HOST_PROFILE_VERSION, (), 8 * MIB)
