"""The killable pool where processes are held up at the wrong moment: nobody's job pays for it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually
from verl.supervision.killable_pool import Budget, KillablePool
from verl.supervision.killable_pool import process as pool_process
from verl.supervision.killable_pool.oom import oom_kills
from verl.supervision.processes import is_stopped

KEEP_TRYING = Budget(timeout_s=60.0, kill_retries=100)


def entries(folder, name):
    return sorted(int(path.name.rpartition("-")[2]) for path in Path(folder).glob(f"{name}-*"))


def enters(folder, name):
    """Leave a file for this process, and say how many have."""
    (Path(folder) / f"{name}-{os.getpid()}").touch()
    return len(entries(folder, name))


def waits_once(folder):
    """In the first process that calls it: for ever."""
    if enters(folder, "call") == 1:
        time.sleep(600)
    return os.getpid()


class LoadsSlowly:
    """A function that the first ``times`` processes never get loaded."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __setstate__(self, state):
        self.__dict__.update(state)
        if enters(self.folder, "load") <= self.times:
            time.sleep(600)

    def __call__(self, folder=None):
        return waits_once(folder) if folder else os.getpid()


async def side_by_side(folder, what):
    """``lasts``, first, until it is cancelled; ``blocks`` the loop or is ``held`` until a file says so; ``short``."""
    is_first = enters(folder, what) == 1
    if what == "blocks":
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)
    elif what.startswith("lasts") and is_first:
        try:
            await asyncio.sleep(600)
        finally:
            enters(folder, "cancelled")
            if what == "lasts and clings":
                time.sleep(600)
    while what.startswith("held") and not (Path(folder) / "end").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    return os.getpid()


@contextmanager
def held_up(monitor):
    """SIGSTOP, and SIGCONT at the end."""
    os.kill(monitor, signal.SIGSTOP)
    eventually(lambda: is_stopped(monitor), "the stop of the monitor")
    try:
        yield
    finally:
        os.kill(monitor, signal.SIGCONT)


def killed_behind_its_monitor(worker, seconds):
    """Kill a worker whose monitor does not notice for so many seconds."""
    with held_up(psutil.Process(worker).ppid()):
        os.kill(worker, signal.SIGKILL)
        time.sleep(seconds)


def test_a_worker_is_killed_while_its_monitor_is_held_up(tmp_path):
    """The monitor's word comes a second late, and it is 'killed' as ever: the job is tried again."""
    pool = KillablePool(waits_once, budget=KEEP_TRYING)
    waiting = pool.submit([{"folder": str(tmp_path)}])
    (first,) = eventually(lambda: entries(tmp_path, "call"), "the first attempt")
    killed_behind_its_monitor(first, 1.0)
    (outcome,) = waiting.result(timeout=60)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.value != first
    pool.close()


@pytest.mark.slow
def test_the_time_of_a_job_is_not_up_while_the_monitor_is_held_up(tmp_path):
    """The worker is killed before the job's time is up and the monitor says so after it."""
    pool = KillablePool(waits_once, budget=Budget(timeout_s=4.0, kill_retries=1))
    waiting = pool.submit([{"folder": str(tmp_path)}])
    (first,) = eventually(lambda: entries(tmp_path, "call"), "the first attempt")
    killed_behind_its_monitor(first, 4.3)
    assert waiting.result(timeout=60)[0].status == "ok"
    pool.close()


@pytest.mark.slow
def test_a_monitor_that_is_never_heard_of_again(tmp_path, monkeypatch):
    """It is killed in the end, and how its worker ended is not known: the job is tried again."""
    monkeypatch.setattr(pool_process, "REAP_S", 1.0)
    pool = KillablePool(waits_once, budget=KEEP_TRYING)
    waiting = pool.submit([{"folder": str(tmp_path)}])
    (first,) = eventually(lambda: entries(tmp_path, "call"), "the first attempt")
    monitor = psutil.Process(first).ppid()
    os.kill(monitor, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    assert waiting.result(timeout=60)[0].status == "ok"
    eventually(lambda: not psutil.pid_exists(monitor), "the end of the monitor")
    pool.close()


@pytest.mark.slow
def test_starts_that_are_killed_while_the_monitor_is_held_up(tmp_path):
    """Four in a row: as crashes, three of them would break the pool for good."""
    pool = KillablePool(LoadsSlowly(str(tmp_path), 4), budget=KEEP_TRYING)
    waiting = pool.submit([{}])
    killed = set()
    for _ in range(4):
        (worker,) = eventually(lambda: set(entries(tmp_path, "load")) - killed, "the next start")
        killed.add(worker)
        killed_behind_its_monitor(worker, 0.5)
    assert waiting.result(timeout=60)[0].status == "ok"
    pool.close()


@pytest.mark.slow
def test_a_process_that_lost_its_worker_gets_no_jobs(tmp_path, monkeypatch):
    """Two jobs come while the monitor has not said yet that the idle worker is gone; another process serves them."""
    monkeypatch.setattr(pool_process, "REAP_S", 60.0)
    pool = KillablePool(waits_once, budget=Budget(timeout_s=60.0, kill_retries=0))
    (tmp_path / "call-0").touch()
    (idle,) = pool.map([{"folder": str(tmp_path)}])
    monitor = psutil.Process(idle.value).ppid()
    with held_up(monitor):
        os.kill(idle.value, signal.SIGKILL)
        (worker,) = pool._engine.workers
        eventually(lambda: worker.is_cut_off, "the pool's notice of the end of the connection")
        outcomes = pool.submit([{"folder": str(tmp_path)}] * 2).result(timeout=60)
        assert [o.status for o in outcomes] == ["ok", "ok"]
        assert is_stopped(monitor)
    pool.close()


@pytest.mark.parametrize("who", ["monitor", "worker"])
def test_a_signal_at_the_moment_of_the_fork_ends_it_as_at_any_other(who):
    """By the signal, which says that somebody else did it, and not by an error, which would say that it crashed."""
    child = Path(pool_process.__file__).with_name("child.py")
    code = (
        "import os, runpy, signal, sys\n"
        "def strike(pid):\n"
        f"    if (pid == 0) == {who == 'worker'}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return pid\n"
        "fork = os.fork\nos.fork = lambda: strike(fork())\n"
        f"sys.argv = ['child.py', '0', '-1', str(os.getppid())]\nrunpy.run_path({str(child)!r}, run_name='__main__')"
    )
    left, right = socket.socketpair()
    with left, right:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdin=right, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, b"")


# ---- async functions -----------------------------------------------------------------------------

AT_ONCE = 8


def more_than_fit(pool, folder):
    """Jobs that last until the end, one of which always waits: so no process is let go for want of work."""
    return pool.submit([{"folder": str(folder), "what": f"held {n}"} for n in range(AT_ONCE + 1)])


def begins_and_waits(pool, folder, what):
    """Submit ``lasts`` and wait until it sleeps in its process, the only one, and the pool knows of no call that runs.

    A call that runs for longer than the pool's patience, be it that its process is held up, counts as one that blocks,
    and the next call goes to another process.
    """
    waiting = pool.submit([{"folder": str(folder), "what": what}])
    (process,) = eventually(lambda: entries(folder, what), "the job that lasts")
    (worker,) = pool._engine.workers
    eventually(lambda: worker._running() == (None, 0.0) and not worker.stuck, "the end of its first step")
    return waiting, process


def test_jobs_behind_one_that_blocks_begin_elsewhere_and_nowhere_else(tmp_path):
    """What another process does by now is not begun when the loop is free, and what was begun before is cancelled.

    However slow the other processes are: a job that one of them is late with may begin in a third.
    """
    pool = KillablePool(side_by_side, budget=KEEP_TRYING, max_concurrent=AT_ONCE)
    lasting, blocked = begins_and_waits(pool, tmp_path, "lasts")
    names = ["blocks", "short 1", "short 2", "short 3"]  # in one batch: all go to the same process
    waiting = pool.submit([{"folder": str(tmp_path), "what": name} for name in names])
    (again,) = lasting.result(timeout=60)
    assert (again.status, again.value == blocked) == ("ok", False)
    eventually(lambda: all(entries(tmp_path, name) for name in names), "the jobs behind the one that blocks")
    held = more_than_fit(pool, tmp_path)
    (tmp_path / "go").touch()
    outcomes = waiting.result(timeout=60)
    assert [(o.status, o.value == blocked) for o in outcomes] == [("ok", name == "blocks") for name in names]
    eventually(lambda: entries(tmp_path, "cancelled") == [blocked], "the end of the first attempt")
    # The loop has been round since then: whoever was ready to begin has had its turn.
    assert [blocked in entries(tmp_path, name) for name in names] == [True, False, False, False]
    assert entries(tmp_path, "blocks") == [blocked]
    (tmp_path / "end").touch()
    assert {o.status for o in held.result(timeout=60)} == {"ok"}
    pool.close()


@pytest.mark.slow
def test_a_job_that_clings_to_a_process_costs_no_other(tmp_path):
    """It was taken back and blocks the loop as it goes: no job that comes later is late for that."""
    pool = KillablePool(side_by_side, budget=Budget(timeout_s=20.0, kill_retries=0), max_concurrent=AT_ONCE)
    lasting, blocked = begins_and_waits(pool, tmp_path, "lasts and clings")
    waiting = pool.submit([{"folder": str(tmp_path), "what": "blocks"}])
    assert lasting.result(timeout=60)[0].status == "ok"
    held = more_than_fit(pool, tmp_path)
    (tmp_path / "go").touch()
    eventually(lambda: entries(tmp_path, "cancelled") == [blocked], "the end of the first attempt")
    (tmp_path / "end").touch()
    assert {o.status for o in held.result(timeout=60)} == {"ok"}
    calls = [{"folder": str(tmp_path), "what": f"short {n}"} for n in range(16)]
    assert [o.status for o in pool.map(calls)] == ["ok"] * 16
    assert waiting.result(timeout=60)[0].status == "ok"
    pool.close()


# ---- the kernel's count of processes that it killed for memory -----------------------------------


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_where_the_kernel_counts_its_kills(tmp_path):
    """The own group before the machine, by its path or where the mount begins with it; 0 where nothing is known."""
    assert oom_kills(tmp_path / "nothing") == 0

    machine = tmp_path / "machine"
    write(machine / "proc/vmstat", "nr_free_pages 17\noom_kill 3\noom_kill_other 9\n")
    assert oom_kills(machine) == 3

    second = tmp_path / "second"
    write(second / "proc/vmstat", "oom_kill 3\n")
    write(second / "proc/self/cgroup", "0::/job/step\n")
    write(second / "sys/fs/cgroup/job/step/memory.events.local", "low 0\noom 4\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(second) == 1

    first = tmp_path / "first"
    write(first / "proc/self/cgroup", "5:cpu,cpuacct:/docker/ab:c\n4:memory:/docker/ab:c\n0::/\n")
    write(first / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(first) == 2
    write(first / "sys/fs/cgroup/memory/docker/ab:c/memory.oom_control", "oom_kill_disable 0\noom_kill 5\n")
    assert oom_kills(first) == 5


def test_only_a_kill_for_memory_during_the_job_is_the_jobs(tmp_path, monkeypatch):
    """The count rises before a process has its first job: the SIGKILL is another one's, and the job is tried again.

    It rises while the job runs: the SIGKILL is the kernel's, and as the process has served no other job, that is all.
    """
    write(tmp_path / "proc/vmstat", "oom_kill 7\n")
    monkeypatch.setattr(pool_process, "oom_kills", lambda: oom_kills(tmp_path))
    (starts, calls, clean) = (tmp_path / name for name in ("starts", "calls", "clean"))
    for folder in (starts, calls, clean):
        folder.mkdir()
    pool = KillablePool(LoadsSlowly(str(starts), 0), budget=KEEP_TRYING)
    pool.warm_up()
    eventually(lambda: entries(starts, "load"), "a process")
    write(tmp_path / "proc/vmstat", "oom_kill 8\n")
    waiting = pool.submit([{"folder": str(calls)}])
    (first,) = eventually(lambda: entries(calls, "call"), "the first attempt")
    os.kill(first, signal.SIGKILL)
    assert waiting.result(timeout=60)[0].status == "ok"
    assert len(entries(calls, "call")) == 2
    pool.close()

    pool = KillablePool(waits_once, budget=KEEP_TRYING)
    waiting = pool.submit([{"folder": str(clean)}])
    (first,) = eventually(lambda: entries(clean, "call"), "the first attempt")
    write(tmp_path / "proc/vmstat", "oom_kill 9\n")
    os.kill(first, signal.SIGKILL)
    assert waiting.result(timeout=60)[0].status == "out_of_memory"
    assert entries(clean, "call") == [first]
    pool.close()
