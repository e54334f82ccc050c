"""Which models draw random numbers in their forward pass when they are trained."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, MixtralConfig, Qwen2VLConfig, Qwen3Config

from verl.utils.model import set_dropout, switch_off_dropout, training_randomness


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


def test_dropout_is_off_unless_a_setting_names_it():
    """Rates of nested configs too; noise of routers is none of it, as some read it in inference."""
    config = MixtralConfig(attention_dropout=0.1, router_jitter_noise=0.01)
    assert switch_off_dropout(config, {"attention_dropout": 0.1}) == {}
    assert switch_off_dropout(config, {"num_hidden_layers": 2}) == {"attention_dropout": 0.1}
    assert training_randomness(config) == {"router_jitter_noise": 0.01}
    nested = Qwen2VLConfig(text_config={"attention_dropout": 0.2})
    assert switch_off_dropout(nested, {"text_config": {"attention_dropout": 0.2}}) == {}
    rates = switch_off_dropout(nested, {"text_config": {"use_cache": False}})
    assert (rates, nested.text_config.attention_dropout) == ({"text_config.attention_dropout": 0.2}, 0.0)
    set_dropout(nested, rates)
    assert nested.text_config.attention_dropout == 0.2
