"""What is minimised: the policy, value and supervised losses, composed of the pure functions of core_algos.

A loss is called by the engine for each micro-batch, with the denominators of the whole mini-batch. Its
scalar carries the factor ``dp_size``, because gradients are averaged over ranks; the metrics that are
parts of a loss are reported without it, as shares that add up to the value of the whole mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.schema import require
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_value_loss,
    get_policy_loss_fn,
    kl_penalty,
    loss_and_metrics,
    policy_loss_info,
    update_columns,
)
from verl.utils.torch_functional import masked_mean, zero_masked
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.engine.base import BatchTotals, Metrics, Share


class PolicyLoss:
    """The policy's loss: surrogate - entropy_coeff · H + kl_loss_coef · KL(policy ‖ reference).

    Args:
        config: ``actor_rollout_ref.actor``; it chooses the surrogate and weighs the other terms.

    Raises:
        ConfigError: there is no such surrogate, or tokens shall be taken out of one that knows no weights.
    """

    def __init__(self, config: ActorConfig) -> None:
        name, quantile = config.policy_loss.loss_mode, config.policy_loss.top_entropy_quantile
        self.config = config
        self.surrogate = get_policy_loss_fn(name)
        self.info = policy_loss_info(name)
        if quantile < 1 and not self.info.takes_weights:
            raise ConfigError(
                f"actor.policy_loss.top_entropy_quantile={quantile} takes tokens out of the policy loss by their "
                f"weights, and '{name}' has no parameter rollout_is_weights. Add it, or set the quantile to 1."
            )
        self.required = ("old_log_probs", "advantages", *sorted(update_columns(config)))
        follows_target = config.entropy_target is not None
        with_entropy = config.entropy_coeff != 0 or config.calculate_entropy or follows_target
        self.outputs = frozenset({"log_probs", "entropy"} if with_entropy else {"log_probs"})
        self._config_of: tuple[BatchTotals, ActorConfig] | None = None

    def with_entropy_coeff(self, entropy_coeff: float | None) -> PolicyLoss:
        """The same loss with another weight of the entropy bonus; itself for None."""
        if entropy_coeff is None or entropy_coeff == self.config.entropy_coeff:
            return self
        return PolicyLoss(dataclasses.replace(self.config, entropy_coeff=entropy_coeff))

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see the head of this file."""
        require(data, self.required, "the policy update")
        assert data.batch is not None
        columns, log_probs = data.batch, outputs["log_probs"]
        config = self._with_totals(totals, columns)
        mode, counts = config.loss_agg_mode, config.global_batch_info
        mask = columns["response_mask"]
        optional = {name for name in self.info.optional_columns if name in columns}
        extra = self.info.columns | self.info.prepared_columns | optional
        result = self.surrogate(
            old_log_prob=columns["old_log_probs"],
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=self._token_weights(columns),
            **{name: columns[name] for name in extra},
        )
        loss, found = loss_and_metrics(config.policy_loss.loss_mode, result)
        metrics: dict[str, Any] = {**found, "actor/pg_loss": Share(loss.detach() / totals.dp_size)}
        if "entropy" in outputs:
            entropy = agg_loss(outputs["entropy"], mask, mode, **counts)
            metrics["actor/entropy_loss"] = Share(entropy.detach() / totals.dp_size)
            metrics["actor/entropy_coeff"] = config.entropy_coeff
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

    def _token_weights(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        """Importance weights, 0 on tokens whose entropy is too low for them to be learned from."""
        weights = columns.get("rollout_is_weights", None)
        if self.config.policy_loss.top_entropy_quantile == 1:
            return weights
        kept = columns["top_entropy_mask"]
        return kept.to(columns["advantages"].dtype) if weights is None else zero_masked(weights, kept)

    def _with_totals(self, totals: BatchTotals, columns: Mapping[str, Tensor]) -> ActorConfig:
        """A copy of the configuration that carries the counts of the mini-batch, and the weights of these rows."""
        if self._config_of is None or self._config_of[0] != totals:
            counts = counts_of(totals, self.config.loss_scale_factor)
            self._config_of = totals, dataclasses.replace(self.config, global_batch_info=counts)
        config = self._config_of[1]
        if config.loss_agg_mode != "prompt-mean":
            return config
        return dataclasses.replace(
            config, global_batch_info={**config.global_batch_info, "row_weights": columns["row_weights"]}
        )


class OwnForwardLoss:
    """A policy loss for a batch that is one optimizer step and has no ``old_log_probs`` yet.

    The policy before the update is the one that the update's forward pass sees, so ``old_log_probs`` are its
    log-probs without their gradient. They are kept, with the entropy, for whoever reads them after the update.

    Args:
        loss: what is minimised.
        bsz: rows of this rank.
    """

    def __init__(self, loss: PolicyLoss, bsz: int) -> None:
        self.loss = loss
        self.outputs = loss.outputs | {"log_probs", "entropy"}
        self._bsz = bsz
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def numbered(self, batch: DataProto) -> DataProto:
        """The batch with the column ``row``, by which the micro-batches are put together again."""
        return batch | DataProto.from_dict(tensors={"row": torch.arange(self._bsz)})

    def __call__(self, outputs: dict[str, Tensor], data: DataProto, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch; see the head of this file."""
        require(data, ("row", "response_mask"), "the policy update")
        assert data.batch is not None
        old, entropy = outputs["log_probs"].detach(), outputs["entropy"].detach()
        # A row may come again: after a pass that did not fit the memory, and without its tokens in one that only
        # keeps the ranks in step.
        there = data.batch["response_mask"].any(-1)
        self._seen.append((data.batch["row"][there], old[there], entropy[there]))
        data = data | DataProto.from_dict(tensors={"old_log_probs": old})
        return self.loss({name: outputs[name] for name in self.loss.outputs}, data, totals)

    def columns(self, response_length: int) -> DataProto:
        """old_log_probs and entropys, (bsz, response_length) float32 on the CPU, 0 where ``response_mask`` is 0."""
        found = torch.zeros(2, self._bsz, response_length)
        for rows, old, entropy in self._seen:
            found[:, rows.cpu()] = torch.stack([old, entropy]).float().cpu()
        return DataProto.from_dict(tensors={"old_log_probs": found[0], "entropys": found[1]})


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
        by_prompt = self.config.loss_agg_mode == "prompt-mean"
        require(data, ("values", "returns", *(("row_weights",) if by_prompt else ())), "the critic's update")
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
            row_weights=columns["row_weights"] if by_prompt else None,
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
