"""Features that this version lacks: each setting away from its default is refused, with reason and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.config.problems import shown
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig
from verl.trainer.config.keys import InactiveKey, all_inactive, iter_keys

INACTIVE = all_inactive(PPOConfig)
REFUSED = {path: key for path, key in INACTIVE.items() if key.refused}
BY_VALUE = {
    (key.path, value): reason for key in iter_keys(PPOConfig) for value, reason in key.meta.refuse_values.items()
}


def other_value(key: InactiveKey) -> Any:
    """Something that asks for the feature."""
    asks = {"True": False, "False": True, "0": 2, "1": 2}
    return asks.get(str(key.yaml_default), [2] if key.path.endswith(".steps") else f"other_{key.path}")


@pytest.fixture(scope="module")
def all_refused(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What loading says when every refused setting is set at once."""
    run = Run(tmp_path_factory.mktemp("run"))
    return run.refusal({path: other_value(key) for path, key in REFUSED.items()})


def test_nothing_else_is_said(all_refused: str):
    assert all_refused.startswith(f"{len(REFUSED)} problems in the configuration")


@pytest.mark.parametrize("path", REFUSED)
def test_every_refused_setting_says_why_and_what_to_do(all_refused: str, path: str):
    key = REFUSED[path]
    reason, _, remedy = key.why.partition("; ")
    assert remedy
    assert f". {path}={shown(other_value(key))}: {reason}.\n     remedy: {remedy}" in all_refused


@pytest.mark.parametrize("path, value", BY_VALUE)
def test_every_refused_value_says_why_and_what_to_do(run: Run, path: str, value: str):
    reason, _, remedy = BY_VALUE[path, value].partition("; ")
    message = run.refusal({path: value})
    assert f"{path}={value}: {reason}." in message
    assert f"remedy: {remedy}" in message


@pytest.mark.parametrize(
    "path",
    [
        "actor_rollout_ref.ref.router_replay.mode",
        "trainer.esi_redundant_time",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        "trainer.v1.sampler.custom_sampler.path",
    ],
)
def test_what_is_not_built_is_refused(path: str):
    assert path in REFUSED


@pytest.mark.parametrize(
    "key, value",
    [
        ("actor_rollout_ref.model.tiled_mlp.enabled", True),
        ("actor_rollout_ref.model.use_fused_kernels", True),
        ("actor_rollout_ref.rollout.over_sample_rate", 0.1),
        ("actor_rollout_ref.ref.rollout_n", 7),
        ("transfer_queue.enable", True),
    ],
)
def test_what_changes_no_result_has_no_effect_and_says_so(
    run: Run, key: str, value: Any, caplog: pytest.LogCaptureFixture
):
    assert run.load({key: value}) == run.load()
    assert f"no effect: {key} (" in caplog.text


def test_kernels_of_a_gpu_have_no_effect_on_a_cpu(run: Run, caplog: pytest.LogCaptureFixture):
    run.load({"actor_rollout_ref.model.use_liger": True, "trainer.device": "cpu"})
    assert "no effect: actor_rollout_ref.model.use_liger (trainer.device=cpu" in caplog.text


def test_engines_that_are_not_built_are_refused():
    assert BY_VALUE["actor_rollout_ref.rollout.name", "trtllm"].endswith("use native, vllm or sglang")


def test_defaults_are_refused_nowhere(run: Run):
    run.load()
    run.load(root=SFTConfig)


def test_a_refused_setting_is_told_once_where_others_follow_it(run: Run):
    # ref.strategy follows actor.strategy.
    message = only(run.refusal({"actor_rollout_ref.actor.strategy": "mindspeed"}))
    assert "actor_rollout_ref.actor.strategy=mindspeed: this training back end is not in this version" in message


def test_refused_in_generation_too(run: Run):
    message = run.refusal({"rollout.name": "trtllm"}, GenerationConfig)
    assert "rollout.name=trtllm: this engine is not in this version" in message
