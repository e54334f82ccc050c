"""Connections to MCP servers, over stdio and streamable HTTP, that any thread may use."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, Tool

from verl.base.redact import redacted
from verl.base.registry import suggest
from verl.base.types import JsonMapping, JsonObject
from verl.errors import ConfigError, VerlError
from verl.tools.threads import LoopThread

START_S = 60.0
"""Seconds in which a server has to start and to answer for the first time."""
CLOSE_S = 10.0
"""Seconds in which a connection has to end."""
ATTEMPTS = 3
"""Attempts at a repeatable call, if the server is lost each time."""
SIGN_OF_LIFE_S = 5.0
"""Seconds in which a server has to list its tools after one of its calls has timed out."""
logger = logging.getLogger(__name__)
KEYS = ("command", "args", "env", "cwd", "url", "headers", "auth_token", "type", "transport")


class McpServerError(VerlError, RuntimeError):
    """An MCP server cannot be reached, or was lost in a call."""


class McpConnection:
    """One server. It is connected at the first use, and again after it was lost.

    All connections of a process live on one event loop in a thread of its own. A call that was under way when the
    server was lost is made again only if the server declares the tool as read-only or idempotent; any other call may
    have had an effect.

    Args:
        name: name of the server, for messages.
        settings: ``command``, ``args``, ``env``, ``cwd`` of a server that is started here and spoken to over stdio;
            or ``url``, ``headers``, ``auth_token`` of one that is reached over streamable HTTP.

    Raises:
        ConfigError: the settings are neither.
    """

    def __init__(self, name: str, settings: JsonMapping) -> None:
        for key in settings:
            if key not in KEYS:
                raise ConfigError(f"the MCP server '{name}' has the unknown key '{key}'.{suggest(key, KEYS)}")
        if ("command" in settings) == ("url" in settings):
            raise ConfigError(f"the MCP server '{name}' needs either 'command' (stdio) or 'url' (streamable HTTP).")
        self.name = name
        self._settings = settings
        self._repeatable: set[str] = set()
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._connecting: asyncio.Task[Client] | None = None
        """These belong to the loop of :func:`_thread`."""

    def list_tools(self) -> list[Tool]:
        """Return the tools of the server.

        Raises:
            McpServerError: it cannot be reached.
        """
        return _thread().submit(self._list_tools()).result()

    async def call_tool(self, name: str, arguments: JsonObject) -> CallToolResult:
        """Call a tool, from any event loop; a cancelled wait cancels the call.

        A call that is lost with the server is made up to ``ATTEMPTS`` times if the tool's annotations say that it only
        reads, or that a second call changes nothing more.

        Raises:
            McpServerError: the server cannot be reached, or was lost.
            MCPError: the server refuses the call.
        """
        attempts = ATTEMPTS if name in self._repeatable else 1
        for _ in range(attempts - 1):
            with suppress(McpServerError):
                return await self._call_once(name, arguments)
        return await self._call_once(name, arguments)

    async def _call_once(self, name: str, arguments: JsonObject) -> CallToolResult:
        return await asyncio.wrap_future(_thread().submit(self._call_tool(name, arguments)))

    def close(self) -> None:
        """End the connection, and the server if it was started here. May be called again."""
        try:
            _thread().submit(self._close()).result(CLOSE_S)
        except TimeoutError:
            logger.warning("the MCP server '%s' does not end its connection within %g s", self.name, CLOSE_S)

    async def _list_tools(self) -> list[Tool]:
        client = await self._connected_client()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                hints = {tool.name: tool.annotations for tool in tools if tool.annotations is not None}
                self._repeatable = {name for name, hint in hints.items() if hint.read_only_hint or hint.idempotent_hint}
                return tools

    async def _call_tool(self, name: str, arguments: JsonObject) -> CallToolResult:
        client, leave = await self._connected_client(), self._leave
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                leave.set()
                raise McpServerError(
                    f"the MCP server '{self.name}' was lost in the call; it is connected again for the next one."
                ) from error
            if error.code == REQUEST_TIMEOUT:
                self._start_check(client, leave)
            raise
        except asyncio.CancelledError:
            self._start_check(client, leave)
            raise

    async def _connected_client(self) -> Client:
        if self._client is not None and self._holder and not self._holder.done() and not self._leave.is_set():
            return self._client
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        # A call whose time is over while the server starts leaves the start to later ones.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Client:
        self._client = None
        for _ in range(ATTEMPTS):
            self._leave = asyncio.Event()
            ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._holder = holder = asyncio.create_task(self._hold(ready, self._leave))
            await asyncio.wait([ready, holder], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._client = ready.result()
                return self._client
            holder.cancel()
            [error] = await asyncio.gather(holder, return_exceptions=True)
            while isinstance(error, BaseExceptionGroup):  # those of anyio's task groups, inside each other
                error = error.exceptions[0]
            if not (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED):
                break  # else the server was lost while it started, and no call has reached it
        is_late = isinstance(error, asyncio.CancelledError)
        why = f"no answer in {START_S:g} s" if is_late else f"{type(error).__name__}: {error}" if error else "it ended"
        raise McpServerError(redacted(f"the MCP server '{self.name}' cannot be reached: {why}."))

    async def _hold(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Keep a connection until it is no longer wanted, or lost: one task must open and close it."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await self._transport(stack, leave)))
            ready.set_result(client)
            await leave.wait()

    async def _transport(self, stack: AsyncExitStack, leave: asyncio.Event) -> Any:
        settings = self._settings
        if "command" in settings:
            parameters = {
                key: settings[key] for key in ("command", "args", "env", "cwd") if settings.get(key) is not None
            }
            return _noticing_the_end(stdio_client(StdioServerParameters.model_validate(parameters)), leave)
        headers = dict(settings.get("headers") or {})
        if token := settings.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        # A call may take long, and the limits of tools end it.
        time_limits = httpx2.Timeout(30.0, read=None)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=time_limits))
        return streamable_http_client(settings["url"], http_client=http)

    def _start_check(self, client: Client, leave: asyncio.Event) -> None:
        task = asyncio.create_task(self._check(client, leave))
        _checks.add(task)
        task.add_done_callback(_checks.discard)

    async def _check(self, client: Client, leave: asyncio.Event) -> None:
        """Give up a server that does not answer."""
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await client.list_tools(cache_mode="bypass")
        except (TimeoutError, MCPError):
            leave.set()

    async def _close(self) -> None:
        if self._connecting is not None and not self._connecting.done():
            await asyncio.wait([self._connecting])
        self._leave.set()
        if self._holder is not None:
            await asyncio.gather(self._holder, return_exceptions=True)


_checks: set[asyncio.Task[None]] = set()
"""Tasks that run; an event loop alone does not keep them."""


@asynccontextmanager
async def _noticing_the_end(transport: Any, ended: asyncio.Event) -> AsyncIterator[object]:
    """Wrap a transport so that an event is set when the server closes its output, also between calls."""
    async with transport as (read, write), anyio.create_task_group() as group:
        send, receive = anyio.create_memory_object_stream[Any](0)

        async def pass_on() -> None:
            try:
                async with send:
                    async for message in read:
                        await send.send(message)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # our side has gone first
            finally:
                ended.set()

        group.start_soon(pass_on)
        yield receive, write
        group.cancel_scope.cancel()


@functools.cache
def _thread() -> LoopThread:
    return LoopThread("MCP servers")


os.register_at_fork(after_in_child=_thread.cache_clear)  # a fork has no threads
