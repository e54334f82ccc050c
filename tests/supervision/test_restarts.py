"""A driver that is killed is started again, and goes on; real processes, real signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.forks import Program
from tests.support.waiting import eventually, is_alive
from verl.supervision.termination import EXIT_CODE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks on Linux only")

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from verl.supervision.restarts import restarted_when_killed

folder = Path(sys.argv[1])

def starts():
    return len(list(folder.glob("start_*")))

with restarted_when_killed(int(sys.argv[3])) as attempt:
    (folder / f"start_{starts()}").write_text(f"{os.getpid()} {attempt}")
    exec(sys.argv[2])
"""


def start(folder: Path, body: str, restarts: int = 2) -> Program:
    return Program(["-c", PROGRAM, folder, body, restarts], Path("/dev/null"), folder / "errors.txt")


def finish(folder: Path, process: Program) -> tuple[int, str]:
    return process.wait(timeout=60), (folder / "errors.txt").read_text()


def attempts(folder: Path) -> list[str]:
    return [path.read_text().split()[1] for path in sorted(folder.glob("start_*"))]


def wait_for(path: Path) -> None:
    eventually(lambda: path.exists() and path.read_text(), f"{path}")


@pytest.mark.parametrize(
    "death",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(1)", "os._exit(0)"],
    ids=["killed", "crash in C", "exit in C", "exit in C as if all was well"],
)
def test_a_driver_that_is_killed_is_started_again(tmp_path: Path, death: str) -> None:
    code, _ = finish(tmp_path, start(tmp_path, f"if starts() == 1: {death}"))
    assert code == 0
    assert attempts(tmp_path) == ["0", "1"]


def test_the_limit_holds_and_the_code_tells_the_signal(tmp_path: Path) -> None:
    code, errors = finish(tmp_path, start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert code == 128 + signal.SIGKILL
    assert len(attempts(tmp_path)) == 3
    assert "ended by SIGKILL, 3 times" in errors


@pytest.mark.parametrize(
    ("body", "expected"),
    [("sys.exit(7)", 7), ("raise ValueError('wrong')", 1), ("os.kill(os.getpid(), signal.SIGHUP)", 128 + 1)],
    ids=["exit", "error", "a signal that asks to end"],
)
def test_an_end_that_is_no_accident_is_the_end(tmp_path: Path, body: str, expected: int) -> None:
    code, _ = finish(tmp_path, start(tmp_path, body))
    assert code == expected
    assert len(attempts(tmp_path)) == 1


HANDLES = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); (folder / 'ready').write_text('1'); time.sleep(60)"


def test_sigterm_reaches_the_driver_whose_code_is_the_answer(tmp_path: Path) -> None:
    process = start(tmp_path, HANDLES)
    wait_for(tmp_path / "ready")
    os.kill(process.pid, signal.SIGTERM)
    assert finish(tmp_path, process)[0] == EXIT_CODE
    assert len(attempts(tmp_path)) == 1


def test_sigterm_that_comes_before_the_parent_listens_is_passed_on_too(tmp_path: Path) -> None:
    """The driver is ready and gets it, while its parent has not yet come back from its fork."""
    listening = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); os.kill(os.getppid(), signal.SIGTERM); "
    slow_fork = PROGRAM.replace(
        "import os,", "import os; os.register_at_fork(after_in_parent=lambda: wait()); import os,"
    )
    slow_fork = "def wait():\n    time.sleep(1)\n" + slow_fork
    program = ["-c", slow_fork, tmp_path, listening + "time.sleep(60)", 2]
    code, _ = finish(tmp_path, Program(program, Path("/dev/null"), tmp_path / "errors.txt"))
    assert code == EXIT_CODE


def test_sigint_to_the_process_that_was_started_ends_the_driver(tmp_path: Path) -> None:
    """As ``kill -INT`` does, and a container that is told to stop by it; nothing here has a terminal."""
    body = "try: (folder / 'ready').write_text('1'); time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(5)"
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready")
    os.kill(process.pid, signal.SIGINT)
    assert finish(tmp_path, process)[0] == 5


SAVES = """
from verl.supervision.termination import EXIT_CODE, Termination
with Termination() as notice:
    (folder / "ready").write_text("1")
    while not notice.requested:
        time.sleep(0.01)
    time.sleep(0.5)
    (folder / "saved").write_text("1")
    sys.exit(EXIT_CODE)
"""


@pytest.mark.parametrize("round_number", range(2))
def test_sigterm_to_all_processes_of_a_group_is_one_notice(tmp_path: Path, round_number: int) -> None:
    """As ``timeout``, systemd and Slurm send it: to the driver, and to its parent, which passes it on."""
    program = ["-c", "import os; os.setpgid(0, 0)\n" + PROGRAM, tmp_path, SAVES, 2]
    process = Program(program, Path("/dev/null"), tmp_path / "errors.txt")
    wait_for(tmp_path / "ready")
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(tmp_path, process)[0] == EXIT_CODE
    assert (tmp_path / "saved").exists()


def test_a_driver_that_is_killed_after_sigterm_is_not_started_again(tmp_path: Path) -> None:
    """As Ray ends it when Ray itself got the SIGTERM."""
    body = HANDLES.replace("sys.exit(75)", "os._exit(1)")
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready")
    os.kill(process.pid, signal.SIGTERM)
    code, errors = finish(tmp_path, process)
    assert code == 128 + signal.SIGTERM
    assert attempts(tmp_path) == ["0"]
    assert "ended by an exit with code 1 from outside of Python before it had saved" in errors


def test_a_later_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    body = SAVES.replace("time.sleep(0.5)", "(folder / 'noted').write_text('1'); time.sleep(60)")
    process = start(tmp_path, "import verl.supervision.termination as t; t._SAME_NOTICE_S = 0.0" + body)
    wait_for(tmp_path / "ready")
    os.kill(process.pid, signal.SIGTERM)
    wait_for(tmp_path / "noted")
    os.kill(process.pid, signal.SIGTERM)
    assert finish(tmp_path, process)[0] == 128 + signal.SIGTERM
    assert not (tmp_path / "saved").exists()


def test_a_driver_whose_parent_is_killed_gets_sigterm(tmp_path: Path) -> None:
    said = HANDLES.replace("sys.exit(75)", "((folder / 'told').write_text('1'), sys.exit(75))")
    process = start(tmp_path, said)
    wait_for(tmp_path / "ready")
    driver = int((tmp_path / "start_0").read_text().split()[0])
    os.kill(process.pid, signal.SIGKILL)
    finish(tmp_path, process)
    wait_for(tmp_path / "told")
    eventually(lambda: not is_alive(driver), "the end of the driver")
