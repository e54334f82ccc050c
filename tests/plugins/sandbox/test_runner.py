"""What a run returns, and that limits are those asked for."""

import os
import threading
import time

import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from verl.plugins.sandbox import Limits, Sandbox, SandboxError, Status
from verl.plugins.sandbox.types import ProgramResult


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(max_concurrent=3)


@needs_sandbox
def test_stdin_stdout_stderr_and_exit_code(sandbox):
    outcome = sandbox.run("import sys\nprint(int(input()) + 1)\nsys.stderr.write('grüße')\nsys.exit(3)", stdin="41\n")
    assert (outcome.status, outcome.exit_code, outcome.signal) == ("exit_error", 3, None)
    assert (outcome.stdout, outcome.stderr) == ("42\n", "grüße")
    assert outcome.reason == "exit_error (3): grüße"
    assert not outcome.ok
    assert 0 < outcome.seconds < 12


@needs_sandbox
def test_a_success_has_exit_code_0(sandbox):
    outcome = sandbox.run("print(1)")
    assert outcome.ok
    assert (outcome.status, outcome.exit_code, outcome.reason) == (Status.OK, 0, "ok")


@needs_sandbox
@pytest.mark.parametrize("limit", [2, 5])
def test_the_process_limit_is_exact(sandbox, limit):
    """The program itself counts: with a limit of 5 it may have 4 children at once."""
    program = (
        "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
    )
    outcome = sandbox.run(
        program + "except OSError: print(n, flush=True)\nos._exit(0)", limits=Limits(max_processes=limit)
    )
    assert outcome.stdout == f"{limit - 1}\n"


@needs_sandbox
def test_the_memory_limit_lies_where_it_is_set(sandbox):
    program = "x = bytearray({} << 20)\nprint('fits')"
    assert sandbox.run(program.format(200), limits=Limits(memory_mb=300)).stdout == "fits\n"
    assert sandbox.run(program.format(400), limits=Limits(memory_mb=300)).status == "out_of_memory"


@needs_sandbox
def test_memory_shared_by_a_fork_counts_once(sandbox):
    """Seven children share 100 MiB of the parent: 800 MiB if counted eight times, 100 if counted right."""
    program = (
        "import os, time\nx = bytearray(os.urandom(1)) * (100 << 20)\n"
        "for _ in range(7):\n    if os.fork() == 0:\n        time.sleep(1.5); os._exit(0)\n"
        "time.sleep(1.5)\nfor _ in range(7): os.wait()\nprint(len(x) >> 20)"
    )
    outcome = sandbox.run(program, limits=Limits(memory_mb=300))
    assert outcome.stdout == "100\n", outcome
    assert 90 < outcome.peak_memory_mb < 300


@needs_sandbox
def test_empty_files_count_as_memory(sandbox):
    # 1 KiB each: 64 MiB are 65,536 of them; the memory of the program itself counts too.
    program = "import os\nfor n in range({}):\n    os.mkdir(f'/dev/shm/{{n}}')\nprint('made')"
    limits = Limits(memory_mb=64, wall_s=60.0, cpu_s=60)
    assert sandbox.run(program.format(2000), limits=limits).stdout == "made\n"
    assert sandbox.run(program.format(1 << 20), limits=limits).status == "out_of_memory"


@needs_sandbox
def test_output_up_to_the_limit_is_kept_whole(sandbox):
    limits = Limits(max_output_bytes=1000)
    exact = sandbox.run("print('x' * 999)", limits=limits)
    assert (exact.status, len(exact.stdout)) == ("ok", 1000)
    over = sandbox.run("print('x' * 1000)", limits=limits)
    assert (over.status, len(over.stdout)) == ("output_limit", 1000)


@needs_sandbox
def test_output_larger_than_a_pipe_arrives(sandbox):
    outcome = sandbox.run("print('x' * 900000)")
    assert len(outcome.stdout) == 900001


@needs_sandbox
def test_large_standard_input_arrives_whole(sandbox):
    outcome = sandbox.run("import sys\nprint(sum(map(int, sys.stdin)))", stdin="1\n" * 500_000)
    assert outcome.stdout == "500000\n"


@needs_sandbox
def test_wall_and_cpu_limits(sandbox):
    asleep = sandbox.run("import time\ntime.sleep(60)", limits=Limits(wall_s=0.5))
    assert asleep.status == "timeout"
    assert 0.5 <= asleep.seconds < 10
    assert sandbox.run("while True: pass", limits=Limits(wall_s=60, cpu_s=1)).status == "cpu_limit"


@needs_sandbox
def test_the_same_program_gives_the_same_answer(sandbox):
    program = "print(list({'a', 'b', 'c', 'd', 'e'}), hash('x'))"
    assert len({sandbox.run(program).stdout for _ in range(4)}) == 1


@needs_sandbox
def test_installed_packages_are_hidden_and_the_standard_library_is_there(sandbox):
    program = (
        "import sqlite3, decimal, bisect, ssl, ctypes, multiprocessing.pool\n"
        "import importlib.util as u\nprint([n for n in ('numpy', 'pip', 'verl', 'torch') if u.find_spec(n)])"
    )
    assert sandbox.run(program).stdout == "[]\n"


@needs_sandbox
def test_runs_at_once_are_bounded_and_waiting_is_not_counted(sandbox):
    start = time.monotonic()
    outcomes = []
    program = "import time\ntime.sleep(0.5)\nprint(1)"
    threads = [
        threading.Thread(target=lambda: outcomes.append(sandbox.run(program, limits=Limits(wall_s=30))))
        for _ in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [o.status for o in outcomes] == ["ok"] * 9
    assert time.monotonic() - start >= 1.5  # 9 runs of 0.5 s, 3 at once


@needs_sandbox
def test_descriptors_do_not_leak(sandbox):
    sandbox.run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sandbox.run("import os\nos._exit(1)")
    assert len(os.listdir("/proc/self/fd")) == before


@needs_sandbox
def test_a_lower_limit_of_this_process_holds_inside(sandbox):
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "from verl.plugins.sandbox import Sandbox\nprint(Sandbox().run('import resource;"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))').stdout)"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(40, 40)", done.stderr


@pytest.mark.parametrize(
    "limits", [{"wall_s": 0}, {"cpu_s": -1}, {"memory_mb": 8}, {"max_processes": 0}, {"max_output_bytes": 0}]
)
def test_limits_that_make_no_sense(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_reason_names_the_signal():
    outcome = ProgramResult(status=Status.CRASHED, stdout="", stderr="", seconds=1.0, signal="SIGSEGV")
    assert outcome.reason == "crashed (SIGSEGV)"


@needs_sandbox
def test_a_failure_of_the_sandbox_is_not_an_outcome(sandbox, monkeypatch, tmp_path):
    """bubblewrap that cannot do its work is an error of ours, whatever the program would have done."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: Cannot do it' >&2\nexit 1\n")
    broken.chmod(0o755)
    import dataclasses

    other = Sandbox()
    monkeypatch.setattr(other, "setup", dataclasses.replace(other.setup, bwrap=str(broken)))
    with pytest.raises(SandboxError, match="Cannot do it"):
        other.run("print(1)")
