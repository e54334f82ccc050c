"""The reward model of PPO with images: scores of plain Transformers, on one rank and two, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.testing import assert_close

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.vision_models import (
    picture_rows,
    tiny_image_reward_model_dir,
    tiny_vision_model_dir,
    write_parquet,
)
from tests.vision.agent_batches import VisionAgents
from tests.vision.batches import P, R, arguments_of, picture_batch
from tests.vision.one_family import ONE_FAMILY
from tests.vision.test_agents_with_images import LOOPS
from tests.workers.groups import FP32, start
from tests.workers.support import make_engine, run_ranks, share
from verl.config import RewardModelModelConfig
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.main_ppo import run_ppo
from verl.utils.image_reward_models import sequence_classifier
from verl.workers.config import RewardModelConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.fsdp_workers import RewardModelWorker
from verl.workers.reward_input import RewardInput

IMAGE = 106
DRAWN = "an image token that the policy drew"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory):
    return tiny_image_reward_model_dir(tmp_path_factory.mktemp("reward"))


def plain_scores(reward_path: str, batch: DataProto, family: str = "qwen2_5_vl") -> Tensor:
    """Scores of Transformers' forward pass, (bsz,), one row at a time; 0 for an empty response."""
    model = sequence_classifier(family).from_pretrained(reward_path)
    found = []
    with torch.no_grad():
        for row in range(len(batch)):
            length = int(batch.batch["attention_mask"][row, P:].sum())
            score = model(**arguments_of(batch, row)).logits[0, 0]
            found.append(score if length else torch.zeros(()))
    return torch.stack(found)


def worker(reward_path: str, policy: str | None, packed: bool = True, **settings: object):
    model = RewardModelModelConfig(
        path=reward_path, input_tokenizer=policy, fsdp_config=FP32, use_remove_padding=packed
    )
    return start(RewardModelWorker, config=RewardModelConfig(enable=True, model=model, **settings))


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_scores_are_those_of_a_plain_forward_pass(family, tmp_path):
    policy, own = tiny_vision_model_dir(tmp_path / "a", family), tiny_image_reward_model_dir(tmp_path / "b", family)
    batch = picture_batch(policy, tmp_path)  # texts among the pictures, an empty response
    expected = plain_scores(own, batch, family)
    assert float(expected[1:].std()) > 0.1
    last = torch.nn.functional.one_hot(batch.batch["response_mask"].sum(-1) - 1 + (expected == 0), R)
    layouts = ({"micro_batch_size_per_gpu": 2}, {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 60})
    for settings, packed in zip(layouts, (False, True), strict=True):
        found = worker(own, policy, packed, **settings).compute_rm_score(batch).batch["rm_scores"]
        assert_close(found, last * expected[:, None], atol=1e-5, rtol=0)


def test_a_picture_changes_the_score_and_a_drawn_image_token_is_text(path, reward_path, tmp_path):
    batch = picture_batch(path, tmp_path)
    group = worker(reward_path, path, micro_batch_size_per_gpu=3)
    before = group.compute_rm_score(batch).batch["rm_scores"].sum(-1)
    images = batch.non_tensor_batch["multi_modal_inputs"].copy()
    other = dict(images[3])
    images[3] = {**other, "pixel_values": -other["pixel_values"]}
    changed = DataProto.from_dict(tensors=dict(batch.batch.items()), non_tensors={"multi_modal_inputs": images})
    after = group.compute_rm_score(changed).batch["rm_scores"].sum(-1)
    rest = [0, 1, 2, 4, 5]
    assert abs(float(after[3] - before[3])) > 1e-3
    assert torch.equal(after[rest], before[rest])
    # The same number of image tokens is expected of row 1, which has one drawn by the policy now.
    columns = {name: tensor.clone() for name, tensor in batch.batch.items()}
    columns["input_ids"][1, P + 1] = columns["responses"][1, 1] = IMAGE
    drawn = DataProto.from_dict(tensors=columns, non_tensors=batch.non_tensor_batch)
    found = group.compute_rm_score(drawn).batch["rm_scores"].sum(-1)
    rest = [0, 2, 3, 4, 5]
    assert abs(float(found[1] - before[1])) > 1e-4
    assert_close(found[rest], before[rest], atol=1e-6, rtol=0)


def test_texts_may_be_cut_and_images_not(path, reward_path, tmp_path):
    batch = picture_batch(path, tmp_path)
    texts = batch.select_idxs([2, 5])
    cut = {"input_ids": arguments_of(texts, 1)["input_ids"][:, -4:]}
    model = sequence_classifier("qwen2_5_vl").from_pretrained(reward_path)
    group = worker(reward_path, path, max_length=4, micro_batch_size_per_gpu=2)
    with torch.no_grad():
        expected = model(**cut).logits[0, 0]
    assert_close(group.compute_rm_score(texts).batch["rm_scores"][1].sum(), expected, atol=1e-5, rtol=0)
    with pytest.raises(SchemaError, match=r"row 0 of the batch has images and 14 tokens, more than .*max_length=4"):
        group.compute_rm_score(batch)


def test_pictures_of_later_turns_are_seen(reward_path, tmp_path):
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: shows, _target_: Shows, path: {tmp_path}/loops.py}}\n")
    agents = VisionAgents(tmp_path, actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "loops.yaml")
    batch = agents.answer(agents.prompts(agent_name=["shows"] * 4))
    columns = batch.batch
    found = worker(reward_path, agents.path, micro_batch_size_per_gpu=3).compute_rm_score(batch).batch["rm_scores"]
    model = sequence_classifier("qwen2_5_vl").from_pretrained(reward_path)
    compared = 0
    for row in range(len(batch)):
        images = dict(batch.non_tensor_batch["multi_modal_inputs"][row])
        if bool(((columns["responses"][row] == IMAGE) & columns["response_mask"][row].bool()).any()):
            continue  # Transformers takes a token that the policy drew for an image
        ids = columns["input_ids"][row][columns["attention_mask"][row].bool()][None]
        with torch.no_grad():
            expected = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **images).logits[0, 0]
        assert_close(found[row].sum(), expected, atol=1e-5, rtol=0)
        compared += len(images["image_grid_thw"]) == 2  # the picture of the row, and that of the second turn
    assert compared >= 3


def on_each_rank(rank, world_size, folder, reward_path):
    batch, model = torch.load(folder / "batch.pt", weights_only=False), RewardModelModelConfig(path=reward_path)
    inputs = RewardInput.from_config(model)
    engine = make_engine(reward_path, "reward_model", trained=False)
    micro = MicroBatchConfig(micro_batch_size_per_gpu=1)
    result = {}
    # One rank has all images in the second case, the other only texts.
    for case, rows in (("shared", None), ("apart", [0, 1, 3, 4] if rank == 0 else [2, 5])):
        mine = share(batch, rank, world_size) if rows is None else batch.select_idxs(rows)
        result[case] = inputs.place(engine.infer_batch(inputs.read(mine), {"scores"}, micro)["scores"].sum(-1), mine)
    torch.save(result, folder / f"rank_{rank}.pt")


def test_two_ranks_of_which_one_has_only_texts(path, reward_path, tmp_path):
    batch = picture_batch(path, tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    expected = plain_scores(reward_path, batch)
    run_ranks(on_each_rank, 2, tmp_path, reward_path)
    for rank, rows in enumerate(([0, 1, 3, 4], [2, 5])):
        found = torch.load(tmp_path / f"rank_{rank}.pt")
        assert_close(found["shared"].sum(-1), expected[rank::2], atol=1e-5, rtol=0)
        assert_close(found["apart"].sum(-1), expected[rows], atol=1e-5, rtol=0)


# ---- through main_ppo ----------------------------------------------------------------------------


@pytest.fixture
def paths(path, reward_path, tmp_path):
    rows = picture_rows(8, text_every=4)
    return make_tiny_run(tmp_path) | {
        "model": path,
        "reward_model": reward_path,
        "train": write_parquet(tmp_path / "train.parquet", rows),
        "val": write_parquet(tmp_path / "val.parquet", rows[:4]),
    }


def settings(paths, folder, **changes) -> DictConfig:
    given = {
        "data__max_prompt_length": 40,
        "reward_model__enable": "true",
        "reward_model__model__fsdp_config__dtype": "float32",
        "actor_rollout_ref__rollout__name": "native",
    }
    return compose(overrides(paths, folder, **given | changes))


def test_ppo_is_trained_on_its_scores(paths, reward_path, tmp_path, monkeypatch):
    seen = []
    place = RewardInput.place

    def watched(self, scores, batch):
        seen.append((batch, scores))
        return place(self, scores, batch)

    monkeypatch.setattr(RewardInput, "place", watched)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run_ppo(settings(paths, tmp_path))
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    assert len(steps) == len(seen) == 2
    model = sequence_classifier("qwen2_5_vl").from_pretrained(reward_path)
    compared = 0
    for metrics, (batch, scores) in zip(steps, seen, strict=True):
        for row in range(len(batch)):
            if not bool((batch.batch["responses"][row] == IMAGE).any()):  # Transformers takes it for an image
                with torch.no_grad():
                    assert_close(scores[row], model(**arguments_of(batch, row)).logits[0, 0], atol=1e-5, rtol=0)
                compared += IMAGE in batch.batch["input_ids"][row]
        assert metrics["critic/score/mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
        assert scores.std() > 0.1
        assert metrics["actor/grad_norm"] > 0
    assert compared > 12


@pytest.mark.slow
def test_two_ranks_on_ray_score_as_one(paths, tmp_path, monkeypatch, ray_cluster):
    found = {}
    ranks = {"trainer__controller": "ray", "trainer__n_gpus_per_node": 2}
    for name, changes in (("one", {}), ("two", ranks)):
        log = tmp_path / f"{name}.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        run_ppo(settings(paths, tmp_path / name, **changes))
        found[name] = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    assert len(found["one"]) == len(found["two"]) == 2
    for one, two in zip(found["one"], found["two"], strict=True):
        for key in ("critic/score/mean", "critic/score/max", "critic/score/min", "actor/grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_what_is_refused_by_the_configuration(paths, path, tmp_path):
    text = tiny_model_dir(tmp_path / "text", "qwen3", task="sequence_classification")
    cases = [
        ({"reward_model__model__path": text}, "it holds a qwen3, and the policy with images is a qwen2_5_vl"),
        ({"reward_model__max_length": 47}, "sequences have up to 48 tokens, and those with images are not cut"),
    ]
    for changes, said in cases:
        with pytest.raises(ConfigError, match=said):
            load_config(settings(paths, tmp_path, **changes))
    load_config(settings(paths, tmp_path, reward_model__max_length=48))


def other(source: str, folder: Path, file: str, **changes: object) -> str:
    """A copy of a model folder in which a JSON file has other entries."""
    shutil.copytree(source, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))
    return str(folder)


def test_other_templates_and_pixels_are_refused_before_a_model_loads(paths, path, reward_path, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.RayPPOTrainer.init_workers", None)  # which load models
    template = other(reward_path, tmp_path / "a", "tokenizer_config.json")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    pixels = other(reward_path, tmp_path / "b", "preprocessor_config.json", image_mean=[0.4, 0.5, 0.5])
    unknown = other(reward_path, tmp_path / "c", "preprocessor_config.json")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / "c" / name).unlink()
    cases = {
        template: "its chat template is not that of the policy, .*python -m verl.trainer.rm_trainer",
        pixels: r"image_mean=\(0.4, 0.5, 0.5\), but that of the policy .* \(0.5, 0.5, 0.5\)",
        unknown: "has no preprocessor_config.json",
    }
    for folder, said in cases.items():
        with pytest.raises(ConfigError, match=said):
            run_ppo(settings(paths, tmp_path, reward_model__model__path=folder))
        RewardInput.from_config(RewardModelModelConfig(path=folder))  # the user says that it is the policy's
    smaller = other(reward_path, tmp_path / "d", "preprocessor_config.json", max_pixels=1024)
    RewardInput.from_config(RewardModelModelConfig(path=smaller, input_tokenizer=path))
