"""Rollout engines with images: greedy tokens and log-probs of the model's own generate, and those of the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, tiny_vision_model_dir
from tests.vision.batches import P, prompts
from tests.workers.support import make_engine
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.rollout.base import get_rollout_class

R = 6


def drawn(path, folder, name="hf", do_sample=True, **settings):
    """A batch of prompts, three responses each, and the engine's answer."""
    batch = prompts(path, folder, count=4).repeat(3, interleave=True)
    batch.non_tensor_batch |= {"uid": np.repeat(np.arange(4), 3), "sample_index": np.tile(np.arange(3), 4)}
    batch.meta_info = {"do_sample": do_sample}
    config = RolloutConfig(
        name=name, prompt_length=P, response_length=R, dtype="float32", tensor_model_parallel_size=1, **settings
    )
    rollout = get_rollout_class(name)(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
    model = AutoModelForImageTextToText.from_pretrained(path)
    with rollout.awake(lambda: model.state_dict().items(), version=0):
        return batch, rollout.generate_sequences(batch), model


EACH = [*DENSE_FAMILIES, pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", ["hf", "native"])
@pytest.mark.parametrize("family", EACH)
def test_greedy_tokens_are_those_of_generate(family, name, tmp_path):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    batch, found, model = drawn(path, tmp_path, name, do_sample=False)
    for row in range(0, len(batch), 3):
        seen = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][seen][None]
        images = dict(batch.non_tensor_batch["multi_modal_inputs"][row])
        with torch.no_grad():
            expected = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == 106).int(),
                do_sample=False,
                max_new_tokens=R,
                **images,
            )[0, ids.shape[1] :]
        length = int(found.batch["response_mask"][row].sum())
        assert found.batch["responses"][row, :length].tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["hf", "native"])
@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 5}, {"max_num_batched_tokens": P}], ids=["all", "5", "1"])
def test_log_probs_of_the_rollout_are_the_trainers(family, name, settings, tmp_path):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    batch, found, _ = drawn(path, tmp_path, name, **settings)
    whole = batch.select(batch_keys=[]) | found
    assert whole.batch["position_ids"].shape == (12, 4, P + R)
    log_probs = make_engine(path, trained=False).infer_batch(whole, {"log_probs"}, MicroBatchConfig())["log_probs"]
    assert_close(found.batch["rollout_log_probs"], log_probs, atol=2e-5, rtol=0)


def test_an_engine_for_texts_refuses_images(tmp_path):
    from verl.testing.models import tiny_model_dir

    path = tiny_model_dir(tmp_path / "text")
    batch = DataProto.from_dict(
        tensors={"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)},
        non_tensors={"uid": [0], "sample_index": [0], "multi_modal_inputs": [{"pixel_values": torch.ones(4, 96)}]},
    )
    config = RolloutConfig(
        name="native", prompt_length=2, response_length=2, tensor_model_parallel_size=1, dtype="float32"
    )
    rollout = get_rollout_class("native")(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
    with pytest.raises(RolloutError, match="a prompt has images, and Qwen3Config is of a model for text"):
        rollout.generate_sequences(batch)
