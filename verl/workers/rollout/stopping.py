"""When a response ends, for a batch of rows that may each have other rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.workers.rollout.base import FinishReason, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_TOKEN = -1
_CONTEXT_TOKENS = 8
"""Tokens decoded before the first that can belong to a stop text: some tokenizers drop a text's leading space."""


class StopRules:
    """Watches the tokens of a batch, and remembers where and why each row ended.

    Args:
        params: of each row.
        eos_token_ids: end tokens of the model.
        tokenizer: decodes, for stop texts.
        device: of the tokens.
    """

    def __init__(
        self,
        params: list[SamplingParams],
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> None:
        ends = [{*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)} for p in params]
        widest = max(map(len, ends))
        table = [[*sorted(row), *[_NO_TOKEN] * (widest - len(row))] for row in ends]
        self._ends = torch.tensor(table, dtype=torch.long, device=device)  # (bsz, widest)
        self._limits = torch.tensor([p.max_tokens for p in params], device=device)
        self._lengths = torch.zeros_like(self._limits)  # 0: goes on
        self._stopped = torch.zeros_like(self._limits, dtype=torch.bool)
        self._texts = [p.stop for p in params]
        self._has_texts = any(self._texts)
        self._tokenizer = tokenizer

    def going_on(self, tokens: Tensor, rows: Tensor, step: int | Tensor) -> Tensor:
        """Look at the newest token of the given rows.

        Args:
            tokens: (bsz, max_tokens) drawn so far; filled up to and with column ``step``.
            rows: (n,) rows that are still in the batch.
            step: position of the newest token; (n,) if rows differ.

        Returns:
            the places in ``rows`` whose row has not ended, increasing.
        """
        was_going = self._lengths[rows] == 0
        stops = (tokens[rows, step][:, None] == self._ends[rows]).any(-1)
        if self._has_texts:
            stops |= self._completes_text(tokens, rows, was_going, step)
        ends_now = was_going & (stops | (self._limits[rows] <= step + 1))
        self._lengths[rows] += ends_now * (step + 1)
        self._stopped[rows] |= ends_now & stops
        return (was_going & ~ends_now).nonzero().squeeze(-1)

    def _completes_text(self, tokens: Tensor, rows: Tensor, was_going: Tensor, step: int | Tensor) -> Tensor:
        found = torch.zeros_like(was_going)
        ends = (torch.zeros_like(rows) + step + 1).tolist()
        for place, (row, going, end) in enumerate(zip(rows.tolist(), was_going.tolist(), ends, strict=True)):
            if going and self._texts[row]:
                texts = self._texts[row]
                tail = tokens[row, max(0, end - _reach(texts)) : end].tolist()
                found[place] = completes_stop_text(tail, texts, self._tokenizer)
        return found

    def results(self, drawn: int | Tensor = 0) -> tuple[list[int], list[FinishReason]]:
        """Length and finish reason of every row; one that has not ended is given up with its ``drawn`` tokens."""
        lengths = torch.where(self._lengths == 0, drawn, self._lengths)
        reasons: list[FinishReason] = [
            "abort" if length == 0 else "stop" if stopped else "length"
            for length, stopped in zip(self._lengths.tolist(), self._stopped.tolist(), strict=True)
        ]
        return lengths.tolist(), reasons


def completes_stop_text(tokens: list[int], texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last of ``tokens`` completes one of ``texts``, given that none before did."""
    tail = tokenizer.decode(tokens[-_reach(texts) :])
    return any(text in tail for text in texts)


def _reach(texts: tuple[str, ...]) -> int:
    # A token is at least one byte of text, so a stop text of b bytes lies within the last b tokens.
    return max(len(text.encode()) for text in texts) + _CONTEXT_TOKENS
