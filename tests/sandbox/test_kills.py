"""Somebody kills or stops processes of a sandbox: the program is judged as if nobody had."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.sandbox.walls import needs_sandbox
from verl.utils.sandbox import Limits, Sandbox, SandboxError
from verl.utils.sandbox.runner import ATTEMPTS

PROGRAM = "import time\nprint('begins', flush=True)\ntime.sleep(1)\nprint('ends')"


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


def processes():
    """bubblewrap itself, process 1 of its namespace, and the program: by their depth below this process."""
    found = []
    (parent,) = [p for p in psutil.Process().children() if p.name() == "bwrap"]
    while parent is not None:
        found.append(parent)
        parent = next(iter(parent.children()), None)
    return found


@contextmanager
def striker(depth, number, most):
    """Each new program that has begun gets a signal, or bubblewrap above it does; ``most`` times."""
    done, struck = threading.Event(), []

    def run():
        while not done.wait(0.01):
            with suppress(psutil.Error, IndexError, ValueError, OSError):
                family = processes()
                program = family[-1]
                is_begun = len(family) >= 3 and b"python" in Path(f"/proc/{program.pid}/cmdline").read_bytes()
                if is_begun and family[0].pid not in struck and len(struck) < most:
                    time.sleep(0.1)
                    os.kill(family[depth].pid, number)
                    struck.append(family[0].pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield struck
    finally:
        done.set()
        thread.join()


@needs_sandbox
@pytest.mark.parametrize("depth", [0, 1, -1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_is_made_again(depth, number, sandbox):
    """The program's answer, whichever of its processes was killed in the first two attempts."""
    with striker(depth, number, ATTEMPTS - 1) as struck:
        outcome = sandbox.run(PROGRAM)
    assert (outcome.status, outcome.stdout) == ("ok", "begins\nends\n")
    is_deaf = (depth, number) == (1, signal.SIGTERM)  # the kernel shields process 1 of a namespace from it
    assert len(struck) == (1 if is_deaf else ATTEMPTS - 1)
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "bwrap"]


@needs_sandbox
def test_a_run_that_is_killed_every_time_is_not_judged(sandbox):
    """An error of the sandbox and no wrong answer: the sample has no score."""
    with striker(0, signal.SIGKILL, 99) as struck, pytest.raises(SandboxError, match="killed by SIGKILL, in each of 3"):
        sandbox.run(PROGRAM)
    assert len(struck) == ATTEMPTS


@needs_sandbox
def test_a_stopped_program_is_run_again(sandbox):
    with striker(-1, signal.SIGSTOP, 1) as struck:
        outcome = sandbox.run(PROGRAM, limits=Limits(wall_s=4))
    assert (outcome.status, outcome.stdout) == ("ok", "begins\nends\n")
    assert len(struck) == 1


@needs_sandbox
def test_what_a_program_does_to_itself_stays_its_own(sandbox):
    kill = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (kill.status, kill.signal) == ("crashed", "SIGKILL")
    stop = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", limits=Limits(wall_s=0.7))
    assert stop.status == "timeout"
