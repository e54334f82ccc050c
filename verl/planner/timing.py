"""Seconds of generation and of passes, from FLOPs and bytes.

A pass takes its useful FLOPs over what the ranks reach of their peak; gradient checkpointing adds one forward pass.
FSDP's collectives run meanwhile: a pass takes as long as the slower of both; what ranks that share sequences exchange
is added. A rank of Megatron takes at least as long as it reads its weights, and adds to its gradients, in every
micro-batch; the time of its collectives is added, and the stages of a pipeline wait (p - 1)/(v·m) of the computation
for each other (arXiv:2104.04473, section 2.2), with p stages of v pieces and m micro-batches in an optimizer step. A
decoding step reads the weights and all keys and values once,
and takes as long as the slower of reading and computing; engines of several ranks add up twice in each layer. Weights
and optimizer state that leave the device between passes are moved there and back. What is not counted: reward
functions, the driver, the start of kernels, sequences that end at different times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.planner.hardware import Cluster
from verl.planner.memory import ModelMemory


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
    counter = model.shape.flops(model.outputs, is_frozen=model.adapters > 0)
    length = work.prompt + work.response
    spared = 1 - work.prompts_per_row  # prompts of each row that another one has
    forward = counter.forward_flops([length], work.response) - spared * counter.forward_flops([work.prompt], 0)
    flops = forward
    if trains:
        flops = counter.training_flops([length], work.response) - spared * counter.training_flops([work.prompt], 0)
    if trains and model.checkpoints:
        flops += forward
    computing = work.rows * flops / lay.ranks_per_model / cluster.flops
    if lay.is_megatron:
        count = math.ceil(work.tokens / updates / micro_batch_tokens)
        waiting = (lay.pipeline - 1) / lay.pieces / count
        passes = 1 + trains * (1 + model.checkpoints)
        read = passes * model.weights + (2 * model.gradients if trains else 0)
        computing = max(computing, updates * count * read / cluster.memory_bytes_per_s)
        exchanging = passes * work.tokens * _seconds_per_token(model, cluster)
        return computing * (1 + waiting) + exchanging + (updates * _sum_of_gradients(model, cluster) if trains else 0)
    if lay.sequence > 1:
        passes = 1 + trains * (1 + model.checkpoints)
        computing += passes * work.tokens * _seconds_of_shared_sequences(model, cluster)
    if lay.shards * lay.replicas == 1:
        return computing
    count = math.ceil(work.tokens / micro_batch_tokens)
    size = model.shape.parameters(model.outputs)
    others = (lay.shards - 1) / lay.shards
    gathers = 2 if trains and lay.reshards else 1
    per_pass = size * lay.compute_bytes * gathers + (size * 4 if trains and model.trained else 0)
    exchanging = count * per_pass * others / cluster.exchange_bytes_per_s(lay.shards)
    if trains and lay.replicas > 1:  # ranks with equal shards add their gradients, in fp32, after every pass
        summing = 2 * model.trained * 4 / lay.shards * (lay.replicas - 1) / lay.replicas
        exchanging += count * summing / cluster.exchange_bytes_per_s(cluster.gpus)
    return max(computing, exchanging)


def moving_seconds(moved_bytes: float, cluster: Cluster) -> float:
    """Seconds in which a rank moves so many bytes from the host's memory to its device, and back."""
    return 2 * moved_bytes / cluster.host_bytes_per_s


def _seconds_of_shared_sequences(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which ranks that share a sequence exchange queries, keys, values and outputs of one of its tokens."""
    s, lay = model.shape, model.layout
    sent = (2 * s.attention_width + 2 * s.kv_width) * lay.compute_bytes * (lay.sequence - 1) / lay.sequence
    return sent * s.layers / lay.sequence / cluster.exchange_bytes_per_s(lay.sequence)


def _seconds_per_token(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which a rank of Megatron exchanges what a forward pass over one token needs of others.

    In each layer tensor-parallel ranks add up twice, which sends (t - 1)/t of the hidden states two times; ranks that
    share a sequence exchange queries, keys, values and outputs; those that share experts send each token to the experts
    chosen for it, and back. A backward pass exchanges as much.
    """
    s, lay, b = model.shape, model.layout, model.layout.compute_bytes
    hidden = s.hidden * b
    sums = 2 * 2 * hidden * (lay.tensor - 1) / lay.tensor
    heads = (2 * s.attention_width + 2 * s.kv_width) * b / lay.tensor * (lay.sequence - 1) / lay.sequence
    sparse = 1 - s.dense_layers / s.layers
    routed = 2 * sparse * s.active_experts * hidden / lay.tensor * (lay.expert - 1) / lay.expert
    of_layer = (
        sums / cluster.exchange_bytes_per_s(lay.tensor)
        + heads / cluster.exchange_bytes_per_s(lay.tensor * lay.sequence)
        + routed / cluster.exchange_bytes_per_s(lay.tensor * lay.expert)
    )
    between = hidden / lay.tensor * lay.pieces if lay.pipeline > 1 else 0
    per_token = of_layer * s.layers / lay.pipeline + between / cluster.exchange_bytes_per_s(lay.ranks_per_model)
    return per_token / lay.sequence


def _sum_of_gradients(model: ModelMemory, cluster: Cluster) -> float:
    """Seconds in which ranks with equal parts of the model add their gradients, in fp32, and fetch new weights."""
    lay = model.layout
    others = (lay.replicas - 1) / lay.replicas
    return others * (model.gradients + model.weights) / cluster.exchange_bytes_per_s(cluster.gpus)


def generation_seconds(
    model: ModelMemory,
    cluster: Cluster,
    work: Work,
    tensor: int,
    rows_at_once: int,
    bytes_per_number: int,
    pipeline: int = 1,
) -> float:
    """Seconds in which an engine answers all rows of ``work``, ``rows_at_once`` at a time.

    ``tensor`` ranks share each weight matrix, ``pipeline`` times as many the layers.
    """
    shape, counter, ranks = model.shape, model.shape.flops(), tensor * pipeline
    at_once = min(work.rows, rows_at_once)
    rounds = work.rows / at_once  # a row that ends makes room for the next one
    prompts = work.rows * counter.forward_flops([work.prompt], 1) / ranks / cluster.flops
    weights = shape.parameters() * bytes_per_number
    length = work.prompt + work.response / 2
    keys = shape.kv_bytes(bytes_per_number) / min(tensor, shape.kv_heads)  # more ranks than key heads repeat them
    reading = (weights / tensor + at_once * length * keys) / pipeline / cluster.memory_bytes_per_s
    added = counter.forward_flops([round(length)]) - counter.forward_flops([round(length) - 1])
    computing = at_once * added / ranks / cluster.flops
    sums = 2 * shape.layers if tensor > 1 else 0
    sent = 2 * (tensor - 1) / tensor * shape.hidden * bytes_per_number / cluster.exchange_bytes_per_s(tensor)
    prompts += sums / pipeline * work.rows * work.prompt * sent
    exchanging = sums / pipeline * (cluster.sum_latency_s + at_once * sent)
    return prompts + rounds * work.response * (max(reading, computing) + exchanging)
