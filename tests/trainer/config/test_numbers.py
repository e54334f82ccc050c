"""Every numeric key of every configuration: numbers that no run can compute with are refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.trainer.config import PPOConfig, SFTConfig
from verl.trainer.config.keys import Key, leaves

RUNS = [PPOConfig, SFTConfig]
EXTREMES = [float("inf"), float("-inf"), float("nan"), -(10**30), 10**30, 1e-40, "abc", True]
OPTIM = "actor_rollout_ref.actor.optim"
ROLLOUT = "actor_rollout_ref.rollout"


def takes_numbers(annotation: Any) -> bool:
    if annotation in (int, float):
        return True
    if typing.get_origin(annotation) in (tuple, dict):
        return False
    return any(takes_numbers(part) for part in typing.get_args(annotation))


def keys(root: type) -> list[Key]:
    return [key for key in leaves(root).values() if takes_numbers(key.field.annotation)]


@pytest.mark.parametrize("root", RUNS)
@pytest.mark.parametrize("value", EXTREMES)
def test_what_is_no_number_of_a_run_is_refused_by_name(run: Run, root: type, value: Any):
    names = [key.path for key in keys(root)]
    assert len(names) > 30
    message = run.refusal(dict.fromkeys(names, value), root)
    missing = [name for name in names if f". {name}=" not in message]
    correction = "algorithm.rollout_correction.rollout_"
    assert set(missing) <= {f"{correction}is_threshold", f"{correction}rs_threshold"}, "rules, not types, judge these"
    for name in missing:
        if (name, value) != (f"{correction}is_threshold", float("inf")):  # a cap that never binds
            assert f". {name}=" in run.refusal({name: value}, root)


@pytest.mark.parametrize("betas", ["[.inf, 0.9]", [1.0, 0.999], [0.9, -0.1], [0.9, 10**30]])
def test_betas_are_fractions(run: Run, betas: Any):
    assert f"{OPTIM}.betas=" in only(run.refusal({f"{OPTIM}.betas": betas}))


def test_a_learning_rate_that_no_model_survives_is_told(run: Run, caplog: pytest.LogCaptureFixture):
    assert run.load({f"{OPTIM}.lr": 1e6})
    assert f"{OPTIM}.lr=1000000.0: one step of AdamW moves every weight by about this much" in caplog.text


@pytest.mark.parametrize("key", [f"{ROLLOUT}.temperature", f"{ROLLOUT}.val_kwargs.temperature"])
def test_a_temperature_is_zero_or_divides_without_overflow(run: Run, key: str):
    message = only(run.refusal({key: 1e-6}))
    assert f"{key}=1.0e-06: logits divided by so little overflow" in message
