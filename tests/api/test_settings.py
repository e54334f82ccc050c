"""Names of settings in a call, and the table of names of TRL and OpenRLHF."""

from __future__ import annotations

import pytest

from verl.api.settings import batch_sizes, keys_of_call, rows_of_batch, tree_of
from verl.config import DPOConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.errors import ConfigError
from verl.trainer.config.generate import ENTRIES
from verl.trainer.config.keys import leaves
from verl.trainer.config.load import load_config
from verl.trainer.config.other_libraries import LIBRARIES

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_every_key_in_the_table_exists() -> None:
    known = {path for entry in ENTRIES for path in leaves(entry.root)}
    named = {
        key.partition("[")[0]
        for names in LIBRARIES.values()
        for entry in names
        for written in (*entry.keys, *(key for ours in (entry.values or {}).values() for key in ours))
        for key in written.split()
    }
    assert named - known == set()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_has_a_key_or_a_reason(library: str) -> None:
    names = [entry.name for entry in LIBRARIES[library]]
    assert len(names) == len(set(names))
    assert all(entry.describe() for entry in LIBRARIES[library])


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"learning_rate": 1e-4}, {f"{ACTOR}.optim.lr": 1e-4}),
        ({"rollout.n_samples_per_prompt": 4}, {f"{ROLLOUT}.n": 4}),
        ({"beta": 0.04}, {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.04}),
        ({"beta": 0.0}, {f"{ACTOR}.use_kl_loss": False}),
        ({"max_completion_length": 16}, {"data.max_response_length": 16}),
        ({"scale_rewards": False}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        ({"loss_type": "dr_grpo"}, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"top_k": None}, {f"{ROLLOUT}.top_k": -1}),
        ({"max_steps": -1}, {}),
        ({"eps_clip_low_high": (0.2, 0.3)}, {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.3}),
        ({"steps": 3, "batch_size": 8}, {"trainer.total_training_steps": 3, "data.train_batch_size": 8}),
        ({"total_training_steps": 3}, {"trainer.total_training_steps": 3}),
        ({"lr_warmup_steps": 2}, {f"{ACTOR}.optim.lr_warmup_steps": 2}),
        ({"data.seed": 7, "n": 4}, {"data.seed": 7, f"{ROLLOUT}.n": 4}),
        ({"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}}, {"algorithm.kl_ctrl.kl_coef": 0.1}),
    ],
)
def test_names_become_keys(given: dict, keys: dict) -> None:
    assert keys_of_call(given, PPOConfig) == keys


def test_the_same_name_is_another_key_of_another_command() -> None:
    assert keys_of_call({"learning_rate": 1.0}, SFTConfig) == {"optim.lr": 1.0}
    assert keys_of_call({"max_prompt_length": 9, "temperature": 0}, GenerationConfig) == {
        "rollout.prompt_length": 9,
        "rollout.temperature": 0,
    }
    assert keys_of_call({"beta": 0.1, "loss_type": "hinge"}, DPOConfig) == {"loss.beta": 0.1, "loss.loss_type": "hinge"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"logging_steps": 1}, "every step is logged"),
        ({"scale_rewards": "batch"}, "True, 'group', False, 'none'"),
        ({"num_train_epochs": 0.5}, "passes over the data are whole"),
        ({"num_generations": 8, "n": 4}, "num_generations and n both mean"),
        ({"gradient_checkpointing": 1, f"{'actor_rollout_ref.model'}.enable_gradient_checkpointing": 0}, "both mean"),
        ({"betas": [0.9, print]}, "holds builtin_function_or_method. A setting is a text, a number"),
        ({"name": "x"}, "can be actor_rollout_ref.rollout.name or custom_reward_function.name"),
    ],
)
def test_what_means_nothing_or_two_things_is_refused(given: dict, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        keys_of_call(given, PPOConfig)
    assert words in str(error.value)


def test_one_of_two_betas_leaves_the_other() -> None:
    keys = keys_of_call({"adam_beta2": 0.95}, PPOConfig)
    assert tree_of(keys, PPOConfig) == {"actor_rollout_ref": {"actor": {"optim": {"betas": [0.9, 0.95]}}}}


def test_counts_of_completions_become_prompts() -> None:
    # 4 completions × 2 devices × 6 accumulated = 48 per optimizer step, of which 8 belong to one prompt: 6 prompts
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}
    sizes = batch_sizes(given, ranks=2, per_prompt=8)
    assert list(sizes.values()) == [6, 6, 4]
    # 12 instead of 6 micro-batches per generation: the step has twice the prompts, the optimizer step the same
    assert list(batch_sizes({**given, "steps_per_generation": 12}, 2, 8).values()) == [12, 6, 4]
    assert rows_of_batch(given, 2) == {"data.train_batch_size": 48, "data.micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError, match="an optimizer step would have 4 completions"):
        batch_sizes({"per_device_train_batch_size": 4}, 1, 8)


def test_an_unknown_key_that_is_of_another_library_names_ours() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            {"learning_rate": 1e-4, "beta": 0.04, "loss_type": "grpo", "data": {"label_key": "x"}}, with_rules=False
        )
    said = str(error.value)
    assert f"learning_rate of TRL: set {ACTOR}.optim.lr=0.0001" in said
    assert f"beta of TRL: set {ACTOR}.use_kl_loss=true, {ACTOR}.kl_loss_coef=0.04" in said
    assert f"loss_type of TRL: set {ACTOR}.loss_agg_mode=seq-mean-token-mean" in said
    assert "label_key of OpenRLHF: a row has reward_model" in said
    with pytest.raises(ConfigError, match=r"did you mean loss\.beta"):
        load_config({"beta": 0.04}, DPOConfig, with_rules=False)
