"""Web servers that programs of this machine reach, and their limits for clients that have not shown a key."""

from __future__ import annotations

import asyncio
import resource
import socket

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verl.errors import ConfigError
from verl.tools.threads import LoopThread

LOOPBACK = "127.0.0.1"
"""The server has no encryption, so only programs of this machine reach it."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
HEADER_S = 10.0
"""Seconds in which a client has to send the header of a request."""
HEADER_BYTES = 64 * 2**10
"""Longest header of a request, with its URL."""
REFUSED = frozenset({401, 403, 404, 405, 413, 421})
"""Statuses of requests that are not let in; the rest of their bodies is not read, so their connections are closed."""
END_S = 5.0
"""Seconds in which the server has to end."""


def listen(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1.

    Args:
        port: where it listens; 0 takes a free one.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error.strerror}. Choose another; 0 is a free one.") from error
    # Connections inherit it. asyncio sets it only on sockets with a protocol number, which this one does not have, and
    # without it the second packet of a response waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class LoopbackConfig(uvicorn.Config):
    """Settings of a web server on loopback.

    Args:
        app: the application.
        graceful_s: how long open responses may go on when the server ends; without a bound by default.
    """

    def __init__(self, app: ASGIApp, graceful_s: int | None = None) -> None:
        super().__init__(
            _closes_refused(app),
            http=BoundedProtocol,
            ws="none",
            # No access log: it would be written for every call. Errors of ours go to verl's own logger.
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=graceful_s,
        )
        self.strangers: dict[BoundedProtocol, None] = {}
        """Connections whose first header has not arrived, the oldest first."""
        self.max_strangers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class BoundedProtocol(HttpToolsProtocol):
    """A connection, which is closed if the header of a request is late or too long.

    Connections whose first header has not arrived take at most half of the files that the process may open: beyond
    that the oldest of them is closed. A request that is let in has shown its key, since others get an answer that
    closes the connection.
    """

    config: LoopbackConfig
    _has_open_header = True
    _header_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the deadline of the first header."""
        super().connection_made(transport)
        strangers = self.config.strangers
        strangers[self] = None
        if len(strangers) > self.config.max_strangers:
            next(iter(strangers))._end_header(closes=True)
        self._deadline = self.loop.call_later(HEADER_S, self._end_header, True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._end_header()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self._has_open_header:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._has_open_header and self._header_bytes > HEADER_BYTES:
            self._end_header(closes=True)

    def on_message_begin(self) -> None:
        """Start the deadline of a later header."""
        super().on_message_begin()
        self._has_open_header = True
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_S, self._end_header, True)

    def on_headers_complete(self) -> None:
        """Cancel the deadline."""
        self._end_header()
        super().on_headers_complete()

    def _end_header(self, closes: bool = False) -> None:
        self._has_open_header, self._header_bytes = False, 0
        self.config.strangers.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if closes:
            self.transport.abort()


def _closes_refused(app: ASGIApp) -> ASGIApp:
    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message.get("status") in REFUSED:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await app(scope, receive, send_closing)

    return respond


class LoopbackServer:
    """Serves an application on 127.0.0.1, in a thread of its own.

    Args:
        app: the application.
        port: where it listens; 0 takes a free one.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        self._socket = listen(port)
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(LoopbackConfig(app))
        self.thread = LoopThread("endpoint")
        self._serving = self.thread.submit(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """End the server and its connections. Idempotent."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._serving.exception(END_S)
        self.thread.stop()
        self._socket.close()
