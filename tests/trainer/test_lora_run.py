"""Whole runs with LoRA: the keys of public scripts, DPO against its own base, SFT and a reward model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.preferences import numbers_of, preference_run
from tests.support.tiny_run import make_tiny_run, overrides
from verl.base.fs import in_shared_memory
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.dpo_trainer import run_dpo
from verl.trainer.main_ppo import run_ppo
from verl.trainer.rm_trainer import run_rm

SCRIPT = {
    "actor_rollout_ref__model__lora_rank": 32,
    "actor_rollout_ref__model__lora_alpha": 32,
    "actor_rollout_ref__model__target_modules": "all-linear",
    "actor_rollout_ref__model__exclude_modules": "'.*visual.*'",
    "actor_rollout_ref__model__use_shm": "True",
    "actor_rollout_ref__actor__use_kl_loss": "True",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "actor_rollout_ref__actor__kl_loss_coef": 0.001,
    "actor_rollout_ref__rollout__name": "native",
    "actor_rollout_ref__rollout__load_format": "safetensors",
    "actor_rollout_ref__rollout__layered_summon": "True",
    "actor_rollout_ref__ref__fsdp_config__param_offload": "True",
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 3,
}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(name: str, **changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {"custom_reward_function__path": str(tmp_path / "reward.py")} | SCRIPT | changes
        run_ppo(compose(overrides(paths, tmp_path / name, **settings)))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    yield run
    copy = Path(in_shared_memory(str(tmp_path / "model")))  # of use_shm, which would stay until the machine restarts
    if copy != tmp_path / "model":
        shutil.rmtree(copy.parent)


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(train, ray_cluster):
    one = train("one")
    two = train("two", trainer__controller="ray", trainer__n_gpus_per_node=2)
    assert max(step["training/rollout_probs_diff_max"] for step in two.values()) < 1e-5
    for step, metrics in one.items():
        for key in ("actor/kl_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy"):
            assert two[step][key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-6)


def test_the_keys_of_a_script(train, tmp_path):
    steps = train("one")
    assert steps[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-8)
    assert steps[3]["actor/kl_loss"] > 1e-4
    assert max(step["training/rollout_probs_diff_max"] for step in steps.values()) < 1e-5
    folder = tmp_path / "one" / "checkpoints" / "global_step_3" / "actor"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), folder / "lora_adapter")
    trained = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    assert trained == sum(
        tensor.numel() for tensor in load_file(folder / "lora_adapter/adapter_model.safetensors").values()
    )
    about = json.loads((folder / "lora_adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "model")  # not the copy of use_shm, which was trained
    shards = sum(path.stat().st_size for path in folder.glob("model_*.pt"))
    assert shards < 4 * trained + 60_000  # the adapters in fp32, and what a file says about each


def test_dpo_compares_with_its_base_as_with_a_model_of_its_own(tmp_path, monkeypatch):
    model, log = tiny_model_dir(tmp_path / "model"), tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run = preference_run(run_dpo, "dpo_trainer", tmp_path, model, log)
    settings = {"model__lora_rank": 4, "model__lora_alpha": 8}
    own = run(3, "own", **settings)
    separate = run(3, "separate", **settings, ref__path=tiny_model_dir(tmp_path / "same"))
    del own[1], separate[1]  # where policy and reference are equal, accuracy depends on rounding
    for step, metrics in own.items():
        assert numbers_of(separate[step]) == pytest.approx(numbers_of(metrics), rel=1e-4, abs=1e-5)
    assert abs(own[3]["train/margin"]) > 1e-3


def test_a_reward_model_learns_through_adapters(tmp_path, monkeypatch):
    model, log = tiny_model_dir(tmp_path / "model"), tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run = preference_run(run_rm, "rm_trainer", tmp_path, model, log)
    steps = run(12, model__lora_rank=4, optim__lr=1e-2, trainer__save_freq=-1)
    assert steps[12]["train/loss"] < 0.8 * steps[1]["train/loss"]
