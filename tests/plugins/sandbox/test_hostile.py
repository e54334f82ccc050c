"""Hostile programs do no harm and are reported as what they are."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from tests.support.hostile_programs import judge, machine, programs
from verl.plugins.sandbox import Limits, Sandbox, Status

pytestmark = needs_sandbox

NAMES = [hostile.name for hostile in programs(0, Path("/nowhere/secret"))]


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(max_concurrent=4)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with machine(tmp_path_factory.mktemp("host")) as state:
        yield state


@pytest.mark.parametrize("name", NAMES)
def test_it_does_no_harm_and_is_reported_as_what_it_is(sandbox, host, name):
    hostile = next(h for h in programs(host.port, host.secret) if h.name == name)
    outcome, harm = judge(sandbox, hostile, host)
    assert not harm
    assert outcome.status in hostile.statuses, outcome


def test_every_status_is_in_the_suite():
    assert {status for h in programs(0, Path("/nowhere/secret")) for status in h.statuses} == set(Status)


def test_the_suite_sees_harm(host):
    """What is looked for is found where it is: a program outside the sandbox does all three."""
    import socket
    import subprocess
    import sys
    import time

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    extra = host.secret.with_name("extra")
    extra.write_text("x")
    socket.create_connection(("127.0.0.1", host.port)).close()
    try:
        for _ in range(100):
            if host.connections:
                break
            time.sleep(0.05)
        harm = " ".join(host.harm())
        assert "connection" in harm
        assert f"process {child.pid}" in harm
        assert "a file" in harm
    finally:
        child.kill()
        child.wait()
        extra.unlink()
        host.connections.clear()
    assert not host.harm()


def test_a_fork_bomb_beside_it_takes_nothing_from_a_good_program(sandbox):
    """Processes are counted per run: with the bomb at its limit, the other still starts as many as it may."""
    many = (
        "import os\nfor _ in range(7):\n    if os.fork() == 0:\n        import time; time.sleep(0.3); os._exit(0)\n"
        "print(all(os.wait()[1] == 0 for _ in range(7)))"
    )
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    limits = Limits(wall_s=4, cpu_s=4, max_processes=8, memory_mb=128)
    with ThreadPoolExecutor(4) as pool:
        bombs = [pool.submit(sandbox.run, bomb, "", limits) for _ in range(2)]
        good = [pool.submit(sandbox.run, many, "", Limits(wall_s=60, cpu_s=20, max_processes=8)) for _ in range(2)]
    assert [b.result().status for b in bombs] == ["too_many_processes"] * 2
    assert [g.result().stdout for g in good] == ["True\n"] * 2, [g.result() for g in good]


def test_no_zombie_is_left(sandbox):
    before = _zombies()
    for _ in range(5):
        sandbox.run("import os\nif os.fork() == 0: os._exit(0)")
    assert _zombies() <= before


def _zombies() -> set[int]:
    from verl.plugins.sandbox.watch import descendants

    found = set()
    for pid in descendants(os.getpid()):
        path = Path(f"/proc/{pid}/stat")
        if path.exists() and path.read_text().rpartition(")")[2].split()[0] == "Z":
            found.add(pid)
    return found
