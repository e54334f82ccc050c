"""Models with images in the real vLLM, against the trainer and the engine ``native``; by ``make test-vllm``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.vision.agent_batches import VisionAgents
from tests.vision.batches import P, prompts
from tests.vision.test_agents_with_images import LOOPS
from tests.vision.test_videos import film_prompts
from tests.workers.rollout.test_vllm_lora import RANK, change, trainer_of
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm
from tests.workers.support import make_engine
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.testing.tiny_run import make_tiny_run, overrides
from verl.testing.vision_models import heads_of_32, picture_rows, tiny_vision_model_dir, write_parquet
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_tokenizer
from verl.vision.families import FAMILIES, IMAGE_INPUTS
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.placed_images import digests
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, requests_from_prompts
from verl.workers.rollout.serving import RequestQueue

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM needs torchvision for images"),
]
R = 6
SERVED = [
    pytest.param("qwen2_5_vl", "async", "pictures", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", "async", "films", marks=pytest.mark.slow),
    pytest.param("qwen2_vl", "async", "pictures", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", "async", "pictures", marks=pytest.mark.slow),
]


def rollout_of(
    name: str, path: str, length: int, mode: str = "sync", lora_rank: int = 0, **settings: Any
) -> BaseRollout:
    config = RolloutConfig(
        name=name,
        mode=mode,
        prompt_length=length,
        response_length=R,
        dtype="float32",
        tensor_model_parallel_size=1,
        enforce_eager=True,
        engine_kwargs={"vllm": KWARGS},
        **settings,
    )
    return get_rollout_class(name)(config, HFModelConfig(path=path, lora_rank=lora_rank), hf_tokenizer(path), "cpu")


WHICH = [*((family, "sync", "films") for family in FAMILIES), *SERVED]


@pytest.mark.parametrize(("family", "mode", "rows"), WHICH)
def test_log_probs_are_the_trainers_and_greedy_tokens_those_of_native(
    family: str, mode: str, rows: str, tmp_path: Path
) -> None:
    """Rows of text, of images and of videos; after an update the same images have features of the new weights."""
    paths = [tiny_vision_model_dir(tmp_path / str(seed), family, seed=seed, **heads_of_32(family)) for seed in (0, 1)]
    made = film_prompts if rows == "films" else prompts
    batch = made(paths[0], tmp_path, count=4).repeat(3, interleave=True)
    batch.non_tensor_batch |= {"uid": np.repeat(np.arange(4), 3), "sample_index": np.tile(np.arange(3), 4)}
    width = batch.batch["input_ids"].shape[1]
    vllm, native = rollout_of("vllm", paths[0], width, mode), rollout_of("native", paths[0], width)
    for version, path in enumerate(paths):
        model = AutoModelForImageTextToText.from_pretrained(path)
        batch.meta_info = {"do_sample": True}
        with vllm.awake(lambda model=model: model.state_dict().items(), version):
            found = vllm.generate_sequences(batch)
            batch.meta_info = {"do_sample": False}
            greedy = vllm.generate_sequences(batch)
        whole = batch.select(batch_keys=[]) | found
        log_probs = make_engine(path, trained=False).infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
        assert_close(found.batch["rollout_log_probs"], log_probs, atol=3e-5, rtol=0)
        with native.awake(lambda model=model: model.state_dict().items(), version):
            assert greedy.batch["responses"].equal(native.generate_sequences(batch).batch["responses"])
    if mode == "async" and rows == "pictures":
        with vllm.awake(lambda: model.state_dict().items(), 2):
            check_requests_that_come_one_by_one(vllm, batch, greedy.batch["responses"])
    if mode == "async":
        vllm._engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [*((family, "sync") for family in FAMILIES), ("qwen2_5_vl", "async")])
def test_adapters_of_the_language_model_are_applied_by_vllm(family: str, mode: str, tmp_path: Path) -> None:
    """Rows of text and of images, with other adapters in each of three updates; log-probs are the trainer's."""
    path = tiny_vision_model_dir(tmp_path / "model", family, **heads_of_32(family))
    trainer = trainer_of(path)
    batch = prompts(path, tmp_path, count=4)
    batch.non_tensor_batch |= {"uid": np.arange(4), "sample_index": np.zeros(4, dtype=int)}
    batch.meta_info = {"do_sample": True}
    vllm = rollout_of("vllm", path, P, mode, RANK, merge_adapters=False)
    sent, before = [], None
    try:
        for step in range(3):
            change(trainer, step)
            with trainer.eval_mode(), vllm.awake(trainer.adapted_weights(), trainer.weight_version):
                whole = batch.select(batch_keys=[]) | vllm.generate_sequences(batch)
            log_probs = trainer.infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
            assert_close(whole.batch["rollout_log_probs"], log_probs, atol=3e-5, rtol=0)
            sent.append(vllm.sent_bytes)
            assert before is None or not whole.batch["responses"].equal(before)
            before = whole.batch["responses"]
    finally:
        vllm._end_engine()
    assert sent[1] == sent[2] < sent[0] / 10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_with_one_engine_split_over_two_ranks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    """What vLLM says of its tokens is what the trainer computes, before and after an update of tower and text."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return float(len(solution_str) % 3)\n"
    )
    rows = picture_rows(8, text_every=4)
    paths = make_tiny_run(tmp_path) | {
        "model": tiny_vision_model_dir(tmp_path / "vision", family, **heads_of_32(family)),
        "train": write_parquet(tmp_path / "train.parquet", rows),
        "val": write_parquet(tmp_path / "val.parquet", rows[:4]),
    }
    changes = {
        "custom_reward_function__path": tmp_path / "reward.py",
        "data__max_prompt_length": 40,
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__mode": "async",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "actor_rollout_ref__rollout__enforce_eager": "true",
        "actor_rollout_ref__rollout__engine_kwargs__vllm__kv_cache_memory_bytes": KWARGS["kv_cache_memory_bytes"],
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
    }
    run_ppo(compose(overrides(paths, tmp_path, **changes)))
    steps = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0


def check_requests_that_come_one_by_one(vllm: BaseRollout, batch: DataProto, greedy: Tensor) -> None:
    """As agent loops send them: the tokens of the batch. An image that is lost or damaged fails its request alone."""
    images = vllm._engine._images
    requests = requests_from_prompts(batch, vllm.config)
    broken = next(number for number, request in enumerate(requests) if request.images)
    whole = dict(requests[broken].images)
    pixels, grid = (whole[name] for name in IMAGE_INPUTS)
    damages: dict[str, Callable[[Path], object]] = {
        "image 0 of the prompt did not reach vLLM's server: No such file": Path.unlink,
        "image 0 of the prompt did not reach vLLM's server: Error while": lambda path: path.write_bytes(b"damaged"),
        "image 0 of the prompt .* as it was sent: its hash differs": flip_the_last_bit,
    }
    written = images._written
    for number, (said, damage) in enumerate([("", None), *damages.items()]):
        if damage is not None:  # another picture each time: recent ones are known to the server
            other = SharedTensors(dict(zip(IMAGE_INPUTS, (pixels + number, grid), strict=True)))
            requests[broken] = dataclasses.replace(requests[broken], images=other)

            images._written = functools.partial(spoilt, written, damage, digests(other))
        answers = served(vllm, requests)
        if damage is not None:
            error = answers.pop(broken)
            assert isinstance(error, RolloutError)
            assert re.search(said, str(error)), error
        for place, answer in answers.items():
            assert isinstance(answer, RolloutOutput)
            assert answer.token_ids == greedy[place][: len(answer.token_ids)].tolist()
    images._written = written
    first = int(greedy[broken][0])  # a stop text makes the server stream
    stops = dataclasses.replace(requests[broken].sampling, stop=(vllm.tokenizer.decode([first]),))
    streamed = dataclasses.replace(requests[broken], images=SharedTensors(whole), sampling=stops)
    for output in (vllm.generate([streamed])[0], served(vllm, [streamed])[0]):
        assert (output.token_ids, output.finish_reason) == ([first], "stop")
    assert not list(vllm._engine.server.memory_folder.iterdir())


def spoilt(
    written: Callable[..., Path], damage: Callable[[Path], object], chosen: Any, digest: bytes, *of: Any
) -> Path:
    path = written(digest, *of)
    if digest in chosen:
        damage(path)
    return path


def flip_the_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def served(vllm: BaseRollout, requests: list[RolloutRequest]) -> dict[int, Any]:
    answers: dict[int, Any] = {}

    def take(number: int, answer: Any) -> None:
        answers[number] = answer
        if len(answers) == len(requests):
            queue.close()

    queue = RequestQueue(take)
    for number, request in enumerate(requests):
        queue.put(number, request)
    vllm.serve(queue)
    return answers


@pytest.mark.slow
def test_agent_loops_show_the_server_pictures_in_later_turns(tmp_path: Path) -> None:
    """Rows with and without images; the second turn has a picture more. Log-probs are the trainer's."""
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: shows, _target_: Shows, path: {tmp_path}/loops.py}}\n")
    rollout = "actor_rollout_ref__rollout__"
    settings = {
        f"{rollout}mode": "async",
        f"{rollout}enforce_eager": "true",
        f"{rollout}engine_kwargs__vllm__kv_cache_memory_bytes": KWARGS["kv_cache_memory_bytes"],
        f"{rollout}agent__agent_loop_config_path": tmp_path / "loops.yaml",
    }
    agents = VisionAgents(tmp_path, "qwen2_5_vl", "vllm", heads_of_32("qwen2_5_vl"), **settings)
    found = agents.answer(agents.prompts(agent_name=["shows"] * 4))
    assert found.non_tensor_batch["trajectory_message"].tolist() == [""] * 8
    assert [len(row["image_grid_thw"]) for row in found.non_tensor_batch["multi_modal_inputs"]] == [*[2] * 6, 1, 1]
    drawn = found.batch["response_mask"].bool()
    assert_close(found.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(found)[drawn], atol=3e-5, rtol=0)
