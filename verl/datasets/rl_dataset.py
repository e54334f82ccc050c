"""Prompts for RL: file rows to token ids, items to batches.

Columns of a file (only ``prompt`` is required; others are passed on)::

    data_source   str                      selects the scorer and the validation metric
    prompt        [{role, content}, ...]   or a plain string: one user message
    reward_model  {style, ground_truth}    reference for the scorer
    images        [image, ...]             where the messages have <image>; for models with an image processor
    videos        [video, ...]             where they have <video>; the same models
    tools         [{type, function}, ...]  descriptions of tools that the prompt shows
    enable_thinking  bool                  variable of the chat template
    extra_info    {index, split, ...}      free; also holds tools_kwargs, interaction_kwargs, environment_kwargs

``data.reward_fn_key``, ``data.prompt_key``, ``data.tools_key`` and ``data.enable_thinking_key`` select other names.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import pad
from torch.utils.data import Dataset

from verl.config import BaseConfig, DataConfig
from verl.config.data import Truncation
from verl.datasets.chat import (
    Message,
    encode,
    render_prompt,
    require_usable,
    token_lengths,
    truncate,
)
from verl.datasets.content_checks import ContentChecks
from verl.datasets.files import (
    DataFile,
    Row,
    RowsInMemory,
    RowsOfFiles,
    choose_rows,
    in_order,
    open_files,
    require_columns,
)
from verl.datasets.prompt_images import ImagePrompt, PromptImages, RowImages
from verl.datasets.row_conversation import require_written_calls, row_template_kwargs
from verl.errors import DataError
from verl.protocol.shared import SharedTensors
from verl.schema import COLUMNS
from verl.utils.control_tokens import plain
from verl.vision.positions import left_padded

if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)

DATA_COLUMNS = (
    "data_source",
    "ability",
    "reward_model",
    "extra_info",
    "index",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
    "environment_kwargs",
    "ground_truth_answers",
)
"""Columns of a batch that may come from a file."""
FOR_AGENTS = ("tools_kwargs", "interaction_kwargs", "environment_kwargs")
"""Columns for agent loops, from ``extra_info`` or a column of the file; carried along."""
MADE_HERE = {*COLUMNS, "raw_prompt_ids", "full_prompts", "reward_status"} - set(DATA_COLUMNS)
"""Columns that a run makes itself, and would otherwise find with the file's values."""
UNKNOWN_SOURCE = "unknown"
DEFAULT_PATCH_SIZE = 14


class RLHFDataset(Dataset):
    """Prompts, tokenized and left-padded to ``data.max_prompt_length``.

    Data errors are raised on opening, so that no run stops half-way: the messages of every row are checked, and every
    prompt's length is measured (unless ``data.truncation`` cuts long prompts and the filter is off).

    Images and videos are decoded on opening; a row with one that cannot be read is left out, and named in a warning. A
    prompt with any is never cut: one that is too long is dropped by the filter or refused.

    An item holds ``input_ids``, ``attention_mask``, ``position_ids`` (each (max_prompt_length,) int64), ``index``
    (``extra_info.index``, else a column ``index`` of the file, else ``row_index``), ``row_index`` (the item's number),
    ``data_source``, ``extra_info``, ``tools_kwargs``, ``interaction_kwargs``, ``environment_kwargs``, every other
    column of the file unchanged, and by config ``raw_prompt`` (messages), ``raw_prompt_ids`` (unpadded),
    ``full_prompts`` (text). For a model with images ``position_ids`` are (4, max_prompt_length), see
    :mod:`verl.vision.positions`, and ``multi_modal_inputs`` holds what the image processor made, which is empty for a
    row of text.

    A subclass may read ``self.data_files`` by itself, folders and names too, in ``_read_files_and_tokenize``, which
    sets ``self.dataframe`` to the rows; make the messages of a row in ``_build_messages``; and leave out rows in
    ``maybe_filter_out_long_prompts`` instead of verl's filter. It reads its own keys from ``self.config``. Without a
    column of prompts it makes its items in ``__getitem__``.

    Args:
        data_files: one path or several; globs, ``~`` and ``$VARIABLES`` are expanded.
        tokenizer: has a chat template and a pad token; None for a subclass that makes its rows and items by itself.
        config: the ``data`` section, typed or as composed, or a mapping with any part of it.
        processor: the model's, if it takes images; without one rows with images are refused.
        max_samples: number of prompts to keep, -1 for all: a random choice by ``data.seed`` if ``data.shuffle``, else
            the first.

    Raises:
        DataError: a file or a row cannot be used.
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DataConfig | Mapping[str, object],
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        if not self._replaces("_read_files_and_tokenize") or tokenizer is not None:  # rows in memory need none
            require_usable(tokenizer)
        self.tokenizer, self.processor, self.max_samples = tokenizer, processor, max_samples
        self.config: Any = config if isinstance(config, BaseConfig | DictConfig) else OmegaConf.create({**config})
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.use_settings(DataConfig.from_mapping(config))
        self._download()
        self._read_files_and_tokenize()
        self._is_open = True
        if self._opens_files or self._assigned is not None:  # else the subclass assigns its rows later
            self._open()

    def use_settings(self, settings: DataConfig) -> None:
        """Read rows by other settings from now on, and set the attributes that subclasses read."""
        config, self.settings = self.config, settings
        self.prompt_key: str = settings.prompt_key
        self.image_key, self.video_key, self.audio_key = settings.image_key, settings.video_key, "audios"
        self.image_patch_size = config.get("image_patch_size", DEFAULT_PATCH_SIZE)
        self.max_prompt_length: int = settings.max_prompt_length
        self.truncation: Truncation = settings.truncation
        self.return_raw_chat, self.return_full_prompt = settings.return_raw_chat, settings.return_full_prompt
        self.return_multi_modal_inputs = config.get("return_multi_modal_inputs", True)
        self.filter_overlong_prompts: bool = settings.filter_overlong_prompts
        self.filter_prompts = config.get("filter_prompts", True)
        self.num_workers = settings.filter_overlong_prompts_workers or 1
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs or {})
        self.mm_processor_kwargs = config.get("mm_processor_kwargs", {})
        self.chat_template_func = config.get("chat_template_func", None)
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.tool_config_path = config.get("tool_config_path", None)
        self.function_tool_path = config.get("function_tool_path", None)
        self.tool_schemas = self.apply_chat_template_kwargs.get("tools")
        self.shuffle, self.seed, self.use_shm = settings.shuffle, settings.seed, settings.use_shm
        self.cache_dir = os.path.expanduser(config.get("cache_dir", None) or "~/.cache/verl/rlhf")
        self.serialize_dataset = False

    # Cached, so that they are there too for an ``__init__`` of a subclass that does not call this class's.

    @functools.cached_property
    def settings(self) -> DataConfig:
        """The settings of :attr:`config` that verl reads."""
        return DataConfig.from_mapping(self.config)

    @functools.cached_property
    def images(self) -> PromptImages:
        """Return the reader of the rows' images."""
        return PromptImages(self.processor, self.image_key, self.video_key)

    @functools.cached_property
    def checks(self) -> ContentChecks:
        """Return the collector of warnings about the prompts."""
        return ContentChecks(self.tokenizer, "prompts")

    @functools.cached_property
    def files(self) -> list[DataFile]:
        """The files, or the rows of a subclass in the place of one."""
        if self._assigned is not None:
            return [RowsInMemory(self._assigned, f"{type(self).__name__}.dataframe")]
        if not self._opens_files:
            raise DataError(
                f"{type(self).__name__}._read_files_and_tokenize reads the files instead of verl and must set "
                "self.dataframe: a list of dicts, a datasets.Dataset or a pandas.DataFrame of the rows."
            )
        return open_files(self.data_files, "data_files")

    @functools.cached_property
    def columns(self) -> list[str]:
        """Columns of all files."""
        return list(dict.fromkeys(name for file in self.files for name in file.columns))

    @functools.cached_property
    def rows(self) -> list[tuple[int, int]]:
        """File and row number of each item."""
        config = self.settings
        rows = choose_rows(self.files, self.max_samples, config.shuffle, config.seed)
        if self._replaces("__getitem__") and self.prompt_key not in self.columns:
            return rows
        require_columns(self.files, {self.prompt_key: "prompt_key"} if not self._replaces("_build_messages") else {})
        if config.reward_fn_key != "data_source":
            require_columns(self.files, {config.reward_fn_key: "reward_fn_key"})
        self._refuse_unusable_columns()
        return self._usable(rows)

    tokenizer: Any
    _assigned: Any = None
    """Rows of a subclass."""
    _opens_files = _is_open = False

    @property
    def dataframe(self) -> Any:
        """The rows of the items, in order; assigned ones take the place of those of the files."""
        return RowsOfFiles(self.files, self.rows) if self._assigned is None else self._assigned

    @dataframe.setter
    def dataframe(self, rows: object) -> None:
        self._assigned = rows
        for name in ("files", "columns", "rows"):
            vars(self).pop(name, None)
        if self._is_open:
            self._open()

    def _open(self) -> None:
        order = [row_index for _, row_index in self.rows]
        if self._assigned is not None:
            self._assigned = in_order(self._assigned, order)

    def _replaces(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(RLHFDataset, name)

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: ``data.train_files`` on other machines are copied before a data set is made."""

    def _read_files_and_tokenize(self) -> None:
        """Open the files; a subclass may read ``self.data_files`` by itself instead, and sets ``self.dataframe``."""
        self._opens_files = True
        if self._replaces("maybe_filter_out_long_prompts"):
            rows = RowsOfFiles(self.files, choose_rows(self.files, -1, shuffle=False, seed=None))
            self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: object = None) -> object:
        """Return the rows as they are: prompts that are too long are left out when the data set has its rows."""
        return dataframe

    def resume_dataset_state(self) -> None:
        """Do nothing: a data set that was pickled has all of its rows."""

    def _build_messages(self, example: Row, key: str | None = None) -> list[Message]:
        """Return the messages of a row, with images and videos as parts, as the chat template takes them."""
        where = f"a row of {type(self).__name__}"
        prompt = self.images.prompt(example[key or self.prompt_key], example, where)
        return self.images.opened(prompt, where).messages

    def _image_prompt(self, source: Row, where: str) -> ImagePrompt:
        """The checked messages of a row; a subclass may make them."""
        if not self._replaces("_build_messages"):
            return self.images.prompt(source[self.prompt_key], source, where)
        takes_key = "key" in inspect.signature(self._build_messages).parameters
        messages = self._build_messages(dict(source), **({"key": self.prompt_key} if takes_key else {}))
        return self.images.prompt(messages, source, where)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, object]:
        where = self.place(item)
        source = self.source_row(item)
        prompt = self._prompt(source, where)
        text = self._render(prompt, self.rows[item])
        longest = self.max_prompt_length
        ids = encode(text, self.tokenizer)
        row = self._side_columns(item, source)
        images, counts = self.images.read(prompt, where)
        if images:
            ids = self._expanded(ids, counts)
        truncation = "error" if images else self.truncation
        ids = truncate(ids, longest, truncation, f"{where}: the prompt", "max_prompt_length")
        row.update(left_pad(ids, longest, self.tokenizer.pad_token_id))
        if self.images.maker is not None:
            image_columns = dict(self.images.columns(images, ids, where))
            row["position_ids"] = left_padded(image_columns.pop("positions"), longest)
            row["multi_modal_inputs"] = SharedTensors(image_columns)
        if self.return_raw_chat:
            row["raw_prompt"] = prompt.messages
        if self.settings.return_raw_input_ids:
            row["raw_prompt_ids"] = ids
        if self.return_full_prompt:
            row["full_prompts"] = plain(text)
        return row

    def _prompt(self, source: Row, where: str) -> ImagePrompt:
        return self.images.opened(self._image_prompt(source, where), where)

    def _render(self, prompt: ImagePrompt, row: tuple[int, int]) -> str:
        return render_prompt(prompt.messages, self.tokenizer, self._place(row), **self._template_kwargs(row))

    def _template_kwargs(self, row: tuple[int, int]) -> dict[str, object]:
        """The variables of the chat template of the run, and those of the row."""
        (file, row_index), config = row, self.settings
        if not {config.tools_key, config.enable_thinking_key}.intersection(self.files[file].columns):
            return self.apply_chat_template_kwargs
        where, source = self._place(row), self.files[file].row(row_index)
        row_kwargs = row_template_kwargs(source, config.tools_key, config.enable_thinking_key, self.tokenizer, where)
        if "tools" in row_kwargs and "tools" in self.apply_chat_template_kwargs:
            raise DataError(
                f"{where} has {config.tools_key}, but the prompts already show the tools of the run "
                "(tool_config_path, function_tool_path, or apply_chat_template_kwargs.tools). Remove one of the "
                "two; tools_key=null ignores the column."
            )
        return self.apply_chat_template_kwargs | row_kwargs

    def _expanded(self, ids: list[int], counts: list[int]) -> list[int]:
        assert self.images.maker is not None
        return self.images.maker.expanded(ids, counts)

    def texts(self, item: int) -> list[str]:
        """The rendered prompt, as :func:`verl.datasets.chat.encode` takes it, in a list of one."""
        return [self._render(self._prompt(self.source_row(item), self.place(item)), self.rows[item])]

    def sequences(self, item: int) -> list[tuple[list[int], list[int]]]:
        """Token ids before truncation and an all-zero loss mask, in a list of one."""
        ids = encode(self.texts(item)[0], self.tokenizer)
        where = self.place(item)
        if counts := self.images.read(self._prompt(self.source_row(item), where), where)[1]:
            ids = self._expanded(ids, counts)
        return [(ids, [0] * len(ids))]

    def row_images(self, item: int) -> RowImages:
        """The images of an item, as they were measured when the files were opened."""
        return self.images.read_counts(self.rows[item], self._prompt(self.source_row(item), self.place(item)))

    def place(self, item: int) -> str:
        """File and row of an item, for error messages."""
        return self._place(self.rows[item])

    def source_row(self, item: int) -> Row:
        """The unchanged row of the file."""
        file, row_index = self.rows[item]
        return self.files[file].row(row_index)

    def source_column(self, name: str) -> Iterator[Any]:
        """One column of the files, for every item in order; None where a file lacks it."""
        return (value for _, value in self._column(name, self.rows))

    def split(self, num_splits: int) -> list[Self]:
        """Split into ``num_splits`` data sets of equal length, in the order of the rows; the files are shared.

        Raises:
            DataError: the rows do not divide into that many parts.
        """
        if num_splits < 1 or len(self) % num_splits:
            raise DataError(
                f"{len(self)} rows do not divide into num_splits={num_splits} equal parts. Use a divisor of the number "
                "of rows, or max_samples to keep fewer rows."
            )
        size, parts = len(self) // num_splits, []
        for first in range(0, len(self), size):
            part = copy.copy(self)
            part._assigned = None
            part.rows = self.rows[first : first + size]
            parts.append(part)
        return parts

    def sources(self) -> list[str]:
        """The data source of every item, in order."""
        return [value or UNKNOWN_SOURCE for value in self.source_column(self.settings.reward_fn_key)]

    def require_columns(self, sources: dict[str, str]) -> None:
        """Check that every file has the columns; see :func:`verl.datasets.files.require_columns`."""
        require_columns(self.files, sources)

    def _side_columns(self, item: int, source: Row) -> Row:
        row = dict.fromkeys(self.columns) | source
        for key in (self.prompt_key, *self.images.keys):
            row.pop(key, None)
        row["extra_info"] = extra = row.get("extra_info") or {}
        row["data_source"] = row.get(self.settings.reward_fn_key) or UNKNOWN_SOURCE
        own_index = item if source.get("index") is None else source["index"]  # pandas often writes such a column
        row["index"] = extra.get("index", own_index)
        row["row_index"] = item
        for key in FOR_AGENTS:
            row[key] = extra.get(key) or row.get(key) or {}
        return row

    # ---- checks at opening ----------------------------------------------------------------------

    def _refuse_unusable_columns(self) -> None:
        for file in self.files:
            reserved = [name for name in file.columns if name in MADE_HERE and name != self.prompt_key]
            if reserved:
                raise DataError(f"{file.path} has columns that a run makes itself: {', '.join(reserved)}. Rename them.")
            self.images.refuse_media(file)

    def _place(self, row: tuple[int, int]) -> str:
        file, row_index = row
        return f"{self.files[file].path}, row {row_index}"

    def _column(self, name: str, rows: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Any]]:
        """Places and values of one column; None where a file lacks it."""
        files = {file: self.files[file] for file in {file for file, _ in rows}}
        columns = {n: list(file.column(name)) if name in file.columns else None for n, file in files.items()}
        for file, row_index in rows:
            column = columns[file]
            yield self._place((file, row_index)), None if column is None else column[row_index]

    def _prompts(self, rows: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], str, ImagePrompt]]:
        if self._replaces("_build_messages"):  # which may read any column
            sources = ((self._place(row), self.files[row[0]].row(row[1])) for row in rows)
        else:
            sources = self._columns_of_prompts(rows)
        for row, (where, source) in zip(rows, sources, strict=True):
            prompt = self._image_prompt(source, where)
            require_written_calls(prompt.plain, self.tokenizer, where)
            self.checks.prompt(prompt.plain, where)
            yield row, where, prompt

    def _columns_of_prompts(self, rows: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Row]]:
        names = (self.prompt_key, self.image_key, self.video_key)
        for values in zip(*(self._column(name, rows) for name in names), strict=True):
            yield values[0][0], dict(zip(names, (value for _, value in values), strict=True))

    def _check_side_columns(self, rows: Sequence[tuple[int, int]]) -> None:
        key = self.settings.reward_fn_key
        for where, source in self._column(key, rows):
            if source is not None and not isinstance(source, str):
                raise DataError(
                    f"{where}: {key} is {type(source).__name__} {source!r:.80}, not text. It names the data source, "
                    "by which a scorer is chosen."
                )
        for where, extra in self._column("extra_info", rows):
            if extra and not isinstance(extra, dict):
                raise DataError(f"{where}: extra_info is {type(extra).__name__} {extra!r:.80}, not a dict.")
            if extra and extra.get("need_tools_kwargs") and not extra.get("tools_kwargs"):
                raise DataError(
                    f"{where}: extra_info.need_tools_kwargs is true, but extra_info.tools_kwargs is empty. "
                    "Give the tools' arguments or set need_tools_kwargs to false."
                )

    def _usable(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Check the prompts of ``rows`` (pairs of file number and row number); return those that the filter keeps."""
        usable = self._fitting(rows)
        self.checks.report()
        return usable

    def _fitting(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self._check_side_columns(rows)
        workers = self.num_workers
        cuts = not self._filters and self.truncation != "error"
        readable, must_fit, texts, added = [], [], [], []
        for row, prompt, image_tokens in self.images.measured(self._prompts(rows), workers, self.max_prompt_length):
            readable.append(row)
            self._template_kwargs(row)
            if not cuts or prompt.images:
                must_fit.append(row)
                texts.append(self._render(prompt, row))
                added.append(image_tokens)
        if not must_fit:
            return readable
        lengths = [sum(n) for n in zip(token_lengths(texts, self.tokenizer, workers), added, strict=True)]
        return self._without_long(readable, dict(zip(must_fit, lengths, strict=True)))

    @property
    def _filters(self) -> bool:
        return self.filter_overlong_prompts and not self._replaces("maybe_filter_out_long_prompts")

    def _without_long(
        self, rows: list[tuple[int, int]], lengths: Mapping[tuple[int, int], int]
    ) -> list[tuple[int, int]]:
        """Drop the rows whose prompts are too long; ``lengths`` are the tokens of those that must not be cut."""
        limit = self.max_prompt_length
        long = [row for row, length in lengths.items() if length > limit]
        if not long:
            return rows
        longest = max(lengths.values())
        if len(long) == len(rows) and not vars(self).get("rows"):
            raise DataError(
                f"all {len(long)} prompts are longer than max_prompt_length={limit}: the shortest has "
                f"{min(lengths.values())} tokens, the longest {longest} (with the chat template). "
                f"Set max_prompt_length to {longest} to keep them all."
            )
        if not self._filters:
            why = "truncation is 'error'" if self.truncation == "error" else "prompts with images are never cut"
            cut = ", or set truncation to left, right or middle" if self.truncation == "error" else ""
            raise DataError(
                f"{len(long)} of {len(rows)} prompts are longer than max_prompt_length={limit} and {why}: the first is "
                f"{self._place(long[0])} with {lengths[long[0]]} tokens, the longest has {longest}. Raise "
                f"max_prompt_length, drop them with filter_overlong_prompts=true{cut}."
            )
        dropped = set(long)
        logger.info(
            "filter_overlong_prompts: kept %d of %d prompts, those of at most %d tokens; the longest had %d",
            len(rows) - len(dropped),
            len(rows),
            limit,
            longest,
        )
        return [row for row in rows if row not in dropped]


def left_pad(ids: list[int], length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Left-pad token ids to ``length``, with attention mask and position ids.

    >>> left_pad([7, 8], 4, pad_token_id=0)
    {'input_ids': tensor([0, 0, 7, 8]), 'attention_mask': tensor([0, 0, 1, 1]), 'position_ids': tensor([0, 0, 0, 1])}
    """
    padding = (length - len(ids), 0)
    return {
        "input_ids": pad(torch.tensor(ids, dtype=torch.int64), padding, value=pad_token_id),
        "attention_mask": pad(torch.ones(len(ids), dtype=torch.int64), padding),
        "position_ids": pad(torch.arange(len(ids)), padding),
    }


def collate_fn(data_list: list[Row]) -> dict[str, torch.Tensor | np.ndarray]:
    """Turn items into columns: tensors are stacked to (bsz, ...), other values become object arrays (bsz,).

    Raises:
        DataError: the items have different columns, or tensors of different shapes.
    """
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for row in data_list:
        if row.keys() != data_list[0].keys():
            differing = ", ".join(sorted(row.keys() ^ data_list[0].keys()))
            raise DataError(
                f"some items of the data set have {differing} and some do not. Give None where there is no value."
            )
    for key in data_list[0]:
        values = [row[key] for row in data_list]
        if isinstance(values[0], torch.Tensor):
            if len({value.shape for value in values}) > 1:
                shapes = ", ".join(sorted({str(tuple(value.shape)) for value in values}))
                raise DataError(f"column '{key}' has tensors of the shapes {shapes}; pad the items to one length.")
            batch[key] = torch.stack(values)
        else:
            # np.array would turn lists of equal length into a matrix.
            batch[key] = np.fromiter(values, dtype=object, count=len(values))
    return batch


def check_item(item: object, dataset: str) -> None:
    """Check an item of a data set of the user's own.

    Args:
        item: what ``dataset[0]`` gave.
        dataset: name of its class, for the message.

    Raises:
        DataError: it is no dict, lacks one of the tensors of a prompt, or has a column that the run makes.
    """
    names = ("input_ids", "attention_mask", "position_ids")
    if not isinstance(item, Mapping):
        raise DataError(f"{dataset}: an item is {type(item).__name__}, not a dict of columns.")
    tensors = {name for name, value in item.items() if isinstance(value, torch.Tensor)}
    if missing := [name for name in names if name not in tensors]:
        raise DataError(
            f"{dataset}: an item has no tensor {', '.join(missing)}; it has {', '.join(map(str, item))}. A prompt is "
            "input_ids, attention_mask and position_ids, int64 tensors padded on the left to one length: "
            "verl.utils.dataset.rl_dataset.left_pad makes them from token ids."
        )
    run_columns = {*MADE_HERE} - {*names, "raw_prompt", "raw_prompt_ids", "full_prompts", "row_index", "dummy_tensor"}
    if reserved := sorted(run_columns & set(item)):
        raise DataError(f"{dataset}: an item has {', '.join(reserved)}, which the run makes itself. Rename it.")
