"""Rules of asynchronous training: which modes, sizes and features go together."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import PPOConfig, Problem
from verl.config.async_plan import AsyncPlan
from verl.trainer.config.derive import compares_with_rollout

MODE = "trainer.v1.trainer_mode"

SEVERAL_UPDATES = 2
"""Usual age of samples from which a run recommends a correction other than weights."""

FREE_RUNNING_REFUSES: dict[str, tuple[object, str]] = {
    "trainer.async.partial_rollout": (True, "engines get new weights without waiting for what they draw"),
    "actor_rollout_ref.rollout.skip_rollout": (False, "stored responses belong to the batches of a step"),
    "trainer.rollout_only": (False, "without updates nothing becomes older; use trainer_mode=sync"),
    "data.datagen.path": (None, "it makes rows from the batch that was trained on last"),
}
"""Key → the only value that the modes of ``trainer.v1`` other than ``sync`` take, and why."""


def asynchronous(config: PPOConfig) -> Iterator[Problem]:
    """The mode fits the other settings: one mode, sizes that divide, no feature that needs whole batches."""
    plan, settings, v1 = AsyncPlan.from_config(config), config.trainer.async_, config.trainer.v1
    if settings.keep_kv_cache:
        cause = (
            "no rollout engine keeps keys and values over an update of the weights: native and hf release that memory "
            "to the trainer, and vllm and sglang are told to drop what they have computed with the weights before. An "
            "interrupted response is computed again, in one pass, and each token keeps the log-prob it was drawn with"
        )
        yield Problem("trainer.async.keep_kv_cache", True, cause, "false")
    hybrid, is_hybrid = "actor_rollout_ref.hybrid_engine", config.actor_rollout_ref.hybrid_engine
    if plan.mode == "sync" and not is_hybrid:
        cause = "ranks that sample and ranks that train wait for each other in every step"
        remedy = "set trainer.async.lag=1, so that both work at once, or hybrid_engine=true"
        yield Problem(hybrid, False, cause, remedy=remedy, advice=True)
    if not plan.is_free_running:
        yield from _replay_elsewhere(settings.replay)
        return
    mode = v1.trainer_mode
    if settings.lag:
        cause = f"{MODE}={mode} draws samples as time allows, and not a fixed number of steps ahead"
        remedy = f"keep one of the two: {MODE}=sync with a lag, or this mode with lag 0"
        yield Problem("trainer.async.lag", settings.lag, cause, "0", remedy)
    for key, (allowed, why) in FREE_RUNNING_REFUSES.items():
        if (value := _at(config, key)) != allowed:
            shown = "null" if allowed is None else str(allowed).lower()
            yield Problem(key, value, f"it does not go together with {MODE}={mode}: {why}", shown)
    if config.algorithm.adv_estimator == "remax":
        cause = f"its greedy responses have to be of the same weights as the samples, and {MODE}={mode} mixes weights"
        yield Problem("algorithm.adv_estimator", "remax", cause, remedy="use rloo or grpo, or trainer_mode=sync")
    if config.judge_answers_agents:
        key = "reward_model.enable_resource_pool"
        cause = f"conversations may ask a judge of its own ranks, which with {MODE}={mode} is awake for rewards alone"
        yield Problem(key, True, cause, "false", "set it to false: only the reward function asks the judge then")
    if plan.mode == "colocated" and not is_hybrid:
        cause = f"with {MODE}={mode} the ranks that train sample too"
        yield Problem(hybrid, False, cause, "true", f"set it to true, or {MODE}=separate_async")
    if plan.mode == "separate" and is_hybrid:
        cause = f"with {MODE}={mode} other ranks sample than those that train"
        yield Problem(hybrid, True, cause, "false", f"leave it out, or set {MODE}=colocate_async")
    if plan.mode == "separate":
        yield from _separate(config, plan)
    yield from _warmup(config, plan)


def _warmup(config: PPOConfig, plan: AsyncPlan) -> Iterator[Problem]:
    """Say that fewer batches start ahead than asked for, if the bound on the age of samples allows no more."""
    name = "colocate_async" if plan.mode == "colocated" else "separate_async"
    warmup_batches = config.trainer.v1[name].num_warmup_batches
    if warmup_batches > plan.warmup_batches:
        least = warmup_batches + plan.sync_every - 1
        key = "trainer.v1.sampler.max_off_policy_threshold"
        cause = f"{key}={plan.bound} lets {plan.warmup_batches} batches start ahead, and so many do"
        remedy = f"set {key}={least} for all {warmup_batches}, or lower this"
        yield Problem(f"trainer.v1.{name}.num_warmup_batches", warmup_batches, cause, remedy=remedy, advice=True)


def described_mode(config: PPOConfig) -> list[str]:
    """Describe when samples are drawn, how old they may become and what corrects for it; nothing if always at once."""
    plan, v1, correction = AsyncPlan.from_config(config), config.trainer.v1, config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if plan.mode == "sync":
        return []
    if plan.mode == "lag":
        updates = "1 update" if plan.lag == 1 else f"{plan.lag} updates"
        age = f"trainer.async.lag={plan.lag}: a step trains on samples that are {updates} old"
    elif plan.volume is not None:
        prompts = plan.prompts_per_transfer
        age = (
            f"{MODE}={v1.trainer_mode}: between two transfers of weights {prompts} prompts are trained on, and at most "
            f"{prompts} + {plan.prompts_ahead} start (trainer.async.volume={plan.volume:g})"
        )
    else:
        how = {
            "admit": "a step waits for slow ones in time, so that none is discarded",
            "drop": "groups that became older are discarded",
            "wait": "a step waits for groups that are so old, and finished ones that have no place in it become older",
        }[plan.strategy]
        age = (
            f"{MODE}={v1.trainer_mode}: a step trains on samples of weights that are at most {plan.bound} updates old "
            f"(trainer.v1.sampler.max_off_policy_threshold={plan.bound}): {how}"
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip":
        ratio = "the ratio that the loss clips is that to the weights that drew them (bypass_mode=true)"
    elif correction.rollout_is is not None:
        ratio = f"they have one importance weight per {correction.rollout_is} (rollout_is={correction.rollout_is})"
    elif compares_with_rollout(loss_mode):
        ratio = f"the policy loss compares with the weights that drew them (loss_mode={loss_mode})"
    else:
        ratio = "nothing corrects for their age (algorithm.rollout_correction)"
    clips_distance = correction.bypass_mode or correction.interpolates or compares_with_rollout(loss_mode)
    if plan.usual_age >= SEVERAL_UPDATES and not clips_distance:
        ratio += (
            f"; most are {plan.usual_age} updates old, at which bypass_mode=true and prox_logp_method=loglinear, which "
            "limit the distance from the policy that drew them, have learned better (docs/rollout_correction.md)"
        )
    return [f"{age}; {ratio}"]


def _replay_elsewhere(folder: str | None) -> Iterator[Problem]:
    """Refuse to replay in a mode that records nothing."""
    if folder is None:
        return
    cause = f"the recorded run had another {MODE}, on which the correction for the age of samples depends"
    remedy = f"set {MODE}=colocate_async, which trains on one process too, and all else as the recorded run had it"
    yield Problem("trainer.async.replay", folder, cause, "null", remedy)


def _separate(config: PPOConfig, plan: AsyncPlan) -> Iterator[Problem]:
    """Check the sizes and the placement of a run whose samples are drawn on other ranks."""
    mini_batch, pieces = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.trainer.v1.separate_async
    prompts = pieces.parameter_sync_step * mini_batch
    if plan.batch_prompts != prompts:
        key = "trainer.v1.separate_async.parameter_sync_step"
        cause = (
            f"a step trains on {key}={pieces.parameter_sync_step} mini-batches of ppo_mini_batch_size={mini_batch} "
            f"prompts each, and {plan.batch_prompts} is not {pieces.parameter_sync_step} x {mini_batch} = {prompts}"
        )
        remedy = f"set data.train_batch_size={prompts}"
        if plan.batch_prompts % mini_batch == 0:
            remedy += f", or {key}={plan.batch_prompts // mini_batch}"
        yield Problem("data.train_batch_size", plan.batch_prompts, cause, str(prompts), remedy)
    if plan.bound is not None and plan.sync_every > plan.bound + 1:
        key, sampler = "trainer.async.sync_every", "trainer.v1.sampler.max_off_policy_threshold"
        cause = (
            f"the last of {plan.sync_every} steps between two transfers trains on samples of weights that are "
            f"{plan.sync_every - 1} updates old, and {sampler}={plan.bound} allows {plan.bound}"
        )
        remedy = f"set it to {plan.bound + 1}, or {sampler}={plan.sync_every - 1}"
        yield Problem(key, plan.sync_every, cause, f"<= {plan.bound + 1}", remedy)
    if config.trainer.controller == "local":
        cause = (
            f"it runs one rank in this process, and {MODE}=separate_async needs ranks that train and ranks that sample"
        )
        yield Problem("trainer.controller", "local", cause, "ray", f"set it to ray, or {MODE}=colocate_async")


def _at(config: PPOConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = value[name]  # type: ignore[index]
    return value
