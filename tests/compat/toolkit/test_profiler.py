"""Profiler of a worker, its timers and memory logs, as public workers use them."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from verl.compat.toolkit.memory import GPUMemoryLogger, aggressive_empty_cache, log_gpu_memory_usage
from verl.compat.toolkit.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig
from verl.compat.toolkit.timing import marked_timer
from verl.config import TorchProfilerToolConfig
from verl.errors import ConfigError
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import LocalWorkerGroup


class Trained(Worker, DistProfilerExtension):
    def __init__(self, config, rank=None):
        Worker.__init__(self)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank if rank is None else rank, config=config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @DistProfiler.annotate(color="red", role="actor_update")
    def update(self, x):
        return torch.ones(8, 8) @ torch.ones(8, 8) * x

    @DistProfiler.annotate(message="generate")
    async def generate(self):
        return 5


def names_in(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_annotated_calls_of_a_profiled_step_are_in_its_trace(tmp_path):
    config = ProfilerConfig(tool="torch", enable=True, ranks=(0,), save_path=str(tmp_path))
    group = LocalWorkerGroup(None, LocalWorkerGroup.describe(Trained, config))
    group.update(1)  # before the step
    group.start_profile(role="e2e")
    assert group.update(2)[0][0, 0] == 16
    group.stop_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["e2e_rank0_0.json"]
    assert {"update", "aten::mm"} <= names_in(tmp_path / "e2e_rank0_0.json")

    other = Trained(config, rank=1)  # is not to be profiled
    other.start_profile(role="e2e")
    assert other.update(2)[0, 0] == 16
    other.stop_profile()
    assert len(list(tmp_path.iterdir())) == 1


def test_in_discrete_mode_each_call_has_a_trace(tmp_path):
    tool = TorchProfilerToolConfig(contents=("cpu",), discrete=True)
    config = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(tmp_path), tool_config=tool)
    worker = Trained(config)
    worker.start_profile()
    worker.update(1)
    asyncio.run(worker.generate())
    worker.stop_profile()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor_update_rank0_0.json", "generate_rank0_1.json"]


def test_two_configurations_are_joined_and_crossed():
    one = ProfilerConfig(tool="torch", enable=True, ranks=(0, 1))
    other = ProfilerConfig(tool="torch", ranks=(1, 2))
    assert (one.union(other).ranks, one.union(other).enable) == ((0, 1, 2), True)
    assert (one.intersect(other).ranks, one.intersect(other).enable) == ((1,), False)
    with pytest.raises(ValueError, match="torch and None"):
        one.union(ProfilerConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tool_that_cannot_work_is_refused_where_it_would_run():
    with pytest.raises(ConfigError, match="this process sees none"):
        DistProfiler(0, ProfilerConfig(tool="nsys", enable=True, all_ranks=True))
    with pytest.raises(ConfigError, match=r"needs profiler\.tool"):
        DistProfiler(0, ProfilerConfig(enable=True, all_ranks=True))
    assert not DistProfiler(1, ProfilerConfig(tool="nsys", enable=True)).check_this_rank()


def test_times_of_a_stage_add_up_also_when_it_raises():
    seconds = {"gen": 10.0}
    with pytest.raises(KeyError), marked_timer("gen", seconds, color="red"):
        raise KeyError
    with marked_timer("step", seconds):
        pass
    assert seconds["gen"] > 10.0
    assert list(seconds) == ["gen", "step"]


def test_memory_is_logged_around_a_call_on_a_gpu_only(caplog):
    caplog.set_level("DEBUG", "verl")
    assert GPUMemoryLogger(role="rollout")(lambda x, y: x + y)(1, y=2) == 3
    log_gpu_memory_usage("Before init")
    aggressive_empty_cache()
    assert bool(caplog.records) == torch.cuda.is_available()
