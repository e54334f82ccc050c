"""Stacks of other processes: asked for, read, compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.support.waiting import eventually
from verl.supervision.processes import is_stopped
from verl.supervision.stacks import Frame, Snapshot, culprits, read_stacks

TORCH = "/venv/site-packages/torch"
MAIN = '  File "/app/main.py", line 1 in <module>\n'


def stack(*frames: tuple[str, str]) -> str:
    """One thread, the innermost frame first."""
    return "".join(f'  File "{file}", line 7 in {function}\n' for file, function in frames) + MAIN


ALL_REDUCE = stack((f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"), ("/app/w.py", "update"))
BROADCAST = stack((f"{TORCH}/distributed/distributed_c10d.py", "broadcast"), ("/app/w.py", "update"))
# FSDP's hooks call into c10d; the model's own code inside of a hook does not.
GATHER = stack((f"{TORCH}/_ops.py", "__call__"), (f"{TORCH}/distributed/fsdp/_collectives.py", "gather"))
FORWARD = stack(
    (f"{TORCH}/nn/functional.py", "linear"), ("/app/model.py", "forward"), (f"{TORCH}/distributed/x.py", "f")
)
LOOP = stack(("/app/reward.py", "score"))


def doing(*threads: str, state: str = "sleeping") -> Snapshot:
    heads = [f"Thread 0x{i:016x} (most recent call first):\n" for i in range(len(threads))]
    return Snapshot(state, "\n".join(head + thread for head, thread in zip(heads, threads, strict=True)))


def test_a_dump_is_read_innermost_first():
    snapshot = doing(stack(("/lib/threading.py", "wait")).removesuffix(MAIN), ALL_REDUCE)
    assert [len(thread) for thread in snapshot.threads()] == [1, 3]
    assert snapshot.main[0] == Frame(f"{TORCH}/distributed/distributed_c10d.py", 7, "all_reduce")
    assert (
        snapshot.place == f"in all_reduce ({TORCH}/distributed/distributed_c10d.py:7), called by update (/app/w.py:7)"
    )
    assert doing(LOOP).place == "in score (/app/reward.py:7)"


@pytest.mark.parametrize(
    ("text", "inside"), [(ALL_REDUCE, True), (GATHER, True), (FORWARD, False), (LOOP, False), (MAIN, False)]
)
def test_a_collective_is_where_only_torch_was_called_from_torch_distributed(text, inside):
    assert doing(text).is_in_collective is inside


def test_a_thread_of_autograd_may_be_the_one_that_waits():
    engine = stack((f"{TORCH}/autograd/graph.py", "_engine_run_backward"), ("/app/w.py", "update"))
    assert doing(ALL_REDUCE.removesuffix(MAIN), engine).is_in_collective


@pytest.mark.parametrize(
    ("ranks", "waiting", "guilty", "why"),
    [
        ([ALL_REDUCE, LOOP, ALL_REDUCE], [0, 1, 2], [1], "not in the collective of ranks 0, 2"),
        ([ALL_REDUCE, MAIN], [0], [1], "has answered, and never came to the collective of rank 0"),
        ([ALL_REDUCE, BROADCAST], [0, 1], [], "the ranks wait in different collectives"),
        ([ALL_REDUCE, ALL_REDUCE], [0, 1], [], "all ranks wait in the same collective"),
        ([LOOP, LOOP], [0, 1], [], "no rank waits for another"),
    ],
)
def test_who_keeps_the_others_waiting(ranks, waiting, guilty, why):
    found, said = culprits(dict(enumerate(map(doing, ranks))), waiting)
    assert found == guilty
    assert said.startswith(why)


def test_a_process_that_cannot_run_is_the_cause_wherever_it_stands():
    ranks = {0: doing(ALL_REDUCE), 1: doing(LOOP), 2: doing(ALL_REDUCE, state="stopped")}
    assert culprits(ranks, [0, 1, 2]) == ([2], "its process is stopped, by a signal or a debugger")
    ranks[2] = Snapshot("disk-sleep", "")
    assert culprits(ranks, [0, 1, 2])[1].startswith("its process does not even write its stack (the kernel holds it")
    ranks[2] = Snapshot("", "")
    assert culprits(ranks, [0, 1, 2]) == ([2], "its process is gone")


@contextmanager
def process(code: str, folder: str = ""):
    """A process that is ready when it has said so, by ``ready()``."""
    register = f"from verl.supervision.stacks import write_stacks_on_signal; write_stacks_on_signal({folder!r})\n"
    code = (register if folder else "") + "import time\ndef ready(): print('ready', flush=True)\n" + code
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


def test_processes_write_their_stacks_however_busy_they_are(tmp_path):
    loop = "def spin():\n    ready()\n    while True: pass\nspin()"
    forever = "collections.deque(itertools.repeat(0), maxlen=0)"  # in C
    deep = f"import collections, itertools\ndef deep():\n    ready()\n    {forever}\ndeep()"
    with (
        process(loop, str(tmp_path)) as spins,
        process(deep, str(tmp_path)) as sinks,
        process("ready(); time.sleep(60)") as mute,
    ):
        pids = [spins.pid, sinks.pid, mute.pid]
        for _ in range(2):
            found = read_stacks(tmp_path, pids, timeout_s=1)
            assert [found[pid].main[0].function for pid in pids[:2]] == ["spin", "deep"]
            assert len(found[spins.pid].threads()) == 1, "an earlier dump was read again"
        assert found[mute.pid].place == "its process is still starting"
        assert mute.poll() is None, "a process that is not prepared must not get the signal: it would end"


def test_a_stopped_process_is_not_waited_for(tmp_path):
    with process("ready(); time.sleep(60)", str(tmp_path)) as child:
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(child.pid), "the stop")
        start = time.monotonic()
        assert read_stacks(tmp_path, [child.pid], timeout_s=30)[child.pid] == Snapshot("stopped", "")
        assert time.monotonic() - start < 20
    with process("ready()", str(tmp_path)) as child:
        child.wait()
        assert read_stacks(tmp_path, [child.pid], timeout_s=30)[child.pid].trouble == "its process is gone"
        assert time.monotonic() - start < 25
