"""Other spellings of keys: those of older and newer versions, and of published examples.

``ALIASES`` maps a spelling to its key; a spelling that names a section takes all below it along.
``RETIRED`` lists keys that have no successor: harmless values are dropped, others are refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.trainer.config.keys import Key, Tree, drop, flat, get, put, same
from verl.trainer.config.problems import Problem, shown
from verl.workers.config.agent import NO_MULTI_TURN


@dataclass(frozen=True)
class Alias:
    """``old`` is another spelling of ``new`` (``key[i]`` is one item of a list); ``values`` are spelled anew too."""

    old: str
    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Retired:
    """A key (pattern) without successor: ``harmless`` values are dropped, others refused with ``reason; remedy``."""

    pattern: str
    reason: str
    harmless: tuple[Any, ...] = (None, False, [], {})


def _of_optimizer(optim: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{optim}.beta1", f"{optim}.betas[0]"),
        Alias(f"{optim}.beta2", f"{optim}.betas[1]"),
        Alias(f"{optim}.warmup_style", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.lr_scheduler", f"{optim}.lr_scheduler_type"),
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
    Alias("data.chat_template", "actor_rollout_ref.model.custom_chat_template"),
    Alias("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
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
    Alias("data.chat_template", "model.custom_chat_template"),
    Alias("trainer.checkpoint", "checkpoint"),
)

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
    Retired("actor_rollout_ref.rollout.tools", NO_MULTI_TURN),
    Retired("actor_rollout_ref.rollout.interactions", NO_MULTI_TURN),
    Retired("actor_rollout_ref.rollout.multi_turn.completion_callback", NO_MULTI_TURN),
    Retired("actor_rollout_ref.rollout.chat_scheduler", NO_MULTI_TURN),
    Retired("actor_rollout_ref.rollout.use_fire_sampling", NO_FIRE),
    Retired("actor_rollout_ref.actor.tis_imp_ratio_cap", OLD_CAP, (None, -1)),
    Retired("algorithm.rollout_is*", OLD_CORRECTION),
    Retired("algorithm.rollout_rs*", OLD_CORRECTION),
    Retired("*.fsdp_config.grad_offload", "gradients stay with their parameters; use param_offload=true instead"),
    Retired("*.megatron.*", "Megatron is not in this version; leave it out and use strategy=fsdp2"),
    Retired("trainer.remove_previous_ckpt_in_save", "it was replaced; set trainer.max_actor_ckpt_to_keep=1"),
    Retired("trainer.use_v1", "there is one trainer; leave it out", (None, True, False)),
    Retired("trainer.v1.trainer_mode", "only the synchronous trainer is in this version; use sync", (None, "sync")),
    Retired("distillation.*", "distillation is not in this version; leave it out"),
    Retired("data.multiturn.enable", "data.messages_key chooses conversations", (None, True, False)),
)


def respell(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str], problems: list[Problem]) -> None:
    """Move every other spelling in ``tree`` to its key, and drop or refuse what is retired, in place.

    Args:
        tree: the configuration before interpolation.
        keys: the keys and sections that there are.
        explicit: keys that were set by hand, also those set to their default.
        problems: gets an entry where two spellings disagree, or a retired key asks for something.
    """
    known = {path: key for path, key in keys.items() if key.section is None}
    spellings = _Spellings(tree, known, explicit, problems)
    for alias in ALIASES:
        if _leads_somewhere(alias, known):
            spellings.apply(alias)
    for path, value in list(flat(tree)):
        retired = next((r for r in RETIRED if fnmatch.fnmatchcase(path, r.pattern)), None)
        if retired is None or path in known:
            continue
        drop(tree, path)
        if not any(same(value, harmless) for harmless in retired.harmless):
            wrong, _, remedy = retired.reason.partition("; ")
            problems.append(Problem(path, value, wrong, remedy=remedy))


def _leads_somewhere(alias: Alias, known: Collection[str]) -> bool:
    """Whether the entry point at hand has the key (spellings of the others are left alone)."""
    new = alias.new.partition("[")[0]
    return any(key == new or key.startswith(new + ".") or new.startswith(key + ".") for key in known)


@dataclass
class _Spellings:
    """One pass over the aliases."""

    tree: Tree
    known: Mapping[str, Key]
    explicit: Collection[str]
    problems: list[Problem]
    said: dict[str, str] = field(default_factory=dict)
    """Key → the other spelling that has set it."""

    def apply(self, alias: Alias) -> None:
        """Move what stands under ``alias.old``: a value, or all values of a section."""
        found = get(self.tree, alias.old)
        if found is None:
            return
        values = {f".{below}": value for below, value in flat(found)} if isinstance(found, Mapping) else {"": found}
        for below, value in values.items():
            old, new = alias.old + below, alias.new + below
            if old in self.known:
                put(self.tree, old, self.known[old].default)
            else:
                drop(self.tree, old)
            if value is not None and value != {}:
                self._move(old, new, alias.values.get(value, value) if isinstance(value, str) else value)

    def _move(self, old: str, new: str, value: Any) -> None:
        key, _, place = new.removesuffix("]").partition("[")
        items = get(self.tree, key)
        now = items[int(place)] if place else items
        if (new in self.said or self._is_set(key, now, place)) and not same(now, value):
            wrong = f"this is another spelling of {self.said.get(new, new)}, which is set to {shown(now)}"
            self.problems.append(Problem(old, value, wrong, remedy=f"keep one of the two, best {new}"))
            return
        self.said[new] = old
        if place:
            value = [value if number == int(place) else item for number, item in enumerate(items)]
        put(self.tree, key, value)

    def _is_set(self, key: str, now: Any, place: str) -> bool:
        if key in self.explicit:
            return True
        if place:
            return False
        defaults = (self.known[key].yaml_default, self.known[key].default) if key in self.known else (None,)
        return not any(same(now, default) for default in defaults)
