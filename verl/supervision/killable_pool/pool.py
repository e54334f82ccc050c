"""Pool of killable worker processes that call one function, with limits of time and memory for each call."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from verl.errors import ProcessLostError, WorkerError
from verl.supervision.killable_pool.calls import Budget, CallBatch, CallResult, PoolCall, RateLimit, Reply
from verl.supervision.killable_pool.output import PrintedOutput
from verl.supervision.killable_pool.process import WorkerProcess
from verl.supervision.killable_pool.shipment import is_async, pack

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""Interval at which running calls are checked."""
SPARE_WORKERS = 16
"""Most workers that start beyond ``num_workers`` while others are stuck."""
PATIENCE_S, ASYNC_PATIENCE_S = 0.5, 1.0
"""A worker is stuck when one call occupies it for longer than this, or than a tenth of the timeout if that is less."""
MAX_START_FAILURES = 3
"""Workers in a row that end by themselves before they are ready, until the function counts as not loadable."""
MAX_ATTEMPTS = 3
"""Attempts of a call whose processes end, each time possibly because of another call."""
KILLS_SHOWN = 5
"""Limit on warnings of killed processes: a function that kills its own would cause one at every sample."""
MAX_REFUSALS = 6
"""Refusals in a row of the system to start a process, while no worker is ready, until the pool gives up."""
MAX_START_KILLS = 6
"""Processes in a row that are killed while they start, for each of ``num_workers``, until the pool gives up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
"""Bounds of the pause after a process that could not start; it doubles from the first to the longest."""
CLOSE_S = 3.0  # how long closing waits for processes that are being killed
PROCESS_LIMIT_REMEDY = (
    "Lower num_workers, or raise what the machine allows: processes (ulimit -u, the pids limit of the "
    "container), open files (ulimit -n), memory."
)


class KillablePool:
    """Calls a function in worker processes, so that no call can block or crash the caller.

    - A worker runs one call at a time; for an async function, all workers together run ``max_concurrent``.
    - A call that exceeds its budget is killed with its process and all that the process has started. A new
      process replaces it, and no other call is lost.
    - While a call occupies its worker for longer than half a second, a substitute worker runs the queued calls,
      up to ``max_concurrent``. Calls of an async function whose event loop is blocked by another call are
      cancelled there and start again elsewhere.
    - A call that crashes, or runs out of memory, in a process that has run other calls is repeated once in a
      new process, because those may have damaged the first one.
    - A call whose process is killed from outside is repeated with its full timeout, ``Budget.kill_retries``
      times; then its status is ``killed``.

    What the function prints goes to a file of limited size, and its beginning to standard error.

    Workers start with the first call or with :meth:`warm_up`, are reused, and end with :meth:`close`, the
    pool object or this process, even if that is killed. Thread-safe.

    Args:
        function: called with keyword arguments; may be async. It returns numbers, strings, None, lists and
            dicts of these; arrays and tensors arrive as numbers and lists.
        num_workers: processes.
        budget: limits of each call.
        max_concurrent: concurrent calls over all workers; by default ``num_workers`` and sixteen substitutes.
        limits: rate limits over all calls.
        fatal: exceptions that concern every call: the first one fails the batch and is raised.
        side_by_side: whether a worker runs several calls at once; by default, if the function is async.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        num_workers: int = 1,
        budget: Budget | None = None,
        max_concurrent: int | None = None,
        limits: Sequence[RateLimit] = (),
        fatal: tuple[type[Exception], ...] = (),
        side_by_side: bool | None = None,
    ) -> None:
        self._arguments = (function, num_workers, budget, max_concurrent, limits, fatal, side_by_side)
        self.budget = budget or Budget()
        self._engine = _Engine(
            pack(function, fatal),
            is_async(function) if side_by_side is None else side_by_side,
            num_workers,
            self.budget,
            max_concurrent,
            limits,
            fatal,
        )
        self._end = weakref.finalize(self, self._engine.close)

    def __reduce__(self) -> tuple[object, ...]:
        return KillablePool, self._arguments

    def submit(
        self,
        calls: Sequence[Mapping[str, object]],
        timeout_s: float | None = None,
        tokens: Sequence[float] | None = None,
    ) -> Future[list[CallResult]]:
        """Call the function once for each set of arguments.

        Args:
            calls: keyword arguments of each call.
            timeout_s: timeout of each call, instead of the budget's.
            tokens: cost of each call under a limit of tokens; default 1.

        Returns:
            the future of their results, in the order of ``calls``. It raises a ``fatal`` error,
            ``WorkerError`` if the function cannot be loaded, and ``ProcessLostError`` if no worker can be
            kept alive; a later call then tries to start them again.

        Raises:
            WorkerError: the pool is closed, or this process is a fork of the one that started its thread.
            ProcessLostError: its thread cannot be started.
        """
        batch = CallBatch(len(calls))
        sendable = []
        for index, arguments in enumerate(calls):
            cost = 1.0 if tokens is None else tokens[index]
            try:
                body = pickle.dumps(dict(arguments), protocol=5)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                batch.done(index, CallResult("error", message=f"the arguments cannot be sent to a worker: {error}"))
                continue
            sendable.append(PoolCall(body, cost, timeout_s or self.budget.timeout_s, batch, index))
        self._engine.submit(sendable)
        return batch.future

    def map(self, calls: Sequence[Mapping[str, object]], timeout_s: float | None = None) -> list[CallResult]:
        """Call the function once for each set of arguments and wait; see :meth:`submit`."""
        return self.submit(calls, timeout_s).result()

    def warm_up(self) -> None:
        """Start the workers in the background, before the first call."""
        self._engine.submit([])

    def close(self) -> None:
        """End the workers; unfinished calls get the status ``crashed``."""
        self._end()


class _Engine:
    """Owner of the workers; everything but ``submit`` and ``close`` runs on the event loop of its own thread."""

    def __init__(
        self,
        load: dict[str, object],
        side_by_side: bool,
        num_workers: int,
        budget: Budget,
        max_concurrent: int | None,
        limits: Sequence[RateLimit],
        fatal: tuple[type[Exception], ...],
    ) -> None:
        self.load, self.budget, self.limits, self.fatal = load, budget, limits, fatal
        self.most = max_concurrent or (num_workers + SPARE_WORKERS)
        self.num_workers = min(num_workers, self.most)
        self.slots = max(2, -(-self.most // self.num_workers)) if side_by_side else 1
        self.patience_s = min(ASYNC_PATIENCE_S if side_by_side else PATIENCE_S, budget.timeout_s / 10)
        self.queue: deque[PoolCall] = deque()
        self.fresh: deque[PoolCall] = deque()
        """Calls that must run first in a new process."""
        self.workers: set[WorkerProcess] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.reaping: set[asyncio.Task[None]] = set()
        self.failures = 0
        """Workers that ended by themselves before they were ready, in a row."""
        self.start_kills = 0
        """Workers that were killed before they were ready, in a row."""
        self.kills = 0
        """Workers that were killed while they had calls."""
        self.refusals = 0
        """Number of times in a row that the system refused to start a process."""
        self.start_after = 0.0
        """Earliest start of the next worker, on the monotonic clock."""
        self.broken: Exception | None = None
        self.output: PrintedOutput | None = None
        self.wake_at: asyncio.TimerHandle | None = None
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.closed = False

    # ---- from any thread -------------------------------------------------------------------------

    def submit(self, calls: list[PoolCall]) -> None:
        with self.lock:
            if self.closed:
                raise WorkerError("the pool is closed; make another one.")
            if self.thread is not None and not self.thread.is_alive():  # threads do not survive a fork
                raise WorkerError("the thread of the pool has ended, as in a forked process; make another pool.")
            if self.thread is None:
                self.loop = asyncio.new_event_loop()
                self.stopping, self.awake = asyncio.Event(), asyncio.Event()
                thread = threading.Thread(target=self._run, name="killable-pool", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise ProcessLostError(
                        f"the pool of processes cannot be started: {error}. {PROCESS_LIMIT_REMEDY}"
                    ) from error
                self.thread = thread
            self.loop.call_soon_threadsafe(self._accept, calls)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.thread is None or not self.thread.is_alive():
                return
            self.loop.call_soon_threadsafe(self.stopping.set)
            self.loop.call_soon_threadsafe(self.awake.set)
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=10)

    # ---- on the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._watch())
        finally:  # whatever ended it, no caller may wait for a result that cannot come
            self.broken = ProcessLostError("the thread of the pool has ended; the reason is in the log above.")
            for call in self._unfinished():
                call.batch.fail(self.broken)
            for worker in list(self.workers):
                worker.kill()
            if self.output is not None:
                self.loop.remove_reader(self.output.reader)
                self.output.close()
            self.loop.close()

    def _unfinished(self) -> list[PoolCall]:
        return [*self.queue, *self.fresh, *(call for worker in self.workers for call in worker.calls.values())]

    async def _watch(self) -> None:
        while not self.stopping.is_set():
            before = time.monotonic()
            tick = TICK_S if self._under_way() or self.queue or self.fresh else None
            try:
                await asyncio.wait_for(self.awake.wait(), tick)
            except TimeoutError:
                late = time.monotonic() - before - TICK_S
                if late > 10 * TICK_S:  # this process was stopped or starved: the calls get that time back
                    for call in (call for worker in self.workers for call in worker.calls.values()):
                        call.started += late
            self.awake.clear()
            now = time.monotonic()
            for worker in list(self.workers):
                worker.check(now, self.patience_s)
                if worker.stuck and self.slots > 1:
                    self.queue.extendleft(reversed(worker.release()))
            self._schedule()
        await self._shut_down()

    async def _shut_down(self) -> None:
        for worker in list(self.workers):
            worker.stop()
        deadline = time.monotonic() + CLOSE_S
        while self.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for worker in list(self.workers):
            worker.kill()
        for call in (*self.queue, *self.fresh):
            call.done(CallResult("crashed", message="the pool was closed"))
        if self.reaping:
            await asyncio.wait(self.reaping, timeout=CLOSE_S)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def _accept(self, calls: list[PoolCall]) -> None:
        if self.broken is not None:
            for call in calls:
                call.batch.fail(self.broken)
            return
        self.queue.extend(calls)
        self._schedule(warm=True)
        self.awake.set()

    def _schedule(self, warm: bool = False) -> None:
        """Assign queued calls to free workers, and adjust the number of workers."""
        if self.stopping.is_set() or self.broken is not None:
            return
        for worker in self.workers:
            clean = worker.is_free and not worker.answered and not worker.calls
            if self.fresh and clean and self._may_start(self.fresh[0]):
                worker.assign(self.fresh.popleft())
        free = [worker for worker in self.workers if worker.is_free]
        while self.queue and self.queue[0].batch.future.done():
            self.queue.popleft()  # the batch has failed
        while self.queue and free and self._may_start(self.queue[0]):
            worker = min(free, key=lambda candidate: len(candidate.calls))
            worker.assign(self.queue.popleft())
            if not worker.is_free:
                free.remove(worker)
        self._adjust_workers(warm)

    def _may_start(self, call: PoolCall) -> bool:
        """Charge the call and return True if the limits allow it now; else schedule again when the rates do."""
        if self._under_way() >= self.most:
            return False
        now = time.monotonic()
        wait = max((limit.delay(call.tokens, now) for limit in self.limits), default=0.0)
        if wait > 0:
            if self.wake_at is None or self.wake_at.cancelled() or self.wake_at.when() < self.loop.time():
                self.wake_at = self.loop.call_later(wait, self._schedule)
            return False
        for limit in self.limits:
            limit.take(call.tokens, now)
        return True

    def _under_way(self) -> int:
        return sum(len(worker.calls) for worker in self.workers)

    def _adjust_workers(self, warm: bool) -> None:
        """Start missing workers and substitutes for stuck ones; stop surplus idle ones."""
        alive = [worker for worker in self.workers if not worker.is_ending]
        stuck = sum(worker.stuck for worker in alive)
        waiting = len(self.queue) + len(self.fresh)
        target = self.num_workers + stuck if waiting else 0
        if warm:
            target = max(target, self.num_workers)
        target = min(target, self.num_workers + SPARE_WORKERS - stuck)
        clean = sum(not worker.answered and not worker.calls for worker in alive)
        missing = target - (len(alive) - stuck)
        if self.slots == 1:
            missing = min(missing, self.most - len(alive))
        missing = max(missing, len(self.fresh) - clean)
        for _ in range(missing if warm else min(missing, waiting)):
            if time.monotonic() >= self.start_after:
                self._start_worker()
        if not waiting:
            idle = [worker for worker in alive if worker.ready and not worker.calls]
            for worker in idle[: max(len(alive) - stuck - self.num_workers, 0)]:
                worker.stop()

    def _start_worker(self) -> None:
        try:
            if self.output is None:
                self.output = PrintedOutput("the scoring processes")
                self.loop.add_reader(self.output.reader, self.output.read)
            worker = WorkerProcess(self.budget, self.slots, self.output.writer, self._replied, self._ended)
            worker.spawn()
        except OSError as error:
            self._refused(str(error))
            return
        self.workers.add(worker)
        task = self.loop.create_task(self._start(worker))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _start(self, worker: WorkerProcess) -> None:
        try:
            reply = await worker.start(self.load)
        except EOFError:
            self._ended_early(worker)
            return
        except TimeoutError:
            frozen = worker.is_frozen()
            worker.stop()
            if frozen:
                self._killed_early(f"a process was stopped (SIGSTOP) for {self.budget.start_timeout_s:g} s")
            else:
                self._fail_for_good(f"loading the function took longer than {self.budget.start_timeout_s:g} s.")
            return
        if reply.status != "ok":
            self._fail_for_good(f"the function cannot be loaded in another process:\n{reply.message}")
            return
        self.failures = self.start_kills = self.refusals = 0
        self._schedule()

    def _ended_early(self, worker: WorkerProcess) -> None:
        end_result = worker.end_result()
        if worker.could_not_fork:
            self._refused("fork failed")
        elif end_result.status == "killed":
            self._killed_early(end_result.message)
        else:
            self.failures += 1
            if self.failures >= MAX_START_FAILURES:
                self._fail_for_good(
                    f"the process that calls the function ends before it is ready: {end_result.message}."
                )

    def _killed_early(self, how: str) -> None:
        self.start_kills += 1
        if self.start_kills >= MAX_START_KILLS * self.num_workers:
            self._fail_for_now(
                f"{self.start_kills} processes in a row were ended before they were ready; the last one: {how}. "
                "Somebody or something ends them: look for the out-of-memory killer in the kernel's log, for the "
                "limits of the container or the batch system, and for scripts that clean up."
            )
        else:
            self._pause(self.start_kills // self.num_workers)

    def _refused(self, why: str) -> None:
        self.refusals += 1
        if not any(worker.ready and not worker.ended for worker in self.workers) and self.refusals >= MAX_REFUSALS:
            self._fail_for_now(
                f"no process can be started, after {self.refusals} attempts: {why}. {PROCESS_LIMIT_REMEDY}"
            )
        else:
            self._pause(self.refusals)

    def _pause(self, failures: int) -> None:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S)
        self.start_after = time.monotonic() + pause_s

    def _fail_for_good(self, message: str) -> None:
        """Fail this batch and all later ones: the function cannot be called."""
        self.broken = WorkerError(message)
        self._fail(self.broken)

    def _fail_for_now(self, message: str) -> None:
        """Fail the present batches: no worker stays alive. A later batch tries again."""
        self.failures = self.start_kills = self.refusals = 0
        self.start_after = 0.0
        self._fail(ProcessLostError(f"the pool of processes cannot be kept alive: {message}"))

    def _fail(self, error: Exception) -> None:
        for call in self._unfinished():
            call.batch.fail(error)
        self.queue.clear()
        self.fresh.clear()
        for worker in list(self.workers):
            worker.stop()

    def _replied(self, worker: WorkerProcess, call: PoolCall, reply: Reply) -> None:
        if reply.fatal is not None and reply.fatal in range(len(self.fatal)):
            call.batch.fail(self.fatal[reply.fatal](reply.message))
        elif reply.status == "ok":
            call.done(CallResult("ok", reply.value))
        else:
            clean = worker.answered == 1 and not worker.calls
            self._failed(call, CallResult(reply.status, message=reply.message), clean)
            if reply.status in ("out_of_memory", "crashed"):
                worker.stop()
        self._schedule()

    def _failed(self, call: PoolCall, result: CallResult, clean: bool) -> None:
        """Deliver a failure, or repeat the call in a new process if earlier calls may have caused it."""
        if result.status in ("out_of_memory", "crashed") and not clean and call.first is None:
            call.first = result
            call.spent_s += time.monotonic() - call.started
            self.fresh.append(call)
        elif result.status == "timeout" and call.first is not None:
            call.done(call.first)  # the second attempt only had the rest of the time
        else:
            call.done(result)

    def _killed(self, call: PoolCall, end_result: CallResult, is_suspect: bool) -> None:
        """Repeat a call whose process was killed: it may have killed itself, or the signal came from outside."""
        call.kills += 1
        if call.kills > self.budget.kill_retries:
            call.done(CallResult("killed", message=f"{end_result.message}, in each of {call.kills} attempts"))
        elif is_suspect:
            self.fresh.append(call)
        else:
            self.queue.appendleft(call)

    def _warn_of_kill(self, how: str, calls: int) -> None:
        self.kills += 1
        if self.kills <= KILLS_SHOWN:
            last = "; more of these are not shown" if self.kills == KILLS_SHOWN else ""
            logger.warning("%s while it had %d call(s), which are tried again%s", how, calls, last)

    def _ended(self, worker: WorkerProcess, calls: list[PoolCall]) -> None:
        self.workers.discard(worker)
        task = self.loop.create_task(worker.reap())
        self.reaping.add(task)
        task.add_done_callback(self.reaping.discard)
        if calls:
            culprit, end_result = worker.culprit_of(calls), worker.end_result()
            was_killed = end_result.status == "killed" and not self.stopping.is_set()
            if was_killed:
                self._warn_of_kill(end_result.message, len(calls))
            for call in calls:
                if was_killed and (culprit is None or call is culprit):
                    self._killed(call, end_result, is_suspect=call is culprit)
                elif call is culprit:
                    self._failed(call, end_result, clean=not worker.answered and len(calls) == 1)
                elif self.stopping.is_set() or call.attempts >= MAX_ATTEMPTS:
                    call.done(end_result)
                else:
                    # It may be the culprit only if the culprit is unknown.
                    call.attempts += culprit is None and not worker.retired
                    self.queue.appendleft(call)
        self._schedule()
