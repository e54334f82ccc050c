"""Seconds of generation: lengths, rows at work, and decoding steps by hand and as published."""

from dataclasses import replace
from itertools import chain

import pytest

from tests.plugins.plan.test_shapes import LLAMA_8B, QWEN_600M
from tests.plugins.plan.test_timing import PEAKS, gpt
from verl.plugins.plan.constants import ROLLOUT_FACTOR
from verl.plugins.plan.engines import EngineLayout
from verl.plugins.plan.generation import Decoding, EngineWork, generation_seconds, scoring_seconds
from verl.plugins.plan.hardware import Cluster, gpu_named
from verl.plugins.plan.lengths import Lengths, filled_share
from verl.plugins.plan.shapes import ModelShape

EXACT = replace(PEAKS, kernel_s=0.0, product_s=0.0, step_s=0.0, row_s=0.0, link_use=1.0)
SHARES = [(row + 0.5) / 1000 for row in range(1000)]


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9, 0.99])
def test_lengths_have_their_mean(share):
    lengths = Lengths(share * 4000, 4000).quantiles(SHARES)
    assert sum(lengths) / 1000 == pytest.approx(share * 4000, rel=0.01)
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] <= 4000


def test_lengths_of_most_entropy():
    assert Lengths(50, 100).quantiles([0.25, 0.5]) == pytest.approx([25, 50])  # all are as likely
    assert Lengths(100, 100).quantiles([0.1, 0.9]) == [100, 100]
    # A short mean is that of an exponential: half are below ln 2 times it.
    assert Lengths(100, 10_000).quantiles([0.5])[0] == pytest.approx(69.31, rel=1e-3)
    assert Lengths(1, 10_000).quantiles([0.99])[0] < 100  # as steep as can be computed


def test_passes_that_rows_of_unequal_lengths_fill():
    # Rows of 10 to 30 tokens in passes of 40: the longest with the shortest, which have 40 together.
    assert filled_share(Lengths(10, 20), 10, 40) == pytest.approx(1, abs=0.05)
    # Rows of 15 and more of a budget of 20 do not share passes: the mean of 15 to 20 is 17.5.
    assert filled_share(Lengths(2.5, 5), 15, 20) == pytest.approx(17.5 / 20, abs=0.01)
    assert filled_share(Lengths(5, 5), 5, 35) == pytest.approx(128 / 43 / 3.5)  # three in each
    # Of lengths up to 20, all as often, a row at work has drawn 20² / 3 / 2 / 10 tokens in the mean.
    assert Lengths(10, 20).mean_at_work == pytest.approx(20 / 3, rel=5e-3)


def test_rows_make_room_and_then_fewer_are_left():
    two = EngineWork(rows=2, rows_at_once=2, prompt=10, lengths=Lengths(50, 100), rows_of_all=2)
    # Lengths at 1/4 and 3/4 of 100: 25 steps of both, 50 of one. Tokens: prompts and half of what is drawn.
    assert [*chain(*two.segments())] == pytest.approx([25, 2, 2 * (10 + 12.5), 50, 1, 10 + 50])
    # One after the other.
    alone = list(replace(two, rows_at_once=1).segments())
    assert sum(steps for steps, _, _ in alone) == pytest.approx(100)
    assert {rows for _, rows, _ in alone} == {1}
    # Of all engines' 200 rows the longest has 99.75 tokens, and this engine may have it.
    assert sum(steps for steps, _, _ in replace(two, rows_of_all=200).segments()) == pytest.approx(99.75)
    many = EngineWork(rows=300, rows_at_once=40, prompt=0, lengths=Lengths(100, 1000), rows_of_all=300)
    parts = list(many.segments())
    assert sum(steps * rows for steps, rows, _ in parts) == pytest.approx(30_000, rel=0.02)
    assert max(rows for _, rows, _ in parts) == 40
    assert parts[-1][1] <= 2


def test_decoding_reads_weights_and_keys_by_hand():
    # 2 layers of 98,048 weights, a head of 64 · 51,200; keys and values of 2 · 64 numbers in each layer.
    shape, layout = gpt(2, 64, 4), EngineLayout()
    weights, head, read = 98_048, 64 * 51_200, 2.039e12
    logits = 51_200 * 40 / read
    step = Decoding(shape, EXACT, layout)
    assert step.seconds(1, 100) == pytest.approx((2 * (weights + head) + 100 * 2 * 2 * 64 * 2) / read + logits)
    # With 1,000 rows products take longer than reading.
    products = 2 * 1000 * (weights + head) / 312e12
    assert step.seconds(1000, 1000) == pytest.approx(products + 1000 * 512 / read + 1000 * logits)
    # In 8 bits the decoder's weights are half as many bytes.
    rounded = Decoding(shape, EXACT, EngineLayout(is_quantised=True))
    assert step.seconds(1, 0) - rounded.seconds(1, 0) == pytest.approx(weights / read)
    # An engine inside the worker reads them, and writes and reads each layer in bf16.
    restored = Decoding(shape, EXACT, EngineLayout(is_quantised=True, is_program=False))
    assert restored.seconds(1, 0) - step.seconds(1, 0) == pytest.approx((1 + 2 + 2 - 2) * weights / read)
    # Two ranks read half each, and add up twice in each layer: 8 us, and half of the hidden states twice.
    two = Decoding(shape, EXACT, EngineLayout(tensor=2))
    added = 2 * 2 * (8e-6 + 2 / 2 * 64 * 2 / 300e9)
    assert two.seconds(1, 100) == pytest.approx((weights + head + 100 * 256) / read + logits + added)
    # 4 products and 6 others in each layer, and the head; the host prepares a step and its row.
    slow = replace(EXACT, product_s=7e-6, kernel_s=2e-6, step_s=1e-3, row_s=1e-5)
    assert Decoding(shape, slow, layout).seconds(1, 100) - step.seconds(1, 100) == pytest.approx(9 * 7e-6 + 1.034e-3)


def test_bytes_of_an_engine_by_hand():
    shape = gpt(2, 64, 4)
    weights, all_of_them = 98_048, shape.parameters()
    assert EngineLayout(tensor=2).weights(shape) == all_of_them * 2 / 2
    # One byte for each linear weight, 4 for each output; inside the worker one layer is in bf16 too.
    outputs = 2 * (4 * 64 + 2 * 170 + 64)
    rounded = EngineLayout(is_quantised=True)
    assert rounded.weights(shape) == weights + (all_of_them - weights) * 2 + outputs * 4
    restored = replace(rounded, is_program=False).weights(shape) - rounded.weights(shape)
    assert restored == pytest.approx((weights / 2 + 2 * 64) * 2)
    # Experts are divided over the ranks of all copies, the rest over those of one.
    fields = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    mixture, experts = ModelShape.from_fields(fields, "config.json"), 4 * 3 * 64 * 128
    shared = EngineLayout(tensor=2, copies=2, expert=4)
    assert shared.ranks == shared.expert_ranks == 4
    assert shared.weights(mixture) == (mixture.parameters() - experts) * 2 / 2 + experts * 2 / 4
    assert shared.row(shape, 3) == 3 * 2 * 2 * 64 * 2 / 2


def test_a_rollout_is_its_prompts_and_its_steps():
    shape, layout = gpt(2, 64, 4), EngineLayout()
    work = EngineWork(rows=3, rows_at_once=3, prompt=4, lengths=Lengths(8, 8), rows_of_all=3)
    prompts = scoring_seconds(shape, EXACT, 3, 4, 1, layout)
    assert prompts == pytest.approx(3 * (2 * 4 * 98_048 + 2 * 64 * 51_200) / 312e12 + 3 * 10 * 2 * 4 * 64 / 156e12)
    assert generation_seconds(shape, EXACT, work, layout) == pytest.approx(
        prompts + 8 * Decoding(shape, EXACT, layout).seconds(3, 3 * (4 + 4))
    )


def test_few_rows_read_few_experts():
    # 4 experts of 3 · 64 · 128, of which a token takes two: 1 - (1 - 1/2)^rows of them are read.
    fields = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape, read = ModelShape.from_fields(fields, "config.json"), 2.039e12
    experts = 4 * 3 * 64 * 128

    def of_experts(rows, **sizes):
        layout = EngineLayout(**sizes)
        without = replace(shape, expert_width=0)
        return Decoding(shape, EXACT, layout).seconds(rows, 0) - Decoding(without, EXACT, layout).seconds(rows, 0)

    assert of_experts(1) == pytest.approx(experts / 2 * 2 / read)
    assert of_experts(2) == pytest.approx(experts * 3 / 4 * 2 / read)
    # Two copies share the experts: each rank reads half of those that rows of both take.
    assert of_experts(1, copies=2, expert=2) == pytest.approx(experts * 3 / 4 / 2 * 2 / read)


def test_a_rollout_takes_as_long_as_was_measured_on_a_gpu():
    # docs/internals/gpu.md: 256 responses of 512 tokens by 0.6 billion parameters on one H200 took 6.7 s.
    shape = ModelShape.from_fields(QWEN_600M, "config.json")
    there = Cluster(gpu=gpu_named("h200"), gpus=1, gpus_per_node=1, memory_gb=141)
    work = EngineWork(rows=256, rows_at_once=256, prompt=16, lengths=Lengths(512, 512), rows_of_all=256)
    seconds = generation_seconds(shape, there, work, EngineLayout(is_program=False))
    assert seconds * ROLLOUT_FACTOR == pytest.approx(6.7, rel=0.15)


def test_one_request_is_as_fast_as_published():
    # johnmusgrave.com/p/vllm-throughput-latency-sweep-on: Llama-3.1-8B in bf16 on an A100 of 40 GB, 1.555 TB/s, prompts
    # of 1,024 and responses of 128 tokens, one at a time: about 75 tokens/s.
    gpu = replace(gpu_named("a100"), memory_bytes_per_s=1.555e12)
    there = Cluster(gpu=gpu, gpus=1, gpus_per_node=1, memory_gb=40)
    step = Decoding(ModelShape.from_fields(LLAMA_8B, "config.json"), there, EngineLayout())
    assert 1 / step.seconds(1, 1088) == pytest.approx(75, rel=0.05)
