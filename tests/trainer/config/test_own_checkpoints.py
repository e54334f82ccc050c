"""A folder with the checkpoints of another run is refused before anything loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.config import DPOConfig, PPOConfig, SFTConfig
from verl.trainer.loop import RunSettings

ROLLOUT_N = "actor_rollout_ref.rollout.n"


@pytest.fixture
def saved(run: Run) -> Run:
    """A run that has saved step 40, and all whose files lie below the folder ``first``."""
    run.ppo["trainer.default_local_dir"] = run.sft["trainer.default_local_dir"] = str(run.folder / "checkpoints")
    save(run, run.load())
    return run


def save(run: Run, config: Any) -> None:
    folder = run.folder / "checkpoints/global_step_40"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"settings": RunSettings(config.to_dict()).state_dict()}))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("40")


def test_the_same_run_goes_on_with_other_numbers(saved: Run):
    assert saved.load()
    assert saved.load({"actor_rollout_ref.actor.optim.lr": 1e-3, ROLLOUT_N: 8, "trainer.total_epochs": 3})


def test_data_and_models_may_have_been_moved(saved: Run, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / saved.folder.name
    shutil.copytree(saved.folder, elsewhere)
    paths = {"actor_rollout_ref.model.path": "model", "data.train_files": "train.jsonl", "data.val_files": "val.jsonl"}
    assert saved.load({key: str(elsewhere / name) for key, name in paths.items()})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor_rollout_ref.model.path": "Qwen/Qwen3-0.6B"}, "actor_rollout_ref.model.path"),
        ({"data.train_files": "val.jsonl", "data.val_files": "train.jsonl"}, "data.train_files"),
        ({"algorithm.adv_estimator": "rloo"}, "algorithm.adv_estimator"),
        ({"actor_rollout_ref.model.lora_rank": 8}, "actor_rollout_ref.model.lora_rank"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "actor_rollout_ref.actor.policy_loss.loss_mode"),
    ],
)
def test_another_model_data_or_algorithm_is_refused(saved: Run, changes: dict[str, Any], key: str):
    files = {
        name: str(saved.folder / value) for name, value in changes.items() if (saved.folder / str(value)).is_file()
    }
    folder = saved.folder / "checkpoints"
    message = only(saved.refusal(changes | files))
    assert f"trainer.default_local_dir={folder}: another run saved global_step_40 there" in message
    assert f"{key} is " in message
    assert message.count(" there and ") == 1
    assert "remedy: set another trainer.experiment_name" in message
    explicit = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder / "global_step_40")}
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={folder / 'global_step_40'}" in message
    assert saved.load(changes | files | explicit)
    assert saved.load(changes | files | {"trainer.resume_mode": "disable"})


def test_a_run_of_another_command_is_refused(saved: Run):
    assert "another run saved global_step_40 there" in only(saved.refusal({}, SFTConfig))
    assert "it is one of verl train" in saved.refusal({}, SFTConfig)
    save(saved, saved.load({"trainer.resume_mode": "disable"}, SFTConfig))
    assert saved.load({}, SFTConfig)
    assert "it is one of verl sft" in saved.refusal({}, PPOConfig)
    assert "it is one of verl sft" in saved.refusal({}, DPOConfig)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": 3}', '{"settings": {}}'])
def test_what_cannot_be_read_is_left_to_resuming(saved: Run, text: str):
    (saved.folder / "checkpoints/global_step_40/trainer_state.json").write_text(text)
    assert saved.load({"algorithm.adv_estimator": "rloo"})
    Path(saved.folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("no step")
    assert saved.load({"algorithm.adv_estimator": "rloo"})
