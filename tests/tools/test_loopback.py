"""Servers on loopback: packets are not held back, and clients without a key cannot shut others out."""

from __future__ import annotations

import http.client
import resource
import socket
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verl.tools import loopback
from verl.tools.loopback import HEADER_BYTES, LoopbackServer, listen

HEADER = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"


async def respond(request: Request) -> Response:
    if request.headers.get("x-api-key") != "k":
        return Response(status_code=401)
    return Response(await request.body())


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    server = LoopbackServer(Starlette(routes=[Route("/", respond, methods=["POST"])]))
    yield server
    server.close()


def connect(server: LoopbackServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


def call(client: socket.socket, header: bytes = HEADER + b"x-api-key: k\r\n\r\n", body: bytes = b"{}") -> int:
    client.sendall(header + body)
    response = http.client.HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_small_packets_of_a_kept_connection_are_sent_at_once():
    with listen(0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_half_a_header_is_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch, server: LoopbackServer):
    monkeypatch.setattr(loopback, "HEADER_S", 0.2)
    with connect(server) as silent, connect(server) as half, connect(server) as later:
        half.sendall(HEADER)
        assert call(later) == 200
        later.sendall(HEADER[:9])
        assert is_closed(silent)
        assert is_closed(half)
        assert is_closed(later)


def test_a_header_without_end_is_not_kept(server: LoopbackServer):
    with connect(server) as client:
        client.sendall(HEADER + (b"x-fill: " + b"x" * 1000 + b"\r\n") * (HEADER_BYTES // 1000))
        assert is_closed(client)
    with connect(server) as client:  # a long body is no header
        head = b"POST / HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: %d\r\n\r\n" % (4 * HEADER_BYTES)
        assert call(client, head, b"x" * (4 * HEADER_BYTES)) == 200


def test_connections_that_have_shown_no_key_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    server = LoopbackServer(Starlette(routes=[Route("/", respond, methods=["POST"])]))
    clients = []
    try:
        with connect(server) as friend:
            assert call(friend) == 200
            clients = [connect(server) for _ in range(10)]
            for client in clients[:7]:
                assert is_closed(client)
            for client in [friend, *clients[7:]]:
                assert call(client) == 200
    finally:
        for client in clients:
            client.close()
        server.close()


def test_who_is_refused_cannot_keep_the_connection_by_its_body(server: LoopbackServer):
    with connect(server) as client:
        assert call(client, HEADER + b"\r\n", b"") == 401
        assert is_closed(client)
