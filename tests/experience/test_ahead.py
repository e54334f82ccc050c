"""Runs that sample some steps before they train (``trainer.async.lag``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides, same
from tests.support.vision_models import picture_rows, tiny_vision_model_dir, write_parquet
from verl.config import PPOConfig
from verl.errors import CheckpointError, ConfigError
from verl.experience.ahead import Ahead
from verl.experience.background import PromptsTakenFirst, RolloutPool, SerialThread
from verl.experience.lockstep import Lockstep
from verl.experience.rewards import RewardRecord
from verl.experience.source import Experience
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.deferred import Deferred
from verl.utils.step_context import StepContext

STALENESS = "training/off_policy/trajectory_staleness"
Train = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train in this process; the metrics of each step without times."""
    root = tmp_path_factory.mktemp("ahead")
    paths, reward = make_tiny_run(root), root / "reward.py"
    reward.write_text("def compute_score(solution_str, **others):\n    return len(set(solution_str)) / 8\n")

    def run(folder: str, **changes: object) -> dict[int, dict[str, Any]]:
        log = root / folder / "log.jsonl"
        log.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, root / folder, custom_reward_function__path=reward, **changes)))
        steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
        return {s: {k: v for k, v in m.items() if not k.startswith(("timing", "perf/"))} for s, m in steps.items()}

    return run


class Watched(Lockstep):
    """Keeps each step that was sampled for, with the last update before."""

    sampled: list[tuple[int, int]]
    version = 0

    def next(self, context: StepContext) -> Experience:
        self.sampled.append((context.number, self.version))
        return super().next(context)

    def updated(self, version: int) -> None:
        self.version = version


def test_a_step_trains_on_responses_of_the_weights_so_many_updates_before(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PPOTrainer, "experience_class", Watched)
    Watched.sampled = []
    steps = train("two", trainer__async__lag=2, trainer__total_training_steps=5)
    assert Watched.sampled == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]
    assert [steps[step][f"{STALENESS}/max"] for step in range(1, 6)] == [0, 1, 2, 2, 2]
    # The weights of the samples are those of a policy that has moved on, by default.
    assert steps[1]["rollout_corr/kl"] == pytest.approx(0, abs=1e-6)
    assert steps[5]["rollout_corr/kl"] > 1e-4


IMAGES = {"data__max_prompt_length": 40}
CRITIC = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": "true", "trainer__critic_warmup": 1}
FILTERS = {
    "algorithm__filter_groups__enable": "true",
    "algorithm__filter_groups__metric": "seq_reward",
    "algorithm__filter_groups__max_num_gen_batches": 0,
    "data__gen_batch_size": 2,
    "algorithm__rollout_correction__prox_logp_method": "loglinear",
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reward_model__launch_reward_fn_async": "true"}, id="scores_under_way"),
        pytest.param(FILTERS, id="dynamic_sampling_and_a3po", marks=pytest.mark.slow),
        pytest.param(CRITIC, id="critic", marks=pytest.mark.slow),
        pytest.param(IMAGES, id="images", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_trains_on_what_was_sampled_before(
    train: Train, changes: Mapping[str, object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if changes is IMAGES:
        pictures = write_parquet(tmp_path / "train.parquet", picture_rows(8, text_every=4))
        model = tiny_vision_model_dir(tmp_path / "vision")
        changes = IMAGES | {"data__train_files": pictures, "actor_rollout_ref__model__path": model}
    common = {"trainer__async__lag": 2, "actor_rollout_ref__rollout__name": "native"} | dict(changes)
    straight = train("straight", trainer__total_training_steps=5, **common)
    folder = tmp_path / "stopped"
    stopped = {"trainer__default_local_dir": folder, "trainer__total_training_steps": 5, "trainer__save_freq": 2}
    first = train("first", **stopped, **common)
    assert same(first, straight)
    pending = sorted(path.name for path in (folder / "global_step_2" / "pending").iterdir())
    assert [name for name in pending if name.endswith("batch.safetensors")] == [
        "3-batch.safetensors",
        "4-batch.safetensors",
    ]
    from_step_2 = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": folder / "global_step_2",
        "trainer__default_local_dir": tmp_path / "rest",
        "trainer__total_training_steps": 5,
    }
    if changes is FILTERS:  # of ages 0, 1, 2, 2, 2; and no step makes a pass for old log-probs
        factors = [straight[step]["rollout_corr/prox_alpha"] for step in range(1, 6)]
        assert factors == pytest.approx([0, 1 / 2, 2 / 3, 2 / 3, 2 / 3])
        assert straight[5]["rollout_corr/rollout_is_max"] != 1
        assert "actor/entropy" not in straight[5]
    rest = train("rest", **from_step_2, **common)
    assert same(rest, {step: straight[step] for step in (3, 4, 5)})
    if request.node.callspec.id == "scores_under_way":
        with pytest.raises(CheckpointError, match="4 batches that were sampled ahead"):
            train("other", **from_step_2 | {"trainer__default_local_dir": tmp_path / "other"})


def test_samples_of_earlier_weights_are_weighed_unless_the_run_chooses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = make_tiny_run(tmp_path)

    def loaded(**changes: object) -> PPOConfig:
        explicit = {key.replace("__", ".") for key in changes}
        return load_config(compose(overrides(paths, tmp_path, trainer__async__lag=1, **changes)), explicit=explicit)

    assert loaded().algorithm.rollout_correction.rollout_is == "token"
    assert "rollout_is: token, because trainer.async.lag=1 trains on samples of earlier weights" in caplog.text
    assert "biased" not in caplog.text.replace("without these weights the gradient is biased", "")
    assert loaded(algorithm__rollout_correction__bypass_mode="true").algorithm.rollout_correction.rollout_is is None
    assert loaded(algorithm__rollout_correction__rollout_is="null").algorithm.rollout_correction.rollout_is is None
    assert "weigh them with algorithm.rollout_correction.rollout_is=token" in caplog.text
    with pytest.raises(ConfigError, match=r"with trainer\.async\.lag=1 the difference is that of 1 updates"):
        loaded(trainer__max_rollout_actor_probs_diff=0.1)


class Prepared:
    """A source whose batches are there already."""

    def next(self, context: StepContext) -> Experience:
        batch = DataProto.from_dict(tensors={"response_mask": torch.ones(2, 3, dtype=torch.long)})
        return Experience(batch, Deferred.from_value(DataProto()), RewardRecord(), draws_once=False)

    def updated(self, version: int) -> None:
        """Samples whatever the weights are."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has none."""


@pytest.mark.parametrize("has_pool", [False, True])
def test_age_is_counted_in_updates_of_the_policy(has_pool: bool) -> None:
    """Two steps train the critic alone (``critic_warmup=2``) and update nothing; a resumed run counts on."""
    sent: list[int] = []

    def start() -> Ahead:
        thread, prompts = SerialThread("sampling"), PromptsTakenFirst(DataProto)
        pool = RolloutPool(thread, prompts, True, lambda version: {"sent": sent.append(version)}, Mock())
        return Ahead(cast(Any, Prepared()), lag=2, last_step=7, pool=pool if has_pool else None)

    source, ages = start(), []
    for step in range(1, 8):
        context = StepContext(step)
        ages.append(source.next(context).batch.batch["updates_behind"].unique().tolist())
        if step > 2:
            source.updated(step)
        source.trained(context)
        if step == 4:
            state, pending, source = source.state_dict(), source.pending().result(), start()
            source.load_state_dict(state)
            source.load_pending(pending)
    # Batches 1 to 5 are sampled after 0 updates, 6 after one, 7 after two; steps 4 to 7 come after 1, 2, 3, 4 updates.
    assert ages == [[0], [0], [0], [1], [2], [2], [2]]
    assert sent == ([0, 1, 2] if has_pool else [])


def test_a_pool_without_a_lag_refuses_batches_that_were_sampled_ahead() -> None:
    thread, prompts = SerialThread("sampling"), PromptsTakenFirst(DataProto)
    pool = RolloutPool(thread, prompts, True, lambda version: {"sent": version}, Mock())
    source = Ahead(Mock(rest=nullcontext), lag=0, last_step=3, pool=pool)
    source.load_pending({})
    with pytest.raises(CheckpointError, match="1 batches that were sampled ahead"):
        source.load_pending({"3-batch": DataProto()})
    # What a validation between two steps sends is reported in the step after it.
    with source.rest():
        pass
    context = StepContext(1, metrics={})
    source.next(context)
    assert context.metrics["sent"] == 0
