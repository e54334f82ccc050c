"""Batched decoding with a Transformers model: next-token logits and a preallocated cache of keys and values.

Transformers' own cache copies all keys and values at every token. Here each token is written in place into a buffer
that is allocated once, and attention reads a view of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from verl.protocol.shared import SharedTensors, joined
from verl.utils.transformers_private import DynamicLayer
from verl.vision.families import IMAGE_INPUTS, SECONDS, VisionConfig
from verl.vision.model import ImageInputs, hidden_states
from verl.vision.positions import left_padded, mrope_positions
from verl.workers.rollout.routing import RoutingTable
from verl.workers.routers import Choices, Routers


class _BufferedLayer(DynamicLayer):
    """The cache of one layer; ``keys`` and ``values`` are views of the filled part of two buffers."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._capacity = capacity
        self._store(keys, values)

    def _store(self, keys: Tensor, values: Tensor) -> None:
        self._key_buffer, self._value_buffer = (self._with_room(states) for states in (keys, values))
        self._show(keys.shape[2])

    def _with_room(self, states: Tensor) -> Tensor:
        rows, heads, filled, width = states.shape
        buffer = states.new_empty(rows, heads, self._capacity, width)
        buffer[:, :, :filled] = states
        return buffer

    def _show(self, filled: int) -> None:
        self.keys, self.values = self._key_buffer[:, :, :filled], self._value_buffer[:, :, :filled]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return all states so far, (rows, heads, filled, width)."""
        assert self.keys is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self._show(end)
        return self.keys, cast(Tensor, self.values)

    def keep(self, rows: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        self._store(self.keys[rows], self.values[rows])

    @property
    def nbytes(self) -> int:
        return self._key_buffer.nbytes + self._value_buffer.nbytes


class DecodingCache(Cache):
    """Cache of keys and values with room for the prompt and the response of every row.

    Args:
        prefilled: caches of the distinct prompts, all padded to one width; concatenated along the batch.
        prompt_of_row: (bsz,) index of each row's prompt among the distinct prompts.
        capacity: largest number of tokens in a row, prompt and response together.
    """

    def __init__(self, prefilled: Sequence[DynamicCache], prompt_of_row: Tensor, capacity: int) -> None:
        self._buffered = []
        for layers in zip(*(cache.layers for cache in prefilled), strict=True):
            keys, values = torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers])
            self._buffered.append(_BufferedLayer(keys[prompt_of_row], values[prompt_of_row], capacity))
        super().__init__(layers=list(self._buffered))

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self._buffered:
            layer.keep(rows)

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(layer.nbytes for layer in self._buffered)


@dataclass(frozen=True)
class PromptWithImages:
    """A prompt, equal to another one with the same tokens and the same images."""

    ids: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    images: SharedTensors | None = None
    """``pixel_values`` and ``image_grid_thw``; prompts with other objects are different."""
    text_places: tuple[int, ...] = ()
    """See :class:`~verl.workers.rollout.request.RolloutRequest`."""

    def is_image(self, vision: VisionConfig) -> Tensor:
        """Return which tokens stand for images, (tokens,) bool."""
        is_image = vision.marked(torch.tensor(self.ids))
        is_image[list(self.text_places)] = False
        return is_image


class DecodingBatch:
    """A batch of responses that are decoded one token at a time.

    The constructor computes the prompts' states (prefill), once for equal prompts. Rows are padded on the left to the
    longest prompt.

    Args:
        prompts: each row's prompt.
        max_new_tokens: largest length of a response.
        module: causal language model, in eval mode.
        prefill_tokens: limit of prompt tokens, with padding, in one forward pass; at least one prompt is processed.
        routers: of the module, to record what they choose; None records nothing.

    Attributes:
        rows: (n,) the rows still in the batch, as indices into ``prompts``.
        logits: (n, vocab) next-token logits of these rows.
        routing: what the routers chose for each row, if it is recorded.
    """

    def __init__(
        self,
        prompts: Sequence[PromptWithImages],
        max_new_tokens: int,
        module: PreTrainedModel,
        prefill_tokens: int,
        routers: Routers | None = None,
    ) -> None:
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        lengths = torch.tensor([len(prompt.ids) for prompt in distinct])
        width = int(lengths.max())
        mask = torch.arange(width) >= width - lengths[:, None]  # (distinct, width)
        ids = torch.zeros(len(distinct), width, dtype=torch.long)
        ids[mask] = torch.tensor([token for prompt in distinct for token in prompt.ids])
        prompt_of_row = torch.tensor([distinct[prompt] for prompt in prompts])

        self._module, self._routers = module, routers
        self._vision = VisionConfig.from_config(module.config)
        self._is_padded = not bool(mask.all())
        device = module.device
        rows_at_once = max(1, prefill_tokens // width)
        prompt_routing: list[Tensor] = []
        logits, caches, self._positions = self._prefill(
            ids.to(device), mask.to(device), list(distinct), rows_at_once, prompt_routing
        )
        self.routing = None if routers is None else RoutingTable()
        if self.routing is not None:
            by_prompt = torch.cat(prompt_routing).split(lengths.tolist())
            self.routing.start(range(len(prompts)), [by_prompt[prompt] for prompt in prompt_of_row.tolist()])
        prompt_of_row, mask = prompt_of_row.to(device), mask.to(device)
        self.rows = torch.arange(len(prompts), device=device)
        self.logits = logits[prompt_of_row]
        capacity = width + max_new_tokens
        self._cache = DecodingCache(caches, prompt_of_row, capacity)
        self._mask = torch.cat([mask[prompt_of_row], mask.new_ones(len(prompts), max_new_tokens)], dim=-1)
        self._positions = self._positions[prompt_of_row]  # (n,) of the next token, or (n, 4) with images
        self._filled = self._width = width

    def _prefill(
        self,
        ids: Tensor,
        mask: Tensor,
        prompts: list[PromptWithImages],
        rows_at_once: int,
        prompt_routing: list[Tensor],
    ) -> tuple[Tensor, list[DynamicCache], Tensor]:
        """Return the logits after each prompt, the states of all prompts, and the positions of the next tokens.

        What routers choose, (tokens, layers, experts per token), is appended to ``prompt_routing`` if it is recorded.
        """
        positions = self._positions_of(mask, prompts)
        logits, caches = [], []
        for start in range(0, len(ids), rows_at_once):
            part = slice(start, start + rows_at_once)
            caches.append(DynamicCache())
            images = self._images_of(prompts[part], mask.shape[1])
            with self._watched(mask[part]) as choices:
                logits.append(self._forward(ids[part], mask[part], positions[part], caches[-1], images))
            if choices is not None:
                prompt_routing.append(choices.stacked(self._module))
        following = positions[..., -1] + 1
        if self._vision is not None:
            # After an image that ends a prompt the next token goes on from the largest position of any axis.
            following[:, 1:] = positions[:, 1:].amax((1, 2)).unsqueeze(1) + 1
        return torch.cat(logits), caches, following

    def _watched(self, real: Tensor | None) -> AbstractContextManager[Choices | None]:
        return nullcontext() if self._routers is None else self._routers.watched(real)

    def _positions_of(self, mask: Tensor, prompts: list[PromptWithImages]) -> Tensor:
        """Positions of the prompts' tokens, (distinct, width), or (distinct, 4, width) of a model with images."""
        if self._vision is None:
            return (mask.cumsum(-1) - 1).clamp(min=0)
        rows = [
            mrope_positions(
                torch.tensor(p.ids),
                None if p.images is None else p.images["image_grid_thw"],
                self._vision,
                p.is_image(self._vision),
                None if p.images is None else p.images.get(SECONDS),
            )
            for p in prompts
        ]
        return torch.stack([left_padded(row, mask.shape[1]) for row in rows]).to(mask.device)

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache, images: ImageInputs | None = None
    ) -> Tensor:
        arguments = {
            "input_ids": ids,
            "attention_mask": mask if self._is_padded else None,
            "position_ids": positions if self._vision is None else positions.transpose(0, 1),
            "past_key_values": cache,
            "use_cache": True,
        }
        if images is None:
            return self._module(**arguments, logits_to_keep=1).logits[:, -1]
        hidden = hidden_states(self._module.model, arguments, images)
        head: Any = self._module.get_output_embeddings()
        return head(hidden[:, -1])

    def _images_of(self, prompts: Sequence[PromptWithImages], width: int) -> ImageInputs | None:
        """Join the images of prompts that are padded to ``width``; None if there are none."""
        rows = [prompt.images for prompt in prompts if prompt.images is not None]
        if self._vision is None or not rows:
            return None
        pixels, grid = (joined(rows, name) for name in IMAGE_INPUTS)
        assert pixels is not None
        assert grid is not None
        places = torch.stack([left_padded(prompt.is_image(self._vision), width) for prompt in prompts])
        images = ImageInputs(pixel_values=pixels, image_grid_thw=grid.to(torch.int64), places=places)
        return images.to(self._module.device)

    def forward(self, tokens: Tensor) -> None:
        """Append one token to each row, (n,) in the order of ``rows``, and update ``logits``."""
        step = self._filled - self._width  # of the response
        self._filled += 1
        with self._watched(None) as choices:
            self.logits = self._forward(
                tokens[:, None], self._mask[:, : self._filled], self._positions.unsqueeze(-1), self._cache
            )
        if choices is not None and self.routing is not None:
            self.routing.add(self.rows, step, choices.stacked(self._module))
        self._positions = self._positions + 1

    def keep(self, places: Tensor) -> None:
        """Keep only the rows at these positions of ``rows``."""
        self.rows, self._mask, self._positions = self.rows[places], self._mask[places], self._positions[places]
        self._cache.keep(places)

    @property
    def nbytes(self) -> int:
        """Size of the cached keys and values in bytes."""
        return self._cache.nbytes
