"""Search over a file, and over a retrieval server on real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from verl.errors import ConfigError
from verl.tools.local_search_tool import LocalSearchTool, build_index
from verl.tools.search_tool import CorpusSearchTool, RetrievalError, SearchTool

CORPUS = [
    {"title": "Paris", "text": "Capital of France, on the Seine. It has museums."},
    {"title": "Seine", "text": "A river that runs through Paris to the sea."},
    {"contents": '"Königsberg"\nA town with seven bridges; Euler walked them.'},
    {"title": "Bridges", "text": "They carry roads over rivers."},
]


def ask(tool: CorpusSearchTool, *queries: str) -> tuple[str, dict[str, Any]]:
    response, reward, metrics = asyncio.run(tool.execute("1", {"query_list": list(queries)}))
    assert reward == 0.0
    return response.text or "", metrics or {}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_search_in_a_file(tmp_path: Path):
    corpus = write(tmp_path / "corpus #1?.jsonl", CORPUS)
    tool = LocalSearchTool({"corpus_path": str(corpus), "topk": 2})
    text, metrics = ask(tool, "museums in the capital of France")
    assert text.startswith("Doc 1 (Title: Paris)\nCapital of France, on the Seine. It has museums.\n\nDoc 2 (Title: ")
    assert metrics == {"query_count": 1, "total_results": 2}
    # The word in the title counts more than the word in the text; endings do not count; accents neither.
    assert ask(tool, "bridge")[0].splitlines()[0] == "Doc 1 (Title: Bridges)"
    assert "Doc 1 (Title: Königsberg)" in ask(tool, "konigsberg EULER")[0]
    text, metrics = ask(tool, "seven", 'NEAR("a" OR) AND * ^ ) "', "?!", "xyzzy")
    assert text.startswith("Results for 'seven':\nDoc 1 (Title: Königsberg)")
    assert text.endswith("Results for '?!':\nNo document was found.\n\nResults for 'xyzzy':\nNo document was found.")
    assert metrics["query_count"] == 4
    assert ask(tool, *[])[0] == "Error: query_list is empty."
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: ask(tool, "river Seine")[0], range(40)))) == 1


def test_the_index_follows_the_file(tmp_path: Path):
    corpus = write(tmp_path / "corpus.jsonl", CORPUS)
    index = tmp_path / "an index"
    config = {"corpus_path": str(corpus), "index_path": str(index), "topk": 1}
    with ThreadPoolExecutor(4) as pool:  # several processes of a run start at once
        tools = list(pool.map(lambda _: LocalSearchTool(dict(config)), range(4)))
    built = index.stat().st_mtime_ns
    assert "Title: Seine" in ask(tools[3], "river sea")[0]
    LocalSearchTool(dict(config))
    assert index.stat().st_mtime_ns == built
    write(corpus, [{"title": "Nile", "text": "A river in Egypt."}])
    assert "Nile" in ask(LocalSearchTool(dict(config)), "river")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["an index", "an index.lock", "corpus.jsonl"]
    parquet = tmp_path / "corpus.parquet"
    pd.DataFrame({"id": [1], "title": ["Rhine"], "text": ["A river in Basel."]}).to_parquet(parquet)
    assert "Rhine" in ask(LocalSearchTool({"corpus_path": str(parquet)}), "river")[0]


def test_corpora_that_cannot_be_searched(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"corpus_path='.*none.jsonl' is no file .jsonl or .parquet"):
        LocalSearchTool({"corpus_path": str(tmp_path / "none.jsonl")})
    index = tmp_path / "index"
    for content, problem in (
        ('{"title": "a"}\n', "row 0: expected 'text' .and 'title'., or 'contents'; found title"),
        ("{\n", "line 1 is no JSON"),
        ("[1]\n", "line 1 must be a JSON object"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            build_index(tmp_path / "bad.jsonl", index)
        assert not index.exists()  # no half of an index
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match="is no parquet file"):
        build_index(tmp_path / "bad.parquet", index)
    index.write_text("this is something else")
    with pytest.raises(ConfigError, match="is no index of documents"):
        build_index(write(tmp_path / "good.jsonl", CORPUS), index)
    with pytest.raises(ConfigError, match="topk=0 must be at least 1"):
        LocalSearchTool({"corpus_path": str(tmp_path / "good.jsonl"), "topk": 0})


class Retrieval(ThreadingHTTPServer):
    """A retrieval server that answers each query with itself, after some failures."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.answer: Any = None


class _Handler(BaseHTTPRequestHandler):
    server: Retrieval

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        status = self.server.failures.pop(0) if self.server.failures else 200
        found = [
            [{"document": {"id": "1", "contents": f'"{q}"\nAbout {q}.'}, "score": 0.5}] * body["topk"]
            for q in body["queries"]
        ]
        data = json.dumps(self.server.answer or {"result": found}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Retrieval]:
    with Retrieval() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_search_on_a_server(server: Retrieval):
    url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    tool = SearchTool({"retrieval_service_url": url, "topk": 1, "num_workers": 4, "rate_limit": 9, "timeout": 10})
    assert (tool.config["max_concurrent"], tool.config["timeout_s"]) == (4, 40.0)
    text, metrics = ask(tool, "tea", "cup")
    assert text == (
        "Results for 'tea':\nDoc 1 (Title: tea)\nAbout tea.\n\nResults for 'cup':\nDoc 1 (Title: cup)\nAbout cup."
    )
    assert metrics == {"query_count": 2, "total_results": 2}
    assert server.requests == [{"queries": ["tea", "cup"], "topk": 1, "return_scores": True}]
    server.failures = [503]
    assert ask(tool, "tea")[0] == "Doc 1 (Title: tea)\nAbout tea."
    assert len(server.requests) == 3  # one was repeated
    server.answer = {"result": [[{"contents": "no scores\nText."}]]}
    assert ask(tool, "tea")[0] == "Doc 1 (Title: no scores)\nText."
    for answer, problem in (
        ({"results": []}, "answers in another form"),
        ({"result": []}, "answers 0 of 1 queries"),
        ([1], "answers in another form"),
        ({"result": [[{"document": 3}]]}, "answers in another form"),
    ):
        server.answer = answer
        with pytest.raises(RetrievalError, match=problem):
            ask(tool, "tea")
    server.answer, server.failures = None, [400]
    with pytest.raises(RetrievalError, match="the retrieval server fails: Client error '400"):
        ask(tool, "tea")
    with pytest.raises(ConfigError, match=r"needs config\.retrieval_service_url"):
        SearchTool({})
