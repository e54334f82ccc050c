"""Calls of the pool: budgets, rate limits, results, and the replies of workers."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["ok", "timeout", "crashed", "killed", "out_of_memory", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""``ok``: there is a value. ``timeout``: it exceeded its time. ``crashed``: the process ended by a fault such as
SIGSEGV or by ``sys.exit``, or closed its connection. ``killed``: in every attempt the process was ended or stopped by
a signal such as SIGKILL, SIGTERM or SIGSTOP, which usually comes from outside. ``out_of_memory``: it exceeded its
memory. ``error``: it raised an exception."""


@dataclass(frozen=True)
class Budget:
    """Limits of one call."""

    timeout_s: float = 30.0
    """Seconds from its start to its reply."""
    memory_mb: int | None = 4096
    """MiB beyond what the worker uses before its first call; None is no limit."""
    start_timeout_s: float = 300.0
    """Seconds that a worker may take to load the function."""
    kill_retries: int = 2
    """Repetitions of a call, each with its full timeout, after its process was killed from outside."""


@dataclass(frozen=True)
class CallResult:
    """Result of a call."""

    status: Status
    value: object = None
    message: str = ""
    """Traceback, exit status, or the limit that was exceeded; empty if ``ok``."""


class RateLimit:
    """Limit on calls, or tokens, per minute: a token bucket that holds at most one second's worth.

    A call that costs more than the bucket holds starts when it is full and makes its level negative, so
    the rate holds for calls of any size.

    Args:
        per_minute: rate.
        counts_tokens: whether a call costs its number of tokens; else it costs 1.

    >>> limit = RateLimit(per_minute=60)
    >>> limit.take(1, now=0.0)
    >>> limit.delay(1, now=0.25)
    0.75
    """

    def __init__(self, per_minute: float, counts_tokens: bool = False) -> None:
        self.per_second = per_minute / 60
        self.counts_tokens = counts_tokens
        self.capacity = max(self.per_second, 1.0)
        self.level = self.capacity
        self.filled_at: float | None = None

    def delay(self, tokens: float, now: float) -> float:
        """Seconds until a call with this many tokens may start; 0 if it may start now."""
        self._fill(now)
        missing = min(self._cost(tokens), self.capacity) - self.level
        return max(missing / self.per_second, 0.0)

    def take(self, tokens: float, now: float) -> None:
        """Charge a call that starts now."""
        self._fill(now)
        self.level -= self._cost(tokens)

    def _cost(self, tokens: float) -> float:
        return tokens if self.counts_tokens else 1.0

    def _fill(self, now: float) -> None:
        if self.filled_at is not None:
            self.level = min(self.level + (now - self.filled_at) * self.per_second, self.capacity)
        self.filled_at = now


class CallBatch:
    """Collects the results of calls that were submitted together, and completes ``future`` with the last one."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[CallResult]] = Future()
        self._results: list[CallResult | None] = [None] * size
        self._missing = size
        if not size:
            self.future.set_result([])

    def done(self, index: int, result: CallResult) -> None:
        """Store the result of one call; ignored if it has one or the batch has failed."""
        if self._results[index] is not None or self.future.done():
            return
        self._results[index] = result
        self._missing -= 1
        if not self._missing:
            self.future.set_result([item for item in self._results if item is not None])

    def fail(self, error: Exception) -> None:
        """Fail the whole batch."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False)
class PoolCall:
    """A queued or running call."""

    body: bytes
    """Pickled keyword arguments."""
    tokens: float
    """Cost under a limit of tokens."""
    timeout_s: float
    batch: CallBatch
    index: int
    """Position of the call in its batch."""
    call_id: int = 0
    """Identifies the call in its present process; each attempt has a new one."""
    started: float = 0.0
    """Time at which it was sent to its present process, in seconds of the monotonic clock."""
    spent_s: float = 0.0
    """Part of its time that earlier attempts used."""
    first: CallResult | None = None
    """Result of a first attempt in a process whose state earlier calls may have damaged; a second attempt follows."""
    attempts: int = 0
    """Processes that ended while they had this call and possibly not because of it."""
    kills: int = 0
    """Processes that were killed from outside while they had this call."""

    def done(self, result: CallResult) -> None:
        """Deliver the result."""
        self.batch.done(self.index, result)

    def left_s(self, now: float) -> float:
        """Seconds left of its timeout."""
        return self.timeout_s - self.spent_s - (now - self.started)


@dataclass(frozen=True)
class Reply:
    """Message of a worker. Untrusted code can write on the connection too, so every field is checked."""

    status: Status
    value: object = None
    message: str = ""
    fatal: int | None = None
    """Index of the exception in the pool's ``fatal``, if it is one of these."""
    pid: int = 0
    memory: int = 0

    @classmethod
    def read(cls, body: bytes) -> Reply:
        """Parse the JSON of a reply.

        Raises:
            ValueError: it is not a valid reply.
        """
        try:
            reply = cls(**json.loads(body))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no reply: {error}") from error
        numbers = (reply.pid, reply.memory, 0 if reply.fatal is None else reply.fatal)
        if reply.status not in STATUSES or not isinstance(reply.message, str) or {*map(type, numbers)} != {int}:
            raise ValueError("no reply: a field has another type")
        return reply
