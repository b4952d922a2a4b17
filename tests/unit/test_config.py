from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mvcompile.config import DEFAULT_BUDGET_S, MAX_VARIANTS, CompileConfig, TuningConfig, parse_duration
from mvcompile.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("0", 0.0), (" 2M ", 120.0), ("0.5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "1e3", "inf", "nan", "10 m", "10min", "1:30", "5d", ".5h"])
def test_what_is_no_duration_is_named_with_the_remedy(text: str) -> None:
    with pytest.raises(UsageError, match="10m") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("budget_s", -1.0),
        ("budget_s", float("inf")),
        ("budget_s", float("nan")),
        ("trials", -1),
        ("variants", 0),
        ("variants", MAX_VARIANTS + 1),
        ("batch", 0),
        ("seed", -1),
        ("seed", 2**30),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option.removesuffix("_s")) as caught:
        TuningConfig(**{option: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"budget_s": 0.0}, {"trials": 0}, {"variants": MAX_VARIANTS}, {"seed": 2**30 - 1}, {"batch": 1}]
)
def test_the_ends_of_the_ranges_are_accepted(options: dict[str, Any]) -> None:
    config = TuningConfig(**options)
    assert all(getattr(config, name) == value for name, value in options.items())


def test_without_a_limit_tuning_takes_ten_minutes_and_with_trials_as_long_as_they_need() -> None:
    assert TuningConfig().seconds == DEFAULT_BUDGET_S == 600
    assert TuningConfig(trials=5).seconds == float("inf")
    assert TuningConfig(trials=5, budget_s=3.0).seconds == 3.0
    assert TuningConfig(budget_s=0.0).seconds == 0.0


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompileConfig().name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TuningConfig().seed = 1  # type: ignore[misc]
