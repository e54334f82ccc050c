"""The lock on a run's folder, between real processes.

A second run that saves into one folder is refused before anything starts (with a main program of its own: at its first
save), or waits 5 s for a run that is about to end. The lock is the kernel's (``flock`` on ``run.lock``), so a killed
run leaves none behind; on NFS it works between machines if the mount supports locks. A run with
``trainer.save_freq=-1`` takes it only if it saves, at SIGTERM.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import CheckpointError
from verl.supervision.lock import NAME, FolderLock
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

HOLDER = """
import os, sys, time
from verl.supervision.lock import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
child = os.fork() if len(sys.argv) > 2 else None  # as a worker of a data loader: lives on when its parent is killed
if child is None:
    print("held", flush=True)
elif child == 0:
    print(os.getpid(), flush=True)  # by the child: only now is it sure to have let go
time.sleep(60)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_run_is_refused_by_the_name_of_the_first_and_a_killed_one_leaves_nothing(tmp_path):
    holder = start(tmp_path)
    try:
        assert line(holder) == "held"
        with pytest.raises(CheckpointError) as error:
            FolderLock(tmp_path).acquire(wait_s=0)
        text = str(error.value)
        assert f"process {holder.pid} on {os.uname().nodename}, since 2" in text
        assert str(tmp_path) in text
        assert "default_local_dir" in text
    finally:
        holder.kill()
        holder.wait()
    with FolderLock(tmp_path) as lock:
        lock.acquire()  # again: nothing
        assert str(os.getpid()) in (tmp_path / NAME).read_text()
    with FolderLock(tmp_path):
        pass


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path):
    holder = start(tmp_path)
    assert line(holder) == "held"
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"])
    try:
        with FolderLock(tmp_path):
            assert holder.wait(timeout=30) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()


def test_children_of_a_killed_run_do_not_hold_the_folder(tmp_path):
    holder = start(tmp_path, "fork")
    child = int(line(holder))
    try:
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it lives
        FolderLock(tmp_path).acquire(wait_s=0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="writable folder"):
        FolderLock(tmp_path / "file" / "run").acquire()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), FolderLock(tmp_path):
        assert f"{tmp_path / NAME} cannot be locked" in caplog.text
    assert (tmp_path / NAME).read_text() == "", "a soft lock, which a killed run would leave behind"


def test_objects_of_one_process_share_it(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path / "." / "x" / "..")
    with first:
        second.acquire(wait_s=0)
        assert is_refused(tmp_path)
    assert is_refused(tmp_path)  # the second has it still
    second.release()
    second.release()
    assert not is_refused(tmp_path)


def is_refused(folder: Path) -> bool:
    """Whether another process cannot have it."""
    code = "import sys; from verl.supervision.lock import FolderLock; FolderLock(sys.argv[1]).acquire(wait_s=0)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"process {os.getpid()} on" in done.stderr
    return done.returncode != 0


def test_a_run_that_saves_takes_it_before_anything_else_and_one_that_does_not_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    arguments = overrides(make_tiny_run(tmp_path), tmp_path, trainer__total_training_steps=1, trainer__save_freq=1)
    settings = compose(arguments)
    holder = start(tmp_path / "checkpoints")
    try:
        assert line(holder) == "held"
        with pytest.raises(CheckpointError, match="another run writes into"):
            run_ppo(settings)
        assert not (tmp_path / "metrics.jsonl").exists()
        run_ppo(compose([*arguments, "trainer.save_freq=-1"]))
        assert not list((tmp_path / "checkpoints").glob("global_step_*"))
    finally:
        holder.kill()
        holder.wait()
    run_ppo(settings)
    assert not is_refused(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").glob("global_step_*"))
