"""Rules about samples that come from another policy than the one that trains, and their correction."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from verl.algorithms import adv_needs, policy_loss_info
from verl.algorithms import rollout_correction as correction
from verl.config import PPOConfig, Problem, RolloutConfig
from verl.config.async_plan import AsyncPlan
from verl.errors import ConfigError
from verl.trainer.config.derive import BYPASS, compares_with_rollout, takes_weights, truncating
from verl.trainer.config.rules_engines import most_likely_tokens

Problems = Iterator[Problem]

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_BAND_OF_UPDATES = 1.01
"""A band of geometric means below this is narrower than what one update changes in a typical response."""
GAP_LIMIT = "trainer.max_rollout_actor_probs_diff"


def rollout_correction(config: PPOConfig) -> Problems:
    """Thresholds match their criteria, and every setting has an effect in the chosen mode."""
    settings = config.algorithm.rollout_correction
    try:
        correction.parse_is_threshold(settings.rollout_is_threshold)
    except ConfigError as error:
        yield Problem(f"{CORRECTION}.rollout_is_threshold", settings.rollout_is_threshold, str(error))
    if settings.rollout_rs is not None:
        try:
            correction.parse_criteria(settings.rollout_rs, settings.rollout_rs_threshold)
        except ConfigError as error:
            yield Problem(f"{CORRECTION}.rollout_rs", settings.rollout_rs, str(error))
    elif settings.rollout_rs_threshold is not None:
        remedy = f"name a criterion in {CORRECTION}.rollout_rs, or leave it null"
        cause = "nothing is rejected without a criterion"
        yield Problem(f"{CORRECTION}.rollout_rs_threshold", settings.rollout_rs_threshold, cause, remedy=remedy)
    if settings.rollout_is_batch_normalize and settings.rollout_is is None:
        remedy = f"set {CORRECTION}.rollout_is=token or sequence"
        yield Problem(
            f"{CORRECTION}.rollout_is_batch_normalize", True, "there are no weights", "false", remedy, advice=True
        )
    yield from _bypass(config) if settings.bypass_mode else _decoupled(config)
    if settings.bypass_mode and settings.interpolates:
        cause = "the bypass mode has no proximal policy: the policy that sampled is the old one"
        yield Problem(f"{CORRECTION}.prox_logp_method", "loglinear", cause, "recompute", "or set bypass_mode=false")
    elif settings.interpolates:
        yield from _interpolated(config)
    if settings.bypass_mode or settings.interpolates:
        yield from _without_pass(config)


def _decoupled(config: PPOConfig) -> Problems:
    settings, loss_mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if settings.loss_type != "ppo_clip":
        cause = f"it is the loss of the bypass mode; without it {LOSS_MODE} is the loss"
        remedy = f"set {CORRECTION}.bypass_mode=true, or leave it at ppo_clip"
        yield Problem(f"{CORRECTION}.loss_type", settings.loss_type, cause, remedy=remedy)
    if loss_mode == BYPASS:
        cause = "this loss uses the rollout's log-probs as the old ones, but the trainer computes its own"
        remedy = f"set {CORRECTION}.bypass_mode=true, which chooses this loss by itself"
        yield Problem(LOSS_MODE, loss_mode, cause, remedy=remedy)
    if settings.rollout_is is not None and not takes_weights(loss_mode):
        cause = f"{LOSS_MODE}={loss_mode} has no parameter rollout_is_weights, so no weight would reach it"
        remedy = "add the parameter to your loss, or leave it null"
        yield Problem(f"{CORRECTION}.rollout_is", settings.rollout_is, cause, remedy=remedy)
    elif settings.rollout_is is not None and compares_with_rollout(loss_mode):
        cause = f"{LOSS_MODE}={loss_mode} has the ratio to the policy that sampled, so a part of it would count twice"
        yield Problem(f"{CORRECTION}.rollout_is", settings.rollout_is, cause, "null")


def _bypass(config: PPOConfig) -> Problems:
    settings = config.algorithm.rollout_correction
    if settings.rollout_is is not None and settings.loss_type == "ppo_clip":
        cause = f"it has no effect with {CORRECTION}.loss_type=ppo_clip, whose clipped ratio is the importance weight"
        remedy = "leave it null, or set loss_type=reinforce"
        yield Problem(f"{CORRECTION}.rollout_is", settings.rollout_is, cause, remedy=remedy, advice=True)


def _interpolated(config: PPOConfig) -> Problems:
    """Interpolated old log-probs exist only inside of the policy loss, so that nothing else may read them."""
    algorithm, loss_mode = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    key, remedy = f"{CORRECTION}.prox_logp_method", "or choose prox_logp_method=recompute"
    if AsyncPlan.from_config(config).mode == "sync":
        cause = "all samples are of the weights before the step, so the interpolated policy is the one that sampled"
        remedy_here = f"{CORRECTION}.bypass_mode=true says the same in fewer words"
        yield Problem(key, "loglinear", cause, remedy=remedy_here, advice=True)
    if algorithm.use_kl_in_reward:
        cause = "the KL in the reward reads old log-probs before the update, and loglinear makes them in the loss"
        yield Problem("algorithm.use_kl_in_reward", True, cause, "false", "use actor.use_kl_loss=true, " + remedy)
    try:
        needs, info = adv_needs(algorithm.adv_estimator), policy_loss_info(loss_mode)
    except ConfigError:
        return  # other rules report an unknown name
    if "old_log_probs" in needs.columns:
        cause = "the estimator reads old log-probs before the update, and loglinear makes them in the loss"
        yield Problem("algorithm.adv_estimator", algorithm.adv_estimator, cause, remedy="choose another, " + remedy)
    if info.returns_terms and "old_log_prob" not in inspect.signature(info.function).parameters:
        cause = (
            "the loss has no ratio to the old policy, so that only a part of each weight would be applied: of "
            "π_θ/π_b = π_θ/π_prox · π_prox/π_b, the second factor"
        )
        yield Problem(LOSS_MODE, loss_mode, cause, remedy="choose one with a ratio, such as vanilla, " + remedy)
    if info.prepare is not None:
        cause = "the loss reads old log-probs of the whole mini-batch first, and loglinear makes them in the loss"
        yield Problem(LOSS_MODE, loss_mode, cause, remedy="choose another, " + remedy)
    if algorithm.rollout_correction.rollout_rs is not None and not info.takes_weights:
        cause = f"{LOSS_MODE}={loss_mode} has no parameter rollout_is_weights, by which tokens are taken out"
        value = algorithm.rollout_correction.rollout_rs
        yield Problem(f"{CORRECTION}.rollout_rs", value, cause, remedy="add the parameter to your loss, " + remedy)


def _without_pass(config: PPOConfig) -> Problems:
    """Settings that read what only the skipped pass over the policy before its update computes."""
    actor, limit = config.actor_rollout_ref.actor, config.trainer.max_rollout_actor_probs_diff
    bypasses = config.algorithm.rollout_correction.bypass_mode
    setting = "bypass_mode=true" if bypasses else "prox_logp_method=loglinear"
    remedy = f"or set {CORRECTION}.{'bypass_mode=false' if bypasses else 'prox_logp_method=recompute'}"
    cause = f"with {CORRECTION}.{setting} the trainer makes no pass for old log-probs, and so has no entropy"
    if actor.policy_loss.top_entropy_quantile < 1:
        key = "actor_rollout_ref.actor.policy_loss.top_entropy_quantile"
        yield Problem(key, actor.policy_loss.top_entropy_quantile, cause, "1", remedy)
    if actor.entropy_target is not None:
        yield Problem("actor_rollout_ref.actor.entropy_target", actor.entropy_target, cause, "null", remedy)
    if limit is not None:
        cause = f"with {CORRECTION}.{setting} the trainer makes no pass for old log-probs: there is nothing to compare"
        yield Problem(GAP_LIMIT, limit, cause, "null", f"leave it null, {remedy}")
    if actor.router_replay.mode == "R2":
        cause = f"{CORRECTION}.{setting} skips the pass of the actor that would record the choice"
        yield Problem("actor_rollout_ref.actor.router_replay.mode", "R2", cause, "disabled, R3")
    try:
        reads_sum = "sum_pi_squared" in adv_needs(config.algorithm.adv_estimator).columns
    except ConfigError:
        return  # the rule of estimators reports an unknown name
    if reads_sum:
        cause = f"it reads Σπ², which the pass would compute that {CORRECTION}.{setting} skips"
        yield Problem("algorithm.adv_estimator", config.algorithm.adv_estimator, cause, remedy=remedy[3:])


def truncated_sampling(config: PPOConfig) -> Problems:
    """Training corrects for truncated sampling, and log-probs are those of the distribution sampled from."""
    rollout = config.actor_rollout_ref.rollout
    cut = truncating(rollout)
    if cut is None:
        if rollout.logprobs_mode == "raw_logprobs" and rollout.do_sample and rollout.temperature not in (0, 1):
            yield _raw(rollout, f"{ROLLOUT}.temperature={rollout.temperature}")
        return
    name, off = cut
    key, value = f"{ROLLOUT}.{name}", rollout[name]
    if rollout.logprobs_mode == "raw_logprobs":
        yield _raw(rollout, f"{key}={value}")
    if rollout.keep_sampling_mask:
        return
    if not weighs_samples(config):
        yield Problem(
            key,
            value,
            "the samples then come from a truncated distribution μ, not from the policy π, and a gradient that takes "
            "them for samples of π is biased",
            remedy=f"set {key}={off} for training (validation may truncate: val_kwargs.{name}), or weigh the samples "
            f"by π/μ with {CORRECTION}.rollout_is=token, or clip against μ with {CORRECTION}.bypass_mode=true",
            advice=True,
        )
    limit = config.trainer.max_rollout_actor_probs_diff
    if limit is not None:
        cause = f"with {key}={value} the rollout's probabilities are larger than the trainer's by design"
        yield Problem(GAP_LIMIT, limit, cause, "null", f"leave it null, or set {key}={off}")


def sampling_mask(config: PPOConfig) -> Problems:
    """Sampling keeps some tokens, the engine tells which, and all that reads log-probs can be restricted to them."""
    roles = config.actor_rollout_ref
    rollout, key = roles.rollout, f"{ROLLOUT}.keep_sampling_mask"
    if not rollout.keep_sampling_mask:
        return
    if truncating(rollout) is None:
        cause = "without truncated sampling every token is kept, and the mask changes nothing"
        yield Problem(key, True, cause, "false", f"set {ROLLOUT}.top_k, top_p or min_p, or leave it out")
    elif not 0 < rollout.top_k <= rollout.keep_sampling_mask_limit:
        limit = rollout.keep_sampling_mask_limit
        cause = f"with keep_sampling_mask at most keep_sampling_mask_limit={limit} ids are stored for each drawn token"
        yield Problem(
            f"{ROLLOUT}.top_k",
            rollout.top_k,
            cause,
            f"1 to {limit}",
            f"or set {key}_limit={max(rollout.top_k, limit)}, which stores 4 bytes for each id",
        )
    else:
        asks = f"keep_sampling_mask with top_k={rollout.top_k}"
        yield from most_likely_tokens(ROLLOUT, rollout, rollout.kept_ids_width + 1, asks)
    if rollout.skip_rollout:
        cause = f"files of {ROLLOUT}.skip_rollout do not say whether they have the kept tokens"
        yield Problem(key, True, cause, "false", f"or set {ROLLOUT}.skip_rollout=false")
    if config.distillation.enabled:
        cause = "distillation.enabled=true compares the policy with its teacher over the whole vocabulary"
        yield Problem(key, True, cause, "false", "or set distillation.enabled=false")
    if roles.actor.calculate_sum_pi_squared:
        cause = (
            "Σπ² (actor.calculate_sum_pi_squared) is that of the whole vocabulary, and log π that of the kept tokens"
        )
        yield Problem(key, True, cause, "false", "or choose an algorithm.adv_estimator that does not read Σπ²")


def weighs_samples(config: PPOConfig) -> bool:
    """Return whether something corrects for samples of another distribution than the policy: weights, or the loss."""
    settings, loss_mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if settings.bypass_mode:
        return settings.loss_type == "ppo_clip" or settings.rollout_is is not None
    return settings.rollout_is is not None or compares_with_rollout(loss_mode)


def lag(config: PPOConfig) -> Problems:
    """Training corrects for samples of earlier weights."""
    plan = AsyncPlan.from_config(config)
    key, value = "trainer.async.lag", plan.lag
    if plan.is_free_running:
        key, value = "trainer.v1.trainer_mode", config.trainer.v1.trainer_mode
    if plan.mode != "sync" and not weighs_samples(config):
        yield Problem(
            key,
            value,
            "the samples then come from earlier weights, and a gradient that takes them for samples of the policy is "
            "biased",
            remedy=f"weigh them with {CORRECTION}.rollout_is=token, or clip against the policy that drew them with "
            f"{CORRECTION}.bypass_mode=true",
            advice=True,
        )
    settings = config.algorithm.rollout_correction
    if plan.mode != "sync" and settings.rollout_rs is not None:
        try:
            criteria = correction.parse_criteria(settings.rollout_rs, settings.rollout_rs_threshold)
        except ConfigError:
            return  # reported with the thresholds
        if any(name == "seq_mean_k1" and band.upper < _BAND_OF_UPDATES for name, band in criteria):
            cause = (
                f"such a band is made for the rounding between two engines; with {key}={value} the ratios are those "
                "of whole updates, and it may reject nearly every response (rollout_corr/rollout_rs_masked_fraction)"
            )
            remedy = f"widen it, or leave {CORRECTION}.rollout_rs null and weigh by rollout_is=token"
            yield Problem(
                f"{CORRECTION}.rollout_rs_threshold", settings.rollout_rs_threshold, cause, remedy=remedy, advice=True
            )


def _raw(rollout: RolloutConfig, because: str) -> Problem:
    cause = f"these are not the log-probs of the distribution that was sampled from ({because})"
    return Problem(
        f"{ROLLOUT}.logprobs_mode",
        rollout.logprobs_mode,
        cause,
        "processed_logprobs",
        f"set {ROLLOUT}.logprobs_mode=processed_logprobs",
    )
