"""Rows of the embedding that the tokenizer does not know (padded vocabularies) are never sampled by native and hf.

vLLM and SGLang may sample them, and such a token has no text.
"""

from __future__ import annotations

import pytest

from verl.testing.models import tiny_model, tiny_model_dir
from verl.testing.rollout_conformance import shape_of
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import RolloutRequest, SamplingParams, get_rollout_class

ROWS, KNOWN = 160, 104


@pytest.mark.parametrize("name", ["hf", "native"])
def test_every_token_of_a_response_has_a_text(name, tmp_path):
    path = tiny_model_dir(tmp_path, vocab=ROWS, **shape_of("qwen3"))  # a third of all rows are padding
    tokenizer = hf_tokenizer(path)
    config = RolloutConfig(
        name=name, dtype="float32", prompt_length=8, response_length=12, tensor_model_parallel_size=1
    )
    engine = get_rollout_class(name)(config, HFModelConfig(path=path), tokenizer, "cpu")
    assert engine.unknown_ids == list(range(KNOWN, ROWS))
    model = tiny_model("qwen3", vocab=ROWS, **shape_of("qwen3"))
    requests = [
        RolloutRequest(
            [10, 20, 30], SamplingParams(max_tokens=12, seed=seed, temperature=seed % 3 / 2, ignore_eos=True)
        )
        for seed in range(12)
    ]
    with engine.awake(model.named_parameters, version=0):
        outputs = engine.generate(requests)
    ids = [token for output in outputs for token in output.token_ids]
    assert len(ids) == 12 * 12
    assert max(ids) < KNOWN
