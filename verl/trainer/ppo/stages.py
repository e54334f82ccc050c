"""Computations of the driver between worker calls: functions of a batch that return new columns and metrics.

See the picture in ``trainer.py`` for their place in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from verl.algorithms import (
    RoleBaselines,
    adv_needs,
    agg_loss,
    compute_advantages,
    kl_in_reward,
    policy_loss_info,
    prepare_aggregation,
    prepare_update,
    update_columns,
)
from verl.algorithms.distillation import distillation_loss_info
from verl.algorithms.groups import rewards_of_responses
from verl.algorithms.rollout_correction import INTERPOLATED
from verl.config import ActorConfig, DistillationConfig, RolloutCorrectionConfig
from verl.errors import RolloutError, UnsupportedError
from verl.experience.sequences import (
    Trajectories,
    compared_groups,
    joined_sequences,
    mini_batches,
    once_per_agent,
)
from verl.protocol import DataProto, DataProtoFuture, replace_columns, with_response_mask
from verl.schema import require
from verl.trainer.balance import deal
from verl.trainer.ppo.rollout_corr_helper import corrected_columns
from verl.utils.metric import Metrics
from verl.utils.torch_functional import masked_mean
from verl.workers.shared_prompts import Siblings
from verl.workers.teacher.prompts import TEACHER_PROMPTS

if TYPE_CHECKING:
    from verl.algorithms.groups import GroupIds
    from verl.algorithms.kl import KLController
    from verl.single_controller.base.worker_group import WorkerGroup

ACTOR_COLUMNS = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids")


def sequence_lengths(batch: DataProto) -> list[int]:
    """Number of tokens of each sample, prompt and response."""
    return batch.batch["attention_mask"].sum(-1).tolist()


def token_counts(batch: DataProto) -> tuple[list[int], int]:
    """Number of tokens of each sample, and number of response tokens in the whole batch that are trained on."""
    return sequence_lengths(batch), int(batch.batch["response_mask"].sum())


def repeated_prompts(batch: DataProto, sizes: Sequence[int]) -> list[int]:
    """Lengths of prompts that an earlier row of the same mini-batch has; ``sizes`` are the rows of each mini-batch."""
    ends = list(accumulate(sizes))
    parts = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    read = batch.select(batch_keys=list(ACTOR_COLUMNS))
    return [length for part in parts for length in Siblings.from_batch(read.select_idxs(part)).repeated()]


def apply_kl_penalty(data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl") -> tuple[DataProto, Metrics]:
    """Compute rewards: ``token_level_rewards = token_level_scores - β · kl(old ‖ ref)``.

    Updates the controller with the mean KL per sequence; an adaptive β then follows its target (arXiv:1909.08593).

    Args:
        data: batch with token_level_scores, old_log_probs, ref_log_prob, response_mask.
        kl_ctrl: a controller of :func:`verl.algorithms.get_kl_controller`.
        kl_penalty: a kind of :func:`verl.algorithms.kl_penalty`.

    Returns:
        the batch with ``token_level_rewards``, added or replaced; metrics ``actor/reward_kl_penalty`` and
        ``actor/reward_kl_penalty_coeff``.
    """
    data = with_response_mask(data)
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
    # Without a token to train on there is no KL to adapt to, and a NaN would stay in an adaptive β.
    if columns["response_mask"].any() and mean_kl.isfinite():
        kl_ctrl.update(current_kl=mean_kl.item(), n_steps=len(data))
    metrics = {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": beta}
    return replace_columns(data, DataProto.from_dict(tensors={"token_level_rewards": rewards})), metrics


def compute_advantage(
    data: DataProto,
    adv_estimator: str | None,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Mapping[str, object] | None = None,
) -> DataProto:
    """Compute advantages by a registered estimator, with the columns and settings that its parameters name.

    Args:
        data: batch; the estimator receives ``uid`` as ``index``.
        adv_estimator: name in the estimator registry; None, of a program with advantages of its own, is an error.
        gamma: discount per token.
        lam: λ of generalised advantage estimation.
        num_repeat: responses per prompt. No estimator reads it, since ``uid`` says which rows belong together.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.
        config: the section ``algorithm``, for estimators that read more of it; the arguments above win.

    An estimator that takes ``index`` compares trajectories: the sequences of each agent of a trajectory are one row for
    it (:func:`verl.experience.sequences.joined_sequences`), and its groups are those of one agent. For other
    estimators each sequence is a row, with the score of its trajectory.

    Returns:
        the batch with ``advantages`` and ``returns``, both (bsz, response_length), added or replaced.
    """
    adv_needs(adv_estimator)  # an unknown name is reported before missing columns
    data = with_response_mask(data)
    columns: dict[str, object] = {**data.non_tensor_batch, **dict(data.batch.items())}
    if "uid" in columns:
        columns["index"] = compared_groups(data)
    arguments = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "config": config}
    settings, needs = {**(config or {}), **arguments}, adv_needs(adv_estimator)
    read = needs.columns | needs.optional_columns
    compares = needs.wants_all or "index" in read or "role_baselines" in read
    if compares and Trajectories.from_batch(data).are_split:
        if "trajectory_conversation" in read:
            raise UnsupportedError(
                f"advantage estimator '{adv_estimator}' compares turns by what the environment said before them, and "
                "here a trajectory has several sequences, which begin with it in their prompts. Let every trajectory "
                "be one sequence (multi_turn.use_inference_chat_template=false), or use grpo_per_turn."
            )
        require(data, ("token_level_scores", "token_level_rewards"), "comparing trajectories of several sequences")
        joined = joined_sequences(data, columns)
        estimated = compute_advantages(adv_estimator, joined.columns, settings)
        advantages, returns = map(joined.apart, estimated)
    else:
        advantages, returns = compute_advantages(adv_estimator, columns, settings)
    return replace_columns(data, DataProto.from_dict(tensors={"advantages": advantages, "returns": returns}))


def with_role_baselines(batch: DataProto, baselines: RoleBaselines) -> tuple[DataProto, Metrics]:
    """Add ``role_baselines`` for the estimator ``rae``, and count the rewards of this batch for the next.

    The role of a row is its ``data_source`` and agent; the sequences of an agent in one trajectory have one reward.

    Returns:
        the batch; and ``rae/baseline/<role>``, the running means after the batch.
    """
    trajectories = Trajectories.from_batch(batch)
    sources = batch.non_tensor_batch.get("data_source", [""] * len(batch))
    roles = [f"{source}/{agent}".lstrip("/") for source, agent in zip(sources, trajectories.agents, strict=True)]
    rewards, scores = batch.batch["token_level_rewards"], batch.batch["token_level_scores"]
    if trajectories.are_split:
        rewards = rewards - scores + once_per_agent(batch, scores)
    sums, _ = rewards_of_responses(rewards, batch.batch["response_mask"])
    has_tokens = batch.batch["response_mask"].bool().any(-1)
    totals: dict[tuple[str, int], float] = {}
    for row, unit in enumerate(trajectories.agent_indices):
        if has_tokens[row]:
            key = roles[row], unit
            totals[key] = totals.get(key, 0.0) + sums[row].item()
    batch = replace_columns(batch, DataProto.from_dict(tensors={"role_baselines": baselines.before(roles)}))
    baselines.count([role for role, _ in totals], list(totals.values()))
    return batch, {f"rae/baseline/{role}": value for role, value in baselines.values.items()}


def mean_entropy(batch: DataProto, loss_agg_mode: str, loss_scale_factor: float | None) -> Metrics:
    """Compute ``actor/entropy``: the policy's entropy over the response tokens, aggregated like the loss."""
    mask, trajectories = batch.batch["response_mask"], Trajectories.from_batch(batch)
    split = trajectories.indices if trajectories.are_split else None
    weights = prepare_aggregation(loss_agg_mode, mask, batch.non_tensor_batch["uid"], split)
    entropy = agg_loss(
        batch.batch["entropys"],
        mask,
        loss_agg_mode,
        global_batch_size=len(trajectories),
        loss_scale_factor=loss_scale_factor,
        row_weights=weights.get("row_weights"),
    )
    return {"actor/entropy": entropy.item()}


def entropy_per_token(batch: DataProto) -> float:
    """Mean entropy of the policy over the response tokens, in nats."""
    return masked_mean(batch.batch["entropys"], batch.batch["response_mask"]).item()


def correct_rollout(batch: DataProto, correction: RolloutCorrectionConfig) -> tuple[DataProto, Metrics]:
    """Compute ``rollout_is_weights`` if ``rollout_is`` is set, ``accepted_mask`` if ``rollout_rs`` is, and metrics."""
    corrected, metrics = corrected_columns(batch, correction)
    columns: dict[str, torch.Tensor] = {}
    if correction.rollout_is is not None:
        columns["rollout_is_weights"] = corrected.batch["rollout_is_weights"]
    if correction.rollout_rs is not None:
        columns["accepted_mask"] = corrected.batch["response_mask"]
    return DataProto.from_dict(tensors=columns), metrics


def without_rejected(batch: DataProto) -> DataProto:
    """Replace ``response_mask`` by ``accepted_mask`` if the batch has one."""
    if "accepted_mask" not in batch.batch.keys():
        return batch
    return replace_columns(batch, DataProto.from_dict(tensors={"response_mask": batch.batch["accepted_mask"]}))


def step_seed(seed: int, step: int) -> int:
    """Derive a different seed for each step of a run."""
    return seed * 1_000_003 + step


def prepare_mini_batches(batch: DataProto, actor: ActorConfig, sizes: Sequence[int], seed: int) -> DataProto:
    """Compute the columns of the policy update that depend on whole mini-batches, before rows are split over ranks.

    Mini-batch k is the k-th contiguous part of the batch, of ``sizes[k]`` rows. The columns are those of
    :func:`verl.algorithms.prepare_update`; most settings need none.
    """
    prepared = []
    for k, (part, ids) in enumerate(_mini_batches(batch, sizes)):
        columns = {**dict(part.batch.items()), **ids}
        prepared.append(prepare_update(columns, actor, seed * len(sizes) + k))
    return DataProto.from_dict(tensors=_one_after_the_other(prepared))


def aggregation_columns(batch: DataProto, loss_agg_mode: str, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Compute the columns of the critic's loss aggregation; see :func:`prepare_mini_batches`."""
    prepared = [
        prepare_aggregation(loss_agg_mode, part.batch["response_mask"], ids.get("index", ()), ids.get("trajectory_id"))
        for part, ids in _mini_batches(batch, sizes)
    ]
    return _one_after_the_other(prepared)


def _mini_batches(batch: DataProto, sizes: Sequence[int]) -> Iterator[tuple[DataProto, dict[str, GroupIds]]]:
    """Yield each mini-batch with its group ids, ``index``, and ``trajectory_id`` if trajectories have several rows."""
    names = {"index": "uid"} | ({"trajectory_id": "trajectory_id"} if Trajectories.from_batch(batch).are_split else {})
    for part in mini_batches(batch, sizes):
        columns = part.non_tensor_batch
        yield part, {name: columns[column] for name, column in names.items() if column in columns}


def _one_after_the_other(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def policy_columns(
    batch: DataProto, actor: ActorConfig, own_forward: bool = False, distillation: DistillationConfig | None = None
) -> tuple[str, ...]:
    """List the columns of ``batch`` that the policy update reads.

    With ``own_forward``, the update computes ``old_log_probs`` itself.

    Raises:
        SchemaError: a required column is missing.
    """
    info = policy_loss_info(actor.policy_loss.loss_mode)
    needed = {*ACTOR_COLUMNS, "advantages", *update_columns(actor)}
    correction = actor.policy_loss.rollout_correction
    if correction is not None and correction.interpolates:
        needed |= set(INTERPOLATED)
    elif not own_forward:
        needed |= {"old_log_probs"}
    elif correction is not None and correction.weighs_by_response:
        needed |= {"rollout_log_probs"}
    needed |= {"ref_log_prob"} if actor.use_kl_loss else set()
    # With R2 the pass that records the choice is the update's own if there is no other.
    replays = {"R2": not own_forward, "R3": True}
    needed |= {"routed_experts"} if replays.get(actor.router_replay.mode) else set()
    learnt = set[str]()
    if distillation is not None and distillation.enabled:
        needed |= set(distillation_loss_info(distillation.distillation_loss.loss_mode).columns)
        learnt |= {"distillation_mask", "teacher_index", "span_ends", *TEACHER_PROMPTS}
    require(batch, sorted(needed), "the policy update")
    optional = info.optional_columns | {"rollout_is_weights", "row_weights", "trajectory_count", "kept_ids"} | learnt
    return tuple(sorted(needed | (optional & set(batch.batch.keys()))))


def check_rollout_gap(metrics: Metrics, limit: float | None) -> None:
    """Raise RolloutError if a token's probability differs between rollout and trainer by more than ``limit``.

    A large difference means that the sampled distribution is not the trained one.
    """
    gap = metrics.get("training/rollout_probs_diff_max", 0.0)
    if limit is not None and not gap <= limit:  # also true for NaN
        raise RolloutError(
            f"the probability of a token differs by {gap:.2g} between rollout engine and trainer, more than "
            f"trainer.max_rollout_actor_probs_diff={limit}. Compute both in one precision (rollout.dtype, "
            "actor.fsdp_config.dtype), or raise the limit."
        )


def call_by_row(
    workers: WorkerGroup, method: str, batch: DataProto, *, balance: bool, shares_prompts: bool
) -> DataProto | DataProtoFuture:
    """Call a method of a worker group whose result has a row for each row of the batch, in the order of the batch.

    Args:
        workers: the worker group.
        method: its method; of workers that register it with ``blocking=False`` the result is a future.
        batch: rows in the order of the data.
        balance: give ranks about equal numbers of tokens (``trainer.balance_batch``).
        shares_prompts: keep rows with the same prompt on one rank (``use_prefix_grouper``).
    """
    # The policy alone repeats the choice of experts in the rollout; reference and critic choose for themselves.
    reads = {"compute_log_prob": ("routed_experts", "kept_ids"), "compute_ref_log_prob": ("kept_ids",)}
    further = [name for name in reads.get(method, ()) if name in batch.batch.keys()]
    columns, parts = (*ACTOR_COLUMNS, *further), workers.num_parts(method)
    dealt = deal(batch, parts, balance=balance, columns=columns, pads=True, shares_prompts=shares_prompts)
    output = getattr(workers, method)(dealt.rows)
    return output.then(dealt.restore) if isinstance(output, DataProtoFuture) else dealt.restore(output)
