"""Keys of other versions of verl that are spelled differently here, or have no successor.

``ALIASES`` maps other spellings to keys; an alias of a section moves all its keys. ``RETIRED`` lists keys without a
successor: harmless values are dropped, others refused. Keys that the YAML files contain and nothing reads are in
:mod:`verl.config.inactive`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.inactive import AGENT_LOOPS


@dataclass(frozen=True)
class Alias:
    """Another spelling ``old`` of ``new`` (``key[i]`` is one item of a list); ``values`` maps old values to new.

    Attributes:
        silent: the old spelling's own default, which says nothing.
        only_with: a key that an entry point must have for this spelling to be one of its own.
    """

    old: str
    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    silent: object = None
    only_with: str = ""


@dataclass(frozen=True)
class Retired:
    """Keys without successor: ``harmless`` values are dropped, others refused with ``reason; remedy``, or logged.

    Attributes:
        pattern: the key or section, as a shell pattern.
        harmless: values that say nothing; ``${key}`` is the value of another key.
        refused: whether a value that is not harmless is an error; otherwise it has no effect, for this ``reason``.
        part: whether the keys are settings of something that another key turns on; they are logged if the command line
            sets them, and not if a whole configuration has them.
    """

    pattern: str
    reason: str
    harmless: tuple[object, ...] = (None, False, [], {})
    refused: bool = True
    part: bool = False


REPLACED_BY_REWARD = ("reward_model", "reward_manager", "custom_reward_function")
"""Sections that in the releases hold nulls beside a section ``reward``."""


def _of_optimizer(optim: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{optim}.beta1", f"{optim}.betas[0]"),
        Alias(f"{optim}.beta2", f"{optim}.betas[1]"),
        Alias(f"{optim}.warmup_style", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.lr_scheduler", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.lr_decay_style", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.warmup_steps_ratio", f"{optim}.lr_warmup_steps_ratio"),
    )


ALIASES: tuple[Alias, ...] = (
    *_of_optimizer("actor_rollout_ref.actor.optim"),
    *_of_optimizer("critic.optim"),
    *_of_optimizer("optim"),
    Alias(
        "algorithm.policy_loss_fn",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        {"ppo": "vanilla", "grpo": "vanilla"},
    ),
    Alias("algorithm.kl_ctl.init_kl_coef", "algorithm.kl_ctrl.kl_coef"),
    Alias("algorithm.kl_ctl", "algorithm.kl_ctrl"),
    Alias("actor_rollout_ref.actor.policy_loss.rollout_correction", "algorithm.rollout_correction"),
    Alias("data.chat_template", "actor_rollout_ref.model.custom_chat_template"),
    Alias("actor_rollout_ref.model.torch_dtype", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    Alias("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
    *(
        Alias(old, "actor_rollout_ref.rollout.multi_turn.tool_config_path")
        for old in ("data.tool_config_path", "actor_rollout_ref.rollout.tools", "tools")
    ),
    Alias("data.function_tool_path", "actor_rollout_ref.rollout.multi_turn.function_tool_path"),
    Alias("actor_rollout_ref.rollout.interactions", "actor_rollout_ref.rollout.multi_turn.interaction_config_path"),
    Alias("actor_rollout_ref.rollout.max_response_length", "data.max_response_length"),
    Alias("actor_rollout_ref.rollout.multi_turn.max_turns", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"),
    Alias(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Alias("actor_rollout_ref.actor.checkpoint.contents", "actor_rollout_ref.actor.checkpoint.save_contents"),
    Alias("critic.checkpoint.contents", "critic.checkpoint.save_contents"),
    Alias("reward_model.custom_reward_function", "custom_reward_function"),
    Alias("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    Alias("reward_model.max_concurrent", "reward_model.reward_kwargs.max_concurrent"),
    Alias("reward_model.max_rpm", "reward_model.reward_kwargs.max_rpm"),
    Alias("reward_model.max_tpm", "reward_model.reward_kwargs.max_tpm"),
    Alias("reward_model.estimated_tokens_per_request", "reward_model.reward_kwargs.estimated_tokens_per_request"),
    Alias("reward_model.timeout", "reward_model.timeout_s"),
    Alias("reward.custom_reward_function", "custom_reward_function"),
    Alias("reward.reward_manager", "reward_manager"),
    Alias("reward.reward_model.model_path", "reward_model.model.path"),
    Alias("reward.reward_model", "reward_model"),
    Alias("reward", "reward_model"),
    Alias("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    Alias("ray_init", "ray_kwargs.ray_init"),
    # the supervised trainer
    Alias("model.partial_pretrain", "model.path"),
    Alias("model.strategy", "engine.strategy"),
    Alias("model.fsdp_config.cpu_offload", "engine.offload_policy"),
    Alias("model.fsdp_config", "engine"),
    Alias("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    Alias("use_remove_padding", "model.use_remove_padding"),
    Alias("data.multiturn.messages_key", "data.messages_key"),
    Alias("data.multiturn.tools_key", "data.tools_key"),
    Alias("data.multiturn.enable_thinking_key", "data.enable_thinking_key"),
    Alias("actor_rollout_ref.actor.policy_loss.rollout_correction", "algorithm.rollout_correction"),
    Alias("data.chat_template", "model.custom_chat_template"),
    Alias("trainer.checkpoint", "checkpoint"),
)

TYPED_FIRST = {
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "batch_size": "data.train_batch_size",
    "lr": "actor_rollout_ref.actor.optim.lr",
}
"""Names that people type before they know the keys, also in the section of the key; what they mean."""

OLD_DEFAULTS: Mapping[str, tuple[object, object]] = {
    "trainer.resume_from_path": (False, None),
    **{
        f"{optim}.{name}": (None, 0.0)
        for optim in ("actor_rollout_ref.actor.optim", "critic.optim", "optim")
        for name in ("min_lr_ratio", "init_lr_ratio")
    },
}
"""Key → default of earlier versions, which public scripts still set, and the value that means the same now."""

OLD_CAP = (
    "this cap has moved; set algorithm.rollout_correction.rollout_is=token and "
    "algorithm.rollout_correction.rollout_is_threshold to the cap"
)
OLD_CORRECTION = (
    "these settings have a section of their own, with other values; set rollout_is (token, sequence), "
    "rollout_is_threshold, rollout_rs and rollout_rs_threshold in algorithm.rollout_correction"
)
NO_FIRE = "sampling the first token hot is not in this version; leave it out"

RETIRED: tuple[Retired, ...] = (
    Retired("actor_rollout_ref.rollout.multi_turn.completion_callback", AGENT_LOOPS),
    Retired("actor_rollout_ref.rollout.chat_scheduler", AGENT_LOOPS),
    Retired("actor_rollout_ref.rollout.use_fire_sampling", NO_FIRE),
    Retired(
        "actor_rollout_ref.rollout.sglang_rollout_mode",
        "actor_rollout_ref.rollout.mode decides whether the engine is a server",
        (None, "local"),
        refused=False,
    ),
    Retired(
        "actor_rollout_ref.rollout.server",
        "a request may take as long as the server works, and a server that hangs is replaced: see start_timeout_s, "
        "hang_timeout_s and answer_timeout_s in actor_rollout_ref.rollout.engine_kwargs",
        (None,),
        refused=False,
    ),
    Retired("actor_rollout_ref.actor.tis_imp_ratio_cap", OLD_CAP, (None, -1)),
    Retired("algorithm.rollout_is*", OLD_CORRECTION),
    Retired("algorithm.rollout_rs*", OLD_CORRECTION),
    Retired("*.fsdp_config.grad_offload", "gradients stay with their parameters; use param_offload=true instead"),
    Retired("trainer.use_v1", "there is one trainer; leave it out", (None, True, False)),
    Retired("data.multiturn.enable", "data.messages_key chooses conversations", (None, True, False)),
)
