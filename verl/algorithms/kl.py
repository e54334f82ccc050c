"""KL divergence from the reference policy: estimators, the penalty in the reward, and controllers of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.base.registry import suggest
from verl.errors import ConfigError, UnsupportedError
from verl.utils.torch_functional import masked_mean, zero_masked

if TYPE_CHECKING:
    from verl.config import KLControlConfig


def _k1(delta: Tensor) -> Tensor:
    return delta


def _k2(delta: Tensor) -> Tensor:
    return 0.5 * delta**2


def _k3(delta: Tensor) -> Tensor:
    bounded = delta.clamp(-20.0, 20.0)  # keeps the exponential, and so its gradient, finite
    return (torch.exp(-bounded) + bounded - 1.0).clamp(-10.0, 10.0)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_KINDS = (*_KINDS, *(f"{kind}+" for kind in _KINDS))
"""Valid values of ``kl_penalty`` in :func:`kl_penalty`."""


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Value of :func:`kl_penalty`, with the gradient of that value; a ``+`` at the end of the kind is ignored."""
    base = kl_penalty.removesuffix("+")
    if base == "full":
        raise UnsupportedError(
            "kl_penalty='full' sums over the whole vocabulary, but only the log-probs of the sampled tokens are kept. "
            "Use low_var_kl (k3), the estimator of least variance."
        )
    if base not in _KINDS:
        near = suggest(kl_penalty, list(KL_KINDS))
        raise UnsupportedError(f"unknown kl_penalty '{kl_penalty}'.{near} Known: {', '.join(KL_KINDS)}.")
    return _KINDS[base](logprob - ref_logprob)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from the log-probs of the sampled tokens.

    With Δ = log π - log π_ref (http://joschu.net/blog/kl-approx.html)::

        kl,  k1          Δ                        unbiased, may be negative
        abs              |Δ|
        mse, k2          ½ Δ²                     its gradient is that of the KL, in expectation
        low_var_kl, k3   e^{-Δ} + Δ - 1           unbiased, never negative; Δ to ±20, result to ±10
        <kind>+          value of <kind>, gradient of k2 (straight-through)

    The ``+`` matters in a loss: the value of k1 is unbiased but its gradient has mean zero, and
    that of k3 is the gradient of the forward KL. Every kind may have it.

    Args:
        logprob: (...) log π of the sampled tokens.
        ref_logprob: (...) log π_ref of the same tokens.
        kl_penalty: one of the kinds above.

    Raises:
        ConfigError: there is no such kind, or it needs more than the sampled tokens.
    """
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    if not kl_penalty.endswith("+"):
        return value
    carrier = _k2(logprob - ref_logprob)
    return carrier - carrier.detach() + value.detach()


def bias_corrected_kl(
    kl: Tensor, log_prob: Tensor, old_log_prob: Tensor, rollout_is_weights: Tensor | None = None
) -> Tensor:
    """Weigh the estimate of each token by the ratio of the policy to the one that sampled, gradient included.

        w · r · kl        r = π / π_old, |log r| at most 20        w the importance weight π_old / μ, or 1

    An estimate of KL(π ‖ π_ref) is unbiased on samples of π. With this factor it is so on samples of π_old (of μ, with
    w), and so is its gradient, which has a part from r: on the policy itself that of r · k3 is Δ·∇log π, as the
    gradient of k2.

    Paper: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7, with k3.

    Args:
        kl: (bsz, response_length) of :func:`kl_penalty`, with gradient; not of a kind with ``+``, whose gradient is
            already that of k2.
        log_prob: (bsz, response_length) log π, with gradient.
        old_log_prob: (bsz, response_length) log π_old.
        rollout_is_weights: (bsz, response_length) w; it gets no gradient.
    """
    ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0).exp()
    return ratio * kl if rollout_is_weights is None else rollout_is_weights.detach() * ratio * kl


def kl_in_reward(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    beta: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """Subtract the KL penalty from the scores, per token: r_t = score_t - β · kl_t.

    All tensors are (bsz, response_length); the policy is the one before the update, and ``kind`` that of
    :func:`kl_penalty`.

    Returns:
        token_level_rewards, 0 where the mask is 0; and, for the controller of β, the mean over sequences of their mean
        KL per token, a scalar. Sequences without a valid token are left out of that mean.
    """
    kl = zero_masked(kl_penalty(old_log_probs, ref_log_prob, kind), response_mask)
    rewards = zero_masked(token_level_scores, response_mask) - beta * kl
    mean_kl = masked_mean(masked_mean(kl, response_mask, axis=-1), response_mask.bool().any(-1))
    return rewards, mean_kl


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """scores - kl_ratio · (log π_old - log π_ref), per token; all (bsz, response_length)."""
    return token_level_scores - kl_ratio * kl_penalty(old_log_prob, ref_log_prob, "kl")


class KLController(ABC):
    """Weight of the KL penalty over the run; ``value`` is the current weight."""

    value: float

    @abstractmethod
    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the weight, given the mean KL of a batch of ``n_steps`` sequences."""

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.value = float(state["value"])


class FixedKLController(KLController):
    """A constant weight; a resumed run uses the value of its configuration, not the checkpoint's."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: the configuration decides."""


class AdaptiveKLController(KLController):
    """Weight that follows a target KL.

        β ← β · (1 + clip(kl / target - 1, -0.2, 0.2) · n / horizon)

    Paper: https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        init_kl_coef: β at the start. A resumed run starts from it again if it is not the checkpoint's.
        horizon: number of sequences over which β changes by at most 20 %.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.initial = init_kl_coef
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raise β if the KL is above its target, lower it if it is below."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint."""
        return {"value": self.value, "initial": self.initial}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore β, unless its start value was changed since."""
        if state.get("initial", self.initial) == self.initial:
            self.value = float(state["value"])


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """Build the controller of ``algorithm.kl_ctrl`` (``type``, ``kl_coef``, ``target_kl``, ``horizon``).

    Raises:
        ConfigError: unknown type, or a horizon that is not positive.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type != "adaptive":
        raise ConfigError(f"kl_ctrl.type='{kl_ctrl.type}' is neither fixed nor adaptive.")
    if kl_ctrl.horizon <= 0:
        raise ConfigError(f"kl_ctrl.horizon={kl_ctrl.horizon} must be positive: it divides the change.")
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
