"""Policy losses on the ratio of each token, and weighted score-function losses.

The latter, -sg[w]·A·log π, have the gradient -w·A·∇log π on every token with w > 0, also where PPO's clip would stop
it. Their value has no meaning beyond that: it moves with log π.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.loss_registry import LossTerms, bounded_log_ratio, register_policy_loss
from verl.errors import ConfigError


@register_policy_loss(
    "vanilla",
    paper="https://arxiv.org/abs/1707.06347",
    returns_terms=True,
    reproduces={
        "DAPO (arXiv:2503.14476)": (
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=acc",
            "data.train_batch_size=512",
            "actor_rollout_ref.rollout.n=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "data.max_response_length=20480",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.max_resp_len=20480",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        ),
        "Beyond the 80/20 rule (arXiv:2506.01939)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.top_entropy_quantile=0.2",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
        "DeepSeek-V3.2 (arXiv:2512.02556)": (
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=false",
            "actor_rollout_ref.actor.policy_loss.off_policy_mask_threshold=0.1",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_type=k3",
            "actor_rollout_ref.actor.use_bias_correction_kl=true",
        ),
        "DeepSeek-V3.2, keep sampling mask (arXiv:2512.02556)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.top_p=0.95",
            "actor_rollout_ref.rollout.keep_sampling_mask=true",
        ),
        "ECHO (arXiv:2605.24517)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.use_echo_loss=true",
            "actor_rollout_ref.actor.echo_loss_coef=0.1",
        ),
        "Skywork-OR1, adaptive entropy control (arXiv:2505.22312)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.entropy_target=0.2",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
    },
)
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> LossTerms:
    """The clipped loss of PPO, with separate bounds below and above and the dual clip.

        r = π / π_old
        l_t = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))
        l_t = min(l_t, -A·c)                                 where A < 0

    Papers: PPO https://arxiv.org/abs/1707.06347 eq. 7; dual clip https://arxiv.org/abs/1912.09729 eq. 5, with
    c = ``clip_ratio_c``; separate bounds (clip-higher) DAPO https://arxiv.org/abs/2503.14476 eq. 10.
    """
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    losses = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    # With A < 0 the first clip leaves large ratios unbounded, and with them the gradient.
    is_dual_clipped = (advantages < 0) & (losses > bound)
    losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return LossTerms(losses, clipped > plain, is_dual_clipped)


@register_policy_loss(
    "sapo",
    paper="https://arxiv.org/abs/2511.20347",
    returns_terms=True,
    paper_mode="seq-mean-token-mean",
    reproduces={
        "SAPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.tau_pos=1.0",
            "actor_rollout_ref.actor.tau_neg=1.05",
        )
    },
)
def sapo(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> LossTerms:
    """Soft adaptive policy optimization: a sigmoid gate that reduces the gradient smoothly as the ratio leaves 1.

        l_t = -A · σ(τ·(r - 1)) · 4 / τ          τ = tau_pos where A > 0, else tau_neg

    At r = 1 its gradient is the policy gradient; away from it the gradient falls like the slope of the sigmoid, faster
    for a larger τ. Nothing is clipped, so both clip fractions are 0.

    Paper: https://arxiv.org/abs/2511.20347, whose aggregation is ``seq-mean-token-mean``.
    """
    tau = torch.where(advantages > 0, tau_pos, torch.full_like(advantages, tau_neg))
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    return LossTerms(-advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau)


@register_policy_loss(
    "up",
    paper="https://arxiv.org/abs/2607.06987",
    returns_terms=True,
    reproduces={
        "UP-DAPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=up",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
        "UP-GRPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=up",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        ),
    },
)
def up(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> LossTerms:
    """Unbounded positive asymmetric optimization: the policy gradient where A > 0, PPO's clip elsewhere.

        l_t = -A · π / sg[π]                                 where A > 0
        l_t = the clipped loss of PPO with its dual clip     where A ≤ 0, as ``vanilla``

    The first has the value -A and the gradient -A·∇log π whatever the old policy says: an unlikely token of a good
    response is reinforced in full, and no ratio can grow. ``clip_ratio_high`` has no effect there.

    Paper: https://arxiv.org/abs/2607.06987, eq. 14 and 15.
    """
    clipped = vanilla(old_log_prob, log_prob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    anchored = -advantages * (log_prob - log_prob.detach()).exp()
    is_positive, is_clipped = advantages > 0, clipped.is_clipped
    assert is_clipped is not None
    return LossTerms(
        torch.where(is_positive, anchored, clipped.losses), is_clipped & ~is_positive, clipped.is_clipped_lower
    )


@register_policy_loss(
    "cfpo",
    paper="https://arxiv.org/abs/2601.22801",
    returns_terms=True,
    reproduces={
        "CFPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=cfpo",
            "actor_rollout_ref.actor.clip_ratio=0.2",
        )
    },
)
def cfpo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> LossTerms:
    """Clipping-free policy optimization: a quadratic penalty on the ratio in place of a clip.

        l_t = -(A·r - |A| / (2ε) · (r - 1)²)        ε = ``clip_ratio_high`` where A > 0, else ``clip_ratio_low``

    Its minimum is at r = 1 ± ε, where PPO's clip begins, and beyond it the gradient leads back. At r = 1 it is the
    policy gradient. Nothing is clipped, so both clip fractions are 0. The paper has one ε: ``clip_ratio``.

    Paper: https://arxiv.org/abs/2601.22801, eq. 7.

    Raises:
        ConfigError: an ε is 0.
    """
    if min(clip_ratio_low, clip_ratio_high) <= 0:
        raise ConfigError(
            f"the cfpo policy loss divides by its bounds, and clip_ratio_low={clip_ratio_low}, "
            f"clip_ratio_high={clip_ratio_high}: set both above 0, e.g. clip_ratio=0.2."
        )
    bound = torch.where(advantages > 0, clip_ratio_high, torch.full_like(advantages, clip_ratio_low))
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    return LossTerms(-advantages * ratio + advantages.abs() / (2.0 * bound) * (ratio - 1.0) ** 2)


@register_policy_loss("dro", paper="https://arxiv.org/abs/2405.19107", returns_terms=True)
def dro(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, dro_beta: float | None) -> LossTerms:
    """Direct reward optimization: the policy gradient with a quadratic penalty on the distance to the old policy.

        l_t = -(A·log π - ½ β·(log π - log π_old)²)

    Its gradient vanishes where β·(log π - log π_old) = A, that is, once the log-prob has moved by A / β. Nothing is
    clipped, so both clip fractions are 0; ``actor/dro_penalty`` is the mean of the quadratic term.

    Paper: https://arxiv.org/abs/2405.19107 (the policy's part of its objective).

    Raises:
        ConfigError: ``policy_loss.dro_beta`` is not set.
    """
    if dro_beta is None:
        raise ConfigError(
            "the dro policy loss needs dro_beta, the weight of its quadratic term. It has the unit of "
            "advantages per nat: with normalised advantages, 0.1 lets a token's log-prob move by about 10."
        )
    # Not bounded, unlike a ratio: a square does not overflow, and its slope must lead back from any distance.
    penalty = 0.5 * dro_beta * (log_prob - old_log_prob) ** 2
    return LossTerms(penalty - advantages * log_prob, metrics={"actor/dro_penalty": penalty})


@register_policy_loss(
    "gpg",
    paper="https://arxiv.org/abs/2504.02546",
    returns_terms=True,
    reproduces={
        "GPG": (
            "algorithm.adv_estimator=gpg",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def gpg(log_prob: Tensor, advantages: Tensor) -> LossTerms:
    """The plain policy gradient, without a ratio.

        l_t = -A · log π

    Paper: GPG, https://arxiv.org/abs/2504.02546. With more than one optimizer step per batch the later ones are
    off-policy, and nothing corrects for that.
    """
    return LossTerms(-advantages * log_prob)


@register_policy_loss(
    "cispo",
    paper="https://arxiv.org/abs/2506.13585",
    returns_terms=True,
    reproduces={
        "CISPO with the bound of ScaleRL (arXiv:2510.13786)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.clip_ratio_low=1.0",
            "actor_rollout_ref.actor.clip_ratio_high=4.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> LossTerms:
    """Clipped importance weights: the weight is bounded, and every token keeps its gradient.

        l_t = -sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π

    Paper: MiniMax-M1, https://arxiv.org/abs/2506.13585. The paper has no lower bound: set ``clip_ratio_low=1``.
    ``actor/pg_clipfrac`` counts weights clipped above, ``..._lower`` below.
    """
    ratio = bounded_log_ratio(log_prob, old_log_prob).detach().exp()
    low, high = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    return LossTerms(-ratio.clamp(low, high) * advantages * log_prob, ratio > high, ratio < low)


def total_variation(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """|π - π_old| of the sampled token: the total variation of the binary distribution sampled token / any other."""
    return (log_prob.exp() - old_log_prob.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """KL(π_old ‖ π) of the binary distribution sampled token / any other, in nats.

    π_old·log(π_old / π) + (1 - π_old)·log((1 - π_old) / (1 - π))
    """
    tiny = torch.finfo(log_prob.dtype).tiny
    other, old_other = -torch.expm1(log_prob), -torch.expm1(old_log_prob)  # 1 - π, precise also near 1
    change = old_other.clamp(min=tiny).log() - other.clamp(min=tiny).log()
    return old_log_prob.exp() * (old_log_prob - log_prob) + old_other * change


@register_policy_loss("dppo_tv", paper="https://arxiv.org/abs/2602.04879", returns_terms=True)
def dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> LossTerms:
    """Divergence PPO with the total variation: the trust region bounds probabilities instead of ratios.

        l_t = -sg[M · min(r, c)] · A · log π
        M   = 0 where |π - π_old| > δ and the step would increase the distance
              (A > 0 and π > π_old, or A < 0 and π < π_old), else 1

    A rare token may then double its probability, and a frequent one may not fall by more than δ; a bound on PPO's ratio
    does the opposite. δ is ``clip_ratio_high`` for A > 0 and ``clip_ratio_low`` for A < 0; c, ``clip_ratio_c``,
    truncates the importance weight (the paper's is far above PPO's dual clip; 20 is usual).

    Paper: https://arxiv.org/abs/2602.04879 (binary total variation). ``actor/pg_clipfrac`` counts
    tokens with M = 0, ``..._lower`` those with a ratio above c.
    """
    distance = total_variation(log_prob.detach(), old_log_prob)
    return _dppo(distance, old_log_prob, log_prob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)


@register_policy_loss("dppo_kl", paper="https://arxiv.org/abs/2602.04879", returns_terms=True)
def dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> LossTerms:
    """Divergence PPO with the binary KL (sampled token / any other) as the distance.

        l_t = -sg[M · min(r, c)] · A · log π
        M   = 0 where D > δ and the step would increase the distance, else 1
        D   = π_old·log(π_old / π) + (1 - π_old)·log((1 - π_old) / (1 - π))

    Otherwise as ``dppo_tv``, with bounds in nats. It is stricter where a probability is close to 0 or 1.

    Paper: https://arxiv.org/abs/2602.04879 (binary KL).
    """
    distance = binary_kl(log_prob.detach(), old_log_prob)
    return _dppo(distance, old_log_prob, log_prob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def _dppo(
    distance: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> LossTerms:
    log_ratio = bounded_log_ratio(log_prob, old_log_prob).detach()
    bound = torch.where(advantages > 0, clip_ratio_high, torch.full_like(advantages, clip_ratio_low))
    is_outward = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    is_stopped = (distance > bound) & is_outward
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=clip_ratio_c) * ~is_stopped
    return LossTerms(-weight * advantages * log_prob, is_stopped, ratio > clip_ratio_c)
