"""What the driver computes between two worker calls: batch in, new columns out.

Every function here is pure: it reads the batch, returns only the columns that it makes (and the
numbers worth logging), and the driver unions them. See the picture in ``ray_trainer.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.schema import require
from verl.trainer.ppo.core_algos import agg_loss, compute_advantages, kl_in_reward

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


def replace_columns(batch: DataProto, columns: DataProto) -> DataProto:
    """``batch`` with the columns of ``columns`` in place of its own of the same name."""
    assert batch.batch is not None
    assert columns.batch is not None
    kept = batch.select(
        batch_keys=[key for key in batch.batch.keys() if key not in columns.batch.keys()],
        non_tensor_batch_keys=[key for key in batch.non_tensor_batch if key not in columns.non_tensor_batch],
    )
    return kept | columns


def sequence_lengths(batch: DataProto) -> list[int]:
    """Tokens of each sample, prompt and response."""
    return batch.batch["attention_mask"].sum(-1).tolist()


def drop_failed_samples(batch: DataProto, reward_status: list[str]) -> tuple[DataProto, Metrics]:
    """Take the samples whose reward could not be computed out of training.

    Their ``response_mask`` becomes zero, so no loss sees them, and they leave their group, so
    that their missing reward is no part of any baseline: an error is not a score of zero.

    Returns:
        the new ``response_mask`` and ``uid``, and ``reward/error_rate``.
    """
    failed = np.array([status != "ok" for status in reward_status], dtype=bool)
    keep = torch.from_numpy(~failed).to(batch.batch["response_mask"].dtype).unsqueeze(-1)
    uids = batch.non_tensor_batch["uid"].copy()
    for row in np.flatnonzero(failed):
        uids[row] = f"failed-{uuid.uuid5(uuid.NAMESPACE_OID, f'{uids[row]}-{row}')}"
    columns = DataProto.from_dict(
        tensors={"response_mask": batch.batch["response_mask"] * keep}, non_tensors={"uid": uids}
    )
    return columns, {"reward/error_rate": float(failed.mean())}


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
    columns: dict[str, Any] = {**dict(data.batch.items()), **data.non_tensor_batch}
    columns["index"] = data.non_tensor_batch["uid"]
    advantages, returns = compute_advantages(str(adv_estimator), columns, settings or {})
    return DataProto.from_dict(tensors={"advantages": advantages, "returns": returns})


def mean_entropy(batch: DataProto, loss_agg_mode: str, loss_scale_factor: float | None) -> Metrics:
    """``actor/entropy``: the entropy of the policy over the response tokens, aggregated as the loss is."""
    entropy = agg_loss(
        batch.batch["entropys"],
        batch.batch["response_mask"],
        loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
    )
    return {"actor/entropy": entropy.item()}


def check_rollout_gap(metrics: Metrics, limit: float | None) -> None:
    """Stop when rollout and trainer disagree about a token's probability by more than ``limit``.

    Raises:
        RolloutError: they do; what was sampled is then not what would be trained on.
    """
    gap = metrics.get("training/rollout_probs_diff_max", 0.0)
    if limit is not None and gap > limit:
        raise RolloutError(
            f"the probability of a token differs by {gap:.2g} between rollout engine and trainer, more than "
            f"trainer.max_rollout_actor_probs_diff={limit}. Compute both in one precision (rollout.dtype, "
            "actor.fsdp_config.dtype), or raise the limit."
        )
