"""Host profiles that nobody measured: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence

from mvcompile.bundle.codec import Signed
from mvcompile.host_profile import (
    HOST_PROFILE_VERSION,
    PERF,
    CounterModel,
    CounterSupport,
    CurvePoint,
    Effect,
    HostProfile,
    LevelFound,
    Noise,
)
from mvcompile.runtime import PERF_FEATURES, RESCTRL_FEATURES
from mvcompile.runtime.host import cpu_model
from mvcompile.types import Dials

MIB = 2**20


def host_profile_of(models: Sequence[CounterModel] = (), *, cpu: str | None = None) -> HostProfile:
    """A host with a last-level cache of 32 MiB that looks like 8 MiB, core 0 beside core 1, and `cpu` (default: this host's)."""
    return HostProfile(
        version=HOST_PROFILE_VERSION,
        target_key="0123456789abcdef",
        cpu_model=cpu_model() if cpu is None else cpu,
        verdict="measurable",
        notes=("the last-level cache looks like 8 MiB",),
        measured_core=0,
        neighbour_core=1,
        probe_chain_bytes=6 * MIB,
        levels=(
            LevelFound("L1d", 32768, 32768, 1e-9, 0.0, 0.0),
            LevelFound("LLC", 32 * MIB, 8 * MIB, 1.5e-8, 4e10, 2e10),
            LevelFound("memory", 0, 0, 9e-8, 16e9, 8e9),
        ),
        curve=(CurvePoint(8192, 1e-9, 0.01, 5e-10, 0.02),),
        effects=(Effect("read", Dials(0, 8e9), Dials(0, 7.9e9), 0.0, 1.25, 0.02, 1.5, 0.03),),
        noise=Noise(0.01, 0.02, 0.03, 0.04, 0.05, 0.0),
        counters=CounterSupport(("cycles",), "llc_misses: none", (), "resctrl is not mounted at /sys/fs/resctrl"),
        counter_models=tuple(models),
    )


def counter_model_of(
    kind: str = PERF,
    *,
    kernels_sha256: str = "0" * 64,
    levels: Sequence[str] = ("none", "llc", "read", "write"),
    cores: int = 1,
) -> CounterModel:
    """A model by which the first feature alone decides: its value is the index of the level."""
    features = PERF_FEATURES if kind == PERF else RESCTRL_FEATURES
    count, steps = len(features), max(len(levels) - 1, 1)
    return CounterModel(
        kind=kind,
        bundle="tiny",
        kernels_sha256=kernels_sha256,
        cores=cores,
        windows=40,
        right=tuple(1.0 if index % 2 == 0 else 0.9 for index in range(len(levels))),
        features=features,
        levels=tuple(levels),
        points=tuple((index / steps,) for index in range(len(levels))),
        mean=(float(steps), *[0.0] * (count - 1)),
        scale=(float(steps), *[1.0] * (count - 1)),
        coefficients=(tuple(map(Signed, (1.0, *[0.0] * (count - 1)))),),
        intercept=(Signed(1.0),),
    )
