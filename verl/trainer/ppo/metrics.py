"""Numbers worth logging of one training step: batch in, metrics by name out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from verl.errors import SchemaError
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.trainer.ppo.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics
from verl.utils.metric import distribution, memory_metrics, reduce_metrics

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.protocol import DataProto
    from verl.utils.flops_counter import Arithmetic

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_mfu_metrics",
    "compute_rollout_gap_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

Metrics = dict[str, float]

MFU_STAGES = {"update_actor": "actor", "update_critic": "critic", "old_log_prob": "actor_infer"}
"""Stages whose share of the peak arithmetic is logged, and what ``perf/mfu/`` calls them."""


def _tensors(batch: DataProto) -> TensorDict:
    if batch.batch is None:
        raise SchemaError("metrics need a batch with tensor columns; this one has none.")
    return batch.batch


def response_lengths(batch: DataProto) -> Tensor:
    """Tokens of each response, tool outputs included; (bsz,)."""
    columns = _tensors(batch)
    prompt_width = columns["attention_mask"].shape[1] - columns["responses"].shape[1]
    return columns["attention_mask"][:, prompt_width:].sum(-1)


def prompt_lengths(batch: DataProto) -> Tensor:
    """Tokens of each prompt; (bsz,)."""
    return _tensors(batch)["attention_mask"].sum(-1) - response_lengths(batch)


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> Metrics:
    """What was sampled and how it was judged.

    Scores and rewards are those of the samples that take part in training: one without a valid
    token (an aborted response, a reward that could not be computed) has none. Advantages,
    returns and values are over valid tokens.

    Args:
        batch: of a whole step, with token_level_scores, token_level_rewards, advantages, returns.
        use_critic: also describe ``values``.

    Returns:
        ``critic/{score,rewards,advantages,returns,values}/{mean,max,min}``; ``critic/advantages/zero_ratio``, the
        share of responses that take part and teach nothing, because all their advantages are 0 (with group
        baselines: all rewards of the prompt were equal); ``critic/vf_explained_var``, ``response_length/*``,
        ``response_length_non_aborted/*``,
        ``response/aborted_ratio``, ``prompt_length/*``; ``num_turns/*`` and ``tool_call_counts/*``
        where the batch has them.
    """
    columns = _tensors(batch)
    mask = columns["response_mask"].bool()
    trained = mask.any(-1)  # (bsz,)
    metrics: Metrics = {}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        metrics |= distribution(columns[column].sum(-1)[trained], f"critic/{name}")
    for name in ("advantages", "returns", *(("values",) if use_critic else ())):
        metrics |= distribution(columns[name][mask], f"critic/{name}")
    teaches = (mask & (columns["advantages"] != 0)).any(-1)
    metrics["critic/advantages/zero_ratio"] = 1.0 - teaches[trained].float().mean().item()
    if use_critic:
        metrics["critic/vf_explained_var"] = explained_variance(columns["values"][mask], columns["returns"][mask])
    return metrics | _length_metrics(batch) | _turn_metrics(batch)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var[R - V] / Var[R]: 1 is a perfect critic, 0 one that knows only the mean; NaN below two tokens."""
    if returns.numel() < 2:
        return float("nan")
    return (1.0 - (returns - values).var() / (returns.var() + 1e-5)).item()


def _length_metrics(batch: DataProto) -> Metrics:
    response, prompt = response_lengths(batch), prompt_lengths(batch)
    columns = _tensors(batch)
    longest_response = columns["responses"].shape[1]
    longest_prompt = columns["attention_mask"].shape[1] - longest_response
    there = response > 0
    kinds = {
        "response_length": (response, longest_response),
        "response_length_non_aborted": (response[there], longest_response),
        "prompt_length": (prompt, longest_prompt),
    }
    metrics = {"response/aborted_ratio": 1.0 - there.float().mean().item()}
    for name, (lengths, longest) in kinds.items():
        metrics |= distribution(lengths, name)
        metrics[f"{name}/clip_ratio"] = (lengths == longest).float().mean().item()
    return metrics


def _turn_metrics(batch: DataProto) -> Metrics:
    metrics: Metrics = {}
    for column, name in (("__num_turns__", "num_turns"), ("tool_call_counts", "tool_call_counts")):
        if column in batch.non_tensor_batch:
            metrics |= distribution(batch.non_tensor_batch[column].astype(np.float32).tolist(), name)
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float], generated: int | None = None) -> Metrics:
    """Seconds of each stage, and milliseconds per token of those that work on tokens.

    Args:
        batch: of a whole step.
        timing_raw: seconds by stage.
        generated: response tokens of ``gen``, where these are not only the batch's (dynamic sampling).

    Returns:
        ``timing_s/{stage}``, ``timing_per_token_ms/{stage}``; of ``gen`` per response token, of
        the others per token of prompt and response.
    """
    every = int(_tensors(batch)["attention_mask"].sum())
    tokens = {"gen": int(response_lengths(batch).sum()) if generated is None else generated}
    tokens |= dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), every)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in tokens.keys() & timing_raw.keys():
        metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000.0 / max(tokens[name], 1)
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> Metrics:
    """Tokens per second and rank, memory.

    Args:
        batch: of a whole step.
        timing_raw: seconds by stage; ``step`` is the whole.
        n_gpus: ranks.

    Returns:
        ``perf/total_num_tokens``, ``perf/time_per_step``, ``perf/throughput``, and the driver's memory.
    """
    tokens, seconds = int(_tensors(batch)["attention_mask"].sum()), timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
        **memory_metrics(),
    }


def compute_mfu_metrics(
    flops: Mapping[str, float | None], arithmetic: Mapping[str, Arithmetic], timing_raw: Mapping[str, float]
) -> Metrics:
    """``perf/mfu/*``: useful arithmetic of a stage / (its seconds · the peak of all ranks).

    Args:
        flops: useful floating-point operations of the stages that ran, over all ranks.
        arithmetic: of the model of each stage, with the peak of all ranks.
        timing_raw: seconds by stage.

    Returns:
        ``perf/mfu/{actor,critic,actor_infer}``, of those stages that ran and whose work and peak are known.
    """
    found = {
        name: arithmetic[stage].utilization(flops[stage], timing_raw[stage])
        for stage, name in MFU_STAGES.items()
        if stage in flops
    }
    return {f"perf/mfu/{name}": share for name, share in found.items() if share is not None}


def compute_rollout_gap_metrics(batch: DataProto) -> Metrics:
    """How far the rollout engine's probabilities are from the trainer's, over valid tokens.

    With p = exp(rollout_log_probs), q = exp(old_log_probs)::

        training/rollout_probs_diff_{max,mean,std}       of |p - q|
        training/rollout_actor_probs_pearson_corr        correlation of p and q
        rollout_corr/{kl,k3_kl,training_ppl,...}         see compute_offpolicy_metrics

    Training responses that are sampled with top_p, top_k or min_p come from a distribution in which the tokens that
    were kept are likelier, so p > q by design; the difference then measures the truncation as well.

    Args:
        batch: with old_log_probs, response_mask, and rollout_log_probs if the engine gave them.

    Returns:
        these, with ``training/rollout_probs_diff_valid`` 1; or that alone with 0, if there is
        nothing to compare.
    """
    columns = _tensors(batch)
    mask = columns["response_mask"].bool()
    if "rollout_log_probs" not in columns.keys() or not mask.any():
        return {"training/rollout_probs_diff_valid": 0.0}
    rollout = columns["rollout_log_probs"][mask].double()
    actor = columns["old_log_probs"][mask].double()
    p, q = rollout.exp(), actor.exp()
    gap = (p - q).abs()
    offpolicy = compute_offpolicy_metrics(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": gap.max().item(),
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_std": gap.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": pearson_correlation(p, q),
        **{f"rollout_corr/{name}": value for name, value in offpolicy.items()},
    }


def pearson_correlation(x: Tensor, y: Tensor) -> float:
    """Correlation of two vectors; NaN if one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = x.norm() * y.norm()
    return (x @ y / scale).item() if scale > 0 else float("nan")
