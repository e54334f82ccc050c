"""The load of experts in the passes of a mini-batch, and the loss that balances it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from verl.errors import ConfigError
from verl.workers.routers import Choices

# Fields of Transformers' configs. By default their coefficient is above 0 (0.001 for Mixtral and Qwen3-MoE), so only
# what the user sets asks for the loss.
_COEFFICIENT, _SWITCH = "router_aux_loss_coef", "output_router_logits"


def balance_coefficient(config: PretrainedConfig, overrides: Mapping[str, Any]) -> float:
    """Return the weight of the load balancing loss; 0 unless ``model.override_config`` asks for it.

    Raises:
        ConfigError: it is negative.
    """
    text = config.get_text_config()
    settings = {**overrides, **(overrides.get("text_config") or {})}
    if not settings.get(_SWITCH) and _COEFFICIENT not in settings:
        return 0.0
    weight = float(getattr(text, _COEFFICIENT, 0.0))
    if weight < 0:
        raise ConfigError(
            f"model.override_config.{_COEFFICIENT}={weight}: a negative weight drives all tokens to a few experts. "
            "Use 0 or more; 0.001 is usual."
        )
    return weight


class ExpertLoad:
    """Numbers of tokens that each expert got, over the passes of a mini-batch."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, choices: Choices) -> None:
        """Count the tokens of one pass."""
        for router, logits, expert_ids in choices:
            counts = torch.bincount(expert_ids.flatten(), minlength=logits.shape[-1])
            self._counts[router] = self._counts[router] + counts if router in self._counts else counts

    def total(self, *groups: dist.ProcessGroup | None) -> Tensor:
        """Sum over the ranks of all ``groups``, (layers, experts); without routers (0, 0). Collective."""
        if not self._counts:
            return torch.zeros(0, 0, dtype=torch.int64)
        counts = torch.stack([self._counts[router] for router in sorted(self._counts)])
        for group in groups:
            dist.all_reduce(counts, group=group)
        return counts


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Compute metrics of the loads from (layers, experts) counts; none without layers.

    The load of an expert is its number of tokens over the mean of its layer's experts: 1 if all get as many. Its share
    is that number over the sum of its layer's experts.
    """
    if not counts.numel():
        return {}
    # Without any token of a layer both are 0, not NaN.
    load = counts / counts.float().mean(dim=1, keepdim=True).clamp(min=1e-9)
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    metrics: dict[str, float] = {}
    for layer, (largest, unused) in enumerate(zip(share.amax(1).tolist(), (counts == 0).sum(1).tolist(), strict=True)):
        metrics |= {f"moe/layer_{layer}/share_max": largest, f"moe/layer_{layer}/unused_experts": float(unused)}
    return metrics | {
        "moe/load_max": float(load.max()),
        "moe/load_min": float(load.min()),
        "moe/unused_experts": float((counts == 0).sum()),
    }


def balance_loss(choices: Choices, counts: Tensor) -> Tensor:
    """Compute one pass's part of the load balancing loss of Switch Transformers (arXiv:2101.03961, eq. 4 to 6).

    The loss of a mini-batch, with sums over all of its tokens t, on all ranks, and over layers l, is

        E · Σ_e f_e P_e        f_e = 1/N Σ_l,t [t goes to e in l]        P_e = 1/N Σ_l,t p_l,t(e)

    with E experts, router probabilities p, and N = layers · tokens. f has no gradient and is that of the whole
    mini-batch, so the parts of all passes and ranks add up to the loss, and their gradients to its gradient.
    Transformers computes the same formula of a single pass.

    Args:
        choices: of the pass, with gradients.
        counts: (layers, experts) of the whole mini-batch; see :meth:`ExpertLoad.total`.

    Returns:
        a scalar; 0 with a graph if the pass has no tokens.
    """
    rows = counts.sum() / choices.per_token  # N
    summed = torch.stack([logits.float().softmax(-1).sum(0) for _, logits, _ in choices]).sum(0)  # (experts,)
    return counts.shape[-1] * (counts.sum(0) / rows * summed / rows).sum()
