"""A web server that programs of this machine reach, in a thread of this process."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

from verl.errors import ConfigError
from verl.tools.threads import LoopThread

LOOPBACK = "127.0.0.1"
"""The server has no encryption, so only programs of this machine reach it."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
END_S = 5.0
"""How long the server may take to end."""


class LoopbackServer:
    """Serves an application on 127.0.0.1, in a thread of its own.

    Args:
        app: the application.
        port: where it listens; 0 takes a free one.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, app: Starlette, port: int = 0) -> None:
        try:
            self._socket = socket.create_server((LOOPBACK, port), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used: {error.strerror}. Choose another; 0 is a free one."
            ) from error
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        # No access log: it would be written for every call. Errors of ours go to verl's own logger.
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self.thread = LoopThread("endpoint")
        self._serving = self.thread.submit(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """End the server and its connections. Idempotent."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._serving.exception(END_S)
        self.thread.stop()
        self._socket.close()
