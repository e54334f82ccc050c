"""Continuous batching: rows enter as there is room, a pass of the model draws a token for each, who ends leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from verl.workers.rollout.base import RolloutRequest
from verl.workers.rollout.native.memory import KeyValueMemory
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.sampling import TokenSampler
from verl.workers.rollout.stopping import StopRules

_REFILL_AT = 0.125
"""New rows wait until so large a share of the places is free: one prompt costs a pass, and so do several."""


@dataclass(frozen=True)
class Group:
    """Requests with one prompt, which is computed once."""

    prompt_ids: list[int]
    rows: list[int]
    """Places in the list of requests."""


def groups_of(requests: Sequence[RolloutRequest], room: int) -> list[Group]:
    """Requests by prompt, in the order in which prompts come; at most ``room`` in a group."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        by_prompt.setdefault(tuple(request.prompt_ids), []).append(row)
    return [
        Group(list(prompt), rows[start : start + room])
        for prompt, rows in by_prompt.items()
        for start in range(0, len(rows), room)
    ]


class Generation:
    """One ``generate``: the responses to a list of requests.

    Args:
        requests: what to draw.
        model: with its weights.
        memory: empty, with room for the longest of them.
        sampler: of the requests.
        stop: of the requests.
        prefill_tokens: most prompt tokens in one pass (but at least one prompt).

    Attributes:
        tokens: (requests, longest) drawn so far, unset beyond.
        log_probs: of each.
        drawn: (requests,) how many.
    """

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        model: NativeModel,
        memory: KeyValueMemory,
        sampler: TokenSampler,
        stop: StopRules,
        prefill_tokens: int,
    ) -> None:
        self._model, self._memory, self._sampler, self._stop = model, memory, sampler, stop
        self._prefill_tokens = prefill_tokens
        self._waiting = deque(groups_of(requests, memory.room))
        longest = max(request.sampling.max_tokens for request in requests)
        self.tokens = torch.zeros(len(requests), longest, dtype=torch.long, device=model.device)
        self.log_probs = torch.zeros(len(requests), longest, dtype=torch.float32, device=model.device)
        self.drawn = torch.zeros(len(requests), dtype=torch.long, device=model.device)

    def run(self, aborted: Event) -> None:
        """Draw until every row has ended, or until ``aborted``."""
        rows, logits = self.drawn[:0], None  # the running rows, and what each goes on from
        while not aborted.is_set():
            for new_rows, new_logits in self._admit(aborted):
                rows = torch.cat([rows, new_rows])
                logits = new_logits if logits is None else torch.cat([logits, new_logits])
            if logits is None:
                return
            rows, newest = self._draw(logits, rows)
            logits = self._model.decode(self._memory, newest) if len(rows) else None

    def _admit(self, aborted: Event) -> list[tuple[Tensor, Tensor]]:
        """Rows for which there is room, and the logits of their first tokens; one pair for each pass."""
        memory = self._memory
        free = memory.room - memory.rows
        if not self._waiting or (memory.rows and free < max(_REFILL_AT * memory.room, len(self._waiting[0].rows))):
            return []
        passes = []
        while not aborted.is_set() and (chosen := self._next_pass(memory.room - memory.rows)):
            counts = [len(group.rows) for group in chosen]
            memory.admit([len(group.prompt_ids) for group in chosen], counts)
            logits = self._model.prefill(memory, [group.prompt_ids for group in chosen])
            rows = torch.tensor([row for group in chosen for row in group.rows], device=logits.device)
            passes.append((rows, logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)))
        return passes

    def _next_pass(self, free: int) -> list[Group]:
        """The next prompts that fit into one pass, and their rows into the free places."""
        chosen: list[Group] = []
        budget = self._prefill_tokens
        while self._waiting and (group := self._waiting[0]) and len(group.rows) <= free:
            if chosen and len(group.prompt_ids) > budget:
                break
            chosen.append(self._waiting.popleft())
            free -= len(group.rows)
            budget -= len(group.prompt_ids)
        return chosen

    def _draw(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for each row; the rows that go on, and their newest tokens."""
        step = self.drawn[rows]
        newest, log_probs = self._sampler(logits, rows, step)
        self.tokens[rows, step], self.log_probs[rows, step] = newest, log_probs
        self.drawn[rows] = step + 1
        places = self._stop.going_on(self.tokens, rows, step)
        if len(places) < len(rows):
            places = self._memory.keep(places)
            rows, newest = rows[places], newest[places]
        return rows, newest
