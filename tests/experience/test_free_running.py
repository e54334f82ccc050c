"""Runs that do not wait for the slowest response (``trainer.v1.trainer_mode``)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.forks import Program
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.partial_responses import from_batch
from verl.agents.worker import trajectory_id
from verl.checkpoint.steps import saved_steps
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.workers.rollout.request import RolloutOutput

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


class Broken(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        raise ValueError("no tool answers")
'''


SAMPLER = '''
from pathlib import Path

from verl.datasets.sampler import BatchSampler, AbstractCurriculumSampler


class Order(BatchSampler, AbstractCurriculumSampler):
    """Rows from the last one on; notes how many rows and which scores each update has."""

    def draw(self):
        first = len(self.dataset) - 1 - self.batches * self.batch_size
        return [(first - row) % len(self.dataset) for row in range(self.batch_size)]

    def update(self, batch):
        has_scores = "token_level_scores" in batch.batch.keys()
        with Path(__file__).with_suffix(".updates").open("a") as notes:
            print(len(batch), has_scores, len(set(batch.non_tensor_batch["row_index"])), file=notes)
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


class Train:
    """Trains in this process, or in another one.

    Args:
        root: the folder of all runs.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.paths, self.reward = root, make_tiny_run(root), root / "reward.py"
        self.reward.write_text(REWARD)
        (root / "agents.py").write_text(f"REWARD = {str(self.reward)!r}\n{AGENT}")
        (root / "agents.yaml").write_text(
            f"- {{name: slow, _target_: Worker, path: {root}/agents.py}}\n"
            f"- {{name: broken, _target_: Broken, path: {root}/agents.py}}\n"
        )

    def settings(self, name: str, changes: dict[str, object]) -> list[str]:
        settings: dict[str, object] = {
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": self.root / "agents.yaml",
            "trainer__rollout_data_dir": self.root / name / "samples",
            "trainer__v1__trainer_mode": "colocate_async",
            "trainer__total_training_steps": 5,
            "custom_reward_function__path": self.reward,
        }
        return overrides(self.paths, self.root / name, **settings | changes)

    def __call__(self, name: str, **changes: object) -> Finished:
        log = self.root / name / "log.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(self.settings(name, changes)))
        steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
        return Finished(steps, self.samples(name))

    def in_process(self, name: str, **changes: object) -> Program:
        settings = self.settings(name, changes | {"trainer__recovery__driver_restarts": 0})
        arguments = ["-m", "verl.trainer.main_ppo", *settings, f"hydra.run.dir={self.root / 'hydra'}"]
        return Program(arguments, self.root / "out", self.root / "err", VERL_FILE_LOGGER_PATH=str(self.root / "log"))

    def samples(self, name: str) -> dict[int, list[tuple[str, str]]]:
        samples = {}
        for path in (self.root / name / "samples").glob("*.jsonl"):
            rows = map(json.loads, path.read_text().splitlines())
            samples[int(path.stem)] = [(f"{row['uid']}/{row['sample_index']}", row["output"]) for row in rows]
        return samples


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return Train(tmp_path_factory.mktemp("free"))


def test_without_prompts_ahead_a_run_is_the_synchronous_one(train: Train) -> None:
    sync = train("sync", trainer__v1__trainer_mode="sync", trainer__total_training_steps=3)
    free = train("free", trainer__v1__colocate_async__num_warmup_batches=0, trainer__total_training_steps=3)
    assert free.samples == sync.samples
    for step in (1, 2, 3):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert free.metrics[step][name] == pytest.approx(sync.metrics[step][name], rel=1e-4, abs=1e-6)
        assert free.metrics[step][f"{STALENESS}/max"] == 0


def test_slow_samples_are_trained_on_in_a_later_step_and_each_once(train: Train) -> None:
    (train.root / "sampler.py").write_text(SAMPLER)
    sampler = {"data__sampler__class_path": train.root / "sampler.py", "data__sampler__class_name": "Order"}
    run = train("slow", actor_rollout_ref__rollout__agent__default_agent_loop="slow", **sampler)
    assert (train.root / "sampler.updates").read_text() == "16 True 4\n" * 5
    assert len(run.names) == len(set(run.names)) == 5 * 4 * 4
    late = [name for step, samples in run.samples.items() for name, _ in samples if int(name.split("-")[0]) < step]
    assert late
    assert max(metrics[f"{STALENESS}_worst/max"] for metrics in run.metrics.values()) >= 1
    # All prompts of the data were used, none twice: 5 steps of 4.
    assert {name.split("/")[0] for name in run.names} == {f"{step}-{row}" for step in range(1, 6) for row in range(4)}


@pytest.mark.slow
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


@pytest.mark.slow
def test_dynamic_sampling_ends_a_run_whose_trajectories_fail(train: Train) -> None:
    with pytest.raises(RolloutError, match=r"(?s)16 of 16 trajectories failed:.*no tool answers"):
        train("broken", actor_rollout_ref__rollout__agent__default_agent_loop="broken", **FILTERS)


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
    dropped = [
        int(sum(run.metrics[step]["training/filter_groups/dropped_prompts"] for step in steps))
        for run, steps in ((first, (1, 2)), (first, (3, 4, 5)), (rest, (3, 4, 5)))
    ]
    assert sorted(first.names) == sorted(started(20 + dropped[0] + dropped[1]))
    assert sorted(before + rest.names) == sorted(started(20 + dropped[0] + dropped[2]))
    assert dropped[0] + dropped[1] >= 4  # in each epoch of 16 prompts four teach nothing
    metrics = list(first.metrics.values())
    drawn = sum(of_step["training/filter_groups/num_gen_batches"] for of_step in metrics)
    assert drawn == (20 + dropped[0] + dropped[1]) / 4
    assert all(of_step["critic/score/max"] > of_step["critic/score/min"] for of_step in metrics)


def started(prompts: int) -> list[str]:
    """Names of the samples of the first prompts of a run."""
    return [f"{1 + prompt // 4}-{prompt % 4}/{index}" for prompt in range(prompts) for index in range(4)]


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_tokens_of_unfinished_responses(
    train: Train, tmp_path: Path, is_killed: bool
) -> None:
    saved, reward = tmp_path / "checkpoints", tmp_path / "reward.py"
    # Of batches, so that a step need not wait for scores, and takes the first groups that have their responses.
    reward.write_text(
        "def compute_score(solution_strs, **others):\n    return [len(set(text)) for text in solution_strs]\n"
    )
    changes = {
        "custom_reward_function__path": reward,
        "trainer__total_training_steps": 4,
        "data__max_response_length": 32,
        "actor_rollout_ref__rollout__ignore_eos": True,
        "actor_rollout_ref__rollout__max_num_seqs": 3,  # so that samples of one group end at different times
    }
    saving = changes | {"trainer__save_freq": 1, "trainer__default_local_dir": saved}
    if is_killed:
        run = train.in_process("killed", **saving)
        step, samples = killed_with_tokens(run, saved), train.samples("killed")
    else:
        samples = train("half", **saving).samples
        step = next(step for step in (1, 2, 3) if has_begun(saved, step))
    resumed = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": saved / f"global_step_{step}"}
    rest = train("whole", **changes | resumed, trainer__async__record_dir=tmp_path)
    before = [name for earlier in range(1, step + 1) for name, _ in samples[earlier]]
    assert sorted(before + rest.names) == sorted(started(16))
    whole: dict[str, dict[str, list[float]]] = {}
    for path in tmp_path.glob("*.safetensors"):
        batch = DataProto.load_from_disk(path)
        names = map(trajectory_id, batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample_index"])
        whole |= {name: {key: batch.batch[key][row].tolist() for key in COLUMNS} for row, name in enumerate(names)}
    for name, response in drawn_until(saved, step).items():
        size, columns = len(response.token_ids), whole[name]
        tokens, log_probs, versions = (columns[key] for key in COLUMNS)
        assert (tokens[:size], log_probs[:size]) == (response.token_ids, response.log_probs)
        assert versions[:size] == response.weight_versions
        assert is_whole(response) or min(versions[size:]) > max(response.weight_versions)


COLUMNS = ("responses", "rollout_log_probs", "weight_versions")


def killed_with_tokens(run: Program, saved: Path) -> int:
    """Kill a run by SIGKILL after a save with unfinished responses; the step that was saved."""
    while run.poll() is None:
        for step in saved_steps(saved):
            if has_begun(saved, step):
                os.kill(run.pid, signal.SIGKILL)
                assert run.wait(60) == -signal.SIGKILL
                return step
        time.sleep(0.02)
    raise AssertionError("the run ended before it had saved unfinished responses")


def drawn_until(saved: Path, step: int) -> dict[str, RolloutOutput]:
    """What a checkpoint has of responses whose group is not complete."""
    pending = saved / f"global_step_{step}" / "pending"
    parts = [from_batch(DataProto.load_from_disk(path)) for path in pending.glob("drawn-*.safetensors")]
    return {name: response for part in parts for name, response in part.items()}


def has_begun(saved: Path, step: int) -> bool:
    """Whether a checkpoint has responses with a beginning and no end."""
    return not all(map(is_whole, drawn_until(saved, step).values()))


def is_whole(response: RolloutOutput) -> bool:
    return len(response.token_ids) == 32


def test_samples_that_became_too_old_are_dropped_if_that_is_asked_for(train: Train) -> None:
    sampler = "trainer__v1__sampler__max_off_policy"
    drops = {f"{sampler}_strategy": "drop", f"{sampler}_threshold": 0, "trainer__total_training_steps": 3}
    run = train("drops", actor_rollout_ref__rollout__agent__default_agent_loop="slow", **drops)
    assert [len(run.samples[step]) for step in (1, 2, 3)] == [16] * 3
    assert sum(metrics["training/off_policy/evicted_samples"] for metrics in run.metrics.values()) > 0
    assert max(metrics[f"{STALENESS}_worst/max"] for metrics in run.metrics.values()) == 0
    # One age for the bound and the count: with a bound of 0 no sample started with earlier weights.
    assert run.metrics[3]["fully_async/count/stale_trajectory_processed"] == 0
