"""Ctrl-C ends a command with a sentence and code 130, and at once the second time; real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import Program
from tests.support.waiting import eventually, is_alive
from verl.supervision import interruption

HANDLED = """
import os, signal, sys, time
from pathlib import Path
from verl.supervision.interruption import interruptible
from verl.supervision.restarts import restarted_when_killed

signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path(sys.argv[1])
os.setpgid(0, 0)
with interruptible(), restarted_when_killed(3):
    try:
        if sys.argv[2] == "is ignored":
            os.register_at_fork(before=lambda: ((folder / "driver").write_text(str(os.getpid())), time.sleep(60)))
            os.waitpid(os.fork() or os._exit(0), 0)
        (folder / "driver").write_text(str(os.getpid()))
        time.sleep(60)
    except KeyboardInterrupt as interrupt:
        (folder / "first").write_text("1")
        if sys.argv[2] == "hangs":
            time.sleep(60)
        if sys.argv[2] == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            (folder / "deaf").write_text("1")
            time.sleep(60)
        interrupt.add_note("It was at step 3.")
        if sys.argv[2] == "is wrapped":
            raise SystemError("<built-in function get> returned a result with an exception set") from interrupt
        raise
"""

IN_IMPORTS = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTING"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


def start(folder: Path, way: str) -> tuple[Program, int]:
    process = Program(["-c", HANDLED, folder, way], Path("/dev/null"), folder / "errors.txt")
    return process, int(eventually(lambda: (folder / "driver").exists() and (folder / "driver").read_text(), "driver"))


@pytest.mark.parametrize("way", ["ends", "is wrapped", "is ignored"])
def test_the_sentence_has_what_the_program_knows(tmp_path: Path, way: str) -> None:
    process, _ = start(tmp_path, way)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert (tmp_path / "errors.txt").read_text() == "\nInterrupted. It was at step 3.\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the driver is forked on Linux only")
@pytest.mark.parametrize("which", ["parent", "driver", "group"])
def test_the_second_one_ends_all_processes_at_once(tmp_path: Path, which: str) -> None:
    process, driver = start(tmp_path, "hangs")
    target = {"parent": process.pid, "driver": driver, "group": -process.pid}[which]
    os.kill(target, signal.SIGINT)
    eventually(lambda: (tmp_path / "first").exists(), "the first interrupt")
    time.sleep(interruption._SAME_S + 0.1)
    os.kill(target, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    eventually(lambda: not is_alive(driver), "the driver ended")
    assert (tmp_path / "errors.txt").read_text() == "\nInterrupted again: ended at once.\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the driver is forked on Linux only")
def test_the_second_one_ends_a_driver_that_hears_no_signal(tmp_path: Path) -> None:
    process, driver = start(tmp_path, "deaf")
    os.kill(process.pid, signal.SIGINT)
    eventually(lambda: (tmp_path / "deaf").exists(), "the first interrupt")
    time.sleep(interruption._SAME_S + 0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    eventually(lambda: not is_alive(driver), "the driver ended")
    assert (tmp_path / "errors.txt").read_text() == "\nInterrupted again: ended at once.\n"


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        (["verl.trainer.main_ppo"], "omegaconf"),
        (["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", "a", "--target_dir", "b"], "pydantic"),
    ],
)
def test_no_traceback_while_a_command_imports(tmp_path: Path, command: list[str], imported: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_IMPORTS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "INTERRUPTING": imported}
    done = subprocess.run([sys.executable, "-m", *command], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nInterrupted.\n")
