"""Training losses of the policy, the critic, supervised training, reward models and preferences.

Each is a :class:`LossFunction` built from the pure functions of :mod:`verl.algorithms`. A metric that is a term of a
loss is reported as a :class:`PartialSum` without the factor ``dp_size``, so the parts add up to the value of the
mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from verl.algorithms import (
    LossTotals,
    agg_loss,
    bias_corrected_kl,
    clipped_tokens,
    compute_value_loss,
    evaluate_policy_loss,
    kl_penalty,
    policy_loss_info,
    update_columns,
)
from verl.algorithms.distillation import (
    check_distillation_loss,
    distillation_rewards,
    evaluate_distillation_loss,
)
from verl.algorithms.loss_registry import over_tokens
from verl.algorithms.preference import (
    Pairs,
    bradley_terry_loss,
    direct_preference_loss,
    implicit_rewards,
    reward_centering,
    sequence_log_probs,
    split_pairs,
)
from verl.algorithms.rollout_correction import (
    INTERPOLATED,
    interpolated_policy,
    off_policy_sequence_mask,
    response_weights,
)
from verl.config import (
    ActorConfig,
    CriticConfig,
    DirectPreferenceLossConfig,
    DistillationConfig,
    RewardModelLossConfig,
    RolloutCorrectionConfig,
    SFTDistillationConfig,
)
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.torch_functional import masked_mean, zero_masked
from verl.workers.engine import BatchTotals, LossMetrics, PartialSum
from verl.workers.engine.loss import is_extreme


def denominators(totals: BatchTotals, loss_agg_mode: str, columns: Mapping[str, Tensor]) -> LossTotals:
    """Convert totals to arguments of ``agg_loss``, with the ``row_weights`` of these rows if the mode needs them."""
    counts = LossTotals(
        dp_size=totals.dp_size,
        batch_num_tokens=totals.batch_num_tokens,
        global_batch_size=totals.global_batch_size,
    )
    if loss_agg_mode == "prompt-mean" or (
        loss_agg_mode == "seq-mean-token-mean" and "trajectory_count" in columns.keys()
    ):
        counts["row_weights"] = columns["row_weights"]
    return counts


class PolicyLoss:
    """Policy loss - entropy_coeff · H + kl_loss_coef · KL(policy ‖ reference) + echo_loss_coef · cross entropy.

    Args:
        config: ``actor_rollout_ref.actor``.
        entropy_coeff: weight of the entropy bonus; None takes the one of ``config``.
        learns_from_rewards: whether the policy loss counts, beside entropy and KL.

    Raises:
        ConfigError: there is no such policy loss, or tokens are to be taken out of one that takes no weights
            (``top_entropy_quantile``, ``off_policy_mask_threshold``).
    """

    rows_per_unit = 1

    def __init__(
        self, config: ActorConfig, entropy_coeff: float | None = None, learns_from_rewards: bool = True
    ) -> None:
        name, settings = config.policy_loss.loss_mode, config.policy_loss
        self.config = config
        self.learns_from_rewards = learns_from_rewards
        self.entropy_coeff = config.entropy_coeff if entropy_coeff is None else entropy_coeff
        self.info = policy_loss_info(name)
        neutral = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
        for key, off in neutral.items():
            if settings[key] != off and not self.info.takes_weights:
                raise ConfigError(
                    f"actor.policy_loss.{key}={settings[key]} takes tokens out of the policy loss by their weights, "
                    f"and '{name}' has no parameter rollout_is_weights. Add it, or leave {key} out."
                )
        self.required = ("old_log_probs", "advantages", *sorted(update_columns(config)))
        follows_target = config.entropy_target is not None
        with_entropy = self.entropy_coeff != 0 or config.calculate_entropy or follows_target
        self.outputs = frozenset({"log_probs", "entropy"} if with_entropy else {"log_probs"})

    def with_entropy_coeff(self, entropy_coeff: float | None) -> PolicyLoss:
        """Return the same loss with another weight of the entropy bonus; itself for None."""
        if entropy_coeff is None or entropy_coeff == self.entropy_coeff:
            return self
        return PolicyLoss(self.config, entropy_coeff, self.learns_from_rewards)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads the columns of :func:`update_columns`, and ``ref_log_prob`` for the KL."""
        config, mode = self.config, self.config.loss_agg_mode
        require(micro_batch, self.required, "the policy update")
        columns, log_probs = micro_batch.batch, outputs["log_probs"]
        mask = columns["response_mask"]
        counts = denominators(totals, mode, columns) | LossTotals(loss_scale_factor=config.loss_scale_factor)
        # Losses have the factor dp_size, as gradients are averaged over ranks; metrics, which are summed, have not.
        loss = log_probs.new_zeros(())
        metrics: dict[str, Tensor | float | PartialSum] = {}
        if self.learns_from_rewards:
            weights, extra = self.token_weights(columns, log_probs)
            loss, loss_metrics = evaluate_policy_loss(
                self.info, log_probs, columns, weights, mode, config, counts, self.entropy_coeff
            )
            metrics = {**loss_metrics, **extra, "actor/pg_loss": PartialSum(loss.detach() / totals.dp_size)}
        if "entropy" in outputs:
            entropy = agg_loss(outputs["entropy"], mask, mode, **counts)
            metrics["actor/entropy_loss"] = PartialSum(entropy.detach() / totals.dp_size)
            metrics["actor/entropy_coeff"] = self.entropy_coeff
            loss = loss - self.entropy_coeff * entropy
        if config.use_kl_loss:
            require(micro_batch, ("ref_log_prob",), "the KL loss (actor.use_kl_loss=true)")
            kl = kl_penalty(log_probs, columns["ref_log_prob"], config.kl_loss_type)
            if config.use_bias_correction_kl:
                kl = bias_corrected_kl(kl, log_probs, columns["old_log_probs"], columns.get("rollout_is_weights", None))
            kl_loss = agg_loss(kl, mask, mode, **counts)
            metrics["actor/kl_loss"] = PartialSum(kl_loss.detach() / totals.dp_size)
            metrics["actor/kl_coef"] = config.kl_loss_coef
            loss = loss + config.kl_loss_coef * kl_loss
        if config.use_echo_loss:
            # Each weight is 1 over the number of such tokens in the mini-batch, so their sum is the mean already.
            weights = columns["observation_weights"]
            echo_loss = -(zero_masked(log_probs, weights > 0) * weights).sum()
            metrics["actor/echo_loss"] = PartialSum(echo_loss.detach())
            loss = loss + totals.dp_size * config.echo_loss_coef * echo_loss
        metrics["actor/loss"] = PartialSum(loss.detach() / totals.dp_size)
        return loss, metrics

    def token_weights(
        self, columns: Mapping[str, Tensor], log_probs: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Importance weights, set to 0 on tokens that are taken out; None if there is neither. And metrics."""
        settings, weights, mask = self.config.policy_loss, columns.get("rollout_is_weights", None), None
        metrics: dict[str, Tensor] = {}
        if settings.top_entropy_quantile < 1:
            mask = columns["top_entropy_mask"].bool()
        if settings.off_policy_mask_threshold is not None:
            near = off_policy_sequence_mask(
                log_probs,
                columns["rollout_log_probs"],
                columns["advantages"],
                columns["response_mask"],
                settings.off_policy_mask_threshold,
            )
            metrics = over_tokens({"actor/off_policy_masked_fraction": ~near}, columns["response_mask"])
            mask = near if mask is None else mask & near
        if mask is None:
            return weights, metrics
        token_weights = mask.to(columns["advantages"].dtype) if weights is None else zero_masked(weights, mask)
        return token_weights, metrics


class DistillationLoss:
    """Policy loss + distillation_loss_coef · divergence from the teacher.

    With ``use_policy_gradient`` the second term is instead a policy loss whose advantages are the negative divergences
    of the sampled tokens under the policy before the update. Without ``use_task_rewards`` only entropy and KL remain of
    the first. Rows with a column ``distillation_mask`` have a divergence where that is 1.

    Args:
        loss: the policy loss.
        distillation: ``distillation``.

    Raises:
        ConfigError: there is no such divergence, or nothing can be learned from it in this way.
    """

    rows_per_unit = 1

    def __init__(self, loss: PolicyLoss, distillation: DistillationConfig) -> None:
        settings = distillation.distillation_loss
        self.loss = loss
        self.config, self.info, self.learns_from_rewards = loss.config, loss.info, loss.learns_from_rewards
        self.distillation = distillation
        self.divergence = check_distillation_loss(settings)
        self.required = (*loss.required, *self.divergence.columns)
        self.outputs = loss.outputs | self.divergence.outputs
        self.gradient_config = replace(
            loss.config,
            clip_ratio=settings.clip_ratio,
            clip_ratio_low=settings.clip_ratio_low,
            clip_ratio_high=settings.clip_ratio_high,
            policy_loss=replace(loss.config.policy_loss, loss_mode=settings.policy_loss_mode),
        )

    @classmethod
    def from_config(cls, actor: ActorConfig, distillation: DistillationConfig) -> DistillationLoss:
        """Make the loss of the sections ``actor_rollout_ref.actor`` and ``distillation``."""
        uses_rewards = distillation.distillation_loss.use_task_rewards
        return cls(PolicyLoss(actor, learns_from_rewards=uses_rewards), distillation)

    def with_entropy_coeff(self, entropy_coeff: float | None) -> DistillationLoss:
        """Return the same loss with another weight of the entropy bonus; itself for None."""
        loss = self.loss.with_entropy_coeff(entropy_coeff)
        return self if loss is self.loss else DistillationLoss(loss, self.distillation)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads the columns of the policy loss and of the divergence."""
        require(micro_batch, self.required, "the distillation loss")
        config, settings, mode = self.config, self.distillation.distillation_loss, self.config.loss_agg_mode
        loss, metrics = self.loss(outputs, micro_batch, totals)
        columns = dict(micro_batch.batch.items())
        counts = denominators(totals, mode, columns) | LossTotals(loss_scale_factor=config.loss_scale_factor)
        if "distillation_mask" in columns:  # made before tokens were rejected
            columns["response_mask"] = columns["response_mask"] * columns["distillation_mask"]
        sections = config, self.distillation
        if settings.use_policy_gradient:
            old = columns["old_log_probs"]
            columns["advantages"] = distillation_rewards(self.divergence, old, columns, settings, sections)
            term, term_metrics = evaluate_policy_loss(
                policy_loss_info(settings.policy_loss_mode),
                outputs["log_probs"],
                columns,
                self.loss.token_weights(columns, outputs["log_probs"])[0],
                mode,
                self.gradient_config,
                counts,
            )
            term_metrics = {name.replace("actor/", "distillation/"): value for name, value in term_metrics.items()}
        else:
            losses, term_metrics = evaluate_distillation_loss(self.divergence, outputs, columns, settings, sections)
            term = agg_loss(losses, columns["response_mask"], mode, **counts)
        if "distillation_mask" in columns:
            term_metrics = _over_distilled(term_metrics, columns["response_mask"], totals.distilled_tokens)
        loss = loss + settings.distillation_loss_coef * term
        return loss, {
            **metrics,
            **term_metrics,
            "distillation/loss": PartialSum(term.detach() / totals.dp_size),
            "actor/loss": PartialSum(loss.detach() / totals.dp_size),
        }


def _over_distilled(metrics: LossMetrics, mask: Tensor, total: int) -> LossMetrics:
    """Weigh means over the tokens of ``mask`` by their share of the ``total`` of the mini-batch; no metrics for 0.

    The engine would weigh them by all tokens of the micro-batch, those without a divergence too.
    """
    if total == 0:
        return {}
    share = mask.sum().double() / total  # as exact as the weights of the engine
    return {
        name: value if isinstance(value, PartialSum) or is_extreme(name) else PartialSum(value * share)
        for name, value in metrics.items()
    }


class TokenRecord:
    """Values of each token of a rank's rows, collected from its micro-batches; later values of a row replace earlier.

    Args:
        bsz: rows of this rank, to which the column ``row`` of a micro-batch points.
    """

    def __init__(self, bsz: int) -> None:
        self._bsz = bsz
        self._seen: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def numbered(self, batch: DataProto) -> DataProto:
        """Add the column ``row``, the position of each row in this rank's batch."""
        return batch | DataProto.from_dict(tensors={"row": torch.arange(self._bsz)})

    def add(self, micro_batch: DataProto, columns: Mapping[str, Tensor]) -> None:
        """Keep the values of a micro-batch, each (rows of the micro-batch, response_length).

        Nothing is copied from the device here, because the next pass would wait for it.
        """
        detached = {name: values.detach() for name, values in columns.items()}
        self._seen.append((micro_batch.batch["row"], micro_batch.batch["response_mask"].bool(), detached))

    def columns(self, response_length: int, missing: float) -> DataProto:
        """Return the values by name, (bsz, response_length) float32 on the CPU, ``missing`` outside ``response_mask``.

        Rows without tokens are left out: they are those of filler passes.
        """
        columns: dict[str, Tensor] = {}
        for rows, mask, recorded in self._seen:
            is_recorded = mask.any(-1).cpu()
            for name, values in recorded.items():
                column = columns.setdefault(name, torch.full((self._bsz, response_length), missing))
                column[rows.cpu()[is_recorded]] = values.float().masked_fill(~mask, missing).cpu()[is_recorded]
        return DataProto.from_dict(tensors=columns) if columns else DataProto()


class RecordedLoss:
    """A policy loss that records, for a dump of tokens, the log-probs of the update and which tokens it clipped.

    With several epochs the values of the last one remain.

    Args:
        loss: that is computed.
        record: takes ``update_log_probs`` and, of losses of the rewards that tell it, ``update_clipped``.
    """

    rows_per_unit = 1

    def __init__(self, loss: PolicyLoss | DistillationLoss, record: TokenRecord) -> None:
        self.loss = loss
        self.info, self.learns_from_rewards = loss.info, loss.learns_from_rewards
        self.outputs = loss.outputs
        self.record = record

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``row`` and the columns of the policy loss."""
        require(micro_batch, ("row", *self.loss.required), "the record of the policy update")
        log_probs = outputs["log_probs"].detach()
        clipped = None
        if self.loss.learns_from_rewards:
            clipped = clipped_tokens(self.loss.info, log_probs, micro_batch.batch, self.loss.config)
        recorded = {"update_log_probs": log_probs} | ({} if clipped is None else {"update_clipped": clipped})
        self.record.add(micro_batch, recorded)
        return self.loss(outputs, micro_batch, totals)


class OwnForwardLoss:
    """A policy loss for a batch that is one optimizer step and has no ``old_log_probs`` yet.

    The update's forward pass already runs the policy before the update, so its log-probs without gradient are used as
    ``old_log_probs``. They are kept, with the entropy, for later stages.

    Args:
        loss: that is computed.
        record: takes ``old_log_probs`` and ``entropys``.
        correction: gives the importance weights that the driver would make of ``old_log_probs``; None for none.
    """

    rows_per_unit = 1

    def __init__(
        self,
        loss: PolicyLoss | DistillationLoss | RecordedLoss,
        record: TokenRecord,
        correction: RolloutCorrectionConfig | None = None,
    ) -> None:
        self.loss = loss
        self.info, self.learns_from_rewards = loss.info, loss.learns_from_rewards
        self.outputs = loss.outputs | {"log_probs", "entropy"}
        self.record = record
        self.correction = correction if correction is not None and correction.weighs_by_response else None

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``row`` and the columns of the policy loss except ``old_log_probs``."""
        require(micro_batch, ("row", "response_mask"), "the policy update")
        old, entropy = outputs["log_probs"].detach(), outputs["entropy"].detach()
        self.record.add(micro_batch, {"old_log_probs": old, "entropys": entropy})
        tensors = {"old_log_probs": old}
        if self.correction is not None:
            require(micro_batch, ("rollout_log_probs",), "the importance weights of the policy update")
            behaviour, mask = micro_batch.batch["rollout_log_probs"], micro_batch.batch["response_mask"]
            tensors["rollout_is_weights"] = response_weights(old, behaviour, mask, self.correction)
        micro_batch = micro_batch | DataProto.from_dict(tensors=tensors)
        return self.loss({name: outputs[name] for name in self.loss.outputs}, micro_batch, totals)


class InterpolatedLoss:
    """A policy loss whose old policy is interpolated between the one that sampled and the current one (A-3PO).

    Args:
        loss: that is computed, with ``old_log_probs`` and ``rollout_is_weights`` of :func:`interpolated_policy`.
        correction: ``algorithm.rollout_correction``.
    """

    rows_per_unit = 1

    def __init__(self, loss: PolicyLoss | DistillationLoss | RecordedLoss, correction: RolloutCorrectionConfig) -> None:
        self.loss = loss
        self.info, self.learns_from_rewards = loss.info, loss.learns_from_rewards
        self.outputs = loss.outputs
        self.correction = correction

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``rollout_log_probs``, ``updates_behind`` and the other columns of the loss."""
        require(micro_batch, ("response_mask", *INTERPOLATED), "rollout_correction.prox_logp_method=loglinear")
        columns, log_probs = micro_batch.batch, outputs["log_probs"].detach()
        behaviour, age, mask = columns["rollout_log_probs"], columns["updates_behind"], columns["response_mask"]
        proximal = interpolated_policy(log_probs, behaviour, age, mask, self.correction)
        tensors = {"old_log_probs": proximal.log_probs}
        if proximal.weights is not None:
            tensors["rollout_is_weights"] = proximal.weights
        loss, metrics = self.loss(outputs, micro_batch | DataProto.from_dict(tensors=tensors), totals)
        return loss, {**metrics, **over_tokens(proximal.metrics, mask)}


class ValueLoss:
    """The clipped squared error of the values against the returns, for the section ``critic``."""

    outputs = frozenset({"values"})
    rows_per_unit = 1

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads the old ``values``, ``returns``, and ``row_weights`` for ``prompt-mean``."""
        mode = self.config.loss_agg_mode
        by_prompt = ("row_weights",) if mode == "prompt-mean" else ()
        require(micro_batch, ("values", "returns", *by_prompt), "the critic's update")
        columns, mask = micro_batch.batch, micro_batch.batch["response_mask"]
        loss, clip_fraction = compute_value_loss(
            outputs["values"],
            columns["returns"],
            columns["values"],
            mask,
            self.config.cliprange_value,
            mode,
            **denominators(totals, mode, columns),
        )
        return loss, {
            "critic/vf_loss": PartialSum(loss.detach() / totals.dp_size),
            "critic/vf_clipfrac": clip_fraction.detach(),
            "critic/vpred_mean": masked_mean(outputs["values"].detach(), mask),
        }


class SFTLoss:
    """Mean of -log p over the trained tokens (``response_mask``) of the mini-batch."""

    outputs = frozenset({"log_probs"})
    rows_per_unit = 1

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``response_mask``."""
        mask = micro_batch.batch["response_mask"]
        loss = agg_loss(-outputs["log_probs"], mask, "token-mean", **denominators(totals, "token-mean", {}))
        return loss, {"loss": PartialSum(loss.detach() / totals.dp_size)}


sft_loss = SFTLoss()


class DistilledSFTLoss:
    """distillation_loss_coef · D(model, teacher) + cross_entropy_coef · (-log p), means over the trained tokens.

    Args:
        config: ``distillation`` of the supervised trainer.

    Raises:
        ConfigError: see :func:`verl.algorithms.distillation.check_distillation_loss`.
    """

    rows_per_unit = 1

    def __init__(self, config: SFTDistillationConfig) -> None:
        self.config = config
        self.info = check_distillation_loss(config.distillation_loss)
        self.outputs = self.info.outputs | {"log_probs"}

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``response_mask`` and the columns of the teacher."""
        config, mask = self.config, micro_batch.batch["response_mask"]
        counts = denominators(totals, "token-mean", {})
        losses, metrics = evaluate_distillation_loss(
            self.info, outputs, dict(micro_batch.batch.items()), config.distillation_loss
        )
        divergence = agg_loss(losses, mask, "token-mean", **counts)
        cross_entropy = agg_loss(-outputs["log_probs"], mask, "token-mean", **counts)
        loss = config.distillation_loss.distillation_loss_coef * divergence
        if config.cross_entropy_coef:
            loss = loss + config.cross_entropy_coef * cross_entropy
        terms = {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}
        return loss, {**metrics, **{name: PartialSum(term.detach() / totals.dp_size) for name, term in terms.items()}}


# ---- pairs ------------------------------------------------------------------------------------


class PairLoss:
    """Base of losses on pairs: rows 2p and 2p + 1 are the chosen and the rejected side of pair p.

    Loss and metrics are sums over the pairs of a micro-batch, divided by the pairs of the whole batch, so they do not
    depend on micro-batches, packing or ranks.
    """

    rows_per_unit = 2

    def mean(self, pair_losses: Tensor, totals: BatchTotals) -> Tensor:
        """The mean over all pairs: the part of this micro-batch, times ``dp_size``."""
        column, pairs = pair_losses.unsqueeze(-1), totals.global_batch_size // 2
        mask = torch.ones_like(column)
        return agg_loss(column, mask, "seq-mean-token-sum", dp_size=totals.dp_size, global_batch_size=pairs)

    def part_of_mean(self, values: Tensor, totals: BatchTotals) -> PartialSum:
        """The mean over all pairs as a metric: the part of this micro-batch."""
        return PartialSum(values.detach().float().sum() / (totals.global_batch_size // 2))

    def compared(self, losses: Tensor, rewards: Pairs, totals: BatchTotals) -> tuple[Tensor, dict[str, PartialSum]]:
        """Average the losses of the pairs, and compute metrics of how well ``rewards`` separate the two sides."""
        gap = (rewards.chosen - rewards.rejected).detach()
        # A tie counts half, the expected accuracy of guessing.
        right = (gap > 0).float() + 0.5 * (gap == 0).float()
        pair_values = {
            "loss": losses,
            "accuracy": right,
            "margin": gap,
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
        }
        metrics = {name: self.part_of_mean(values, totals) for name, values in pair_values.items()}
        return self.mean(losses, totals), metrics


class RewardModelLoss(PairLoss):
    """Bradley-Terry loss on the scores of both sides, with optional centring."""

    outputs = frozenset({"scores"})

    def __init__(self, config: RewardModelLossConfig) -> None:
        self.config = config

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; each row has one score, where ``response_mask`` is 1."""
        config = self.config
        rewards = split_pairs(outputs["scores"].sum(-1))
        losses = bradley_terry_loss(rewards, config.margin, config.label_smoothing)
        if config.center_rewards_coefficient:
            losses = losses + config.center_rewards_coefficient * reward_centering(rewards)
        return self.compared(losses, rewards, totals)


class DirectPreferenceLoss(PairLoss):
    """Direct preference optimisation (DPO, IPO, hinge, SimPO) on the log-probs of both sides."""

    outputs = frozenset({"log_probs"})

    def __init__(self, config: DirectPreferenceLossConfig) -> None:
        self.config = config

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss; reads ``response_mask``, and ``ref_log_prob`` unless the loss is reference-free."""
        config, columns, mask = self.config, micro_batch.batch, micro_batch.batch["response_mask"]
        log_probs = sequence_log_probs(outputs["log_probs"], mask, config.average_log_prob)
        reference = None
        if not config.reference_free:
            require(micro_batch, ("ref_log_prob",), "direct preference optimisation (loss.reference_free=false)")
            reference = sequence_log_probs(columns["ref_log_prob"], mask, config.average_log_prob)
        rewards = split_pairs(implicit_rewards(log_probs, reference, config.beta))
        losses = direct_preference_loss(rewards, config.beta, config.loss_type, config.margin, config.label_smoothing)
        loss, metrics = self.compared(losses, rewards, totals)
        sides = split_pairs(log_probs.detach())
        metrics |= {f"logps/{side}": self.part_of_mean(getattr(sides, side), totals) for side in Pairs._fields}
        if config.sft_coef:
            # By the mean of each response's tokens, as in iterative RPO (arXiv:2404.19733).
            sft_losses = split_pairs(-sequence_log_probs(outputs["log_probs"], mask, average=True)).chosen
            loss = loss + config.sft_coef * self.mean(sft_losses, totals)
            metrics["sft_loss"] = self.part_of_mean(sft_losses, totals)
            metrics["loss"] = PartialSum(loss.detach() / totals.dp_size)
        return loss, metrics
