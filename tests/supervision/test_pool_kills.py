"""The killable pool while somebody kills its processes: the results are those of an undisturbed run."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually, is_alive, meanwhile
from verl.errors import ProcessLostError
from verl.supervision.killable_pool import Budget, KillablePool
from verl.supervision.killable_pool.child import CANNOT_FORK
from verl.supervision.processes import MARK_VARIABLE

BUDGET = Budget(timeout_s=20.0)


def note(folder, name):
    """Leave a word of the attempt with a file of its own: <folder>/<name>-<pid of the worker>."""
    (Path(folder) / f"{name}-{os.getpid()}").touch()


def attempts(folder, name):
    return sorted(int(path.name.rpartition("-")[2]) for path in Path(folder).glob(f"{name}-*"))


def scored(value, folder, wait_for=0, seconds=0.05):
    """The score, once ``wait_for`` attempts were killed; before that an attempt waits for its killer."""
    note(folder, f"job{value}")
    if len(attempts(folder, f"job{value}")) <= wait_for:
        time.sleep(600)
    time.sleep(seconds)
    return 10.0 * value


async def scored_async(value, folder, wait_for=0, seconds=0.05):
    note(folder, f"job{value}")
    if len(attempts(folder, f"job{value}")) <= wait_for:
        await asyncio.sleep(600)
    await asyncio.sleep(seconds)
    return 10.0 * value


def pid_of_worker(value=0):
    return os.getpid()


class Held:
    """A function whose loading lasts as long as there is a file."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "hold").touch()

    def __setstate__(self, state):
        self.__dict__.update(state)
        note(self.folder, "load")
        while (self.folder / "hold").exists():
            time.sleep(0.01)

    def __call__(self):
        return os.getpid()


def large(value, folder):
    note(folder, "large")
    return [value] * 3_000_000


def with_a_child(folder):
    """In its first attempt: starts a process that leaves the group, the session and its parents, and waits."""
    code = f"import os, time; os.fork() and os._exit(0); open(f'{folder}/child-{{os.getpid()}}', 'w'); time.sleep(600)"
    if not attempts(folder, "child"):
        subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
        time.sleep(600)
    return 1.0


def kill(pid, number=signal.SIGKILL):
    with suppress(ProcessLookupError):
        os.kill(pid, number)


OTHERS = set()
"""Processes below this one that tests of other files have left to go on: pools and clusters that these share."""


def monitors():
    """Those that have ended and are still to be collected are among them: nobody knows what they were."""
    return [child for child in psutil.Process().children() if child.pid not in OTHERS and is_monitor(child)]


def is_monitor(process):
    try:
        return "child.py" in " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def family():
    """All processes of all pools of this process."""
    return [member for monitor in monitors() for member in (monitor, *monitor.children(recursive=True))]


@pytest.fixture(autouse=True)
def nothing_is_left():
    OTHERS.clear()
    OTHERS.update(child.pid for child in psutil.Process().children(recursive=True))
    yield
    eventually(lambda: not monitors(), "the end of all processes of the pool")  # a zombie is one of them


def of(pid, which):
    return pid if which == "worker" else psutil.Process(pid).ppid()


@pytest.mark.parametrize(("which", "number"), [("worker", signal.SIGKILL), ("monitor", signal.SIGTERM)])
def test_killed_while_idle(which, number):
    pool = KillablePool(pid_of_worker, budget=BUDGET)
    (first,) = pool.map([{}])
    kill(of(first.value, which), number)
    (second,) = pool.map([{}])  # at once: the pool may not know it yet
    assert second.status == "ok"
    if which == "worker":  # one whose monitor is killed may answer before it ends
        assert second.value != first.value
    pool.close()


@pytest.mark.parametrize(("function", "which"), [(scored, "worker"), (scored_async, "monitor")])
def test_killed_while_scoring(function, which, tmp_path):
    """Two attempts are killed, the third is left alone; the neighbours never wait."""
    pool = KillablePool(function, num_workers=2, budget=BUDGET, max_concurrent=4)
    killed = set()

    def act():
        for pid in set(attempts(tmp_path, "job3")) - killed:
            if len(killed) < 2:
                kill(of(pid, which))
                killed.add(pid)

    calls = [{"value": n, "folder": str(tmp_path), "wait_for": 2 * (n == 3)} for n in range(6)]
    with meanwhile(act):
        outcomes = pool.map(calls)
    assert [o.status for o in outcomes] == ["ok"] * 6
    assert [o.value for o in outcomes] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert len(attempts(tmp_path, "job3")) == 3
    pool.close()


@pytest.mark.slow
def test_killed_in_every_attempt(tmp_path, caplog):
    """The number of attempts is 1 + kill_retries, and the reason names the signal; five warnings are enough."""
    pool = KillablePool(scored, num_workers=2, budget=Budget(timeout_s=20.0, kill_retries=6))
    calls = [{"value": n, "folder": str(tmp_path), "wait_for": 99 * (n == 1)} for n in range(3)]
    with meanwhile(lambda: [kill(pid) for pid in attempts(tmp_path, "job1")]):
        outcomes = pool.map(calls)
    assert [o.status for o in outcomes] == ["ok", "killed", "ok"]
    assert outcomes[1].message == "the process was killed by SIGKILL, in each of 7 attempts"
    assert len(attempts(tmp_path, "job1")) == 7
    warnings = [record.getMessage() for record in caplog.records if "tried again" in record.getMessage()]
    assert len(warnings) == 5
    assert warnings[-1].endswith("which are tried again; more of these are not shown")
    pool.close()


def test_killed_while_starting(tmp_path):
    """Every process that appears is killed at once, until nine were; from then on they are left alone."""
    pool = KillablePool(scored, num_workers=2, budget=Budget(timeout_s=20.0, kill_retries=100))
    killed = []

    def act():
        for process in monitors():
            if len(killed) < 9 and process.pid not in killed:
                killed.append(process.pid)
                kill(process.pid)

    with meanwhile(act):
        while len(killed) < 9:
            outcomes = pool.map([{"value": n, "folder": str(tmp_path)} for n in range(4)])
            assert [o.value for o in outcomes] == [0.0, 10.0, 20.0, 30.0]
    pool.close()


def test_none_lives_long_enough_to_start(tmp_path):
    """An error that may be met with another attempt, also with the same pool."""
    pool = KillablePool(Held(tmp_path), budget=BUDGET)
    lost = pytest.raises(ProcessLostError, match=r"6 processes in a row were ended before they were ready.*SIGKILL")
    with meanwhile(lambda: [kill(process.pid) for process in monitors()]), lost:
        pool.map([{}])
    (tmp_path / "hold").unlink()
    assert pool.map([{}])[0].status == "ok"
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("function", [scored, scored_async])
def test_all_at_once_again_and_again(function, tmp_path):
    """Five massacres at random moments; what is asked for is answered in the end, in order, and nothing is left."""
    moments = random.Random(0)
    pool = KillablePool(function, num_workers=3, budget=Budget(timeout_s=20.0, kill_retries=100), max_concurrent=6)
    rounds = []

    def act():
        if len(rounds) < 5:
            time.sleep(moments.uniform(0.05, 0.4))
            rounds.extend([found] if (found := [kill(process.pid) for process in family()]) else [])

    with meanwhile(act):
        calls = [{"value": n, "folder": str(tmp_path), "seconds": 0.1} for n in range(24)]
        while len(rounds) < 5:
            assert [o.value for o in pool.map(calls)] == [10.0 * n for n in range(24)]
        assert [o.value for o in pool.map(calls)] == [10.0 * n for n in range(24)]
    pool.close()


@pytest.mark.slow
def test_killed_while_it_returns_its_result(tmp_path):
    """The result has nine megabytes; the kill comes while it is made or sent."""
    pool = KillablePool(large, budget=BUDGET)
    killed = set()

    def act():
        for pid in set(attempts(tmp_path, "large")) - killed:
            if len(killed) < 2:
                time.sleep(0.02 + 0.05 * len(killed))
                kill(pid)
                killed.add(pid)

    with meanwhile(act):
        (outcome,) = pool.map([{"value": 7, "folder": str(tmp_path)}])
    assert outcome.status == "ok"
    assert outcome.value == [7] * 3_000_000
    pool.close()


def test_a_limit_of_its_own_is_not_tried_again(tmp_path):
    pool = KillablePool(scored, budget=Budget(timeout_s=0.5))
    (outcome,) = pool.map([{"value": 1, "folder": str(tmp_path), "seconds": 600}])
    assert outcome.status == "timeout"
    assert len(attempts(tmp_path, "job1")) <= 1
    pool.close()


@pytest.mark.parametrize("function", [scored, pytest.param(scored_async, marks=pytest.mark.slow)])
def test_a_frozen_process_counts_as_lost(function, tmp_path):
    budget = Budget(timeout_s=2.0, kill_retries=1)
    pools = [KillablePool(function, budget=budget, max_concurrent=2) for _ in range(2)]
    stopped = set()

    def act():
        for pid in set(attempts(tmp_path, "job1")) - stopped:
            if not stopped:
                stopped.add(pid)
                kill(pid, signal.SIGSTOP)
        for pid in attempts(tmp_path, "job2"):
            kill(pid, signal.SIGSTOP)

    with meanwhile(act):
        first = pools[0].submit([{"value": 1, "folder": str(tmp_path), "wait_for": 1}])
        second = pools[1].submit([{"value": 2, "folder": str(tmp_path), "wait_for": 99}])
        (outcome,) = first.result(timeout=60)
        assert (outcome.status, outcome.value) == ("ok", 10.0)
        (outcome,) = second.result(timeout=60)
    assert (outcome.status, "SIGSTOP" in outcome.message) == ("killed", True)
    assert len(attempts(tmp_path, "job2")) == 2
    for pool in pools:
        pool.close()


def test_a_process_that_is_frozen_while_it_starts_is_replaced(tmp_path):
    budget = Budget(timeout_s=20.0, start_timeout_s=3.0)
    pool = KillablePool(Held(tmp_path), budget=budget)
    waiting = pool.submit([{}])
    (first,) = eventually(lambda: attempts(tmp_path, "load"), "the first start")
    kill(first, signal.SIGSTOP)
    object.__setattr__(budget, "start_timeout_s", 60.0)  # the next one may be late
    (tmp_path / "hold").unlink()
    (outcome,) = waiting.result(timeout=60)
    assert outcome.status == "ok"
    assert outcome.value != first
    pool.close()


def test_what_a_worker_started_ends_even_if_its_monitor_is_killed_first(tmp_path):
    """A grandchild in a session of its own, whose parent has ended, carries the mark of its worker."""
    pool = KillablePool(with_a_child, budget=BUDGET)
    waiting = pool.submit([{"folder": str(tmp_path)}])
    (child,) = eventually(lambda: attempts(tmp_path, "child"), "the grandchild")
    assert is_alive(child)
    assert MARK_VARIABLE in psutil.Process(child).environ()
    (monitor,) = monitors()
    kill(monitor.pid)
    assert waiting.result(timeout=60)[0].value == 1.0
    eventually(lambda: not is_alive(child), "the end of the grandchild")
    pool.close()


NO_FILES = """
import resource
from tests.supervision.test_pool_kills import pid_of_worker
from verl.errors import ProcessLostError
from verl.supervision.killable_pool import KillablePool

pool = KillablePool(pid_of_worker)
held = resource.getrlimit(resource.RLIMIT_NOFILE)
pool.warm_up()
pool.map([{}])
fds = [open("/dev/null") for _ in range(40)]
resource.setrlimit(resource.RLIMIT_NOFILE, (20, held[1]))
import os, signal
os.kill(pool.map([{}])[0].value, signal.SIGKILL)
try:
    pool.map([{}])
except ProcessLostError as error:
    print("LOST", error)
resource.setrlimit(resource.RLIMIT_NOFILE, held)
print("AGAIN", pool.map([{}])[0].status)
pool.close()
"""


@pytest.mark.slow
def test_no_room_for_another_process():
    """Without a free file descriptor no process can be started: an error that says what to do, and no hang."""
    asked = [sys.executable, "-c", NO_FILES]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "LOST the pool of processes cannot be kept alive: no process can be started, after 6 attempts" in said
    assert "Too many open files" in said
    assert "ulimit -n" in said
    assert "AGAIN ok" in said


def test_a_monitor_that_cannot_fork_says_so():
    """The kernel's limit on processes does not bind root, so the refusal is made of a limit that binds everyone."""
    child = Path(__file__).parents[2] / "verl" / "supervision" / "killable_pool" / "child.py"
    code = (
        "import errno, os, runpy, sys\n"
        "def refuse(): raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')\n"
        "os.fork = refuse\n"
        f"sys.argv = ['child.py', '0', '-1', str(os.getppid())]\nrunpy.run_path({str(child)!r}, run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == CANNOT_FORK
