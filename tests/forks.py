"""Processes that have PyTorch, Transformers and verl loaded from the start: a fork server has done it for all of them.

    done = run(["-m", "verl.trainer.inspect_data", "--help"], cwd=tmp_path)

Loading takes each process several seconds of a core. Only what is not about the interpreter's own start belongs here.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
get_temp_dir()  # for the server's socket, whose path must be short: before a test puts temporary files elsewhere
FORKS.set_forkserver_preload(
    ["verl.trainer.ppo.trainer", "verl.trainer.supervised", "verl.workers.fsdp_workers", "peft"]
)


class Program:
    """``python`` with these arguments; all that it says goes behind the end of two files."""

    def __init__(
        self, arguments: Sequence[object], out: Path, err: Path, cwd: Path | None = None, **environment: str
    ) -> None:
        self._words = [str(word) for word in arguments]
        given = (self._words, str(cwd or Path.cwd()), os.environ | environment, str(out), str(err))
        self._process: Any = FORKS.Process(target=_program, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code of one that has ended; negative for a signal."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code, when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self._words, timeout)
        return self._process.exitcode


def run(
    arguments: Sequence[object], cwd: Path | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        code = Program(arguments, out, err, cwd, **environment).wait(timeout)
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def as_started_by_hand(environment: Mapping[str, str]) -> None:
    """Give this process an environment; else it has that of the test which came first and so started the server.

    What it starts is forked from it, where it would ask for a fork server of its own.
    """
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)


def _program(words: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    as_started_by_hand(environment)
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
