"""Experts that routers chose for the tokens of running requests, for engines inside the trainer's process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.workers.rollout.sampling import enlarged
from verl.workers.routers import unknown


class RoutingTable:
    """Experts of the prompt and of the response so far of each row; rows may be used again."""

    def __init__(self) -> None:
        self._prompts: dict[int, Tensor] = {}
        self._responses = torch.zeros(0, 0)
        self._shape: torch.Size | None = None

    def start(self, rows: Sequence[int], prompts: Sequence[Tensor]) -> None:
        """Begin rows with the choices of their prompts, (tokens, layers, experts per token) each."""
        self._prompts.update(zip(rows, prompts, strict=True))

    def add(self, rows: Tensor, step: Tensor | int, expert_ids: Tensor) -> None:
        """Store the choices of token ``step`` of each row, (rows, layers, experts per token)."""
        size = expert_ids[0].numel()
        if self._shape is None:
            self._shape, self._responses = expert_ids.shape[1:], expert_ids.new_zeros(0, 0)
        last = step if isinstance(step, int) else int(step.max())
        # The table has all numbers of a row side by side.
        self._responses = enlarged(self._responses, int(rows.max()) + 1, (last + 1) * size)
        first = torch.as_tensor(step, device=rows.device).expand(len(rows)) * size
        columns = first[:, None] + torch.arange(size, device=rows.device)
        self._responses[rows[:, None], columns] = expert_ids.flatten(1)

    def row_choices(self, row: int, start: int, end: int) -> Tensor:
        """Return the choices of a row's prompt and of its response tokens from ``start`` on; the last is unknown.

        Args:
            row: of the request.
            start: number of the response's tokens that are in the prompt.
            end: number of its tokens.
        """
        prompt, tokens = self._prompts[row], end - start
        response = torch.full_like(prompt[:1], unknown(prompt.dtype)).repeat(tokens, 1, 1)
        if tokens > 1:
            size = prompt[0].numel()
            drawn_routing = self._responses[row, start * size : (end - 1) * size]
            response[: tokens - 1] = drawn_routing.view(tokens - 1, *prompt.shape[1:])
        return torch.cat([prompt, response]).cpu()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget the prompts of rows."""
        for row in rows:
            self._prompts.pop(row, None)
