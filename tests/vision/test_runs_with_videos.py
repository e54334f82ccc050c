"""Rollout engines, agent loops and whole runs on rows with videos."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.vision_models import DENSE_FAMILIES, film_rows, tiny_vision_model_dir, write_parquet
from tests.vision.agent_batches import VisionAgents
from tests.vision.batches import film_prompts
from tests.vision.one_family import ONE_FAMILY
from tests.vision.test_videos import VIDEO, P, arguments_of
from tests.workers.support import make_engine
from verl.agents.images import apart, together
from verl.datasets import MultiTurnSFTDataset
from verl.serving.sent_images import ImageReceiver, ImageSender
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.sft_trainer import run_sft
from verl.utils import hf_processor, hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.request import RolloutRequest, SamplingParams

R = 6


@pytest.mark.parametrize("name", ["hf", "native"])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_engines_draw_what_transformers_draws_and_tell_its_log_probs(family, name, tmp_path):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    batch = film_prompts(path, tmp_path, count=4).repeat(2, interleave=True)
    batch.non_tensor_batch |= {"uid": np.repeat(np.arange(4), 2), "sample_index": np.tile(np.arange(2), 4)}
    config = RolloutConfig(name=name, prompt_length=P, response_length=R, dtype="float32", tensor_model_parallel_size=1)
    rollout = get_rollout_class(name)(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
    model = AutoModelForImageTextToText.from_pretrained(path)
    engine = make_engine(path, trained=False)
    with rollout.awake(lambda: model.state_dict().items(), version=0):
        for do_sample in (False, True):
            batch.meta_info = {"do_sample": do_sample}
            found = rollout.generate_sequences(batch)
            whole = batch.select(batch_keys=[]) | found
            log_probs = engine.infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
            assert_close(found.batch["rollout_log_probs"], log_probs, atol=2e-5, rtol=0)
            for row in [] if do_sample else range(0, len(batch), 2):
                ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
                given = arguments_of(ids, batch.non_tensor_batch["multi_modal_inputs"][row])
                expected = model.generate(
                    **given, attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=R
                )[0, len(ids) :]
                length = int(found.batch["response_mask"][row].sum())
                assert found.batch["responses"][row, :length].tolist() == expected.tolist()


def test_the_same_frames_at_another_speed_are_another_prompt(tmp_path):
    """Keys and values of the one are not those of the other, whose tokens and pixels are equal."""
    rows = [row for row in film_rows(1) for _ in range(2)]
    rows = [json_copy(row, fps) for row, fps in zip(rows, (8.0, 1.0), strict=True)]
    agents = VisionAgents(tmp_path, "qwen2_5_vl", "native", data__max_prompt_length=P)
    prompts = agents.prompts(rows, n=1)
    assert torch.equal(prompts.batch["input_ids"][0], prompts.batch["input_ids"][1])
    found = agents.group.generate_sequences(prompts)
    log_probs = agents.trainers_log_probs(prompts.select(batch_keys=[]) | found)
    assert_close(found.batch["rollout_log_probs"], log_probs, atol=1e-5, rtol=0)


def json_copy(row, fps):
    return {**row, "videos": [{**row["videos"][0], "fps": fps}]}


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_agent_loops_give_the_columns_of_the_engine_alone(family, tmp_path):
    agents = VisionAgents(tmp_path, family, "native", data__max_prompt_length=P)
    prompts = agents.prompts(film_rows(4))
    alone, looped = agents.group.generate_sequences(prompts), agents.answer(prompts)
    for column in ("responses", "position_ids", "response_mask", "attention_mask"):
        assert torch.equal(looped.batch[column], alone.batch[column]), column
    drawn = looped.batch["response_mask"].bool()
    assert_close(looped.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(looped)[drawn], atol=1e-5, rtol=0)


REWARD = "def compute_score(solution_str, ground_truth, **_):\n    return float(ground_truth[0] in solution_str)\n"


@pytest.mark.parametrize("multi_turn", ["false", "true"])
@pytest.mark.slow
def test_two_steps_of_ppo(multi_turn, tmp_path, monkeypatch):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    (tmp_path / "reward.py").write_text(REWARD)
    file = write_parquet(tmp_path / "films.parquet", film_rows(8))
    paths = make_tiny_run(tmp_path)
    paths |= {"model": tiny_vision_model_dir(tmp_path / "vision"), "train": file, "val": file}
    changes = {
        "custom_reward_function__path": str(tmp_path / "reward.py"),
        "data__max_prompt_length": P,
        "actor_rollout_ref__rollout__multi_turn__enable": multi_turn,
        "trainer__rollout_data_dir": tmp_path / "samples",
    }
    run_ppo(compose(overrides(paths, tmp_path, **changes)))
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    assert max(steps[n]["training/rollout_probs_diff_max"] for n in (1, 2)) < 1e-5
    assert steps[2]["actor/grad_norm"] > 0
    inputs = {json.loads(line)["input"] for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()}
    assert any("<video: " in text for text in inputs)


def talks():
    films, says = film_rows(4), [{"role": "assistant", "content": "red"}]
    return [{"messages": row["prompt"] + says, "images": row["images"], "videos": row["videos"]} for row in films]


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_supervised_training(family, tmp_path, monkeypatch):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    file = write_parquet(tmp_path / "talks.parquet", talks())
    data = MultiTurnSFTDataset(file, hf_tokenizer(path), {"max_length": P}, hf_processor(path))
    model = AutoModelForImageTextToText.from_pretrained(path)
    total, tokens = torch.zeros(()), 0
    for number in range(4):
        ids, mask = data[number]["input_ids"], data[number]["loss_mask"].bool()
        assert bool((ids == VIDEO).any()) == (number in (0, 3))
        logits = model(**arguments_of(ids, data[number]["multi_modal_inputs"])).logits[0]
        log_p = logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        total, tokens = total - log_p[mask[1:]].sum(), tokens + int(mask[1:].sum())
    (total / tokens).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    settings = {
        "data.train_files": file, "data.val_files": file, "data.train_batch_size": 4, "data.num_workers": 0,
        "data.max_length": P, "model.path": path, "engine.dtype": "float32", "trainer.total_training_steps": 1,
        "data.max_token_len_per_gpu": P, "trainer.controller": "local", "trainer.device": "cpu",
        "trainer.logger": "[file]", "trainer.default_local_dir": tmp_path / "run", "trainer.save_freq": -1,
    }  # fmt: skip
    run_sft(compose([f"{key}={value}" for key, value in settings.items()], "sft_trainer"))
    step = json.loads(log.read_text().splitlines()[0])["data"]
    assert step["train/loss"] == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("is_stored", [False, True])
def test_images_apart_together_and_sent_keep_their_seconds(is_stored, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.serving.sent_images.MIN_BYTES", 1 if is_stored else 2**17)
    path = tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl")
    batch = film_prompts(path, tmp_path, count=4)
    both, image = (batch.non_tensor_batch["multi_modal_inputs"][row] for row in (3, 2))
    assert both["second_per_grid_ts"].tolist() == [0.0, 0.25]
    assert "second_per_grid_ts" not in image
    parts = apart(both)
    assert [part["second_per_grid_ts"].tolist() for part in parts] == [[0.0], [0.25]]
    assert together([image, *parts])["second_per_grid_ts"].tolist() == [0.0, 0.0, 0.25]
    stored: list[np.ndarray] = []

    def put(array):
        stored.append(array)
        return len(stored) - 1

    sender, receiver = ImageSender(put), ImageReceiver(stored.__getitem__)
    # The last shows a video beside an image that an earlier turn had alone.
    for images in (both, image, together([image, *parts])):
        request = RolloutRequest([5], SamplingParams(max_tokens=1, seed=0), images)
        found = receiver.opened(sender.sent("a", request)).images
        assert found is not None
        assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in images.items()}
