"""A service that answers as SandboxFusion does, over real HTTP, with the sandbox of this machine behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.plugins.sandbox import Limits, Sandbox


class Service(ThreadingHTTPServer):
    """Counts requests, and answers the first ones with given statuses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.first: list[int] = []
        """HTTP statuses of the next requests."""
        self.answer: Any = None
        """What to answer instead of running the program."""
        self.now = 0
        self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(body)
            server.now += 1
            server.most_at_once = max(server.most_at_once, server.now)
            status = server.first.pop(0) if server.first else 200
        try:
            if self.path != "/run_code":
                status = 404
            answer = server.answer if server.answer is not None else run_code(body) if status == 200 else {"no": status}
        finally:
            with server.lock:
                server.now -= 1
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def run_code(body: dict[str, Any]) -> dict[str, Any]:
    """One program, reported in the words of SandboxFusion: Python's return codes, where a signal is negative."""
    limits = Limits(wall_s=body["run_timeout"], cpu_s=60, memory_mb=body["memory_limit_MB"], max_output_bytes=1 << 22)
    outcome = Sandbox().run(body["code"], body["stdin"], limits)
    result: dict[str, Any] = {"stdout": outcome.stdout, "stderr": outcome.stderr, "execution_time": outcome.seconds}
    if outcome.status == "timeout":
        result |= {"status": "TimeLimitExceeded", "return_code": None}
    else:
        import signal

        code = -signal.Signals[outcome.signal].value if outcome.signal else outcome.exit_code
        result |= {"status": "Finished", "return_code": code}
    return {
        "status": "Success" if outcome.ok else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


@contextmanager
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
