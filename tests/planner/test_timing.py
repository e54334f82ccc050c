"""Seconds of passes and of generation: by hand, and against published runs."""

import math
from dataclasses import replace

import pytest

from verl.planner.hardware import Cluster, gpu_named
from verl.planner.memory import ModelMemory, RankLayout
from verl.planner.shapes import ModelShape
from verl.planner.timing import Work, generation_seconds, moving_seconds, pass_seconds


def gpt(layers, hidden, heads, vocabulary=51200):
    """A shape with the weights of GPT: two matrices of width 4·hidden are as large as three of width 8/3·hidden."""
    fields = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelShape.of(fields, "config.json")


def cluster(gpus, mfu, name="a100"):
    return Cluster(gpu=gpu_named(name), gpus=gpus, gpus_per_node=8, memory_gb=80, mfu=mfu)


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
    held = megatron(ModelShape.of(fields, "config.json"), expert=2, replicas=2)
    there, work = cluster(2, 0.5), Work(2, 8, 8)
    with_it, without = (pass_seconds(held, c, work, 16, trains=False) for c in (there, without_network(there)))
    assert (with_it - without) * 300e9 == pytest.approx(32 * 2 * 2 * 2 * 128 / 2)


def test_small_micro_batches_wait_for_the_network():
    # 2 nodes: 15/16 of the weights come over 50 GB/s, twice in bf16, and gradients leave in fp32, for each micro-batch.
    shape = gpt(2, 64, 4)
    held = ModelMemory(shape=shape, layout=RankLayout(shards=16), trained=shape.parameters())
    found = pass_seconds(held, cluster(16, 0.5), Work(4, 1, 1), 2, trains=True)
    assert found == pytest.approx(4 * shape.parameters() * 8 * 15 / 16 / 50e9)


def test_decoding_reads_weights_and_keys_by_hand():
    # One row, a prompt of 2 and 4 tokens to draw: each step reads the weights in bf16 and keys and values of 2 + 4/2
    # tokens, from 0.6 · 2.039e12 bytes/s; arithmetic is faster.
    shape = gpt(2, 64, 4)
    held = ModelMemory(shape=shape, layout=RankLayout(), trained=0)
    there = cluster(1, 0.4)
    step = (shape.parameters() * 2 + 4 * 2 * 2 * 64 * 2) / (0.6 * 2.039e12)
    prompt = shape.flops().forward_flops([2], 1) / (0.4 * 312e12)
    one = generation_seconds(held, there, Work(1, 2, 4), 1, 8, 2)
    assert one == pytest.approx(prompt + 4 * step)
    # Rows that do not fit at once wait: eight rows by two take four times as long as two.
    two, eight = (generation_seconds(held, there, Work(rows, 2, 4), 1, 2, 2) for rows in (2, 8))
    assert eight == pytest.approx(4 * two)
    # Two ranks read half each, and in each of the layers add up twice: 20 us, and half of the hidden states twice.
    shared = generation_seconds(held, there, Work(1, 2, 4), 2, 8, 2)
    added = 2 * shape.layers * (20e-6 + 2 * 1 / 2 * 64 * 2 / 300e9)
    prompts = prompt / 2 + 2 * shape.layers * 2 * (2 * 1 / 2 * 64 * 2 / 300e9)
    assert shared == pytest.approx(prompts + 4 * (step / 2 + added))
    assert moving_seconds(50e9, there) == 4  # there and back at 25 GB/s


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
    assert seconds(shards=16) == pytest.approx(8 * size * 15 / 16 / 50e9)


def test_ranks_that_share_sequences_exchange_heads():
    shape, there, work = gpt(2, 64, 4), cluster(8, 1.0), Work(2, 1024, 1024)

    def seconds(sequence, there=there):
        layout = RankLayout(sequence=sequence, is_gathered=False)
        held = ModelMemory(shape=shape, layout=layout, trained=1, checkpoints=True)
        return pass_seconds(held, there, work, 4096, trains=True)

    # 3 passes of 4,096 tokens in 2 layers: each of 2 ranks sends half of its half, queries, keys, values and outputs.
    exchanged = 3 * 4096 * 2 * 4 * 64 * 2 / 2 / 2 / 300e9
    assert seconds(2) - seconds(2, without_network(there)) == pytest.approx(exchanged)


def test_short_passes_of_megatron_take_as_long_as_their_weights_are_read():
    shape = gpt(2, 64, 4)
    held, there = megatron(shape), without_network(cluster(1, 1.0))
    # 4 passes of 2 tokens: forward and backward read weights in bf16, and gradients in fp32 are read and written.
    found = pass_seconds(held, there, Work(4, 1, 1), 2, trains=True)
    assert found == pytest.approx(4 * shape.parameters() * (2 * 2 + 2 * 4) / (0.6 * 2.039e12))
