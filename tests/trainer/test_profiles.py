"""Profiles of a run: a real step whose trace is read back, and settings that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.config.conftest import run  # noqa: F401
from tests.trainer.test_run import train  # noqa: F401
from verl.config import PPOConfig
from verl.config.actor import FSDPActorConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.profiler import GlobalProfilerConfig, GlobalToolsConfig, MemoryHistoryConfig, ModelProfilerConfig
from verl.errors import ConfigError, VerlError
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.ppo.profiling import StepProfiles
from verl.workers.engine_worker import EngineWorker
from verl.workers.profiling import ProcessRecording, RecordingPlan

ACTOR = "actor_rollout_ref.actor.profiler"


def spans(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of the events of a trace, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_the_trace_of_a_step_has_the_operators_of_each_stage(train, tmp_path):  # noqa: F811
    settings: dict[str, Any] = {
        "trainer__controller": "local",
        "algorithm__adv_estimator": "gae",
        "global_profiler__tool": "torch",
        "global_profiler__steps": "[2]",
        "global_profiler__save_path": tmp_path / "profile",
        "actor_rollout_ref__actor__profiler__enable": "true",
        "actor_rollout_ref__actor__profiler__ranks": "[0]",
        "critic__profiler__enable": "true",
        "critic__profiler__all_ranks": "true",
    }
    assert max(train(**settings)) == 2
    # Actor and critic share the process, so that one file has both.
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["step2_actor_rollout_rank0.json"]
    found = spans(tmp_path / "profile" / "step2_actor_rollout_rank0.json")
    products = found["aten::mm"] + found["aten::addmm"]
    for call in (
        "ActorRolloutRefWorker.generate_sequences",
        "CriticWorker.compute_values",
        "ActorRolloutRefWorker.update_actor",
        "CriticWorker.update_critic",
    ):
        [(begin, end)] = found[call]
        assert any(begin <= start and stop <= end for start, stop in products), call


class Recorded(EngineWorker):
    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config.actor_rollout_ref.actor.checkpoint, "cpu")


def profiled(folder: Path, **actor: Any) -> PPOConfig:
    profiler = ModelProfilerConfig(enable=True, **actor)
    return PPOConfig(
        actor_rollout_ref=ActorRolloutRefConfig(actor=FSDPActorConfig(profiler=profiler)),
        global_profiler=GlobalProfilerConfig(tool="torch", steps=(2, 3), save_path=str(folder)),
    )


def test_steps_and_ranks_that_are_not_chosen_write_nothing(tmp_path):
    for name, actor in {"0": {"ranks": (0,)}, "1": {"ranks": (1,)}}.items():
        config = profiled(tmp_path / name, **actor)
        group = LocalWorkerGroup(None, LocalWorkerGroup.describe(Recorded, config))
        profiles = StepProfiles(config, total_steps=3)
        for step in (1, 2, 3):
            with profiles.profile_step(step, {"actor_rollout": group, "critic": None}):
                torch.ones(2, 2).sin()
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json")}
    assert files == {"0/step2_actor_rollout_rank0.json", "0/step3_actor_rollout_rank0.json"}


def test_a_step_that_failed_leaves_nothing_in_the_way_of_its_repetition(tmp_path):
    config = profiled(tmp_path, all_ranks=True)
    groups = {"actor_rollout": LocalWorkerGroup(None, LocalWorkerGroup.describe(Recorded, config))}
    profiles = StepProfiles(config, total_steps=3)
    with pytest.raises(KeyError), profiles.profile_step(2, groups):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with profiles.profile_step(2, groups):
        torch.ones(2, 2).sin()
    found = spans(tmp_path / "step2_actor_rollout_rank0.json")
    assert len(found["aten::sin"]) == 1


def test_a_snapshot_of_memory_may_have_several_steps(tmp_path):
    memory = MemoryHistoryConfig(memory_snapshot_num_steps=2)
    profiler = GlobalProfilerConfig(
        tool="torch_memory", steps=(2, 3, 5), global_tool_config=GlobalToolsConfig(torch_memory=memory)
    )
    calls: list[tuple[str, int]] = []

    class Watched(StepProfiles):
        def start(self, step: int, groups: object) -> None:
            calls.append(("start", step))

        def stop(self, groups: object) -> None:
            calls.append(("stop", step))

    profiles = Watched(PPOConfig(global_profiler=profiler), total_steps=5)
    for step in range(1, 6):
        with profiles.profile_step(step, {}):
            pass
    assert calls == [("start", 2), ("stop", 3), ("start", 5), ("stop", 5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_memory_of_a_gpu_is_not_recorded_without_one(tmp_path):
    plan = RecordingPlan("torch_memory", {}, str(tmp_path), 1, "actor_rollout", None)
    with pytest.raises(ConfigError, match="rank 0 sees none"):
        ProcessRecording().start(plan, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_memory_snapshot_has_the_allocations_of_the_step(tmp_path):
    import pickle

    recording = ProcessRecording()
    settings = {"max_entries": 1000, "context": "all", "stacks": "python"}
    recording.start(RecordingPlan("torch_memory", settings, str(tmp_path), 4, "actor_rollout", None), 0)
    held = torch.ones(1 << 20, device="cuda")
    recording.stop("actor_rollout")
    snapshot = pickle.loads((tmp_path / "step4_actor_rollout_rank0.pickle").read_bytes())
    sizes = [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert held.nbytes in sizes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"global_profiler.steps": [0], "global_profiler.tool": "torch"}, "steps are counted from 1"),
        ({"global_profiler.tool": "perf"}, "global_profiler.tool=perf"),
        ({"global_profiler.tool": "torch_memory", "trainer.device": "cpu"}, "this run uses the CPU"),
    ],
)
def test_profilers_that_cannot_be_are_refused(run, changes: dict[str, Any], words: str):  # noqa: F811
    grpo = {"algorithm.adv_estimator": "grpo"}
    assert words in run.refusal(grpo | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"global_profiler.tool": "torch", "global_profiler.steps": [1]}, "no role is profiled"),
        ({"global_profiler.tool": "torch"}, "no step is chosen"),
        ({"global_profiler.steps": [1]}, "no profiler is chosen"),
        ({"global_profiler.tool": "nsys"}, "nsys profile"),
        ({"global_profiler.tool": "npu", "global_profiler.steps": [1]}, "Ascend devices are not in this version"),
        ({f"{ACTOR}.enable": True}, "no rank of this role is chosen"),
        ({f"{ACTOR}.enable": True, f"{ACTOR}.ranks": [0]}, "global_profiler.tool is null"),
        ({f"{ACTOR}.enable": True, f"{ACTOR}.ranks": [99]}, "and none with the number 99"),
        ({f"{ACTOR}.enable": True, f"{ACTOR}.tool_config.torch.discrete": True}, "one trace per step"),
        ({"critic.profiler.enable": True, "critic.profiler.all_ranks": True}, "this run has no workers of this role"),
    ],
)
def test_settings_that_profile_nothing_are_told(
    run,  # noqa: F811
    caplog,
    changes: dict[str, Any],
    words: str,
):
    run.load({"algorithm.adv_estimator": "grpo"} | changes)
    assert words in caplog.text


def test_steps_beyond_the_run_are_refused_before_a_model_loads(train, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("verl.trainer.worker_groups.WorkerGroups.start", lambda *_: pytest.fail("workers started"))
    settings: dict[str, Any] = {
        "trainer__controller": "local",
        "global_profiler__tool": "torch",
        "global_profiler__steps": "[2,7]",
        "global_profiler__save_path": tmp_path,
        "actor_rollout_ref__actor__profiler__enable": "true",
        "actor_rollout_ref__actor__profiler__all_ranks": "true",
    }
    with pytest.raises(VerlError, match=r"the run ends with step 2, before 7"):
        train(**settings)
