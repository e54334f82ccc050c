"""Preference pairs (a chosen and a rejected response to one prompt) for reward models and DPO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.config import PreferenceDataConfig
from verl.datasets.chat import Message, require_usable, token_lengths
from verl.datasets.content_checks import ContentChecks
from verl.datasets.files import DataFile, Row, choose_rows, open_files, require_columns
from verl.datasets.loss_mask import (
    SWITCHES,
    is_trained,
    lost_text,
    mask_assistant,
    render_conversation,
    require_learnable,
    require_turn_ends,
)
from verl.datasets.multiturn_sft_dataset import DECODERS, VIDEO_COLUMN, Item, right_pad, right_padded
from verl.datasets.prompt_images import ImagePrompt, Media, PromptImages, RowImages
from verl.datasets.row_conversation import require_written_calls, row_messages, row_template_kwargs
from verl.errors import DataError
from verl.protocol.shared import SharedTensors

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from verl.vision.prompts import Picture

Side = tuple[list[int], list[int]]
"""Token ids and loss mask, of equal length."""


class Pair(NamedTuple):
    """Two conversations that begin with the same prompt."""

    chosen: list[Message]
    rejected: list[Message]
    shared: int
    """Number of leading messages that are the prompt."""
    images: Sequence[Picture] = ()
    """Images and videos of the prompt, in the order of its messages."""


class RMDataset(Dataset):
    """Preference pairs as token ids with a mask of each response's tokens.

    An item holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, int64 of shape (2, length): row
    0 is the chosen side, row 1 the rejected one, right-padded to the longer. ``loss_mask`` is 1 on the assistant's
    tokens after the prompt, each turn's end-of-turn token included; assistant turns inside the prompt are context.

    Columns: ``data.prompt_key`` is text or messages. ``data.chosen_key`` and ``data.rejected_key`` are text (one
    assistant turn), the messages after the prompt, or whole conversations that begin with it. With
    ``data.prompt_key=null`` they are whole conversations whose common beginning is the prompt. The last message must be
    the assistant's.

    For a model with images ``data.image_key`` and ``videos`` are the columns of those that stand in the prompt. Then
    ``position_ids`` are (2, 4, length), see :mod:`verl.vision.positions`, and ``multi_modal_inputs`` holds what the
    image processor made, for both sides. Images and videos are decoded on opening; a row with one that cannot be read
    is left out, and named in a warning. A pair with one is never cut.

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
        processor: the model's, if it takes images; without one rows with images are refused.
        max_samples: number of pairs to keep, -1 for all: a random choice by ``data.seed`` if ``data.shuffle``, else the
            first.

    Raises:
        DataError: a file or a row cannot be used; a response is empty, or both are equal.
        ConfigError: the tokenizer has no chat template, or one whose turns have no end.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: PreferenceDataConfig | Mapping[str, object],
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        require_usable(tokenizer)
        require_turn_ends(tokenizer)
        self.tokenizer = tokenizer
        self.config = config
        config = PreferenceDataConfig.from_mapping(config)
        self.use_settings(config)
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        self.files: list[DataFile] = open_files(parquet_files, "parquet_files")
        columns = {config.chosen_key: "chosen_key", config.rejected_key: "rejected_key"}
        if config.prompt_key is not None:
            columns[config.prompt_key] = "prompt_key"
        require_columns(self.files, columns)
        self.images = PromptImages(processor, config.image_key, VIDEO_COLUMN)
        for file in self.files:
            self.images.refuse_media(file)
        self.rows = choose_rows(self.files, max_samples, config.shuffle, config.seed)
        self._check_pairs()

    def use_settings(self, settings: PreferenceDataConfig) -> None:
        """Read rows by other settings from now on."""
        self.settings = settings

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Item:
        *sides, images = self._sequences(item)
        chosen, rejected = self._fit(item, *sides, has_images=bool(images))
        length = max(len(chosen[0]), len(rejected[0]))
        padded = [
            right_pad(torch.tensor(ids), torch.tensor(mask), length, self.tokenizer.pad_token_id)
            for ids, mask in (chosen, rejected)
        ]
        columns: Item = {key: torch.stack([side[key] for side in padded]) for key in padded[0]}
        if (maker := self.images.maker) is not None:
            inputs = maker.inputs(images, self.place(item))
            positions = [right_padded(maker.positions(ids, inputs), length) for ids, _ in (chosen, rejected)]
            columns |= {"position_ids": torch.stack(positions), "multi_modal_inputs": SharedTensors(inputs)}
        return columns

    def place(self, item: int) -> str:
        """File and row of an item, for error messages."""
        return self._locate(self.rows[item])[0]

    def pair(self, item: int) -> Pair:
        """The two conversations of an item, checked, as the chat template takes them."""
        where, row = self._locate(self.rows[item])
        return self._placed(*self._plain_pair(row, where), where)

    def _locate(self, row: tuple[int, int]) -> tuple[str, Row]:
        file, row_index = row
        return f"{self.files[file].path}, row {row_index}", self.files[file].row(row_index)

    def _placed(self, pair: Pair, media: Media, where: str) -> Pair:
        """Replace ``<image>`` and ``<video>`` in the prompt by parts."""
        prompt = self.images.placed(pair.chosen[: pair.shared], media, f"{where}, the prompt")
        if any(message["role"] == "assistant" and isinstance(message["content"], list) for message in prompt.messages):
            raise DataError(
                f"{where}, the prompt: a message of the assistant has an image or a video. A model answers with text; "
                "put it into a message before it."
            )
        return _with_prompt(pair, prompt)

    def _plain_pair(self, row: Row, where: str) -> tuple[Pair, Media]:
        """The conversations with texts alone, and the images and videos for which ``<image>`` and ``<video>`` stand."""
        if self.images.maker is None:
            return make_pair(row, self.settings, where), {}
        config = self.settings
        prompt_media: Media | None = None
        # The first of them has the prompt.
        for key in filter(None, (config.prompt_key, config.chosen_key, config.rejected_key)):
            row[key], media = self.images.with_placeholders(row.get(key), row, f"{where}, {key}")
            prompt_media = media if prompt_media is None else prompt_media
            if any(items and items != prompt_media[kind] for kind, items in media.items()):
                raise DataError(
                    f"{where}, {key}: it has an image or a video that the prompt does not have. Put them into the "
                    "prompt, which both sides share; a response is text."
                )
        return make_pair(row, config, where), prompt_media or {}

    def _opened(self, item: int) -> Pair:
        """The pair with the frames of its videos chosen."""
        pair = self.pair(item)
        return _with_prompt(pair, self.images.opened(_prompt_of(pair), self.place(item)))

    def texts(self, item: int) -> list[str]:
        """The chosen and the rejected side, rendered by the chat template."""
        where, row = self._locate(self.rows[item])
        return self._rendered(self._opened(item), where, self._template_kwargs(row, where))

    def _rendered(self, pair: Pair, where: str, template_kwargs: Mapping[str, object]) -> list[str]:
        sides = (pair.chosen, pair.rejected)
        return [render_conversation(messages, self.tokenizer, where, **template_kwargs) for messages in sides]

    def _template_kwargs(self, row: Row, where: str) -> dict[str, object]:
        config = self.settings
        row_kwargs = row_template_kwargs(row, config.tools_key, config.enable_thinking_key, self.tokenizer, where)
        return self.template_kwargs | row_kwargs

    def sequences(self, item: int) -> tuple[Side, Side]:
        """Token ids and loss mask of the chosen and of the rejected side, before truncation."""
        return self._sequences(item)[:2]

    def row_images(self, item: int) -> RowImages:
        """The images of an item, as they were measured when the files were opened."""
        return self.images.read_counts(self.rows[item], _prompt_of(self.pair(item)))

    def _sequences(self, item: int) -> tuple[Side, Side, list[Picture]]:
        """Both sides before truncation, and the decoded images."""
        pair, (where, row) = self._opened(item), self._locate(self.rows[item])
        template_kwargs = self._template_kwargs(row, where)
        images, counts = self.images.read(_prompt_of(pair), where)
        chosen, rejected = (
            self.images.expanded(
                *mask_assistant(
                    messages,
                    self.tokenizer,
                    f"{where}, {name}",
                    strict=not self.settings.ignore_input_ids_mismatch,
                    first=pair.shared,
                    **template_kwargs,
                ),
                counts,
                f"{where}, {name}",
            )
            for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected))
        )
        return chosen, rejected, images

    def _fit(self, item: int, chosen: Side, rejected: Side, has_images: bool) -> tuple[Side, Side]:
        limit = self.settings.max_length
        if max(len(chosen[0]), len(rejected[0])) <= limit:
            return chosen, rejected
        if has_images:
            raise DataError(
                f"{self._too_long(item, chosen, rejected)} Pairs with images are never cut: raise it, or take the row "
                "out."
            )
        if self.settings.truncation == "left":
            return self._cut_prompt(item, chosen, rejected)
        if self.settings.truncation == "right":
            return self._cut_ends(item, chosen, rejected)
        raise DataError(f"{self._too_long(item, chosen, rejected)} Raise it, or set truncation to left or right.")

    def _cut_prompt(self, item: int, chosen: Side, rejected: Side) -> tuple[Side, Side]:
        drop = max(len(chosen[0]), len(rejected[0])) - self.settings.max_length
        prompt = min(chosen[1].index(1), rejected[1].index(1))
        if drop >= prompt:
            raise DataError(
                f"{self._too_long(item, chosen, rejected)} truncation=left shortens the prompt alone, which has "
                f"{prompt} tokens, and it must keep at least one. Raise max_length, or take the pair out."
            )
        return (chosen[0][drop:], chosen[1][drop:]), (rejected[0][drop:], rejected[1][drop:])

    def _cut_ends(self, item: int, chosen: Side, rejected: Side) -> tuple[Side, Side]:
        limit = self.settings.max_length
        cut = []
        for ids, mask in (chosen, rejected):
            last = len(mask) - 1 - mask[::-1].index(1)  # the end-of-turn token
            length = min(limit, last)  # also a side that fits loses it, so that neither looks finished
            cut.append((ids[:length], mask[:length]))
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
            f"more than max_length={self.settings.max_length}."
        )

    def _check_pairs(self) -> None:
        """Check messages and length of every pair, and that each truncation is possible; leave out broken images."""
        pairs: dict[tuple[int, int], Pair] = {}
        texts: list[str] = []
        added: list[int] = []
        with_images: list[bool] = []
        usable: list[tuple[int, int]] = []
        checks = ContentChecks(self.tokenizer, "pairs")
        measured = self.images.measured(self._prompts(checks, pairs), DECODERS, self.settings.max_length)
        for row, prompt, image_tokens in measured:
            where, values = self._locate(row)
            kwargs = self._template_kwargs(values, where)
            sides = self._rendered(_with_prompt(pairs.pop(row), prompt), where, kwargs)
            if sides[0] == sides[1]:
                raise DataError(f"{where}: the chat template writes both sides alike. Take the row out.")
            texts += sides
            added.append(image_tokens)
            with_images.append(bool(prompt.images))
            usable.append(row)
        if not self.settings.ignore_input_ids_mismatch:
            checks.refuse("lost text")
        checks.report()
        self.rows = usable
        lengths = token_lengths(texts, self.tokenizer)
        longest = [max(lengths[2 * item : 2 * item + 2]) + more for item, more in enumerate(added)]
        limit, cuts = self.settings.max_length, self.settings.truncation != "error"
        too_long = [item for item, length in enumerate(longest) if length > limit]
        uncut = [item for item in too_long if with_images[item] or not cuts]
        if uncut:
            why = "pairs with images are never cut" if cuts else "truncation is 'error'"
            cut = "take these rows out" if cuts else "set truncation to left or right"
            raise DataError(
                f"{len(uncut)} of {len(self)} pairs are longer than max_length={limit} and {why}: the first is "
                f"{self.place(uncut[0])} with {longest[uncut[0]]} tokens, the longest has "
                f"{max(longest[item] for item in uncut)}. Raise max_length, or {cut}."
            )
        for item in too_long:
            self._fit(item, *self.sequences(item), has_images=False)

    def _prompts(
        self, checks: ContentChecks, pairs: dict[tuple[int, int], Pair]
    ) -> Iterator[tuple[tuple[int, int], str, ImagePrompt]]:
        """Yield file and row number, place, and prompt of each row, whose pair is checked and put into ``pairs``."""
        for row in self.rows:
            where, values = self._locate(row)
            plain, media = self._plain_pair(values, where)
            require_written_calls(plain.chosen + plain.rejected, self.tokenizer, where)
            checks.conversation(plain.chosen + plain.rejected[plain.shared :], where)
            strict, kwargs = not self.settings.ignore_input_ids_mismatch, self._template_kwargs(values, where)
            for side in (plain.chosen, plain.rejected):
                if lost := lost_text(side, self.tokenizer, where, strict, plain.shared, **kwargs):
                    checks.add("lost text", where, lost)
                    break
            pairs[row] = pair = self._placed(plain, media, where)
            yield row, where, _prompt_of(pair)


def _prompt_of(pair: Pair) -> ImagePrompt:
    prompt = pair.chosen[: pair.shared]
    return ImagePrompt(prompt, prompt, list(pair.images))


def _with_prompt(pair: Pair, prompt: ImagePrompt) -> Pair:
    """Replace the messages of the prompt, and its images and videos."""
    chosen, rejected = ([*prompt.messages, *side[pair.shared :]] for side in (pair.chosen, pair.rejected))
    return pair._replace(chosen=chosen, rejected=rejected, images=prompt.images)


def make_pair(row: Row, config: PreferenceDataConfig, where: str) -> Pair:
    """Extract the two conversations of a row; ``place`` (file and row) is named in errors.

    Raises:
        DataError: a side is empty or does not end with the assistant, the sides share no prompt, or they are equal.
    """
    sides = {key: _messages(row.get(key), f"{where}, {key}") for key in (config.chosen_key, config.rejected_key)}
    chosen, rejected = sides.values()
    if config.prompt_key is not None:
        prompt = row_messages(row.get(config.prompt_key), f"{where}, {config.prompt_key}")
        shared = len(prompt)
        for key, side in sides.items():
            if side[:shared] != prompt and side[0]["role"] != "assistant":
                raise DataError(
                    f"{where}, {key}: it begins with a message of the role '{side[0]['role']}', but not with the "
                    f"messages of {config.prompt_key}. Give the response alone, a conversation that begins with the "
                    "prompt, or set prompt_key=null if both sides are whole conversations."
                )
        chosen, rejected = (side if side[:shared] == prompt else prompt + side for side in (chosen, rejected))
    else:
        both = zip(chosen, rejected, strict=False)
        shared = next((n for n, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise DataError(f"{where}: {' and '.join(sides)} are the same, so there is nothing to prefer. Remove the row.")
    for key, side in zip(sides, (chosen, rejected), strict=True):
        if shared == 0:
            raise DataError(
                f"{where}: the two conversations begin with different messages, so they share no prompt. "
                "Set prompt_key to the column of the prompt."
            )
        if len(side) == shared or side[-1]["role"] != "assistant":
            raise DataError(f"{where}, {key}: the last message must be the assistant's response to the prompt.")
        if not all(is_trained(message, f"{where}, {key}") for message in side[shared:]):
            raise DataError(
                f"{where}, {key}: a message of the response is not to be trained on ({', '.join(SWITCHES)}), but pairs "
                "compare whole responses. Leave the key out, or put the message into the prompt."
            )
        require_learnable(side, f"{where}, {key}")
    return Pair(chosen, rejected, shared)


def _messages(value: object, where: str) -> list[Message]:
    """The messages of one side; plain text is an assistant message."""
    messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else row_messages(value, where)
    for message in messages:
        content = message.get("content")
        empty = not content.strip() if isinstance(content, str) else not content
        if message["role"] == "assistant" and empty and not message.get("tool_calls"):
            raise DataError(f"{where}: the response is empty. Take the row out, or give it a text.")
    return messages


def pair_collate_fn(
    tokenizer: Any, config: PreferenceDataConfig
) -> Callable[[list[Item]], dict[str, torch.Tensor | np.ndarray]]:
    """Return a collate function: right-pad pairs to the longest side and stack them to (bsz, 2, longest)."""
    return functools.partial(_pad_pairs, pad_token_id=tokenizer.pad_token_id)


def _pad_pairs(items: list[Item], pad_token_id: int) -> dict[str, torch.Tensor | np.ndarray]:
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
    columns: dict[str, torch.Tensor | np.ndarray] = {
        key: torch.stack(rows).unflatten(0, (len(items), 2)) for key, rows in batch.items()
    }
    if "multi_modal_inputs" in items[0]:
        positions = [right_padded(side, longest) for item in items for side in item["position_ids"]]
        columns["position_ids"] = torch.stack(positions).unflatten(0, (len(items), 2))
        images = [item["multi_modal_inputs"] for item in items]
        columns["multi_modal_inputs"] = np.fromiter(images, dtype=object, count=len(images))
    return columns
