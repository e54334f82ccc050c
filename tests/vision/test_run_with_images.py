"""Whole runs with images through the command line's road: what is trained, what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.vision_models import picture_rows, tiny_vision_model_dir, write_parquet
from verl.base import engine_python
from verl.errors import ConfigError
from verl.model_merger import merge
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_processor

REWARD = "def compute_score(solution_str, ground_truth, **_):\n    return float(ground_truth[0] in solution_str)\n"

SPLIT = {
    "trainer__controller": "ray",
    "trainer__n_gpus_per_node": 4,
    "actor_rollout_ref__rollout__tensor_model_parallel_size": 4,
}


@pytest.fixture
def paths(tmp_path):
    made = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    return made | {
        "model": tiny_vision_model_dir(tmp_path / "vision"),
        "train": write_parquet(tmp_path / "train.parquet", picture_rows(8, text_every=4)),
        "val": write_parquet(tmp_path / "val.parquet", picture_rows(4, text_every=4)),
    }


def settings(paths, folder, **changes):
    given = {"custom_reward_function__path": str(folder / "reward.py"), "data__max_prompt_length": 40} | changes
    return compose(overrides(paths, folder, **given))


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron", marks=pytest.mark.slow)])
def test_ppo_with_a_critic_and_a_kl_term(paths, tmp_path, monkeypatch, strategy):
    if strategy == "megatron":
        pytest.importorskip("megatron.core")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    changes = {
        "algorithm__adv_estimator": "gae",
        "actor_rollout_ref__actor__strategy": strategy,
        "critic__strategy": strategy,
        "actor_rollout_ref__rollout__name": "native",
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "actor_rollout_ref__actor__use_dynamic_bsz": "true",
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 100,
        "trainer__save_freq": 2,
        "actor_rollout_ref__actor__checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
        "trainer__test_freq": 2,
    }
    run_ppo(settings(paths, tmp_path, **changes))
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    assert steps[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-8)
    assert steps[2]["actor/kl_loss"] > 1e-5
    assert max(steps[n]["training/rollout_probs_diff_max"] for n in (1, 2)) < 1e-5
    assert steps[2]["critic/grad_norm"] > 0
    assert "val-core/pictures/reward/mean@1" in steps[2]
    saved = tmp_path / "checkpoints" / "global_step_2" / "actor"
    exported = AutoModelForImageTextToText.from_pretrained(saved / "huggingface")
    merge(saved, tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    start = dict(AutoModelForImageTextToText.from_pretrained(paths["model"]).named_parameters())
    for name, weight in merged.named_parameters():
        assert torch.equal(weight, exported.get_parameter(name))
        assert not torch.equal(weight, start[name]), name
    for folder in (saved / "huggingface", tmp_path / "merged"):
        assert hf_processor(str(folder)).image_processor.patch_size == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor_rollout_ref__rollout__name": "vllm", **SPLIT}, "vllm splits the 2 attention heads of the vision"),
        ({"actor_rollout_ref__rollout__name": "sglang", **SPLIT}, "sglang splits the 2 attention heads of the vision"),
    ],
)
def test_what_is_refused_before_a_model_loads(paths, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        load_config(settings(paths, tmp_path, **changes))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines_need_torchvision_where_they_run(name, paths, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else found(name))
    monkeypatch.setattr(engine_python, "ENVIRONMENTS", tmp_path)
    changes = {"actor_rollout_ref__rollout__name": name}
    with pytest.raises(ConfigError, match=f"{name} needs the package torchvision for a qwen2_5_vl"):
        load_config(settings(paths, tmp_path, **changes))
    named = {f"actor_rollout_ref__rollout__engine_kwargs__{name}__python": sys.executable}
    assert load_config(settings(paths, tmp_path, **changes, **named)).actor_rollout_ref.rollout.name == name
    python = tmp_path / name / "bin" / "python"  # of an environment of its own, where one is looked for
    python.parent.mkdir(parents=True)
    python.touch()
    assert load_config(settings(paths, tmp_path, **changes)).actor_rollout_ref.rollout.name == name
