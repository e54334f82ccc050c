"""Seconds of generation and of passes, from FLOPs and bytes.

A pass takes its useful FLOPs over what the ranks reach of their peak; gradient checkpointing adds one forward pass.
FSDP's collectives run meanwhile: a pass takes as long as the slower of both. A decoding step reads the weights and all
keys and values once, and takes as long as the slower of reading and computing. What is not counted: reward functions,
the driver, the start of kernels, sequences that end at different times.
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


def pass_seconds(model: ModelMemory, cluster: Cluster, work: Work, micro_batch_tokens: float, trains: bool) -> float:
    """Seconds of a pass over all rows, of which ``micro_batch_tokens`` go through the model at a time."""
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
    if lay.is_megatron or lay.shards == 1:
        return computing
    count = math.ceil(work.tokens / micro_batch_tokens)
    size = model.shape.parameters(model.outputs)
    others = (lay.shards - 1) / lay.shards
    gathers = 2 if trains and lay.reshards else 1
    per_pass = size * lay.compute_bytes * gathers + (size * 4 if trains and model.trained else 0)
    exchanging = count * per_pass * others / cluster.exchange_bytes_per_s(lay.shards)
    return max(computing, exchanging)


def generation_seconds(
    model: ModelMemory, cluster: Cluster, work: Work, ranks: int, rows_at_once: int, bytes_per_number: int
) -> float:
    """Seconds in which an engine of ``ranks`` ranks answers all rows of ``work``, ``rows_at_once`` at a time."""
    shape, counter = model.shape, model.shape.flops()
    at_once = min(work.rows, rows_at_once)
    rounds = work.rows / at_once  # a row that ends makes room for the next one
    prompts = work.rows * counter.forward_flops([work.prompt], 1) / ranks / cluster.flops
    weights = shape.parameters() * bytes_per_number
    length = work.prompt + work.response / 2
    reading = (weights + at_once * length * shape.kv_bytes(bytes_per_number)) / ranks / cluster.memory_bytes_per_s
    added = counter.forward_flops([round(length)]) - counter.forward_flops([round(length) - 1])
    computing = at_once * added / ranks / cluster.flops
    return prompts + rounds * work.response * max(reading, computing)
