"""What is minimised on pairs: the reward model's loss and that of direct preference optimisation.

Rows 2p and 2p + 1 are the chosen and the rejected side of pair p, so these losses couple rows
(``rows_per_unit``). Sums over the pairs of a micro-batch are divided by the pairs of the whole batch, and
metrics are reported as such shares; so neither depends on micro-batches, packing or ranks.
"""

from __future__ import annotations

from torch import Tensor

from verl.protocol import DataProto
from verl.schema import require
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.core_algos.preference import (
    Pairs,
    bradley_terry_loss,
    direct_preference_loss,
    implicit_rewards,
    reward_centering,
    sequence_log_probs,
    split_pairs,
)
from verl.workers.config.preference import DirectPreferenceLossConfig, RewardModelLossConfig
from verl.workers.engine.base import BatchTotals, Metrics, Share


class RewardModelLoss:
    """Bradley-Terry on the scores of both sides, with centring if it is asked for.

    Args:
        config: margin, label smoothing, weight of the centring.
    """

    outputs = frozenset({"scores"})
    rows_per_unit = 2

    def __init__(self, config: RewardModelLossConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; each row has one score, where ``response_mask`` is 1."""
        config = self.config
        rewards = split_pairs(outputs["scores"].sum(-1))
        each = bradley_terry_loss(rewards, config.margin, config.label_smoothing)
        if config.center_rewards_coefficient:
            each = each + config.center_rewards_coefficient * reward_centering(rewards)
        return _mean_and_metrics(each, rewards, totals)


class DirectPreferenceLoss:
    """DPO and its kin on the log-probs of both sides.

    Args:
        config: which loss, and its coefficients.
    """

    outputs = frozenset({"log_probs"})
    rows_per_unit = 2

    def __init__(self, config: DirectPreferenceLossConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; reads ``ref_log_prob`` unless the loss is reference-free."""
        assert data.batch is not None
        config, mask = self.config, data.batch["response_mask"]
        log_probs = sequence_log_probs(outputs["log_probs"], mask, config.average_log_prob)
        reference = None
        if not config.reference_free:
            require(data, ("ref_log_prob",), "direct preference optimisation (loss.reference_free=false)")
            reference = sequence_log_probs(data.batch["ref_log_prob"], mask, config.average_log_prob)
        rewards = split_pairs(implicit_rewards(log_probs, reference, config.beta))
        each = direct_preference_loss(rewards, config.beta, config.loss_type, config.margin, config.label_smoothing)
        loss, metrics = _mean_and_metrics(each, rewards, totals)
        sides = split_pairs(log_probs.detach())
        metrics |= {f"logps/{side}": _share(getattr(sides, side), totals) for side in Pairs._fields}
        if config.sft_coef:
            # By the mean of each response's tokens, as in iterative RPO (arXiv:2404.19733).
            own = split_pairs(-sequence_log_probs(outputs["log_probs"], mask, average=True)).chosen
            loss = loss + config.sft_coef * _mean(own, totals)
            metrics["sft_loss"] = _share(own, totals)
            metrics["loss"] = Share(loss.detach() / totals.dp_size)
        return loss, metrics


def _mean(each: Tensor, totals: BatchTotals) -> Tensor:
    """What this micro-batch adds to the mean over all pairs, with the factor that a rank's loss carries."""
    ones = each.new_ones(len(each), 1)
    column, pairs = each.unsqueeze(-1), _pairs(totals)
    return agg_loss(column, ones, "seq-mean-token-sum", dp_size=totals.dp_size, global_batch_size=pairs)


def _pairs(totals: BatchTotals) -> int:
    return totals.global_batch_size // 2


def _share(each: Tensor, totals: BatchTotals) -> Share:
    return Share(each.detach().float().sum() / _pairs(totals))


def _mean_and_metrics(each: Tensor, rewards: Pairs, totals: BatchTotals) -> tuple[Tensor, dict[str, Share]]:
    gap = (rewards.chosen - rewards.rejected).detach()
    # A tie is half right: that is how often a coin would be.
    right = (gap > 0).float() + 0.5 * (gap == 0).float()
    return _mean(each, totals), {
        "loss": _share(each, totals),
        "accuracy": _share(right, totals),
        "margin": _share(gap, totals),
        "rewards/chosen": _share(rewards.chosen, totals),
        "rewards/rejected": _share(rewards.rejected, totals),
    }
