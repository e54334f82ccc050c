"""Calls of one function in processes that can be killed, with a budget for each call."""

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
from typing import Any

from verl.errors import ProcessLostError, WorkerError
from verl.utils.killable_pool.limits import RateLimit
from verl.utils.killable_pool.outcome import Budget, Outcome
from verl.utils.killable_pool.process import Batch, Job, Reply, WorkerProcess
from verl.utils.killable_pool.shipment import is_async, pack

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""How often jobs under way are looked after."""
SPARE_WORKERS = 16
"""How many workers may start beyond ``num_workers`` while others are stuck."""
PATIENCE_S, ASYNC_PATIENCE_S = 0.5, 1.0
"""A worker is stuck when one job holds it up for longer than this, or than a tenth of its time if that is less."""
MAX_START_FAILURES = 3
MAX_ATTEMPTS = 3
"""After so many processes that ended under a job, not by its own doing for certain, it is given up."""
MAX_NO_ROOM = 6
"""How often the system may refuse one more process, one time after the other, while there is no other one."""
MAX_START_KILLS = 6
"""How many processes may be killed while they start, one after the other, for each of ``num_workers``."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
"""Before a process is started after one that could not start; each further pause is twice as long."""
CLOSE_S = 3.0
NO_ROOM = (
    "Lower reward_model.num_workers, or raise what the machine allows: processes (ulimit -u, the pids limit of the "
    "container), open files (ulimit -n), memory."
)


class KillablePool:
    """Calls a function in worker processes; whatever a call does, the caller goes on.

    A worker has one job at a time; of an async function, ``max_concurrent`` over all workers. A job
    that passes its budget is killed with its process and all that the process has started; another
    one takes its place, and no other job is lost. While a job takes longer than half a second, a
    substitute serves those that wait, as far as ``max_concurrent`` allows. Jobs of an async function that wait
    behind one which blocks their event loop are cancelled there, and begin again elsewhere. A job that ends a process
    which had served others runs once more in a fresh one, so that it does not pay for what they left
    behind. A job whose process is killed from outside, whatever it did at the time, is no fault of the job:
    it is tried again with its whole time, ``Budget.kill_retries`` times, and then it is ``killed``.

    Workers start with the first job or with :meth:`warm_up`, are kept between calls, and end with the
    pool, with this process, however it ends, or with :meth:`close`. May be used from any thread.

    Args:
        function: called with keyword arguments; may be async. What it returns is made of numbers, texts,
            None, lists and dicts; arrays and tensors arrive as numbers and lists.
        num_workers: processes.
        budget: what a job may take.
        max_concurrent: jobs under way at once over all workers, by default one for each worker and sixteen
            substitutes; what an async function needs to run side by side.
        limits: rates that all jobs together keep.
        fatal: errors that concern every job: the first one ends the batch and is raised.
        side_by_side: whether a worker takes several jobs at once; None asks whether the function is async.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
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

    def __reduce__(self) -> tuple[Any, ...]:
        return KillablePool, self._arguments

    def submit(
        self,
        calls: Sequence[Mapping[str, Any]],
        timeout_s: float | None = None,
        tokens: Sequence[float] | None = None,
    ) -> Future[list[Outcome]]:
        """Call the function once for each set of arguments.

        Args:
            calls: keyword arguments of each call.
            timeout_s: time of each call, instead of the budget's.
            tokens: what each takes from a limit of tokens.

        Returns:
            the future of their outcomes, in the order of ``calls``. It raises a ``fatal`` error,
            ``WorkerError`` if the function cannot be loaded or the pool is closed, and ``ProcessLostError`` if
            no worker can be kept alive; a later call then tries to start them again.
        """
        batch = Batch(len(calls))
        jobs = []
        for place, arguments in enumerate(calls):
            cost = 1.0 if tokens is None else tokens[place]
            try:
                body = pickle.dumps(dict(arguments), protocol=5)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                batch.done(place, Outcome("error", message=f"the arguments cannot be sent to a worker: {error}"))
                continue
            jobs.append(Job(body, cost, timeout_s or self.budget.timeout_s, batch, place))
        self._engine.submit(jobs)
        return batch.future

    def map(self, calls: Sequence[Mapping[str, Any]], timeout_s: float | None = None) -> list[Outcome]:
        """As :meth:`submit`, and wait."""
        return self.submit(calls, timeout_s).result()

    def warm_up(self) -> None:
        """Start the workers now, so that the first call finds them ready; does not wait."""
        self._engine.submit([])

    def close(self) -> None:
        """End the workers; jobs under way are ``crashed``."""
        self._end()


class _Engine:
    """The thread that owns the workers; everything but ``submit`` and ``close`` runs on its event loop."""

    def __init__(
        self,
        load: dict[str, Any],
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
        self.queue: deque[Job] = deque()
        self.fresh: deque[Job] = deque()
        """Jobs that wait for a process which has served no other."""
        self.workers: set[WorkerProcess] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.burials: set[asyncio.Task[None]] = set()
        self.failures = 0
        """Workers that ended by themselves before they were ready, since the last that was ready."""
        self.start_kills = 0
        """Workers that were killed before they were ready, since the last that was ready."""
        self.refusals = 0
        """How often the system had no room for one more process, since the last that was ready."""
        self.hire_after = 0.0
        """When the next worker may be started."""
        self.broken: Exception | None = None
        self.wake_at: asyncio.TimerHandle | None = None
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.closed = False

    # ---- from any thread -------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
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
                    raise ProcessLostError(f"the pool of processes cannot be started: {error}. {NO_ROOM}") from error
                self.thread = thread
            self.loop.call_soon_threadsafe(self._accept, jobs)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.thread is None or not self.thread.is_alive():
                return
            self.loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=10)

    # ---- on the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._watch())
        finally:  # whatever ended it, nobody waits for what will not come
            self.broken = ProcessLostError("the thread of the pool has ended; the reason is in the log above.")
            for job in self._unfinished():
                job.batch.fail(self.broken)
            for worker in list(self.workers):
                worker.kill()
            self.loop.close()

    def _unfinished(self) -> list[Job]:
        return [*self.queue, *self.fresh, *(job for worker in self.workers for job in worker.jobs.values())]

    async def _watch(self) -> None:
        while not self.stopping.is_set():
            before = time.monotonic()
            tick = TICK_S if self._under_way() or self.queue or self.fresh else None
            try:
                await asyncio.wait_for(self.awake.wait(), tick)
            except TimeoutError:
                late = time.monotonic() - before - TICK_S
                if late > 10 * TICK_S:  # this process was held up; that is not the jobs' doing
                    for job in (job for worker in self.workers for job in worker.jobs.values()):
                        job.started += late
            self.awake.clear()
            now = time.monotonic()
            for worker in list(self.workers):
                worker.check(now, self.patience_s)
                if worker.stuck and self.slots > 1:
                    self.queue.extendleft(reversed(worker.release()))
            self._pump()
        await self._shut_down()

    def _stop(self) -> None:
        self.stopping.set()
        self.awake.set()

    async def _shut_down(self) -> None:
        for worker in list(self.workers):
            worker.stop()
        deadline = time.monotonic() + CLOSE_S
        while self.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for worker in list(self.workers):
            worker.kill()
        for job in (*self.queue, *self.fresh):
            job.done(Outcome("crashed", message="the pool was closed"))
        if self.burials:
            await asyncio.wait(self.burials, timeout=CLOSE_S)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def _accept(self, jobs: list[Job]) -> None:
        if self.broken is not None:
            for job in jobs:
                job.batch.fail(self.broken)
            return
        self.queue.extend(jobs)
        self._pump(warm=True)
        self.awake.set()

    def _pump(self, warm: bool = False) -> None:
        """Give waiting jobs to free workers, and see that there are enough of them."""
        if self.stopping.is_set() or self.broken is not None:
            return
        self._give_fresh()
        free = [worker for worker in self.workers if worker.is_free]
        while self.queue and self.queue[0].batch.future.done():
            self.queue.popleft()  # the batch has failed
        while self.queue and free and self._may_start(self.queue[0]):
            worker = min(free, key=lambda candidate: len(candidate.jobs))
            worker.give(self.queue.popleft())
            if not worker.is_free:
                free.remove(worker)
        self._staff(warm)

    def _give_fresh(self) -> None:
        for worker in self.workers:
            clean = worker.is_free and not worker.answered and not worker.jobs
            if self.fresh and clean and self._may_start(self.fresh[0]):
                worker.give(self.fresh.popleft())

    def _may_start(self, job: Job) -> bool:
        """Whether the limits allow one more job now; if a rate does not, come back when it does."""
        if self._under_way() >= self.most:
            return False
        now = time.monotonic()
        wait = max((limit.delay(job.tokens, now) for limit in self.limits), default=0.0)
        if wait > 0:
            if self.wake_at is None or self.wake_at.cancelled() or self.wake_at.when() < self.loop.time():
                self.wake_at = self.loop.call_later(wait, self._pump)
            return False
        for limit in self.limits:
            limit.take(job.tokens, now)
        return True

    def _under_way(self) -> int:
        return sum(len(worker.jobs) for worker in self.workers)

    def _staff(self, warm: bool) -> None:
        """Start workers: as many as asked for, and substitutes for those that are stuck; let others go."""
        alive = [worker for worker in self.workers if not worker.is_leaving]
        stuck = sum(worker.stuck for worker in alive)
        waiting = len(self.queue) + len(self.fresh)
        wanted = self.num_workers + stuck if waiting else 0
        if warm:
            wanted = max(wanted, self.num_workers)
        wanted = min(wanted, self.num_workers + SPARE_WORKERS - stuck)
        clean = sum(not worker.answered and not worker.jobs for worker in alive)
        missing = wanted - (len(alive) - stuck)
        if self.slots == 1:
            missing = min(missing, self.most - len(alive))
        missing = max(missing, len(self.fresh) - clean)
        for _ in range(missing if warm else min(missing, waiting)):
            if time.monotonic() >= self.hire_after:
                self._hire()
        if not waiting:
            idle = [worker for worker in alive if worker.ready and not worker.jobs]
            for worker in idle[: max(len(alive) - stuck - self.num_workers, 0)]:
                worker.stop()

    def _hire(self) -> None:
        worker = WorkerProcess(self.budget, self.slots, self._replied, self._ended)
        try:
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
                self._break(f"loading the function took longer than {self.budget.start_timeout_s:g} s.")
            return
        if reply.status != "ok":
            self._break(f"the function cannot be loaded in another process:\n{reply.message}")
            return
        self.failures = self.start_kills = self.refusals = 0
        self._pump()

    def _ended_early(self, worker: WorkerProcess) -> None:
        verdict = worker.verdict()
        if worker.had_no_room:
            self._refused("fork failed")
        elif verdict.status == "killed":
            self._killed_early(verdict.message)
        else:
            self.failures += 1
            if self.failures >= MAX_START_FAILURES:
                self._break(f"the process that calls the function ends before it is ready: {verdict.message}.")

    def _killed_early(self, how: str) -> None:
        self.start_kills += 1
        if self.start_kills >= MAX_START_KILLS * self.num_workers:
            self._lose(
                f"{self.start_kills} processes in a row were ended before they were ready; the last one: {how}. "
                "Somebody or something ends them: look for the out-of-memory killer in the kernel's log, for the "
                "limits of the container or the batch system, and for scripts that clean up."
            )
        else:
            self._pause(self.start_kills // self.num_workers)

    def _refused(self, why: str) -> None:
        self.refusals += 1
        if not any(worker.ready and not worker.ended for worker in self.workers) and self.refusals >= MAX_NO_ROOM:
            self._lose(f"no process can be started, after {self.refusals} attempts: {why}. {NO_ROOM}")
        else:
            self._pause(self.refusals)

    def _pause(self, failures: int) -> None:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S)
        self.hire_after = time.monotonic() + pause_s

    def _break(self, message: str) -> None:
        """The function can never be called: for this batch, and for all that come."""
        self.broken = WorkerError(message)
        self._fail(self.broken)

    def _lose(self, message: str) -> None:
        """No worker can be kept alive now; the next batch tries again."""
        self.failures = self.start_kills = self.refusals = 0
        self.hire_after = 0.0
        self._fail(ProcessLostError(f"the pool of processes cannot be kept alive: {message}"))

    def _fail(self, error: Exception) -> None:
        for job in self._unfinished():
            job.batch.fail(error)
        self.queue.clear()
        self.fresh.clear()
        for worker in list(self.workers):
            worker.stop()

    def _replied(self, worker: WorkerProcess, job: Job, reply: Reply) -> None:
        if reply.fatal is not None and reply.fatal in range(len(self.fatal)):
            job.batch.fail(self.fatal[reply.fatal](reply.message))
        elif reply.status == "ok":
            job.done(Outcome("ok", reply.value))
        else:
            clean = worker.answered == 1 and not worker.jobs
            self._failed(job, Outcome(reply.status, message=reply.message), clean)
            if reply.status in ("out_of_memory", "crashed"):
                worker.stop()
        self._pump()

    def _failed(self, job: Job, outcome: Outcome, clean: bool) -> None:
        """A job did not end well: that is its outcome, unless others may have spoilt its process."""
        if outcome.status in ("out_of_memory", "crashed") and not clean and job.first is None:
            job.first = outcome
            job.spent_s += time.monotonic() - job.started
            self.fresh.append(job)
        elif outcome.status == "timeout" and job.first is not None:
            job.done(job.first)  # the second try had only the rest of the time
        else:
            job.done(outcome)

    def _killed(self, job: Job, verdict: Outcome, is_suspect: bool) -> None:
        """A process was killed under a job, from outside or by the job's own hand: only another attempt can tell."""
        job.kills += 1
        if job.kills > self.budget.kill_retries:
            job.done(Outcome("killed", message=f"{verdict.message}, in each of {job.kills} attempts"))
        elif is_suspect:
            self.fresh.append(job)
        else:
            self.queue.appendleft(job)

    def _ended(self, worker: WorkerProcess, jobs: list[Job]) -> None:
        self.workers.discard(worker)
        burial = self.loop.create_task(worker.bury())
        self.burials.add(burial)
        burial.add_done_callback(self.burials.discard)
        if jobs:
            blamed, verdict = worker.blamed(jobs), worker.verdict()
            was_killed = verdict.status == "killed" and not self.stopping.is_set()
            if was_killed:
                logger.warning("%s while it had %d job(s), which are tried again", verdict.message, len(jobs))
            for job in jobs:
                if was_killed and (blamed is None or job is blamed):
                    self._killed(job, verdict, is_suspect=job is blamed)
                elif job is blamed:
                    self._failed(job, verdict, clean=not worker.answered and len(jobs) == 1)
                elif self.stopping.is_set() or job.attempts >= MAX_ATTEMPTS:
                    job.done(verdict)
                else:
                    job.attempts += blamed is None and not worker.retired
                    self.queue.appendleft(job)
        self._pump()
