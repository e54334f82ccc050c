"""A rollout engine in a process of its own, behind HTTP on loopback: start, wait, call, end. For any engine.

    server = EngineServer("vllm", command=lambda port: [python, "-m", "...", "--port", str(port)], token=new_token())
    server.start()                                   # returns when the server is healthy, or raises
    server.post("/generate", {"input_ids": [1, 2]})  # JSON in, JSON out
    server.post_many("/generate", bodies)            # all at once; the answers in the order of the bodies
    server.stream_many("/generate", bodies, take)    # the same, event by event
    server.stop()                                    # also when the interpreter ends, and when this process is killed

The server never outlives this process: a guard (:mod:`verl.workers.rollout.server_guard`) leads its process
group, and kills all of it when this process is gone, however it went.

While a request is under way the server is looked after: it must live, its health check must be answered, none of
its processes may be stopped, and now and then something must be answered. Where that fails, EngineLostError says so
with the end of the log, and :meth:`EngineServer.start` can start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from verl.errors import EngineLostError, RolloutError
from verl.utils.marked_processes import VARIABLE, kill_marked, new_mark
from verl.utils.redact import redacted
from verl.workers.rollout import server_guard

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_LAST_WORDS_S = 2.0
_PROBE_S = 2.0
"""How often a server with requests under way is looked after."""
_HEALTH_S = 10.0
"""How long one health check may take."""
_END_S = 10.0
"""How long the kernel may take to clear away a killed server."""
_SHOWN_LOG_LINES = 40
_SHOWN_LOG_BYTES = 2**20
_SHOWN_ERRORS = 8
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: ")
KILLED_CHILD = re.compile(r"(Failed core proc\(s\): .*|exit ?code[:=]? ?)-(9|15)\b")
"""How engines say that one of their processes was killed by a signal."""
_CONTROL_CONNECTIONS = 8
_KEEPALIVE_S = 5.0
SERVER_KEEPALIVE_S = 3600
"""So long a server should keep an idle connection open. This side closes it first: a request that is sent while the
server closes the connection would be lost."""
_EVENT, _LAST_EVENT = "data:", "[DONE]"


@dataclass(frozen=True)
class Patience:
    """How long a server may hang while a request is under way, in seconds."""

    hang_s: float = 120.0
    """Without an answered health check, or with a process of the server stopped (SIGSTOP)."""
    answer_s: float = 1800.0
    """Without an answer, or a part of one, to any request."""


def new_token() -> str:
    """A secret for one server: who cannot read it cannot use the server."""
    return secrets.token_urlsafe(24)


class EngineServer:
    """One server process that belongs to this process.

    Args:
        name: of the engine, for messages.
        command: from the port to listen on to the command line. The server must listen on loopback alone.
        token: sent with every request as ``Authorization: Bearer``. Give it to the server through its
            environment; a command line can be read by everyone on the machine.
        environment: variables for the server beside those of this process; None takes one away.
        health_path: answers 200 when the server is ready.
        start_timeout_s: longest start, with the loading of the model.
        request_timeout_s: longest wait for one answer; None waits as long as the server is well.
        patience: how long the server may hang while a request is under way.
        max_connections: requests of ``post_many`` and ``stream_many`` under way at once; more wait here.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        token: str,
        environment: Mapping[str, str | None] | None = None,
        health_path: str = "/health",
        start_timeout_s: float = 600.0,
        request_timeout_s: float | None = None,
        patience: Patience | None = None,
        max_connections: int = 512,
    ) -> None:
        self.name = name
        self.token = token
        self.port = 0
        self.base_url = ""
        self.folder = Path()
        """For this server alone, with its log; gone after ``stop``."""
        self.memory_folder = Path()
        """The same on a file system in memory where there is one: for what goes to the server by file."""
        self._command = command
        self._environment = dict(environment or {})
        self._health_path = health_path
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._patience = patience or Patience()
        self._max_connections = max_connections
        self._guard: subprocess.Popen[bytes] | None = None
        self._http: _HttpThread | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    # ---- life

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            RolloutError: it ended, or was not healthy in time; the message has the end of its log.
            EngineLostError: it was killed, or stopped, from outside.
        """
        if self._guard is not None:
            return
        self.folder = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-"))
        self.memory_folder = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-", dir=_in_memory()))
        reservation = _reserve_port()
        self.port = reservation.getsockname()[1]
        self.base_url = f"http://{LOOPBACK}:{self.port}"
        command = [*map(str, self._command(self.port))]
        owner = [str(os.getpid()), f"{self.folder}{os.pathsep}{self.memory_folder}"]
        guarded = [sys.executable, "-I", "-S", server_guard.__file__, *owner, *command]
        mark = new_mark()
        variables = os.environ | self._environment | {VARIABLE: mark}
        environment = {k: v for k, v in variables.items() if v is not None}
        with self.log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        headers = {"Authorization": f"Bearer {self.token}"}
        self._http = _HttpThread(self.base_url, headers, self._request_timeout_s, self._max_connections)
        self._end = weakref.finalize(
            self, _end_server, self._guard, mark, self._http, reservation, (self.folder, self.memory_folder)
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            self._wait_until_healthy()
            on_failure.pop_all()

    def _wait_until_healthy(self) -> None:
        began = time.monotonic()
        while not self._is_healthy():
            if not self.is_running:
                raise (EngineLostError if self._was_killed() else RolloutError)(
                    f"the {self.name} server ended while it started. The end of its log:\n{self.log_tail()}"
                )
            if time.monotonic() - began > self._start_timeout_s:
                raise (EngineLostError if self._stopped_processes() else RolloutError)(
                    f"the {self.name} server was not ready after {self._start_timeout_s:g} s. If the model is only "
                    f"slow to load, wait longer (start_timeout_s). The end of its log:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)
        logger.info("%s server: ready on port %d after %.1f s", self.name, self.port, time.monotonic() - began)

    def _is_healthy(self) -> bool:
        import httpx2

        assert self._http is not None
        try:
            return self._http.run(self._http.status(self._health_path)) == 200
        except httpx2.TransportError:  # nobody listens yet
            return False

    def _was_killed(self) -> bool:
        """Whether the server ended by a signal that others send."""
        ended = re.search(rf"ended with status -({signal.SIGKILL:d}|{signal.SIGTERM:d})\.", self.log_tail())
        unseen = server_guard.ENDED not in self.log_tail(lines=None)  # the guard was killed itself
        return bool(unseen or ended or KILLED_CHILD.search(self.log_tail(lines=None)))

    def _stopped_processes(self) -> list[psutil.Process]:
        """Processes of the server that somebody has stopped (SIGSTOP)."""
        try:
            guard = psutil.Process(self._guard.pid if self._guard is not None else -1)
            family = [guard, *guard.children(recursive=True)]
        except (psutil.Error, ValueError):
            return []
        return [process for process in family if _is_stopped(process)]

    @property
    def is_running(self) -> bool:
        """The process was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def log_path(self) -> Path:
        """What the server writes to its standard output and error."""
        return self.folder / "server.log"

    def log_tail(self, lines: int | None = _SHOWN_LOG_LINES) -> str:
        """The last lines of the log, without secrets; None: of the last megabyte all."""
        if not self.log_path.is_file():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _SHOWN_LOG_BYTES))
            text = log.read().decode(errors="replace")
        found = redacted(text, [self.token]).splitlines()  # engines like to write down how they were started
        return "\n".join(f"    {line}" for line in found[-(lines or 0) :]) or "(empty log)"

    def stop(self) -> None:
        """End the server and everything that it started. Idempotent."""
        if self._end is not None:
            self._end()
        self._guard = self._http = self._end = None

    def kill(self) -> Path | None:
        """End the server and everything that it started, at once. Idempotent.

        Returns:
            a copy of its log that is kept, in a folder that this account alone may read; None if there was none.
        """
        kept = None
        if self.log_path.is_file():
            kept = Path(tempfile.mkdtemp(prefix=f"verl-{self.name}-log-")) / self.log_path.name
            shutil.copyfile(self.log_path, kept)
        if self._guard is not None and self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        self.stop()
        return kept

    # ---- requests

    def get(self, path: str) -> Any:
        """The answer to a GET; None for an empty one.

        Raises:
            RolloutError: as for ``post_many``.
        """
        return self._run(lambda http: http.one("GET", path, None))

    def post(self, path: str, body: Any = None) -> Any:
        """The answer to a POST of ``body`` as JSON; None for an empty one.

        Raises:
            RolloutError: as for ``post_many``.
        """
        return self._run(lambda http: http.one("POST", path, body))

    def post_many(
        self,
        path: str,
        bodies: Sequence[Any],
        *,
        cancelled: threading.Event | None = None,
        cancel: tuple[str, Any] | None = None,
        take: Callable[[int, Any], object] | None = None,
    ) -> list[Any]:
        """POST all bodies at once; the answers in their order.

        May be called from several threads.

        Args:
            path: for all of them.
            bodies: each becomes JSON.
            cancelled: once it is set, what was not sent yet is not sent (its answer is None), and ``cancel`` is sent
                again and again until all others are answered.
            cancel: path and body of the request that makes the server end what it works on.
            take: called with the number of the body and the answer as soon as it is there, in a thread of this module;
                so that what was answered is not lost with the server.

        Raises:
            RolloutError: the server refused a request (with its reason).
            EngineLostError: it did not answer in time, or died (with the end of its log).
        """
        return self._run(lambda http: http.post_all(path, bodies, cancelled or threading.Event(), cancel, take))

    def stream_many(
        self,
        path: str,
        bodies: Sequence[Any],
        take: Callable[[int, Any], bool],
        *,
        cancelled: threading.Event | None = None,
    ) -> None:
        """POST all bodies at once, for answers that come as a stream of server-sent events.

        Args:
            path: for all of them.
            bodies: each becomes JSON.
            take: called with the number of the body and the JSON of each event, in a thread of this module; once it
                returns true the connection is closed, which makes the server end the work.
            cancelled: once it is set, all connections are closed at their next event.

        Raises:
            RolloutError: as for ``post_many``.
        """
        self._run(lambda http: http.stream_all(path, bodies, take, cancelled or threading.Event()))

    def _run(self, work: Callable[[_HttpThread], Coroutine[Any, Any, T]]) -> T:
        import httpx2

        if self._guard is None:
            raise RolloutError(f"the {self.name} server does not run. Start it first.")
        if self._http is None or not self.is_running:
            raise EngineLostError(f"the {self.name} server does not run.{self._last_words()}")
        try:
            return self._http.run(self._watched(self._http, work(self._http)))
        except httpx2.HTTPStatusError as error:
            answer = error.response
            lost = answer.is_server_error and not self._is_well()
            raise (EngineLostError if lost else RolloutError)(
                f"the {self.name} server refused {answer.request.method} {answer.request.url.path} with status "
                f"{answer.status_code}: {_reason(answer)}{self._errors_in_log() if answer.is_server_error else ''}"
            ) from None
        except httpx2.TimeoutException:
            raise EngineLostError(
                f"the {self.name} server did not answer within {self._request_timeout_s} s.{self._last_words()}"
            ) from None
        except httpx2.TransportError as error:
            raise EngineLostError(
                f"the {self.name} server broke a connection ({type(error).__name__}).{self._last_words()}"
            ) from None
        except _HungError as error:
            raise EngineLostError(f"the {self.name} server {error}.{self._last_words()}") from None

    async def _watched(self, http: _HttpThread, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, unless the server is found to be lost before."""
        task, began = asyncio.ensure_future(work), time.monotonic()
        well_at = began
        try:
            while True:
                ended, _ = await asyncio.wait({task}, timeout=_PROBE_S)
                if ended:
                    return task.result()
                if not self.is_running:
                    raise _HungError("has ended")
                problem = await self._problem(http)
                now = time.monotonic()
                if problem is None:
                    well_at = now
                elif now - well_at > self._patience.hang_s:
                    raise _HungError(f"{problem}, for {self._patience.hang_s:g} s")
                if now - max(began, http.heard_at) > self._patience.answer_s:
                    raise _HungError(f"gave no answer to any request for {self._patience.answer_s:g} s")
        finally:
            task.cancel()

    async def _problem(self, http: _HttpThread) -> str | None:
        import httpx2

        if stopped := self._stopped_processes():
            return f"has a stopped process ({stopped[0].pid}; SIGSTOP)"
        try:
            status = await http.status(self._health_path)
        except httpx2.TransportError as error:
            return f"does not answer {self._health_path} ({type(error).__name__})"
        return None if status == 200 else f"answers {self._health_path} with status {status}"

    def _is_well(self) -> bool:
        """Whether the server still runs, and says so, a moment after it refused something."""
        assert self._guard is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_LAST_WORDS_S)
        return self.is_running and self._is_healthy()

    def _errors_in_log(self) -> str:
        lines = [line.strip() for line in self.log_tail(lines=None).splitlines() if _ERROR_LINE.search(line)]
        last = list(dict.fromkeys(lines))[-_SHOWN_ERRORS:]
        return " Errors in its log:\n" + "\n".join(f"    {line}" for line in last) if last else ""

    def _last_words(self) -> str:
        assert self._guard is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_LAST_WORDS_S)  # one that is just dying has its status in the log then
        return f" The end of its log:\n{self.log_tail()}"


class _HungError(Exception):
    """What is wrong with the server."""


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:  # it has ended
        return False


def _reason(answer: httpx2.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:2000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]


def _in_memory() -> str | None:
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and os.access(shm, os.W_OK) else None


def _reserve_port() -> socket.socket:
    """A bound socket that never listens: with SO_REUSEADDR on both sides the server can bind the port, others get
    no such port from the kernel.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((LOOPBACK, 0))
    return reservation


def _end_server(
    guard: subprocess.Popen[bytes],
    mark: str,
    http: _HttpThread,
    reservation: socket.socket,
    folders: tuple[Path, ...],
) -> None:
    http.close()
    if guard.poll() is None:
        guard.terminate()
        guard.send_signal(signal.SIGCONT)  # one that somebody has stopped ends only if it goes on
        try:
            guard.wait(server_guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(guard.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(_END_S)
    kill_marked(mark)  # what the guard did not end, because it was killed itself, or because it left the group
    reservation.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class _HttpThread:
    """An asynchronous client in a thread of its own, so that callers need no event loop (and may have one)."""

    def __init__(self, base_url: str, headers: dict[str, str], timeout_s: float | None, connections: int) -> None:
        import httpx2

        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(connections)
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, pool=None),
            limits=httpx2.Limits(
                max_connections=connections + _CONTROL_CONNECTIONS,
                max_keepalive_connections=connections,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            trust_env=False,  # no proxy between this process and its own server
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-http", daemon=True)
        self.heard_at = time.monotonic()
        """When the last answer, or a part of one, came."""
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # an interrupted caller leaves no requests behind

    async def status(self, path: str) -> int:
        return (await self._client.get(path, timeout=_HEALTH_S)).status_code

    async def one(self, method: str, path: str, body: Any, is_work: bool = True) -> Any:
        answer = await self._client.request(method, path, json=body)
        if is_work:
            self.heard_at = time.monotonic()
        answer.raise_for_status()
        return json.loads(answer.content) if answer.content else None

    async def post_all(
        self,
        path: str,
        bodies: Sequence[Any],
        cancelled: threading.Event,
        cancel: tuple[str, Any] | None,
        take: Callable[[int, Any], object] | None,
    ) -> list[Any]:
        takes = [functools.partial(take, number) if take else None for number in range(len(bodies))]
        tasks = [
            asyncio.ensure_future(self._in_turn(path, body, cancelled, own))
            for body, own in zip(bodies, takes, strict=True)
        ]
        try:
            waiting: set[asyncio.Future[Any]] = set(tasks)
            while waiting:
                patience = None if cancel is None else _POLL_S
                ended, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
                for task in ended:
                    task.result()  # the first error is everyone's
                if waiting and cancel is not None and cancelled.is_set():
                    # Again and again: a request that is just on its way is not known to the server yet.
                    await self.one("POST", *cancel, is_work=False)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:  # after one failed, nobody waits for the others
                task.cancel()

    async def _in_turn(
        self, path: str, body: Any, cancelled: threading.Event, take: Callable[[Any], object] | None
    ) -> Any:
        async with self._slots:
            if cancelled.is_set():
                return None
            answer = await self.one("POST", path, body)
            if take is not None:
                take(answer)
            return answer

    async def stream_all(
        self, path: str, bodies: Sequence[Any], take: Callable[[int, Any], bool], cancelled: threading.Event
    ) -> None:
        takes = [functools.partial(take, number) for number in range(len(bodies))]
        tasks = [
            asyncio.ensure_future(self._stream(path, body, own, cancelled))
            for body, own in zip(bodies, takes, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(self, path: str, body: Any, take: Callable[[Any], bool], cancelled: threading.Event) -> None:
        import httpx2

        async with self._slots:
            if cancelled.is_set():
                return
            async with self._client.stream("POST", path, json=body) as answer:
                if answer.is_error:
                    await answer.aread()
                answer.raise_for_status()
                is_whole = False
                async for line in answer.aiter_lines():
                    self.heard_at = time.monotonic()
                    event = line.removeprefix(_EVENT).strip()
                    is_whole = is_whole or event == _LAST_EVENT
                    if not line.startswith(_EVENT) or event == _LAST_EVENT:
                        continue
                    if take(json.loads(event)) or cancelled.is_set():
                        return
                if not is_whole:
                    raise httpx2.RemoteProtocolError("the stream of events ended before its last one")

    def close(self) -> None:
        if self._loop.is_running():
            with contextlib.suppress(TimeoutError):  # the thread ends with the process
                asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(timeout=5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
