"""One worker process, as seen from the pool: its connection, its calls, their limits, and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from pathlib import Path

import psutil

from verl.supervision.killable_pool.calls import Budget, CallResult, PoolCall, Reply, Status
from verl.supervision.killable_pool.child import CANNOT_FORK, CHECK_PAGE, HEADER, PAGE_SIZE, RUNNING, TAKEN_BACK
from verl.supervision.killable_pool.oom import oom_kills
from verl.supervision.processes import MARK_VARIABLE, family_of, is_stopped, kill_group, kill_marked, new_mark

CHILD = Path(__file__).with_name("child.py")
MAX_REPLY = 256 * 2**20
"""Longest reply, in bytes; a longer one cuts the connection."""
OVERTIME_S = 1.0
"""Time beyond its timeout that an async call has to be cancelled."""
UNREAD_S = 0.3
"""Time to read the remaining replies of a process that has ended."""
CUT_OFF_S = 0.3
"""Time that a worker may live without a connection before it counts as having closed it."""
MONITOR_S = 1.0
"""Time that the monitor process has to end its worker before it is killed itself."""
SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that usually come from outside; a fault of the function causes others."""
REAP_S = 5.0
"""Time to collect an ended worker before it is killed once more."""


class WorkerProcess:
    """A worker with its monitor process (see :mod:`.child`), and the calls assigned to it.

    Args:
        budget: limits of a call.
        slots: concurrent calls; more than one makes it an async worker.
        output: descriptor for what the function prints.
        on_reply: called with a call and its reply.
        on_end: called once when the process has ended, with its unfinished calls.
    """

    def __init__(
        self,
        budget: Budget,
        slots: int,
        output: int,
        on_reply: Callable[[WorkerProcess, PoolCall, Reply], None],
        on_end: Callable[[WorkerProcess, list[PoolCall]], None],
    ) -> None:
        self.budget, self.slots, self.output = budget, slots, output
        self.on_reply, self.on_end = on_reply, on_end
        self.calls: dict[int, PoolCall] = {}
        self.call_ids = itertools.count(1)  # 0 is that of the message that loads the function
        self.ready = False
        self.ended = False
        self.answered = 0
        """Calls that it has finished."""
        self.stuck = False
        """One of its calls takes long, and no other call should wait for it."""
        self.end: CallResult | None = None
        """Why the pool ended it: the result of the call that caused it."""
        self.culprit: PoolCall | None = None
        self.retired = False
        """True if the pool ended it for a reason that is no call's fault."""
        self.gone_since = 0.0
        self.is_cut_off = False
        """True if its connection has ended."""
        self.worker_pid = 0
        self.base_memory = 0
        self.page: mmap.mmap | None = None
        self.oom_kills = oom_kills()
        """The counter of out-of-memory kills when it got the first of its present calls."""
        self.mark = new_mark()

    def spawn(self) -> None:
        """Start the process.

        Raises:
            OSError: the system allows no further process.
        """
        with contextlib.ExitStack() as on_failure:
            self.socket, child_socket = socket.socketpair()
            on_failure.callback(self.socket.close)
            with child_socket, contextlib.ExitStack() as shared:
                descriptors = [child_socket.fileno(), -1]
                if self.slots > 1:
                    descriptors[1] = self._make_page()
                    shared.callback(os.close, descriptors[1])
                # -P: modules beside the script must not hide those that a function imports.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(CHILD), *map(str, descriptors), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=self.output,
                    pass_fds=[descriptor for descriptor in descriptors if descriptor >= 0],
                    env=os.environ | {MARK_VARIABLE: self.mark},
                    start_new_session=True,
                )
            on_failure.pop_all()

    async def start(self, load: dict[str, object]) -> Reply:
        """Load the function and return the worker's first reply: ``ok``, or why loading failed.

        Raises:
            EOFError: the process ended before its reply.
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
        """True if it accepts another call now."""
        return self.ready and not self.is_ending and not self.stuck and len(self.calls) < self.slots

    @property
    def is_ending(self) -> bool:
        """True if it has ended or is ending, so that a replacement may start."""
        # While it starts, a cut connection is not enough: first its exit status must show why the start failed.
        return self.ended or self.end is not None or (self.ready and self.is_cut_off)

    def assign(self, call: PoolCall) -> None:
        """Send a call to the worker."""
        if not self.calls:
            self.oom_kills = oom_kills()
        call.started, call.call_id = time.monotonic(), next(self.call_ids)
        self.calls[call.call_id] = call
        self._write(call.call_id, call.body, call.left_s(call.started))

    def check(self, now: float, patience_s: float) -> None:
        """Check that the process lives, and the time and memory of its calls; update ``stuck``."""
        if self.ended or not self.ready:
            return
        if self.process.poll() is not None:
            self.gone_since = self.gone_since or now
            if now - self.gone_since > UNREAD_S:  # something holds its connection open
                self._finish()
            return
        if self.end is not None or self.is_cut_off:
            return
        if not self.calls:
            if self.stuck:
                self.stop()  # blocked although it has no call
            return
        oldest = next(iter(self.calls.values()))
        running, since = self._running() if self.slots > 1 else (oldest, oldest.started)
        self.stuck = since > 0 and now - since > patience_s
        is_shared = self.slots > 1
        overtime = OVERTIME_S if is_shared else 0.0
        # Calls behind the one that blocks the event loop are late because of it, and release() takes them back.
        judged = [running] if self.stuck and is_shared else self.calls.values()
        late = next((call for call in judged if call is not None and call.left_s(now) + overtime <= 0), None)
        if late is not None and self.is_frozen():
            self.stop(CallResult("killed", message=f"the process was stopped (SIGSTOP) for {late.timeout_s:g} s"))
        elif late is not None:
            self.stop(CallResult("timeout", message=f"took longer than {late.timeout_s:g} s"), late)
        elif self.budget.memory_mb is not None and now - oldest.started > patience_s:
            self._check_memory(running or oldest)

    def release(self) -> list[PoolCall]:
        """Take back the calls that wait behind the one that blocks the event loop; the worker cancels them."""
        assert self.page is not None
        running, _ = self._running()
        waiting = [call for call in self.calls.values() if call is not running]
        if waiting:
            last = max(self.calls)
            TAKEN_BACK.pack_into(self.page, RUNNING.size, running.call_id if running is not None else 0, last)
            self._write(CHECK_PAGE, b"", 0.0)
        for call in waiting:
            del self.calls[call.call_id]
        return waiting

    def is_frozen(self) -> bool:
        """Return whether the process is stopped (SIGSTOP)."""
        return any(map(is_stopped, [self.worker_pid] if self.worker_pid else family_of(self.process.pid)))

    def stop(self, result: CallResult | None = None, culprit: PoolCall | None = None) -> None:
        """End the process and all that it has started.

        Args:
            result: result of the call that caused it; None if no call did.
            culprit: that call.
        """
        if self.end is None:
            self.retired = result is None
            self.end, self.culprit = result or CallResult("crashed", message="the pool was closed"), culprit
            self.process.terminate()
            asyncio.get_running_loop().call_later(MONITOR_S, self.kill)

    def kill(self) -> None:
        """Kill worker and monitor, for when the monitor has not ended them."""
        if self.process.poll() is None:
            if self.worker_pid:
                kill_group(self.worker_pid)
            self.process.kill()

    async def reap(self) -> None:
        """Collect the ended process, and kill its descendants if its monitor was killed and could not do it."""
        deadline = time.monotonic() + REAP_S
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(MONITOR_S)
        if self.process.returncode == -signal.SIGKILL:
            try:
                await asyncio.to_thread(kill_marked, self.mark)
            except RuntimeError:  # the interpreter ends and starts no thread; nothing else waits for this loop any more
                kill_marked(self.mark)

    def culprit_of(self, calls: list[PoolCall]) -> PoolCall | None:
        """Return which of its calls ended the process, or None if that is unknown."""
        if self.culprit is not None or self.retired:
            return self.culprit
        running, since = self._running() if self.slots > 1 else (None, 0.0)
        if running is not None or since > 0:
            return running
        return calls[0] if len(calls) == 1 else None

    def end_result(self) -> CallResult:
        """Why the process ended."""
        if self.end is not None:
            return self.end
        code = self.process.returncode
        if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return CallResult("out_of_memory", message="the process was killed by the kernel, which ran out of memory")
        if code < 0:
            status: Status = "killed" if -code in SENT_BY_OTHERS else "crashed"
            return CallResult(status, message=f"the process was killed by {signal.Signals(-code).name}")
        return CallResult("crashed", message=f"the process exited with code {code}")

    def _check_memory(self, culprit: PoolCall) -> None:
        """Check the resident memory, which unlike the worker's own limit includes shared and mapped memory."""
        assert self.budget.memory_mb is not None
        try:
            used = psutil.Process(self.worker_pid).memory_info().rss - self.base_memory
        except (psutil.Error, OSError):  # it has ended; that is found elsewhere
            return
        if used > self.budget.memory_mb * 2**20:
            message = f"took {used // 2**20} MB of memory, more than {self.budget.memory_mb} MB"
            self.stop(CallResult("out_of_memory", message=message), culprit)

    @property
    def could_not_fork(self) -> bool:
        """True if it could not start because the system allows no further process."""
        return self.process.returncode == CANNOT_FORK

    def _running(self) -> tuple[PoolCall | None, float]:
        """The call whose code an async worker runs now (None if it is no longer assigned), and since when."""
        assert self.page is not None
        call_id, since = RUNNING.unpack_from(self.page, 0)
        return self.calls.get(call_id), since

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

    def _write(self, call_id: int, body: bytes, timeout_s: float) -> None:
        self.writer.write(HEADER.pack(call_id, len(body), timeout_s) + body)

    async def _listen(self, first: asyncio.Future[Reply]) -> None:
        try:
            while True:
                call_id, length, _ = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                if length > MAX_REPLY:
                    break
                reply = Reply.read(await self.reader.readexactly(length))
                if not call_id:
                    first.set_result(reply)
                elif call := self.calls.pop(call_id, None):
                    self.answered += 1
                    self.stuck = False
                    self.on_reply(self, call, reply)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.InvalidStateError):
            pass  # the connection has ended, or the message is not one of a worker's
        await self._await_end()
        if not first.done():
            first.set_exception(EOFError())
        self._finish()

    async def _await_end(self) -> None:
        """Wait for the exit status after the connection has ended."""
        # The monitor ends after its worker, on a busy machine much later, so its delay proves nothing. Only a worker
        # that still lives without its connection has closed that itself.
        self.is_cut_off = True
        began = time.monotonic()
        while self.process.poll() is None:
            waited = time.monotonic() - began
            if waited > CUT_OFF_S and self._worker_lives():
                reason = "the process closed its connection, or wrote on it what no reply is"
                self.stop(CallResult("crashed", message=reason))
                return
            if waited > REAP_S:  # the monitor hangs, and with it the exit status is lost
                self.kill()
                self.end = self.end or CallResult(
                    "killed", message=f"the process was held up for {REAP_S:g} s at its end"
                )
                return
            await asyncio.sleep(0.01)

    def _worker_lives(self) -> bool:
        """Return whether the worker still runs."""
        try:  # an ending process loses its memory before its connection
            return bool(self.worker_pid) and psutil.Process(self.worker_pid).memory_info().vms > 0
        except (psutil.Error, OSError):
            return False

    def _finish(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.writer.close()
        calls = list(self.calls.values())
        self.on_end(self, calls)
