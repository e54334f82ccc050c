"""Ctrl-C in a run says where it was and how it goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.forks import Program
from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.waiting import eventually, is_alive


@pytest.mark.parametrize("mode", ["auto", pytest.param("disable", marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_says_how_it_goes_on(tmp_path, mode):
    checkpoints = tmp_path / "checkpoints"
    arguments = overrides(
        make_tiny_run(tmp_path),
        tmp_path,
        trainer__total_training_steps=1000,
        trainer__save_freq=2,
        trainer__default_local_dir=checkpoints,
        trainer__resume_mode=mode,
    )
    out, err = tmp_path / "out", tmp_path / "err"
    run = Program(["-m", "verl.trainer.main_ppo", *arguments, "trainer.max_actor_ckpt_to_keep=1"], out, err, tmp_path)
    eventually(lambda: (checkpoints / "global_step_2").exists(), "a checkpoint")
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(timeout=60) == 130
    said = err.read_text()
    assert "Traceback" not in said
    newest = max(checkpoints.glob("global_step_*[0-9]"), key=lambda path: int(path.name.rpartition("_")[2]))
    option = "" if mode == "auto" else " with trainer.resume_mode=auto"
    sentences = (
        r"\nInterrupted. The run was at step \d+ of 1000. "
        rf"The last checkpoint is {newest}: the same command{option} goes on from there.\n"
    )
    assert re.search(sentences, said)


BLOCKING_LOOP = """
import asyncio, pathlib, time
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

class Blocks(AgentLoopBase):
    async def run(self, sampling_params, **row):
        pathlib.Path(__file__).with_name("began").touch()
        await asyncio.to_thread(time.sleep, 600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["local", "ray"])
def test_a_run_is_interrupted_while_agent_loops_block_their_threads(tmp_path, controller):
    (tmp_path / "loops.py").write_text(BLOCKING_LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: blocks, _target_: Blocks, path: {tmp_path}/loops.py}}\n")
    arguments = overrides(
        make_tiny_run(tmp_path),
        tmp_path,
        trainer__controller=controller,
        actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "loops.yaml",
        actor_rollout_ref__rollout__agent__default_agent_loop="blocks",
    )
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    eventually((tmp_path / "began").exists, lambda: (tmp_path / "out").read_text()[-2000:], 300)
    family = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(timeout=100) == 130
    said = (tmp_path / "out").read_text()
    assert "Traceback" not in said
    assert "Interrupted. The run was at step 1 of 2." in said
    eventually(lambda: not any(is_alive(process.pid) for process in family), "all processes of the run are gone")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the driver is restarted on Linux only")
def test_sigterm_to_all_processes_of_a_run_on_ray_saves_it_and_ends_it(tmp_path):
    """As ``timeout 60 python -m verl.trainer.main_ppo`` sends it: to its process group, with Ray's processes."""
    checkpoints = tmp_path / "checkpoints"
    arguments = overrides(
        make_tiny_run(tmp_path),
        tmp_path,
        trainer__controller="ray",
        trainer__n_gpus_per_node=2,
        trainer__total_epochs=1000,
        trainer__total_training_steps=1000,
        trainer__default_local_dir=checkpoints,
        trainer__save_freq=2,
    )
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=out, stderr=subprocess.STDOUT)
    eventually(lambda: (checkpoints / "global_step_2").exists(), "a checkpoint", 120)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(timeout=100) == 75
    said = (tmp_path / "out").read_text()
    saved = int(re.findall(r"Saved step (\d+) of 1000", said)[0])
    assert (checkpoints / f"global_step_{saved}").is_dir()
    assert "Restart" not in said
    assert "SIGTERM received" not in said  # how a process of Ray tells that it got one
    assert "Token authentication is enabled" not in said
    assert "Warning: " not in said
