"""A small server of the chat-completions protocol, whose replies a test chooses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status and body; text and bytes are sent as they are, anything else as JSON."""


def completion(content: str | None, top: dict[str, float] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion; ``top`` are the log-probs of the first token's candidates."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content},
    }
    if top is not None:
        candidates = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in top.items()]
        choice["logprobs"] = {"content": [{"token": "?", "logprob": 0.0, "bytes": None, "top_logprobs": candidates}]}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}


class JudgeServer:
    """Requests received, and what answers them: ``answer(request body, number of the request)``."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer], delay_s: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.released = threading.Event()
        outer, lock, running = self, threading.Lock(), [0]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(body | {"path": self.path})
                    outer.keys.append(self.headers["Authorization"])
                    number = len(outer.requests)
                    running[0] += 1
                    outer.most_at_once = max(outer.most_at_once, running[0])
                time.sleep(delay_s)
                status, reply = answer(body, number)
                with lock:
                    running[0] -= 1
                if status == 0:  # never answers
                    outer.released.wait(30)
                    self.close_connection = True
                    return
                data = (
                    reply
                    if isinstance(reply, bytes)
                    else (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                )
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After-Ms", "10")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def judge_server(*replies: Any, delay_s: float = 0.0) -> Iterator[JudgeServer]:
    """A server that gives these replies one after the other and the last one for ever.

    A reply is the text of a completion, a body, an :data:`Answer`, or a function of the request's body.
    """

    def answer(body: dict[str, Any], number: int) -> Answer:
        reply = replies[min(number, len(replies)) - 1]
        if callable(reply):
            reply = reply(body)
        if isinstance(reply, tuple):
            return reply
        return 200, completion(reply) if isinstance(reply, str) else reply

    server = JudgeServer(answer, delay_s)
    try:
        yield server
    finally:
        server.close()
