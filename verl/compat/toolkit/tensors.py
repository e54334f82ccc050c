"""Functions of tensors for trainers that users write: statistics over ranks, log-probs of responses, padding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.compat.toolkit.attention import index_first_axis, pad_input
from verl.errors import DataError, SchemaError
from verl.utils.device import get_device_name
from verl.utils.torch_functional import (
    cosine_factor,
    entropy_from_logits,
    logprobs_from_logits,
    pad_sequence_to_length,
    warmup_factor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# ---- statistics over ranks --------------------------------------------------------------------


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Mean of the entries of all ranks whose mask is 1: Σ_ranks Σ x·m / Σ_ranks Σ m; 0 where nothing is valid.

    Without a process group it is the mean of this process.
    """
    total = torch.stack([(local_tensor * local_mask).sum(), local_mask.sum().to(local_tensor.dtype)])
    _all_reduce(total, dist.ReduceOp.SUM)
    return total[0] / total[1].clamp(min=1)


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Mean, largest and smallest entry, and unbiased standard deviation of the entries of all ranks.

    What is not asked for is None. Without a process group they are those of this process.
    """
    values = local_tensor.double()
    sums = torch.stack([values.sum(), torch.tensor(values.numel(), dtype=torch.float64, device=values.device)])
    _all_reduce(sums, dist.ReduceOp.SUM)
    mean, count = sums[0] / sums[1], sums[1]
    largest, smallest, deviation = None, None, None
    if compute_max:
        largest = _all_reduce(local_tensor.max().clone(), dist.ReduceOp.MAX)
    if compute_min:
        smallest = _all_reduce(local_tensor.min().clone(), dist.ReduceOp.MIN)
    if compute_std:
        squares = _all_reduce(((values - mean) ** 2).sum(), dist.ReduceOp.SUM)
        deviation = (squares / (count - 1)).sqrt().to(local_tensor.dtype)
    return mean.to(local_tensor.dtype), largest, smallest, deviation


def _all_reduce(tensor: Tensor, how: Any) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, op=how)
    return tensor


def broadcast_dict_tensor(tensors: dict[str, Tensor] | TensorDict, src: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite the tensors of all ranks of a group with those of rank ``src``; shapes must agree."""
    for name in sorted(map(str, tensors.keys())):
        dist.broadcast(tensors[name], src, group)


def allgather_dict_into_dict(
    data: Mapping[str, object], group: dist.ProcessGroup | None = None
) -> dict[str, list[object]]:
    """Collect the values of all ranks of a group by name, in the order of the ranks; any values that pickle takes."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(data), group)
    return {name: [rank_values[name] for rank_values in gathered] for name in data}


def compute_grad_norm(model: nn.Module) -> float:
    """Sum of the squares of all gradients of a module on this rank."""
    return float(sum(p.grad.detach().double().square().sum() for p in model.parameters() if p.grad is not None))


# ---- values and log-probs ---------------------------------------------------------------------


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clip element by element between two tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """Entries of the last dimension that ``label`` names: from (..., vocabulary) and (...) to (...)."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Entropy of (tokens, vocabulary) logits, computed for ``chunk_size`` tokens at a time to save memory."""
    return torch.cat([entropy_from_logits(part) for part in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v p_v² of p = softmax(logits), from (..., vocabulary) to (...), in float32."""
    return torch.softmax(logits.float(), dim=-1).square().sum(-1)


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs of the responses, the last ``response_length`` of (bsz, length) tokens with (bsz, length, vocabulary)
    logits of the same positions.
    """
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor, logits_rmpad: Tensor, indices: Tensor, batch_size: int, seqlen: int, response_length: int
) -> Tensor:
    """Log-probs of the responses of packed sequences, (bsz, response_length), 0 on padding.

    Args:
        input_ids_rmpad: (1, tokens) ids of all sequences without padding.
        logits_rmpad: (tokens, vocabulary) logits of the same positions.
        indices: (tokens,) place of each in the padded (bsz · seqlen) tokens, from ``unpad_input``.
        batch_size: number of sequences.
        seqlen: length of the padded sequences.
        response_length: tokens at the end of each that are its response.
    """
    following = torch.roll(input_ids_rmpad.squeeze(0), shifts=-1)
    packed = logprobs_from_logits(logits_rmpad, following)
    padded = pad_input(packed.unsqueeze(-1), indices, batch_size, seqlen).squeeze(-1)
    return padded[:, -response_length - 1 : -1]


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Log-probs of the responses of (bsz, length) tokens whose logits (tokens, vocabulary) have no padding."""
    indices = attention_mask.flatten().nonzero().flatten()
    packed = index_first_axis(input_ids.reshape(-1, 1), indices).T
    batch_size, seqlen = input_ids.shape
    return log_probs_from_logits_all_rmpad(packed, logits_rmpad, indices, batch_size, seqlen, response_length)


def post_process_logits(
    input_ids: Tensor | None, logits: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Divide logits by the temperature, in place; ``top_k`` and ``top_p`` must be off (0 and 1).

    Raises:
        ValueError: they are on: log-probs of training are those of the whole distribution.
    """
    if top_k not in (0, -1) or top_p != 1.0:
        raise ValueError(f"top_k={top_k} and top_p={top_p} would change the distribution; use top_k=0 and top_p=1.0.")
    return logits.div_(temperature) if temperature != 1.0 else logits


# ---- padding and shapes -----------------------------------------------------------------------


def expand_as_nested(tensor: Tensor, nested_tensor: Tensor) -> Tensor:
    """Repeat the values of (bsz,), one per sequence, for each token of a jagged tensor (bsz, j).

    Returns:
        a jagged tensor with the offsets of ``nested_tensor``.
    """
    if not nested_tensor.is_nested or nested_tensor.layout != torch.jagged:
        raise SchemaError("expand_as_nested needs a nested tensor of layout torch.jagged as its second argument.")
    if tensor.ndim != 1 or len(tensor) != nested_tensor.size(0):
        raise SchemaError(f"one value per sequence is needed: {nested_tensor.size(0)}, got {tuple(tensor.shape)}.")
    offsets: Tensor = nested_tensor.offsets()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return torch.nested.nested_tensor_from_jagged(tensor.repeat_interleave(offsets.diff()), offsets)


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Cut a TensorDict into parts of ``batch_size`` rows, which must divide it."""
    if len(tensors) % batch_size:
        raise SchemaError(f"{len(tensors)} rows do not divide into batches of {batch_size}.")
    return list(tensors.split(batch_size))


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Places of the tokens of a (bsz, length) mask, (tokens,); ends of the sequences, (bsz + 1,); longest length."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return attention_mask.flatten().nonzero().flatten(), ends, int(lengths.max())


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Token ids of each row without padding."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or cut (bsz, length) token ids and their mask to ``max_length``.

    Args:
        input_ids: token ids.
        attention_mask: 1 on tokens.
        max_length: length of the results.
        pad_token_id: id of the padding.
        left_pad: pad on the left.
        truncation: what to do with longer rows: ``left`` keeps their end, ``right`` their start, ``middle`` half of
            either, ``error`` raises.

    Raises:
        DataError: rows are too long with ``truncation="error"``.
        ValueError: ``truncation`` is none of these.
    """
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"truncation={truncation!r} is unknown. Use left, right, middle or error.")
    length = input_ids.shape[-1]
    if length > max_length and truncation == "error":
        raise DataError(f"rows of {length} tokens are longer than max_length={max_length}.")
    if length > max_length:
        front = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
        places = [*range(front), *range(length - (max_length - front), length)]
        return input_ids[:, places], attention_mask[:, places]
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Tokenize a text without special tokens, then :func:`postprocess_data`; both results are (1, max_length)."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def prepare_decoder_attention_mask(attention_mask: Tensor | None, input_shape: Any, inputs_embeds: Tensor) -> Tensor:
    """Additive causal mask (bsz, 1, length, length): 0 where a token is attended to, else the smallest number."""
    batch, length = input_shape
    seen = torch.ones(length, length, dtype=torch.bool, device=inputs_embeds.device).tril().expand(batch, 1, -1, -1)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :].bool()
    return torch.zeros(seen.shape, dtype=inputs_embeds.dtype, device=inputs_embeds.device).masked_fill(
        ~seen, torch.finfo(inputs_embeds.dtype).min
    )


# ---- schedules and devices --------------------------------------------------------------------


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Learning rate with warm-up, then constant for ``stable_ratio`` of the rest, then a cosine decay.

    Args:
        optimizer: its learning rates are the peak.
        num_warmup_steps: steps of the linear warm-up.
        num_training_steps: step at which the decay ends.
        min_lr_ratio: final rate as a fraction of the peak.
        num_cycles: cosine periods of the decay; 0.5 is one descent.
        last_epoch: step to resume from.
        stable_ratio: fraction of the steps after the warm-up with the peak rate.
    """
    stable = int((num_training_steps - num_warmup_steps) * stable_ratio)
    start = num_warmup_steps + stable

    def factor(step: int) -> float:
        if step < start:
            return warmup_factor(step, num_warmup_steps)
        return cosine_factor(step - start, 0, num_training_steps - start, min_lr_ratio, num_cycles)

    return LambdaLR(optimizer, factor, last_epoch)


@contextlib.contextmanager
def check_device_is_available() -> Iterator[None]:
    """Refuse to run the block without a GPU.

    Raises:
        RuntimeError: there is none.
    """
    if get_device_name() == "cpu":
        raise RuntimeError("this needs a GPU, and PyTorch finds none on this machine.")
    yield
