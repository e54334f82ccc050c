"""Settings that have no effect because another setting turns off what would read them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl.algorithms import adv_needs
from verl.config import PPOConfig
from verl.trainer.config.derive import FORWARD_PASSES, expanded
from verl.trainer.config.keys import Key, Tree, get, same
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.ppo.utils import need_reference_policy

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_OF_SCORING_MODEL = (
    "strategy",
    "micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "max_length",
    "model.input_tokenizer",
    "model.use_remove_padding",
    "model.fsdp_config.*",
)
_OF_REWARD_MODEL = ("model.*", "rollout.*", *_OF_SCORING_MODEL)


def unused(config: PPOConfig, raw: Tree, keys: Mapping[str, Key]) -> list[str]:
    """Return messages about settings away from their default that this run does not read, one for each reason.

    Args:
        config: the checked configuration.
        raw: the configuration before interpolation.
        keys: path → field or section.
    """
    told = []
    defaults = OmegaConf.create(raw)
    for patterns, reason in _turned_off(config):
        of_reason = [path for path in keys if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
        if paths := [path for path in of_reason if _is_set(keys[path], raw, defaults)]:
            told.append(f"no effect: {', '.join(paths)} ({reason})")
    return told


def _is_set(key: Key, raw: Tree, defaults: Any) -> bool:
    """Whether a key's value is not its default; ``defaults`` is a copy of ``raw`` to resolve defaults in."""
    written = get(raw, key.path, key.yaml_default)
    if key.section is not None or any(same(written, usual) for usual in (key.yaml_default, key.default)):
        return False
    source = dict(FORWARD_PASSES).get(key.path)
    if source is not None and same(written, get(raw, source)):  # in a configuration that a run saved
        return False
    OmegaConf.update(defaults, key.path, key.yaml_default, merge=False)
    default = OmegaConf.select(defaults, key.path)
    default = OmegaConf.to_container(default) if OmegaConf.is_config(default) else expanded(default)
    return not same(written, default)


def _turned_off(config: PPOConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield patterns of keys that nothing reads in this run, and why."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    needs = adv_needs(algorithm.adv_estimator)
    if not needs.wants_all and "config" not in needs.settings:
        own = {"gamma", "high_level_gamma", "lam", "norm_adv_by_std_in_grpo"} - needs.settings
        unread = tuple(f"algorithm.{name}" for name in own)
        yield unread, f"algorithm.adv_estimator={algorithm.adv_estimator} does not take it"
    if not needs_critic(config) and not config.reward_model.enable:  # whose sizes follow the critic's
        yield ("critic.*",), f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic"
    if not need_reference_policy(config):
        yield (f"{_REF}.*",), "no KL term needs the reference: use_kl_loss and use_kl_in_reward are false"
    reward_model, penalty, schedule = config.reward_model, algorithm.kl_ctrl, actor.optim.lr_scheduler_type
    others = [name for name, arguments in rollout.engine_kwargs.items() if arguments and name != rollout.name]
    switches = (
        (actor.use_kl_loss, f"{_ACTOR}.use_kl_loss=false", _ACTOR, ("kl_loss_coef", "kl_loss_type")),
        (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=false", "algorithm", ("kl_ctrl.*", "kl_penalty")),
        (
            penalty.type == "adaptive" or not algorithm.use_kl_in_reward,
            f"algorithm.kl_ctrl.type={penalty.type}",
            "algorithm.kl_ctrl",
            ("horizon", "target_kl"),
        ),
        (algorithm.use_pf_ppo, "algorithm.use_pf_ppo=false", "algorithm", ("pf_ppo.*",)),
        (
            actor.entropy_target is not None,
            f"{_ACTOR}.entropy_target=null",
            _ACTOR,
            ("entropy_target_step", "entropy_coeff_min", "entropy_coeff_max"),
        ),
        (
            schedule == "cosine",
            f"{_ACTOR}.optim.lr_scheduler_type={schedule}",
            f"{_ACTOR}.optim",
            ("min_lr_ratio", "num_cycles"),
        ),
        (reward_model.enable, "reward_model.enable=false", "reward_model", _OF_REWARD_MODEL),
        (
            config.judge is None,
            f"reward_model.rollout.name={reward_model.rollout.name} serves the model to the reward function",
            "reward_model",
            _OF_SCORING_MODEL,
        ),
        (
            config.judge is not None or not reward_model.enable,
            "the model gives a score per response itself, unless rollout.name is set and a reward function asks it",
            "reward_model.rollout",
            ("*",),
        ),
        (
            reward_model.enable_resource_pool,
            "reward_model.enable_resource_pool=false",
            "reward_model",
            ("nnodes", "n_gpus_per_node"),
        ),
        (
            rollout.val_kwargs.do_sample,
            f"{_ROLLOUT}.val_kwargs.do_sample=false takes the most likely token",
            f"{_ROLLOUT}.val_kwargs",
            ("temperature", "top_k", "top_p", "min_p"),
        ),
        (not others, f"{', '.join(others)}: {_ROLLOUT}.name={rollout.name}", _ROLLOUT, ("engine_kwargs",)),
    )
    for is_on, reason, section, names in switches:
        if not is_on:
            yield tuple(f"{section}.{name}" for name in names), reason
