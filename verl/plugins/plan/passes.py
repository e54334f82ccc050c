"""Tokens of a pass: all that a plan knows of which rows come together, and which of them share a prompt.

With ``actor.use_prefix_grouper`` a pass computes a prompt once for all its responses. Rows come sorted by prompt, and a
pass of m rows begins at a multiple of m, so that it may begin and end inside of groups of n:

    n = 4, m = 6      a a a a b b | b b c c c c      2 prompts in each pass: 4 of 12 rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PassTokens:
    """Tokens of one pass."""

    computed: float
    """Tokens that go through the model: a shared prompt once."""
    responses: float
    """Tokens whose log-probs are computed."""
    keys: float
    """Tokens whose keys and values attention reads: each response has a copy of its prompt's."""


@dataclass(frozen=True)
class Rows:
    """Rows of a prompt and a response each, all of the same lengths in tokens.

    Attributes:
        group: rows that share a prompt; 1 where every row is computed with its own.
    """

    prompt: int
    response: int
    group: int = 1

    def prompts_per_row(self, rows: int) -> float:
        """Prompts that passes of so many rows compute for each row, on average."""
        return (rows + self.group - math.gcd(rows, self.group)) / self.group / rows

    def prompts_per_row_within(self, tokens: int) -> float:
        """Prompts that passes of at most so many tokens compute for each row; groups that do not fit are cut."""
        return math.ceil(self.group / self._fitting(tokens)) / self.group

    def for_rows(self, rows: int) -> PassTokens:
        """Tokens of the largest pass of so many rows."""
        prompts = (self.group - math.gcd(rows, self.group) + rows - 1) // self.group + 1
        computed = prompts * self.prompt + rows * self.response
        return PassTokens(computed, rows * self.response, rows * (self.prompt + self.response))

    def within(self, tokens: int) -> PassTokens:
        """Tokens of a pass that a budget of so many tokens fills."""
        rows = self._fitting(tokens)
        computed = self.prompt + rows * self.response
        full = tokens / computed
        return PassTokens(tokens, full * rows * self.response, full * rows * (self.prompt + self.response))

    def _fitting(self, tokens: int) -> int:
        """Rows of a group that fit so many tokens together; at least 1."""
        return min(self.group, max(1, (tokens - self.prompt) // max(1, self.response)))
