"""The commands of the quickstart for agents: what ``sft_trainer`` and ``main_ppo`` are told.

One rank in one process (``trainer.controller=local``) in fp32. On a cluster the same lists run with
``trainer.controller=ray`` and more ranks.
"""

from __future__ import annotations

from pathlib import Path

from examples.quickstart.settings import Settings, policy_settings, warm_up_settings

SFT_STEPS = 240
RL_STEPS = 30
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 40
MOST_TURNS = 4
"""Of the policy: two look-ups, an answer, and one more for a call that failed."""


def sft_settings(task: Path, output: Path, seed: int) -> Settings:
    """The supervised warm-up: short on purpose, so that RL has something left to teach."""
    return warm_up_settings(task, output, seed, 32, PROMPT_LENGTH + RESPONSE_LENGTH, SFT_STEPS)


def rl_settings(task: Path, model: Path, output: Path, seed: int) -> Settings:
    """GRPO over conversations with the tool, from the model of the warm-up."""
    turns = "actor_rollout_ref.rollout.multi_turn"
    return {
        **policy_settings(task, model, output, seed, RL_STEPS),
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 16,
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": RESPONSE_LENGTH,
        "custom_reward_function.path": Path(__file__).with_name("reward.py"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 512,
        f"{turns}.enable": True,
        f"{turns}.tool_config_path": task / "tools.yaml",
        f"{turns}.format": "hermes",
        f"{turns}.max_assistant_turns": MOST_TURNS,
        f"{turns}.max_tool_response_length": 2,
        "trainer.test_freq": 10,
    }
