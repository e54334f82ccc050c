"""One worker process, seen from the side that gives it jobs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl.utils.killable_pool.child import HEADER, LOOK, NO_ROOM, PAGE_SIZE, RUNNING, TAKEN_BACK
from verl.utils.killable_pool.oom import oom_kills
from verl.utils.killable_pool.outcome import STATUSES, Budget, Outcome, Status
from verl.utils.marked_processes import VARIABLE, kill_marked, new_mark

CHILD = Path(__file__).with_name("child.py")
MAX_REPLY = 256 * 2**20
"""Longest reply, in bytes; whoever sends more is not answering."""
OVERTIME_S = 1.0
"""How much longer than its budget an async job may take to obey its cancellation."""
UNREAD_S = 0.3
"""How long the replies of a process that has ended may take to be read."""
CUT_OFF_S = 0.3
"""How long a worker may live without a connection before that is its own doing."""
REAP_S = 1.0
"""How long a keeper may take to end its worker before it is killed itself."""
SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that say nothing against the job whose process they end: a fault of its own has another one."""
BURY_S = 5.0
"""How long an ended worker may take to be collected before it is killed once more."""


class Batch:
    """The outcomes of calls that were submitted together, as they come."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self._outcomes: list[Outcome | None] = [None] * size
        self._missing = size
        if not size:
            self.future.set_result([])

    def done(self, place: int, outcome: Outcome) -> None:
        """One has come; the last one completes the future."""
        if self._outcomes[place] is not None or self.future.done():
            return
        self._outcomes[place] = outcome
        self._missing -= 1
        if not self._missing:
            self.future.set_result([item for item in self._outcomes if item is not None])

    def fail(self, error: Exception) -> None:
        """None of them counts any more."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False)
class Job:
    """A call that waits or runs."""

    body: bytes
    """Its arguments, pickled."""
    tokens: float
    """What it takes from a limit of tokens."""
    timeout_s: float
    batch: Batch
    place: int
    """Where in its batch."""
    number: int = 0
    """Under which the process at hand knows it; another attempt has another one."""
    started: float = 0.0
    """When the process at hand got it."""
    spent_s: float = 0.0
    """What earlier attempts took of its time."""
    first: Outcome | None = None
    """How it ended in a process that others may have spoilt; it then has a second try."""
    attempts: int = 0
    """Processes that ended under it, and not by its own doing for certain."""
    kills: int = 0
    """Processes that were killed under it by a signal that others send."""

    def done(self, outcome: Outcome) -> None:
        """Say what came of it."""
        self.batch.done(self.place, outcome)

    def left_s(self, now: float) -> float:
        """What is left of its time."""
        return self.timeout_s - self.spent_s - (now - self.started)


@dataclass(frozen=True)
class Reply:
    """What a worker writes. Foreign code has the connection at hand, so nothing in it is taken on trust."""

    status: Status
    value: Any = None
    message: str = ""
    fatal: int | None = None
    """Which of the errors that concern every job it is."""
    pid: int = 0
    memory: int = 0

    @classmethod
    def read(cls, body: bytes) -> Reply:
        """The reply in JSON.

        Raises:
            ValueError: it is none.
        """
        try:
            reply = cls(**json.loads(body))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no reply: {error}") from error
        numbers = (reply.pid, reply.memory, 0 if reply.fatal is None else reply.fatal)
        if reply.status not in STATUSES or not isinstance(reply.message, str) or {*map(type, numbers)} != {int}:
            raise ValueError("no reply: a field has another type")
        return reply


class WorkerProcess:
    """A keeper, the worker below it, and the jobs that it has.

    Args:
        budget: what a job may take.
        slots: how many jobs it may have at once; more than one makes it an async worker.
        on_reply: called with a job and its reply.
        on_end: called once when the process has ended, with the jobs that it took along.
    """

    def __init__(
        self,
        budget: Budget,
        slots: int,
        on_reply: Callable[[WorkerProcess, Job, Reply], None],
        on_end: Callable[[WorkerProcess, list[Job]], None],
    ) -> None:
        self.budget, self.slots = budget, slots
        self.on_reply, self.on_end = on_reply, on_end
        self.jobs: dict[int, Job] = {}
        self.numbers = itertools.count(1)
        self.ready = False
        self.ended = False
        self.answered = 0
        """Jobs that it has finished; the first one runs in a clean process."""
        self.stuck = False
        """One of its jobs takes long, and others should not wait for it."""
        self.end: Outcome | None = None
        """Why it was ended: what becomes of the guilty job."""
        self.guilty: Job | None = None
        self.retired = False
        """It was ended for no fault of the jobs that it has."""
        self.gone_since = 0.0
        self.is_cut_off = False
        """Its connection has ended; how, is being found out."""
        self.worker_pid = 0
        self.base_memory = 0
        self.page: mmap.mmap | None = None
        self.oom_kills = 0
        """What the kernel had killed for memory when it got the first of its jobs."""
        self.mark = new_mark()

    def spawn(self) -> None:
        """Start the process.

        Raises:
            OSError: the system has no room for one more.
        """
        with contextlib.ExitStack() as on_failure:
            self.socket, theirs = socket.socketpair()
            on_failure.callback(self.socket.close)
            with theirs, contextlib.ExitStack() as shared:
                descriptors = [theirs.fileno(), -1]
                if self.slots > 1:
                    descriptors[1] = self._make_page()
                    shared.callback(os.close, descriptors[1])
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(CHILD), *map(str, descriptors), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a function prints is no part of what this program prints
                    pass_fds=[number for number in descriptors if number >= 0],
                    env=os.environ | {VARIABLE: self.mark},
                    start_new_session=True,
                )
            on_failure.pop_all()

    async def start(self, load: dict[str, Any]) -> Reply:
        """Load the function.

        Returns:
            the worker's first reply: ``ok``, or why the function could not be loaded.

        Raises:
            EOFError: it ended before that.
            TimeoutError: it took longer than ``start_timeout_s``.
        """
        self.reader, self.writer = await asyncio.open_connection(sock=self.socket)
        first: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.listener = asyncio.create_task(self._listen(first))
        self._write(0, pickle.dumps(load | {"memory_mb": self.budget.memory_mb}), 0.0)
        reply = await asyncio.wait_for(first, self.budget.start_timeout_s)
        self.worker_pid, self.base_memory = reply.pid, reply.memory
        self.ready = reply.status == "ok"
        return reply

    @property
    def is_free(self) -> bool:
        """Whether it can take another job now."""
        return self.ready and not self.is_leaving and not self.stuck and len(self.jobs) < self.slots

    @property
    def is_leaving(self) -> bool:
        """Whether it has ended or is about to, so that another one takes its place; one that starts ends first."""
        return self.ended or self.end is not None or (self.ready and self.is_cut_off)

    def give(self, job: Job) -> None:
        """Send it a job."""
        if not self.jobs:
            self.oom_kills = oom_kills()
        job.started, job.number = time.monotonic(), next(self.numbers)
        self.jobs[job.number] = job
        self._write(job.number, job.body, job.left_s(job.started))

    def check(self, now: float, patience_s: float) -> None:
        """Look after its jobs: time, memory, whether it lives, whether one holds up the others."""
        if self.ended or not self.ready:
            return
        if self.process.poll() is not None:
            self.gone_since = self.gone_since or now
            if now - self.gone_since > UNREAD_S:  # something holds its connection open
                self._finish()
            return
        if self.end is not None or self.is_cut_off:
            return
        if not self.jobs:
            if self.stuck:
                self.stop()  # blocked by what no job is to blame for
            return
        oldest = next(iter(self.jobs.values()))
        running, since = self._running() if self.slots > 1 else (oldest, oldest.started)
        self.stuck = since > 0 and now - since > patience_s
        is_shared = self.slots > 1
        overtime = OVERTIME_S if is_shared else 0.0
        # The jobs behind the one that blocks the process are late through no fault of theirs, and are about to leave.
        judged = [running] if self.stuck and is_shared else self.jobs.values()
        late = next((job for job in judged if job is not None and job.left_s(now) + overtime <= 0), None)
        if late is not None and self.is_frozen():
            self.stop(Outcome("killed", message=f"the process was stopped (SIGSTOP) for {late.timeout_s:g} s"))
        elif late is not None:
            self.stop(Outcome("timeout", message=f"took longer than {late.timeout_s:g} s"), late)
        elif self.budget.memory_mb is not None and now - oldest.started > patience_s:
            self._check_memory(running or oldest)

    def release(self) -> list[Job]:
        """Take back the jobs that wait behind the one that blocks the process, which cancels them; it gets no more."""
        assert self.page is not None
        running, _ = self._running()
        others = [job for job in self.jobs.values() if job is not running]
        if others:
            last = max(self.jobs)
            TAKEN_BACK.pack_into(self.page, RUNNING.size, running.number if running is not None else 0, last)
            self._write(LOOK, b"", 0.0)
        for job in others:
            del self.jobs[job.number]
        return others

    def is_frozen(self) -> bool:
        """Whether somebody has stopped the process (SIGSTOP)."""
        try:
            family = [psutil.Process(self.worker_pid or self.process.pid)]
            if not self.worker_pid:
                family += family[0].children(recursive=True)
            return any(process.status() == psutil.STATUS_STOPPED for process in family)
        except (psutil.Error, OSError):  # it has ended; that is found elsewhere
            return False

    def stop(self, outcome: Outcome | None = None, guilty: Job | None = None) -> None:
        """End the process and all that it has started; ``outcome`` is for the guilty job, None if no job is known."""
        if self.end is None:
            self.retired = outcome is None
            self.end, self.guilty = outcome or Outcome("crashed", message="the pool was closed"), guilty
            self.process.terminate()
            asyncio.get_running_loop().call_later(REAP_S, self.kill)

    def kill(self) -> None:
        """End it the hard way; for a keeper that does not do its duty."""
        if self.process.poll() is None:
            if self.worker_pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.worker_pid, signal.SIGKILL)
            self.process.kill()

    async def bury(self) -> None:
        """After the end: collect the process, and end what it leaves behind where its keeper was killed as well."""
        deadline = time.monotonic() + BURY_S
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_S)
        if self.process.returncode == -signal.SIGKILL:
            await asyncio.to_thread(kill_marked, self.mark)

    def blamed(self, jobs: list[Job]) -> Job | None:
        """Which of the jobs under way ended the process, where that can be told."""
        if self.guilty is not None or self.retired:
            return self.guilty
        running, since = self._running() if self.slots > 1 else (None, 0.0)
        if running is not None or since > 0:
            return running
        return jobs[0] if len(jobs) == 1 else None

    def verdict(self) -> Outcome:
        """Why the process ended."""
        if self.end is not None:
            return self.end
        code = self.process.returncode
        if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return Outcome("out_of_memory", message="the process was killed by the kernel, which ran out of memory")
        if code < 0:
            status: Status = "killed" if -code in SENT_BY_OTHERS else "crashed"
            return Outcome(status, message=f"the process was killed by {signal.Signals(-code).name}")
        return Outcome("crashed", message=f"the process exited with code {code}")

    def _check_memory(self, guilty: Job) -> None:
        """A second watch beside the worker's own limit, for memory that is shared or mapped."""
        assert self.budget.memory_mb is not None
        try:
            used = psutil.Process(self.worker_pid).memory_info().rss - self.base_memory
        except (psutil.Error, OSError):  # it has ended; that is found elsewhere
            return
        if used > self.budget.memory_mb * 2**20:
            message = f"took {used // 2**20} MB of memory, more than {self.budget.memory_mb} MB"
            self.stop(Outcome("out_of_memory", message=message), guilty)

    @property
    def had_no_room(self) -> bool:
        """Whether it could not start because the system has no room for one more process."""
        return self.process.returncode == NO_ROOM

    def _running(self) -> tuple[Job | None, float]:
        """The job whose code an async worker runs at this moment, and since when; None if the job is done with."""
        assert self.page is not None
        number, since = RUNNING.unpack_from(self.page, 0)
        return self.jobs.get(number), since

    def _make_page(self) -> int:
        if sys.platform == "linux":
            page = os.memfd_create("running")
        else:
            with tempfile.TemporaryFile() as file:
                page = os.dup(file.fileno())
        try:
            os.truncate(page, PAGE_SIZE)
            self.page = mmap.mmap(page, PAGE_SIZE)
        except OSError:
            os.close(page)
            raise
        return page

    def _write(self, number: int, body: bytes, timeout_s: float) -> None:
        self.writer.write(HEADER.pack(number, len(body), timeout_s) + body)

    async def _listen(self, first: asyncio.Future[Reply]) -> None:
        try:
            while True:
                number, length, _ = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                if length > MAX_REPLY:
                    break
                reply = Reply.read(await self.reader.readexactly(length))
                if not number:
                    first.set_result(reply)
                elif job := self.jobs.pop(number, None):
                    self.answered += 1
                    self.stuck = False
                    self.on_reply(self, job, reply)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.InvalidStateError):
            pass  # the end of the connection, or what no worker writes
        await self._reap()
        if not first.done():
            first.set_exception(EOFError())
        self._finish()

    async def _reap(self) -> None:
        """The connection has ended; wait for the process, which says why.

        The keeper ends after its worker, and how much later is a matter of how busy the machine is. So its silence
        says nothing against a job; only a worker that lives on without its connection has given that up itself.
        """
        self.is_cut_off = True
        began = time.monotonic()
        while self.process.poll() is None:
            waited = time.monotonic() - began
            if waited > CUT_OFF_S and self._worker_lives():
                reason = "the process closed its connection, or wrote on it what no reply is"
                self.stop(Outcome("crashed", message=reason))
                return
            if waited > BURY_S:  # the keeper is held up, and so the exit status is lost
                self.kill()
                self.end = self.end or Outcome("killed", message=f"the process was held up for {BURY_S:g} s at its end")
                return
            await asyncio.sleep(0.01)

    def _worker_lives(self) -> bool:
        """Whether the worker has memory; when it ends, it loses that before its connection."""
        try:
            return bool(self.worker_pid) and psutil.Process(self.worker_pid).memory_info().vms > 0
        except (psutil.Error, OSError):
            return False

    def _finish(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.writer.close()
        jobs = list(self.jobs.values())
        self.on_end(self, jobs)
