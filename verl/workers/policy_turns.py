"""The tokens of a response that the policy wrote, without those of tools, users, environments and the template."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.protocol import DataProto, compute_response_mask, with_response_mask

EARLIER_TURNS = "earlier_turns"
"""Column with the turns of a trajectory that stand in earlier sequences of it."""


def own_tokens(batch: DataProto) -> Tensor:
    """Return the mask of tokens that the policy wrote, (bsz, response_length) bool; all without ``response_mask``."""
    return compute_response_mask(batch).bool() & with_response_mask(batch).batch["response_mask"].bool()


def policy_turns(batch: DataProto) -> list[list[Tensor]]:
    """Return the token ids of the policy's turns in each row: those of ``earlier_turns``, then the response's.

    A turn is a run of tokens that the policy wrote.
    """
    is_own = own_tokens(batch)
    earlier = batch.non_tensor_batch.get(EARLIER_TURNS, [()] * len(batch))
    turns: list[list[Tensor]] = [list(row_turns) for row_turns in earlier]
    responses = batch.batch["responses"].cpu()
    edges = torch.nn.functional.pad(is_own.to(torch.int8), (1, 1)).diff(dim=-1)  # 1 where a turn begins, -1 behind it
    starts, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    for (row, start), (_, end) in zip(starts, ends, strict=True):
        turns[row].append(responses[row, start:end])
    return turns
