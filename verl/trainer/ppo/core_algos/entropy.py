"""Entropy of the policy: which tokens it selects, and the weight of its bonus over the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.utils.torch_functional import zero_masked


def top_entropy_mask(entropys: Tensor, response_mask: Tensor, quantile: float) -> Tensor:
    """The ``quantile`` of the valid tokens with the highest entropy, where the policy decides.

    A token is kept if its entropy is not below the (1 - quantile)-quantile of the valid tokens'
    (linear between two of them), so all tokens that tie with the threshold are kept. With quantile
    1 every valid token is.

    Paper: "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939, with quantile 0.2.

    Args:
        entropys: (bsz, response_length), in nats.
        response_mask: (bsz, response_length) 1 on tokens that count; what stands at other places is
            not read, and is never kept.
        quantile: the fraction to keep, above 0, at most 1.

    Returns:
        (bsz, response_length) int64, 1 on the tokens that are kept; all 0 if no token is valid.

    Raises:
        ConfigError: quantile is no such fraction.
    """
    if not 0.0 < quantile <= 1.0:
        raise ConfigError(f"top_entropy_quantile={quantile} is the fraction of tokens to keep: use 0 < value <= 1.")
    valid = response_mask.bool()
    if not valid.any():
        return torch.zeros_like(response_mask, dtype=torch.int64)
    exact = zero_masked(entropys.detach(), response_mask).double()
    threshold = float(np.quantile(exact[valid].cpu().numpy(), 1.0 - quantile))
    return (valid & (exact >= threshold)).long()


class EntropyController(ABC):
    """Weight of the entropy bonus over the run; ``value`` is the weight now."""

    value: float

    @abstractmethod
    def update(self, entropy: float) -> None:
        """Take in the mean entropy per token of the batch that is about to be learned from, in nats."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.value = float(state["value"])


class FixedEntropyController(EntropyController):
    """The weight never changes; a resumed run takes the one of its configuration."""

    def __init__(self, entropy_coeff: float) -> None:
        self.value = entropy_coeff

    def update(self, entropy: float) -> None:
        """Nothing to learn."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class TargetEntropyController(EntropyController):
    """The weight holds the entropy up to a target, and leaves it alone above.

        value_k = c_k if H_k <= target else 0
        c_{k+1} = clip(c_k + step, min, max) if H_k < target, clip(c_k - step, min, max) if H_k > target

    Paper: Skywork-OR1, https://arxiv.org/abs/2505.22312, section "adaptive entropy control". The
    bounds are ours: they keep c from winding up while the entropy stays on one side of the target.

    Args:
        entropy_coeff: c at the start.
        target: entropy per token to hold, in nats.
        step: change of c per update.
        low: c never falls below.
        high: c never rises above.
    """

    def __init__(self, entropy_coeff: float, target: float, step: float, low: float, high: float) -> None:
        self.target, self.step, self.low, self.high = target, step, low, high
        self.coeff = min(max(entropy_coeff, low), high)
        self.value = self.coeff

    def update(self, entropy: float) -> None:
        """Set ``value`` for the batch with this entropy, and c for the next."""
        self.value = self.coeff if entropy <= self.target else 0.0
        change = self.step if entropy < self.target else -self.step if entropy > self.target else 0.0
        self.coeff = min(max(self.coeff + change, self.low), self.high)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"value": self.value, "coeff": self.coeff}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; within the bounds of this run."""
        self.value = float(state["value"])
        self.coeff = min(max(float(state["coeff"]), self.low), self.high)


def get_entropy_controller(actor: Any) -> EntropyController:
    """The controller of the actor's section: constant, unless ``entropy_target`` is set.

    Args:
        actor: a section with ``entropy_coeff``, ``entropy_target``, ``entropy_target_step``,
            ``entropy_coeff_min``, ``entropy_coeff_max``.

    Raises:
        ConfigError: the bounds exclude each other.
    """
    if actor.entropy_target is None:
        return FixedEntropyController(actor.entropy_coeff)
    low, high = actor.entropy_coeff_min, actor.entropy_coeff_max
    if low > high:
        raise ConfigError(f"actor.entropy_coeff_min={low} is above actor.entropy_coeff_max={high}: swap them.")
    return TargetEntropyController(actor.entropy_coeff, actor.entropy_target, actor.entropy_target_step, low, high)
