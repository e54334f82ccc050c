"""Answers of services are bounded before they are in memory."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import openai
import pytest

from verl.base import http_limits
from verl.base.http_limits import UNCOMPRESSED, answer_limit, async_answer_limit
from verl.errors import RewardError
from verl.plugins.sandbox.fusion import FusionSandbox
from verl.plugins.sandbox.types import SandboxError
from verl.scorers.llm_judge import _client
from verl.scorers.remote import RemoteScorer

ANSWERS = {
    "/small": (200, b"1", {}),
    "/large": (200, b" " * 1001 + b"1", {}),
    "/bomb": (200, gzip.compress(b" " * 10**6 + b"1"), {"Content-Encoding": "gzip"}),
    "/moved": (302, gzip.compress(b" " * 10**6), {"Content-Encoding": "gzip", "Location": "/small"}),
}


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Accept-Encoding"] == "identity"
        status, body, headers = ANSWERS["/" + self.path.split("/")[1]]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(http_limits, "MAX_BYTES", 1000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


PROBLEMS = [("large", "more than 1000 bytes"), ("bomb", "compressed"), ("moved", "compressed")]


@pytest.mark.parametrize(("path", "problem"), PROBLEMS)
def test_clients(url: str, path: str, problem: str):
    with httpx2.Client(headers=UNCOMPRESSED, event_hooks=answer_limit(), follow_redirects=True) as client:
        assert client.post(f"{url}/small", json={}).json() == 1
        with pytest.raises(httpx2.DecodingError, match=problem):
            client.post(f"{url}/{path}", json={})

    async def call() -> None:
        hooks = async_answer_limit()
        async with httpx2.AsyncClient(headers=UNCOMPRESSED, event_hooks=hooks, follow_redirects=True) as client:
            assert (await client.post(f"{url}/small", json={})).json() == 1
            await client.post(f"{url}/{path}", json={})

    with pytest.raises(httpx2.DecodingError, match=problem):
        asyncio.run(call())


@pytest.mark.parametrize(("path", "problem"), PROBLEMS[:2])
def test_services_that_score(url: str, path: str, problem: str):
    if path == "large":  # what the program wrote
        assert FusionSandbox(f"{url}/{path}").run("").status == "output_limit"
    else:
        with pytest.raises(SandboxError, match=problem):
            FusionSandbox(f"{url}/{path}").run("")
    with pytest.raises(RewardError, match=problem):
        asyncio.run(RemoteScorer(f"{url}/{path}")("", "", "", {}))

    async def judge() -> None:
        await _client(f"{url}/{path}", "k", 10.0, 0).chat.completions.create(model="m", messages=[])

    with pytest.raises(openai.APIConnectionError) as caught:
        asyncio.run(judge())
    assert problem in str(caught.value.__cause__)
