"""Supervised runs in miniature, through the entry point that users call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import write_jsonl
from verl.config import HFModelConfig, SFTConfig, SFTDistillationConfig
from verl.errors import ConfigError, DataError
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.sft_trainer import run_sft
from verl.trainer.supervised import read_first


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i}" * (1 + i % 3)}]}
        for i in range(12)
    ]
    files, model = write_jsonl(tmp_path / "sft.jsonl", rows), tiny_model_dir(tmp_path / "model")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(folder: str, steps: int, **changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "data.train_files": files, "data.val_files": files, "data.train_batch_size": 4, "data.num_workers": 0,
            "data.max_length": 32, "model.path": model, "engine.dtype": "float32", "optim.lr": 1e-2,
            "optim.lr_scheduler_type": "constant", "trainer.total_training_steps": steps, "trainer.save_freq": steps,
            "trainer.test_freq": steps, "trainer.controller": "local", "trainer.device": "cpu",
            "trainer.logger": "[file]", "trainer.default_local_dir": tmp_path / folder,
            "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        }  # fmt: skip
        run_sft(compose([f"{key}={value}" for key, value in (settings | changes).items()], "sft_trainer"))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    return run


def test_the_loss_falls_and_the_model_is_exported(train, tmp_path):
    steps = train("run", 20)
    assert steps[20]["train/loss"] < 0.5 * steps[1]["train/loss"]
    assert steps[20]["val/loss"] < 0.5 * steps[1]["train/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "global_step_20" / "huggingface")


def test_a_cut_that_leaves_nothing_to_learn_stops_the_run(train):
    # "<user>say 1" alone has 6 tokens.
    with pytest.raises(DataError, match=r"step 1: no token of the assistant is left \(data.max_length=4"):
        train("run", 1, **{"data.max_length": 4, "data.truncation": "right"})


def test_the_first_rows_are_read_before_the_model():
    read = []

    class Rows:
        def __len__(self):
            return 100

        def __getitem__(self, item):
            read.append(item)

    read_first(Rows(), count=3)
    assert read == [0, 1, 2]


def test_a_resumed_run_continues_where_it_stopped(train):
    # 12 rows in batches of 4 make an epoch of 3 steps: the break after step 3 is at its end.
    straight = train("straight", 5)
    for stop in (2, 3):
        train(f"stopped_{stop}", stop)
        rest = train(f"stopped_{stop}", 5)
        assert list(rest) == list(range(stop + 1, 6))
        for step, metrics in rest.items():
            for key in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
                assert metrics[key] == straight[step][key], (stop, step, key)


def test_adapters_go_on_bit_by_bit_and_are_merged(train, tmp_path):
    adapters = {"model.lora_rank": 4, "model.lora_alpha": 8, "optim.lr": 3e-2}
    straight = train("straight", 4, **adapters)
    train("stopped", 2, **adapters)
    rest = train("stopped", 4, **adapters)
    assert rest[4]["train/loss"] < 0.9 * straight[1]["train/loss"]
    for step in (3, 4):
        for key in ("train/loss", "train/grad_norm"):
            assert rest[step][key] == straight[step][key], (step, key)
    steps = [tmp_path / name / "global_step_4" for name in ("straight", "stopped")]
    one, other = (load_file(step / "lora_adapter" / "adapter_model.safetensors") for step in steps)
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], values) for name, values in one.items())
    merge(steps[1], tmp_path / "merged")
    merged, exported, start = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "merged", steps[1] / "huggingface", tmp_path / "model")
    )
    layer = "model.layers.1.mlp.up_proj.weight"
    assert (merged[layer] - start[layer]).abs().max() > 1e-3
    for name, weight in exported.items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks_and_with_fewer(train, tmp_path, ray_cluster):
    two = {"trainer.controller": "ray", "trainer.n_gpus_per_node": 2}
    straight = train("straight", 6)
    found = train("run", 2) | train("run", 4, **two) | train("run", 6)
    files = json.loads((tmp_path / "run" / "global_step_4" / "manifest.json").read_text())["files"]
    assert {
        "model_world_size_2_rank_1.pt",
        "optim_world_size_2_rank_0.pt",
        "huggingface/model.safetensors",
    } <= files.keys()
    for step, metrics in straight.items():
        for key in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
            assert found[step][key] == pytest.approx(metrics[key], rel=1e-4), (step, key)


def test_two_ranks_on_ray_give_the_numbers_of_one_local_rank(train, ray_cluster):
    local = train("local", 3)
    changes = {"trainer.controller": "ray", "trainer.n_gpus_per_node": 2, "data.balance_dp_token": "true"}
    ray = train("ray", 3, **changes)
    assert local.keys() == ray.keys() == {1, 2, 3}
    for step, metrics in local.items():
        for key in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
            assert ray[step][key] == pytest.approx(metrics[key], rel=1e-5), (step, key)
        assert min(metrics["train/mfu"], ray[step]["train/mfu"]) > 0
    assert ray[3]["val/loss"] == pytest.approx(local[3]["val/loss"], rel=1e-5)


PROGRAM = """
import hydra
from verl.trainer.sft_trainer import run_sft

@hydra.main(config_path="pkg://verl.trainer.config", config_name="sft_trainer", version_base=None)
def main(config):
    assert config.my_section.switch == "on"
    run_sft(config)

main()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [None, PROGRAM], ids=["command", "program"])
def test_torchrun_starts_two_ranks(tmp_path, program):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "01"}]}] * 4
    settings = {
        "model.path": tiny_model_dir(tmp_path / "model"), "data.train_files": write_jsonl(tmp_path / "sft.jsonl", rows),
        "data.train_batch_size": 4, "data.max_length": 32, "data.num_workers": 0, "trainer.total_training_steps": 1,
        "trainer.device": "cpu", "trainer.logger": "[file]", "trainer.default_local_dir": tmp_path / "run",
    }  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    if program is None:
        launch += ["-m", "verl.trainer.sft_trainer"]
    else:
        (tmp_path / "train.py").write_text(program)
        launch += [str(tmp_path / "train.py"), "+my_section.switch=on", f"hydra.run.dir={tmp_path}/hydra"]
    subprocess.run(
        [sys.executable, *launch, *(f"{key}={value}" for key, value in settings.items())],
        env=os.environ | {"VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")}, check=True, timeout=850,
    )  # fmt: skip
    assert '"step": 1' in (tmp_path / "metrics.jsonl").read_text()
    assert (tmp_path / "run" / "global_step_1" / "model_world_size_2_rank_1.pt").exists()


def test_changes_of_the_models_config_are_not_those_of_the_teacher():
    model = HFModelConfig(path="a", override_config={"attention_dropout": 0.1}, lora_rank=4)
    teacher = SFTConfig(model=model, distillation=SFTDistillationConfig(model_path="b")).teacher_model
    assert (teacher.path, dict(teacher.override_config), teacher.lora_rank) == ("b", {}, 0)


def test_a_teacher_is_learnt_from_at_the_tokens_of_the_data(train, tmp_path):
    teacher = tiny_model_dir(tmp_path / "teacher", seed=1)
    taught = {"distillation.model_path": teacher}
    both = {"distillation.distillation_loss.distillation_loss_coef": 0.5, "distillation.cross_entropy_coef": 2}
    steps = train("run", 12, **taught)
    mixed = train("mixed", 1, **(taught | both))
    plain = train("plain", 1)
    # Validation after the last step: the same numbers by Transformers alone.
    found = expected_divergence(tmp_path / "run" / "global_step_12" / "huggingface", teacher)
    assert steps[12]["val/divergence"] == pytest.approx(found, rel=1e-4)
    assert steps[12]["val/divergence"] < 0.5 * expected_divergence(tmp_path / "model", teacher)
    # The first step of each run reads the same rows under the same weights.
    divergence, cross_entropy = steps[1]["train/divergence"], plain[1]["train/loss"]
    assert steps[1]["train/loss"] == divergence
    assert mixed[1]["train/cross_entropy"] == pytest.approx(cross_entropy, rel=1e-6)
    assert mixed[1]["train/loss"] == pytest.approx(0.5 * divergence + 2 * cross_entropy, rel=1e-6)
    assert steps[12]["val/loss"] == steps[12]["val/divergence"]
    terms = expected_terms(tmp_path / "mixed" / "global_step_1" / "huggingface", teacher)
    assert (mixed[1]["val/divergence"], mixed[1]["val/cross_entropy"]) == pytest.approx(terms, rel=1e-4)
    assert mixed[1]["val/loss"] == pytest.approx(0.5 * terms[0] + 2 * terms[1], rel=1e-4)


def expected_divergence(model: Path, teacher: Path | str) -> float:
    """Mean of KL(q ‖ p), q the teacher's, before the assistant's tokens of the data, by Transformers."""
    return expected_terms(model, teacher)[0]


def expected_terms(model: Path, teacher: Path | str) -> tuple[float, float]:
    """Means of KL(q ‖ p), q the teacher's, and of -log p, over the assistant's tokens of the data, by Transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (model, teacher))
    divergences, cross_entropies = [], []
    for i in range(12):
        user = [{"role": "user", "content": f"say {i}"}]
        whole = [*user, {"role": "assistant", "content": f"{i}" * (1 + i % 3)}]
        start = len(tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False))
        ids = torch.tensor(tokenizer.apply_chat_template(whole, return_dict=False))
        with torch.no_grad():
            p, q = (m(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for m in (student, teacher))
        divergences.append((q.exp() * (q - p)).sum(-1)[start - 1 :])
        cross_entropies.append(-p[torch.arange(len(p)), ids[1:]][start - 1 :])
    return torch.cat(divergences).mean().item(), torch.cat(cross_entropies).mean().item()


@pytest.mark.parametrize("loss", ["k3", "reverse_kl_topk", "jsd"])
def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(train, tmp_path, loss):
    settings = {"distillation.model_path": tmp_path / "model", "distillation.distillation_loss.loss_mode": loss}
    (first,) = train("run", 1, **settings).values()
    assert abs(first["train/loss"]) < 1e-6
    assert first["train/grad_norm"] < 1e-4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"distillation.model_path": "/nowhere"}, "distillation.model_path=/nowhere: there is no such folder"),
        ({"distillation.distillation_loss.loss_mode": "k1"}, "expectation zero"),
        ({"distillation.distillation_loss.distillation_loss_coef": 0}, "nothing would be learnt from it"),
    ],
)
def test_a_teacher_from_which_nothing_can_be_learnt_is_refused(train, tmp_path, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        train("run", 1, **({"distillation.model_path": tmp_path / "model"} | changes))


def test_a_teacher_of_another_vocabulary_is_refused(train, tmp_path):
    teacher = tiny_model_dir(tmp_path / "teacher", tokenizer="bpe")
    with pytest.raises(ConfigError, match=r"distillation.model_path=.*both need one vocabulary"):
        train("run", 1, **{"distillation.model_path": teacher})
    teacher = tiny_model_dir(tmp_path / "small", vocab=50)
    with pytest.raises(ConfigError, match="the embedding has 50 rows"):
        train("run", 1, **{"distillation.model_path": teacher})
