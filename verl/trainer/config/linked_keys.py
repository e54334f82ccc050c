"""Settings that take their value from another one after composition; ``${...}`` in defaults is the other way."""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_SHARED = "ulysses_sequence_parallel_size"

PAIRS: tuple[tuple[str, str], ...] = (
    (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    (f"{_ACTOR}.strategy", f"{_ACTOR}.fsdp_config.strategy"),
    (f"{_REF}.strategy", f"{_REF}.fsdp_config.strategy"),
    ("critic.strategy", "critic.model.fsdp_config.strategy"),
    ("reward_model.strategy", "reward_model.model.fsdp_config.strategy"),
    (f"{_ACTOR}.{_SHARED}", f"{_ACTOR}.fsdp_config.{_SHARED}"),
    (f"{_REF}.{_SHARED}", f"{_REF}.fsdp_config.{_SHARED}"),
    (f"critic.{_SHARED}", f"critic.model.fsdp_config.{_SHARED}"),
    (f"reward_model.{_SHARED}", f"reward_model.model.fsdp_config.{_SHARED}"),
)
"""Pairs of keys for one setting; after loading, both hold the same value."""

FORWARD_PASSES: tuple[tuple[str, str], ...] = (
    (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{_REF}.log_prob_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    ("reward_model.micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
)
"""Sizes of passes without gradients, each with the one that it takes if it is null: what an update holds, fits."""
