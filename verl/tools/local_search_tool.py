"""Search in a file of documents, with an index of SQLite (FTS5)."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.search_tool import CorpusSearchTool

MAX_WORDS = 64
"""Words of a query that are looked for."""
TITLE_WEIGHT = 2.0
"""A word in the title counts as much as this many in the text, for BM25."""
_WORDS = re.compile(r"\w+")


class LocalSearchTool(CorpusSearchTool):
    """Search a corpus on this machine, by words (BM25; words of the title count twice).

    Its ``config``: ``corpus_path``, a file .jsonl or .parquet whose rows have ``title`` and ``text``, or ``contents``
    (a line of title, then the text); ``topk`` documents of a query (3); ``index_path``, by default beside the corpus.
    The index is built once and again when the corpus has changed.
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        corpus = Path(os.path.expandvars(str(config.get("corpus_path") or ""))).expanduser()
        if not corpus.is_file() or corpus.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"the tool {self.name}: config.corpus_path='{corpus}' is no file .jsonl or .parquet.")
        self.index_path = Path(config.get("index_path") or f"{corpus}.fts5").expanduser()
        build_index(corpus, self.index_path)

    def search(self, queries: Sequence[str]) -> list[list[str]]:
        """See :meth:`CorpusSearchTool.search`."""
        # Calls come from many threads, each of which needs a connection of its own.
        with closing(sqlite3.connect(f"file:{quote(str(self.index_path))}?mode=ro&immutable=1", uri=True)) as index:
            return [self._best(index, query) for query in queries]

    def _best(self, index: sqlite3.Connection, query: str) -> list[str]:
        words = list(dict.fromkeys(_WORDS.findall(query.lower())))[:MAX_WORDS]
        if not words:
            return []
        rows = index.execute(
            "SELECT title, text FROM documents WHERE documents MATCH ? "
            f"ORDER BY bm25(documents, {TITLE_WEIGHT}, 1.0), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), self.topk),
        )
        return [f"{title}\n{text}" for title, text in rows]


def build_index(corpus: Path, index: Path) -> None:
    """Build the index of a corpus unless it is up to date; processes wait for each other.

    Raises:
        ConfigError: a row of the corpus has no text.
    """
    status = corpus.stat()
    state = f"{corpus.resolve()} {status.st_size} {status.st_mtime_ns}"
    with FileLock(f"{index}.lock"):
        if _state_of(index) == state:
            return
        descriptor, unfinished = tempfile.mkstemp(prefix=f"{index.name}.", dir=index.parent)
        os.close(descriptor)
        try:
            with closing(sqlite3.connect(unfinished)) as new, new:
                new.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
                new.executemany("INSERT INTO documents VALUES (?, ?)", _documents(corpus))
                new.execute("CREATE TABLE built_from (state TEXT)")
                new.execute("INSERT INTO built_from VALUES (?)", (state,))
            os.replace(unfinished, index)
        finally:
            Path(unfinished).unlink(missing_ok=True)


def _state_of(index: Path) -> str | None:
    """State of the corpus from which an index was built; None if there is no index."""
    if not index.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(str(index))}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT state FROM built_from").fetchone()
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{index} is no index of documents ({error}): remove it, or set config.index_path."
        ) from error
    return row and row[0]


def _documents(corpus: Path) -> Iterator[tuple[str, str]]:
    for row_index, row in enumerate(_rows(corpus)):
        if row.get("contents") is not None:
            title, _, text = str(row["contents"]).partition("\n")
            yield title.strip().strip('"'), text or title
        elif row.get("text") is not None:
            yield str(row.get("title") or ""), str(row["text"])
        else:
            raise ConfigError(
                f"{corpus}, row {row_index}: expected 'text' (and 'title'), or 'contents'; found {', '.join(row)}."
            )


def _rows(corpus: Path) -> Iterator[Mapping[str, object]]:
    if corpus.suffix == ".parquet":
        try:
            for batch in pq.ParquetFile(corpus).iter_batches(1024):
                yield from batch.to_pylist()
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{corpus} is no parquet file: {error}") from error
        return
    with corpus.open(encoding="utf-8") as lines:
        for line_index, line in enumerate(lines):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{corpus}, line {line_index + 1} is no JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{corpus}, line {line_index + 1} must be a JSON object.")
                yield row
