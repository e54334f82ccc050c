"""Rows of a batch that are the training sequences of one trajectory.

An agent loop may return several sequences for a response: after its context was rewritten, of forks, of sub-agents.
Each is a row, with ``trajectory_id`` and ``agent``; rows of one trajectory are adjacent, in the order of its sequences.
In a batch without ``trajectory_id`` every row is a trajectory.

The score of a trajectory stands on the last token of each of its sequences, and counts once: metrics and group
baselines read one row of each trajectory, or its sequences joined to one (:func:`joined_sequences`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.agents.worker import trajectory_id
from verl.algorithms.groups import group_numbers
from verl.protocol import DataProto, replace_columns
from verl.workers.policy_turns import EARLIER_TURNS, policy_turns
from verl.workers.reward_manager.scores import on_last_token

IMAGES = "multi_modal_inputs"
MAIN = "main"
"""The agent whose last sequence is scored."""


def with_prompts(prompts: DataProto, responses: DataProto) -> DataProto:
    """Join responses with the columns of their prompts, those of a trajectory of several sequences repeated.

    Args:
        prompts: a row for each response that was asked for, with ``uid`` and ``sample_index``.
        responses: a row for each sequence, in the order of the prompts.
    """
    ids = responses.non_tensor_batch.get("trajectory_id")
    if ids is None:
        return prompts | responses
    if IMAGES in responses.non_tensor_batch:  # those of the prompt, and what tools showed
        prompts = prompts.select(non_tensor_batch_keys=[name for name in prompts.non_tensor_batch if name != IMAGES])
    columns = prompts.non_tensor_batch
    names = map(trajectory_id, columns["uid"], columns["sample_index"])
    row_of = {name: row for row, name in enumerate(names)}
    return prompts.select_idxs([row_of[name] for name in ids]) | responses


@dataclass(frozen=True)
class Trajectories:
    """Assignment of rows to trajectories, and to the agents of each trajectory."""

    indices: list[int]
    """The trajectory of each row, from 0."""
    agents: list[str]
    """The agent of each row."""

    @classmethod
    def from_batch(cls, batch: DataProto) -> Trajectories:
        """Read ``trajectory_id`` and ``agent``."""
        columns = batch.non_tensor_batch
        if "trajectory_id" not in columns:
            return cls(list(range(len(batch))), [MAIN] * len(batch))
        return cls(group_numbers(columns["trajectory_id"]).tolist(), columns["agent"].tolist())

    @cached_property
    def _count(self) -> int:
        return len(set(self.indices))

    def __len__(self) -> int:
        return self._count

    @property
    def are_split(self) -> bool:
        """Return whether some trajectory has several rows."""
        return len(self) < len(self.indices)

    @property
    def scored_rows(self) -> list[int]:
        """Return the row of each trajectory that is scored: the last of the agent ``main``, else the last of all."""
        rows: dict[int, int] = {}
        for row, (trajectory, agent) in enumerate(zip(self.indices, self.agents, strict=True)):
            if agent == MAIN or trajectory not in rows or self.agents[rows[trajectory]] != MAIN:
                rows[trajectory] = row
        return [rows[trajectory] for trajectory in range(len(rows))]

    @cached_property
    def agent_indices(self) -> list[int]:
        """Index of each row's pair of trajectory and agent, from 0 in order of appearance."""
        return group_numbers(list(zip(self.indices, self.agents, strict=True))).tolist()

    def members(self) -> list[list[int]]:
        """Return the rows of each trajectory."""
        members: list[list[int]] = [[] for _ in range(len(self))]
        for row, trajectory in enumerate(self.indices):
            members[trajectory].append(row)
        return members


def compared_groups(batch: DataProto) -> np.ndarray:
    """Return the group id of each row: ``uid``, and the agent's name for agents other than ``main``.

    So one agent's sequences are compared with those of the same agent.
    """
    uids, agents = batch.non_tensor_batch["uid"], Trajectories.from_batch(batch).agents
    named = [uid if agent == MAIN else f"{uid}/{agent}" for uid, agent in zip(uids.tolist(), agents, strict=True)]
    return np.fromiter(named, dtype=object, count=len(named))


def with_earlier_turns(batch: DataProto) -> DataProto:
    """Add ``earlier_turns`` where trajectories have several sequences: what the agent wrote in those before a row."""
    trajectories = Trajectories.from_batch(batch)
    if not trajectories.are_split:
        return batch
    earlier: dict[int, list[Tensor]] = {}
    column = np.empty(len(batch), dtype=object)
    for row, (unit, turns) in enumerate(zip(trajectories.agent_indices, policy_turns(batch), strict=True)):
        column[row] = earlier.get(unit, [])
        earlier[unit] = [*column[row], *turns]
    return batch | DataProto.from_dict(non_tensors={EARLIER_TURNS: column})


# ---- scores ------------------------------------------------------------------------------------


def once_per_agent(batch: DataProto, scores: Tensor) -> Tensor:
    """Keep a trajectory's score on the last sequence of each agent alone; (bsz, response_length).

    Scores of turns stay where they are: each stands on the one sequence that has the turn.

    Args:
        batch: the sequences.
        scores: (bsz, response_length) token scores, with the score of a trajectory on each of its sequences.
    """
    units = Trajectories.from_batch(batch).agent_indices
    last = {unit: row for row, unit in enumerate(units)}
    turn_scores = batch.non_tensor_batch.get("turn_scores", [None] * len(batch))
    by_turn = {unit for unit, scores_given in zip(units, turn_scores, strict=True) if scores_given is not None}
    keeps = torch.tensor([last[unit] == row or unit in by_turn for row, unit in enumerate(units)])
    return torch.where(keeps.unsqueeze(-1), scores, 0.0)


def trajectory_scores(batch: DataProto, scores: Tensor) -> Tensor:
    """Sum the token scores of each trajectory over the sequences of its scored agent; (trajectories,).

    The sums are made in float64, and returned in the dtype of the scores.

    Args:
        batch: the sequences.
        scores: as for :func:`once_per_agent`.
    """
    trajectories = Trajectories.from_batch(batch)
    if not trajectories.are_split:
        return scores.sum(-1, dtype=torch.float64).to(scores.dtype)
    units = torch.tensor(trajectories.agent_indices)
    row_scores = once_per_agent(batch, scores).sum(-1, dtype=torch.float64)
    sums = row_scores.new_zeros(int(units.max()) + 1).index_add(0, units, row_scores)
    return sums[units[trajectories.scored_rows]].to(scores.dtype)


# ---- advantages --------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinedSequences:
    """The sequences of each agent of each trajectory, one after the other as one row.

    An estimator that compares responses thus counts each trajectory once, and sees all of its tokens. Between two
    sequences there is one masked token, so that their turns stay apart.
    """

    columns: dict[str, Any]
    source: Tensor
    """(rows, width) which token of the batch stands here, counted over all its rows; -1 for none."""
    shape: torch.Size
    """(bsz, response_length) of the batch."""

    def apart(self, joined: Tensor) -> Tensor:
        """Put values of the joined rows, (rows, width), at their tokens in the batch; 0 elsewhere."""
        there = self.source >= 0
        out = joined.new_zeros(self.shape.numel())
        out[self.source[there]] = joined[there]
        return out.view(self.shape)


def joined_sequences(batch: DataProto, columns: Mapping[str, object]) -> JoinedSequences:
    """Join the sequences of each agent of each trajectory.

    Args:
        batch: with ``response_mask``, ``token_level_scores`` and ``token_level_rewards``.
        columns: of the batch. Those with a value for each response token are joined; of others, the last sequence's
            value is taken. The score of a trajectory is counted once.
    """
    mask = batch.batch["response_mask"]
    units = Trajectories.from_batch(batch).agent_indices
    length = mask.shape[1]
    # At least one token, so that no joined row is empty.
    ends = (mask.bool() * torch.arange(1, length + 1)).amax(-1).clamp(min=1).tolist()
    parts: list[list[Tensor]] = [[] for _ in range(max(units) + 1)]
    for row, (unit, end) in enumerate(zip(units, ends, strict=True)):
        if parts[unit]:
            parts[unit].append(torch.tensor([-1]))
        parts[unit].append(torch.arange(row * length, row * length + end))
    source = pad_sequence([torch.cat(part) for part in parts], batch_first=True, padding_value=-1)
    last = list({unit: row for row, unit in enumerate(units)}.values())
    scores = batch.batch["token_level_scores"]
    counted = once_per_agent(batch, scores)
    token_columns = {**columns, "token_level_scores": counted}
    token_columns["token_level_rewards"] = batch.batch["token_level_rewards"] - scores + counted
    return JoinedSequences(
        {name: _joined(column, source, last, mask.shape) for name, column in token_columns.items()}, source, mask.shape
    )


def _joined(column: Any, source: Tensor, last: list[int], shape: torch.Size) -> Any:
    if not isinstance(column, Tensor) or column.shape[:2] != shape:
        return column[last]
    values = column.flatten(0, 1)[source.clamp(min=0)]
    is_nothing = (source < 0).view(*source.shape, *[1] * (values.dim() - 2))
    return values.masked_fill(is_nothing, 0)


# ---- updates -----------------------------------------------------------------------------------


def mini_batch_sizes(batch: DataProto, count: int) -> list[int]:
    """Return the rows of each of ``count`` mini-batches of equally many trajectories, in their order.

    Raises:
        ValueError: the trajectories do not divide.
    """
    members = Trajectories.from_batch(batch).members()
    if len(members) % count:
        raise ValueError(f"{len(members)} trajectories do not divide into {count} equal mini-batches.")
    size = len(members) // count
    return [sum(map(len, members[start : start + size])) for start in range(0, len(members), size)]


def mini_batches(batch: DataProto, sizes: Sequence[int]) -> list[DataProto]:
    """Divide a batch into contiguous parts of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [batch.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def resampled(batch: DataProto, resample: Callable[[DataProto], DataProto]) -> DataProto:
    """Draw trajectories, each with all of its sequences; one that is drawn twice becomes two.

    Args:
        batch: with ``token_level_scores`` and ``response_mask``.
        resample: selects rows of a batch that has one row for each trajectory.
    """
    trajectories = Trajectories.from_batch(batch)
    scored = batch.select_idxs(trajectories.scored_rows)
    totals = trajectory_scores(batch, batch.batch["token_level_scores"]).tolist()
    columns = {
        "token_level_scores": on_last_token(scored.batch["response_mask"], totals),
        "trajectory": torch.arange(len(trajectories)),
    }
    draw_indices = resample(replace_columns(scored, DataProto.from_dict(tensors=columns))).batch["trajectory"].tolist()
    members = trajectories.members()
    rows_drawn = batch.select_idxs([row for trajectory in draw_indices for row in members[trajectory]])
    if "trajectory_id" not in batch.non_tensor_batch:
        return rows_drawn
    # The number of the draw keeps the copies of a trajectory apart.
    draws = [draw for draw, trajectory in enumerate(draw_indices) for _ in members[trajectory]]
    ids = [f"{name}#{draw}" for name, draw in zip(rows_drawn.non_tensor_batch["trajectory_id"], draws, strict=True)]
    return replace_columns(rows_drawn, DataProto.from_dict(non_tensors={"trajectory_id": np.array(ids, dtype=object)}))
