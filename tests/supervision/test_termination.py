"""SIGTERM: a run saves, exits with its own code, and the same command goes on from there to the same end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import Program
from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_recovery import assert_same_run
from verl.supervision.termination import EXIT_CODE, StepInterrupted, Termination, unwrapped

STEPS = 6


def start(paths: dict[str, str], folder: Path, **more: object) -> Program:
    """Of the command line, with nothing saved before the end; every step takes long enough to be hit."""
    changes = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.total_epochs": 4} | more
    given = overrides(paths, folder) + [f"{key}={value}" for key, value in changes.items()]
    arguments = ["-m", "verl.trainer.main_ppo", *given, f"hydra.run.dir={folder / 'hydra'}"]
    folder.mkdir(exist_ok=True)
    log = folder / "log.txt"
    return Program(arguments, log, log, VERL_FILE_LOGGER_PATH=str(folder / "metrics.jsonl"))


def outcome(folder: Path) -> tuple[dict[int, dict], dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    last = folder / "checkpoints" / f"global_step_{STEPS}"
    files = {str(p.relative_to(last)): torch.load(p, weights_only=True) for p in sorted(last.rglob("*.pt"))}
    return {record["step"]: record["data"] for record in records}, files


@pytest.mark.parametrize("raised", [KeyboardInterrupt, StepInterrupted])
def test_what_a_signal_raises_leaves_as_itself(raised: type[BaseException]) -> None:
    with pytest.raises(raised), unwrapped():  # noqa: PT012 - the error of the library is what is tried
        try:
            raise raised
        except raised:
            raise OSError("a library's answer")  # noqa: B904
    with pytest.raises(OSError, match="own"), unwrapped():
        raise OSError("own") from ValueError("of another kind")


class Dropped:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)  # here its handler raises, and Python ignores that


def test_an_interrupt_that_python_ignores_comes_again() -> None:
    termination = Termination()
    with pytest.raises(StepInterrupted), termination, termination.interrupting(True):  # noqa: PT012 - it comes later
        Dropped()
        time.sleep(10)
    assert termination.requested


def test_it_saves_exits_with_its_code_and_goes_on_to_the_same_end(tmp_path: Path) -> None:
    paths = make_tiny_run(tmp_path)
    assert start(paths, tmp_path / "straight").wait(timeout=120) == 0
    log = tmp_path / "taken_away" / "metrics.jsonl"
    for _ in range(5):
        process = start(paths, log.parent)
        while not (log.exists() and log.read_text().count("\n") >= 1):
            assert process.poll() is None
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        if (code := process.wait(timeout=60)) != 0:
            break
        shutil.rmtree(log.parent)  # it came to its end while this process was held up
    assert code == EXIT_CODE
    done = len(log.read_text().splitlines())
    assert 1 <= done < STEPS
    latest = tmp_path / "taken_away" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == str(done)
    assert start(paths, tmp_path / "taken_away").wait(timeout=120) == 0
    assert_same_run(outcome(tmp_path / "taken_away"), outcome(tmp_path / "straight"))


REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    while not (Path({folder!r}) / "go").exists() and len(list(Path({folder!r}).glob("scored_*"))) >= 32:
        (Path({folder!r}) / "waits").touch()
        time.sleep(0.1)
    (Path({folder!r}) / f"scored_{{time.monotonic_ns()}}_{{extra_info['index']}}").touch()
    return sum(c.isdigit() for c in solution_str) / 8
"""


@pytest.mark.slow
def test_on_ray_a_step_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    """A step scores 16 responses, and the third step's scores do not come: the state after the second is saved."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD.format(folder=str(tmp_path)))
    changes = {
        "trainer.controller": "ray",
        "trainer.n_gpus_per_node": 2,
        "ray_kwargs.ray_init.num_cpus": 2,
        "custom_reward_function.path": tmp_path / "reward.py",
        "reward_model.timeout_s": 600,
        "trainer.recovery.snapshot_freq": 1,  # steps this short would not have one each
    }
    process = start(paths, tmp_path / "taken_away", **changes)
    while not (tmp_path / "waits").exists():  # in the third step
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == EXIT_CODE
    saved = tmp_path / "taken_away" / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (saved / "global_step_2" / "actor" / "huggingface" / "config.json").exists()
    (tmp_path / "go").touch()
    assert start(paths, tmp_path / "taken_away", **changes).wait(timeout=120) == 0
    assert start(paths, tmp_path / "straight", **changes).wait(timeout=120) == 0
    assert_same_run(outcome(tmp_path / "taken_away"), outcome(tmp_path / "straight"))
