"""Samples of runs: index new files, and find samples by step, score, length, status, data source and text."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.plugins.view.discovery import DumpFolder, FoundFiles, RunFiles, writer_of
from verl.plugins.view.index import Index, path_of_numbers, sample_rows
from verl.utils.run_log import SAMPLE_NUMBERS

FILES_PER_WRITE = 50
"""Files of samples that are added to the index together."""
PREVIEW = 240
"""Characters of a text in a table."""
LONGEST = 200_000
"""Characters of a text that a page is sent."""
COUNTED = 100_000
"""Samples that are counted; beyond, a page says that there are more."""
SEARCH_S = 2.0
"""Seconds that one search for a text takes; a page can go on where it ended."""
SEEN_VALUES = 20_000
"""Newest samples whose statuses and data sources a page offers."""
SORTS = ("step", "score", "length", *SAMPLE_NUMBERS)


@dataclass(frozen=True)
class SampleFilter:
    """Filter of the samples on a page; None and empty texts do not filter."""

    run: str
    kind: str = "train"
    step_from: int | None = None
    step_to: int | None = None
    score_from: float | None = None
    score_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    status: str = ""
    source: str = ""
    text: str = ""
    sort: str = "step"
    descending: bool = True
    limit: int = 100
    skip: int = 0

    def conditions(self) -> tuple[str, list[object]]:
        """Return the WHERE clause and its values."""
        conditions: list[tuple[str, object]] = [("run = ?", self.run), ("kind = ?", self.kind)]
        for column, low, high in (
            ("step", self.step_from, self.step_to),
            ("score", self.score_from, self.score_to),
            ("length", self.length_from, self.length_to),
        ):
            conditions += [(f"{column} >= ?", low)] if low is not None else []
            conditions += [(f"{column} <= ?", high)] if high is not None else []
        conditions += [("status = ?", self.status)] if self.status else []
        conditions += [("source = ?", self.source)] if self.source else []
        clauses = [clause for clause, _ in conditions]
        clauses += [f"{self.sort} IS NOT NULL"] if self.sort in SAMPLE_NUMBERS else []
        return " AND ".join(clauses), [value for _, value in conditions]


@dataclass(frozen=True)
class _DumpFile:
    """A file of samples, as it is on the disk now."""

    path: Path
    size: int
    mtime: int
    writer: str
    """Id of the run in its lines; empty in files of older versions."""
    run: str
    """Id, in the view, of the run that has it; empty if none of the found ones has."""
    kind: str


def refresh_samples(index: Index, files: FoundFiles) -> list[str]:
    """Add files of samples that are new or have grown, newest steps first; return the ids of runs with news."""
    with index.reading() as database:
        indexed = {folder for (folder,) in database.execute("SELECT DISTINCT folder FROM dump")}
    gone = sorted(indexed - {str(folder.path) for folder in files.dumps})
    pending, changed = [], set()
    for folder in [*files.dumps, *(DumpFolder(Path(path), None) for path in gone)]:
        new, moved = _new_files(index, files, folder)
        pending += new
        changed |= moved
    pending.sort(key=lambda file: -int(file.path.stem))
    for first in range(0, len(pending), FILES_PER_WRITE):
        with index.writing() as database:
            for file in pending[first : first + FILES_PER_WRITE]:
                _add_file(database, file)
    return sorted((changed | {file.run for file in pending}) - {""})


def _new_files(index: Index, files: FoundFiles, folder: DumpFolder) -> tuple[list[_DumpFile], set[str]]:
    """Files of a folder that are new or have changed, and the runs that lost known ones or have them now."""
    with index.reading() as database:
        query = "SELECT path, id, size, mtime, writer, run, kind FROM dump WHERE folder = ?"
        indexed = {row["path"]: row for row in database.execute(query, (str(folder.path),))}
    owners: dict[str, tuple[str, str]] = {}
    new, moved = [], []
    try:
        with os.scandir(folder.path) as listed:
            entries = {entry.name: entry for entry in listed}
    except OSError:  # it was removed
        entries = {}
    for name, entry in entries.items():
        if not (name.endswith(".jsonl") and name[:-6].isdecimal()):
            continue
        path, stat = Path(entry.path), entry.stat()
        size, modified = stat.st_size, stat.st_mtime_ns
        if numbers := entries.get(path_of_numbers(path).name):  # comes when its step has ended
            size, modified = size + numbers.stat().st_size, max(modified, numbers.stat().st_mtime_ns)
        row = indexed.get(entry.path)
        is_new = row is None or (row["size"], row["mtime"]) != (size, modified)
        writer = writer_of(path) if row is None or is_new else row["writer"]
        if writer not in owners:
            owner = files.owner(folder, writer)
            owners[writer] = (owner.id, owner.kind_of(folder.path)) if owner else ("", "")
        run, kind = owners[writer]
        if is_new:
            new.append(_DumpFile(path, size, modified, writer, run, kind))
        elif row is not None and (row["run"], row["kind"]) != (run, kind):
            moved.append((run, kind, row["id"], row["run"]))
    gone = [row for path, row in indexed.items() if os.path.basename(path) not in entries]
    if moved or gone:
        with index.writing() as database:
            for row in gone:
                database.execute("DELETE FROM sample WHERE dump = ?", (row["id"],))
                database.execute("DELETE FROM dump WHERE id = ?", (row["id"],))
            for run, kind, dump, _ in moved:
                database.execute("UPDATE dump SET run = ?, kind = ? WHERE id = ?", (run, kind, dump))
                database.execute("UPDATE sample SET run = ?, kind = ? WHERE dump = ?", (run, kind, dump))
    return new, {run for after, _, _, before in moved for run in (after, before)} | {row["run"] for row in gone}


def _add_file(database: sqlite3.Connection, file: _DumpFile) -> None:
    query = "SELECT id, size, mtime FROM dump WHERE path = ?"
    old = database.execute(query, (str(file.path),)).fetchone()
    if old is not None:
        if old[1:] == (file.size, file.mtime):  # another view of the folder has added it
            return
        database.execute("DELETE FROM sample WHERE dump = ?", old[:1])
        database.execute("DELETE FROM dump WHERE id = ?", old[:1])
    step = int(file.path.stem)
    dump = database.execute(
        "INSERT INTO dump (run, kind, step, path, size, mtime, folder, writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (file.run, file.kind, step, str(file.path), file.size, file.mtime, str(file.path.parent), file.writer),
    ).lastrowid
    database.executemany(
        "INSERT INTO sample (run, kind, step, dump, position, offset, size, score, length, status, source, prompt, "
        "uid, sibling, gap, kl, advantage) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((file.run, file.kind, step, dump, *row) for row in sample_rows(file.path, file.writer)),
    )


def kinds_of_samples(index: Index) -> dict[str, list[str]]:
    """Return of each run with samples their kinds: ``train`` before ``validation``."""
    kinds: dict[str, list[str]] = {}
    with index.reading() as database:
        for run, kind in database.execute("SELECT DISTINCT run, kind FROM dump ORDER BY run, kind"):
            kinds.setdefault(run, []).append(kind)
    return kinds


def why_no_samples(run: RunFiles) -> str:
    """Return why a run without samples has none, in sentences."""
    keys = {"train": "rollout_data_dir", "validation": "validation_data_dir"}
    if not run.starts:
        record = f"there is no {run.events.name} beside its metrics that says where it wrote them"
        return f"No samples of it lie below these folders, and {record}."
    if not run.named:
        return "It wrote none: trainer.rollout_data_dir and trainer.validation_data_dir were not set."
    sentences = []
    for dump in dict.fromkeys(run.named):
        setting = f"trainer.{keys[dump.kind]}={dump.path}"
        if not os.path.isdir(dump.path):
            sentences.append(
                f"{setting} is not here, or not written yet. A copy of it below these folders is found too."
            )
        else:
            sentences.append(f"{setting} has no samples of it: none are written yet, or another run has replaced them.")
    return " ".join(sentences)


def find_samples(index: Index, criteria: SampleFilter) -> dict[str, Any]:
    """Return one page of the samples that a filter chooses.

    Returns:
        ``rows`` with texts cut to ``PREVIEW``, ``total`` (at most ``COUNTED``; None for a search), and ``next``, the
        value of ``skip`` that goes on behind them, or None.
    """
    where, values = criteria.conditions()
    order = criteria.sort if criteria.sort in SORTS else "step"
    direction = "DESC" if criteria.descending else "ASC"
    # In one direction, so that an index gives the order and nothing is sorted.
    columns = ("step", "position") if order == "step" else (order, "step", "position")
    query = f"SELECT * FROM sample WHERE {where} ORDER BY {', '.join(f'{name} {direction}' for name in columns)}"
    with index.reading() as database:
        paths = dict(map(tuple, database.execute("SELECT id, path FROM dump WHERE run = ?", (criteria.run,))))
        if criteria.text:
            return _search(database, f"{query} LIMIT -1 OFFSET ?", [*values, criteria.skip], criteria, paths)
        counted = f"SELECT COUNT(*) FROM (SELECT 1 FROM sample WHERE {where} LIMIT {COUNTED})"
        (total,) = database.execute(counted, values).fetchone()
        samples = database.execute(f"{query} LIMIT ? OFFSET ?", [*values, criteria.limit, criteria.skip]).fetchall()
    rows = [_row(row, _read(paths[row["dump"]], row)) for row in samples]
    end = criteria.skip + len(rows)
    return {"rows": rows, "total": total, "next": end if len(rows) == criteria.limit else None}


def _search(
    database: sqlite3.Connection, query: str, values: list[object], criteria: SampleFilter, paths: Mapping[int, str]
) -> dict[str, object]:
    """Read the chosen samples one after the other, and keep those whose line has the text, until time is up."""
    word, rows = criteria.text.casefold(), []
    ends = time.monotonic() + SEARCH_S
    for read, row in enumerate(database.execute(query, values), 1):
        record = _read(paths[row["dump"]], row)
        if word in f"{record.get('input', '')}\n{record.get('output', '')}\n{record.get('gts', '')}".casefold():
            rows.append(_row(row, record))
        if len(rows) == criteria.limit or time.monotonic() > ends:
            return {"rows": rows, "total": None, "next": criteria.skip + read}
    return {"rows": rows, "total": None, "next": None}


def sample_values(index: Index, run: str, kind: str) -> dict[str, object]:
    """Return what filters can choose from: steps, statuses, data sources. Statuses and sources of the newest steps."""
    with index.reading() as database:
        query = "SELECT DISTINCT step FROM dump WHERE run = ? AND kind = ? ORDER BY step"
        steps = [step for (step,) in database.execute(query, (run, kind))]
        values = {}
        for column in ("status", "source"):
            newest = f"SELECT {column} FROM sample WHERE run = ? AND kind = ? ORDER BY step DESC LIMIT {SEEN_VALUES}"
            query = f"SELECT DISTINCT {column} FROM ({newest})"
            values[column] = sorted(value for (value,) in database.execute(query, (run, kind)) if value)
    return {"steps": steps, "statuses": values["status"], "sources": values["source"]}


def one_sample(index: Index, sample_id: int) -> dict[str, Any]:
    """Return a sample with its whole record, its siblings, and the answers to its prompt in other steps.

    Raises:
        DataError: there is no such sample, or its file is gone.
    """
    with index.reading() as database:
        row = database.execute(
            "SELECT sample.*, dump.path FROM sample JOIN dump ON dump.id = sample.dump WHERE sample.id = ?",
            (sample_id,),
        ).fetchone()
        if row is None:
            raise DataError(
                f"there is no sample {sample_id}; its file may have been written anew. Load the page again."
            )
        same = "SELECT * FROM sample WHERE dump = ? AND uid = ? ORDER BY sibling, position LIMIT 64"
        siblings = database.execute(same, (row["dump"], row["uid"])).fetchall()
        history = database.execute(
            "SELECT sample.*, dump.path FROM sample JOIN dump ON dump.id = sample.dump "
            "WHERE sample.run = ? AND sample.kind = ? AND prompt = ? ORDER BY sample.step, position LIMIT 500",
            (row["run"], row["kind"], row["prompt"]),
        ).fetchall()
    record = _read(row["path"], row)
    return {
        **_row(row, record),
        "run": row["run"],
        "kind": row["kind"],
        "uid": row["uid"],
        "record": _cut(record, LONGEST),
        "siblings": [_row(other, _read(row["path"], other)) for other in siblings],
        "history": [_row(other, _read(other["path"], other)) for other in history],
    }


@dataclass(frozen=True)
class SamplePlace:
    """Location of a sample: its file, and its place in it."""

    file: Path
    writer: str
    """Id of the run that wrote the file."""
    uid: str
    sibling: int
    occurrence: int
    """Its number among the samples with the same ``uid`` and ``sample_index``, from 0."""


def place_of_sample(index: Index, sample_id: int) -> SamplePlace:
    """Return where a sample is.

    Raises:
        DataError: there is no such sample.
    """
    with index.reading() as database:
        row = database.execute(
            "SELECT sample.*, dump.path, dump.writer FROM sample JOIN dump ON dump.id = sample.dump "
            "WHERE sample.id = ?",
            (sample_id,),
        ).fetchone()
        if row is None:
            raise DataError(f"there is no sample {sample_id}. Load the page again.")
        query = "SELECT COUNT(*) FROM sample WHERE dump = ? AND uid = ? AND sibling = ? AND position < ?"
        (before,) = database.execute(query, (row["dump"], row["uid"], row["sibling"], row["position"])).fetchone()
    return SamplePlace(Path(row["path"]), row["writer"], row["uid"], row["sibling"], before)


def _read(path: str, row: sqlite3.Row) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            file.seek(row["offset"])
            return json.loads(file.read(row["size"]))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); it may have been moved or written anew.") from error


def _row(row: sqlite3.Row, record: Mapping[str, object]) -> dict[str, object]:
    texts = {name: _cut(record.get(name, ""), PREVIEW) for name in ("input", "output", "gts")}
    # JSON has no infinity.
    numbers = {
        name: value if math.isfinite(value) else None for name in SAMPLE_NUMBERS if (value := row[name]) is not None
    }
    unchanged = ("id", "step", "score", "length", "status", "source", "sibling")
    return {name: row[name] for name in unchanged} | numbers | texts


def _cut(value: object, most: int) -> object:
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]} [… {len(value) - most:,} more characters]"
    if isinstance(value, Mapping):
        return {name: _cut(item, most) for name, item in value.items()}
    return [_cut(item, most) for item in value] if isinstance(value, list) else value
