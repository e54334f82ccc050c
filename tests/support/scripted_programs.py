"""Agent programs, good and bad, for rows of :mod:`tests.support.scripted_agent` whose ``agent_name`` is ``program``.

``row["script"]`` is the JSON of the name of a deed in ``PROGRAMS`` and of the run's ``agent.trajectory_timeout_s``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from verl.plugins.endpoint.programs import ProgramTask

MAX_TOKENS = 6
ANSWER_TIMEOUT_S = 300
LATE_S = 1.0
"""How long after the end of its time a program asks once more: before it is left behind as one that does not end."""
_others: deque[str] = deque(maxlen=1)
"""Key of the trajectory of this process that did so last."""


def program(task: ProgramTask) -> Any:
    """Do the deed of the row."""
    deed, timeout_s = json.loads(task.row["script"])
    return PROGRAMS[deed](task, timeout_s)


def post(task: ProgramTask, body: bytes, key: str | None = None) -> tuple[int, Any]:
    """Send a body to ``chat/completions``; the status, and the JSON of the answer."""
    where = urlsplit(task.base_url)
    head = {"Authorization": f"Bearer {key or task.api_key}", "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_TIMEOUT_S)) as connection:
        connection.request("POST", f"{where.path}/chat/completions", body, head)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def ask(task: ProgramTask, *more: dict[str, str]) -> dict[str, str]:
    """Return the policy's answer to the prompt and further messages.

    Raises:
        RuntimeError: there is none.
    """
    body = {"model": task.model, "messages": [*task.messages, *more], "max_tokens": MAX_TOKENS}
    status, said = post(task, json.dumps(body).encode())
    if status != 200:
        raise RuntimeError(f"status {status}: {said}")
    return {"role": "assistant", "content": said["choices"][0]["message"]["content"]}


def _good(task: ProgramTask, _: float) -> str:
    first = ask(task)
    return ask(task, first, {"role": "user", "content": "Again."})["content"]


def _raises(task: ProgramTask, _: float) -> None:
    ask(task)
    raise ValueError("no idea")


def _does_not_ask(task: ProgramTask, _: float) -> str:
    return "42"


def _returns_bytes(task: ProgramTask, _: float) -> bytes:
    ask(task)
    return b"\0\xff" * 100


def _floods(task: ProgramTask, _: float) -> str:
    ask(task)
    return "an answer " * (10 * 2**20)


def _sends_wrong_types(task: ProgramTask, _: float) -> str:
    for body in (b"\xff", b"[1, 2]", b'{"model": "policy", "messages": 3}', b'{"messages": [{"role": 1}]}'):
        _require(post(task, body)[0], 400)
    return _good(task, _)


def _uses_another_key(task: ProgramTask, _: float) -> str:
    key = _others[-1] if _others else "sk-made-up"
    _others.append(task.api_key)
    body = {"model": task.model, "messages": task.messages}
    _require(post(task, json.dumps(body).encode(), key)[0], 401)
    return _good(task, _)


async def _never_ends(task: ProgramTask, _: float) -> None:
    await asyncio.to_thread(ask, task)
    await asyncio.Event().wait()


def _asks_too_late(task: ProgramTask, timeout_s: float) -> str:
    first = ask(task)
    time.sleep(timeout_s + LATE_S)
    return ask(task, first, {"role": "user", "content": "Too late?"})["content"]


def _blocks(task: ProgramTask, _: float) -> None:
    ask(task)
    time.sleep(10**6)


def _require(status: int, expected: int) -> None:
    if status != expected:
        raise RuntimeError(f"status {status} instead of {expected}")


PROGRAMS: Mapping[str, Callable[[ProgramTask, float], Any]] = {
    "good": _good,
    "raises": _raises,
    "does not ask": _does_not_ask,
    "returns bytes": _returns_bytes,
    "floods": _floods,
    "sends wrong types": _sends_wrong_types,
    "uses another's key": _uses_another_key,
    "never ends": _never_ends,
    "asks too late": _asks_too_late,
    "blocks": _blocks,
}
PROGRAM_ENDS: Mapping[str, str] = {
    "good": "done",
    "raises": "agent_error",
    "does not ask": "agent_error",
    "returns bytes": "agent_error",
    "floods": "agent_error",
    "sends wrong types": "done",
    "uses another's key": "done",
    "never ends": "timeout",
    "asks too late": "timeout",
    "blocks": "timeout",
}
"""The status of each trajectory. One that blocks leaves a thread behind, with which its process on Ray is replaced."""
