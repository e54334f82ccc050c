"""Losses that clients ask for by name: sums over the tokens of a row, without denominators.

With log p the model's log-prob of a target token, log q that of the policy which sampled it, A its advantage, w its
weight and r = p / q::

    cross_entropy        -w log p
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg[clip(r, low, high)] log p A
    dro                  -(log p A - β/2 (log p - log q)²)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.engine.loss import BatchTotals, LossMetrics

TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Loss of each token from log p, log q, A (or w), and the row's settings, (rows, settings)."""


def cross_entropy(log_probs: Tensor, old_log_probs: Tensor, weights: Tensor, settings: Tensor) -> Tensor:
    """-w log p; ``old_log_probs`` and ``settings`` are not read."""
    return -log_probs * weights


def importance_sampling(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: Tensor) -> Tensor:
    """-r A; ``settings`` are not read."""
    return -(log_probs - old_log_probs).exp() * advantages


def ppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: Tensor) -> Tensor:
    """-min(r A, clip(r, low, high) A) with settings low and high (arXiv:1707.06347)."""
    ratio = (log_probs - old_log_probs).exp()
    low, high = settings[:, :1], settings[:, 1:2]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: Tensor) -> Tensor:
    """-sg[clip(r, low, high)] log p A with settings low and high (arXiv:2506.13585)."""
    ratio = (log_probs.detach() - old_log_probs).exp().clamp(settings[:, :1], settings[:, 1:2])
    return -ratio * log_probs * advantages


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: Tensor) -> Tensor:
    """-(log p A - β/2 (log p - log q)²) with the setting β (arXiv:2405.19107)."""
    return -(log_probs * advantages - 0.5 * settings[:, :1] * (log_probs - old_log_probs).square())


@dataclass(frozen=True)
class ClientLoss:
    """A loss that clients name."""

    function: TokenLoss
    inputs: tuple[str, ...]
    """Tensors of a datum that it reads beside ``target_tokens``, each with one number for each target."""
    settings: Mapping[str, float]
    """Names and defaults of ``loss_fn_config``; at most two."""


_CLIP = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
_POLICY_INPUTS = ("logprobs", "advantages")
LOSSES: Mapping[str, ClientLoss] = MappingProxyType(
    {
        "cross_entropy": ClientLoss(cross_entropy, ("weights",), {}),
        "importance_sampling": ClientLoss(importance_sampling, _POLICY_INPUTS, {}),
        "ppo": ClientLoss(ppo, _POLICY_INPUTS, _CLIP),
        "cispo": ClientLoss(cispo, _POLICY_INPUTS, _CLIP),
        "dro": ClientLoss(dro, _POLICY_INPUTS, {"beta": 0.05}),
    }
)
NAMES = tuple(LOSSES)
SETTINGS = 2
"""Columns of a row's settings."""


def token_losses(log_probs: Tensor, batch: DataProto) -> Tensor:
    """Compute the loss of each token, (rows, length), 0 where ``response_mask`` is 0; each row by its own loss.

    Args:
        log_probs: (rows, length) of the targets.
        batch: ``loss_index`` (rows,) into :data:`NAMES`; ``loss_settings`` (rows, 2); ``old_log_probs`` and
            ``advantages``, which has the weights of a cross entropy, (rows, length).
    """
    columns, device = batch.batch, log_probs.device
    losses = torch.zeros_like(log_probs)
    index = columns["loss_index"].to(device)
    mask = columns["response_mask"].to(device).bool()
    for loss_index in index.unique().tolist():
        rows = (index == loss_index).nonzero().flatten()
        inputs = (columns[name].to(device)[rows] for name in ("old_log_probs", "advantages", "loss_settings"))
        losses = losses.index_copy(0, rows, LOSSES[NAMES[loss_index]].function(log_probs[rows], *inputs))
    return torch.where(mask, losses, 0.0)


class RowLosses:
    """The sum of :func:`token_losses`; it keeps the log-probs and the loss of each row by ``row_index``."""

    outputs = frozenset({"log_probs"})
    rows_per_unit = 1

    def __init__(self) -> None:
        self.log_probs: dict[int, Tensor] = {}
        self.losses: dict[int, Tensor] = {}

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """See :class:`verl.workers.engine.loss.LossFunction`."""
        losses = token_losses(outputs["log_probs"], micro_batch)
        is_real = micro_batch.batch["response_mask"].any(-1).tolist()
        for i, row in enumerate(micro_batch.batch["row_index"].tolist()):
            if is_real[i]:  # fillers are copies of a row, and have its index
                self.log_probs[row] = outputs["log_probs"][i].detach()
                self.losses[row] = losses[i].detach().sum()
        return losses.sum() * totals.dp_size, {}
