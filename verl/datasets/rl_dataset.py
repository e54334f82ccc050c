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
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from verl.config import DataConfig
from verl.datasets.chat import (
    encode,
    render_prompt,
    require_usable,
    token_lengths,
    truncate,
)
from verl.datasets.content_checks import ContentChecks
from verl.datasets.files import DataFile, Row, RowsInMemory, choose_rows, open_files, require_columns
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

OF_DATA = (
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
MADE_HERE = {*COLUMNS, "raw_prompt_ids", "full_prompts", "reward_status"} - set(OF_DATA)
"""Columns that a run makes itself, and would otherwise find with the file's values."""
UNKNOWN_SOURCE = "unknown"


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

    A subclass that defines ``_read_files_and_tokenize`` reads ``self.data_files`` by itself, folders and names too, and
    sets ``self.dataframe`` to the rows.

    Args:
        data_files: one path or several; globs, ``~`` and ``$VARIABLES`` are expanded.
        tokenizer: has a chat template and a pad token.
        config: the ``data`` section, or a mapping with any part of it.
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
        require_usable(tokenizer)
        self.tokenizer = tokenizer
        self.config = config = DataConfig.of(config)
        self.template_kwargs = dict(config.apply_chat_template_kwargs or {})
        self.images = PromptImages(processor, config.image_key, config.video_key)
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.files: list[DataFile] = self._opened()
        require_columns(self.files, {config.prompt_key: "prompt_key"})
        if config.reward_fn_key != "data_source":
            require_columns(self.files, {config.reward_fn_key: "reward_fn_key"})
        self._refuse_unusable_columns()
        self.columns = list(dict.fromkeys(name for file in self.files for name in file.columns))
        self.checks = ContentChecks(tokenizer, "prompts")
        self.rows: list[tuple[int, int]] = []
        self.rows = self._usable(choose_rows(self.files, max_samples, config.shuffle, config.seed))

    def _opened(self) -> list[DataFile]:
        if type(self)._read_files_and_tokenize is RLHFDataset._read_files_and_tokenize:
            return open_files(self.data_files, "data_files")
        self._read_files_and_tokenize()
        name, dataframe = type(self).__name__, vars(self).get("dataframe")
        if dataframe is None:
            raise DataError(
                f"{name}._read_files_and_tokenize reads the files instead of verl and must set self.dataframe: a "
                "list of dicts, a datasets.Dataset or a pandas.DataFrame of the rows."
            )
        return [RowsInMemory(dataframe, f"{name}.dataframe")]

    def _read_files_and_tokenize(self) -> None:
        """Read ``self.data_files``, which may be folders or names, in a subclass; it sets ``self.dataframe``."""

    def maybe_filter_out_long_prompts(self, dataframe: object = None) -> object:
        """Return the rows as they are: prompts that are too long are left out when the data set has its rows."""
        return dataframe

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, object]:
        where = self.place(item)
        source = self.source_row(item)
        prompt = self._prompt(source, where)
        text = self._render(prompt, self.rows[item])
        longest = self.config.max_prompt_length
        ids = encode(text, self.tokenizer)
        row = self._side_columns(item, source)
        images, counts = self.images.read(prompt, where)
        if images:
            ids = self._expanded(ids, counts)
        truncation = "error" if images else self.config.truncation
        ids = truncate(ids, longest, truncation, f"{where}: the prompt", "max_prompt_length")
        row.update(left_pad(ids, longest, self.tokenizer.pad_token_id))
        if self.images.maker is not None:
            made = dict(self.images.columns(images, ids, where))
            row["position_ids"] = left_padded(made.pop("positions"), longest)
            row["multi_modal_inputs"] = SharedTensors(made)
        if self.config.return_raw_chat:
            row["raw_prompt"] = prompt.messages
        if self.config.return_raw_input_ids:
            row["raw_prompt_ids"] = ids
        if self.config.return_full_prompt:
            row["full_prompts"] = plain(text)
        return row

    def _prompt(self, source: Row, where: str) -> ImagePrompt:
        return self.images.opened(self.images.prompt(source[self.config.prompt_key], source, where), where)

    def _render(self, prompt: ImagePrompt, row: tuple[int, int]) -> str:
        return render_prompt(prompt.messages, self.tokenizer, self._place(row), **self._template_kwargs(row))

    def _template_kwargs(self, row: tuple[int, int]) -> dict[str, object]:
        """The variables of the chat template of the run, and those of the row."""
        (file, row_index), config = row, self.config
        if not {config.tools_key, config.enable_thinking_key}.intersection(self.files[file].columns):
            return self.template_kwargs
        where, source = self._place(row), self.files[file].row(row_index)
        of_row = row_template_kwargs(source, config.tools_key, config.enable_thinking_key, self.tokenizer, where)
        if "tools" in of_row and "tools" in self.template_kwargs:
            raise DataError(
                f"{where} has {config.tools_key}, but the prompts already show the tools of the run "
                "(tool_config_path, function_tool_path, or apply_chat_template_kwargs.tools). Remove one of the "
                "two; tools_key=null ignores the column."
            )
        return self.template_kwargs | of_row

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
        return self.images.of_row(self.rows[item], self._prompt(self.source_row(item), self.place(item)))

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
            part.rows = self.rows[first : first + size]
            parts.append(part)
        return parts

    def sources(self) -> list[str]:
        """The data source of every item, in order."""
        return [value or UNKNOWN_SOURCE for value in self.source_column(self.config.reward_fn_key)]

    def require_columns(self, wanted: dict[str, str]) -> None:
        """Check that every file has the columns; see :func:`verl.datasets.files.require_columns`."""
        require_columns(self.files, wanted)

    def _side_columns(self, item: int, source: Row) -> Row:
        row = dict.fromkeys(self.columns) | source
        for key in (self.config.prompt_key, *self.images.keys):
            row.pop(key, None)
        row["extra_info"] = extra = row.get("extra_info") or {}
        row["data_source"] = row.get(self.config.reward_fn_key) or UNKNOWN_SOURCE
        own_index = item if source.get("index") is None else source["index"]  # pandas often writes such a column
        row["index"] = extra.get("index", own_index)
        row["row_index"] = item
        for key in FOR_AGENTS:
            row[key] = extra.get(key) or row.get(key) or {}
        return row

    # ---- checks at opening ----------------------------------------------------------------------

    def _refuse_unusable_columns(self) -> None:
        for file in self.files:
            taken = [name for name in file.columns if name in MADE_HERE and name != self.config.prompt_key]
            if taken:
                raise DataError(f"{file.path} has columns that a run makes itself: {', '.join(taken)}. Rename them.")
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
        config = self.config
        names = (config.prompt_key, config.image_key, config.video_key)
        for row, *values in zip(rows, *(self._column(name, rows) for name in names), strict=True):
            where = values[0][0]
            source = dict(zip(names, (value for _, value in values), strict=True))
            prompt = self.images.prompt(source[config.prompt_key], source, where)
            require_written_calls(prompt.plain, self.tokenizer, where)
            self.checks.prompt(prompt.plain, where)
            yield row, where, prompt

    def _check_side_columns(self, rows: Sequence[tuple[int, int]]) -> None:
        key = self.config.reward_fn_key
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
        kept = self._fitting(rows)
        self.checks.report()
        return kept

    def _fitting(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        config = self.config
        self._check_side_columns(rows)
        workers = config.filter_overlong_prompts_workers or 1
        cuts = not config.filter_overlong_prompts and config.truncation != "error"
        readable, must_fit, texts, added = [], [], [], []
        for row, prompt, image_tokens in self.images.measured(self._prompts(rows), workers, config.max_prompt_length):
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

    def _without_long(
        self, rows: list[tuple[int, int]], lengths: Mapping[tuple[int, int], int]
    ) -> list[tuple[int, int]]:
        """Drop the rows whose prompts are too long; ``lengths`` are the tokens of those that must not be cut."""
        config, limit = self.config, self.config.max_prompt_length
        long = [row for row, length in lengths.items() if length > limit]
        if not long:
            return rows
        longest = max(lengths.values())
        if len(long) == len(rows) and not self.rows:
            raise DataError(
                f"all {len(long)} prompts are longer than max_prompt_length={limit}: the shortest has "
                f"{min(lengths.values())} tokens, the longest {longest} (with the chat template). "
                f"Set max_prompt_length to {longest} to keep them all."
            )
        if not config.filter_overlong_prompts:
            why = "truncation is 'error'" if config.truncation == "error" else "prompts with images are never cut"
            cut = ", or set truncation to left, right or middle" if config.truncation == "error" else ""
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
    made = {*MADE_HERE} - {*names, "raw_prompt", "raw_prompt_ids", "full_prompts", "row_index", "dummy_tensor"}
    if taken := sorted(made & set(item)):
        raise DataError(f"{dataset}: an item has {', '.join(taken)}, which the run makes itself. Rename it.")
