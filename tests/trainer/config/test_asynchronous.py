"""Settings of asynchronous training: what they become, and combinations that are refused."""

from typing import Any

import pytest

from tests.trainer.config.support import Run
from verl.config.async_plan import AsyncPlan
from verl.trainer.config import PPOConfig, load_config
from verl.trainer.config.keys import put
from verl.trainer.config.rules_asynchronous import described_mode

MODE = "trainer.v1.trainer_mode"
SEPARATE = {
    MODE: "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "actor_rollout_ref.rollout.nnodes": 1,
}


def plan(**changes: Any) -> AsyncPlan:
    """The plan of settings alone, which need no files."""
    tree: dict[str, Any] = {"data": {"train_batch_size": 64}, "trainer": changes}
    return AsyncPlan.from_config(load_config(tree, PPOConfig, with_rules=False))


def test_without_settings_a_step_trains_on_its_own_samples():
    assert plan() == AsyncPlan(
        mode="sync",
        lag=0,
        bound=0,
        volume=None,
        strategy="admit",
        sync_every=1,
        batch_prompts=64,
        warmup_batches=0,
    )


def test_with_a_lag_the_age_is_the_lag():
    made = plan(**{"async": {"lag": 2}})
    assert (made.mode, made.lag, made.bound, made.warmup_batches, made.prompts_ahead) == ("lag", 2, 2, 2, 128)
    assert made.usual_age == 2


def test_a_mode_of_v1_admits_prompts_within_its_threshold():
    sampler = {"max_off_policy_threshold": 3}
    made = plan(v1={"trainer_mode": "colocate_async", "sampler": sampler})
    assert (made.mode, made.bound, made.strategy) == ("colocated", 3, "admit")
    assert (made.sync_every, made.warmup_batches, made.prompts_ahead, made.usual_age) == (1, 1, 64, 1)
    dropping = plan(v1={"trainer_mode": "separate_async", "sampler": sampler | {"max_off_policy_strategy": "drop"}})
    assert (dropping.mode, dropping.bound, dropping.strategy) == ("separate", 3, "drop")


def test_no_batch_starts_earlier_than_the_bound_allows():
    assert plan(v1={"trainer_mode": "colocate_async", "sampler": {"max_off_policy_threshold": 0}}).warmup_batches == 0


def test_a_volume_bounds_prompts_in_place_of_their_age():
    made = plan(v1={"trainer_mode": "separate_async"}, **{"async": {"volume": 0.29, "sync_every": 2}})
    assert (made.bound, made.sync_every, made.prompts_per_transfer) == (None, 2, 128)
    assert made.prompts_ahead == 37  # 0.29 * 128 = 37.12
    assert made.usual_age == 1  # the second step of two between transfers


def test_a_step_of_separate_async_has_whole_mini_batches(run: Run):
    message = run.refusal(SEPARATE | {"data.train_batch_size": 12})
    assert "data.train_batch_size=12: a step trains on" in message
    assert "12 is not 2 x 4 = 8." in message
    assert "set data.train_batch_size=8, or trainer.v1.separate_async.parameter_sync_step=3" in message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.async.lag", 1, "draws samples as time allows, and not a fixed number of steps ahead"),
        ("algorithm.adv_estimator", "remax", "its greedy responses have to be of the same weights"),
        ("actor_rollout_ref.rollout.skip_rollout", True, "stored responses belong to the batches of a step"),
        ("trainer.async.partial_rollout", False, "engines get new weights without waiting for what they draw"),
    ],
)
def test_what_needs_whole_batches_is_refused(run: Run, key: str, value: Any, said: str):
    message = run.refusal(SEPARATE | {key: value})
    assert f"{key}=" in message
    assert said in message


def test_steps_between_two_transfers_keep_the_bound(run: Run):
    changes = {"trainer.async.sync_every": 4, "trainer.v1.sampler.max_off_policy_threshold": 2}
    message = run.refusal(SEPARATE | changes)
    assert "the last of 4 steps between two transfers trains on samples of weights that are 3 updates old" in message
    assert "set it to 3, or trainer.v1.sampler.max_off_policy_threshold=3" in message


def test_one_process_has_no_second_pool(run: Run):
    message = run.refusal(SEPARATE | {"trainer.controller": "local", "trainer.n_gpus_per_node": 1})
    assert "needs ranks that train and ranks that sample" in message


def test_samples_of_earlier_weights_are_weighed(run: Run):
    message = run.refusal(SEPARATE | {"trainer.max_rollout_actor_probs_diff": 0.1})
    assert "with trainer.v1.trainer_mode=separate_async the difference is that of several updates" in message
    tree = {"trainer": {"v1": {"trainer_mode": "colocate_async"}}, "algorithm": {"adv_estimator": "grpo"}}
    chosen = load_config(tree, PPOConfig, with_rules=False).algorithm.rollout_correction
    assert (chosen.rollout_is, chosen.bypass_mode) == ("token", False)


def test_no_engine_keeps_keys_and_values_of_earlier_weights(run: Run):
    message = run.refusal({"trainer.async.keep_kv_cache": True})
    assert "trainer.async.keep_kv_cache=true" in message
    assert "each token keeps the log-prob it was drawn with" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"trainer.async.lag": 2},
            "trainer.async.lag=2: a step trains on samples that are 2 updates old; they have one ",
        ),
        (
            {MODE: "colocate_async"},
            "at most 8 updates old (trainer.v1.sampler.max_off_policy_threshold=8): a step waits",
        ),
        (
            SEPARATE | {"trainer.async.volume": 0.5, "algorithm.rollout_correction.bypass_mode": True},
            "8 prompts are trained on, and at most 8 + 4 start (trainer.async.volume=0.5); the ratio that the",
        ),
    ],
)
def test_a_run_says_its_mode_its_bound_and_its_ratio(run: Run, changes: dict[str, Any], said: str):
    tree: dict[str, Any] = {}
    for key, value in (run.ppo | changes).items():
        put(tree, key, value)
    config = load_config(tree, PPOConfig, with_rules=False)
    [sentence] = described_mode(config)
    assert said in sentence
    is_old = AsyncPlan.from_config(config).usual_age >= 2
    assert (f"most are {AsyncPlan.from_config(config).usual_age} updates old, at which" in sentence) == is_old


def test_separate_sampling_has_ranks_of_its_own_without_being_told(run: Run):
    tree: dict[str, Any] = {}
    for key, value in (run.ppo | SEPARATE | {"data.gen_batch_size": 1}).items():
        put(tree, key, value)
    config = load_config(tree, PPOConfig, with_rules=False)
    assert (config.actor_rollout_ref.hybrid_engine, config.data.gen_batch_size) == (False, None)
    message = run.refusal({MODE: "colocate_async", "actor_rollout_ref.hybrid_engine": False})
    assert f"with {MODE}=colocate_async the ranks that train sample too" in message


def test_settings_of_another_mode_have_no_effect(run: Run, caplog: pytest.LogCaptureFixture):
    run.load({"trainer.v1.sampler.max_off_policy_threshold": 2, "trainer.async.record_dir": "x"})
    assert "trainer.async.record_dir, trainer.v1.sampler.max_off_policy_threshold (trainer.v1" in caplog.text


def test_batches_ahead_beyond_the_bound_are_named(run: Run, caplog: pytest.LogCaptureFixture):
    key = "trainer.v1.sampler.max_off_policy_threshold"
    run.load({MODE: "colocate_async", key: 2, "trainer.v1.colocate_async.num_warmup_batches": 3})
    assert f"{key}=2 lets 2 batches start ahead, and so many do" in caplog.text
    assert f"set {key}=3 for all 3" in caplog.text
