"""Seconds of passes of the training engine, from the FLOPs and bytes of their operations.

A pass over a micro-batch takes, on each rank,

    products     the slower of their FLOPs and of reading their weights; the rows of an expert count as whole tiles
    attention    its FLOPs
    others       bytes that norms, rotations, gates, sums and the sorting of tokens by expert read and write
    the head     the same, and what log-probs and entropies read and write of the logits

and at least as long as the host takes to start its operations. A backward pass takes twice as much, and gradient
checkpointing adds a forward pass. FSDP's collectives run meanwhile: a pass takes as long as the slower of both; what
ranks that share sequences or matrices exchange is added. Under Megatron the time of collectives is added, and the
stages of a pipeline wait (p - 1)/(v·m) of the computation of the slowest stage for each other (arXiv:2104.04473,
section 2.2), with p stages of v pieces and m micro-batches in an optimizer step. Weights and optimizer state that leave
the device between passes are moved there and back. With `--mfu` products, attention and others take the FLOPs of the
model over that share of the peak. Passes of several ranks take longer than their operations, by a factor that the plan
of a step applies (:mod:`verl.plugins.plan.constants`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl.plugins.plan import constants
from verl.plugins.plan.hardware import Cluster
from verl.plugins.plan.memory import ModelMemory

_TILE = 128
"""Rows that a matrix product of a pass takes at a time."""
_EXPERT_COPIES = 6
"""Times that a pass reads or writes the tokens' copies for their experts: to sort them by rank and by expert, back, and
to add them up."""
_OPTIMIZER_BYTES = 28
"""Bytes that Adam reads and writes for each parameter, all in fp32: gradient, weight and two moments."""


@dataclass(frozen=True)
class Work:
    """Rows of one step on one group of ranks that share a model's rows."""

    rows: int
    prompt: int
    response: int
    """Tokens of a response."""
    prompts_per_row: float = 1.0
    """Prompts that passes compute for each row: fewer than 1 where rows share them. A rollout computes each once or
    more, whatever this says."""

    @property
    def tokens(self) -> float:
        """Tokens of all rows that passes compute."""
        return self.rows * (self.prompt * self.prompts_per_row + self.response)


def pass_seconds(
    model: ModelMemory, cluster: Cluster, work: Work, micro_batch_tokens: float, trains: bool, updates: int = 1
) -> float:
    """Seconds of a pass over all rows, of which ``micro_batch_tokens`` go through the model at a time.

    ``updates`` is the number of optimizer steps among which the rows are divided.
    """
    lay = model.layout
    count = math.ceil(work.tokens / updates / micro_batch_tokens)
    computing = updates * count * _pass(model, cluster, work, work.tokens / updates / count, trains)
    if lay.is_megatron:
        computing *= 1 + (lay.pipeline - 1) / lay.pieces / count  # stages wait for each other
    passes = 1 + trains * (1 + model.checkpoints)
    if trains and (cluster.mfu is None or lay.is_on_host):
        computing += updates * _optimizer_seconds(model, cluster)
    if trains:
        computing += updates * moving_seconds(model.state_on_host, cluster)
    if lay.is_megatron:
        exchanging = passes * work.tokens * _seconds_per_token(model, cluster)
        return computing + exchanging + (updates * _sum_of_gradients(model, cluster) if trains else 0)
    if lay.sequence > 1:
        computing += passes * work.tokens * _seconds_of_shared_sequences(model, cluster)
    if lay.tensor > 1:
        computing += passes * work.tokens * _seconds_per_token(model, cluster)
    if lay.is_on_host:  # shards come from the host's memory for every gather, and gradients go there
        moved = (1 + (trains and lay.reshards)) * lay.stored_bytes * model.shape.parameters(model.outputs)
        moved = (moved + trains * model.trained * 4) / lay.shards / lay.tensor
        computing += updates * count * moved / cluster.host_bytes_per_s
    if lay.shards * lay.replicas == 1:
        return computing
    size = model.shape.parameters(model.outputs) / lay.tensor
    foreign_share = (lay.shards - 1) / lay.shards
    gathers = 2 if trains and lay.reshards else 1
    per_pass = size * lay.compute_bytes * gathers + trains * model.trained / lay.tensor * 4
    exchanging = updates * count * per_pass * foreign_share / cluster.gather_bytes_per_s(lay.shards, apart=lay.tensor)
    if trains and lay.replicas > 1:  # ranks with equal shards add their gradients, in fp32, after every pass
        summing = 2 * model.trained * 4 / lay.shards / lay.tensor * (lay.replicas - 1) / lay.replicas
        between = cluster.gather_bytes_per_s(lay.replicas, apart=lay.shards * lay.tensor)
        exchanging += updates * count * summing / between
    return max(computing, exchanging)


def moving_seconds(moved_bytes: float, cluster: Cluster) -> float:
    """Seconds in which a rank moves so many bytes from the host's memory to its device, and back."""
    if cluster.pins_host_memory:
        return 2 * moved_bytes / cluster.host_bytes_per_s
    return moved_bytes * (1 / constants.TO_FRESH_MEMORY_BYTES_PER_S + 1 / constants.FROM_PAGEABLE_BYTES_PER_S)


def _pass(model: ModelMemory, cluster: Cluster, work: Work, tokens: float, trains: bool) -> float:
    """Seconds in which the slowest rank computes one pass over ``tokens`` tokens, of all ranks that share them."""
    s, lay = model.shape, model.layout
    # In units of a forward pass: products with frozen weights have no gradients of these.
    forwards = 1 + trains * model.checkpoints
    per_row = work.prompt * work.prompts_per_row + work.response
    length = work.prompt + work.response
    launch_s = cluster.launch_s * (1 if lay.is_megatron else constants.FSDP_LAUNCH) * (forwards + 2 * trains)
    heads = model.heads if trains else 0
    launching = _slowest_stage_sum(model, lambda is_sparse: _launches(model, is_sparse) * launch_s, heads)
    if cluster.mfu is not None:
        counter = s.flops(model.outputs, is_frozen=model.adapters > 0, heads=model.heads)
        spared = 1 - work.prompts_per_row
        flops = counter.forward_flops([length], work.response) - spared * counter.forward_flops([work.prompt], 0)
        if trains:
            again = flops * model.checkpoints
            flops = counter.training_flops([length], work.response)
            flops += again - spared * counter.training_flops([work.prompt], 0)
        share = _slowest_stage_sum(model, lambda _: 1.0) * lay.pipeline / s.layers
        return share * tokens / per_row * flops / lay.ranks_per_model / (cluster.gpu.peak_flops * cluster.mfu)
    pairs = length * (length + 1) / 2 - (1 - work.prompts_per_row) * work.prompt * (work.prompt + 1) / 2
    attention = tokens / per_row * pairs * 2 * (s.attention_width + s.output_width) / lay.tensor / lay.sequence
    attending = (forwards + 2 * trains) * attention / cluster.attention_flops

    def of_layer(is_sparse: bool) -> float:
        products = (forwards + trains * (1 if model.adapters else 2)) * _products(model, cluster, tokens, is_sparse)
        return products + attending + (forwards + 2 * trains) * _other_operations(model, cluster, tokens, is_sparse)

    computing = _slowest_stage_sum(model, of_layer, heads)
    computing += (1 + heads) * _head(model, cluster, tokens / per_row * work.response, trains)
    return max(computing, launching) + _weights_of_pass(model, cluster, trains)


def _slowest_stage_sum(model: ModelMemory, layer_seconds: Callable[[bool], float], heads: int = 0) -> float:
    """Return the largest sum over the layers of a pipeline stage, whose last one has heads, each with a layer.

    ``layer_seconds`` is told whether a layer has experts.
    """
    s = model.shape
    values = {is_sparse: layer_seconds(is_sparse) for is_sparse in s.kinds}
    sums = [0.0] * model.layout.pipeline
    for piece, ends in enumerate(model.layout.piece_ranges(s.layers)):
        for is_sparse, count in zip((False, True), s.layers_between(*ends), strict=True):
            sums[piece % len(sums)] += count * values.get(is_sparse, 0.0)
    sums[-1] += heads * values[s.layers - 1 in s.sparse_layers]
    return max(sums)


def _launches(model: ModelMemory, is_sparse: bool) -> float:
    """Operations of a layer's forward pass."""
    lay = model.layout
    launches = constants.LAUNCHES_OF_LAYER["megatron" if lay.is_megatron else "fsdp"][is_sparse]
    if lay.is_megatron and is_sparse:
        launches += constants.LAUNCHES_OF_EXPERT * model.shape.experts / lay.expert
    return launches


def _products(model: ModelMemory, cluster: Cluster, tokens: float, is_sparse: bool) -> float:
    """Seconds of the matrix products of a rank's part of a layer, forward."""
    s, lay = model.shape, model.layout
    rest, experts = s.matrices_of_layer(is_sparse)
    read = lay.compute_bytes / cluster.memory_bytes_per_s
    seconds = rest / lay.tensor * max(2 * tokens / lay.sequence / cluster.product_flops, read)
    if is_sparse:
        held = experts / lay.expert_ranks if lay.is_megatron else experts
        # Tokens of all ranks that hold the experts of a layer together; under FSDP a rank has them all.
        group_tokens = tokens / lay.sequence * (lay.expert_ranks / lay.tensor if lay.is_megatron else 1)
        rows = group_tokens * s.active_experts / s.experts
        tiles = math.ceil(rows / _TILE) * _TILE
        seconds += held * max(2 * tiles / cluster.product_flops, read)
    return seconds


def _other_operations(model: ModelMemory, cluster: Cluster, tokens: float, is_sparse: bool) -> float:
    """Seconds of what a rank's part of a layer reads and writes besides products and attention, forward."""
    s, lay = model.shape, model.layout
    width = s.active_experts * s.expert_width + s.shared_width if is_sparse else s.feed_forward
    # Two norms and two sums of hidden states; rotation of queries and keys; the gate.
    numbers = 10 * s.hidden + (2 + 2 * s.has_head_norms) * (s.attention_width + s.kv_width) + 3 * width
    numbers += 2 * s.latent.ranks if s.latent else 0
    numbers += s.active_experts * s.hidden * _EXPERT_COPIES if is_sparse else 0
    return tokens * numbers * lay.compute_bytes / lay.tensor / lay.sequence / cluster.memory_bytes_per_s


def _head(model: ModelMemory, cluster: Cluster, responses: float, trains: bool) -> float:
    """Seconds of log-probs and entropies on a rank with the head; its logits are computed again for their gradient."""
    s, lay = model.shape, model.layout
    if model.outputs is not None:
        return 0.0
    logits = responses * s.vocabulary / lay.tensor / lay.sequence
    products = (4 if trains else 1) * 2 * logits * s.hidden / cluster.product_flops
    return products + logits * constants.LOGIT_BYTES[trains] / cluster.memory_bytes_per_s


def _weights_of_pass(model: ModelMemory, cluster: Cluster, trains: bool) -> float:
    """Seconds in which a rank copies gathered weights, and converts or adds gradients, once in every pass."""
    lay, size = model.layout, model.shape.parameters(model.outputs) / model.layout.tensor
    if lay.is_megatron:  # gradients in the format of the computation, added to buffers in fp32
        moved = model.gradients / 4 * (lay.compute_bytes + 2 * 4) if trains else 0.0
    elif lay.is_gathered:
        moved = size * 2 * lay.compute_bytes * (2 if trains and lay.reshards else 1)
        moved += size * (lay.compute_bytes + 4) if trains and not model.adapters else 0.0
    else:
        moved = 0.0
    return moved / cluster.memory_bytes_per_s


def _optimizer_seconds(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds of a rank's optimizer step."""
    lay, moved = model.layout, model.state / 12 * _OPTIMIZER_BYTES
    return moved / (cluster.host_memory_bytes_per_s if lay.is_on_host else cluster.memory_bytes_per_s)


def _seconds_of_shared_sequences(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which ranks that share a sequence exchange queries, keys, values and outputs of one of its tokens."""
    s, lay = model.shape, model.layout
    width = s.attention_width + s.keys_and_values + s.output_width
    sent = width * lay.compute_bytes * (lay.sequence - 1) / lay.sequence
    return sent * s.layers / lay.sequence / cluster.exchange_bytes_per_s(lay.sequence)


def _seconds_per_token(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which a rank exchanges what a forward pass over one token needs of others.

    In each layer tensor-parallel ranks add up twice, which sends (t - 1)/t of the hidden states two times; ranks that
    share a sequence exchange queries, keys, values and outputs; those that share experts send each token to the experts
    chosen for it, and back. A backward pass exchanges as much.
    """
    s, lay, b = model.shape, model.layout, model.layout.compute_bytes
    hidden = s.hidden * b
    sums = 2 * 2 * hidden * (lay.tensor - 1) / lay.tensor
    width = s.attention_width + s.keys_and_values + s.output_width
    heads = width * b / lay.tensor * (lay.sequence - 1) / lay.sequence
    routed = 2 * s.active_experts * hidden / lay.tensor * (lay.expert - 1) / lay.expert
    dense_seconds = sums / cluster.gather_bytes_per_s(lay.tensor)
    dense_seconds += heads / cluster.exchange_bytes_per_s(lay.sequence, apart=lay.tensor)
    sparse_seconds = dense_seconds + routed / cluster.exchange_bytes_per_s(lay.expert)
    between = hidden / lay.tensor * lay.pieces if lay.pipeline > 1 else 0
    is_far = lay.ranks_per_model > cluster.joined
    bandwidth = (cluster.network_bytes_per_s if is_far else cluster.gpu.link_bytes_per_s) * cluster.link_use
    layer_seconds = _slowest_stage_sum(model, lambda is_sparse: sparse_seconds if is_sparse else dense_seconds)
    return (layer_seconds + between / bandwidth) / lay.sequence


def _sum_of_gradients(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which ranks with equal parts of the model add their gradients, in fp32, and fetch new weights."""
    lay = model.layout
    foreign_share = (lay.replicas - 1) / lay.replicas
    return (
        foreign_share * (model.gradients + model.weights) / cluster.gather_bytes_per_s(lay.replicas, apart=lay.tensor)
    )
