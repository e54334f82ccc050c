"""What the driver computes between two worker calls: batch in, new columns out.

Every function here is pure: it reads the batch, returns only the columns that it makes (and the
numbers worth logging), and the driver unions them. See the picture in ``ray_trainer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import RolloutError
from verl.protocol import DataProto, replace_columns
from verl.schema import require
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_advantages,
    kl_in_reward,
    policy_loss_info,
    prepare_aggregation,
    prepare_update,
    update_columns,
)
from verl.trainer.ppo.metrics import response_lengths
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.source_metrics import source_metrics
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, RolloutCorrectionConfig

Metrics = dict[str, float]

ACTOR_COLUMNS = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids")


def name_groups(prompts: DataProto, step: int, first_row: int = 0) -> DataProto:
    """Give each prompt the ``uid`` that its responses share: step and row, the same in every run."""
    uids = np.array([f"{step}-{first_row + row}" for row in range(len(prompts))], dtype=object)
    return prompts | DataProto.from_dict(non_tensors={"uid": uids})


def repeat_prompts(prompts: DataProto, n: int) -> DataProto:
    """Each prompt ``n`` times in a row, with ``sample_index`` counting its siblings."""
    repeated = prompts.repeat(n, interleave=True)
    siblings = np.tile(np.arange(n), len(prompts))
    return repeated | DataProto.from_dict(non_tensors={"sample_index": siblings})


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """The attention mask over the responses, (bsz, response_length)."""
    return data.batch["attention_mask"][:, -data.batch["responses"].size(1) :]


def sequence_lengths(batch: DataProto) -> list[int]:
    """Tokens of each sample, prompt and response."""
    return batch.batch["attention_mask"].sum(-1).tolist()


def token_counts(batch: DataProto) -> tuple[list[int], int]:
    """Tokens of each sample, and how many of all are learned from."""
    return sequence_lengths(batch), int(batch.batch["response_mask"].sum())


def score_columns(scores: torch.Tensor, extra: Mapping[str, list[Any]]) -> DataProto:
    """``token_level_scores``, and what the reward function said beside them under its own names."""
    return DataProto.from_dict(tensors={"token_level_scores": scores}, non_tensors=dict(extra))


def metrics_by_source(batch: DataProto, scores: torch.Tensor, statuses: Sequence[Any]) -> Metrics:
    """``train-source/{data_source}/...``, where a batch has more than one source; without samples that failed."""
    sources = [str(source) for source in batch.non_tensor_batch.get("data_source", [])]
    if len(set(sources)) < 2:
        return {}
    is_scored = torch.tensor([status == "ok" for status in statuses])
    values = torch.where(is_scored, scores.sum(-1), torch.nan)
    return source_metrics(sources, values.tolist(), response_lengths(batch).tolist())


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, Metrics]:
    """Rewards from scores: ``token_level_rewards = token_level_scores - β · kl(old ‖ ref)``.

    The controller is told the mean KL per sequence, so that an adaptive β follows its target
    (arXiv:1909.08593).

    Args:
        data: batch with token_level_scores, old_log_probs, ref_log_prob, response_mask.
        kl_ctrl: a controller of :func:`verl.trainer.ppo.core_algos.get_kl_controller`.
        kl_penalty: one of the kinds of :func:`verl.trainer.ppo.core_algos.kl_penalty`.

    Returns:
        the batch with ``token_level_rewards``, and ``actor/reward_kl_penalty``,
        ``actor/reward_kl_penalty_coeff``.
    """
    require(data, ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"), "KL penalty in the reward")
    columns, beta = data.batch, kl_ctrl.value
    rewards, mean_kl = kl_in_reward(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        beta,
        kl_penalty,
    )
    # A batch without a token to learn from has no KL to steer by, and NaN would be the weight's for ever.
    if columns["response_mask"].any() and mean_kl.isfinite():
        kl_ctrl.update(current_kl=mean_kl.item(), n_steps=len(data))
    metrics = {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": beta}
    return data | DataProto.from_dict(tensors={"token_level_rewards": rewards}), metrics


def compute_advantage(data: DataProto, adv_estimator: str, settings: Mapping[str, Any] | None = None) -> DataProto:
    """Call an estimator by name with the columns and settings that its parameters ask for.

    Args:
        data: batch; ``uid`` reaches the estimator as ``index``.
        adv_estimator: a name of the estimator registry.
        settings: values for the other parameters: gamma, lam, norm_adv_by_std_in_grpo, config.

    Returns:
        a batch with only ``advantages`` and ``returns``, both (bsz, response_length).
    """
    columns: dict[str, Any] = {**data.non_tensor_batch, **dict(data.batch.items())}
    columns["index"] = data.non_tensor_batch["uid"]
    advantages, returns = compute_advantages(str(adv_estimator), columns, settings or {})
    return DataProto.from_dict(tensors={"advantages": advantages, "returns": returns})


def mean_entropy(batch: DataProto, loss_agg_mode: str, loss_scale_factor: float | None) -> Metrics:
    """``actor/entropy``: the entropy of the policy over the response tokens, aggregated as the loss is."""
    mask = batch.batch["response_mask"]
    entropy = agg_loss(
        batch.batch["entropys"],
        mask,
        loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        index=batch.non_tensor_batch["uid"],
    )
    return {"actor/entropy": entropy.item()}


def entropy_per_token(batch: DataProto) -> float:
    """Mean entropy of the policy over the response tokens, in nats."""
    return masked_mean(batch.batch["entropys"], batch.batch["response_mask"]).item()


def correct_rollout(batch: DataProto, correction: RolloutCorrectionConfig) -> tuple[DataProto, Metrics]:
    """What ``algorithm.rollout_correction`` makes of the gap between rollout and trainer.

    Returns:
        ``rollout_is_weights`` if it weighs, ``accepted_mask`` if it rejects; and its metrics.
    """
    corrected, metrics = compute_rollout_correction_and_add_to_batch(batch, correction)
    columns: dict[str, torch.Tensor] = {}
    if correction.rollout_is is not None:
        columns["rollout_is_weights"] = corrected.batch["rollout_is_weights"]
    if correction.rollout_rs is not None:
        columns["accepted_mask"] = corrected.batch["response_mask"]
    return DataProto.from_dict(tensors=columns), metrics


def without_rejected(batch: DataProto) -> DataProto:
    """The batch with ``accepted_mask``, where it has one, in place of ``response_mask``."""
    if "accepted_mask" not in batch.batch.keys():
        return batch
    return replace_columns(batch, DataProto.from_dict(tensors={"response_mask": batch.batch["accepted_mask"]}))


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of a run."""
    return seed * 1_000_003 + step


def prepare_mini_batches(batch: DataProto, actor: ActorConfig, num_mini_batches: int, seed: int) -> DataProto:
    """What the policy's update has to know of whole mini-batches, before their rows are dealt to ranks.

    Mini-batch k is the k-th contiguous part of the batch, as in
    :func:`verl.trainer.ppo.balance.layout_for_ranks`.

    Returns:
        the columns of :func:`verl.trainer.ppo.core_algos.prepare_update`; none for most settings.
    """
    made = []
    for k, part in enumerate(batch.chunk(num_mini_batches)):
        columns = {**dict(part.batch.items()), "index": part.non_tensor_batch["uid"]}
        made.append(prepare_update(columns, actor, seed * num_mini_batches + k))
    return DataProto.from_dict(tensors=_one_after_the_other(made))


def aggregation_columns(batch: DataProto, loss_agg_mode: str, num_mini_batches: int) -> dict[str, torch.Tensor]:
    """What the critic's aggregation has to know of whole mini-batches; see :func:`prepare_mini_batches`."""
    made = [
        prepare_aggregation(loss_agg_mode, part.batch["response_mask"], part.non_tensor_batch["uid"])
        for part in batch.chunk(num_mini_batches)
    ]
    return _one_after_the_other(made)


def _one_after_the_other(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def policy_columns(batch: DataProto, actor: ActorConfig, own_forward: bool = False) -> tuple[str, ...]:
    """The columns of ``batch`` that the policy's update reads.

    Args:
        batch: of the update.
        actor: its section.
        own_forward: ``old_log_probs`` are those of the update's own forward pass.

    Raises:
        SchemaError: one that it cannot do without is missing.
    """
    info = policy_loss_info(actor.policy_loss.loss_mode)
    needed = {*ACTOR_COLUMNS, "advantages", *update_columns(actor)}
    needed |= set() if own_forward else {"old_log_probs"}
    needed |= {"ref_log_prob"} if actor.use_kl_loss else set()
    require(batch, sorted(needed), "the policy update")
    optional = info.optional_columns | {"rollout_is_weights"}
    return tuple(sorted(needed | (optional & set(batch.batch.keys()))))


def check_rollout_gap(metrics: Metrics, limit: float | None) -> None:
    """Stop when rollout and trainer disagree about a token's probability by more than ``limit``.

    Raises:
        RolloutError: they do; what was sampled is then not what would be trained on.
    """
    gap = metrics.get("training/rollout_probs_diff_max", 0.0)
    if limit is not None and not gap <= limit:  # nor is NaN
        raise RolloutError(
            f"the probability of a token differs by {gap:.2g} between rollout engine and trainer, more than "
            f"trainer.max_rollout_actor_probs_diff={limit}. Compute both in one precision (rollout.dtype, "
            "actor.fsdp_config.dtype), or raise the limit."
        )
