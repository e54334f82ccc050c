"""Preference pairs (a chosen and a rejected response to one prompt) for reward models and DPO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset

from verl.errors import DataError
from verl.utils.dataset.chat import Message, as_messages, render, require_usable, token_lengths
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
from verl.utils.dataset.multiturn_sft_dataset import Item, right_pad

if TYPE_CHECKING:
    from verl.config import PreferenceDataConfig

Side = tuple[list[int], list[int]]
"""Token ids and loss mask, of equal length."""


class Pair(NamedTuple):
    """Two conversations that begin with the same prompt."""

    chosen: list[Message]
    rejected: list[Message]
    shared: int
    """Number of leading messages that are the prompt."""


class RMDataset(Dataset):
    """Preference pairs as token ids with a mask of each response's tokens.

    An item holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, int64 of shape (2, length): row
    0 is the chosen side, row 1 the rejected one, right-padded to the longer. ``loss_mask`` is 1 on the assistant's
    tokens after the prompt, each turn's end-of-turn token included; assistant turns inside the prompt are context.

    Columns: ``data.prompt_key`` is text or messages. ``data.chosen_key`` and ``data.rejected_key`` are text (one
    assistant turn), the messages after the prompt, or whole conversations that begin with it. With
    ``data.prompt_key=null`` they are whole conversations whose common beginning is the prompt. The last message must be
    the assistant's.

    ``data.truncation`` handles a pair with a side longer than ``data.max_length`` so that the cut does not reveal which
    side is which:

    * ``left``: both sides lose the same number of tokens at the beginning of the prompt, so the contexts stay equal. A
      pair whose responses would be cut is refused.
    * ``right``: a side that is too long loses its end, and the other side its end-of-turn token, so neither looks
      finished. A pair whose remaining responses are equal is refused.
    * ``error``: refused when the files are opened.

    Args:
        parquet_files: one path or several (json and jsonl too); globs, ``~`` and ``$VARIABLES`` are expanded.
        tokenizer: has a chat template and a pad token.
        config: the ``data`` section of a preference run.
        max_samples: number of pairs to keep, -1 for all: a random choice by ``data.seed`` if ``data.shuffle``, else the
            first.

    Raises:
        DataError: a file or a row cannot be used; a response is empty, or both are equal.
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: PreferenceDataConfig, max_samples: int = -1
    ) -> None:
        require_usable(tokenizer)
        self.tokenizer = tokenizer
        self.config = config
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        self.files: list[DataFile] = open_files(parquet_files, "parquet_files")
        columns = {config.chosen_key: "chosen_key", config.rejected_key: "rejected_key"}
        if config.prompt_key is not None:
            columns[config.prompt_key] = "prompt_key"
        require_columns(self.files, columns)
        refuse_media(self.files, MEDIA_COLUMNS, "Images are for main_ppo and sft_trainer: this trainer reads texts.")
        self.rows = choose_rows(self.files, max_samples, config.shuffle, config.seed)
        self._check_pairs()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Item:
        chosen, rejected = self._fit(item, *self.sequences(item))
        length = max(len(chosen[0]), len(rejected[0]))
        padded = [
            right_pad(torch.tensor(ids), torch.tensor(mask), length, self.tokenizer.pad_token_id)
            for ids, mask in (chosen, rejected)
        ]
        return {key: torch.stack([side[key] for side in padded]) for key in padded[0]}

    def place(self, item: int) -> str:
        """File and row of an item, for error messages."""
        file, number = self.rows[item]
        return f"{self.files[file].path}, row {number}"

    def pair(self, item: int) -> Pair:
        """The two conversations of an item, checked."""
        file, number = self.rows[item]
        return make_pair(self.files[file].row(number), self.config, self.place(item))

    def texts(self, item: int) -> list[str]:
        """The chosen and the rejected side, rendered by the chat template."""
        return self._rendered(self.pair(item), self.place(item))

    def _rendered(self, pair: Pair, place: str) -> list[str]:
        sides = (pair.chosen, pair.rejected)
        return [render(messages, self.tokenizer, place, **self.template_kwargs) for messages in sides]

    def sequences(self, item: int) -> tuple[Side, Side]:
        """Token ids and loss mask of the chosen and of the rejected side, before truncation."""
        pair, place = self.pair(item), self.place(item)
        chosen, rejected = (
            mask_assistant(
                messages,
                self.tokenizer,
                f"{place}, {name}",
                strict=not self.config.ignore_input_ids_mismatch,
                first=pair.shared,
                **self.template_kwargs,
            )
            for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected))
        )
        return chosen, rejected

    def _fit(self, item: int, chosen: Side, rejected: Side) -> tuple[Side, Side]:
        limit = self.config.max_length
        if max(len(chosen[0]), len(rejected[0])) <= limit:
            return chosen, rejected
        if self.config.truncation == "left":
            return self._cut_prompt(item, chosen, rejected)
        if self.config.truncation == "right":
            return self._cut_ends(item, chosen, rejected)
        raise DataError(f"{self._too_long(item, chosen, rejected)} Raise it, or set truncation to left or right.")

    def _cut_prompt(self, item: int, chosen: Side, rejected: Side) -> tuple[Side, Side]:
        drop = max(len(chosen[0]), len(rejected[0])) - self.config.max_length
        prompt = min(chosen[1].index(1), rejected[1].index(1))
        if drop >= prompt:
            raise DataError(
                f"{self._too_long(item, chosen, rejected)} truncation=left shortens the prompt alone, which has "
                f"{prompt} tokens, and it must keep at least one. Raise max_length, or take the pair out."
            )
        return (chosen[0][drop:], chosen[1][drop:]), (rejected[0][drop:], rejected[1][drop:])

    def _cut_ends(self, item: int, chosen: Side, rejected: Side) -> tuple[Side, Side]:
        limit = self.config.max_length
        cut = []
        for ids, mask in (chosen, rejected):
            last = len(mask) - 1 - mask[::-1].index(1)  # the end-of-turn token
            kept = min(limit, last)  # also a side that fits loses it, so that neither looks finished
            cut.append((ids[:kept], mask[:kept]))
        begins = [mask.index(1) if 1 in mask else None for _, mask in cut]
        if None in begins or cut[0][0] == cut[1][0]:
            why = "nothing is left of a response" if None in begins else "the two responses agree so far"
            raise DataError(
                f"{self._too_long(item, chosen, rejected)} Cut at the right, {why}. Raise max_length, or take "
                "the pair out."
            )
        return cut[0], cut[1]

    def _too_long(self, item: int, chosen: Side, rejected: Side) -> str:
        return (
            f"{self.place(item)}: chosen has {len(chosen[0])} tokens and rejected {len(rejected[0])}, "
            f"more than max_length={self.config.max_length}."
        )

    def _check_pairs(self) -> None:
        """Check the messages and lengths of every pair, and that each truncation is possible."""
        texts: list[str] = []
        checks = ContentChecks(self.tokenizer, "pairs")
        for item in range(len(self)):
            pair, place = self.pair(item), self.place(item)
            sides = self._rendered(pair, place)
            if sides[0] == sides[1]:
                raise DataError(f"{place}: the chat template writes both sides alike. Take the row out.")
            texts += sides
            checks.conversation(pair.chosen + pair.rejected[pair.shared :], place)
        checks.report()
        lengths = token_lengths(texts, self.tokenizer)
        longest = [max(lengths[2 * item : 2 * item + 2]) for item in range(len(self))]
        limit = self.config.max_length
        too_long = [item for item, length in enumerate(longest) if length > limit]
        if too_long and self.config.truncation == "error":
            raise DataError(
                f"{len(too_long)} of {len(self)} pairs are longer than max_length={limit} and truncation is "
                f"'error': the first is {self.place(too_long[0])} with {longest[too_long[0]]} tokens, the longest has "
                f"{max(longest)}. Raise max_length, or set truncation to left or right."
            )
        for item in too_long:
            self._fit(item, *self.sequences(item))


def make_pair(row: Row, config: PreferenceDataConfig, place: str) -> Pair:
    """Extract the two conversations of a row; ``place`` (file and row) is named in errors.

    Raises:
        DataError: a side is empty or does not end with the assistant, the sides share no prompt, or they are equal.
    """
    sides = {key: _messages(row.get(key), f"{place}, {key}") for key in (config.chosen_key, config.rejected_key)}
    chosen, rejected = sides.values()
    if config.prompt_key is not None:
        prompt = as_messages(row.get(config.prompt_key), f"{place}, {config.prompt_key}")
        shared = len(prompt)
        for key, side in sides.items():
            if side[:shared] != prompt and side[0]["role"] != "assistant":
                raise DataError(
                    f"{place}, {key}: it begins with a message of the role '{side[0]['role']}', but not with the "
                    f"messages of {config.prompt_key}. Give the response alone, a conversation that begins with the "
                    "prompt, or set prompt_key=null if both sides are whole conversations."
                )
        chosen, rejected = (side if side[:shared] == prompt else prompt + side for side in (chosen, rejected))
    else:
        both = zip(chosen, rejected, strict=False)
        shared = next((n for n, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise DataError(
            f"{place}: {' and '.join(sides)} are the same, so there is nothing to prefer. Take the row out."
        )
    for key, side in zip(sides, (chosen, rejected), strict=True):
        if shared == 0:
            raise DataError(
                f"{place}: the two conversations begin with different messages, so they share no prompt. "
                "Set prompt_key to the column of the prompt."
            )
        if len(side) == shared or side[-1]["role"] != "assistant":
            raise DataError(f"{place}, {key}: the last message must be the assistant's response to the prompt.")
        require_learnable(side, f"{place}, {key}")
    return Pair(chosen, rejected, shared)


def _messages(value: Any, place: str) -> list[Message]:
    """The messages of one side; plain text is an assistant message."""
    messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else as_messages(value, place)
    for message in messages:
        content = message.get("content")
        empty = not content.strip() if isinstance(content, str) else not content
        if message["role"] == "assistant" and empty and not message.get("tool_calls"):
            raise DataError(f"{place}: the response is empty. Take the row out, or give it a text.")
    return messages


def pair_collate_fn(tokenizer: Any, config: PreferenceDataConfig) -> Callable[[list[Item]], dict[str, torch.Tensor]]:
    """Return a collate function: right-pad pairs to the longest side and stack them to (bsz, 2, longest)."""
    return functools.partial(_pad_pairs, pad_token_id=tokenizer.pad_token_id)


def _pad_pairs(items: list[Item], pad_token_id: int) -> dict[str, torch.Tensor]:
    longest = max(item["input_ids"].shape[1] for item in items)
    batch: dict[str, list[torch.Tensor]] = {}
    for item in items:
        for side in range(2):
            length = int(item["attention_mask"][side].sum())
            padded = right_pad(
                item["input_ids"][side, :length], item["loss_mask"][side, :length], longest, pad_token_id
            )
            for key, value in padded.items():
                batch.setdefault(key, []).append(value)
    return {key: torch.stack(rows).unflatten(0, (len(items), 2)) for key, rows in batch.items()}
