"""The texts of responses that reward functions read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl.protocol import DataProto, compute_response_mask
from verl.workers.policy_turns import policy_turns


@dataclass(frozen=True)
class ResponseTexts:
    """The texts of one response, without padding and special tokens."""

    solution_str: str
    """Text of the policy: its turns, joined by line breaks; or the answer that an agent program returned."""
    last_turn_str: str
    """The last turn of the policy; empty if it has none."""
    conversation_str: str
    """All that follows the prompt in the sequence that is scored: the policy's turns, and what tools, users and the
    chat template wrote between them."""


def response_texts(data: DataProto, tokenizer: object) -> list[ResponseTexts]:
    """Decode the responses of a batch.

    Text that a tool, a user or an environment wrote is not the policy's, so that it cannot score by making others say
    the answer. In a response of one turn the three texts are the same.

    Args:
        data: ``responses`` and ``attention_mask``; ``response_mask``, 1 on tokens of the policy, by default all of
            them; ``agent_answer``, if programs returned answers.
        tokenizer: the policy's.
    """
    turns = policy_turns(data)
    decoded = iter(_decoded(tokenizer, [turn for row_turns in turns for turn in row_turns]))
    turn_texts = [[next(decoded) for _ in row_turns] for row_turns in turns]
    present = compute_response_mask(data).bool().cpu()
    responses = data.batch["responses"].cpu()
    # Most responses are one turn, whose text is known.
    mixed = [
        row
        for row, row_turns in enumerate(turns)
        if len(row_turns) != 1 or len(row_turns[0]) != int(present[row].sum())
    ]
    full_texts = dict(zip(mixed, _decoded(tokenizer, [responses[row][present[row]] for row in mixed]), strict=True))
    answers = data.non_tensor_batch.get("agent_answer", [None] * len(data))
    return [
        ResponseTexts(
            "\n".join(texts) if answer is None else answer,
            texts[-1] if texts else "",
            full_texts[row] if row in full_texts else texts[0],
        )
        for row, (texts, answer) in enumerate(zip(turn_texts, answers, strict=True))
    ]


def _decoded(tokenizer: Any, rows: Sequence[Tensor]) -> list[str]:
    # Arrays, because Transformers looks at every single token of a list. It makes one text of no rows.
    return tokenizer.batch_decode([row.numpy() for row in rows], skip_special_tokens=True) if rows else []
