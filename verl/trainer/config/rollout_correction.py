"""Rules of rollout correction and truncated sampling, and how the actor learns of the bypass mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl.errors import ConfigError
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem
from verl.workers.config.rollout import RolloutConfig

Problems = Iterator[Problem]

_CORRECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_GAP_LIMIT = "trainer.max_rollout_actor_probs_diff"
BYPASS = "bypass_mode"


def with_bypass_mode(config: PPOConfig) -> PPOConfig:
    """A checked configuration whose actor knows the correction, if ``algorithm.rollout_correction.bypass_mode``.

    The policy loss becomes ``bypass_mode``, and gets its settings as ``policy_loss.rollout_correction``. This is the
    one place where that is done.
    """
    correction = config.algorithm.rollout_correction
    if not correction.bypass_mode:
        return config
    roles = config.actor_rollout_ref
    loss = replace(roles.actor.policy_loss, loss_mode=BYPASS, rollout_correction=correction)
    return replace(config, actor_rollout_ref=replace(roles, actor=replace(roles.actor, policy_loss=loss)))


def rollout_correction(config: PPOConfig) -> Problems:
    """Thresholds fit their criteria, and every setting is read by something."""
    from verl.trainer.ppo.core_algos.rollout_correction import parse_criteria, parse_is_threshold

    chosen = config.algorithm.rollout_correction
    try:
        parse_is_threshold(chosen.rollout_is_threshold)
    except ConfigError as error:
        yield Problem(f"{_CORRECTION}.rollout_is_threshold", chosen.rollout_is_threshold, str(error))
    if chosen.rollout_rs is not None:
        try:
            parse_criteria(chosen.rollout_rs, chosen.rollout_rs_threshold)
        except ConfigError as error:
            yield Problem(f"{_CORRECTION}.rollout_rs", chosen.rollout_rs, str(error))
    elif chosen.rollout_rs_threshold is not None:
        remedy = f"name a criterion in {_CORRECTION}.rollout_rs, or leave it null"
        wrong = "nothing is rejected without a criterion"
        yield Problem(f"{_CORRECTION}.rollout_rs_threshold", chosen.rollout_rs_threshold, wrong, remedy=remedy)
    if chosen.rollout_is_batch_normalize and chosen.rollout_is is None:
        remedy = f"set {_CORRECTION}.rollout_is=token or sequence"
        yield Problem(f"{_CORRECTION}.rollout_is_batch_normalize", True, "there are no weights", "false", remedy)
    yield from _bypass(config) if chosen.bypass_mode else _decoupled(config)


def _decoupled(config: PPOConfig) -> Problems:
    chosen, loss_mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if chosen.loss_type != "ppo_clip":
        wrong = f"it is the loss of the bypass mode; without it {_LOSS_MODE} is the loss"
        remedy = f"set {_CORRECTION}.bypass_mode=true, or leave it at ppo_clip"
        yield Problem(f"{_CORRECTION}.loss_type", chosen.loss_type, wrong, remedy=remedy)
    if loss_mode == BYPASS:
        wrong = "this loss takes the rollout's log-probs for the old ones, and the trainer computes its own"
        remedy = f"set {_CORRECTION}.bypass_mode=true, which chooses this loss by itself"
        yield Problem(_LOSS_MODE, loss_mode, wrong, remedy=remedy)
    if chosen.rollout_is is not None and not _takes_weights(loss_mode):
        wrong = f"{_LOSS_MODE}={loss_mode} has no parameter rollout_is_weights, so no weight would reach it"
        remedy = "add the parameter to your loss, or leave it null"
        yield Problem(f"{_CORRECTION}.rollout_is", chosen.rollout_is, wrong, remedy=remedy)


def _takes_weights(loss_mode: str) -> bool:
    """Whether a loss reads importance weights; true for an unknown one, which is a problem of its own."""
    from verl.trainer.ppo.core_algos import policy_loss_info

    try:
        return policy_loss_info(loss_mode).takes_weights
    except ConfigError:
        return True


def _bypass(config: PPOConfig) -> Problems:
    chosen, loss_mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss_mode not in ("vanilla", BYPASS):
        wrong = f"with {_CORRECTION}.bypass_mode=true the loss is {_CORRECTION}.loss_type"
        yield Problem(_LOSS_MODE, loss_mode, wrong, f"vanilla, {BYPASS}", "leave it out, or set bypass_mode=false")
    if chosen.rollout_is_batch_normalize and chosen.rollout_is is not None:
        wrong = (
            "in the bypass mode weights are made inside the loss, which sees one micro-batch: their mean, and with it "
            "every gradient, would depend on how the batch is cut and dealt to ranks"
        )
        remedy = f"set it to false, or {_CORRECTION}.bypass_mode=false, which normalises over the whole batch"
        yield Problem(f"{_CORRECTION}.rollout_is_batch_normalize", True, wrong, "false", remedy)
    if chosen.rollout_is is not None and chosen.loss_type == "ppo_clip":
        wrong = f"it has no effect with {_CORRECTION}.loss_type=ppo_clip, whose clipped ratio is the importance weight"
        remedy = "leave it null, or set loss_type=reinforce"
        yield Problem(f"{_CORRECTION}.rollout_is", chosen.rollout_is, wrong, remedy=remedy, advice=True)
    actor = config.actor_rollout_ref.actor
    wrong = "in the bypass mode the trainer computes no old log-probs, and so no entropy"
    if actor.policy_loss.top_entropy_quantile < 1:
        key = "actor_rollout_ref.actor.policy_loss.top_entropy_quantile"
        yield Problem(
            key, actor.policy_loss.top_entropy_quantile, wrong, "1", f"or set {_CORRECTION}.bypass_mode=false"
        )
    if actor.entropy_target is not None:
        key = "actor_rollout_ref.actor.entropy_target"
        yield Problem(key, actor.entropy_target, wrong, "null", f"or set {_CORRECTION}.bypass_mode=false")
    if config.trainer.max_rollout_actor_probs_diff is not None:
        wrong = "in the bypass mode the trainer computes no old log-probs, so there is nothing to compare"
        remedy = f"leave it null, or set {_CORRECTION}.bypass_mode=false"
        yield Problem(_GAP_LIMIT, config.trainer.max_rollout_actor_probs_diff, wrong, "null", remedy)


def truncated_sampling(config: PPOConfig) -> Problems:
    """Training on truncated samples accounts for the truncation; log-probs are those of what was sampled from."""
    rollout, chosen = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    cut = _truncation(rollout)
    if cut is None:
        if rollout.logprobs_mode == "raw_logprobs" and rollout.do_sample and rollout.temperature not in (0, 1):
            yield _raw(rollout, f"{_ROLLOUT}.temperature={rollout.temperature}")
        return
    name, value, off = cut
    key = f"{_ROLLOUT}.{name}"
    if rollout.logprobs_mode == "raw_logprobs":
        yield _raw(rollout, f"{key}={value}")
    corrects = chosen.rollout_is is not None or (chosen.bypass_mode and chosen.loss_type == "ppo_clip")
    if not corrects:
        yield Problem(
            key,
            value,
            "the samples then come from a truncated distribution μ, not from the policy π, and a gradient that takes "
            "them for samples of π is biased",
            remedy=f"set {key}={off} for training (validation may truncate: val_kwargs.{name}), or weigh the samples "
            f"by π/μ with {_CORRECTION}.rollout_is=token, or clip against μ with {_CORRECTION}.bypass_mode=true",
        )
    limit = config.trainer.max_rollout_actor_probs_diff
    if limit is not None:
        wrong = f"with {key}={value} the rollout's probabilities are larger than the trainer's by design"
        yield Problem(_GAP_LIMIT, limit, wrong, "null", f"leave it null, or set {key}={off}")


def _truncation(rollout: RolloutConfig) -> tuple[str, float, float] | None:
    """The setting that truncates training responses, its value, and the value that does not; None without one."""
    if not rollout.do_sample or rollout.temperature == 0:
        return None
    settings = (("top_p", rollout.top_p < 1, 1), ("top_k", rollout.top_k > 0, -1), ("min_p", rollout.min_p > 0, 0))
    return next(((name, rollout[name], off) for name, truncates, off in settings if truncates), None)


def _raw(rollout: RolloutConfig, because: str) -> Problem:
    wrong = f"these are not the log-probs of the distribution that was sampled from ({because})"
    return Problem(
        f"{_ROLLOUT}.logprobs_mode",
        rollout.logprobs_mode,
        wrong,
        "processed_logprobs",
        f"set {_ROLLOUT}.logprobs_mode=processed_logprobs",
    )
