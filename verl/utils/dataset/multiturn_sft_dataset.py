"""Conversations for supervised training, with the loss on the assistant's turns."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.config import SFTDataConfig
from verl.errors import DataError
from verl.utils.dataset.chat import Message, as_messages, render, require_usable, token_lengths, truncate
from verl.utils.dataset.content_checks import ContentChecks
from verl.utils.dataset.files import (
    MEDIA_COLUMNS,
    DataFile,
    Row,
    choose_rows,
    open_files,
    refuse_media,
    require_columns,
)
from verl.utils.dataset.loss_mask import mask_assistant, require_learnable

Item = dict[str, torch.Tensor]


class MultiTurnSFTDataset(Dataset):
    """Conversations as token ids with a loss mask.

    ``loss_mask`` is 1 on each assistant turn after its header, the end-of-turn token included (see
    :mod:`verl.utils.dataset.loss_mask`).

    An item holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, int64 of shape (max_length,),
    right-padded, or unpadded with ``pad_mode=no_padding``. Columns of the file: ``data.messages_key``, and optionally
    ``data.tools_key`` (a list, or its JSON text) and ``data.enable_thinking_key``.

    Args:
        parquet_files: one path or several (json and jsonl too); globs, ``~`` and ``$VARIABLES`` are expanded.
        tokenizer: has a chat template and a pad token.
        config: the ``data`` section of a supervised run, or a mapping with any part of it.
        processor: multi-modal processor; unused, rows with media are refused.
        max_samples: number of conversations to keep, -1 for all: a random choice by ``data.seed`` if ``data.shuffle``,
            else the first.

    Raises:
        DataError: a file or a row cannot be used, or ``data.truncation`` is ``error`` and a conversation is longer than
            ``data.max_length``.
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: SFTDataConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        require_usable(tokenizer)
        self.tokenizer = tokenizer
        self.config = config = SFTDataConfig.of(config)
        self.files: list[DataFile] = open_files(parquet_files, "parquet_files")
        require_columns(self.files, self.needed_columns())
        refuse_media(self.files, MEDIA_COLUMNS, "Images are for main_ppo: this trainer reads texts.")
        self.rows = choose_rows(self.files, max_samples, config.shuffle, config.seed)
        self._check_conversations()

    def needed_columns(self) -> dict[str, str]:
        """Required columns, each with the setting that names it."""
        return {self.config.messages_key: "messages_key"}

    def conversation(self, row: Row, place: str) -> list[Message]:
        """The messages of a row, checked."""
        return as_messages(row[self.config.messages_key], place)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Item:
        place = self.place(item)
        [(ids, mask)] = self.sequences(item)
        # Cut as pairs, so that ids and mask lose the same places.
        pairs = truncate(
            list(zip(ids, mask, strict=True)), self.config.max_length, self.config.truncation, place, "max_length"
        )
        columns = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        length = len(pairs) if self.config.pad_mode == "no_padding" else self.config.max_length
        return right_pad(columns[:, 0], columns[:, 1], length, self.tokenizer.pad_token_id)

    def place(self, item: int) -> str:
        """File and row of an item, for error messages."""
        return self._locate(item)[0]

    def texts(self, item: int) -> list[str]:
        """The rendered conversation, in a list of one."""
        place, row = self._locate(item)
        kwargs = self._template_kwargs(row, place)
        return [render(self.conversation(row, place), self.tokenizer, place, **kwargs)]

    def sequences(self, item: int) -> list[tuple[list[int], list[int]]]:
        """Token ids and loss mask before truncation, in a list of one."""
        place, row = self._locate(item)
        sequence = mask_assistant(
            self.conversation(row, place),
            self.tokenizer,
            place,
            strict=not self.config.ignore_input_ids_mismatch,
            **self._template_kwargs(row, place),
        )
        return [sequence]

    def _locate(self, item: int) -> tuple[str, Row]:
        file, number = self.rows[item]
        return f"{self.files[file].path}, row {number}", self.files[file].row(number)

    def _template_kwargs(self, row: Row, place: str) -> dict[str, Any]:
        kwargs = dict(self.config.apply_chat_template_kwargs)
        tools = row.get(self.config.tools_key)
        if tools:
            kwargs["tools"] = _tools(tools, place)
        thinking = row.get(self.config.enable_thinking_key)
        if thinking is not None:
            kwargs["enable_thinking"] = bool(thinking)
        return kwargs

    def _check_conversations(self) -> None:
        """Check the messages of every row, and the lengths if ``data.truncation`` is ``error``."""
        measure = self.config.truncation == "error"
        texts: list[str] = []
        checks = ContentChecks(self.tokenizer, "conversations")
        for place, row in map(self._locate, range(len(self))):
            messages = self.conversation(row, place)
            require_learnable(messages, place)
            checks.conversation(messages, place)
            if measure:
                texts.append(render(messages, self.tokenizer, place, **self._template_kwargs(row, place)))
        checks.report()
        limit = self.config.max_length
        too_long = [(n, item) for item, n in enumerate(token_lengths(texts, self.tokenizer)) if n > limit]
        if too_long:
            length, item = too_long[0]
            raise DataError(
                f"{len(too_long)} of {len(self)} conversations are longer than max_length={limit} and "
                f"truncation is 'error': the first is {self._locate(item)[0]} with {length} tokens, the longest "
                f"has {max(too_long)[0]}. Raise max_length, or set truncation to left, right or middle."
            )


def _tools(value: Any, place: str) -> list[Any]:
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: the tools are not valid JSON ({error}): {value!r:.80}.") from error
    if not isinstance(tools, list):
        raise DataError(f"{place}: the tools are {type(tools).__name__}, not a list: {tools!r:.80}.")
    return tools


def right_pad(ids: torch.Tensor, loss_mask: torch.Tensor, length: int, pad_token_id: int) -> Item:
    """Right-pad a sequence to ``length``, with attention mask and position ids."""
    padding = (0, length - len(ids))
    attention_mask = torch.nn.functional.pad(torch.ones_like(ids), padding)
    return {
        "input_ids": torch.nn.functional.pad(ids, padding, value=pad_token_id),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(0) - 1).clamp(min=0),
        "loss_mask": torch.nn.functional.pad(loss_mask, padding),
    }


def sft_collate_fn(
    tokenizer: Any, config: SFTDataConfig
) -> Callable[[list[Item]], dict[str, torch.Tensor | np.ndarray]]:
    """Return a collate function that right-pads items to the longest and stacks them."""
    return functools.partial(pad_to_longest, pad_token_id=tokenizer.pad_token_id)


def pad_to_longest(items: list[Item], pad_token_id: int) -> dict[str, torch.Tensor | np.ndarray]:
    """Collate items into columns of shape (bsz, longest)."""
    longest = max(len(item["input_ids"]) for item in items)
    padded = [right_pad(item["input_ids"], item["loss_mask"], longest, pad_token_id) for item in items]
    return {key: torch.stack([item[key] for item in padded]) for key in padded[0]}
