"""Runs that do not wait for the slowest response (``trainer.v1.trainer_mode``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

FILTERS = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "score"}
STALENESS = "training/off_policy/trajectory_staleness"
AGENT = '''
import asyncio
from pathlib import Path

from verl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class Worker(AgentLoopBase):
    """One sample of every fourth prompt of the first steps ends after its step, or after something was scored."""

    async def wait(self, sample):
        if self.config.trainer.total_training_steps == 1:
            ends = asyncio.get_running_loop().time() + 60
            while not Path(REWARD).with_suffix(".called").exists():
                assert asyncio.get_running_loop().time() < ends, "no group was scored before the batch was complete"
                await asyncio.sleep(0.01)
        elif sample.step <= 3:
            while not Path(self.config.trainer.rollout_data_dir, f"{sample.step}.jsonl").exists():
                await asyncio.sleep(0.01)

    async def run(self, sampling_params, **kwargs):
        prompt = kwargs["raw_prompt_ids"]
        drawn = await self.server_manager.generate("turn", prompt_ids=prompt, sampling_params=sampling_params)
        sample = self.server_manager.sample
        if kwargs["extra_info"]["index"] % 4 == 0 and sample.sample_index == 1:
            await self.wait(sample)
        tokens = list(drawn.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=drawn.log_probs,
            metrics=AgentLoopMetrics(),
        )
'''


REWARD = '''
from pathlib import Path


def compute_score(solution_str, extra_info):
    """Responses to every fourth prompt all have one score."""
    Path(__file__).with_suffix(".called").touch()
    return 0.5 if extra_info["index"] % 4 == 3 else len(set(solution_str)) / 8
'''


class Finished(NamedTuple):
    """What a run left."""

    metrics: dict[int, dict[str, Any]]
    samples: dict[int, list[tuple[str, str]]]
    """Name and text of each sample that a step trained on, or that was dropped before."""

    @property
    def names(self) -> list[str]:
        return [name for step in sorted(self.samples) for name, _ in self.samples[step]]


Train = Callable[..., Finished]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train in this process."""
    root = tmp_path_factory.mktemp("free")
    paths, reward = make_tiny_run(root), root / "reward.py"
    reward.write_text(REWARD)
    (root / "agents.py").write_text(f"REWARD = {str(reward)!r}\n{AGENT}")
    (root / "agents.yaml").write_text(f"- {{name: slow, _target_: Worker, path: {root}/agents.py}}\n")

    def run(name: str, **changes: object) -> Finished:
        folder = root / name
        log = folder / "log.jsonl"
        settings: dict[str, object] = {
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": root / "agents.yaml",
            "trainer__rollout_data_dir": folder / "samples",
            "trainer__v1__trainer_mode": "colocate_async",
            "trainer__total_training_steps": 5,
            "custom_reward_function__path": reward,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, folder, **settings | changes)))
        steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
        samples = {}
        for path in (folder / "samples").glob("*.jsonl"):
            rows = map(json.loads, path.read_text().splitlines())
            samples[int(path.stem)] = [(f"{row['uid']}/{row['sample_index']}", row["output"]) for row in rows]
        return Finished(steps, samples)

    return run


def test_without_prompts_ahead_a_run_is_the_synchronous_one(train: Train) -> None:
    sync = train("sync", trainer__v1__trainer_mode="sync", trainer__total_training_steps=3)
    free = train("free", trainer__v1__colocate_async__num_warmup_batches=0, trainer__total_training_steps=3)
    assert free.samples == sync.samples
    for step in (1, 2, 3):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert free.metrics[step][name] == pytest.approx(sync.metrics[step][name], rel=1e-4, abs=1e-6)
        assert free.metrics[step][f"{STALENESS}/max"] == 0


def test_slow_samples_are_trained_on_in_a_later_step_and_each_once(train: Train) -> None:
    run = train("slow", actor_rollout_ref__rollout__agent__default_agent_loop="slow")
    assert len(run.names) == len(set(run.names)) == 5 * 4 * 4
    late = [name for step, samples in run.samples.items() for name, _ in samples if int(name.split("-")[0]) < step]
    assert late
    assert max(metrics[f"{STALENESS}_worst/max"] for metrics in run.metrics.values()) >= 1
    # All prompts of the data were used, none twice: 5 steps of 4.
    assert {name.split("/")[0] for name in run.names} == {f"{step}-{row}" for step in range(1, 6) for row in range(4)}


def test_a_recorded_run_is_repeated_bit_by_bit(train: Train, tmp_path: Path) -> None:
    slow = {"actor_rollout_ref__rollout__agent__default_agent_loop": "slow", "trainer__total_training_steps": 4}
    DataProto().save_to_disk(tmp_path / "7.safetensors")  # of a longer run before
    run = train("recorded", trainer__async__record_dir=tmp_path, **slow)
    again = train("repeated", trainer__async__replay=tmp_path, **slow)
    assert again.samples == run.samples
    names = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", f"{STALENESS}/max")
    for step, metrics in run.metrics.items():
        assert {name: again.metrics[step][name] for name in names} == {name: metrics[name] for name in names}
    with pytest.raises(DataError, match=r"has steps 1 to 4, not step 5"):
        train("beyond", trainer__async__replay=tmp_path, **slow | {"trainer__total_training_steps": 5})


def test_groups_are_scored_before_their_batch_is_complete(train: Train) -> None:
    slow = {"actor_rollout_ref__rollout__agent__default_agent_loop": "slow", "trainer__total_training_steps": 1}
    run = train("scored", trainer__v1__colocate_async__num_warmup_batches=0, **slow)
    assert len(run.names) == 16


def test_dynamic_sampling_ends_a_run_whose_prompts_teach_nothing(train: Train) -> None:
    changes = FILTERS | {"algorithm__filter_groups__max_num_gen_batches": 3, "actor_rollout_ref__rollout__top_k": 1}
    with pytest.raises(RolloutError, match=r"found 0 prompts .* among (1[2-9]|2\d), and a batch needs 4; .*batches=3 "):
        train("equal", **changes)


def test_a_resumed_run_trains_on_each_sample_once_and_never_again_on_dropped_ones(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    slow = {
        "actor_rollout_ref__rollout__agent__default_agent_loop": "slow",
        "trainer__default_local_dir": folder,
        "trainer__save_freq": 2,
        "trainer__test_freq": 1,  # while samples are under way
        **FILTERS,
    }
    first = train("first", **slow)
    pending = {path.name for path in (folder / "global_step_2" / "pending").iterdir()}
    assert {"prompts.safetensors", "responses.safetensors", "scores.safetensors"} <= pending
    from_step_2 = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": folder / "global_step_2"}
    rest = train("rest", **slow | from_step_2 | {"trainer__default_local_dir": tmp_path / "rest"})
    assert sorted(rest.samples) == [3, 4, 5]
    before = [name for step in (1, 2) for name, _ in first.samples[step]]
    assert sorted(before + rest.names) == sorted(first.names)
    metrics = [first.metrics[step] for step in range(1, 6)]
    dropped = int(sum(of_step["training/filter_groups/dropped_prompts"] for of_step in metrics))
    assert dropped >= 5
    assert len(set(first.names)) == len(first.names) == 80 + 4 * dropped
    assert sum(of_step["training/filter_groups/num_gen_batches"] for of_step in metrics) == 5 + dropped / 4
    assert all(of_step["critic/score/max"] > of_step["critic/score/min"] for of_step in metrics)


def test_samples_that_became_too_old_are_dropped_if_that_is_asked_for(train: Train) -> None:
    sampler = "trainer__v1__sampler__max_off_policy"
    drops = {f"{sampler}_strategy": "drop", f"{sampler}_threshold": 0, "trainer__total_training_steps": 3}
    run = train("drops", actor_rollout_ref__rollout__agent__default_agent_loop="slow", **drops)
    assert [len(run.samples[step]) for step in (1, 2, 3)] == [16] * 3
    assert sum(metrics["training/off_policy/evicted_samples"] for metrics in run.metrics.values()) > 0
    assert max(metrics[f"{STALENESS}_worst/max"] for metrics in run.metrics.values()) == 0
