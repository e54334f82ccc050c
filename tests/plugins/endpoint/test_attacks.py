"""Clients that behave badly."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import openai
import pytest

from verl.plugins.endpoint.app import MAX_BYTES

HI = [{"role": "user", "content": "Hi"}]


def post(access, body: bytes, path="/v1/chat/completions", key=None):
    where = urlsplit(access.root)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    headers = {"Authorization": f"Bearer {key or access.api_key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", where.path + path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "prompt": "Hi", '
        b'"max_tokens": 9, "user": "\\uD800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "\\ud800", "messages": []}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"model": "policy", "messages": [{"role": "chef", "content": "Hi"}]}',
        b'{"model": "policy", "messages": [{"role": ["user"], "content": "Hi"}]}',
        b'{"model": "policy", "messages": [[]]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{"id": 3}]}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "temperature": true}',
    ],
)
def test_garbage_is_refused_in_the_vendors_form(serve, body):
    trajectory = serve(lambda prompt: "Hello.")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"):
        status, said = post(trajectory.access, body, path)
        assert status == 400, (path, said)
        assert said["error"]["message"]
    assert trajectory.engine.requests == []
    assert post(trajectory.access, json.dumps({"model": "policy", "messages": HI}).encode())[0] == 200


def test_a_body_without_end_is_refused(serve):
    trajectory = serve(lambda prompt: "Hello.")
    where = urlsplit(trajectory.access.root)
    head = (
        f"POST {where.path}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
        f"Authorization: Bearer {trajectory.access.api_key}\r\n\r\n"
    )
    piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(head.encode())
        sent = 0
        try:
            for _ in range(100):
                connection.sendall(piece)
                sent += 2**20
        except OSError:
            pass
        else:
            pytest.fail("100 MB were read")
    assert sent < 2 * MAX_BYTES
    assert post(trajectory.access, json.dumps({"model": "policy", "messages": HI}).encode())[0] == 200


def test_two_hundred_calls_at_once(serve):
    trajectory = serve(lambda prompt: f"You said {prompt.rsplit('user', 1)[1][1:4]}.")

    async def run():
        access = trajectory.access
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, timeout=60) as client:

            async def talk(number):
                messages = [{"role": "user", "content": f"{number:03d} to you"}]
                for _ in range(2):
                    reply = await client.chat.completions.create(model="policy", messages=messages)
                    text = reply.choices[0].message.content
                    assert text == f"You said {number:03d}."
                    again = {"role": "user", "content": f"{number:03d} again"}
                    messages += [{"role": "assistant", "content": text}, again]

            await asyncio.gather(*(talk(number) for number in range(100)))

    asyncio.run(run())
    outputs = trajectory.recorder.outputs()
    assert [len(turns) for _, turns in trajectory.texts()] == [2] * 100
    assert sum(sum(output.response_mask) for output in outputs) == 200 * (len("You said 000.") + 1)


def test_a_client_that_leaves_frees_its_place_in_the_engine(serve):
    trajectory = serve(lambda prompt: None)
    where = urlsplit(trajectory.access.root)
    for path, more in (
        ("chat/completions", {"stream": True}),
        ("messages", {"max_tokens": 9}),
        ("chat/completions", {}),
    ):
        body = json.dumps({"model": "policy", "messages": HI, **more})
        head = (
            f"POST {where.path}/v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {trajectory.access.api_key}\r\n\r\n"
        )
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall((head + body).encode())
            until(lambda: trajectory.engine.waiting)
        until(lambda: not trajectory.engine.waiting)
    assert trajectory.recorder.outputs() == []


def test_a_call_under_way_ends_with_its_trajectory_and_later_ones_too(serve):
    trajectory = serve(lambda prompt: None)
    body = json.dumps({"model": "policy", "messages": HI}).encode()

    async def run():
        call = asyncio.create_task(asyncio.to_thread(post, trajectory.access, body))
        await asyncio.to_thread(until, lambda: trajectory.engine.waiting)
        trajectory.policy.close()
        return await call

    assert asyncio.run(run())[0] == 410
    assert post(trajectory.access, body)[0] == 410
    assert trajectory.engine.waiting == []
    assert trajectory.recorder.outputs() == []


def test_a_stranger_learns_nothing(serve, caplog):
    trajectory = serve(lambda prompt: "Hello.")
    body = json.dumps({"model": "policy", "messages": HI}).encode()
    wrong = [post(trajectory.access, body, key="sk-wrong"), post(trajectory.access, b"{", key="x")]
    access = trajectory.access
    other = type(access)(access.root.rsplit("/", 1)[0] + "/0123456789abcdef", access.api_key)
    assert [status for status, _ in [*wrong, post(other, body)]] == [401] * 3
    assert len({json.dumps(said) for _, said in [*wrong, post(other, body)]}) == 1
    assert access.api_key not in repr(access)
    assert access.api_key not in caplog.text
