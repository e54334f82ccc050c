"""Read data files (parquet, json, jsonl), with error messages that name file, row and column."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError

SUFFIXES = (".parquet", ".json", ".jsonl", ".ndjson")
WITH_FIXED_KEYS = ("extra_info", "reward_model")
"""Columns whose own keys are those of a table: functions read them by name, so a null there is None."""

Row = dict[str, Any]


class DataFile:
    """The rows of one parquet, json or jsonl file; it must have at least one.

    Parquet stays columnar, and rows are converted to Python objects on access. It gives every object in a column the
    keys of all the others, with null. Such keys are left out, wherever they stand below a column (those of
    :data:`WITH_FIXED_KEYS` keep their own), so a row is what it is as jsonl; a null that a user wrote is left out with
    them. Json and jsonl are read by Python's own parser, which keeps nulls, numbers, dates and mixed types as they are
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._table: Any = None
        self._with_objects: set[str] = set()
        """Columns of parquet in whose values there are objects."""
        if path.suffix == ".parquet":
            self._table = _read_parquet(path)
            self.columns = list(self._table.column_names)
            twice = [name for name in dict.fromkeys(self.columns) if self.columns.count(name) > 1]
            if twice:
                raise DataError(f"{path} has more than one column '{twice[0]}'. Rename or drop all but one.")
            self._with_objects = {field.name for field in self._table.schema if _has_objects(field.type)}
        else:
            self._rows = _read_json(path)
            self.columns = list(dict.fromkeys(key for row in self._rows for key in row))
        if len(self) == 0:
            raise DataError(f"{path} is empty: it has no rows. Name a file with data, or make this one again.")

    def __len__(self) -> int:
        return len(self._rows) if self._table is None else self._table.num_rows

    def row(self, row_index: int) -> Row:
        """Return a row, counted from 0, as a new dict."""
        if self._table is None:
            return dict(self._rows[row_index])
        try:
            row = self._table.slice(row_index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise _not_text(self.path, row_index, error) from error
        return row | {name: self._without_nulls(name, row[name]) for name in self._with_objects}

    def column(self, name: str) -> Iterator[Any]:
        """All values of one column, in order; None where a json row lacks it."""
        if self._table is None:
            return (row.get(name) for row in self._rows)
        values = self._parquet_column(name)
        return (self._without_nulls(name, value) for value in values) if name in self._with_objects else values

    def _without_nulls(self, column: str, value: object) -> object:
        if column in WITH_FIXED_KEYS and isinstance(value, dict):
            return {key: without_nulls(item) for key, item in value.items()}
        return without_nulls(value)

    def _parquet_column(self, name: str) -> Iterator[object]:
        first = 0
        for chunk in self._table.column(name).chunks:
            try:
                yield from chunk.to_pylist()
            except UnicodeDecodeError:  # somewhere in the chunk
                for where, value in enumerate(chunk):
                    try:
                        value.as_py()
                    except UnicodeDecodeError as error:
                        raise _not_text(self.path, first + where, error, name) from error
                raise
            first += len(chunk)


class RowsInMemory(DataFile):
    """Rows that a data set of the user's own has read, with the interface of a file.

    Args:
        rows: a list of dicts, a ``datasets.Dataset`` or a ``pandas.DataFrame``. The last two are tables, whose objects
            have the keys of other rows where they were read from parquet: keys without a value are left out.
        name: stands in the place of a path, for error messages.

    Raises:
        DataError: they are something else, or there are none.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self.path = Path(name)
        self._table = None
        is_table = hasattr(rows, "features") or hasattr(rows, "iloc")
        listed = rows.to_dict("records") if hasattr(rows, "iloc") else list(rows)
        if not listed or not all(isinstance(row, dict) for row in listed):
            description = f"{type(listed[0]).__name__} {listed[0]!r:.80}" if listed else "nothing"
            raise DataError(
                f"{name}: the rows are {type(rows).__name__} of {description}. Give a list of dicts, a "
                "datasets.Dataset or a pandas.DataFrame with at least one row."
            )
        self._rows = [dict(row) for row in listed]
        if is_table:
            self._rows = [{key: self._without_nulls(key, _plain(row[key])) for key in row} for row in listed]
        self.columns = list(dict.fromkeys(key for row in self._rows for key in row))


class RowsOfFiles(Sequence[Row]):
    """Rows of files as a table has them: ``rows[3]``, ``rows["column"]``, ``rows.filter(function)``.

    Args:
        files: opened files.
        order: file and row number of each row.
    """

    def __init__(self, files: Sequence[DataFile], order: Sequence[tuple[int, int]]) -> None:
        self._files, self._order = files, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, str):
            return [row[item] for row in self]
        if isinstance(item, slice):
            return RowsOfFiles(self._files, self._order[item])
        file, row_index = self._order[item]
        return dict.fromkeys(self.column_names) | self._files[file].row(row_index)

    @property
    def column_names(self) -> list[str]:
        """Names of all columns."""
        return list(dict.fromkeys(name for file in self._files for name in file.columns))

    def select(self, indices: Iterable[int]) -> RowsOfFiles:
        """Return some of the rows."""
        return RowsOfFiles(self._files, [self._order[index] for index in indices])

    def filter(self, function: Callable[[Row], object], **_: object) -> RowsOfFiles:
        """Return the rows for which ``function`` is true."""
        return self.select(index for index, row in enumerate(self) if function(row))

    def map(self, function: Callable[[Row], Row], **_: object) -> RowsOfFiles:
        """Return the rows with what ``function`` returns for each."""
        rows = [row | function(row) for row in self]
        return RowsOfFiles([RowsInMemory(rows, "mapped rows")], [(0, index) for index in range(len(rows))])


def in_order(rows: Any, order: Sequence[int]) -> Any:
    """Return some rows of a table or list, in ``order``; the same object if these are all of them."""
    if list(order) == list(range(len(rows))):
        return rows
    if hasattr(rows, "iloc"):
        return rows.iloc[order]
    return rows.select(order) if hasattr(rows, "select") else [rows[index] for index in order]


def without_nulls(value: object) -> object:
    """Return a JSON value without the keys of objects whose value is None; None in a list stays."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> object:
    """Return a value of a table without NumPy's types; NaN, which pandas has for no value, is None."""
    if hasattr(value, "tolist"):  # an array or a number of NumPy, which is not imported to tell the suffixes of files
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def open_files(paths: str | Sequence[str], setting: str) -> list[DataFile]:
    """Open all files that ``paths`` names, in order; each path must match a usable file.

    Args:
        paths: one path or several; ``~``, ``$VARIABLES`` and globs (sorted) are expanded.
        setting: the argument or key that holds the paths, for error messages.
    """
    names = [paths] if isinstance(paths, str) else list(paths)
    if not names:
        raise DataError(f"{setting} names no file. Give one path or a list of paths.")
    return [DataFile(path) for name in names for path in _expand(name, setting)]


def refuse_media(files: Iterable[DataFile], columns: Iterable[str], why_not: str) -> None:
    """Refuse rows with images, videos or sounds.

    Args:
        files: of the data set.
        columns: in which media stand; a file need not have them, and a row may have None or an empty list there.
        why_not: a sentence.

    Raises:
        DataError: names the first such row.
    """
    for file in files:
        for name in set(columns).intersection(file.columns):
            for row_index, value in enumerate(file.column(name)):
                if value:
                    raise DataError(
                        f"{file.path}, row {row_index}: column '{name}' holds {len(value)} item(s). {why_not} Remove "
                        "these rows, or the column if the text alone is enough."
                    )


def require_columns(files: Sequence[DataFile], sources: dict[str, str]) -> None:
    """Check that every file has the columns, given as column name to setting: ``{"prompt": "prompt_key"}``."""
    for file in files:
        for column, source in sources.items():
            if column not in file.columns:
                remedy = (
                    f"Set {source} to the column that holds it, or rename the column."
                    if source.endswith("_key")
                    else "Add the column; `examples/data_preprocess` shows how the files are made."
                )
                raise DataError(
                    f"{file.path} has no column '{column}' ({source}). Its columns: {', '.join(file.columns)}. {remedy}"
                )


def choose_rows(files: Sequence[DataFile], max_samples: int, shuffle: bool, seed: int | None) -> list[tuple[int, int]]:
    """Choose the rows of a data set, as (file number, row number).

    Args:
        files: opened files.
        max_samples: number of rows to keep; -1, 0 or at least as many as there are keeps all, in order.
        shuffle: choose rows at random, in random order, instead of the first ones.
        seed: of that choice; None is 1.
    """
    rows = [(f, r) for f, file in enumerate(files) for r in range(len(file))]
    if not 0 < max_samples < len(rows):
        return rows
    if not shuffle:
        return rows[:max_samples]
    import numpy as np

    indices = np.random.default_rng(1 if seed is None else seed).choice(len(rows), size=max_samples, replace=False)
    return [rows[row_index] for row_index in indices]


def _expand(name: str, setting: str) -> list[Path]:
    if "://" in name:
        raise DataError(
            f"{setting}: '{name}' is a remote path, and verl reads local files only. "
            "Download it first and give the local path."
        )
    expanded = os.path.expanduser(os.path.expandvars(name))
    if "$" in expanded and not os.path.exists(expanded):
        raise DataError(f"{setting}: '{name}' names an environment variable that is not set.")
    paths = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    if not paths:
        raise DataError(
            f"{setting}: there is no file '{name}' (looked for {os.path.abspath(expanded)}). "
            "Check the path; `examples/data_preprocess` has scripts that make the data."
        )
    for path in paths:
        if os.path.isdir(path):
            raise DataError(f"{setting}: '{path}' is a folder. Name its files, or use a glob: '{path}/*.parquet'.")
        if Path(path).suffix not in SUFFIXES:
            raise DataError(f"{setting}: '{path}' must end in one of {', '.join(SUFFIXES)}.")
    return [Path(path) for path in paths]


def _read_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Without checksums, flipped bits may decode to wrong values.
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}. Make or copy the file again.") from error
    with file:
        try:
            return file.read()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            where = _damaged_rows(file)
            raise DataError(
                f"{path} is damaged{where}: {error}. Copy the file again, or make it again from its source."
            ) from error


def _has_objects(kind: Any) -> bool:
    """Return whether values of an Arrow type hold objects with keys."""
    import pyarrow as pa

    if not pa.types.is_nested(kind):
        return False
    return pa.types.is_struct(kind) or any(_has_objects(kind.field(n).type) for n in range(kind.num_fields))


def _damaged_rows(file: Any) -> str:
    """The rows and the column of the first row group that cannot be read, for an error message."""
    import pyarrow as pa

    first = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        for column in file.schema_arrow.names:
            try:
                file.read_row_group(group, columns=[column])
            except (pa.ArrowException, OSError, UnicodeDecodeError):
                return f" in column '{column}' of rows {first} to {first + size - 1}"
        first += size
    return ""


def _not_text(path: Path, row: int, error: UnicodeDecodeError, column: str | None = None) -> DataError:
    where = f"{path}, row {row}" + ("" if column is None else f", column '{column}'")
    return DataError(f"{where}: a text is not UTF-8 ({error}). Write the row again, or take it out.")


def _read_json(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. It must be a text file in UTF-8.") from error
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise DataError(f"{path} is not valid JSON: {error}.") from error
        places = [f"element {index}" for index in range(len(rows))]
    else:
        # Not str.splitlines: it also breaks at characters that JSON allows inside a string (U+2028).
        numbered = [(index, line) for index, line in enumerate(text.split("\n"), start=1) if line.strip()]
        places = [f"line {index}" for index, _ in numbered]
        rows = [_parse_line(line, path, where) for (_, line), where in zip(numbered, places, strict=True)]
    for row, where in zip(rows, places, strict=True):
        if not isinstance(row, dict):
            raise DataError(f"{path}, {where}: expected an object {{...}}, found {type(row).__name__}: {row!r:.80}.")
    return rows


def _parse_line(line: str, path: Path, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise DataError(
            f"{path}, {where}: not valid JSON ({error}): {line!r:.80}. "
            "Expected one object per line, or one list of objects."
        ) from error
