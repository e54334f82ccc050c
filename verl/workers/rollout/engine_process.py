"""Run a rollout engine as an HTTP server on loopback: start it, send requests, detect that it died or hangs, end it.

    server = EngineProcess("vllm", command=lambda port: [python, "-m", "...", "--port", str(port)], token=new_token())
    server.start()                                   # returns when the server is healthy, or raises
    server.post("/generate", {"input_ids": [1, 2]})  # JSON in, JSON out
    server.post_many("/generate", bodies)            # all at once; the answers in the order of the bodies
    server.stream_many("/generate", bodies, take)    # the same, event by event
    server.stop()

The server never outlives this process, even if this process is killed: a guard process
(:mod:`verl.supervision.server_guard`) leads the server's process group and then kills all of it.

While requests are running the server is checked: see :class:`HangLimits`. A server that died or hangs raises
EngineLostError with the end of its log; after :meth:`EngineProcess.stop` or ``kill`` it can be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx2

from verl.base.redact import redacted
from verl.errors import EngineLostError, RolloutError
from verl.supervision import server_guard
from verl.supervision.processes import (
    MARK_VARIABLE,
    family_of,
    is_stopped,
    kill_group,
    kill_marked,
    new_mark,
    show_life,
)
from verl.workers.rollout.http_client import HttpClient, error_text

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SERVER_KEEPALIVE_S = 3600
"""Seconds for which a server keeps an idle connection open. The client must close it first, because a request sent
while the server closes the connection is lost."""
KILLED_CHILD = re.compile(r"(Failed core proc\(s\): .*|exit ?code[:=]? ?)-(9|15)\b")
"""Matches the messages of vLLM and SGLang that one of their processes was killed by SIGKILL or SIGTERM."""
_SHARED_MEMORY = "/dev/shm"
_START_POLL_S = 0.1
# How long a process that has just failed may take to end and to write its status into the log.
_EXIT_S = 2.0
# Interval of the checks of a server with running requests.
_CHECK_S = 2.0
# How long the kernel may take to end a killed server.
_END_S = 10.0
# Limits of what a message quotes from the log: its last lines, from at most so many bytes, and lines with errors.
_SHOWN_LOG_LINES = 40
_SHOWN_LOG_BYTES = 2**20
_SHOWN_ERRORS = 8
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")


@dataclass(frozen=True)
class HangLimits:
    """Time limits, in seconds, after which an engine with running requests counts as hung."""

    hang_s: float = 120.0
    """Longest time without an answered health check, or with a stopped process (SIGSTOP) of the engine."""
    answer_s: float = 1800.0
    """Longest time without an answer, or a part of one, to any request."""


class HangTimer:
    """Decide whether an engine with running requests hangs. Create one when the requests are sent."""

    def __init__(self, hang_limits: HangLimits) -> None:
        self._hang_limits = hang_limits
        self._began = self._well_at = time.monotonic()

    def check(self, problem: str | None, heard_at: float = 0.0) -> str | None:
        """Return why the engine counts as hung, or None while it is within the limits.

        Args:
            problem: what a check of the engine found just now; None if nothing.
            heard_at: ``time.monotonic()`` of the engine's last answer.
        """
        now = time.monotonic()
        if problem is None:
            self._well_at = now
        elif now - self._well_at > self._hang_limits.hang_s:
            return f"{problem}, for {self._hang_limits.hang_s:g} s"
        if now - max(self._began, heard_at) > self._hang_limits.answer_s:
            return f"gave no answer to any request for {self._hang_limits.answer_s:g} s"
        return None


@dataclass(frozen=True)
class Loss:
    """End of an engine's process."""

    text: str
    """Description of the end, with the last lines of the log."""
    was_killed: bool
    """True if a signal from outside ended it."""


class ProcessesElsewhere(Protocol):
    """The processes of an engine on other machines, as the machine of its server sees them."""

    def loss(self) -> Loss | None:
        """Return the end of one of them; None as long as all run."""

    def problem(self) -> str | None:
        """Return why one of them seems to hang; None if nothing is known."""


def new_token() -> str:
    """Make a random secret that every request to one server must carry."""
    return secrets.token_urlsafe(24)


class EngineProcess:
    """A server process that ends with this process. Requests may be sent from several threads.

    Args:
        name: name of the engine, for messages.
        command: returns the command line for a given port. The server must listen on loopback only.
        token: sent with every request as ``Authorization: Bearer``. Pass it to the server in its environment; every
            user of the machine can read a command line.
        environment: variables that the server gets in addition to those of this process; None removes one.
        health_path: path that answers 200 when the server is ready; None for processes that serve nothing, for which
            ``start`` does not wait.
        start_timeout_s: longest start, including the loading of the model.
        request_timeout_s: longest wait for one answer; None waits until the server counts as hung.
        hang_limits: limits after which the server counts as hung.
        max_connections: limit of concurrent requests of ``post_many`` and ``stream_many``; further ones are queued.
        elsewhere: the engine's processes on other machines, which the server needs.
        metrics: path of the server's metrics, and the beginnings of the lines that change while it works. An engine
            that answers many requests at once at their end makes progress without any answer.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        token: str,
        environment: Mapping[str, str | None] | None = None,
        health_path: str | None = "/health",
        start_timeout_s: float = 600.0,
        request_timeout_s: float | None = None,
        hang_limits: HangLimits | None = None,
        max_connections: int = 512,
        elsewhere: ProcessesElsewhere | None = None,
        metrics: tuple[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.name = name
        self.token = token
        self.port = 0
        self.base_url = ""
        self.folder = Path()
        """Temporary folder of this server, with its log; deleted by ``stop``."""
        self.memory_folder = Path()
        """Temporary folder for files sent to the server, in shared memory if available; deleted by ``stop``."""
        self._command = command
        self._environment = dict(environment or {})
        self._health_path = health_path
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._hang_limits = hang_limits or HangLimits()
        self._max_connections = max_connections
        self._elsewhere = elsewhere
        self._metrics = metrics
        self._guard: subprocess.Popen[bytes] | None = None
        self._http: HttpClient | None = None
        self._end: weakref.finalize[..., EngineProcess] | None = None

    # ---- life

    def start(self) -> None:
        """Start the server and wait until it is healthy. No effect on a started server.

        Raises:
            RolloutError: it ended, or was not healthy in time; the message has the end of its log.
            EngineLostError: it was killed or stopped by a signal from outside.
        """
        if self._guard is not None:
            return
        self.folder = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-"))
        in_memory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.memory_folder = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-", dir=in_memory))
        # A bound socket that never listens reserves the port: the kernel gives it to no other program, but the server
        # can bind it because both sockets set SO_REUSEADDR.
        reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((LOOPBACK, 0))
        self.port = reservation.getsockname()[1]
        self.base_url = f"http://{LOOPBACK}:{self.port}"
        command = [*map(str, self._command(self.port))]
        owner = [str(os.getpid()), f"{self.folder}{os.pathsep}{self.memory_folder}"]
        guarded = [sys.executable, "-I", "-S", server_guard.__file__, *owner, *command]
        mark = new_mark()
        variables = os.environ | self._environment | {MARK_VARIABLE: mark}
        environment = {k: v for k, v in variables.items() if v is not None}
        with self.log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        headers = {"Authorization": f"Bearer {self.token}"}
        self._http = HttpClient(self.base_url, headers, self._request_timeout_s, self._max_connections)
        self._end = weakref.finalize(
            self, _end_server, self._guard, mark, self._http, reservation, (self.folder, self.memory_folder)
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            if self._health_path is not None:
                self._wait_until_healthy()
            on_failure.pop_all()

    def _wait_until_healthy(self) -> None:
        began, timer = time.monotonic(), HangTimer(self._hang_limits)
        while not self._is_healthy():
            if not self.is_running:
                raise (EngineLostError if self._was_killed() else RolloutError)(
                    f"the {self.name} server ended while it started. The end of its log:\n{self.log_tail()}"
                )
            if self._elsewhere is not None:
                if loss := self._elsewhere.loss():
                    raise (EngineLostError if loss.was_killed else RolloutError)(
                        f"a process of the {self.name} engine on another machine ended while it started. {loss.text}"
                    )
                if hung := timer.check(self._elsewhere.problem(), heard_at=time.monotonic()):
                    raise EngineLostError(f"the {self.name} server {hung}, while it started.")
            if time.monotonic() - began > self._start_timeout_s:
                raise (EngineLostError if self._stopped_process() else RolloutError)(
                    f"the {self.name} server was not ready after {self._start_timeout_s:g} s. If the model is only "
                    f"slow to load, wait longer (start_timeout_s). The end of its log:\n{self.log_tail()}"
                )
            time.sleep(_START_POLL_S)
        logger.info("%s server: ready on port %d after %.1f s", self.name, self.port, time.monotonic() - began)

    def _is_healthy(self) -> bool:
        assert self._http is not None
        assert self._health_path is not None
        try:
            return self._http.run(self._http.status(self._health_path)) == 200
        except httpx2.TransportError:  # the server does not listen yet
            return False

    def loss(self) -> Loss | None:
        """Return how the process ended, with the end of its log; None as long as it runs."""
        if self.is_running:
            return None
        return Loss(f"It has ended.{self._log_after_exit()}", self._was_killed())

    def stopped_text(self) -> str | None:
        """Describe the process of it that is stopped by a signal, if any."""
        stopped = self._stopped_process()
        return f"has a stopped process ({stopped}; SIGSTOP)" if stopped else None

    def _was_killed(self) -> bool:
        """Return whether a signal from outside ended the server."""
        status = re.search(rf"ended with status -({signal.SIGKILL:d}|{signal.SIGTERM:d})\.", self.log_tail())
        unseen = server_guard.ENDED not in self.log_tail(lines=None)  # the guard itself was killed
        return bool(unseen or status or KILLED_CHILD.search(self.log_tail(lines=None)))

    def _stopped_process(self) -> int | None:
        """Return the id of a process of the server that is stopped (SIGSTOP), if any."""
        family = family_of(self._guard.pid) if self._guard is not None else []
        return next(filter(is_stopped, family), None)

    @property
    def is_running(self) -> bool:
        """True if the process was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def log_path(self) -> Path:
        """File with the server's standard output and error."""
        return self.folder / "server.log"

    def log_tail(self, lines: int | None = _SHOWN_LOG_LINES) -> str:
        """Return the last lines of the log with secrets removed; None returns all lines of the last MiB."""
        if not self.log_path.is_file():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _SHOWN_LOG_BYTES))
            text = log.read().decode(errors="replace")
        log_lines = redacted(text, [self.token]).splitlines()  # engines log their arguments
        return "\n".join(f"    {line}" for line in log_lines[-(lines or 0) :]) or "(empty log)"

    def stop(self) -> None:
        """End the server and all processes that it started: SIGTERM, then SIGKILL. Idempotent."""
        if self._end is not None:
            self._end()
        self._guard = self._http = self._end = None

    def kill(self) -> Path | None:
        """Kill the server and all processes that it started. Idempotent.

        Returns:
            Path of a copy of its log, in a folder that only this user can read and nothing deletes; None without a log.
        """
        log_copy = None
        if self.log_path.is_file():
            log_copy = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-log-")) / self.log_path.name
            shutil.copyfile(self.log_path, log_copy)
        if self._guard is not None and self._guard.poll() is None:
            kill_group(self._guard.pid)
        self.stop()
        return log_copy

    # ---- requests

    def get(self, path: str) -> Any:
        """Send a GET and return the JSON of the answer, or None if it is empty; raises as ``post_many``."""
        http = self._running()
        return self._result(http, http.request("GET", path))

    def text(self, path: str) -> str:
        """Return the text of a GET, which the server is not given long for.

        Raises:
            RolloutError: the server refused it.
            EngineLostError: it did not answer; whoever waits for its work learns more.
        """
        http = self._running()
        try:
            return http.run(http.text(path))
        except httpx2.HTTPStatusError as error:
            raise RolloutError(
                f"the {self.name} server refused GET {path} with status {error.response.status_code}."
            ) from None
        except httpx2.TransportError as error:
            raise EngineLostError(f"the {self.name} server did not answer {path} ({type(error).__name__}).") from None

    def post(self, path: str, body: object = None) -> Any:
        """POST ``body`` as JSON and return the JSON of the answer, or None if it is empty; raises as ``post_many``."""
        http = self._running()
        return self._result(http, http.request("POST", path, body))

    def post_many(
        self,
        path: str,
        bodies: Sequence[object],
        *,
        cancelled: threading.Event | None = None,
        cancel: tuple[str, object] | None = None,
        take: Callable[[int, object], object] | None = None,
    ) -> list[Any]:
        """POST all bodies as JSON at once and return the answers in their order.

        Args:
            path: of all requests.
            bodies: one for each request: JSON, or a context manager that gives it, entered when the request is sent and
                left when it is answered.
            cancelled: once set, unsent requests are skipped (their answer is None), and ``cancel`` is sent repeatedly
                until all others are answered.
            cancel: path and body of the request that makes the server abort its running requests.
            take: called with the index of the body and its answer as soon as it arrives, in the client's thread, so
                that answers are kept if the server is lost later.

        Raises:
            RolloutError: the server refused a request; the message has its reason.
            EngineLostError: the server died or did not answer in time; the message has the end of its log.
        """
        http = self._running()
        return self._result(http, http.post_all(path, bodies, cancelled or threading.Event(), cancel, take))

    def stream_many(
        self,
        path: str,
        bodies: Sequence[object],
        take: Callable[[int, object], bool],
        *,
        cancelled: threading.Event | None = None,
    ) -> None:
        """POST all bodies as JSON at once, for answers that are streams of server-sent events; raises as ``post_many``.

        Args:
            path: of all requests.
            bodies: as for ``post_many``.
            take: called with the index of the body and the JSON of each event, in the client's thread. If it returns
                true the connection is closed, which makes the server abort the request.
            cancelled: once set, each connection is closed at its next event.
        """
        http = self._running()
        self._result(http, http.stream_all(path, bodies, take, cancelled or threading.Event()))

    def run(self, work: Callable[[HttpClient], Coroutine[object, object, None]]) -> None:
        """Run a coroutine that sends requests of its own, while the server is watched; raises as ``post_many``."""
        http = self._running()
        self._result(http, work(http))

    def _running(self) -> HttpClient:
        if self._guard is None:
            raise RolloutError(f"the {self.name} server does not run. Start it first.")
        if self._http is None or not self.is_running:
            raise EngineLostError(f"the {self.name} server does not run.{self._log_after_exit()}")
        return self._http

    def _result(self, http: HttpClient, work: Coroutine[object, object, T]) -> T:
        try:
            return http.run(self._unless_lost(http, work))
        except httpx2.HTTPStatusError as error:
            answer = error.response
            lost = answer.is_server_error and not self._still_serves()
            raise (EngineLostError if lost else RolloutError)(
                f"the {self.name} server refused {answer.request.method} {answer.request.url.path} with status "
                f"{answer.status_code}: {error_text(answer)}{self._errors_in_log() if answer.is_server_error else ''}"
            ) from None
        except httpx2.TimeoutException:
            problem = f"did not answer within {self._request_timeout_s} s"
        except httpx2.TransportError as error:
            problem = f"broke a connection ({type(error).__name__})"
        except _LostError as error:
            problem = str(error)
        raise EngineLostError(f"the {self.name} server {problem}.{self._log_after_exit()}")

    async def _unless_lost(self, http: HttpClient, work: Coroutine[object, object, T]) -> T:
        """Return the result of the work; raise _LostError if the server dies or hangs before it is done."""
        task, timer, progress = asyncio.ensure_future(work), HangTimer(self._hang_limits), None
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_CHECK_S)
                if done:
                    return task.result()
                if not self.is_running:
                    raise _LostError("has ended")
                if self._elsewhere is not None and (loss := self._elsewhere.loss()):
                    raise _LostError(f"lost a process on another machine. {loss.text}")
                if time.monotonic() - http.heard_at > self._hang_limits.answer_s / 10:
                    progress, before = await self._progress(http), progress
                    if progress and before and progress != before:
                        http.heard_at = time.monotonic()
                if time.monotonic() - http.heard_at < 2 * _CHECK_S:
                    show_life()
                if hung := timer.check(await self._problem(http), http.heard_at):
                    raise _LostError(hung)
        finally:
            task.cancel()

    async def _problem(self, http: HttpClient) -> str | None:
        problem = self.stopped_text()
        if problem is None and self._elsewhere is not None:
            problem = self._elsewhere.problem()
        if problem is not None:
            return problem
        assert self._health_path is not None
        try:
            status = await http.status(self._health_path)
        except httpx2.TransportError as error:
            return f"does not answer {self._health_path} ({type(error).__name__})"
        return None if status == 200 else f"answers {self._health_path} with status {status}"

    async def _progress(self, http: HttpClient) -> list[str]:
        """Return what changes while the server works; nothing if it does not tell."""
        if self._metrics is None:
            return []
        path, names = self._metrics
        with contextlib.suppress(httpx2.HTTPError):  # a server that does not answer fails its health check, too
            return [line for line in (await http.text(path)).splitlines() if line.startswith(names)]
        return []

    def _still_serves(self) -> bool:
        self._wait_for_exit()  # a crashing server may refuse a request just before it ends
        return self.is_running and self._is_healthy()

    def _errors_in_log(self) -> str:
        lines = [line.strip() for line in self.log_tail(lines=None).splitlines() if _ERROR_LINE.search(line)]
        last = list(dict.fromkeys(lines))[-_SHOWN_ERRORS:]
        return " Errors in its log:\n" + "\n".join(f"    {line}" for line in last) if last else ""

    def _log_after_exit(self) -> str:
        self._wait_for_exit()  # the guard then has written the exit status into the log
        return f" The end of its log:\n{self.log_tail()}"

    def _wait_for_exit(self) -> None:
        assert self._guard is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_EXIT_S)


class _LostError(Exception):
    """The server died or hangs; the message says which."""


def _end_server(
    guard: subprocess.Popen[bytes],
    mark: str,
    http: HttpClient,
    reservation: socket.socket,
    folders: tuple[Path, ...],
) -> None:
    http.close()
    if guard.poll() is None:
        guard.terminate()
        guard.send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after it continues
        try:
            guard.wait(server_guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            kill_group(guard.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_END_S)
    kill_marked(mark)  # processes that left the group, or remain because the guard itself was killed
    reservation.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
