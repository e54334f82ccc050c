"""What is minimised: the policy, value and supervised losses, composed of the pure functions of core_algos.

A loss is called by the engine for each micro-batch, with the denominators of the whole mini-batch. Its
scalar carries the factor ``dp_size``, because gradients are averaged over ranks; the metrics that are
parts of a loss are reported without it, as shares that add up to the value of the whole mini-batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.schema import require
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_value_loss,
    get_policy_loss_fn,
    kl_penalty,
    policy_loss_columns,
)
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.engine.base import BatchTotals, Metrics, Share


class PolicyLoss:
    """The policy's loss: surrogate - entropy_coeff · H + kl_loss_coef · KL(policy ‖ reference).

    Args:
        config: ``actor_rollout_ref.actor``; it chooses the surrogate and weighs the other terms.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.surrogate = get_policy_loss_fn(config.policy_loss.loss_mode)
        self.extra_columns = policy_loss_columns(config.policy_loss.loss_mode)
        with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        self.outputs = frozenset({"log_probs", "entropy"} if with_entropy else {"log_probs"})
        self._config_of: tuple[BatchTotals, ActorConfig] | None = None

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see the head of this file."""
        require(data, ("old_log_probs", "advantages", *self.extra_columns), "the policy update")
        assert data.batch is not None
        config = self._with_totals(totals)
        mode, counts = config.loss_agg_mode, config.global_batch_info
        columns, log_probs = data.batch, outputs["log_probs"]
        mask = columns["response_mask"]
        loss, found = self.surrogate(
            old_log_prob=columns["old_log_probs"],
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=columns.get("rollout_is_weights", None),
            **{name: columns[name] for name in self.extra_columns},
        )
        metrics: dict[str, Any] = {**found, "actor/pg_loss": Share(loss.detach() / totals.dp_size)}
        if "entropy" in outputs:
            entropy = agg_loss(outputs["entropy"], mask, mode, **counts)
            metrics["actor/entropy_loss"] = Share(entropy.detach() / totals.dp_size)
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            require(data, ("ref_log_prob",), "the KL loss (actor.use_kl_loss=true)")
            kl = kl_penalty(log_probs, columns["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, mode, **counts)
            metrics["actor/kl_loss"] = Share(kl_loss.detach() / totals.dp_size)
            metrics["actor/kl_coef"] = config.kl_loss_coef
            loss = loss + config.kl_loss_coef * kl_loss
        metrics["actor/loss"] = Share(loss.detach() / totals.dp_size)
        return loss, metrics

    def _with_totals(self, totals: BatchTotals) -> ActorConfig:
        """A copy of the configuration that carries the counts of the mini-batch; made once per mini-batch."""
        if self._config_of is None or self._config_of[0] != totals:
            counts = counts_of(totals, self.config.loss_scale_factor)
            self._config_of = totals, dataclasses.replace(self.config, global_batch_info=counts)
        return self._config_of[1]


class ValueLoss:
    """The clipped squared error of the values against the returns.

    Args:
        config: ``critic``.
    """

    outputs = frozenset({"values"})

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see the head of this file."""
        require(data, ("values", "returns"), "the critic's update")
        assert data.batch is not None
        columns, mask = data.batch, data.batch["response_mask"]
        loss, clip_fraction = compute_value_loss(
            outputs["values"],
            columns["returns"],
            columns["values"],
            mask,
            self.config.cliprange_value,
            self.config.loss_agg_mode,
            **counts_of(totals),
        )
        return loss, {
            "critic/vf_loss": Share(loss.detach() / totals.dp_size),
            "critic/vf_clipfrac": clip_fraction.detach(),
            "critic/vpred_mean": masked_mean(outputs["values"].detach(), mask),
        }


def sft_loss(outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
    """Mean of -log p over the tokens of the mini-batch that are learned from (``response_mask``)."""
    assert data.batch is not None
    loss = agg_loss(-outputs["log_probs"], data.batch["response_mask"], "token-mean", **counts_of(totals))
    return loss, {"loss": Share(loss.detach() / totals.dp_size)}


def counts_of(totals: BatchTotals, loss_scale_factor: float | None = None) -> dict[str, Any]:
    """The denominators as ``agg_loss`` names them."""
    return {**dataclasses.asdict(totals), "loss_scale_factor": loss_scale_factor}
