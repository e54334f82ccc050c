"""Metrics of one training step, computed from its batch, stage times and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.experience.sequences import Trajectories, trajectory_scores
from verl.protocol import DataProto, compute_response_mask, prompt_lengths, response_lengths
from verl.schema import require
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.trainer.ppo.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics
from verl.utils.metric import Metrics, distribution, reduce_metrics
from verl.utils.torch_functional import masked_mean, masked_sum

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.utils.flops_counter import Arithmetic

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_mfu_metrics",
    "compute_rollout_gap_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "compute_variance_proxy_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

MFU_STAGES = {"update_actor": "actor", "update_critic": "critic", "old_log_prob": "actor_infer"}
"""Stages with a model FLOPs utilisation (MFU), and their names under ``perf/mfu/``."""


def _tensors(batch: DataProto) -> TensorDict:
    if not batch.batch.keys():
        raise SchemaError("metrics need a batch with tensor columns; this one has none.")
    return batch.batch


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """Masks and lengths under the names by which public code reads them.

    Returns:
        ``response_mask`` (bsz, response_length), 1 on all tokens of the response, and the numbers of tokens
        ``prompt_length`` and ``response_length``, (bsz,).
    """
    return {
        "response_mask": compute_response_mask(batch),
        "prompt_length": prompt_lengths(batch).float(),
        "response_length": response_lengths(batch).float(),
    }


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> Metrics:
    """Statistics of scores, rewards, advantages, values and lengths of a step.

    Scores and rewards are over samples that take part in training, i.e. have a valid token (not those that were
    aborted or could not be scored); advantages, returns and values are over valid tokens. Where trajectories have
    several sequences, scores are those of trajectories, and all else is over sequences.

    Args:
        batch: all rows of a step, with token_level_scores, token_level_rewards, advantages, returns.
        use_critic: whether there are ``values``.

    Returns:
        ``critic/{score,rewards,advantages,returns,values}/{mean,max,min}``; ``critic/advantages/zero_ratio``, the
        share of samples that take part but have only zero advantages (with group baselines: all rewards of the
        prompt are equal); ``critic/vf_explained_var``; ``response_length/*``, ``response_length_non_aborted/*``,
        ``response/aborted_ratio`` (share of empty responses), ``prompt_length/*``; ``num_turns/*`` and
        ``tool_call_counts/*`` if the batch has them.
    """
    columns = _tensors(batch)
    mask = columns["response_mask"].bool()
    trained = mask.any(-1)  # (bsz,)
    metrics: Metrics = {}
    scores = trajectory_scores(batch, columns["token_level_scores"])
    metrics |= distribution(scores[trained[Trajectories.from_batch(batch).scored_rows]], "critic/score")
    metrics |= distribution(columns["token_level_rewards"].sum(-1, dtype=torch.float64)[trained], "critic/rewards")
    for name in ("advantages", "returns", *(("values",) if use_critic else ())):
        metrics |= distribution(columns[name][mask], f"critic/{name}")
    teaches = (mask & (columns["advantages"] != 0)).any(-1)
    metrics["critic/advantages/zero_ratio"] = 1.0 - teaches[trained].float().mean().item()
    if use_critic:
        metrics["critic/vf_explained_var"] = explained_variance(columns["values"][mask], columns["returns"][mask])
    return metrics | _length_metrics(batch) | _turn_metrics(batch)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var[R - V] / Var[R]: 1 for a perfect critic, 0 for a constant one; NaN for fewer than two tokens."""
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
        if column not in batch.non_tensor_batch:
            continue
        values = batch.non_tensor_batch[column][Trajectories.from_batch(batch).scored_rows]
        counts = [float(value) for value in values if value is not None]
        if counts:  # agent loops without tools count no calls
            metrics |= distribution(counts, name)
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float], generated: int | None = None) -> Metrics:
    """Compute ``timing_s/{stage}`` and ``timing_per_token_ms/{stage}``.

    Milliseconds are per response token for ``gen``, and per token of prompt and response for other stages.
    ``generated`` is the number of response tokens sampled, if they are more than the batch's (dynamic sampling).
    """
    all_tokens = int(_tensors(batch)["attention_mask"].sum())
    tokens = {"gen": int(response_lengths(batch).sum()) if generated is None else generated}
    tokens |= dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), all_tokens)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in tokens.keys() & timing_raw.keys():
        metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000.0 / max(tokens[name], 1)
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> Metrics:
    """Compute tokens per second and rank; ``timing_raw["step"]`` is the whole step.

    Returns:
        ``perf/total_num_tokens`` (prompts and responses), ``perf/time_per_step`` in seconds, and ``perf/throughput`` in
        tokens per second and rank.
    """
    tokens, seconds = int(_tensors(batch)["attention_mask"].sum()), timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


def compute_mfu_metrics(
    flops: Mapping[str, float | None], arithmetic: Mapping[str, Arithmetic], timing_raw: Mapping[str, float]
) -> Metrics:
    """Compute the model FLOPs utilisation of each stage: useful FLOPs / (seconds · peak FLOPS of all ranks).

    ``flops`` and ``arithmetic`` are sums over all ranks. The result has ``perf/mfu/{actor,critic,actor_infer}`` for the
    stages that ran and whose FLOPs and peak are known.
    """
    shares = {
        name: arithmetic[stage].utilization(flops[stage], timing_raw[stage])
        for stage, name in MFU_STAGES.items()
        if stage in flops
    }
    return {f"perf/mfu/{name}": share for name, share in shares.items() if share is not None}


def sampling_mask_metrics(batch: DataProto, top_k: int) -> Metrics:
    """Measure what truncated sampling kept for the tokens that are trained on (``rollout.keep_sampling_mask``).

    ::

        training/sampling_mask/size       kept tokens per drawn token, where they are known
        training/sampling_mask/full       share of drawn tokens of which at least top_k tokens were kept
        training/sampling_mask/unknown    share of drawn tokens whose kept tokens are not known

    Without a token to train on all are left out, and so is the size if none is known: then the batch may have no
    ``kept_ids``.

    Args:
        batch: of the step.
        top_k: ``rollout.top_k``.

    Raises:
        SchemaError: the batch has no ``response_mask``.
    """
    require(batch, ("response_mask",), "rollout.keep_sampling_mask=true")
    trained = batch.batch["response_mask"].bool()
    kept_ids = batch.batch.get("kept_ids")
    sizes = (torch.zeros_like(trained, dtype=torch.int64) if kept_ids is None else (kept_ids >= 0).sum(-1))[trained]
    if not len(sizes):
        return {}
    known_sizes = sizes[sizes > 0].double()
    size = {"training/sampling_mask/size": known_sizes.mean().item()} if len(known_sizes) else {}
    full, unknown = (sizes >= top_k).double().mean().item(), 1 - len(known_sizes) / len(sizes)
    return size | {"training/sampling_mask/full": full, "training/sampling_mask/unknown": unknown}


def compute_rollout_gap_metrics(batch: DataProto) -> Metrics:
    """Difference between the token probabilities of rollout engine and trainer, over valid tokens.

    With p = exp(rollout_log_probs), q = exp(old_log_probs)::

        training/rollout_probs_diff_{max,mean,std}       of |p - q|
        training/rollout_actor_probs_pearson_corr        correlation of p and q
        rollout_corr/{kl,k3_kl,training_ppl,...}         see compute_offpolicy_metrics

    With top_p, top_k or min_p the kept tokens are sampled with a higher probability, so p > q by design, and the
    difference includes the effect of the truncation.

    Args:
        batch: with old_log_probs, response_mask, and rollout_log_probs if the engine returns them.

    Returns:
        these metrics and ``training/rollout_probs_diff_valid`` 1; only the latter, with 0, if there is nothing to
        compare.
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
    """Pearson correlation of two vectors; NaN if one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = x.norm() * y.norm()
    return (x @ y / scale).item() if scale > 0 else float("nan")


def compute_variance_proxy_metrics(batch: DataProto, gradient_norm: float | None = None) -> Metrics:
    """Measure how much of a policy gradient is noise, from quantities that a step has anyway.

    With the summed score-function norm W_i = Σ_t (1 - 2π_t + Σ_v π_v²) of a response (``sum_pi_squared``), the
    importance ratio ρ̄_i of ``rollout_is_weights``, its mean advantage A_i, and the norm of the mean gradient::

        proxy1_signal_strength    ‖ḡ‖²
        proxy2_total_power        mean_i ρ̄_i² A_i² W_i
        proxy3_pure_noise         max(0, (proxy2 - proxy1) / (N - 1))
        expected_a_squared        mean_i A_i²
        expected_w                mean_i W_i

    Means are over the N responses with a valid token.

    Args:
        batch: with advantages, response_mask, old_log_probs, sum_pi_squared, and rollout_is_weights if there are any.
        gradient_norm: norm of the gradient of the step; without it proxies 1 and 3 are absent.

    Returns:
        these under ``variance_proxy/``; nothing if the batch lacks ``sum_pi_squared`` or ``advantages``.
    """
    columns = _tensors(batch)
    if not {"sum_pi_squared", "advantages"} <= set(columns.keys()):
        return {}
    mask = columns["response_mask"].bool()
    trained = mask.any(-1)
    if not trained.any():
        return {}
    score_norms = 1.0 - 2.0 * columns["old_log_probs"].double().exp() + columns["sum_pi_squared"].double()
    norms = masked_sum(score_norms, mask, axis=-1)[trained]
    squared = masked_mean(columns["advantages"].double(), mask, axis=-1)[trained] ** 2
    power = squared * norms
    if "rollout_is_weights" in columns.keys():
        power = power * masked_mean(columns["rollout_is_weights"].double(), mask, axis=-1)[trained] ** 2
    proxies = {
        "proxy2_total_power": power.mean().item(),
        "expected_a_squared": squared.mean().item(),
        "expected_w": norms.mean().item(),
    }
    if gradient_norm is not None:
        signal = gradient_norm**2
        proxies["proxy1_signal_strength"] = signal
        if len(norms) > 1:
            proxies["proxy3_pure_noise"] = max(0.0, (proxies["proxy2_total_power"] - signal) / (len(norms) - 1))
    return {f"variance_proxy/{name}": value for name, value in proxies.items()}
