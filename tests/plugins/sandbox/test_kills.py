"""Somebody kills or stops processes of a sandbox: the program is judged as if nobody had."""

import os
import re
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from tests.support.waiting import meanwhile
from verl.plugins.sandbox import Limits, Sandbox, SandboxError
from verl.plugins.sandbox.runner import ATTEMPTS

PROGRAM = """
import os, signal, time

def end(number, frame):
    signal.signal(number, signal.SIG_IGN)
    os.write(1, b"ends\\n")
    os._exit(0)

print("begins", flush=True)
signal.signal(signal.SIGUSR1, end)
while True:
    time.sleep(60)
"""
"""Ends when it is told to, by SIGUSR1."""
PATIENT = Limits(wall_s=60)


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


def waits(pid):
    """Whether SIGUSR1 is handled, which comes behind the program's first word."""
    (handled,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(handled, 16) >> (signal.SIGUSR1 - 1) & 1)


@contextmanager
def striker(depth, number, most, is_deaf=False):
    """Each new program that has begun gets a signal, or bubblewrap above it does; ``most`` times, then it may end.

    Where the signal does nothing, the program may end after it.
    """
    struck = []

    def act():
        with suppress(IndexError, ValueError, OSError):
            family = processes()
            if len(family) < 3 or not waits(family[-1].pid):
                return
            if family[0].pid not in struck and len(struck) < most:
                os.kill(family[depth].pid, number)
                struck.append(family[0].pid)
            elif family[0].pid not in struck or is_deaf:
                os.kill(family[-1].pid, signal.SIGUSR1)

    with meanwhile(act):
        yield struck


@needs_sandbox
@pytest.mark.parametrize(("depth", "number"), [(0, signal.SIGTERM), (1, signal.SIGKILL), (-1, signal.SIGKILL)])
def test_a_killed_run_is_made_again(depth, number, sandbox):
    """The program's answer, whichever of its processes was killed in the first two attempts."""
    is_deaf = (depth, number) == (1, signal.SIGTERM)  # the kernel shields process 1 of a namespace from it
    with striker(depth, number, ATTEMPTS - 1, is_deaf) as struck:
        outcome = sandbox.run(PROGRAM, limits=PATIENT)
    assert (outcome.status, outcome.stdout) == ("ok", "begins\nends\n")
    assert len(struck) == (1 if is_deaf else ATTEMPTS - 1)
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "bwrap"]


@needs_sandbox
def test_a_run_that_is_killed_every_time_is_not_judged(sandbox):
    """An error of the sandbox and no wrong answer: the sample has no score."""
    with striker(0, signal.SIGKILL, 99) as struck, pytest.raises(SandboxError, match="killed by SIGKILL, in each of 3"):
        sandbox.run(PROGRAM, limits=PATIENT)
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
