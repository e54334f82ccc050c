"""Losses on pairs of a chosen and a rejected response: reward models, and direct preference optimisation.

With P the number of pairs, each function returns one value per pair; the caller takes the mean over the pairs of the
whole batch.

=============== ==================================================== ============================
loss            of a pair, with z = r_chosen - r_rejected - margin   paper
=============== ==================================================== ============================
Bradley-Terry   -log σ(z)                                            the reward model's loss, and
(``sigmoid``)                                                        DPO's: arXiv:2305.18290
label smoothing -(1 - ε) log σ(z) - ε log σ(-z)                      cDPO, ericmitchell.ai/cdpo.pdf
``hinge``       max(0, 1 - z)                                        SLiC, arXiv:2305.10425
``ipo``         (z / β - 1 / (2β))²                                  arXiv:2310.12036
=============== ==================================================== ============================

In direct preference optimisation the policy itself is the reward model, r = β (log π - log π_ref).
Without a reference and with mean instead of summed log-probs ``sigmoid`` is SimPO (arXiv:2405.14734).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLossType = Literal["sigmoid", "hinge", "ipo"]


class Pairs(NamedTuple):
    """The two sides of P pairs, each (P,) or (P, ...)."""

    chosen: Tensor
    rejected: Tensor


def split_pairs(rows: Tensor) -> Pairs:
    """Split (2P, ...) rows into pairs: rows 2p are chosen, rows 2p + 1 rejected.

    Raises:
        ValueError: the number of rows is odd.
    """
    if len(rows) % 2:
        raise ValueError(f"{len(rows)} rows are no pairs of a chosen and a rejected response.")
    return Pairs(rows[0::2], rows[1::2])


def bradley_terry_loss(rewards: Pairs, margin: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Negative log-likelihood of the preferences under the Bradley-Terry model; (P,).

        p(chosen ≻ rejected) = σ(z),  z = r_chosen - r_rejected - margin
        l = -(1 - ε) log σ(z) - ε log σ(-z)

    Paper: Bradley and Terry, 1952; for language models https://arxiv.org/abs/2203.02155.

    Args:
        rewards: (P,) each.
        margin: the difference of rewards at which the model gives both responses the same probability.
        label_smoothing: ε, the probability that a label is wrong.
    """
    z = rewards.chosen - rewards.rejected - margin
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def reward_centering(rewards: Pairs) -> Tensor:
    """(r_chosen + r_rejected)² of each pair, a penalty that keeps rewards centred at zero; (P,).

    Bradley-Terry determines differences of rewards only; with a small weight this term determines their level.

    Paper: https://arxiv.org/abs/2312.09244, section on centring.
    """
    return (rewards.chosen + rewards.rejected) ** 2


def sequence_log_probs(log_probs: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """log π(y | x) = Σ_t log π(y_t | x, y_<t) of each response, (rows,), from (rows, length) log-probs and mask.

    With ``average`` it is divided by the number of tokens of the response; an empty response has 0.
    """
    total = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor | None, beta: float) -> Tensor:
    """r = β (log π - log π_ref), the reward for which the policy is optimal; β log π without a reference. All (rows,).

    No gradient flows into the reference.

    Paper: DPO, https://arxiv.org/abs/2305.18290, equation 5 (up to a term of the prompt, which cancels in pairs).
    """
    return beta * (log_probs if ref_log_probs is None else log_probs - ref_log_probs.detach())


def direct_preference_loss(
    rewards: Pairs,
    beta: float,
    loss_type: PreferenceLossType = "sigmoid",
    margin: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each pair from the policy's implicit rewards, (P,); formulas at the top of this module.

    ``ipo`` pulls the difference of log-ratios, z / β, to 1 / (2β) instead of to infinity, so pairs that are always
    labelled alike do not drive the policy ever further from the reference. It takes summed log-probs, as the paper
    does; with averaged ones β has another scale.

    Args:
        rewards: (P,) each, of :func:`implicit_rewards`.
        beta: the β of these rewards.
        loss_type: the loss function.
        margin: required difference of the rewards (γ of SimPO).
        label_smoothing: ε, for ``sigmoid``.
    """
    if loss_type == "sigmoid":
        return bradley_terry_loss(rewards, margin, label_smoothing)
    z = rewards.chosen - rewards.rejected - margin
    if loss_type == "hinge":
        return torch.relu(1 - z)
    return (z / beta - 1 / (2 * beta)) ** 2
