"""The index of runs: an SQLite file that grows with the files of the runs and can be deleted at any time.

It holds the metrics by name, in chunks of ``CHUNK`` lines, and a row for each sample with its place in its file. The
texts of samples stay in their files. Lines of metrics beyond the last whole chunk are read anew when the view opens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from verl.utils.run_log import SAMPLE_NUMBERS

LONGEST_NAME = 200
"""Characters of a status, data source or group in the index."""
VERSION = 4
"""Version of the tables; an index of another version is made anew."""

_TABLES = """
CREATE TABLE metrics_file (run TEXT PRIMARY KEY, chunks INTEGER, offset INTEGER, fingerprint TEXT);
CREATE TABLE chunk (run TEXT, number INTEGER, steps BLOB, times BLOB, PRIMARY KEY (run, number));
CREATE TABLE series (run TEXT, name TEXT, number INTEGER, numbers BLOB, PRIMARY KEY (run, name, number));
CREATE TABLE dump (
    id INTEGER PRIMARY KEY, run TEXT, kind TEXT, step INTEGER, path TEXT UNIQUE, size INTEGER, mtime INTEGER,
    folder TEXT, writer TEXT
);
CREATE INDEX dump_by_step ON dump (run, kind, step);
CREATE INDEX dump_by_folder ON dump (folder);
CREATE TABLE place (run TEXT PRIMARY KEY, number INTEGER);
CREATE TABLE sample (
    id INTEGER PRIMARY KEY, run TEXT, kind TEXT, step INTEGER, dump INTEGER, position INTEGER, offset INTEGER,
    size INTEGER, score REAL, length INTEGER, status TEXT, source TEXT, prompt INTEGER, uid TEXT, sibling INTEGER,
    gap REAL, kl REAL, advantage REAL
);
CREATE INDEX sample_by_step ON sample (run, kind, step, position, score, length, status, source);
CREATE INDEX sample_by_score ON sample (run, kind, score, step, position);
CREATE INDEX sample_by_length ON sample (run, kind, length, step, position);
CREATE INDEX sample_by_gap ON sample (run, kind, gap, step, position) WHERE gap IS NOT NULL;
CREATE INDEX sample_by_kl ON sample (run, kind, kl, step, position) WHERE kl IS NOT NULL;
CREATE INDEX sample_by_advantage ON sample (run, kind, advantage, step, position) WHERE advantage IS NOT NULL;
CREATE INDEX sample_by_prompt ON sample (run, kind, prompt, step);
CREATE INDEX sample_by_dump ON sample (dump);
"""


class Index:
    """The SQLite file.

    Args:
        path: of the file, made if need be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.make()

    def make(self) -> bool:
        """Make the tables if the file is missing, damaged or of another version; return whether they were made."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._version() == VERSION:
            return False
        with FileLock(self.path.with_suffix(".lock"), timeout=60):
            version = self._version()
            if version == VERSION:  # another view has just made them
                return True
            if version != 0:
                for file in self.path.parent.glob(f"{self.path.name}*"):  # with its write-ahead log
                    file.unlink()
            with self.writing() as database:
                for statement in f"{_TABLES} PRAGMA user_version = {VERSION}".split(";"):
                    database.execute(statement)
        return True

    def _version(self) -> int:
        """Return the version of the tables: 0 of a new file, -1 of one that is no database."""
        try:
            with self.reading() as database:
                return database.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.OperationalError:  # a full disk, no permission: nothing that a new file mends
            raise
        except sqlite3.DatabaseError:
            return -1

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are written together at the end; one at a time, of all views of the folders."""
        database = sqlite3.connect(self.path, timeout=30)
        try:
            # A lost index is made again, so nothing waits for the disk; readers go on while it is written.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")
            with database:
                database.execute("BEGIN IMMEDIATE")  # what is read before the first change stays true
                yield database
        finally:
            database.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries."""
        database = sqlite3.connect(self.path, timeout=30)
        database.row_factory = sqlite3.Row
        try:
            yield database
        finally:
            database.close()


def places_of_runs(index: Index, runs: Sequence[str]) -> dict[str, int]:
    """Return the number of each run, by which it has its colour; new runs get the next ones, in the given order."""
    with index.reading() as database:
        numbers = dict(map(tuple, database.execute("SELECT run, number FROM place")))
    if new := [run for run in runs if run not in numbers]:
        with index.writing() as database:  # another view of the folders may have added them
            query = "INSERT OR IGNORE INTO place SELECT ?, COALESCE(MAX(number) + 1, 0) FROM place"
            database.executemany(query, [(run,) for run in new])
            numbers = dict(map(tuple, database.execute("SELECT run, number FROM place")))
    return {run: numbers[run] for run in runs}


def place_of_index(folders: list[Path]) -> Path:
    """Return where the index of folders is: in the first one, or below the user's cache if that is not writable."""
    first = folders[0].resolve()
    first = first.parent if first.is_file() else first
    key = hashlib.blake2s("\n".join(str(folder.resolve()) for folder in folders).encode(), digest_size=6).hexdigest()
    name = f"index-{key}.sqlite"
    if os.access(first, os.W_OK):
        return first / ".verl_view" / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "verl" / "view" / name


def status_of(record: Mapping[str, object]) -> str:
    """Return how a sample ended: its trajectory's status, what scoring said if not ok, or why generation ended."""
    if isinstance(trajectory := record.get("trajectory"), Mapping):
        return str(trajectory.get("status", ""))
    scoring = record.get("reward_status", "ok")
    return str(scoring) if scoring != "ok" else str(record.get("finish_reason") or "")


def prompt_number(record: Mapping[str, object]) -> int:
    """Return a number of 63 bits that is the same for the same prompt."""
    text = str(record.get("input", "")).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2s(text, digest_size=8).digest()) >> 1


def _text(value: object) -> str:
    """A text of at most ``LONGEST_NAME`` characters that SQLite takes."""
    return str(value)[:LONGEST_NAME].encode("utf-8", "replace").decode()


def _whole(value: object, default: int) -> int:
    """A number that SQLite takes."""
    return value if isinstance(value, int) and abs(value) < 2**62 else default


def path_of_numbers(samples: Path) -> Path:
    """Return the file of the numbers of samples that are known when their step has ended."""
    return samples.with_suffix(".numbers.json")


def numbers_of_samples(samples: Path, writer: str) -> dict[tuple[str, int], deque[tuple[float | None, ...]]]:
    """Return the numbers of the samples of a file, by ``uid`` and ``sample_index``; sequences of both come in order.

    A broken file counts as none, as a broken line of samples does, and so does one of another run than ``writer``.
    """
    rows_by_sample: dict[tuple[str, int], deque[tuple[float | None, ...]]] = defaultdict(deque)
    try:
        columns = json.loads(path_of_numbers(samples).read_text())
        if columns.get("run", writer) != writer:
            return {}
        names, rows = columns["uid"], len(columns["uid"])
        siblings = columns.get("sample_index", range(rows))
        numbers = [map(_number, columns[name]) if name in columns else [None] * rows for name in SAMPLE_NUMBERS]
        for uid, sibling, *values in zip(names, siblings, *numbers, strict=True):
            rows_by_sample[_text(uid), _whole(sibling, -1)].append(tuple(values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return rows_by_sample


def _number(value: object) -> float | None:
    """Read a number of a sample; null, and NaN of older files, stand for infinity: a number that is not finite."""
    if value is None or isinstance(value, int | float):
        return math.inf if value is None or value != value else float(value)
    return None


def sample_rows(path: Path, writer: str) -> Iterator[tuple[object, ...]]:
    """Yield the columns ``position`` to ``advantage`` of each line of a file of samples; a broken line is left out."""
    offset = 0
    numbers = numbers_of_samples(path, writer)
    with path.open("rb") as file:
        for position, line in enumerate(file):
            try:
                record = json.loads(line)
                score = math.nan if record["score"] is None else float(record["score"])  # NULL in the table
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                offset += len(line)
                continue
            prompt = prompt_number(record)
            length = _whole(record.get("response_length"), len(str(record.get("output", ""))))
            uid = record.get("uid", f"{record.get('step')}-{prompt:x}")
            status, source, uid = map(_text, (status_of(record), record.get("data_source", ""), uid))
            sibling = _whole(record.get("sample_index"), position)
            same = numbers.get((uid, sibling))
            values = same.popleft() if same else (None,) * len(SAMPLE_NUMBERS)
            yield position, offset, len(line), score, length, status, source, prompt, uid, sibling, *values
            offset += len(line)
