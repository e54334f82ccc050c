"""Which models draw random numbers in their forward pass when they are trained."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, MixtralConfig, Qwen3Config

from verl.utils.model import training_randomness


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen3Config(), {}),
        (Qwen3Config(attention_dropout=0.1), {"attention_dropout": 0.1}),
        (GPT2Config(attn_pdrop=0.0), {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_first_dropout": 0.1}),
        (MixtralConfig(router_jitter_noise=0.01), {"router_jitter_noise": 0.01}),
    ],
)
def test_dropout_and_noise(config, expected):
    assert training_randomness(config) == expected
