"""Run a user's agent program for one trajectory: a Python function, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import psutil

from verl.base import env
from verl.base.import_utils import load_module
from verl.base.redact import redacted
from verl.datasets.chat import Message
from verl.errors import ConfigError, RolloutError
from verl.supervision.processes import family_of, kill, kill_group
from verl.tools.threads import in_thread

ROW_FILE = "VERL_ROW"
"""Environment variable of a command with the path of its row."""
LONGEST_ANSWER = 2**20
"""Longest answer of a program: the bytes that a command prints, the characters that a function returns."""
SHOWN = 2000
"""Characters of what a failed command wrote last."""


@dataclass(frozen=True, kw_only=True)
class ProgramTask:
    """Input of an agent program."""

    messages: list[Message]
    """The prompt, as OpenAI's client sends it to ``chat/completions``; images are ``image_url`` parts."""
    row: Mapping[str, object]
    """The row of the data set, by column."""
    base_url: str
    """For clients of OpenAI's forms."""
    anthropic_base_url: str
    """For clients of Anthropic's form."""
    api_key: str = field(repr=False)
    model: str = "policy"
    """Name of the model to ask for; ``policy/NAME`` in an agent called NAME."""
    images: Sequence[str] = ()
    """The images of the row as ``data:`` URLs of PNGs, in the size in which the policy sees them."""


class Program(Protocol):
    """Answers a task. Cancelling the call ends the program."""

    async def __call__(self, task: ProgramTask) -> object:
        """Return the answer (a text), the reward (a number), or None."""
        ...


@dataclass(frozen=True)
class FunctionProgram:
    """A Python function, which may be async. One that is not runs in a thread of its own."""

    function: Callable[[ProgramTask], object]

    async def __call__(self, task: ProgramTask) -> object:
        """See :class:`Program`."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(task)
        running = asyncio.ensure_future(in_thread(self.function, task))
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            # The policy refuses it now. If it goes on nevertheless, its trajectory is left behind with it.
            await asyncio.gather(running, return_exceptions=True)
            raise
        return await result if inspect.isawaitable(result) else result


@dataclass(frozen=True)
class CommandProgram:
    """A command. It has a process group of its own; at its end all processes that it started are killed.

    Its answer is what it prints, without blanks at both ends.
    """

    command: Sequence[str]

    async def __call__(self, task: ProgramTask) -> str:
        """See :class:`Program`.

        Raises:
            RolloutError: it cannot be started, ends with another status than 0, or prints too much.
        """
        with tempfile.TemporaryDirectory(prefix="verl-program-") as folder:
            row = Path(folder) / "row.json"
            row.write_text(json.dumps(dict(task.row), default=_plain, ensure_ascii=False))
            try:
                process = subprocess.Popen(
                    self.command,
                    env=env.with_variables(_variables(task, row)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise RolloutError(f"the command {self.command[0]} cannot be started: {error}.") from error
            printing = asyncio.ensure_future(
                in_thread(_beginning, cast(BufferedReader, process.stdout), LONGEST_ANSWER + 1)
            )
            complaining = asyncio.ensure_future(in_thread(_end, cast(BufferedReader, process.stderr), SHOWN))
            try:
                status = await in_thread(process.wait)
            finally:
                # Before the streams are read to their ends: what the command has started may hold them open.
                _end_family(process, str(row))
            printed, errors = await printing, await complaining
        if status != 0:
            last_output = redacted(errors.decode(errors="replace"), [task.api_key]).strip()
            raise RolloutError(
                f"the command {self.command[0]} ended with status {status}. It wrote last: {last_output}"
            )
        if len(printed) > LONGEST_ANSWER:
            raise RolloutError(f"the command {self.command[0]} printed more than {LONGEST_ANSWER} bytes as its answer.")
        return printed.decode(errors="replace").strip()


def load_program(path: str, setting: str) -> Callable[[ProgramTask], object]:
    """Load the function ``file.py:name`` or ``dotted.module.name``.

    Raises:
        ConfigError: there is none.
    """
    module, colon, name = path.rpartition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not (module and name):
        raise ConfigError(f"{setting}={path} names no function. Write file.py:name or package.module.name.")
    function = getattr(load_module(module, setting), name, None)
    if not callable(function):
        raise ConfigError(f"{setting}={path}: {module} has no function {name}.")
    return function


def _variables(task: ProgramTask, row: Path) -> dict[str, str]:
    hosts = [value for value in (env.hosts_without_proxy(), "127.0.0.1") if value]
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.anthropic_base_url,
        "ANTHROPIC_API_KEY": task.api_key,
        ROW_FILE: str(row),
        "NO_PROXY": ",".join(hosts),
        "no_proxy": ",".join(hosts),
    }


def _plain(value: object) -> object:
    """Values of a row as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _beginning(stream: BufferedReader, most: int) -> bytes:
    """Read a stream to its end and return its first bytes."""
    beginning = bytearray()
    with stream:
        while piece := stream.read1(2**16):
            beginning += piece[: most - len(beginning)]
    return bytes(beginning)


def _end(stream: BufferedReader, most: int) -> bytes:
    """Read a stream to its end and return its last bytes."""
    ending = b""
    with stream:
        while piece := stream.read1(2**16):
            ending = (ending + piece)[-most:]
    return ending


def _end_family(process: subprocess.Popen[bytes], row: str) -> None:
    """Kill a command and all that it started."""
    family = family_of(process.pid)
    kill_group(process.pid)
    for pid in {*family[1:], *_descendants(row)}:
        kill(pid)


def _descendants(row: str) -> list[int]:
    """Return the processes that have the row of a command, also those that left its group and its family."""
    descendants = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(ROW_FILE) == row:
                descendants.append(process.pid)
    return descendants
