"""Send many concurrent HTTP requests to a server on loopback from synchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import httpx2

from verl.errors import RolloutError

T = TypeVar("T")

# Time limit of a health check.
_HEALTH_S = 10.0
# Connections reserved for health checks and aborts while all others are in use.
_CONTROL_CONNECTIONS = 8
# Shorter than the server's (SERVER_KEEPALIVE_S), so that the server never closes a connection that is being used.
_KEEPALIVE_S = 5.0
_CANCEL_AGAIN_S = 0.1
_EVENT, _LAST_EVENT = "data:", "[DONE]"


class HttpClient:
    """Asynchronous HTTP client with an event loop in its own thread; usable with or without an event loop outside.

    Run its coroutines with :meth:`run`, from any thread.

    Args:
        base_url: URL of the server.
        headers: headers of every request.
        timeout_s: longest wait for one answer; None sets no limit.
        connections: limit of concurrent requests of ``post_all`` and ``stream_all``.
    """

    def __init__(self, base_url: str, headers: dict[str, str], timeout_s: float | None, connections: int) -> None:
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
        """``time.monotonic()`` of the last answer, or part of one; health checks and aborts do not count."""
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine and return its result; an interruption (Ctrl-C) cancels its requests."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop.is_running():
            with contextlib.suppress(TimeoutError):  # a daemon thread: it ends with the process anyway
                asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(timeout=5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    async def status(self, path: str) -> int:
        """Return the status code of a GET with a short time limit."""
        return (await self._client.get(path, timeout=_HEALTH_S)).status_code

    async def text(self, path: str) -> str:
        """Return the text that a GET with a short time limit gives."""
        answer = await self._client.get(path, timeout=_HEALTH_S)
        answer.raise_for_status()
        return answer.text

    async def request(self, method: str, path: str, body: object = None, is_work: bool = True) -> Any:
        """Send a JSON body and return the JSON of the answer, or None if it is of another type.

        ``is_work`` False leaves ``heard_at`` as it is: the answer does not show that generation makes progress.
        """
        answer = await self._client.request(method, path, json=body)
        if is_work:
            self.heard_at = time.monotonic()
        answer.raise_for_status()
        is_json = answer.content and "json" in answer.headers.get("content-type", "")
        return json.loads(answer.content) if is_json else None

    async def post_all(
        self,
        path: str,
        bodies: Sequence[object],
        cancelled: threading.Event,
        cancel: tuple[str, object] | None,
        take: Callable[[int, object], object] | None,
    ) -> list[object]:
        """See :meth:`verl.workers.rollout.engine_process.EngineProcess.post_many`."""

        async def post(index: int, body: object) -> object:
            async with self._slots:
                if cancelled.is_set():
                    return None
                with _opened(body) as content:
                    answer = await self.request("POST", path, content)
                if take is not None:
                    take(index, answer)
                return answer

        tasks = [asyncio.ensure_future(post(index, body)) for index, body in enumerate(bodies)]
        try:
            waiting: set[asyncio.Future[object]] = set(tasks)
            while waiting:
                pause = None if cancel is None else _CANCEL_AGAIN_S
                done, waiting = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()  # raises the first error
                if waiting and cancel is not None and cancelled.is_set():
                    # Repeated, because a request that is still being sent is not yet known to the server.
                    await self.request("POST", *cancel, is_work=False)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:  # after an error the other answers are not needed
                task.cancel()

    async def stream_all(
        self, path: str, bodies: Sequence[object], take: Callable[[int, object], bool], cancelled: threading.Event
    ) -> None:
        """See :meth:`verl.workers.rollout.engine_process.EngineProcess.stream_many`."""
        tasks = [
            asyncio.ensure_future(self.stream(path, body, functools.partial(take, index), cancelled))
            for index, body in enumerate(bodies)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stream(self, path: str, body: object, take: Callable[[object], bool], cancelled: threading.Event) -> None:
        """Send one of the requests of ``stream_all``."""
        async with self._slots:
            if cancelled.is_set():
                return
            with _opened(body) as content:
                async with self._client.stream("POST", path, json=content) as answer:
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


def _opened(body: object) -> AbstractContextManager[object]:
    """Return a context in which a body holds that is made when its request is sent."""
    return body if isinstance(body, AbstractContextManager) else contextlib.nullcontext(body)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the refusal of a request (status 4xx) into a RolloutError; a failure of the server remains as it is."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        if not error.response.is_client_error:
            raise
        raise RolloutError(
            f"the engine's server refused a request with status {error.response.status_code}: "
            f"{error_text(error.response)}"
        ) from None


def error_text(answer: httpx2.Response) -> str:
    """Extract the message, at most 2000 characters, of an error response in vLLM's or SGLang's format."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:2000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
