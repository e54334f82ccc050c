"""Prompts that several rows of a batch share: which rows these are, and what a pass that has each prompt once costs.

The responses to a prompt have the same tokens before them, and with causal attention nothing in a prompt depends on
what follows. So a pass may compute the prompt once and let all its responses attend to its keys and values. This is
the idea of Prefix Grouper (arXiv:2506.05433). Values and gradients are those of separate rows.

    rows        [p p p a a]  [p p p b]  [q q c]        12 tokens
    one pass    p p p | a a | b | q q c                 9 tokens; a and b attend to p p p and to themselves
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from verl.protocol import DataProto


def same_prompts(batch: DataProto) -> list[int]:
    """Return for each row the first row with the same prompt: tokens, padding and positions; itself without a prompt.

    The batch needs input_ids and attention_mask, (bsz, length), position_ids, (bsz, length) or (bsz, 4, length), and
    response_mask, (bsz, response_length).
    """
    columns = batch.batch
    width = columns["attention_mask"].shape[1] - columns["response_mask"].shape[1]
    mask = columns["attention_mask"][:, :width].long()  # (bsz, prompt_length)
    positions = columns["position_ids"][..., :width].flatten(1).long()
    repeated = mask if positions.shape[1] == width else mask.repeat(1, positions.shape[1] // width)
    seen = torch.cat([mask, columns["input_ids"][:, :width] * mask, positions * repeated], dim=1)
    first: dict[bytes, int] = {}
    has_prompt = mask.any(1).tolist()
    rows = enumerate(seen.cpu().numpy())
    return [first.setdefault(row.tobytes(), i) if has_prompt[i] else i for i, row in rows]


@dataclass(frozen=True)
class Siblings:
    """Rows of a batch by prompt, and their lengths in tokens."""

    groups: list[list[int]]
    """Rows with the same prompt, in the order of the first of each."""
    prompts: list[int]
    """Tokens of each row's prompt."""
    responses: list[int]
    """Tokens of each row's response."""

    @classmethod
    def from_batch(cls, batch: DataProto) -> Siblings:
        """Find the siblings among the rows of a batch, with the columns of :func:`same_prompts`."""
        mask = batch.batch["attention_mask"]
        width = mask.shape[1] - batch.batch["response_mask"].shape[1]
        groups: dict[int, list[int]] = {}
        for row, first in enumerate(same_prompts(batch)):
            groups.setdefault(first, []).append(row)
        return cls(list(groups.values()), mask[:, :width].sum(-1).tolist(), mask[:, width:].sum(-1).tolist())

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of siblings in one pass: their prompt once, and all responses."""
        return self.prompts[rows[0]] + sum(self.responses[row] for row in rows)

    def tokens_of_any(self, rows: Collection[int]) -> int:
        """Tokens of rows in one pass, siblings or not: each of their prompts once, and all responses."""
        prompts = {self._group_of[row]: self.prompts[row] for row in rows}
        return sum(prompts.values()) + sum(self.responses[row] for row in rows)

    @cached_property  # asked for every set of rows that is tried
    def _group_of(self) -> dict[int, int]:
        return {row: index for index, group in enumerate(self.groups) for row in group}

    def bundles(self, budget: int, count: int = 1) -> list[list[int]]:
        """Cut the groups into siblings that fit a pass of ``budget`` tokens, and into ``count`` or more if possible.

        A row over the budget is a bundle of its own.
        """
        bundles: list[list[int]] = []
        for group in self.groups:
            bundles.append([])
            for row in group:
                if bundles[-1] and self.tokens([*bundles[-1], row]) > budget:
                    bundles.append([])
                bundles[-1].append(row)
        while len(bundles) < min(count, len(self.prompts)):
            longest = max((n for n, rows in enumerate(bundles) if len(rows) > 1), key=lambda n: self.tokens(bundles[n]))
            half = len(bundles[longest]) // 2
            bundles[longest : longest + 1] = [bundles[longest][:half], bundles[longest][half:]]
        return bundles

    def repeated(self) -> list[int]:
        """Lengths of the prompts that a single pass over all rows leaves out."""
        return [self.prompts[row] for group in self.groups for row in group[1:]]
