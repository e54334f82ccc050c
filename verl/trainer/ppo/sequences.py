"""Rows of a batch that are the training sequences of one trajectory.

An agent loop may return several sequences for a response: after its context was rewritten, of forks, of sub-agents.
Each is a row, with ``trajectory_id`` and ``agent``; rows of one trajectory are adjacent, in the order of its sequences.
In a batch without ``trajectory_id`` every row is a trajectory.
"""

from __future__ import annotations

from verl.agents.manager import trajectory_id
from verl.protocol import DataProto


def with_prompts(prompts: DataProto, responses: DataProto) -> DataProto:
    """Join responses with the columns of their prompts, those of a trajectory of several sequences repeated.

    Args:
        prompts: a row for each response that was asked for, with ``uid`` and ``sample_index``.
        responses: a row for each sequence, in the order of the prompts.
    """
    ids = responses.non_tensor_batch.get("trajectory_id")
    if ids is None:
        return prompts | responses
    columns = prompts.non_tensor_batch
    names = map(trajectory_id, columns["uid"], columns["sample_index"])
    row_of = {name: row for row, name in enumerate(names)}
    return prompts.select_idxs([row_of[name] for name in ids]) | responses
