"""Entropy of the policy: selection of high-entropy tokens, and the weight of the entropy bonus over the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.utils.torch_functional import zero_masked

if TYPE_CHECKING:
    from verl.config import ActorConfig


def top_entropy_mask(entropys: Tensor, response_mask: Tensor, quantile: float) -> Tensor:
    """Select the ``quantile`` of the valid tokens with the highest entropy, 0 < quantile <= 1.

    A token is kept if its entropy is at least the (1 - quantile)-quantile of the valid tokens' entropies (linearly
    interpolated). From (bsz, response_length) to (bsz, response_length) int64, 1 on the kept tokens; all 0 if no token
    is valid.

    Paper: "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939, with quantile 0.2.
    """
    if not 0.0 < quantile <= 1.0:
        raise ConfigError(f"top_entropy_quantile={quantile} is the fraction of tokens to keep: use 0 < value <= 1.")
    valid = response_mask.bool()
    if not valid.any():
        return torch.zeros_like(response_mask, dtype=torch.int64)
    exact = zero_masked(entropys.detach(), response_mask).double()
    # NumPy's, because torch.quantile refuses more than 16 million elements.
    threshold = float(np.quantile(exact[valid].cpu().numpy(), 1.0 - quantile))
    return (valid & (exact >= threshold)).long()


class EntropyController(ABC):
    """Weight of the entropy bonus over the run; ``value`` is the current weight."""

    value: float

    @abstractmethod
    def update(self, entropy: float) -> None:
        """Set the weight, given the mean entropy per token in nats of the batch about to be trained on."""

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.value = float(state["value"])


class FixedEntropyController(EntropyController):
    """A constant weight; a resumed run uses the value of its configuration, not the checkpoint's."""

    def __init__(self, entropy_coeff: float) -> None:
        self.value = entropy_coeff

    def update(self, entropy: float) -> None:
        """Do nothing."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: the configuration decides."""


class TargetEntropyController(EntropyController):
    """Entropy bonus that is active only while the entropy is at or below a target.

        value_k = c_k if H_k <= target else 0
        c_{k+1} = clip(c_k + step, low, high) if H_k < target, clip(c_k - step, low, high) if H_k > target

    Paper: Skywork-OR1, https://arxiv.org/abs/2505.22312, section "adaptive entropy control". The bounds are not in the
    paper: they keep c from growing without limit while the entropy stays on one side of the target.

    Args:
        entropy_coeff: c at the start. A resumed run starts from it again if it is not the checkpoint's.
        target: entropy per token, in nats.
        step: change of c per update.
    """

    def __init__(self, entropy_coeff: float, target: float, step: float, low: float, high: float) -> None:
        self.target, self.step, self.low, self.high = target, step, low, high
        self.initial = entropy_coeff
        self.coeff = min(max(entropy_coeff, low), high)
        self.value = self.coeff

    def update(self, entropy: float) -> None:
        """Set ``value`` for the batch with this entropy, and c for the next one."""
        self.value = self.coeff if entropy <= self.target else 0.0
        change = self.step if entropy < self.target else -self.step if entropy > self.target else 0.0
        self.coeff = min(max(self.coeff + change, self.low), self.high)

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint."""
        return {"value": self.value, "coeff": self.coeff, "initial": self.initial}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore value and c, clipped to the bounds of this run, unless the start value was changed since."""
        if state.get("initial", self.initial) != self.initial:
            return
        self.value = float(state["value"])
        self.coeff = min(max(float(state["coeff"]), self.low), self.high)


def get_entropy_controller(actor: ActorConfig) -> EntropyController:
    """Build the controller of an actor section: constant, unless ``entropy_target`` is set.

    Raises:
        ConfigError: ``entropy_coeff_min`` is above ``entropy_coeff_max``.
    """
    if actor.entropy_target is None:
        return FixedEntropyController(actor.entropy_coeff)
    low, high = actor.entropy_coeff_min, actor.entropy_coeff_max
    if low > high:
        raise ConfigError(f"entropy_coeff_min={low} is above entropy_coeff_max={high}: swap them.")
    return TargetEntropyController(actor.entropy_coeff, actor.entropy_target, actor.entropy_target_step, low, high)
