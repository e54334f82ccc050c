"""Outputs of a model at the response tokens, computed from its hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.plugins.megatron.library import parallel_state, tensor_parallel
from verl.plugins.megatron.model import BuiltModel
from verl.workers.engine.model.divergence import (
    DivergenceStatistics,
    FullDivergence,
    OutputMatrix,
    vocabulary_divergence,
)
from verl.workers.engine.model.head import NO_TOP, LogitRule, TokenStatistics, TopTokens, over_kept
from verl.workers.engine.model.inputs import ModelInputs
from verl.workers.engine.model.outputs import language_outputs
from verl.workers.engine.model.vocab_parallel import vocab_parallel_log_probs


def outputs_at(
    model: BuiltModel,
    model_type: str,
    hidden: Tensor,
    inputs: ModelInputs,
    outputs: frozenset[str],
    temperature: float,
    top: TopTokens = NO_TOP,
    divergence: FullDivergence | None = None,
) -> dict[str, Tensor]:
    """Compute ``outputs`` at N tokens on the last pipeline stage; the same on all ranks of a copy. Collective.

    Args:
        model: this rank's part.
        model_type: a scalar head if it is not ``language_model``.
        hidden: (bsz, length, hidden) of this rank's part of the sequences.
        inputs: of the pass.
        outputs: columns; none computes nothing.
        temperature: divisor of the logits.
        top: number of the most likely tokens.
        divergence: what the output ``divergence`` compares with.
    """
    if not outputs:
        return {}
    states = hidden.flatten(0, 1).index_select(0, inputs.take)
    columns = _at_own_tokens(model, model_type, states, inputs, outputs, temperature, top, divergence)
    return columns if inputs.share is None else {name: inputs.share.collect(x) for name, x in columns.items()}


def _at_own_tokens(
    model: BuiltModel,
    model_type: str,
    states: Tensor,
    inputs: ModelInputs,
    outputs: frozenset[str],
    temperature: float,
    top: TopTokens,
    divergence: FullDivergence | None,
) -> dict[str, Tensor]:
    if model_type != "language_model":
        head = model.last.output_layer
        scalars = torch.nn.functional.linear(states, head.weight, head.bias)
        return dict.fromkeys(outputs, scalars.squeeze(-1).float())
    weight, vocab_size = model.head_weight(), model.text_config.vocab_size
    vocab_size = min(vocab_size, top.below or vocab_size)
    group = parallel_state.get_tensor_model_parallel_group()
    # Adds up the ranks' gradients.
    shared = tensor_parallel.copy_to_tensor_model_parallel_region(states)

    def statistics(**settings: Any) -> TokenStatistics:
        if inputs.kept_ids is not None:
            settings |= {"candidates": inputs.kept_ids.clamp(min=0)}
        full = vocab_parallel_log_probs(shared, weight, inputs.targets, group, vocab_size, temperature, **settings)
        return full if inputs.kept_ids is None else over_kept(full, inputs.kept_ids)

    def from_teachers() -> DivergenceStatistics:
        policy = OutputMatrix(weight=weight, bias=None, rule=LogitRule(), temperature=temperature)
        teachers = inputs.teacher_hidden, inputs.teacher_index
        return vocabulary_divergence(shared, policy, *teachers, divergence, group=group, vocab_size=vocab_size)

    return language_outputs(outputs, states, statistics, inputs.topk_ids, top, from_teachers)
