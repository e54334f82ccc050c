"""Counts of arithmetic, worked by hand, and against PyTorch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig, MixtralConfig, Qwen3_5TextConfig, Qwen3Config

from verl.testing.models import tiny_model
from verl.utils.flops_counter import Arithmetic, FlopsCounter, device_peak_flops


def config(**overrides):
    return Qwen3Config(
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        vocab_size=10,
        **overrides,
    )


def test_by_hand():
    # Per layer: q and o 2·(4·6), k and v 2·(4·3), feed-forward 3·(4·6): 48 + 24 + 72 = 144 weights; two layers: 288.
    # 5 tokens: 2·5·288 = 2880. Head at 3 tokens: 2·4·10·3 = 240.
    # Attention: sequences of 2 and 3 have 3 + 6 = 9 pairs: 4·6·9 in each of 2 layers = 432.
    counter = FlopsCounter(config())
    assert counter.forward_flops([2, 3], head_tokens=3) == 2880 + 240 + 432
    assert counter.forward_flops([2, 3]) == 2880 + 2 * 4 * 10 * 5 + 432
    assert counter.training_flops([2, 3], 3) == 3 * (2880 + 240 + 432)
    # A head that is trained: a layer of 144 and a product of 2·4·4 at 5 tokens, logits, and attention of one layer.
    with_head = FlopsCounter(config(), heads=1)
    assert with_head.forward_flops([2, 3], 3) == counter.forward_flops([2, 3], 3)
    assert with_head.training_flops([2, 3], 3) == 3 * (2880 + 240 + 432 + 2 * 5 * (144 + 32) + 240 + 216)


def test_a_head_with_one_output():
    counter = FlopsCounter.from_config(config(), outputs=1)
    assert counter is not None
    assert counter.forward_flops([2, 3], head_tokens=3) == 2880 + 2 * 4 * 1 * 3 + 432


def test_what_is_not_known_has_no_utilization():
    assert FlopsCounter.from_config(MambaConfig()) is None  # no attention
    unknown = Arithmetic(None, 1e10)
    assert unknown.training_flops([2, 3], 3) is None
    assert unknown.utilization(None, 1.0) is None
    assert Arithmetic.from_ranks([unknown, Arithmetic(None, None)]).peak_flops is None
    whole = Arithmetic.from_ranks([Arithmetic(FlopsCounter(config()), 1e10)] * 2)
    # 3552 operations forward, 3 times that in training, of 2e10 a second
    assert (whole.forward_flops([2, 3], 3), whole.training_flops([2, 3], 3)) == (3552, 10656)
    # One of two sequences of 3 has the first 2 tokens of the other: left are those of 3 and 1, and 2 pairs of the last
    # token with the shared ones, 4 operations times 6 times 2 layers each.
    counter, part = whole.counter, whole.forward_flops([3, 3], 3, repeated=[2])
    assert part == counter.forward_flops([3, 1], 3) + 2 * 4 * 6 * 2
    assert whole.training_flops([3, 3], 3, repeated=[2]) == 3 * part
    assert whole.utilization(10656, 2.0) == pytest.approx(10656 / 4e10)


def test_sliding_window_sees_less():
    # Window 2: of 3 tokens, 1 + 2 + 2 = 5 pairs instead of 6; only the second layer slides.
    sliding = config(sliding_window=2, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"])
    assert FlopsCounter(config()).forward_flops([3]) - FlopsCounter(sliding).forward_flops([3]) == 4 * 6 * 1


def test_only_the_experts_that_a_token_meets_count():
    mixture = MixtralConfig(
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        vocab_size=10,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    # Attention 72 weights, router 4·8 = 32, two experts 2·72 = 144.
    assert FlopsCounter(mixture).weights == 72 + 32 + 144


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma", "deepseek_v3"])
def test_products_are_those_that_pytorch_counts(family):
    model = tiny_model(family)
    if family == "deepseek_v3":  # without experts, whose grouped products PyTorch does not count
        model.config.first_k_dense_replace = model.config.num_hidden_layers
        model = AutoModelForCausalLM.from_config(model.config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.ones(1, 7, dtype=torch.long))
    own = FlopsCounter(model.config)
    # PyTorch counts the products of the whole square of 7·7 pairs, and those of the cos and sin of the positions.
    square = own.pair_flops * own.layers * (49 - 28)
    rotary = 2 * 7 * (model.config.head_dim if family != "qwen2" else 16) // 2
    assert own.forward_flops([7]) + square == pytest.approx(counted.get_total_flops(), abs=rotary)


def test_gated_delta_nets_by_hand():
    linear = {"num_key_heads": 1, "key_head_dim": 2, "num_value_heads": 2, "value_head_dim": 3, "conv_kernel_dim": 4}
    fields: dict[str, Any] = {f"linear_{name}": size for name, size in linear.items()}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 2}
    fields |= {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10}
    text = Qwen3_5TextConfig(**fields, layer_types=["linear_attention", "full_attention"])
    counter = FlopsCounter.from_config(text)
    assert counter is not None
    # Attention 8 · (8 + 8 gates + 4 + 4 + 8); delta net 8 · (2 + 2 + 6 + 6 + 2 + 2) + 4 · 10 + 6 · 8 and per head three
    # times 2 · 3; feed-forward 2 · 3 · 8 · 16.
    assert counter.weights == 256 + (160 + 40 + 48 + 36) + 768
    # Of 9 pairs, in one layer.
    assert counter.forward_flops([2, 3], head_tokens=0) == 2 * 5 * 1308 + 2 * (8 + 8) * 9
    assert FlopsCounter.from_config(Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2)) is None


def test_latent_attention_by_hand():
    widths = {"kv_lora_rank": 5, "q_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    counter = FlopsCounter(config(**widths))
    # Per layer: queries 7·4 + 7·2·5 = 98, keys and values 4·(5 + 2) + 5·2·(3 + 4) = 98, output 2·4·4 = 32.
    assert counter.weights == 2 * (98 + 98 + 32 + 72)
    # Scores are 2·5 wide over both heads, values 2·4: 2·(10 + 8) = 36 for each of 3 pairs in 2 layers.
    assert counter.forward_flops([2]) == 2 * 2 * 600 + 2 * 4 * 10 * 2 + 36 * 3 * 2


def test_achieved_is_work_over_time():
    counter = FlopsCounter(config())
    achieved, promised = counter.estimate_flops(torch.tensor([2, 3]), 2.0, images_seqlens=None)
    assert achieved == counter.training_flops([2, 3]) / 2 / 1e12
    assert promised > 0


def test_a_cpu_is_measured_and_an_unknown_device_has_no_peak():
    peak = device_peak_flops("cpu", torch.float32)
    assert peak is not None
    assert peak > 1e8
    assert device_peak_flops("meta") is None
