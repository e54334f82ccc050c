"""A driver that is started again goes on from what the run has saved, or begins anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.forks import Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the driver is started again on Linux only")

PROGRAM = """
import os, signal, sys
from pathlib import Path
from dataclasses import dataclass
from verl.trainer.driver import restarting_driver

@dataclass
class Recovery:
    driver_restarts: int

@dataclass
class Trainer:
    recovery: Recovery
    default_local_dir: str
    resume_mode: str = "disable"
    project_name: str = "p"
    experiment_name: str = "e"
    logger: tuple = ("file",)

@dataclass
class Config:
    trainer: Trainer

folder = Path(sys.argv[1])

def starts():
    return len(list(folder.glob("start_*")))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

with restarting_driver(Config(Trainer(Recovery(int(sys.argv[3])), str(folder)))) as config:
    (folder / f"start_{starts()}").write_text(f"{os.getpid()} {config.trainer.resume_mode}")
    exec(sys.argv[2])
"""
SAVE = "(folder / 'latest_checkpointed_iteration.txt').write_text('1')"
LOG = """
from verl.utils.file_log import THIS_RUN
with Path(os.environ['VERL_FILE_LOGGER_PATH']).open('a') as log:
    log.write(f'{{"step": 1, "data": {{}}, "run": "{THIS_RUN}"}}\\n')
"""


def run(folder: Path, body: str, restarts: int = 2) -> Program:
    program = Program(["-c", PROGRAM, folder, body, restarts], Path("/dev/null"), folder / "errors.txt")
    assert program.wait(timeout=60) == 0
    return program


def modes(folder: Path) -> list[str]:
    return [path.read_text().split()[1] for path in sorted(folder.glob("start_*"))]


def test_it_goes_on_from_what_it_has_saved(tmp_path: Path) -> None:
    run(tmp_path, f"if starts() == 1: {SAVE}; die()")
    assert modes(tmp_path) == ["disable", "auto"]


def test_what_an_earlier_run_saved_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    run(tmp_path, "if starts() == 1: die()")
    assert modes(tmp_path) == ["disable", "disable"], "nothing was saved, so it begins anew as the user asked"


def test_beginning_anew_it_logs_behind_what_was_there_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("of an earlier run\n")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run(tmp_path, f"{LOG}\nif starts() < 3: die()")
    assert len(modes(tmp_path)) == 3
    first, *rest = log.read_text().splitlines()
    assert first == "of an earlier run"
    assert [json.loads(line)["step"] for line in rest] == [1]


def test_without_restarts_there_is_no_second_process(tmp_path: Path) -> None:
    program = run(tmp_path, "pass", restarts=0)
    assert (tmp_path / "start_0").read_text().split()[0] == str(program.pid)
