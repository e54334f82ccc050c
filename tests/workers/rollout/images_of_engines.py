"""Models with images in the real vLLM or SGLang, against the trainer and the engine ``native``."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.vision_models import film_rows, heads_of_32, picture_rows, png, tiny_vision_model_dir, write_parquet
from tests.vision.batches import P, film_prompts, prompts, prompts_of
from tests.workers.rollout.test_vllm_lora import RANK, change, trainer_of
from tests.workers.rollout.vllm_engines import KWARGS
from tests.workers.support import make_engine
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.placed_images import digests
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, requests_from_prompts
from verl.workers.rollout.request_queue import RequestQueue
from verl.workers.teacher.engine import columns_of, requests_of

R = 6
READERS = {"vllm": "vLLM's server", "sglang": "SGLang"}
"""What reads the files of images, in the words of its messages."""
TOLERANCES = {"vllm": 3e-5, "sglang": 5e-5}
"""Of log-probs; the patches that SGLang takes have twelve times the pixels."""


def rollout_of(name: str, path: str, length: int, lora_rank: int = 0, **settings: Any) -> BaseRollout:
    config = RolloutConfig(
        name=name,
        prompt_length=length,
        response_length=R,
        dtype="float32",
        tensor_model_parallel_size=1,
        enforce_eager=True,
        engine_kwargs={"vllm": KWARGS},
        **settings,
    )
    return get_rollout_class(name)(config, HFModelConfig(path=path, lora_rank=lora_rank), hf_tokenizer(path), "cpu")


def check_log_probs(name: str, family: str, rows: str, folder: Path, **of_model: Any) -> None:
    """Of rows of text, images and videos; after an update the same images have features of the new weights.

    Log-probs are the trainer's, also of tokens that the engine only scores, and greedy tokens those of the engine
    ``native``.
    """
    of_model |= heads_of_32(family)
    paths = [tiny_vision_model_dir(folder / str(seed), family, seed=seed, **of_model) for seed in (0, 1)]
    made = film_prompts if rows == "films" else prompts
    batch = made(paths[0], folder, count=4).repeat(3, interleave=True)
    batch.non_tensor_batch |= {"uid": np.repeat(np.arange(4), 3), "sample_index": np.tile(np.arange(3), 4)}
    width = batch.batch["input_ids"].shape[1]
    engine = rollout_of(name, paths[0], width, max_model_len=width + R + 1)  # scores need room for one more token
    native = rollout_of("native", paths[0], width)
    try:
        for version, path in enumerate(paths):
            weights = AutoModelForImageTextToText.from_pretrained(path).state_dict()
            batch.meta_info = {"do_sample": True}
            with engine.awake(weights.items, version):
                found = engine.generate_sequences(batch)
                whole = batch.select(batch_keys=[]) | found
                scores = scored(engine, whole)
                batch.meta_info = {"do_sample": False}
                greedy = engine.generate_sequences(batch)
            trainer = make_engine(path, trained=False)
            log_probs = trainer.infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
            for of_engine in (found.batch["rollout_log_probs"], scores):
                assert_close(of_engine, log_probs, atol=TOLERANCES[name], rtol=0)
            with native.awake(weights.items, version):
                assert greedy.batch["responses"].equal(native.generate_sequences(batch).batch["responses"])
        with engine.awake(weights.items, 2):
            check_equal_pixels(engine, equal_pixels(path, folder, rows, width), path)
        if rows == "pictures":
            with engine.awake(weights.items, 2):
                check_requests_that_come_one_by_one(engine, batch, greedy.batch["responses"], READERS[name])
    finally:
        engine._end_engine()


def scored(engine: BaseRollout, whole: DataProto) -> Tensor:
    """The log-probs of responses as a teacher of their prompts, images included, gives them."""
    requests = requests_of(whole, 0, 1.0, VisionConfig.from_config(engine.hf_config))
    return columns_of(whole, requests, engine.score(requests), 0).batch["teacher_logprobs"]


def check_adapters(name: str, family: str, folder: Path, **of_model: Any) -> None:
    """Rows of text and of images, with other adapters in each of three updates; log-probs are the trainer's."""
    path = tiny_vision_model_dir(folder / "model", family, **heads_of_32(family), **of_model)
    trainer = trainer_of(path)
    batch = prompts(path, folder, count=4)
    batch.non_tensor_batch |= {"uid": np.arange(4), "sample_index": np.zeros(4, dtype=int)}
    batch.meta_info = {"do_sample": True}
    engine = rollout_of(name, path, P, RANK, merge_adapters=False)
    sent, before = [], None
    try:
        for step in range(3):
            change(trainer, step)
            with trainer.eval_mode(), engine.awake(trainer.adapted_weights(), trainer.weight_version):
                whole = batch.select(batch_keys=[]) | engine.generate_sequences(batch)
            log_probs = trainer.infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
            assert_close(whole.batch["rollout_log_probs"], log_probs, atol=TOLERANCES[name], rtol=0)
            sent.append(engine.sent_bytes)
            assert before is None or not whole.batch["responses"].equal(before)
            before = whole.batch["responses"]
    finally:
        engine._end_engine()
    assert sent[1] == sent[2] < sent[0] / 10


def equal_pixels(path: str, folder: Path, rows: str, length: int) -> DataProto:
    """Two prompts of one text: plain pictures of 8 x 4 and 4 x 8 patches, or a still film at two speeds."""
    patch = hf_processor(path).image_processor.patch_size
    if rows == "films":
        first = film_rows(1)[0]
        still = first["videos"][0]["video"][:1] * 4
        pair = [first | {"videos": [{"video": still, "fps": fps}]} for fps in (8.0, 1.0)]
    else:
        sizes = ((8 * patch, 4 * patch), (4 * patch, 8 * patch))
        plain = [{"bytes": png(Image.new("RGB", size, "red")), "path": None} for size in sizes]
        pair = [picture_rows(1)[0] | {"images": [image]} for image in plain]
    batch = prompts_of(path, folder / "equal", pair, length)
    one, other = (images[IMAGE_INPUTS[0]] for images in batch.non_tensor_batch["multi_modal_inputs"])
    assert np.array_equal(one, other)
    return batch


def check_equal_pixels(rollout: BaseRollout, batch: DataProto, path: str) -> None:
    """Prompts that come one after the other, and differ in positions alone, share nothing that an engine keeps."""
    batch.non_tensor_batch |= {"uid": np.arange(2), "sample_index": np.zeros(2, dtype=int)}
    batch.meta_info = {"do_sample": True}
    outputs = DataProto.concat([rollout.generate_sequences(batch[row : row + 1]) for row in range(2)])
    whole = batch.select(batch_keys=[]) | outputs
    log_probs = make_engine(path, trained=False).infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
    assert_close(whole.batch["rollout_log_probs"], log_probs, atol=TOLERANCES[rollout.config.name], rtol=0)


def check_requests_that_come_one_by_one(rollout: BaseRollout, batch: DataProto, greedy: Tensor, engine: str) -> None:
    """As agent loops send them: the tokens of the batch. An image that is lost or damaged fails its request alone."""
    images = rollout._engine._images
    requests = requests_from_prompts(batch, rollout.config)
    broken = next(number for number, request in enumerate(requests) if request.images)
    whole = dict(requests[broken].images)
    pixels, grid = (whole[name] for name in IMAGE_INPUTS)
    damages: dict[str, Callable[[Path], object]] = {
        f"image 0 of the prompt did not reach {engine}: No such file": Path.unlink,
        f"image 0 of the prompt did not reach {engine}: Error while": lambda path: path.write_bytes(b"damaged"),
        "image 0 of the prompt .* as it was sent: its hash differs": flip_the_last_bit,
    }
    written = images._written
    for number, (said, damage) in enumerate([("", None), *damages.items()]):
        if damage is not None:  # another picture each time: recent ones are known to the server
            other = SharedTensors(dict(zip(IMAGE_INPUTS, (pixels + number, grid), strict=True)))
            requests[broken] = dataclasses.replace(requests[broken], images=other)

            images._written = functools.partial(spoilt, written, damage, digests(other))
        answers = served(rollout, requests)
        if damage is not None:
            error = answers.pop(broken)
            assert isinstance(error, RolloutError)
            assert re.search(said, str(error)), error
        for place, answer in answers.items():
            assert isinstance(answer, RolloutOutput)
            assert answer.token_ids == greedy[place][: len(answer.token_ids)].tolist()
    images._written = written
    first = int(greedy[broken][0])  # a stop text makes the server stream
    stops = dataclasses.replace(requests[broken].sampling, stop=(rollout.tokenizer.decode([first]),))
    streamed = dataclasses.replace(requests[broken], images=SharedTensors(whole), sampling=stops)
    for output in (rollout.generate([streamed])[0], served(rollout, [streamed])[0]):
        assert (output.token_ids, output.finish_reason) == ([first], "stop")
    assert {path.name for path in images._folders[0].iterdir()} <= {"weights"}


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


def served(rollout: BaseRollout, requests: list[RolloutRequest]) -> dict[int, Any]:
    answers: dict[int, Any] = {}

    def take(number: int, answer: Any) -> None:
        answers[number] = answer
        if len(answers) == len(requests):
            queue.close()

    queue = RequestQueue(take)
    for number, request in enumerate(requests):
        queue.put(number, request)
    rollout.serve(queue)
    return answers


def check_a_run(name: str, family: str, folder: Path, settings: dict[str, Any], **of_model: Any) -> None:
    """What the engine says of its tokens is what the trainer computes, before and after an update of tower and text."""
    (folder / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return float(len(solution_str) % 3)\n"
    )
    rows = picture_rows(8, text_every=4)
    paths = make_tiny_run(folder) | {
        "model": tiny_vision_model_dir(folder / "vision", family, **heads_of_32(family), **of_model),
        "train": write_parquet(folder / "train.parquet", rows),
        "val": write_parquet(folder / "val.parquet", rows[:4]),
    }
    changes = {
        "custom_reward_function__path": folder / "reward.py",
        "data__max_prompt_length": 40,
        "actor_rollout_ref__rollout__name": name,
        "actor_rollout_ref__rollout__enforce_eager": "true",
        "actor_rollout_ref__rollout__engine_kwargs__vllm__kv_cache_memory_bytes": KWARGS["kv_cache_memory_bytes"],
    }
    run_ppo(compose(overrides(paths, folder, **changes, **settings)))
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0
