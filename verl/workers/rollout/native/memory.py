"""Keys and values of the rows that run, and the attention that reads them.

All memory is allocated once, for so many rows at once. A prompt is computed once, whatever the number of its
responses; then every row goes on by one token at a time.

SharedPromptMemory   fp32 on a CPU, with our compiled kernel: a prompt's keys and values serve all its rows
CopiedPromptMemory   PyTorch's operations, any device and format: each row starts with a copy of its prompt's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from verl.utils.allocator import LentPages
from verl.utils.cpu_kernels import CPUKernels, RowsOfMemory


@dataclass(frozen=True)
class Shape:
    """What the size of keys and values follows from."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    pages: LentPages | None = None
    """Where the memory comes from, on a CPU."""

    def allocate(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values, (layers, rows, kv_heads, tokens, head_dim) each.

        Finite numbers, because what is masked out is multiplied by 0; on a CPU they cost nothing until they are
        written.
        """
        size = self.layers, rows, self.kv_heads, tokens, self.head_dim
        if self.pages is not None:
            return self.pages.take(size, self.dtype), self.pages.take(size, self.dtype)
        keys, values = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, values

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends."""

    scale: float
    window: int | None = None
    """Tokens that a token sees, itself included; None is all."""
    softcap: float | None = None
    """c in scores → c · tanh(scores / c)."""


class KeyValueMemory(ABC):
    """Keys and values of the running rows, which are numbered from 0.

    Args:
        shape: of the model.
        room: most rows at once.
        prompt_room: longest prompt.
        own_room: most tokens of a response that are read again: all but its last.
    """

    def __init__(self, shape: Shape, room: int, prompt_room: int, own_room: int) -> None:
        self.shape, self.room, self.prompt_room, self.own_room = shape, room, prompt_room, own_room
        none = torch.zeros(0, dtype=torch.long, device=shape.device)
        self.prompt_lengths = none
        """(rows,)"""
        self.lengths = none
        """(rows,) tokens of the response that are in memory."""

    @property
    def rows(self) -> int:
        """Rows that run."""
        return len(self.lengths)

    @property
    def positions(self) -> Tensor:
        """(rows,) position of each row's next token."""
        return self.prompt_lengths + self.lengths

    def admit(self, prompt_lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Let rows in, after those that run: of prompt i so many as ``counts[i]``; :meth:`store` follows for each."""
        lengths = torch.tensor(prompt_lengths).repeat_interleave(torch.tensor(counts)).to(self.shape.device)
        self.prompt_lengths = torch.cat([self.prompt_lengths, lengths])
        self.lengths = torch.cat([self.lengths, torch.zeros_like(lengths)])

    def advance(self) -> None:
        """Every row has one more token in memory."""
        self.lengths = self.lengths + 1

    def keep(self, places: Tensor) -> Tensor:
        """Let all rows go but these.

        Args:
            places: (n,) increasing.

        Returns:
            (n,) where each of the rows that run now was before: ``places`` in some order.
        """
        self.prompt_lengths, self.lengths = self.prompt_lengths[places], self.lengths[places]
        return places

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of keys and values."""

    @abstractmethod
    def store(self, layer: int, prompts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keep keys and values of the prompts that were let in last, (kv_heads, tokens, head_dim) each."""

    @abstractmethod
    def decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Keep the key and value of each row's next token, and attend to all that the row has.

        Args:
            layer: number of the layer.
            query: (rows, heads, head_dim).
            key: (rows, kv_heads, head_dim).
            value: as ``key``.
            rule: of the layer.

        Returns:
            (rows, heads, head_dim)
        """


class SharedPromptMemory(KeyValueMemory):
    """For :meth:`CPUKernels.decode_attention`; rows never move, and a prompt leaves with its last row."""

    def __init__(self, kernels: CPUKernels, shape: Shape, room: int, prompt_room: int, own_room: int) -> None:
        super().__init__(shape, room, prompt_room, own_room)
        self._kernels = kernels
        self.shared = shape.allocate(room, prompt_room)
        """Keys and values of prompts, (layers, prompts, kv_heads, room, head_dim) each."""
        self.own = shape.allocate(room, max(1, own_room))
        """Of responses."""
        self._shared_of, self._own_of = (list(zip(*memory, strict=True)) for memory in (self.shared, self.own))
        self._slots, self._prompts = self.lengths, self.lengths
        self._newest: list[int] = []

    @property
    def nbytes(self) -> int:
        """Reserved; the operating system gives pages as they are written."""
        return sum(part.nbytes for part in (*self.shared, *self.own))

    def admit(self, prompt_lengths: Sequence[int], counts: Sequence[int]) -> None:
        """See :meth:`KeyValueMemory.admit`."""
        super().admit(prompt_lengths, counts)
        free = _missing(self._slots, self.room)
        self._slots = torch.cat([self._slots, torch.tensor(free[: sum(counts)])])
        self._newest = _missing(self._prompts, self.room)[: len(counts)]
        prompts = torch.tensor(self._newest).repeat_interleave(torch.tensor(counts))
        self._prompts = torch.cat([self._prompts, prompts])

    def keep(self, places: Tensor) -> Tensor:
        """See :meth:`KeyValueMemory.keep`."""
        self._slots, self._prompts = self._slots[places], self._prompts[places]
        return super().keep(places)

    def store(self, layer: int, prompts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See :meth:`KeyValueMemory.store`."""
        for slot, states in zip(self._newest, prompts, strict=True):
            for memory, state in zip(self.shared, states, strict=True):
                memory[layer, slot, :, : state.shape[1]] = state

    @property
    def places(self) -> RowsOfMemory:
        """Where the rows find their keys and values."""
        return RowsOfMemory(self._slots, self.lengths, self._prompts, self.prompt_lengths)

    def decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See :meth:`KeyValueMemory.decode`."""
        return self._kernels.decode_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self._own_of[layer],
            self._shared_of[layer],
            self.places,
            rule.scale,
            rule.window,
        )


class CopiedPromptMemory(KeyValueMemory):
    """Row i lives in slot i, so that attention reads views; when rows leave, the last ones move into the gaps."""

    def __init__(self, shape: Shape, room: int, prompt_room: int, own_room: int) -> None:
        super().__init__(shape, room, prompt_room, own_room)
        self._memory = shape.allocate(room, prompt_room + own_room)
        self._newest: list[slice] = []
        self._filled = 0

    @property
    def nbytes(self) -> int:
        """Allocated."""
        return sum(part.nbytes for part in self._memory)

    def admit(self, prompt_lengths: Sequence[int], counts: Sequence[int]) -> None:
        """See :meth:`KeyValueMemory.admit`."""
        start = self.rows
        super().admit(prompt_lengths, counts)
        self._newest = []
        for count in counts:
            self._newest.append(slice(start, start + count))
            start += count
        self._filled = int(self.positions.max())

    def advance(self) -> None:
        """See :meth:`KeyValueMemory.advance`."""
        super().advance()
        self._filled += 1

    def keep(self, places: Tensor) -> Tensor:
        """See :meth:`KeyValueMemory.keep`."""
        count = len(places)
        stay, move = places[places < count], places[places >= count]
        gaps = torch.ones(count, dtype=torch.bool, device=places.device)
        gaps[stay] = False
        order = torch.arange(count, device=places.device)
        order[gaps] = move
        for memory in self._memory:
            memory[:, gaps.nonzero().flatten()] = memory[:, move]
        super().keep(order)
        self._filled = int(self.positions.max()) if count else 0
        return order

    def store(self, layer: int, prompts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See :meth:`KeyValueMemory.store`."""
        for rows, states in zip(self._newest, prompts, strict=True):
            for memory, state in zip(self._memory, states, strict=True):
                memory[layer, rows, :, : state.shape[1]] = state

    def decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See :meth:`KeyValueMemory.decode`."""
        count, heads, head_dim = query.shape
        rows, places = torch.arange(count, device=query.device), self.positions
        keys, values = (memory[layer, :count] for memory in self._memory)
        keys[rows, :, places], values[rows, :, places] = key, value
        seen = torch.arange(self._filled + 1, device=query.device)
        visible = seen <= places[:, None]
        if rule.window is not None:
            visible &= seen > places[:, None] - rule.window
        # The query heads of one key/value head are its queries: nothing is repeated.
        grouped = query.reshape(count, self.shape.kv_heads, -1, head_dim)
        keys, values = keys[:, :, : self._filled + 1], values[:, :, : self._filled + 1]
        mask = visible[:, None, None]  # (rows, 1, 1, tokens)
        if rule.softcap is None:
            mask = mask.expand(-1, -1, grouped.shape[2], -1)
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=rule.scale)
        else:
            scores = rule.softcap * torch.tanh(grouped @ keys.transpose(2, 3) * (rule.scale / rule.softcap))
            out = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(values.dtype) @ values
        return out.reshape(count, heads, head_dim)


def _missing(taken: Tensor, room: int) -> list[int]:
    """The numbers below ``room`` that are not taken."""
    return sorted(set(range(room)) - set(taken.tolist()))
