"""Conversations for supervised training, with the loss on the assistant's turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from verl.config import BaseConfig, SFTDataConfig
from verl.config.data import Truncation
from verl.datasets.chat import (
    Message,
    extract_system_prompt_and_generation,
    require_usable,
    token_lengths,
    truncate,
)
from verl.datasets.content_checks import ContentChecks
from verl.datasets.files import DataFile, Row, RowsInMemory, choose_rows, open_files, require_columns
from verl.datasets.loss_mask import (
    lost_text,
    mask_assistant,
    render_conversation,
    require_learnable,
    require_turn_ends,
)
from verl.datasets.prompt_images import ImagePrompt, PromptImages, RowImages
from verl.datasets.row_conversation import require_written_calls, row_template_kwargs
from verl.errors import ConfigError, DataError
from verl.protocol.shared import SharedTensors

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from verl.vision.prompts import Picture

Item = dict[str, Any]

VIDEO_COLUMN = "videos"
DEFAULT_PATCH_SIZE = 14
DECODERS = 4
"""Threads that decode images when the files are opened."""


class MultiTurnSFTDataset(Dataset):
    """Conversations as token ids with a loss mask.

    ``loss_mask`` is 1 on each assistant turn after its header, the end-of-turn token included (see
    :mod:`verl.datasets.loss_mask`).

    An item holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, int64 of shape (max_length,),
    right-padded, or unpadded with ``pad_mode=no_padding``. Columns of the file: ``data.messages_key``, and optionally
    ``data.tools_key`` (a list, or its JSON text), ``data.enable_thinking_key``, and ``data.image_key`` for a model with
    images. Then ``position_ids`` are (4, length), see :mod:`verl.vision.positions`, and ``multi_modal_inputs`` holds
    what the image processor made. Images are decoded on opening; a row with one that cannot be read is left out, and
    named in a warning. A conversation with images is never cut.

    A subclass may read ``self.parquet_files`` by itself in ``_read_files_and_process``, which sets ``self.dataframe``
    to the rows, and make the messages of a row in ``_build_messages``. It reads its own keys from ``self.config``.

    Args:
        parquet_files: one path or several (json and jsonl too); globs, ``~`` and ``$VARIABLES`` are expanded.
        tokenizer: has a chat template and a pad token.
        config: the ``data`` section of a supervised run, typed or as composed, or a mapping with any part of it.
        processor: the model's, if it takes images; without one rows with images are refused.
        max_samples: number of conversations to keep, -1 for all: a random choice by ``data.seed`` if ``data.shuffle``,
            else the first.

    Raises:
        DataError: a file or a row cannot be used, or ``data.truncation`` is ``error`` and a conversation is longer than
            ``data.max_length``.
        ConfigError: the tokenizer has no chat template, or one whose turns have no end.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: SFTDataConfig | Mapping[str, object],
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        require_usable(tokenizer)
        require_turn_ends(tokenizer)
        self.tokenizer, self.processor, self.max_samples = tokenizer, processor, max_samples
        self.config: Any = config if isinstance(config, BaseConfig | DictConfig) else OmegaConf.create({**config})
        self.parquet_files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self.use_settings(SFTDataConfig.from_mapping(config))
        self.images = PromptImages(processor, self.image_key, self.video_key)
        self._download()
        self._read_files_and_process()
        self._open()

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a class with methods that nothing would call.

        Raises:
            ConfigError: names the first one.
        """
        super().__init_subclass__(**kwargs)
        for name in ("_process_single_message", "sanity_check"):
            if hasattr(cls, name) and cls.__getitem__ is MultiTurnSFTDataset.__getitem__:
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: verl's own __getitem__ does not use it. Replace "
                    "__getitem__ too, which may call it, or make the messages of a row in _build_messages."
                )

    def use_settings(self, settings: SFTDataConfig) -> None:
        """Read rows by other settings from now on, and set the attributes that subclasses read."""
        config, self.settings = self.config, settings
        self.pad_mode, self.max_length = settings.pad_mode, settings.max_length
        self.truncation: Truncation = settings.truncation
        self.messages_key, self.tools_key = settings.messages_key, settings.tools_key
        self.enable_thinking_key = settings.enable_thinking_key
        self.enable_thinking_default = config.get("enable_thinking_default", None)
        self.image_key, self.video_key = settings.image_key, VIDEO_COLUMN
        self.image_patch_size = config.get("image_patch_size", DEFAULT_PATCH_SIZE)
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs)
        self.ignore_input_ids_mismatch = settings.ignore_input_ids_mismatch
        self.shuffle, self.seed, self.use_shm = settings.shuffle, settings.seed, settings.use_shm

    _assigned: Any = None
    """Rows of a subclass."""
    _is_open = False

    @property
    def dataframe(self) -> Any:
        """The rows of the items, in order, as a ``pandas.DataFrame``; assigned ones replace those of the files."""
        if not self._is_open:
            return self._assigned
        return self._table

    @dataframe.setter
    def dataframe(self, rows: object) -> None:
        self._assigned = rows
        if self._is_open:
            self._open()

    @functools.cached_property
    def _table(self) -> Any:
        import pandas

        return pandas.DataFrame([self._locate(item)[1] for item in range(len(self))])

    @property
    def messages(self) -> list[Any]:
        """The conversation of each item, as its row has it."""
        return [self._locate(item)[1][self.messages_key] for item in range(len(self))]

    @property
    def tools(self) -> list[Any] | None:
        """The tools of each item; None if no file has the column."""
        return self._optional_column(self.tools_key)

    @property
    def enable_thinking(self) -> list[Any] | None:
        """The template's switch for thinking of each item; None if no file has the column."""
        return self._optional_column(self.enable_thinking_key)

    def _optional_column(self, name: str | None) -> list[Any] | None:
        if name is None or not any(name in file.columns for file in self.files):
            return None
        return [self._locate(item)[1].get(name) for item in range(len(self))]

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """The tokens that the template puts before the first message."""
        return extract_system_prompt_and_generation(self.tokenizer, **self.apply_chat_template_kwargs)[0]

    @functools.cached_property
    def generation_prompt(self) -> list[int]:
        """The tokens that open an answer."""
        return extract_system_prompt_and_generation(self.tokenizer, **self.apply_chat_template_kwargs)[1]

    def _open(self) -> None:
        vars(self).pop("_table", None)
        rows = self._assigned
        self.files: list[DataFile] = (
            open_files(self.parquet_files, "parquet_files")
            if rows is None
            else [RowsInMemory(rows, f"{type(self).__name__}.dataframe")]
        )
        if not self._builds_messages:
            require_columns(self.files, self.needed_columns())
        for file in self.files:
            self.images.refuse_media(file)
        self.rows = choose_rows(self.files, self.max_samples, self.shuffle, self.seed)
        self._is_open = True
        self._check_conversations()

    def _download(self) -> None:
        """Do nothing: ``data.train_files`` on other machines are copied before a data set is made."""

    def _read_files_and_process(self) -> None:
        """Read ``self.parquet_files`` in a subclass, which sets ``self.dataframe``; verl's are read afterwards."""

    def _build_messages(self, example: Row) -> list[Message]:
        """Return the messages of a row, with images as parts, as the chat template takes them."""
        where = f"a row of {type(self).__name__}"
        return self.images.opened(self.conversation(example, where), where).messages

    @property
    def _builds_messages(self) -> bool:
        return type(self)._build_messages is not MultiTurnSFTDataset._build_messages

    def needed_columns(self) -> dict[str, str]:
        """Required columns, each with the setting that names it."""
        return {self.messages_key: "messages_key"}

    def conversation(self, row: Row, where: str) -> ImagePrompt:
        """The messages of a row, checked, and its images."""
        messages = self._build_messages(dict(row)) if self._builds_messages else row[self.messages_key]
        prompt = self.images.prompt(messages, row, where)
        for index, message in enumerate(prompt.messages):
            if message["role"] == "assistant" and isinstance(message["content"], list):
                raise DataError(
                    f"{where}: message {index}, of the assistant, has an image or a video. A model answers with text; "
                    "put it into a message before it."
                )
        return prompt

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Item:
        where = self.place(item)
        ids, mask, images = self._sequence(item)
        # Cut as pairs, so that ids and mask lose the same places.
        truncation = "error" if images else self.truncation
        pairs = truncate(list(zip(ids, mask, strict=True)), self.max_length, truncation, where, "max_length")
        columns = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        length = len(pairs) if self.pad_mode == "no_padding" else self.max_length
        padded = right_pad(columns[:, 0], columns[:, 1], length, self.tokenizer.pad_token_id)
        if self.images.maker is not None:
            image_columns = dict(self.images.columns(images, [int(token) for token in columns[:, 0]], where))
            padded["position_ids"] = right_padded(image_columns.pop("positions"), length)
            padded["multi_modal_inputs"] = SharedTensors(image_columns)
        return padded

    def place(self, item: int) -> str:
        """File and row of an item, for error messages."""
        return self._locate(item)[0]

    def texts(self, item: int) -> list[str]:
        """The rendered conversation, in a list of one."""
        where, row = self._locate(item)
        kwargs = self._template_kwargs(row, where)
        conversation = self.images.opened(self.conversation(row, where), where)
        return [render_conversation(conversation.messages, self.tokenizer, where, **kwargs)]

    def sequences(self, item: int) -> list[tuple[list[int], list[int]]]:
        """Token ids and loss mask before truncation, in a list of one."""
        return [self._sequence(item)[:2]]

    def row_images(self, item: int) -> RowImages:
        """The images of an item, as they were measured when the files were opened."""
        where, row = self._locate(item)
        return self.images.read_counts(self.rows[item], self.conversation(row, where))

    def _sequence(self, item: int) -> tuple[list[int], list[int], list[Picture]]:
        """Token ids and loss mask before truncation, and the decoded images."""
        where, row = self._locate(item)
        conversation = self.images.opened(self.conversation(row, where), where)
        ids, mask = mask_assistant(
            conversation.messages,
            self.tokenizer,
            where,
            strict=not self.ignore_input_ids_mismatch,
            **self._template_kwargs(row, where),
        )
        images, counts = self.images.read(conversation, where)
        return *self.images.expanded(ids, mask, counts, where), images

    def _locate(self, item: int) -> tuple[str, Row]:
        return self._at(self.rows[item])

    def _at(self, row: tuple[int, int]) -> tuple[str, Row]:
        file, row_index = row
        return f"{self.files[file].path}, row {row_index}", self.files[file].row(row_index)

    def _template_kwargs(self, row: Row, where: str) -> dict[str, Any]:
        row_kwargs = row_template_kwargs(row, self.tools_key, self.enable_thinking_key, self.tokenizer, where)
        return self.apply_chat_template_kwargs | row_kwargs

    def _check_conversations(self) -> None:
        """Check the messages of every row, and the lengths of those that are not cut; leave out broken images."""
        cuts = self.truncation != "error"
        checks = ContentChecks(self.tokenizer, "conversations")
        usable: list[tuple[int, int]] = []
        must_fit: list[str] = []
        texts: list[str] = []
        added: list[int] = []
        measured = self.images.measured(self._conversations(checks), DECODERS, self.max_length)
        for row_id, conversation, image_tokens in measured:
            usable.append(row_id)
            if not cuts or conversation.images:
                where, row = self._at(row_id)
                must_fit.append(where)
                kwargs = self._template_kwargs(row, where)
                texts.append(render_conversation(conversation.messages, self.tokenizer, where, **kwargs))
                added.append(image_tokens)
        if not self.ignore_input_ids_mismatch:
            checks.refuse("lost text")
        checks.report()
        self.rows = usable
        limit = self.max_length
        lengths = [sum(n) for n in zip(token_lengths(texts, self.tokenizer), added, strict=True)]
        too_long = [(n, where) for n, where in zip(lengths, must_fit, strict=True) if n > limit]
        if too_long:
            length, where = too_long[0]
            why = "conversations with images are never cut" if cuts else "truncation is 'error'"
            cut = "take these rows out" if cuts else "set truncation to left, right or middle"
            raise DataError(
                f"{len(too_long)} of {len(self)} conversations are longer than max_length={limit} and {why}: the first "
                f"is {where} with {length} tokens, the longest has {max(n for n, _ in too_long)}. Raise max_length, or "
                f"{cut}."
            )

    def _conversations(self, checks: ContentChecks) -> Iterator[tuple[tuple[int, int], str, ImagePrompt]]:
        """Yield file and row number, place, and conversation of each row, checked."""
        for row_id in self.rows:
            where, row = self._at(row_id)
            conversation = self.conversation(row, where)
            require_learnable(conversation.plain, where)
            require_written_calls(conversation.plain, self.tokenizer, where)
            kwargs = self._template_kwargs(row, where)
            checks.conversation(conversation.plain, where)
            strict = not self.ignore_input_ids_mismatch
            if lost := lost_text(conversation.plain, self.tokenizer, where, strict, **kwargs):
                checks.add("lost text", where, lost)
            yield row_id, where, conversation


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


def right_padded(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Pad M-RoPE positions, (4, tokens), at the right to (4, length) with those of the last token."""
    return positions[:, torch.arange(length).clamp(max=positions.shape[1] - 1)]


def sft_collate_fn(
    tokenizer: Any, config: SFTDataConfig
) -> Callable[[list[Item]], dict[str, torch.Tensor | np.ndarray]]:
    """Return a collate function that right-pads items to the longest and stacks them."""
    return functools.partial(pad_to_longest, pad_token_id=tokenizer.pad_token_id)


def pad_to_longest(items: list[Item], pad_token_id: int) -> dict[str, torch.Tensor | np.ndarray]:
    """Collate items into columns of shape (bsz, longest)."""
    longest = max(len(item["input_ids"]) for item in items)
    padded = [right_pad(item["input_ids"], item["loss_mask"], longest, pad_token_id) for item in items]
    columns: dict[str, torch.Tensor | np.ndarray] = {
        key: torch.stack([item[key] for item in padded]) for key in padded[0]
    }
    if "multi_modal_inputs" in items[0]:
        columns["position_ids"] = torch.stack([right_padded(item["position_ids"], longest) for item in items])
        images = [item["multi_modal_inputs"] for item in items]
        columns["multi_modal_inputs"] = np.fromiter(images, dtype=object, count=len(images))
    return columns
