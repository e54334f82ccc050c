"""What a model computes at the response tokens, from its hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.workers.engine.fsdp.inputs import ModelInputs
from verl.workers.engine.megatron.library import parallel_state, tensor_parallel
from verl.workers.engine.megatron.model import BuiltModel
from verl.workers.engine.megatron.vocab_parallel import vocab_parallel_log_probs


def outputs_at(
    model: BuiltModel,
    model_type: str,
    hidden: Tensor,
    inputs: ModelInputs,
    outputs: frozenset[str],
    temperature: float,
) -> dict[str, Tensor]:
    """Compute ``outputs``, (N,) each, on the last pipeline stage; the same on all ranks of a copy. Collective.

    Args:
        model: this rank's part.
        model_type: a scalar head if it is not ``language_model``.
        hidden: (bsz, length, hidden) of this rank's part of the sequences.
        inputs: of the pass.
        outputs: columns; none computes nothing.
        temperature: divisor of the logits.
    """
    columns = _at_own_tokens(model, model_type, hidden, inputs, outputs, temperature) if outputs else {}
    return columns if inputs.share is None else {name: inputs.share.collect(x) for name, x in columns.items()}


def _at_own_tokens(
    model: BuiltModel,
    model_type: str,
    hidden: Tensor,
    inputs: ModelInputs,
    outputs: frozenset[str],
    temperature: float,
) -> dict[str, Tensor]:
    chosen = hidden.flatten(0, 1).index_select(0, inputs.take)
    if model_type != "language_model":
        head = model.last.output_layer
        scalars = torch.nn.functional.linear(chosen, head.weight, head.bias)
        return dict.fromkeys(outputs, scalars.squeeze(-1).float())
    statistics = vocab_parallel_log_probs(
        tensor_parallel.copy_to_tensor_model_parallel_region(chosen),  # adds up the ranks' gradients
        model.head_weight(),
        inputs.targets,
        parallel_state.get_tensor_model_parallel_group(),
        model.hf_config.vocab_size,
        temperature,
        with_entropy="entropy" in outputs,
        with_sum_pi_squared="sum_pi_squared" in outputs,
    )
    return {name: values for name, values in statistics._asdict().items() if values is not None}
