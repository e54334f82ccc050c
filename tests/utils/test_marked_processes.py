"""Processes that bear a mark are ended, also those that cannot be ended at once."""

import logging
import subprocess
import sys
import time

import psutil
import pytest

from verl.utils import marked_processes
from verl.utils.marked_processes import VARIABLE, kill_marked, new_mark

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
        command = [sys.executable, "-c", HOLDER % VARIABLE, mark, code, str(seconds)]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        if not holders[-1].stdout.readline():
            pytest.skip(f"no process can be held here: {holders[-1].stderr.read()}")
        while not bearers(mark):
            time.sleep(0.01)
        return holders[-1]

    yield start
    for holder in holders:
        holder.communicate(timeout=60)


def bearers(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
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
    monkeypatch.setattr(marked_processes, "KILL_S", 0.1)
    with caplog.at_level(logging.WARNING):
        kill_marked(mark)
    assert f"processes {pid} were killed and are still there after 0.1 s" in caplog.text
