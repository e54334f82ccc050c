"""Real processes: how they are, how they end, also those that cannot end at once; standard streams that are closed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually
from verl.supervision import processes
from verl.supervision.processes import (
    MARK_VARIABLE,
    end_processes,
    family_of,
    is_alive,
    is_stopped,
    kill,
    kill_group,
    kill_marked,
    new_mark,
    state_of,
    title_of,
)

IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "

HOLDER = """
import ctypes, os, subprocess, sys, time
mark, code, seconds = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(36, 1, 0, 0, 0)  # the orphans below come here, and no zombie is left
child = subprocess.Popen([sys.executable, "-S", "-c", code], env=os.environ | {%r: mark}).pid
if float(seconds):  # PTRACE_SEIZE with PTRACE_O_TRACEEXIT: when it is killed, it stops before it ends
    if libc.ptrace(0x4206, child, 0, 0x40):
        sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
    print("held", flush=True)
    os.waitpid(child, 0)
    time.sleep(float(seconds))
    libc.ptrace(17, child, 0, 0)  # PTRACE_DETACH
else:
    print("started", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.fixture
def started():
    """Starts code under a mark, below a process that ends when all of it have ended; they are held for ``seconds``."""
    holders = []

    def start(mark, code, seconds=0.0):
        command = [sys.executable, "-c", HOLDER % MARK_VARIABLE, mark, code, str(seconds)]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        if not holders[-1].stdout.readline():
            pytest.skip(f"no process can be held here: {holders[-1].stderr.read()}")
        eventually(lambda: bearers(mark), "a process with the mark")
        return holders[-1]

    yield start
    for holder in holders:
        holder.communicate(timeout=60)


def bearers(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE) == mark:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_children_in_sessions_of_their_own_are_ended_and_strangers_are_not(started):
    mark, other = new_mark(), new_mark()
    started(mark, "import os, time; os.fork() or os.setsid(); time.sleep(600)")
    stranger = started(other, "import time; time.sleep(600)")
    kill_marked(mark)
    assert not bearers(mark)
    assert len(bearers(other)) == 1
    assert stranger.poll() is None
    kill_marked(other)


def test_what_a_marked_process_marks_is_ended_with_it_and_not_the_other_way_round(started, monkeypatch):
    outer = new_mark()
    with monkeypatch.context() as patch:
        patch.setenv(MARK_VARIABLE, outer)
        one, other = new_mark(), new_mark()
    for mark in (outer, one, other):
        started(mark, "import time; time.sleep(600)")
    kill_marked(one)
    assert [len(bearers(mark)) for mark in (outer, one, other)] == [1, 0, 1]
    kill_marked(outer)
    assert [len(bearers(mark)) for mark in (outer, other)] == [0, 0]


def test_what_does_not_end_for_seconds_is_waited_for(started, caplog):
    """As a process that gets no core: it is killed and still has all that it had, for 2 s."""
    mark = new_mark()
    started(mark, "import time; time.sleep(600)", seconds=2.0)
    with caplog.at_level(logging.WARNING):
        kill_marked(mark)
    assert not bearers(mark)
    assert not caplog.records


def test_what_has_not_ended_in_time_is_named(started, caplog, monkeypatch):
    mark = new_mark()
    started(mark, "import time; time.sleep(600)", seconds=2.0)
    (pid,) = bearers(mark)
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    with caplog.at_level(logging.WARNING):
        kill_marked(mark)
    assert f"processes {pid} were killed and are still there after 0.1 s" in caplog.text


@pytest.fixture
def running():
    """Starts code that says ``ready()`` in a process of its own group; all are killed at the end."""
    children = []

    def start(code):
        code = "import os, time\ndef ready(): print('ready', flush=True)\n" + code
        command = [sys.executable, "-c", code]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        children[-1].stdout.readline()
        return children[-1]

    yield start
    for child in children:
        kill_group(child.pid)
        child.communicate()


def test_what_can_be_told_of_a_process(running):
    child = running("ready(); time.sleep(600)")
    assert is_alive(child.pid)
    assert "python" in title_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: is_stopped(child.pid), "the stop")
    assert kill(child.pid)
    eventually(lambda: not is_alive(child.pid), "the end")
    assert kill(child.pid), "its exit status is still there"
    child.wait()
    assert not kill(child.pid)
    assert (state_of(child.pid), title_of(child.pid), family_of(child.pid)) == ("", "", [])


def test_a_family_is_all_that_a_process_has_started(running):
    child = running("os.fork() or os.setsid() or os.fork() or (ready(), time.sleep(600)); time.sleep(600)")
    family = family_of(child.pid)
    assert family[0] == child.pid
    assert len(family) == 3
    kill_group(child.pid)
    child.wait()
    assert list(map(is_alive, family)) == [False, True, True], "they had left its group"
    assert end_processes(family[1:], "python", patience_s=0) == []


def test_processes_that_do_not_end_are_killed(running):
    deaf = running(f"{IGNORES_SIGTERM} ready(); time.sleep(60)")
    stopped, stranger = running("ready(); time.sleep(60)"), running("ready(); time.sleep(60)")
    os.kill(stopped.pid, signal.SIGSTOP)
    assert end_processes([deaf.pid, stopped.pid], "python", patience_s=0.2) == []
    assert [child.wait() for child in (deaf, stopped)] == [-signal.SIGKILL] * 2
    # Another program got the number of one that is gone.
    assert end_processes([stranger.pid, deaf.pid], "ray::", patience_s=0) == []
    assert stranger.poll() is None


CLOSED_STREAMS = """
import sys
from verl.base.streams import open_closed_streams
open_closed_streams()
with open(sys.argv[1], "w") as file:
    print("shown")
    sys.stdout.flush()
    sys.stderr.write("shown too")
    sys.stderr.flush()
    file.write(f"{file.fileno() > 2} {sys.stdin.read()!r}")
"""


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_to_the_null_device(tmp_path: Path, closed: str) -> None:
    """Commands that are started without standard input, output or error, as some service managers do."""
    command = ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, CLOSED_STREAMS, str(tmp_path / "file")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "True ''"
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "shown\n")


ENDS_WITH_ITS_CHILD = """
import os, subprocess, sys, threading
from verl.supervision.processes import end_program

sys.setswitchinterval(1e-6)
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
others = [subprocess.Popen(["sleep", "60"]) for _ in range(20)]
threading.Thread(target=lambda: child.stdout.read() or os._exit(1), daemon=True).start()
print(os.getpid(), *(one.pid for one in (child, *others)), flush=True)
end_program("It ends.", 69)
"""


def test_a_program_that_ends_has_its_own_exit_code_though_a_library_ends_it_when_a_child_dies() -> None:
    """As Ray's threads end a driver with the code 1 when its raylet is dead."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_ITS_CHILD], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (69, "\nIt ends.\n")
    eventually(lambda: not any(is_alive(int(pid)) for pid in done.stdout.split()), "the end of all processes")


IN_GROUPS = """
import os, subprocess, sys
from verl.supervision.processes import children_in_own_group

def started():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

before = os.getpgrp()
with children_in_own_group():
    apart = started()
beside = started()
print(before == os.getpgrp(), before == os.getpgid(beside.pid), before == os.getpgid(apart.pid))
apart.kill(), beside.kill()
"""


def test_children_in_a_group_of_their_own_and_others_in_that_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", IN_GROUPS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True True False\n", "")


def test_the_leader_of_a_group_starts_all_children_in_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_GROUPS], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("True True True\n", "")
