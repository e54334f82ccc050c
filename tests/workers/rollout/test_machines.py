"""What the first machine of an engine learns of processes on another: that they run, are stopped, or have ended."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.waiting import eventually
from verl.errors import EngineLostError, RolloutError
from verl.supervision.processes import family_of
from verl.testing.models import tiny_model_dir
from verl.utils import hf_tokenizer
from verl.utils.device import ensure_process_group
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import machines
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.client import EngineClient
from verl.workers.rollout.engine_process import EngineProcess, HangLimits
from verl.workers.rollout.machines import EngineMachines, Meeting, NodeReporter, OtherMachines
from verl.workers.rollout.ranks import EnginePlacement
from verl.workers.rollout.vllm_rollout import VLLMRollout

PROGRAM = "import time; print('here', flush=True); time.sleep(600)"


def test_the_processes_of_another_machine_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_REPORT_S", 0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = OtherMachines(store, nodes=2)
    process = EngineProcess("test", lambda port: [sys.executable, "-c", PROGRAM], token="t", health_path=None)
    process.start()
    reporter = NodeReporter(process, Meeting("127.0.0.1", 1, 2, store.port), node_rank=1)
    try:
        eventually(lambda: store.check(["node-1"]) and "here" in process.log_tail(), "the first report")
        assert (watch.loss(), watch.problem()) == (None, None)
        assert process._guard is not None
        family = map(psutil.Process, family_of(process._guard.pid))
        (worker,) = [member.pid for member in family if member.cmdline()[1] == "-c"]  # not the guard
        os.kill(worker, signal.SIGSTOP)
        eventually(lambda: "SIGSTOP) on machine 1 of the engine" in (watch.problem() or ""), "the stopped process")
        os.kill(worker, signal.SIGCONT)
        eventually(lambda: watch.problem() is None, "that it goes on")
        os.kill(worker, signal.SIGKILL)
        loss = eventually(watch.loss, "the killed process")
        assert loss.was_killed
        assert "Machine 1 of the engine: It has ended. The end of its log:" in loss.text
        assert "here" in loss.text
        assert "ended with status -9" in loss.text
    finally:
        reporter.close()
        process.stop()
    now = time.monotonic()
    assert watch.problem() is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 1000)
    assert watch.problem() == "hears nothing of machine 1 of the engine"


def test_a_machine_that_cannot_start_or_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error, or its silence, ends the start of the server on the first machine."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ensure_process_group(torch.device("cpu"), 60)
    first, second = (EngineMachines(0, 1, EnginePlacement(None, node_rank, nodes=2)) for node_rank in (0, 1))

    def server() -> EngineProcess:
        first.meet()
        second.meeting = first.meeting
        return EngineProcess(
            "test",
            lambda port: [sys.executable, "-c", PROGRAM],
            token="t",
            hang_limits=HangLimits(hang_s=0.1),
            elsewhere=first.watch,
        )

    waiting = server()
    with pytest.raises(OSError, match="No space left"), second.reporting_failure():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RolloutError, match=r"Machine 1 of the engine: its processes could not .* No space left on"):
        waiting.start()
    waiting = server()
    monkeypatch.setattr(machines, "_SILENCE_S", 0.1)
    with pytest.raises(EngineLostError, match="hears nothing of machine 1 of the engine, for"):
        waiting.start()


class _Unstartable(VLLMRollout):
    starts_at_once = False

    def _start(self) -> EngineClient:
        raise RolloutError("there is no engine here")


def test_an_engine_that_starts_anew_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ensure_process_group(torch.device("cpu"), 60)
    path = tiny_model_dir(tmp_path)
    config = RolloutConfig(
        name="vllm", tensor_model_parallel_size=1, engine_kwargs={"vllm": {"python": sys.executable}}
    )
    rollout = _Unstartable(config, HFModelConfig(path=path), hf_tokenizer(path), torch.device("cpu"))
    rollout.weight_version = 3  # kept where free_cache_engine=false
    with pytest.raises(RolloutError, match="there is no engine here"):
        rollout._start_together(EngineMachines(0, 1, EnginePlacement(None, nodes=2)))
    assert rollout.weight_version == NO_WEIGHTS
