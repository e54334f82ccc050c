"""The page of algorithms is what the registries and the tests say, and the settings on it are real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks import run
from verl.algorithms import (
    adv_needs,
    estimator_names,
    get_adv_estimator_fn,
    policy_loss_info,
    policy_loss_names,
)
from verl.algorithms.distillation import DISTILLATION_LOSSES, distillation_loss_info
from verl.testing.models import hollow_model_dir
from verl.trainer.config import PPOConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.overrides import keys_set

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = (
    [
        ("algorithm.adv_estimator", name, setting, overrides)
        for name in estimator_names()
        for setting, overrides in adv_needs(name).reproduces.items()
    ]
    + [
        ("actor_rollout_ref.actor.policy_loss.loss_mode", name, setting, overrides)
        for name in policy_loss_names()
        for setting, overrides in policy_loss_info(name).reproduces.items()
    ]
    + [
        ("distillation.distillation_loss.loss_mode", name, setting, overrides)
        for name in DISTILLATION_LOSSES
        for setting, overrides in distillation_loss_info(name).settings.reproduces.items()
    ]
)


def test_the_page_is_up_to_date_and_no_proof_is_missing():
    """In a process of its own, because pytest collects there, and because registries here may hold more names."""
    done = run(["-m", "docs.generate.algorithms", "--check"], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture
def least(tmp_path: Path) -> list[str]:
    """What every run has to be told, whatever it trains by."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    model, data = hollow_model_dir(tmp_path / "model"), tmp_path / "train.jsonl"
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"distillation.teacher_models.teacher_model.model_path={model}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "trainer.logger=[console]",
    ]


@pytest.mark.parametrize(("key", "name", "setting", "overrides"), PUBLISHED, ids=[f"{p[1]}: {p[2]}" for p in PUBLISHED])
def test_published_settings_are_a_configuration(
    key: str, name: str, setting: str, overrides: tuple[str, ...], least: list[str]
):
    if "distillation.self_distillation.enabled=true" in overrides:
        least = [one for one in least if not one.startswith("distillation.teacher_models")]
    given = [*least, *overrides]
    chosen: Any = load_config(compose(given), PPOConfig, keys_set(given))
    for section in key.split("."):
        chosen = getattr(chosen, section)
    assert chosen == name or ("estimator" in key and get_adv_estimator_fn(chosen) is get_adv_estimator_fn(name))


@pytest.mark.parametrize("name", [*estimator_names(), *policy_loss_names()])
def test_every_algorithm_names_its_source(name: str):
    infos = [adv_needs(name)] if name in estimator_names() else []
    infos += [policy_loss_info(name)] if name in policy_loss_names() else []
    assert all(info.paper.startswith("https://") for info in infos)
