"""Key/value memory of running rows, and attention of new tokens over it.

Memory for a fixed number of rows is allocated at once. A prompt is computed once for all its responses, which then grow
by one token per pass.

SharedPromptMemory   fp32 on a CPU with the compiled kernel: all responses read one copy of their prompt
CopiedPromptMemory   any device and format with PyTorch's operations: each row has its own copy of the prompt
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from verl.backends.cpu.allocator import ReclaimableBuffers
from verl.backends.cpu.kernels import CPUKernels, RowsOfMemory
from verl.backends.cuda.decode_attention import can_decode, decode_attention
from verl.workers.packed_attention import AttentionRule


@dataclass(frozen=True)
class CacheShape:
    """Dimensions, format and place of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    buffers: ReclaimableBuffers | None = None
    """Source of memory on a CPU; None allocates tensors."""

    def allocate(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values, (layers, rows, kv_heads, tokens, head_dim) each, with finite content."""
        # Finite, because masked values are multiplied by 0. Buffers take no memory until they are written.
        size = self.layers, rows, self.kv_heads, tokens, self.head_dim
        if self.buffers is not None:
            return self.buffers.take(size, self.dtype), self.buffers.take(size, self.dtype)
        keys, values = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, values

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class NewPrompt:
    """A prompt that was just admitted."""

    views: tuple[Tensor, Tensor]
    """Views of the prompt's part of the keys and of the values, (layers, copies, kv_heads, room, head_dim) each."""
    cached: int
    """Number of first tokens whose keys and values are there already."""
    length: int
    """Number of all tokens of the prompt."""


class KeyValueMemory(ABC):
    """Keys and values of the running rows, which are numbered from 0.

    Args:
        room: largest number of rows at once.
        prompt_room: length of the longest prompt, in tokens.
        response_room: largest number of response tokens to store: all but the last, which is never attended to.
        text_room: largest number of tokens of a prompt and its response to store; None is the sum of both.
    """

    def __init__(
        self, shape: CacheShape, room: int, prompt_room: int, response_room: int, text_room: int | None = None
    ) -> None:
        self.shape, self.room, self.prompt_room, self.response_room = shape, room, prompt_room, response_room
        self.text_room = prompt_room + response_room if text_room is None else text_room
        none = torch.zeros(0, dtype=torch.long, device=shape.device)
        self.prompt_lengths = none
        """(rows,) length of each row's prompt."""
        self.lengths = none
        """(rows,) number of response tokens in memory."""
        self.offsets = none
        """(rows,) what M-RoPE positions of responses are beyond the number of tokens before; 0 without images."""
        self._newest: list[NewPrompt] = []

    @property
    def rows(self) -> int:
        """Number of running rows."""
        return len(self.lengths)

    @property
    def positions(self) -> Tensor:
        """(rows,) number of tokens before each row's next token."""
        return self.prompt_lengths + self.lengths

    @property
    def tokens(self) -> int:
        """Number of tokens of the running rows whose keys and values are stored."""
        return int(self.positions.sum())

    def admit(
        self,
        prompt_lengths: Sequence[int],
        counts: Sequence[int],
        cached_states: Sequence[Tensor | None] | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """Append ``counts[i]`` rows for each prompt i; then call :meth:`store` for each layer.

        Args:
            prompt_lengths: number of tokens of each prompt.
            counts: number of rows of each prompt.
            cached_states: for each prompt the states (see :meth:`prompt_states`) of its first tokens, fewer than
                the prompt has; None where there are none.
            offsets: of each prompt, see the attribute; None: all 0.
        """
        places = self._allocate_places(counts)
        lengths, new_offsets = (
            torch.tensor(values).repeat_interleave(torch.tensor(counts)).to(self.shape.device)
            for values in (prompt_lengths, offsets or [0] * len(counts))
        )
        self.prompt_lengths = torch.cat([self.prompt_lengths, lengths])
        self.lengths = torch.cat([self.lengths, torch.zeros_like(lengths)])
        self.offsets = torch.cat([self.offsets, new_offsets])
        self._newest = []
        for views, length, states in zip(places, prompt_lengths, cached_states or [None] * len(counts), strict=True):
            cached_length = 0 if states is None else states.shape[3]
            self._newest.append(NewPrompt(views, cached_length, length))
            if states is not None:
                for memory, part in zip(views, states, strict=True):
                    memory[..., :cached_length, :] = part[:, None]

    @abstractmethod
    def _allocate_places(self, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Choose places for new prompts and their rows, before these are counted.

        Returns:
            where each prompt's keys and values go: views, (layers, copies, kv_heads, prompt_room or more, head_dim).
        """

    def advance(self) -> None:
        """Count the token that :meth:`decode` has stored for each row."""
        self.lengths = self.lengths + 1

    def keep(self, places: Tensor) -> Tensor:
        """Remove all rows but those in ``places``.

        Args:
            places: (n,) increasing row numbers.

        Returns:
            (n,) former number of each remaining row, in their new order: a permutation of ``places``.
        """
        self.prompt_lengths, self.lengths = self.prompt_lengths[places], self.lengths[places]
        self.offsets = self.offsets[places]
        return places

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys and values, allocated or reserved."""

    def store(self, layer: int, prompts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store keys and values, (kv_heads, tokens, head_dim) each, of the prompts of the last :meth:`admit`.

        They are of the tokens after the known ones.
        """
        for new, states in zip(self._newest, prompts, strict=True):
            for memory, state in zip(new.views, states, strict=True):
                memory[layer, :, :, new.cached : new.length] = state

    def prompts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens of the prompts of the last :meth:`admit`, packed.

        (1, kv_heads, tokens, head_dim) each.
        """
        keys, values = (
            torch.cat([new.views[part][layer, :1, :, : new.length] for new in self._newest], dim=2) for part in range(2)
        )
        return keys, values

    def prompt_states(self, prompt_index: int, start: int, end: int) -> Tensor:
        """Return a copy of the states of tokens ``start`` to ``end`` of a prompt of the last :meth:`admit`.

        States are keys, then values: (2, layers, kv_heads, tokens, head_dim).
        """
        return torch.stack([memory[:, 0, :, start:end] for memory in self._newest[prompt_index].views])

    @abstractmethod
    def row_states(self, row: int, start: int, end: int) -> Tensor:
        """Return a copy of the states of tokens ``start`` to ``end`` of a row's prompt and response so far."""

    @property
    @abstractmethod
    def places(self) -> object:
        """Position of each row's next token and the tokens it attends to: the last argument of :meth:`decode`."""

    @abstractmethod
    def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, places: object
    ) -> Tensor:
        """Store key and value of each row's next token, then attend to all of the row's tokens.

        ``query`` and the result are (rows, heads, head_dim); ``key`` and ``value`` are (rows, kv_heads, head_dim);
        ``places`` are those of the pass.
        """


class SharedPromptMemory(KeyValueMemory):
    """Memory for :meth:`CPUKernels.decode_attention`: rows are never moved, and prompts end with their last row."""

    def __init__(
        self,
        kernels: CPUKernels,
        shape: CacheShape,
        room: int,
        prompt_room: int,
        response_room: int,
        text_room: int | None = None,
    ) -> None:
        super().__init__(shape, room, prompt_room, response_room, text_room)
        self._kernels = kernels
        self.shared = shape.allocate(room, prompt_room)
        """Keys and values of prompts, (layers, prompts, kv_heads, room, head_dim) each."""
        self.responses = shape.allocate(room, max(1, response_room))
        """Keys and values of responses, (layers, slots, kv_heads, room, head_dim) each."""
        self._shared_of, self._responses_of = (
            list(zip(*memory, strict=True)) for memory in (self.shared, self.responses)
        )
        self._slots, self._prompts = self.lengths, self.lengths

    @property
    def tokens(self) -> int:
        """See :meth:`KeyValueMemory.tokens`. A prompt counts once for all its rows."""
        prompts = dict(zip(self._prompts.tolist(), self.prompt_lengths.tolist(), strict=True))
        return sum(prompts.values()) + int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        """Bytes reserved; the operating system provides pages when they are first written."""
        return sum(part.nbytes for part in (*self.shared, *self.responses))

    def _allocate_places(self, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        free = _missing(self._slots, self.room)
        self._slots = torch.cat([self._slots, torch.tensor(free[: sum(counts)])])
        newest = _missing(self._prompts, self.room)[: len(counts)]
        prompts = torch.tensor(newest).repeat_interleave(torch.tensor(counts))
        self._prompts = torch.cat([self._prompts, prompts])
        keys, values = self.shared
        return [(keys[:, slot : slot + 1], values[:, slot : slot + 1]) for slot in newest]

    def keep(self, places: Tensor) -> Tensor:
        """See :meth:`KeyValueMemory.keep`."""
        self._slots, self._prompts = self._slots[places], self._prompts[places]
        return super().keep(places)

    def row_states(self, row: int, start: int, end: int) -> Tensor:
        """See :meth:`KeyValueMemory.row_states`."""
        slot, prompt, length = int(self._slots[row]), int(self._prompts[row]), int(self.prompt_lengths[row])
        shared = torch.stack([memory[:, prompt, :, start : min(end, length)] for memory in self.shared])
        response = torch.stack(
            [memory[:, slot, :, max(start - length, 0) : max(end - length, 0)] for memory in self.responses]
        )
        return torch.cat([shared, response], dim=3)

    @property
    def places(self) -> RowsOfMemory:
        """Places of the rows in ``responses`` and ``shared``; see :meth:`KeyValueMemory.places`."""
        return RowsOfMemory(self._slots, self.lengths, self._prompts, self.prompt_lengths)

    def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, places: RowsOfMemory
    ) -> Tensor:
        """See :meth:`KeyValueMemory.decode`."""
        return self._kernels.decode_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self._responses_of[layer],
            self._shared_of[layer],
            places,
            rule.scale,
            rule.window,
        )


class TokenPlaces:
    """Places of new tokens in a :class:`CopiedPromptMemory`, and their masks, which all layers share.

    Args:
        positions: (rows,) number of tokens before each.
        bound: number of tokens, from the first on, that attention reads.
    """

    def __init__(self, positions: Tensor, bound: int) -> None:
        self.positions, self.bound = positions, bound
        self.rows = torch.arange(len(positions), device=positions.device)
        self._visible: dict[int | None, Tensor] = {}

    def visible(self, window: int | None) -> Tensor:
        """Return which tokens each row attends to in layers with this window: (rows, 1, 1, bound) bool."""
        if window not in self._visible:
            tokens = torch.arange(self.bound, device=self.positions.device)
            visible = tokens <= self.positions[:, None]
            if window is not None:
                visible &= tokens > self.positions[:, None] - window
            self._visible[window] = visible[:, None, None]
        return self._visible[window]


class CopiedPromptMemory(KeyValueMemory):
    """Memory with row i in slot i, so that attention reads views; the last rows move into gaps of removed ones."""

    def __init__(
        self, shape: CacheShape, room: int, prompt_room: int, response_room: int, text_room: int | None = None
    ) -> None:
        super().__init__(shape, room, prompt_room, response_room, text_room)
        self._memory = shape.allocate(room, self.text_room)
        self._filled = 0
        self.reads_each_row = can_decode(shape.device, shape.head_dim)
        """True if :meth:`decode` reads each row up to its own length, so that no bound on all of them matters."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in self._memory)

    def admit(
        self,
        prompt_lengths: Sequence[int],
        counts: Sequence[int],
        cached_states: Sequence[Tensor | None] | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """See :meth:`KeyValueMemory.admit`."""
        super().admit(prompt_lengths, counts, cached_states, offsets)
        self._filled = max(self._filled, *prompt_lengths)

    def _allocate_places(self, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        keys, values = self._memory
        ends = list(accumulate(counts, initial=self.rows))
        return [(keys[:, start:end], values[:, start:end]) for start, end in pairwise(ends)]

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

    def row_states(self, row: int, start: int, end: int) -> Tensor:
        """See :meth:`KeyValueMemory.row_states`."""
        return torch.stack([memory[:, row, :, start:end] for memory in self._memory])

    @property
    def bound(self) -> int:
        """Number of tokens, from the first on, among which are all that the next pass attends to."""
        return self._filled + 1

    @property
    def places(self) -> TokenPlaces:
        """See :meth:`KeyValueMemory.places`."""
        return TokenPlaces(self.positions, self.bound)

    def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, places: TokenPlaces
    ) -> Tensor:
        """See :meth:`KeyValueMemory.decode`."""
        count, heads, head_dim = query.shape
        keys, values = (memory[layer, :count] for memory in self._memory)
        if self.reads_each_row:
            settings = rule.scale, rule.window, rule.softcap
            return decode_attention(query, key, value, keys, values, places.positions, *settings)
        keys[places.rows, :, places.positions], values[places.rows, :, places.positions] = key, value
        mask = places.visible(rule.window)  # (rows, 1, 1, tokens)
        # Query heads of one key/value head are treated as several queries, so keys and values need not be repeated.
        grouped = query.reshape(count, self.shape.kv_heads, -1, head_dim)
        keys, values = keys[:, :, : places.bound], values[:, :, : places.bound]
        if rule.softcap is None:
            mask = mask.expand(-1, -1, grouped.shape[2], -1)
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=rule.scale)
        else:
            scores = rule.softcap * torch.tanh(grouped @ keys.transpose(2, 3) * (rule.scale / rule.softcap))
            out = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(values.dtype) @ values
        return out.reshape(count, heads, head_dim)


def _missing(used: Tensor, room: int) -> list[int]:
    """Return the numbers below ``room`` that are not in ``used``."""
    return sorted(set(range(room)) - set(used.tolist()))
