"""The policy loss fits its aggregation and has what it reads; the entropy's target fits its bounds."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.problems import Problem
from verl.workers.config.actor import ActorConfig

ACTOR = "actor_rollout_ref.actor"


def policy_loss(actor: ActorConfig) -> Iterator[Problem]:
    """Settings that the chosen policy loss needs or cannot have; it must exist."""
    from verl.trainer.ppo.core_algos import policy_loss_info

    settings, mode = actor.policy_loss, actor.loss_agg_mode
    name, info = settings.loss_mode, policy_loss_info(actor.policy_loss.loss_mode)
    if info.modes is not None and mode not in info.modes:
        wrong = (
            f"policy_loss.loss_mode={name} makes no sense with it: it would divide out the lengths that the loss has"
        )
        remedy = f"the paper's is {info.paper_mode}" if info.paper_mode else ""
        yield Problem(f"{ACTOR}.loss_agg_mode", mode, wrong, ", ".join(info.modes), remedy)
    elif info.paper_mode is not None and mode != info.paper_mode and info.modes is None:
        yield Problem(
            f"{ACTOR}.loss_agg_mode",
            mode,
            f"the paper of policy_loss.loss_mode={name} ({info.paper}) has {info.paper_mode}, which releases of verl "
            "take whatever is set; here the setting counts",
            remedy=f"set loss_agg_mode={info.paper_mode}, unless this is what you want",
            advice=True,
        )
    if settings.top_entropy_quantile < 1 and not info.takes_weights:
        wrong = f"policy_loss.loss_mode={name} has no parameter rollout_is_weights, by which tokens are taken out"
        remedy = "add the parameter to your loss, or keep all tokens"
        yield Problem(f"{ACTOR}.policy_loss.top_entropy_quantile", settings.top_entropy_quantile, wrong, "1", remedy)
    if name == "dro" and settings.dro_beta is None:
        wrong = "policy_loss.loss_mode=dro is a policy gradient without any leash unless it has this weight"
        remedy = "0.1 lets the log-prob of a token with advantage 1 move by 10 nats, 10 by 0.1"
        yield Problem(f"{ACTOR}.policy_loss.dro_beta", None, wrong, "> 0", remedy)
    if name == "clip_cov" and settings.clip_cov_lb >= settings.clip_cov_ub:
        wrong = f"no covariance lies between it and policy_loss.clip_cov_ub={settings.clip_cov_ub}"
        yield Problem(f"{ACTOR}.policy_loss.clip_cov_lb", settings.clip_cov_lb, wrong, f"< {settings.clip_cov_ub}")


def entropy_control(actor: ActorConfig) -> Iterator[Problem]:
    """The weight of the entropy bonus starts within the bounds that it is kept in."""
    if actor.entropy_target is None:
        return
    low, high = actor.entropy_coeff_min, actor.entropy_coeff_max
    if low > high:
        yield Problem(f"{ACTOR}.entropy_coeff_min", low, f"it is above entropy_coeff_max={high}", f"<= {high}")
    elif not low <= actor.entropy_coeff <= high:
        wrong = f"with entropy_target it is kept between entropy_coeff_min={low} and entropy_coeff_max={high}"
        yield Problem(f"{ACTOR}.entropy_coeff", actor.entropy_coeff, wrong, f"{low} to {high}")
