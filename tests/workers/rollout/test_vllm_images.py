"""Models with images in the real vLLM, against the trainer and the engine ``native``; by ``make test-vllm``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.vision.batches import P, prompts
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm
from tests.workers.support import make_engine
from verl.testing.vision_models import heads_of_32, tiny_vision_model_dir
from verl.utils import hf_tokenizer
from verl.vision.families import FAMILIES
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM needs torchvision for images"),
]
R = 6


def rollout_of(name: str, path: str) -> BaseRollout:
    config = RolloutConfig(
        name=name,
        mode="sync",
        prompt_length=P,
        response_length=R,
        dtype="float32",
        tensor_model_parallel_size=1,
        enforce_eager=True,
        engine_kwargs={"vllm": KWARGS},
    )
    return get_rollout_class(name)(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_trainers_and_greedy_tokens_those_of_native(family: str, tmp_path: Path) -> None:
    """Rows of text and of images; after an update the same images have features of the new weights."""
    paths = [tiny_vision_model_dir(tmp_path / str(seed), family, seed=seed, **heads_of_32(family)) for seed in (0, 1)]
    batch = prompts(paths[0], tmp_path, count=4).repeat(3, interleave=True)
    batch.non_tensor_batch |= {"uid": np.repeat(np.arange(4), 3), "sample_index": np.tile(np.arange(3), 4)}
    vllm, native = (rollout_of(name, paths[0]) for name in ("vllm", "native"))
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
