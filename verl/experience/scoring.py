"""Scores of responses: how they are computed and checked, and what becomes of samples without one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from verl.base.repeats import without_repeated_traceback
from verl.config import FailurePolicy, PPOConfig
from verl.errors import RewardError
from verl.experience.rewards import TRAJECTORY_PREFIX, Scored, status_metrics
from verl.experience.sequences import Trajectories, compared_groups, with_earlier_turns
from verl.experience.trajectories import NO_SCORES, complete_scores, rows_to_score
from verl.experience.workers import CurrentWorkers
from verl.protocol import DataProto
from verl.protocol.future import wait_for
from verl.schema import COLUMNS, require
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics
from verl.workers.reward_manager import AbstractRewardManager
from verl.workers.reward_manager.abstract import call
from verl.workers.reward_manager.function import tensors_of
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.scores import on_drawn_tokens, token_scores

if TYPE_CHECKING:
    from verl.experience.judge import ServedJudge
    from verl.workers.reward_manager.abstract import Result

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartScores:
    """Scores of some samples of a batch; :func:`joined_scores` judges over all parts how many failed."""

    scored: Scored
    num_samples: int = 0
    """Samples that the reward function was to score."""
    num_failed: int = 0
    """Samples that it could not score."""
    failures: str = ""
    """Their count, and why the first could not be scored; empty if there are none."""

    def split(self, sizes: Sequence[int]) -> list[PartScores]:
        """Return the scores of consecutive samples, so many in each part."""
        parts, (scores, extra), start = [], self.scored, 0
        for size in sizes:
            rows = slice(start, start + size)
            row_values = {name: values[rows] for name, values in extra.items()}
            statuses = [status for status in row_values["reward_status"] if not status.startswith(TRAJECTORY_PREFIX)]
            failed = len(statuses) - statuses.count("ok")
            parts.append(PartScores((scores[rows], row_values), len(statuses), failed, self.failures if failed else ""))
            start += size
        return parts


class Scorer:
    """Scores responses by the reward model and the reward manager, with the judge awake if the run has one.

    Args:
        config: the whole configuration.
        workers: returns the worker groups of the run.
        judge: the generative reward model that reward functions ask, if the run has one.
    """

    def __init__(self, config: PPOConfig, workers: CurrentWorkers, judge: ServedJudge | None) -> None:
        self._workers, self._judge = workers, judge
        self._agent = config.actor_rollout_ref.rollout.agent
        self._max_error_rate = config.reward_model.max_error_rate
        self._has_reward_model = config.reward_model.enable and config.judge is None

    def submit(self, batch: DataProto, reward_fn: object, step: int) -> Deferred[Scored]:
        """Start scoring and return at once; ``result()`` waits, and raises what :func:`compute_reward` does.

        Of trajectories only those are scored that are trained on and that the agent loop has given no score.

        Args:
            batch: responses with the columns of their prompts.
            reward_fn: a reward manager, or any callable that takes the batch.
            step: the training step, from which the judge's random numbers follow.
        """
        return self.submit_part(batch, reward_fn, step).map(lambda part: self.joined([part], reward_fn))

    def scores_any_time(self, reward_fn: object) -> bool:
        """Return whether :meth:`submit_part` may be called in any thread, and for few samples, while others are drawn.

        Not with a judge or a reward model: their ranks may be those that sample or train, and serve a batch in one
        call. Nor with a function or a manager's own ``__call__`` of whole batches.
        """
        is_free = self._judge is None and not self._has_reward_model
        return is_free and _scores_parts(reward_fn) and reward_fn.scores_single_samples

    def submit_part(self, batch: DataProto, reward_fn: object, step: int) -> Deferred[PartScores]:
        """As :meth:`submit`, for some samples of a batch; :meth:`joined` judges over all how many failed."""
        if self._judge is None:
            return self._submit(batch, reward_fn)
        judge_workers = self._workers().reward
        assert judge_workers is not None
        return self._judge.serve_while(judge_workers, step, lambda: self._submit(batch, reward_fn))

    def joined(self, parts: Sequence[PartScores], reward_fn: object) -> Scored:
        """Return the scores of a batch from those of its parts, in their order.

        Raises:
            RewardError: too many samples failed.
        """
        return joined_scores(parts, _limit(reward_fn, self._max_error_rate))

    def _submit(self, batch: DataProto, reward_fn: object) -> Deferred[PartScores]:
        if "trajectory_status" not in batch.non_tensor_batch:
            return _submit_part(self._with_model_scores(batch), reward_fn)
        rows = rows_to_score(batch, self._agent)
        if not rows:
            return Deferred.from_value(PartScores(complete_scores(batch, NO_SCORES, rows, self._agent)))
        scorable = self._with_model_scores(with_earlier_turns(batch).select_idxs(rows))
        scoring = _submit_part(scorable, reward_fn)
        return scoring.map(lambda part: replace(part, scored=complete_scores(batch, part.scored, rows, self._agent)))

    def _with_model_scores(self, batch: DataProto) -> DataProto:
        """Add ``rm_scores`` if the run has a reward model."""
        if not self._has_reward_model:
            return batch
        workers = self._workers().reward
        assert workers is not None
        return batch | wait_for(workers.compute_rm_score(batch))


def submit_scores(data: DataProto, reward_fn: Any, max_error_rate: float = 0.5) -> Deferred[Scored]:
    """Start to score a batch in the reward manager's processes and return at once.

    Args:
        data: batch with responses.
        reward_fn: a reward manager, or any callable that takes the batch, which is called only in ``result()``.
        max_error_rate: largest fraction of samples without a score, unless the manager has a limit of its own.

    Returns:
        the running computation; ``result()`` waits, and returns or raises what :func:`compute_reward` does.
    """
    limit = _limit(reward_fn, max_error_rate)
    return _submit_part(data, reward_fn).map(lambda part: joined_scores([part], limit))


def _limit(reward_fn: object, max_error_rate: float) -> float:
    return getattr(reward_fn, "max_error_rate", max_error_rate)


def _submit_part(data: DataProto, reward_fn: Any) -> Deferred[PartScores]:
    def checked(result: torch.Tensor | Result) -> PartScores:
        return _checked(result, data, reward_fn)

    if _scores_parts(reward_fn):
        return reward_fn.start(data, is_part=True).map(checked)
    if _inherits(reward_fn, "start") and not _inherits(reward_fn, "__call__"):
        return AbstractRewardManager.start(reward_fn, data).map(checked)
    if isinstance(reward_fn, AbstractRewardManager):
        return reward_fn.start(data).map(checked)
    return Deferred([], lambda: checked(call(reward_fn, data)))


def _scores_parts(reward_fn: object) -> TypeGuard[NaiveRewardManager]:
    """Return whether a manager takes some samples of a batch: a subclass with a ``__call__`` of its own may not."""
    return _inherits(reward_fn, "start") and _inherits(reward_fn, "__call__")


def _inherits(reward_fn: object, method: str) -> TypeGuard[NaiveRewardManager]:
    is_manager = isinstance(reward_fn, NaiveRewardManager)
    return is_manager and getattr(type(reward_fn), method) is getattr(NaiveRewardManager, method)


def joined_scores(parts: Sequence[PartScores], max_error_rate: float) -> Scored:
    """Join the scores of the samples of a batch.

    Args:
        parts: in the order of the samples.
        max_error_rate: largest fraction of samples without a score.

    Raises:
        RewardError: too many samples failed.
    """
    failed, total = sum(part.num_failed for part in parts), sum(part.num_samples for part in parts)
    if failed:
        what = next(part.failures for part in parts if part.failures)
        if len(parts) > 1:
            what = f"{failed} of {total} samples could not be scored ({failed / total:.1%}). Of one part: {what}"
        if failed > max_error_rate * total:
            raise RewardError(
                f"{what}\nThat is more than reward_model.max_error_rate={max_error_rate}. Correct the reward function "
                "or the data; a higher rate lets the run go on, with the failed samples left out of training."
            )
        logger.warning(
            "%s\nThey count as failed (reward_status, reward_model.on_failure).", without_repeated_traceback(what)
        )
    names = dict.fromkeys(name for part in parts for name in part.scored[1])
    extra: dict[str, list[Any]] = {name: [] for name in names}
    for part in parts:
        for name, values in extra.items():
            values += part.scored[1].get(name, [None] * len(part.scored[0]))
    return torch.cat([part.scored[0] for part in parts]), extra


def compute_reward(data: DataProto, reward_fn: object, max_error_rate: float = 0.5) -> Scored:
    """Score a batch and wait.

    Args:
        data: batch with responses.
        reward_fn: a reward manager.
        max_error_rate: largest fraction of samples without a score, unless the manager has a limit of its own.

    Returns:
        scores (bsz, response_length), and lists of length bsz by name: ``score``, ``reward_status`` (one of
        :data:`verl.supervision.killable_pool.STATUSES`), and the further values of the reward function.

    Raises:
        RewardError: too many samples failed, or the manager returned something of another shape.
    """
    return submit_scores(data, reward_fn, max_error_rate).result()


def score_columns(scores: torch.Tensor, extra: Mapping[str, list[object]]) -> DataProto:
    """Build the columns ``token_level_scores`` and, by name, the other values of the reward function."""
    return DataProto.from_dict(tensors={"token_level_scores": scores}, non_tensors=dict(extra))


def leave_out_failed(
    batch: DataProto, statuses: Sequence[str], policy: FailurePolicy, needs_siblings: bool = False
) -> tuple[DataProto, Metrics]:
    """Exclude samples that could not be scored from training, since a failure is not a score of zero.

    Their ``response_mask`` becomes zero, which removes them from the loss, and each gets a group (``uid``) of its
    own, which removes them from the baselines. The same happens to samples whose greedy response was not scored. All
    sequences of a trajectory are one sample.

    Args:
        batch: with ``response_mask``, ``uid`` and, if there are greedy responses, their ``baseline_status``.
        statuses: ``reward_status`` of each sample.
        policy: ``mask`` excludes the failed samples, ``drop_group`` their whole groups, ``stop`` raises. Failed
            trajectories, which ``rollout.agent.on_failure`` leaves out, are excluded alone with any of them.
        needs_siblings: also exclude what is then the only one of its group, and sequences of an agent that answered in
            one of the trajectories alone.

    Returns:
        the new ``response_mask`` and ``uid``; :func:`status_metrics` with ``reward/left_out_rate``, the fraction of
        excluded samples, and ``reward/baseline_error_rate``, that of greedy responses without a score.

    Raises:
        RewardError: a sample failed, and the policy is ``stop``.
    """
    require(batch, ("response_mask", "uid"), "leaving out samples without score")
    trajectories, uids = Trajectories.from_batch(batch), batch.non_tensor_batch["uid"].astype(str)
    scored = trajectories.scored_rows
    metrics = status_metrics([statuses[row] for row in scored])
    reasons = np.array(statuses, dtype=object)
    if "baseline_status" in batch.non_tensor_batch:
        baseline_statuses = batch.non_tensor_batch["baseline_status"]
        metrics["reward/baseline_error_rate"] = float((baseline_statuses[scored] != "ok").mean())
        reasons = np.where(reasons == "ok", baseline_statuses, reasons)
    is_lost = np.array([str(reason).startswith(TRAJECTORY_PREFIX) for reason in reasons], dtype=bool)
    failed = (reasons != "ok") & ~is_lost
    if policy == "stop" and failed.any():
        row = int(failed.argmax())
        raise RewardError(
            f"{failed[scored].sum()} of {len(scored)} samples could not be scored; the first is sample {uids[row]} "
            f"({reasons[row]}), and reward_model.on_failure=stop. The reason is logged above. Correct the reward "
            "function or the data, or set reward_model.on_failure=mask to go on without such samples."
        )
    out = is_lost | (np.isin(uids, uids[failed]) if policy == "drop_group" else failed)
    if needs_siblings and (out.any() or "agent" in batch.non_tensor_batch):
        groups = compared_groups(batch)
        group_of_unit = {
            unit: group
            for unit, group, is_out in zip(trajectories.agent_indices, groups, out, strict=True)
            if not is_out
        }
        remaining = Counter(group_of_unit.values())
        out = out | np.array([remaining[group] < 2 for group in groups])
    new_uids = batch.non_tensor_batch["uid"].copy()
    new_uids[out] = [f"{uids[row]}-left-out-{row}" for row in np.flatnonzero(out)]
    columns = batch.select(batch_keys=["response_mask"], non_tensor_batch_keys=[], meta_info_keys=[])
    if out.any():  # else the mask is the one that the ranks have made, and need not travel again
        mask = columns.batch["response_mask"]
        keep = torch.from_numpy(~out).to(mask).unsqueeze(-1)
        columns = DataProto.from_dict(tensors={"response_mask": mask * keep})
    columns = columns | DataProto.from_dict(non_tensors={"uid": new_uids})
    return columns, metrics | {"reward/left_out_rate": float(out[scored].mean())}


def _checked(result: torch.Tensor | Result, data: DataProto, reward_fn: object) -> PartScores:
    manager = type(reward_fn).__name__
    extra: dict[str, list] = {}
    if isinstance(result, torch.Tensor):
        scores = result
    else:
        extra = {name: list(values) for name, values in (result.get("reward_extra_info") or {}).items()}
        scores = result["reward_tensor"]
    expected = tensors_of(data)["responses"].shape
    if scores.shape != expected:
        raise RewardError(
            f"{manager} returned scores of shape {tuple(scores.shape)}; "
            f"expected that of the responses, {tuple(expected)}."
        )
    if misfits := [name for name, values in extra.items() if len(values) != len(data)]:
        raise RewardError(
            f"{manager} returned reward_extra_info['{misfits[0]}'] with {len(extra[misfits[0]])} values "
            f"for {len(data)} samples."
        )
    if reserved := sorted(COLUMNS.keys() & extra.keys()):
        raise RewardError(
            f"the reward function returned '{reserved[0]}', the name of a column of verl: "
            f"{COLUMNS[reserved[0]].meaning} (made by {COLUMNS[reserved[0]].producer}). Give it another name."
        )
    on_tokens = token_scores(on_drawn_tokens(scores, tensors_of(data)["response_mask"]), torch.ones_like(scores))
    assert on_tokens.tokens is not None
    statuses = extra.get("reward_status", ["ok"] * len(data))
    unusable = [row for row, score in enumerate(on_tokens.samples) if score.status != "ok" and statuses[row] == "ok"]
    extra["reward_status"] = ["error" if row in unusable else status for row, status in enumerate(statuses)]
    extra.setdefault("score", on_tokens.tokens.sum(-1, dtype=torch.float64).tolist())
    failed = sum(status != "ok" for status in extra["reward_status"])
    failures = "" if isinstance(result, torch.Tensor) else result.get("failures", "")
    if failed and not failures:
        failures = f"{failed} of {len(data)} samples could not be scored ({failed / len(data):.1%})."
    if unusable:
        first = unusable[0]
        text = f"The first whose score from {manager} cannot be used: row {first}:\n{on_tokens.samples[first].error}"
        failures = f"{failures} {text}"
    return PartScores((on_tokens.tokens, extra), len(data), failed, failures)
