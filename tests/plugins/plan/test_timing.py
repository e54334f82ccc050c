"""Seconds of passes: by hand, against published runs, and against what was measured on a GPU."""

import math
from dataclasses import replace

import pytest

from tests.plugins.plan.test_shapes import QWEN_600M
from verl.plugins.plan.hardware import Cluster, gpu_named
from verl.plugins.plan.memory import ModelMemory, RankLayout
from verl.plugins.plan.shapes import ModelShape
from verl.plugins.plan.timing import Work, moving_seconds, pass_seconds


def gpt(layers, hidden, heads, vocabulary=51200):
    """A shape with the weights of GPT: two matrices of width 4·hidden are as large as three of width 8/3·hidden."""
    fields = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelShape.from_fields(fields, "config.json")


def cluster(gpus, mfu, name="a100"):
    return Cluster(gpu=gpu_named(name), gpus=gpus, gpus_per_node=8, memory_gb=80, mfu=mfu, link_use=1.0)


def without_network(there):
    """The same cluster, whose exchanges take no time."""
    return replace(there, gpu=replace(there.gpu, link_bytes_per_s=math.inf), network_bytes_per_s=math.inf)


# arXiv:2205.05198, table 5: seconds per iteration and model FLOP utilisation, rows of 2048 tokens on A100. Its FLOPs
# count all pairs of tokens and ours those that causal attention looks at, 1 to 3 % less.
@pytest.mark.parametrize(
    ("shape", "gpus", "batch", "mfu", "seconds"),
    [(gpt(48, 6144, 64), 8, 4, 0.415, 1.10), (gpt(96, 12288, 96), 64, 64, 0.514, 13.75)],
)
def test_seconds_of_published_iterations_follow_from_their_utilisation(shape, gpus, batch, mfu, seconds):
    stages = gpus // 8
    layout = RankLayout(tensor=8, pipeline=stages, is_megatron=True, is_gathered=False, stored_bytes=2)
    held = ModelMemory(shape=shape, layout=layout, trained=shape.parameters(), checkpoints=False)
    # Their utilisation contains what ranks wait for each other, so it is left out here.
    found = pass_seconds(held, without_network(cluster(gpus, mfu)), Work(batch, 0, 2048), 2048, trains=True)
    found /= 1 + (stages - 1) / batch
    assert found == pytest.approx(seconds, rel=0.035)
    assert found < seconds


def test_checkpointing_adds_a_forward_pass():
    layout = RankLayout(tensor=8, is_megatron=True, is_gathered=False)
    times = [
        pass_seconds(
            ModelMemory(shape=gpt(2, 64, 4), layout=layout, trained=1, checkpoints=on),
            without_network(cluster(8, 0.5)),
            Work(4, 2048, 2048),
            16384,
            trains=True,
        )
        for on in (False, True)
    ]
    assert times[1] / times[0] == pytest.approx(4 / 3)


def megatron(shape, **layout):
    sizes = {"is_megatron": True, "is_gathered": False, "stored_bytes": 2, **layout}
    return ModelMemory(shape=shape, layout=RankLayout(**sizes), trained=shape.parameters(), checkpoints=False)


@pytest.mark.parametrize(("pieces", "updates", "waits"), [(1, 1, 3 / 8), (3, 1, 1 / 8), (1, 2, 3 / 4)])
def test_stages_wait_for_each_other(pieces, updates, waits):
    # 4 stages; 8 passes of 16 tokens, in one update or two: 3/8 or 3/4 of the computation.
    held = megatron(gpt(12, 64, 4), pipeline=4, pieces=pieces)
    alone = megatron(gpt(12, 64, 4))
    there, work = without_network(cluster(4, 0.5)), Work(8, 8, 8)
    found = pass_seconds(held, there, work, 16, trains=True, updates=updates)
    assert found == pytest.approx(pass_seconds(alone, there, work, 16, trains=True) / 4 * (1 + waits))


def test_no_stage_waits_for_an_optimizer():
    # 2 layers in 2 stages, one pass: each stage waits as long as it computes, and then updates its weights.
    held = megatron(gpt(2, 64, 4), pipeline=2)
    there, work = without_network(replace(PEAKS, gpus=2)), Work(1, 0, 1024)
    fast = replace(there, host_memory_bytes_per_s=math.inf)
    on_host = replace(held, layout=replace(held.layout, is_on_host=True))
    seconds = [pass_seconds(on_host, one, work, 1024, trains=True) for one in (there, fast)]
    assert seconds[0] - seconds[1] == pytest.approx(28 * held.state / 12 / 40e9)


def test_state_in_host_memory_moves_twice_in_each_update():
    # fp32 weights and two moments, 12 bytes of each parameter; half of them, there and back, in each of two updates.
    held, there, work = megatron(gpt(2, 64, 4)), cluster(1, 0.5), Work(2, 0, 16)
    halved = replace(held, offload_fraction=0.5)
    seconds = [pass_seconds(one, there, work, 16, trains=True, updates=2) for one in (held, halved)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * 2 * held.trained * 6 / there.host_bytes_per_s)


def test_exchanges_of_megatron_by_hand():
    # 32 tokens, hidden 64 in bf16, 2 layers, 300 GB/s; queries, keys, values and outputs are 64 wide each.
    shape, work, there = gpt(2, 64, 4), Work(2, 8, 8), cluster(8, 0.5)

    def exchanging(trains, **layout):
        held = megatron(shape, **layout)
        computing = pass_seconds(held, without_network(there), work, 16, trains)
        return (pass_seconds(held, there, work, 16, trains) - computing) * 300e9

    # tensor: two sums in each layer, each of which sends 2 · 3/4 of 128 bytes
    assert exchanging(False, tensor=4) == pytest.approx(32 * 2 * 2 * 2 * 128 * 3 / 4)
    assert exchanging(True, tensor=4) == pytest.approx(2 * exchanging(False, tensor=4))
    # context: half of the tokens on each rank, and half of 4 · 128 bytes to the other
    assert exchanging(False, sequence=2) == pytest.approx(16 * 2 * 4 * 128 / 2)
    # pipeline: the hidden states go to the next stage
    assert exchanging(False, pipeline=2) == pytest.approx(32 * 128)
    # copies: 3/4 of the gradients in fp32 and of the weights in bf16 once in an update
    assert exchanging(True, replicas=4) == pytest.approx(shape.parameters() * (4 + 2) * 3 / 4)


def test_experts_exchange_tokens_by_hand():
    # Each of 2 layers sends a token of 128 bytes to 2 experts and back, of which half are on the other rank.
    fields = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    held = megatron(ModelShape.from_fields(fields, "config.json"), expert=2, replicas=2)
    there, work = cluster(2, 0.5), Work(2, 8, 8)
    with_it, without = (pass_seconds(held, c, work, 16, trains=False) for c in (there, without_network(there)))
    assert (with_it - without) * 300e9 == pytest.approx(32 * 2 * 2 * 2 * 128 / 2)


def test_small_micro_batches_wait_for_the_network():
    # 2 nodes: 15/16 of the weights come twice in bf16, and gradients leave in fp32, for each micro-batch. Eight ports
    # of 50 GB/s are faster than a link of 300 GB/s.
    shape = gpt(2, 64, 4)
    held = ModelMemory(shape=shape, layout=RankLayout(shards=16), trained=shape.parameters())
    found = pass_seconds(held, cluster(16, 0.5), Work(4, 1, 1), 2, trains=True)
    assert found == pytest.approx(4 * shape.parameters() * 8 * 15 / 16 / 300e9)


def test_offloaded_bytes_move_there_and_back():
    there = replace(cluster(1, 0.4), host_use=25 / 32)
    assert moving_seconds(50e9, there) == 4  # at 25 GB/s
    there = replace(there, pins_host_memory=False)
    assert moving_seconds(17.6e9, there) == pytest.approx(8 + 1.1)  # at 2.2 and 16 GB/s


def test_rates_between_ranks():
    there = replace(cluster(32, 0.4, "h800"), network_bytes_per_s=20e9)
    assert there.gather_bytes_per_s(8) == there.exchange_bytes_per_s(8) == 200e9
    # Nodes receive through all ports of the group: 8, 2 if four other groups are on the node, or 1.
    assert [there.gather_bytes_per_s(16, apart) for apart in (1, 4, 8)] == [160e9, 40e9, 20e9]
    # Of what a rank sends to 15 others, 8 parts leave the node.
    assert there.exchange_bytes_per_s(16) == pytest.approx(20e9 * 15 / 8)
    assert there.sum_latency_s(2) == pytest.approx(8e-6)
    assert there.sum_latency_s(32) == pytest.approx(6.8e-6 + 2 * (7 * 0.6e-6 + 2 * 5e-6))
    # Links join 72 GPUs of GB200, of nodes of four.
    joined = replace(there, gpu=gpu_named("gb200"), gpus_per_node=4)
    assert joined.gather_bytes_per_s(64) == 900e9


def test_ranks_with_equal_shards_add_their_gradients_between_nodes():
    shape, there, work = gpt(2, 64, 4), cluster(16, 1.0), Work(2, 1, 1)
    size = shape.parameters()

    def seconds(**layout):
        held = ModelMemory(shape=shape, layout=RankLayout(**layout), trained=size, checkpoints=False)
        return pass_seconds(held, there, work, 4, trains=True)

    # Two gathers in bf16 and a sum in fp32 over 8 ranks; then an eighth of the gradients over two nodes.
    inside = 8 * size * 7 / 8 / 300e9
    assert seconds(shards=8) == pytest.approx(inside)
    assert seconds(shards=8, replicas=2) == pytest.approx(inside + 2 * 4 * size / 8 / 2 / 50e9)
    assert seconds(shards=16) == pytest.approx(8 * size * 15 / 16 / 300e9)
    # Of adapters, gradients of these alone.
    held = ModelMemory(shape=shape, layout=RankLayout(shards=8), trained=100, adapters=100, checkpoints=False)
    assert pass_seconds(held, there, work, 4, trains=True) == pytest.approx((4 * size + 4 * 100) * 7 / 8 / 300e9)


def test_ranks_that_share_sequences_exchange_heads():
    shape, there, work = gpt(2, 64, 4), cluster(8, 1.0), Work(2, 1024, 1024)

    def seconds(sequence, there=there):
        layout = RankLayout(sequence=sequence, is_gathered=False)
        held = ModelMemory(shape=shape, layout=layout, trained=1, checkpoints=True)
        return pass_seconds(held, there, work, 4096, trains=True)

    # 3 passes of 4,096 tokens in 2 layers: each of 2 ranks sends half of its half, queries, keys, values and outputs.
    exchanged = 3 * 4096 * 2 * 4 * 64 * 2 / 2 / 2 / 300e9
    assert seconds(2) - seconds(2, without_network(there)) == pytest.approx(exchanged)


PEAKS = Cluster(
    gpu=gpu_named("a100"), gpus=1, gpus_per_node=8, memory_gb=80, product_use=1.0, attention_use=0.5, bandwidth_use=1.0,
    launch_s=0.0,
)  # fmt: skip


def test_a_pass_takes_as_long_as_its_operations():
    # 2 layers of 4 · 64 · 64 + 3 · 64 · 170 weights; 4 heads of 16.
    shape = gpt(2, 64, 4)
    held = ModelMemory(shape=shape, layout=RankLayout(is_gathered=False), trained=shape.parameters(), checkpoints=False)
    weights, flops, read = 98_048, 312e12, 2.039e12

    def parts(rows, length):
        tokens, pairs = rows * length, rows * length * (length + 1) / 2
        products = max(2 * tokens * weights / flops, 2 * weights / read)
        others = tokens * 2 * 2 * (10 * 64 + 2 * (64 + 64) + 3 * 170) / read
        attention = pairs * 2 * 4 * 64 / (0.5 * flops)
        return products, others + attention, tokens * 51200

    # Two tokens take as long as their weights are read, 4,096 as long as they are multiplied by them.
    for rows, length in ((1, 2), (4, 1024)):
        work = Work(rows, 0, length)
        products, others, logits = parts(rows, length)
        forward = products + others + logits * (2 * 64 / flops + 69 / read)
        assert pass_seconds(held, PEAKS, work, work.tokens, trains=False) == pytest.approx(forward)
        update = 28 * shape.parameters() / read
        trained = 3 * (products + others) + logits * (4 * 2 * 64 / flops + 208 / read) + update
        assert pass_seconds(held, PEAKS, work, work.tokens, trains=True) == pytest.approx(trained)
        again = replace(held, checkpoints=True)
        more = pass_seconds(again, PEAKS, work, work.tokens, trains=True) - trained
        assert more == pytest.approx(products + others)
    # The host starts 90 operations for each layer forward, twice as many backward, and is slower under FSDP.
    host = replace(PEAKS, launch_s=19e-6)
    assert pass_seconds(held, host, Work(1, 0, 2), 2, trains=True) == pytest.approx(2 * 90 * 3 * 39e-6 + update)


def test_experts_compute_whole_tiles():
    fields = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape = ModelShape.from_fields(fields, "config.json")
    fast = replace(PEAKS, gpu=replace(PEAKS.gpu, memory_bytes_per_s=math.inf))
    experts = 2 * 4 * 3 * 64 * 128 * 128 / 312e12  # of 128 rows each

    def of_experts(tokens, **layout):
        held = megatron(shape, **layout)
        without = replace(held, shape=replace(shape, expert_width=0))
        seconds = [pass_seconds(one, fast, Work(1, 0, tokens), tokens, trains=False) for one in (held, without)]
        return seconds[0] - seconds[1]

    assert of_experts(16) == of_experts(256) == pytest.approx(experts)
    assert of_experts(257) == pytest.approx(2 * experts)
    # Two ranks have two experts each, and the tokens of both: 257 of each are 257 rows of an expert.
    shared = replace(fast, gpu=replace(fast.gpu, link_bytes_per_s=math.inf))
    held = megatron(shape, expert=2, replicas=2)
    without = replace(held, shape=replace(shape, expert_width=0))
    seconds = [pass_seconds(one, shared, Work(1, 0, 257), 257, trains=False) for one in (held, without)]
    assert seconds[0] - seconds[1] == pytest.approx(3 / 2 * experts)


def test_the_host_starts_the_operations_of_experts():
    # Four layers, of which the last two have 4 experts; 60 operations of a layer without, 80 + 6 · 4 of one with them.
    fields = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 100, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    shape, there = ModelShape.from_fields(fields, "config.json"), replace(PEAKS, launch_s=1e-3)

    def launches(trains=False, **layout):
        held = replace(megatron(shape, **layout), trained=0)
        return pass_seconds(held, without_network(there), Work(1, 0, 2), 2, trains) / 1e-3

    assert launches() == pytest.approx(2 * 60 + 2 * 104)
    assert launches(trains=True) == pytest.approx(3 * (2 * 60 + 2 * 104))
    assert launches(expert=2, replicas=2) == pytest.approx(2 * 60 + 2 * 92)
    # The stage with the experts is the slowest, and the other one waits.
    assert launches(pipeline=2) == pytest.approx(2 * 104 * 2)
    held = ModelMemory(shape=shape, layout=RankLayout(is_gathered=False), trained=0)
    assert pass_seconds(held, there, Work(1, 0, 2), 2, False) == pytest.approx((2 * 90 + 2 * 104) * 39 / 19 * 1e-3)


# docs/internals/gpu.md: tokens/s of updates on one H200, with Liger's kernels, without and with gradient checkpointing.
@pytest.mark.parametrize(
    ("rows", "length", "measured"),
    [
        (1, 16384, (28_053, 23_451)),
        (16, 1024, (46_477, 46_503)),
        (1, 8192, (29_060, 19_499)),
        (16, 512, (31_396, 17_381)),
    ],
)
def test_updates_take_as_long_as_was_measured_on_a_gpu(rows, length, measured):
    shape = ModelShape.from_fields(QWEN_600M, "config.json")
    there = Cluster(gpu=gpu_named("h200"), gpus=1, gpus_per_node=1, memory_gb=141)
    for checkpoints, speed in zip((False, True), measured, strict=True):
        held = ModelMemory(shape=shape, layout=RankLayout(), trained=shape.parameters(), checkpoints=checkpoints)
        seconds = pass_seconds(held, there, Work(rows, 0, length), rows * length, trains=True)
        assert rows * length / seconds == pytest.approx(speed, rel=0.2)


def test_an_optimizer_on_the_host():
    # Shards of 1/2 come twice in fp32 and gradients leave in fp32; the optimizer reads and writes 28 bytes a parameter.
    shape = gpt(2, 64, 4)
    held = ModelMemory(
        shape=shape, layout=RankLayout(shards=2), trained=shape.parameters(), checkpoints=False, with_entropy=False
    )
    there, work = replace(cluster(2, 1.0), host_use=1.0), Work(2, 1, 1)
    fast = without_network(there)
    on_host = replace(held, layout=replace(held.layout, is_on_host=True))
    assert (on_host.weights, on_host.gradients, on_host.optimizer) == (0, 0, 0)
    seconds = [pass_seconds(one, fast, work, 4, trains=True) for one in (held, on_host)]
    part = shape.parameters() / 2
    assert seconds[1] - seconds[0] == pytest.approx(part * (8 + 4) / 32e9 + part * 28 / 40e9)


def test_the_slowest_stage_counts():
    # 6 layers in stages of 2 and 4, against 3 and 3; no stage waits in the mean of many passes.
    work, there = Work(64, 8, 8), without_network(cluster(2, 1.0))
    even, uneven = (
        pass_seconds(megatron(gpt(6, 64, 4), pipeline=2, piece_layers=pieces), there, work, 16, trains=True)
        for pieces in ((), (2, 4))
    )
    assert uneven == pytest.approx(even * 4 / 3)
