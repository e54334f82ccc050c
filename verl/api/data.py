"""Rows given as objects or files, written where a run reads them."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.base.types import JsonObject
from verl.errors import DataError
from verl.scorers import row_truth

Rows = Any
"""A list of dicts, a ``datasets.Dataset``, a ``pandas.DataFrame``, a path or a list of paths."""
KINDS = "a list of dicts, a datasets.Dataset, a pandas.DataFrame, or the path of a parquet, json or jsonl file"


@dataclass(frozen=True)
class DataFiles:
    """Files of rows, with what is known of them."""

    paths: list[str]
    columns: list[str]
    count: int
    prompt_key: str
    text_prompts: bool
    """True if the prompts are texts rather than messages."""
    has_truth: bool
    """True if any row has a ground truth, in ``reward_model`` or in a column of its own."""


def as_rows(data: Rows, what: str) -> list[JsonObject]:
    """Return the rows of any kind of data as new dicts.

    Args:
        data: see :data:`Rows`.
        what: the argument that holds it, for error messages.

    Raises:
        DataError: it is none of the kinds, has no rows, or a file cannot be read.
    """
    if isinstance(data, (str, Path)) or (
        _is_list(data) and data and all(isinstance(path, (str, Path)) for path in data)
    ):
        from verl.datasets.files import SUFFIXES, open_files

        paths = [str(path) for path in ([data] if isinstance(data, (str, Path)) else data)]
        if text := next((path for path in paths if not path.endswith(SUFFIXES) and not Path(path).exists()), None):
            raise DataError(
                f"{what}: {text!r:.80} is no file of rows, whose names end in {', '.join(SUFFIXES)}. Of prompts as "
                "texts make rows: [{'prompt': text}, ...]. A data set of the Hugging Face hub is loaded by "
                "datasets.load_dataset(NAME, split='train')."
            )
        files = open_files(paths, what)
        return [file.row(row_index) for file in files for row_index in range(len(file))]
    if hasattr(data, "to_dict") and hasattr(data, "iloc"):
        if not data.columns.is_unique:
            twice = ", ".join(sorted({str(name) for name in data.columns[data.columns.duplicated()]}))
            raise DataError(f"{what} has several columns called {twice}. Rename or drop all but one.")
        rows = data.to_dict("records")
    elif isinstance(data, Mapping):
        splits = ", ".join(map(str, data))
        raise DataError(f"{what} is a {type(data).__name__} of {splits}. Give one of them, or {KINDS}.")
    elif isinstance(data, Iterable):
        if not hasattr(data, "__len__"):
            raise DataError(f"{what} is a {type(data).__name__} without a length. Take as many rows as a run needs.")
        rows = [row for row in data]  # noqa: C416 - a Dataset is no list
    else:
        raise DataError(f"{what} is {type(data).__name__}. Give {KINDS}.")
    if not rows:
        raise DataError(f"{what} has no rows.")
    for row_index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{what}, row {row_index} is {type(row).__name__} {row!r:.80}, not a dict. Give {KINDS}.")
    return [{str(name): value for name, value in row.items()} for row in rows]


def _is_list(data: object) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, (str, bytes))


def write_prompts(rows: Sequence[JsonObject], path: Path, prompt_key: str, what: str) -> DataFiles:
    """Write prompts for reinforcement learning as jsonl, which keeps each row's own keys and types.

    Raises:
        DataError: a row has no prompt, or a value that JSON cannot hold.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if prompt_key not in columns:
        raise DataError(
            f"{what} has no column '{prompt_key}'; its columns are {', '.join(columns)}. The prompt is a text or a "
            "list of messages; prompt_key='NAME' names another column."
        )
    for row_index, row in enumerate(rows):
        if not (isinstance(row.get(prompt_key), str) or hasattr(row.get(prompt_key), "__len__")):
            raise DataError(
                f"{what}, row {row_index}: {prompt_key} is {row.get(prompt_key)!r:.80}. Give a text or a list of "
                "messages."
            )
    write_jsonl(rows, path, what)
    texts = all(isinstance(row.get(prompt_key), str) for row in rows)
    truths = [row_truth(row.get("reward_model"), row.get("ground_truth")) for row in rows]
    has_truth = any(truth is not None for truth in truths)
    return DataFiles([str(path)], columns, len(rows), prompt_key, texts, has_truth)


def supervised_rows(
    rows: list[JsonObject], what: str, known_columns: Collection[str] = ()
) -> tuple[list[JsonObject], dict[str, str]]:
    """Return rows in the form of ``verl sft``, and the settings that name their columns.

    Rows with ``messages`` stay as they are. A ``completion`` that is one message of the assistant becomes its text.

    Args:
        rows: the rows.
        what: the argument that holds them, for messages.
        known_columns: keys of the settings that the call gives, which may name other columns.

    Raises:
        DataError: a completion is neither a text nor such a message, or neither column is there.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not {"messages", "completion"} & set(columns) and not any(key.endswith("_key") for key in known_columns):
        raise DataError(
            f"{what} has neither a column messages nor prompt and completion. Its columns: {', '.join(columns)}. "
            "Rename them, or name yours: messages_key='NAME', or prompt_key='NAME' and response_key='NAME'."
        )
    if not rows or "completion" not in rows[0] or "messages" in rows[0]:
        return rows, {}
    converted = []
    for row_index, row in enumerate(rows):
        completion: Any = row.get("completion")
        if _is_list(completion) and len(completion) == 1 and isinstance(completion[0], Mapping):
            completion = completion[0].get("content") if completion[0].get("role") == "assistant" else completion
        if not isinstance(completion, str):
            raise DataError(
                f"{what}, row {row_index}: completion is {completion!r:.80}, neither a text nor one message of the "
                "assistant. Give longer conversations as messages, all turns of the assistant are trained on."
            )
        converted.append({**row, "completion": completion})
    return converted, {"data.prompt_key": "prompt", "data.response_key": "completion"}


def write_jsonl(rows: Iterable[Mapping[str, object]], path: Path, what: str) -> None:
    """Write rows as one JSON object per line; arrays become lists, pictures URLs, times their ISO form.

    Raises:
        DataError: names the first row and column that JSON cannot hold.
    """
    lines = []
    for row_index, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{what}, row {row_index} cannot be written as JSON: {error}. Leave the column out."
            ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_jsonl(path: Path) -> list[JsonObject]:
    """Read the rows of a file that :func:`write_jsonl` or a run wrote; none if it does not exist."""
    if not path.is_file():
        return []
    # Not str.splitlines: it also breaks at characters that JSON allows inside a string (U+2028).
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


_IMAGE_FILES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
"""First bytes of the files of images that a ``data:`` URL may hold, with their type."""


def _plain(value: Any) -> object:
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        kind = next((kind for begin, kind in _IMAGE_FILES if value.startswith(begin)), None)
        if kind is None:
            raise TypeError(f"bytes that are no image: {value!r:.40}")
        return f"data:image/{kind};base64,{base64.b64encode(value).decode()}"
    if hasattr(value, "save") and hasattr(value, "mode"):  # an image of PIL
        from verl.vision.data_urls import url_of

        return url_of(value if value.mode in ("L", "RGB", "RGBA") else value.convert("RGB"))
    raise TypeError(f"{type(value).__name__} {value!r:.80}")
