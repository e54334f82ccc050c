"""Bytes of a model on a rank: by hand, and as published for ZeRO."""

from dataclasses import replace

import pytest

from verl.plugins.plan.memory import LOGITS_AT_ONCE, ModelMemory, RankLayout
from verl.plugins.plan.passes import PassTokens
from verl.plugins.plan.shapes import ModelShape
from verl.workers.engine.model.head import GPU_CHUNK_ELEMENTS

SHAPE = ModelShape.from_fields(
    {
        "model_type": "qwen3",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 10,
        "tie_word_embeddings": False,
    },
    "config.json",
)
# A layer: q and o 2·(8·8), k and v 2·(8·4), feed-forward 3·(8·12), norms 2·8, head norms 2·4 = 504.
# Embedding and head 2·80, last norm 8.
LAYER, ROOT, ALL = 504, 160, 2 * 504 + 160 + 8


def model(**layout):
    return ModelMemory(shape=SHAPE, layout=RankLayout(**layout), trained=SHAPE.parameters())


def test_stored_bytes_by_hand():
    held = model(shards=4)
    assert SHAPE.parameters() == ALL
    assert (held.weights, held.gradients, held.optimizer) == (ALL * 4 / 4, ALL * 4 / 4, ALL * 8 / 4)
    assert held.state == ALL * 12 / 4  # in a checkpoint, or a copy in memory
    frozen = replace(held, trained=0)
    assert (frozen.weights, frozen.gradients, frozen.optimizer) == (ALL, 0, 0)
    # Adapters of 100 parameters are stored, and trained, in fp32.
    lora = replace(model(shards=2, stored_bytes=2), trained=100, adapters=100)
    assert (lora.weights, lora.gradients, lora.optimizer, lora.state) == ((ALL * 2 + 400) / 2, 200, 400, 600)
    # Muon has one moment of the matrices of layers, which are all but the norms, and of adapters.
    muon, matrices = replace(held, is_muon=True), 2 * (504 - 24)
    assert (muon.optimizer, muon.state) == ((ALL * 2 - matrices) * 4 / 4, (ALL * 3 - matrices) * 4 / 4)
    assert replace(lora, is_muon=True).optimizer == 200


def test_megatron_divides_weights_by_layout_and_state_by_copies():
    held = model(tensor=2, pipeline=2, replicas=4, stored_bytes=2, is_gathered=False, is_megatron=True)
    largest = 504 + 80 + 8  # the last stage: a layer, the head and the last norm
    assert held.weights == largest * 2 / 2
    assert held.gradients == largest * 4 / 2
    assert held.optimizer == held.state == largest * 12 / 2 / 4
    # Both moments in bf16, and a quarter of the state in host memory.
    small = replace(held, adam_bytes=4, offload_fraction=0.25)
    assert (small.optimizer, small.state_on_host) == (largest * 8 / 2 / 4 * 3 / 4, largest * 8 / 2 / 4 / 4)
    assert small.state == largest * 8 / 2 / 4


def test_the_largest_stage_counts():
    # Six layers, one stage of one and one of five; a head that is the embedding is on the last stage too.
    six = replace(SHAPE, layers=6)
    uneven = replace(megatron(pipeline=2, piece_layers=(1, 5)), shape=six, trained=six.parameters())
    assert uneven.weights == (5 * 504 + 80 + 8) * 2
    tied = replace(uneven, shape=replace(six, is_tied=True), trained=six.parameters() - 80)
    assert tied.weights == (5 * 504 + 80 + 8) * 2
    # In two pieces each: stage 0 has pieces 0 and 2.
    pieces = replace(uneven, layout=replace(uneven.layout, pieces=2, piece_layers=(1, 1, 3, 1)))
    assert pieces.weights == (4 * 504 + 80) * 2
    # Of (1, 5) the last keeps most, one micro-batch of 5 layers; of (4, 2) the first, two micro-batches of 4.
    # A layer keeps its input, 2·8; a pass angles, 4·4.
    assert uneven.kept_activations(10) == 10 * (5 * 16 + 16)
    first = replace(uneven, layout=replace(uneven.layout, piece_layers=(4, 2)))
    assert first.kept_activations(10) == 10 * 2 * (4 * 16 + 16)


@pytest.mark.parametrize(("gpus", "gigabytes"), [(1, 120), (64, 1.9)])
def test_states_of_mixed_precision_training_are_those_of_zero(gpus, gigabytes):
    # arXiv:1910.02054, figure 1: 7.5 billion parameters take 120 GB, and 1.9 GB where 64 GPUs share all.
    held = model(shards=gpus)
    per_parameter = (held.weights + held.gradients + held.optimizer) / SHAPE.parameters()
    assert per_parameter * 7.5e9 / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_heads_of_multi_token_prediction_are_on_the_last_stage():
    # A head is a layer of 504, a product of 2·8·8 and three norms of 8; in a pipeline it has a copy of the embedding.
    alone, with_head = megatron(), replace(megatron(), heads=1)
    assert with_head.parameters - alone.parameters == 504 + 128 + 24
    assert with_head.weights - alone.weights == (504 + 128 + 24) * 2
    stages = [replace(megatron(pipeline=2), heads=heads) for heads in (0, 1)]
    assert stages[1].weights - stages[0].weights == (504 + 128 + 24 + 80) * 2
    # It keeps its input, or what a layer keeps.
    assert with_head.kept_activations(5) - alone.kept_activations(5) == 5 * 16
    kept = [replace(held, checkpoints=False).kept_activations(5) for held in (alone, with_head)]
    assert kept[1] - kept[0] == 5 * 424


def test_activations_by_hand():
    # Of one token in bf16: norms 2·(4 + 4)·8 = 128, head norms (4 + 2)·(8 + 4) = 72,
    # attention 2·(2·8 + 2·4) = 48, feed-forward 4·2·12 = 96.
    held = model(shards=2)
    assert held.layer_activations(False) == 128 + 72 + 48 + 96
    # Kept with checkpointing: the input of each layer, 2·8, and the last norm's input and value, 6·8.
    assert held.kept_activations(5) == 5 * (2 * 16 + 48)
    assert replace(held, checkpoints=False).kept_activations(5) == 5 * (2 * 344 + 48)


def test_a_training_pass_by_hand():
    held = model(shards=2)
    # While a layer is computed again: inputs of layers, one layer and two gradients of 2·(12 + 8) bytes per token;
    # root and the head's gradient 2·160 + 2·80, two gathered layers and a gradient in bf16 and fp32, 10·504.
    parts = held.training_pass(PassTokens(100, 100, 100))
    assert parts["activations"] == 100 * (80 + 344 + 2 * 2 * 20)
    assert parts["gathered"] == 2 * ROOT + 2 * 80 + 10 * LAYER
    # At the head all of 100·10 logits, four in fp32 and one in bf16, are the most where the vocabulary is large.
    wide = replace(held, shape=replace(SHAPE, vocabulary=10_000))
    assert wide.training_pass(PassTokens(100, 100, 100))["logits"] == 100 * 10_000 * 18
    assert wide.training_pass(PassTokens(100, 50, 100))["logits"] == 50 * 10_000 * 18
    assert LOGITS_AT_ONCE == GPU_CHUNK_ELEMENTS


def test_ranks_that_share_matrices_under_fsdp():
    # Each of 2 x 2 ranks stores a quarter; a pass divides all of the activations above but the norms' 128 by two.
    held = model(shards=2, tensor=2, divides_norms=False)
    assert (held.weights, held.gradients, held.optimizer, held.state) == (ALL, ALL, ALL * 2, ALL * 3)
    assert held.layer_activations(False) == 128 + (72 + 48 + 96) / 2
    parts = held.training_pass(PassTokens(100, 100, 100))
    assert parts["gathered"] == (2 * ROOT + 2 * 80 + 10 * LAYER) / 2


def megatron(**layout):
    return model(stored_bytes=2, is_gathered=False, is_megatron=True, **layout)


def test_activations_under_megatron_by_hand():
    # Norms 128 and head norms 72 as above, attention 2·(3·8 + 3·4) = 72, feed-forward 5·2·12 = 120, rotation
    # 4·2·4 = 32.
    assert megatron().layer_activations(False) == 128 + 72 + 72 + 120 + 32
    assert megatron(tensor=2).layer_activations(False) == (128 + 72 + 72 + 120) / 2 + 32
    assert megatron(tensor=2, divides_norms=False).layer_activations(False) == 128 + (72 + 72 + 120) / 2 + 32
    # With checkpointing: the input of each layer, 2·8, the last norm's 48, and angles, 4·4.
    assert megatron().kept_activations(5) == 5 * (2 * 16 + 48 + 16)
    assert megatron(tensor=2).kept_activations(5) == 5 * ((2 * 16 + 48) / 2 + 16)
    assert replace(megatron(), checkpoints=False).kept_activations(5) == 5 * (2 * 424 + 48)


def test_stages_of_a_pipeline_keep_what_waits_for_its_backward_pass():
    """Four layers. The first stage has no norm before the head, the last one has."""
    four = replace(SHAPE, layers=4)
    two = replace(megatron(pipeline=2), shape=four)
    # First stage: 2 micro-batches of 2 layers with their angles.
    assert two.kept_activations(5) == 5 * 2 * (2 * 16 + 16)
    # Stages of two pieces of a layer: 2 stages · 2 pieces and 1 more wait in the first, 3 in the last.
    pieces = replace(megatron(pipeline=2, pieces=2), shape=four)
    assert pieces.kept_activations(5) == 5 * 5 * (16 + 16)
    # Of pieces of 1, 1, 2 and 0 layers the first stage keeps five passes: two through each of its pieces, of
    # 1 and 2 layers, and one more through the first.
    uneven = replace(pieces, layout=replace(pieces.layout, piece_layers=(1, 1, 2, 0)))
    assert uneven.kept_activations(5) == 5 * ((1 + 1 + 2 + 2 + 1) * 16 + 5 * 16)
    # At the head, with a large vocabulary: 1 micro-batch of 2 layers, or 3 of a layer; the norm's 48, its output, 16,
    # and as much for the responses and for their gradients.
    tokens = PassTokens(5, 5, 5)
    for held, kept in ((two, 2 * 16 + 16), (pieces, 3 * (16 + 16))):
        wide = replace(held, shape=replace(four, vocabulary=10_000), with_entropy=False)
        parts = wide.training_pass(tokens)
        assert parts["activations"] == 5 * (kept + 48 + 3 * 16)
        # Three fp32 copies and the gradient in bf16, and the gradient of the head.
        assert parts["logits"] == 5 * 10_000 * (3 * 4 + 2) + 10_000 * 8 * 2
    wide = replace(two, shape=replace(four, vocabulary=10_000))
    assert wide.training_pass(tokens)["logits"] == 5 * 10_000 * 4 * 4 + 10_000 * 8 * 2
    assert wide.inference_pass(tokens)["logits"] == 5 * 10_000 * 3 * 4


def test_gradients_of_weights_are_in_a_pass_under_megatron():
    # A layer is computed again: 32 + 48 + 16 kept, 424 of it, its gradients 2·2·(12 + 8); and 2·8·12 weights' in bf16.
    assert megatron().training_pass(PassTokens(100, 1, 100))["activations"] == 100 * (96 + 424 + 80) + 2 * 8 * 12 * 2
    # With few tokens the gradient of the embedding is the most.
    wide = replace(megatron(), shape=replace(SHAPE, vocabulary=10_000), outputs=1)
    assert wide.training_pass(PassTokens(1, 1, 1))["activations"] == 10_000 * 8 * 2


def test_ranks_that_share_a_sequence_share_its_activations():
    one, two = (
        model(shards=2).training_pass(PassTokens(4096, 4096, 4096)),
        model(shards=2, sequence=2).training_pass(PassTokens(4096, 4096, 4096)),
    )
    assert two["activations"] == one["activations"] / 2
    assert two["gathered"] == one["gathered"]


def test_ranks_that_share_experts_hold_a_part_of_them():
    # 4 experts of 3 · 64 · 128 in each of 2 layers over 2 ranks of 8, which are 4 copies of 2 tensor-parallel ranks.
    fields = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape = ModelShape.from_fields(fields, "config.json")
    experts, total = 2 * 4 * 3 * 64 * 128, shape.parameters()
    layout = {"tensor": 2, "replicas": 4, "stored_bytes": 2, "is_gathered": False, "is_megatron": True}
    for more, ranks in (({}, 2), ({"expert": 2}, 4), ({"expert": 2, "expert_tensor": 1}, 2)):
        held = ModelMemory(shape=shape, layout=RankLayout(**layout, **more), trained=total)
        part = (total - experts) / 2 + experts / ranks
        assert held.weights == pytest.approx(part * 2)
        assert held.gradients == pytest.approx(part * 4)
        assert held.optimizer == pytest.approx(((total - experts) / 2 / 4 + experts / 8) * 12)  # 8 ranks hold all once
