"""The settings of fully_async_main and one_step_off_policy become those of main_ppo."""

from typing import Any

import pytest

from verl.config import PPOConfig, Problem
from verl.trainer.config.command_line import compose
from verl.trainer.config.keys import get
from verl.trainer.config.overrides import keys_set
from verl.trainer.config.translate import Translator

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULLY_ASYNC, ONE_STEP_OFF = "fully_async_ppo_trainer", "one_step_off_ppo_trainer"
SCRIPT = [
    *(f"{ACTOR}.ppo_mini_batch_size=32", "rollout.total_rollout_steps=51200", "rollout.nnodes=2", "rollout.n=16"),
    *("async_training.require_batches=2", "async_training.trigger_parameter_sync_step=3"),
    *("async_training.staleness_threshold=0.5", "trainer.test_freq=10", "trainer.save_freq=-1"),
]


def translated(name: str, overrides: list[str]) -> tuple[dict[str, Any], list[Problem], str]:
    """The settings that a command line becomes, and what is said against them."""
    problems: list[Problem] = []
    tree, *_, told = Translator.for_root(PPOConfig, keys_set(overrides), problems).translate(compose(overrides, name))
    return tree, [problem for problem in problems if "not in this version" not in problem.cause], "\n".join(told)


@pytest.mark.parametrize("name", [FULLY_ASYNC, "fully_async_ppo_megatron_trainer"])
def test_a_script_of_fully_async(name: str):
    tree, problems, told = translated(name, SCRIPT)
    assert (problems, told) == ([], "")
    assert {key: get(tree, key) for key in EXPECTED} == EXPECTED
    assert get(tree, f"{ACTOR}.strategy") == ("megatron" if "megatron" in name else "fsdp")


EXPECTED = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "trainer.async.volume": 0.5,
    "trainer.async.sync_every": 3,
    "trainer.async.partial_rollout": True,
    "trainer.total_training_steps": 800,  # 51200 prompts, 2 x 32 of them in a step
    "trainer.test_freq": 30,  # every 10 transfers, of 3 steps each
    "trainer.save_freq": -1,
    "data.train_batch_size": 64,
    "actor_rollout_ref.hybrid_engine": False,
    f"{ROLLOUT}.nnodes": 2,
    f"{ROLLOUT}.n_gpus_per_node": 8,
    f"{ROLLOUT}.n": 16,
    "algorithm.rollout_correction.bypass_mode": True,
    "async_training": None,
    "rollout": None,
}


def test_a_setting_of_main_ppo_stands_before_a_default_of_the_command():
    overrides = [f"{ACTOR}.ppo_mini_batch_size=10", f"{ROLLOUT}.n=2", "trainer.total_training_steps=7"]
    tree, problems, _ = translated(FULLY_ASYNC, overrides)
    assert problems == []
    assert (get(tree, f"{ROLLOUT}.n"), get(tree, "trainer.total_training_steps")) == (2, 7)


def test_two_different_values_of_one_setting_are_refused():
    overrides = [f"{ACTOR}.ppo_mini_batch_size=10", f"{ROLLOUT}.n=2", "rollout.n=3"]
    _, [problem], _ = translated(FULLY_ASYNC, overrides)
    assert str(problem).startswith(f"rollout.n=3: this is another spelling of {ROLLOUT}.n, which is set to 2.")


def test_a_run_has_prompts_for_a_step():
    _, [problem], _ = translated(FULLY_ASYNC, [f"{ACTOR}.ppo_mini_batch_size=256"])
    assert "a step trains on require_batches x ppo_mini_batch_size = 1 x 256 = 256 prompts" in str(problem)


def test_a_loss_of_another_name_has_old_log_probs_of_its_own():
    tree, _, _ = translated(FULLY_ASYNC, [*SCRIPT, f"{ACTOR}.policy_loss.loss_mode=gspo"])
    assert get(tree, "algorithm.rollout_correction.bypass_mode") is False


def test_a_script_of_one_step_off():
    overrides = ["rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=6", "data.train_batch_size=64"]
    tree, problems, told = translated(ONE_STEP_OFF, overrides)
    assert (problems, told) == ([], "")
    assert (get(tree, "trainer.async.lag"), get(tree, "trainer.v1.trainer_mode")) == (1, "sync")
    assert (get(tree, f"{ROLLOUT}.nnodes"), get(tree, f"{ROLLOUT}.n_gpus_per_node")) == (1, 2)
    assert get(tree, "actor_rollout_ref.hybrid_engine") is False


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("async_training.require_batch=2", "did you mean async_training.require_batches?"),
        ("async_training.use_dynamic_resource_scheduling=true", "ranks do not change between training and sampling"),
        ("actor_rollout_ref.hybrid_engine=true", "async_training is about ranks that sample and do not train"),
        (f"{ACTOR}.ppo_mini_batch_size=???", "the sizes of a step are computed from it"),
    ],
)
def test_what_cannot_be_is_refused(override: str, said: str):
    _, [problem], _ = translated(FULLY_ASYNC, [*SCRIPT, override])
    assert said in str(problem)


def test_the_sections_of_these_commands_mean_nothing_to_others():
    _, [problem], _ = translated("ppo_trainer", ["rollout.n=5"])
    assert f"did you mean {ROLLOUT}.n?" in str(problem)
