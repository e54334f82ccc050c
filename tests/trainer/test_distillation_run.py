"""Whole runs that learn from teachers."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from tests.trainer.test_run import assert_same_steps
from tests.workers.teacher.completions_server import CompletionsServer
from verl.errors import DataError
from verl.testing.models import tiny_model, tiny_model_dir, tiny_tokenizer
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

LOSS = "distillation__distillation_loss"
TEACHERS = "distillation__teacher_models"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    rows = countdown_rows(16)
    for row in rows[::2]:
        row["data_source"] = "math"
    paths["train"] = write_jsonl(tmp_path / "train.jsonl", rows)
    teacher = tiny_model_dir(tmp_path / "teacher", family="qwen3", seed=7)
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **_):\n    return 0.0\n")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__name": "native",
            "distillation__enabled": "true",
            f"{TEACHERS}__math__model_path": teacher,
            f"{TEACHERS}__math__key": "math",
            f"{TEACHERS}__itself__model_path": paths["model"],
            f"{TEACHERS}__itself__key": "countdown",
            f"{LOSS}__use_task_rewards": "false",
        } | changes
        settings = {name: value for name, value in settings.items() if value is not None}
        run_ppo(compose(overrides(paths, tmp_path / "run", **settings)))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    return run


def tokenizer_of_pairs() -> PreTrainedTokenizerFast:
    """The policy's tokenizer with other ids and a token for each pair of letters."""
    characters = tiny_tokenizer()
    merges = list(itertools.product(string.ascii_letters, repeat=2))
    single = sorted(characters.get_vocab(), key=characters.get_vocab().__getitem__)
    tokens = [*single[:4], *map("".join, merges), *single[4:]]  # the first ones are special
    vocab = {token: number for number, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=characters.pad_token,
        eos_token=characters.eos_token,
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=characters.chat_template,
    )


def teacher_of_pairs(folder: Path) -> str:
    """A model of that tokenizer; returns its path."""
    path, tokenizer = str(folder / "pairs"), tokenizer_of_pairs()
    tiny_model(vocab=len(tokenizer), seed=7).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_rows_go_to_the_teacher_of_their_source_and_the_policy_learns_from_it(train, tmp_path, caplog):
    """One of the teachers has another tokenizer: over a response it says what the text's log-prob is under it."""
    teacher, pairs = teacher_of_pairs(tmp_path), tokenizer_of_pairs()
    steps = train(
        distillation__alignment="text",
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
        trainer__total_training_steps=4,
        trainer__rollout_data_dir=tmp_path / "dump",
        trainer__rollout_token_dump_freq=1,
        **{f"{TEACHERS}__math__model_path": teacher},
    )
    first = steps[1]
    # Who is taught by a copy of itself differs by nothing, as long as every token is paired with its own.
    assert first["distillation/kl/countdown"] == pytest.approx(0, abs=1e-5)
    assert first["distillation/kl/math"] > 1
    mean = (first["distillation/kl/countdown"] + first["distillation/kl/math"]) / 2
    assert first["distillation/kl"] == pytest.approx(mean, rel=0.2)  # weighted by tokens
    assert first["timing_s/teacher"] > 0
    assert first["distillation/teacher_entropy"] > 0
    assert steps[4]["distillation/loss"] < first["distillation/loss"]
    assert "have the same score" not in caplog.text  # all scores are 0, and nothing is learnt from them
    assert first["distillation/aligned_tokens"] > 0.5
    assert 1 < first["distillation/tokens_per_span"] < 2  # 1 of the teacher with the policy's tokenizer
    policy = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    compared = 0
    with pa.OSFile(str(tmp_path / "dump" / "1.arrow")) as source:
        rows = pa.ipc.open_file(source).read_all().to_pylist()
    for row in rows:
        ends = row["span_ends"]
        if min(ends) < 0 or ends == [*range(len(ends))]:
            continue  # with tokens that have no counterpart, or of the other teacher
        text = policy.decode(row["response_ids"], skip_special_tokens=True)
        ended = row["response_ids"][-1] == policy.eos_token_id
        prompt = pairs(policy.decode(row["prompt_ids"]), add_special_tokens=False)["input_ids"]
        response = pairs(text, add_special_tokens=False)["input_ids"] + [pairs.eos_token_id] * ended
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        of_text = log_probs.gather(-1, torch.tensor(response)[:, None]).sum().item()
        assert sum(row["teacher_logprobs"]) == pytest.approx(of_text, rel=1e-5)
        compared += 1
    assert compared


def test_teachers_of_the_whole_vocabulary_are_in_the_workers_of_the_policy(train):
    one_step = {"trainer__total_training_steps": 1, "actor_rollout_ref__actor__ppo_mini_batch_size": 4}
    first = train(**{f"{LOSS}__loss_mode": "reverse_kl"}, **one_step)[1]
    assert first["distillation/kl/countdown"] == pytest.approx(0, abs=1e-5)
    # Half of the rows have divergence 0 and agree everywhere; of the others it is what the sampled tokens estimate.
    assert first["distillation/loss"] == pytest.approx(first["distillation/kl"], rel=0.3)
    assert 0.3 < first["distillation/agreement"] < 0.7
    assert first["distillation/loss_min"] == pytest.approx(0, abs=1e-5)
    assert first["timing_s/teacher"] > 0
    # Of rows that PF-PPO drew for the update, what the teachers computed does not belong to the rows of the batch.
    drawn = train(**{f"{LOSS}__loss_mode": "reverse_kl", "algorithm__use_pf_ppo": "true"}, **one_step)[1]
    assert "distillation/loss" in drawn
    assert "distillation/kl" not in drawn


LAYOUTS = {
    "packed": {},
    "padded": {"actor_rollout_ref__model__use_remove_padding": "false"},
    "Ulysses": {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2},
    "pool": {"distillation__nnodes": 1, "distillation__n_gpus_per_node": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk", "jsd", "k2 of text"])
def test_layouts_with_teachers_give_the_numbers_of_one_rank(train, ray_cluster, tmp_path, mode):
    common = {f"{LOSS}__loss_mode": mode, f"{LOSS}__topk": 8, f"{LOSS}__use_task_rewards": "true"}
    if mode == "k2 of text":
        common |= {f"{LOSS}__loss_mode": "k2", "distillation__alignment": "text"}
        common[f"{TEACHERS}__math__model_path"] = teacher_of_pairs(tmp_path)
    common[f"{TEACHERS}__itself__model_path"] = tiny_model_dir(tmp_path / "other", family="qwen2", seed=9)
    # AdamW would turn the rounding of gradients near 0 into whole steps.
    common |= {"actor_rollout_ref__actor__optim__optimizer": "SGD", "actor_rollout_ref__actor__optim__lr": 1e-3}
    local = train(**common)
    for name, layout in LAYOUTS.items():
        if (mode, name) != ("jsd", "pool"):
            ray = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **common, **layout)
            assert_same_steps(local, ray, rel=1e-5)


def test_a_row_without_a_teacher_is_refused_before_a_model_loads(train):
    with pytest.raises(DataError, match="row 1 has data_source='countdown', and no teacher has this key"):
        train(**{f"{TEACHERS}__itself__key": "code"})


def test_a_teacher_behind_an_endpoint_teaches_what_the_model_itself_does(train):
    """The most likely tokens of one teacher, by a forward pass and over HTTP: the same numbers."""
    one = {
        f"{TEACHERS}__math__key": None,
        f"{TEACHERS}__itself__model_path": None,
        f"{TEACHERS}__itself__key": None,
        f"{LOSS}__loss_mode": "forward_kl_topk",
        f"{LOSS}__topk": 4,
        "trainer__total_training_steps": 1,
    }
    inference = f"{TEACHERS}__math__inference"
    with CompletionsServer(tiny_model(seed=7), tiny_tokenizer()).running() as url:
        asked = {f"{TEACHERS}__math__model_path": "big", f"{inference}__name": "openai", f"{inference}__base_url": url}
        served = train(**one, **asked)[1]
    computed = train(**one)[1]
    assert served["distillation/kl"] > 1
    for name in ("distillation/loss", "distillation/kl", "actor/grad_norm"):
        assert served[name] == pytest.approx(computed[name], rel=1e-4), name
