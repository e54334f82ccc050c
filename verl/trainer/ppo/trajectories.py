"""What the trainer does with trajectories of agent loops: which are scored, left out, or given the score 0."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, get_args

import torch

from verl.agents.manager import LEFT_OUT
from verl.config import AgentLoopConfig, RolloutConfig
from verl.config.agent import SINGLE_TURN, TrajectoryStatus
from verl.protocol import DataProto
from verl.trainer.ppo.reward import Scored
from verl.utils.dataset.rl_dataset import FOR_AGENTS
from verl.utils.metric import Metrics, distribution
from verl.workers.reward_manager.scores import Score, Scores, checked_score, placed

logger = logging.getLogger(__name__)

NO_SCORES: Scored = (torch.zeros(0), {})
"""Scores of no rows."""


def wants_agents(prompts: DataProto, rollout: RolloutConfig) -> bool:
    """Whether some prompt is answered by an agent loop rather than by one response of the engines."""
    names = prompts.non_tensor_batch.get("agent_name")
    default = rollout.default_agent_loop
    return default != SINGLE_TURN if names is None else any((name or default) != SINGLE_TURN for name in names)


def unused_arguments(prompts: DataProto) -> list[str]:
    """Return the columns that hold something for agent loops, for prompts that none answers."""
    columns = prompts.non_tensor_batch
    return [name for name in FOR_AGENTS if name in columns and any(columns[name])]


def rows_to_score(batch: DataProto, agent: AgentLoopConfig) -> list[int]:
    """Return the rows that the reward function scores: trajectories to train on without a score of their own."""
    own = _own_scores(batch)
    statuses = batch.non_tensor_batch["trajectory_status"]
    return [row for row, score in enumerate(own) if score is None and agent.treatment_of(statuses[row]) == "train"]


def with_own_scores(batch: DataProto, scored: Scored, rows: list[int], agent: AgentLoopConfig) -> Scored:
    """Complete the scores of some rows to those of the whole batch.

    Args:
        batch: the trajectories.
        scored: scores (len(rows), response_length) and further values of the rows that the reward function scored.
        rows: which rows these are.
        agent: says by status what becomes of a trajectory.

    Returns:
        the same for all rows. ``reward_status`` of trajectories to leave out is not ``ok``; it names their status.
    """
    scores, extra = scored
    statuses = batch.non_tensor_batch["trajectory_status"]
    treatments = [agent.treatment_of(status) for status in statuses]
    own = [
        score if score is not None and treatment == "train" else Score(0.0)
        for score, treatment in zip(_own_scores(batch), treatments, strict=True)
    ]
    known = placed(Scores(own), batch.batch["response_mask"])
    assert known.tokens is not None
    all_scores = known.tokens
    if rows:
        all_scores[rows] = scores.to(all_scores)
    for message in dict.fromkeys(score.error for score in known.samples if score.error):
        logger.warning("the score of an agent loop cannot be used: %s", message)
    columns: dict[str, list[Any]] = {name: [None] * len(batch) for name in ("score", "reward_status", *extra)}
    columns["score"] = [score.value for score in known.samples]
    columns["reward_status"] = [
        f"trajectory: {status}" if treatment in LEFT_OUT else score.status
        for status, treatment, score in zip(statuses, treatments, known.samples, strict=True)
    ]
    for name, values in extra.items():
        for row, value in zip(rows, values, strict=True):
            columns[name][row] = value
    return all_scores, columns


def trajectory_metrics(batch: DataProto) -> Metrics:
    """Compute ``num_turns/...`` and the share of each status, ``agent/status/...``; nothing without agent loops."""
    columns = batch.non_tensor_batch
    if "trajectory_status" not in columns:
        return {}
    counts = Counter(columns["trajectory_status"].tolist())
    shares = {f"agent/status/{status}": counts[status] / len(batch) for status in get_args(TrajectoryStatus)}
    return distribution(columns["__num_turns__"].astype(float).tolist(), "num_turns") | shares


def _own_scores(batch: DataProto) -> list[Score | None]:
    """Scores that agent loops gave: ``reward_score``, or ``turn_scores`` for each turn of the policy."""
    wholes, turns = (batch.non_tensor_batch.get(name, [None] * len(batch)) for name in ("reward_score", "turn_scores"))
    return [_own_score(whole, by_turn) for whole, by_turn in zip(wholes, turns, strict=True)]


def _own_score(whole: Any, by_turn: Any) -> Score | None:
    if by_turn is None:
        return None if whole is None else checked_score(whole)
    return checked_score({"turn_scores": by_turn} | ({} if whole is None else {"score": whole}))
