"""Training data of clients: checks of it, and batches for the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.plugins.serve.losses import LOSSES, NAMES, SETTINGS
from verl.plugins.serve.messages import Datum
from verl.plugins.serve.refusals import RefusedError
from verl.protocol import DataProto
from verl.workers.engine.fsdp.adapter_slots import NO_SLOT, SLOT

_TARGETS = "target_tokens"


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the base model on requests."""

    vocab_size: int
    max_length: int


@dataclass(frozen=True)
class TrainingRow:
    """A sequence: the model reads ``tokens``, and its prediction after each of them is scored by a target."""

    tokens: np.ndarray
    """(N,)"""
    targets: np.ndarray
    """(N,)"""
    loss: str = NAMES[0]
    old_log_probs: np.ndarray | None = None
    """(N,) or None, which is 0."""
    advantages: np.ndarray | None = None
    """(N,) advantages, or weights of a cross entropy; None is 0."""
    settings: tuple[float, ...] = ()


def checked_settings(loss: str, requested: Mapping[str, float | str]) -> tuple[float, ...]:
    """Return the settings of a loss, with defaults for those that are not requested.

    Raises:
        RefusedError: the loss or a setting is unknown, or a setting is no finite number.
    """
    if loss not in LOSSES:
        raise RefusedError(f"there is no loss {loss!r:.100} here. Use one of {', '.join(NAMES)}.")
    defaults = LOSSES[loss].settings
    if unknown := sorted(requested.keys() - defaults.keys()):
        allowed = f"It has {', '.join(defaults)}." if defaults else "It has none."
        raise RefusedError(f"loss_fn_config: {loss} has no {unknown[0]!r:.100}. {allowed}")
    for name, value in requested.items():
        if isinstance(value, str) or not np.isfinite(value):
            raise RefusedError(f"loss_fn_config: {name}={value!r:.100} must be a finite number.")
    return tuple(float(requested.get(name, default)) for name, default in defaults.items())


def checked_rows(
    data: Sequence[Datum], loss: str, requested: Mapping[str, float | str], limits: ModelLimits
) -> list[TrainingRow]:
    """Turn the data of a request into rows.

    Raises:
        RefusedError: a value is not allowed; the message names datum, tensor and what is allowed.
    """
    settings = checked_settings(loss, requested)
    if not data:
        raise RefusedError("there is no datum. Send at least one.")
    names = (_TARGETS, *LOSSES[loss].inputs)
    rows = []
    for index, datum in enumerate(data):
        where = f"datum {index}"
        absent, unknown = [n for n in names if n not in datum.inputs], sorted(datum.inputs.keys() - {*names})
        if loss == NAMES[0] and absent == ["weights"]:
            absent = []  # every target counts
        if absent or unknown:
            problem = f"lacks {absent[0]}" if absent else f"has {unknown[0]!r:.100}, which {loss} does not read"
            raise RefusedError(f"{where} {problem}. loss_fn_inputs of {loss}: {', '.join(names)}.")
        length = len(datum.tokens)
        if not 1 <= length <= limits.max_length:
            raise RefusedError(
                f"{where} has {length} tokens; a sequence has 1 to {limits.max_length} (server.max_length of the "
                "service)."
            )
        for name, values in datum.inputs.items():
            if len(values) != length:
                raise RefusedError(
                    f"{where}: {name} has {len(values)} values for {length} tokens. The prediction after each token "
                    "has one target, so all have the length of model_input."
                )
            if not np.isfinite(values).all():
                index_of_first = int(np.flatnonzero(~np.isfinite(values))[0])
                raise RefusedError(
                    f"{where}: {name}[{index_of_first}] is {values[index_of_first]}. Send finite numbers."
                )
        tokens = np.asarray(datum.tokens)
        check_tokens(tokens, limits, f"{where}: model_input")
        check_tokens(datum.inputs[_TARGETS], limits, f"{where}: {_TARGETS}")
        targets = datum.inputs[_TARGETS].astype(np.int64)
        policy_log_probs = datum.inputs.get("logprobs")
        factors = datum.inputs.get("weights" if loss == NAMES[0] else "advantages", np.ones(length))
        rows.append(TrainingRow(tokens, targets, loss, policy_log_probs, factors, settings))
    return rows


def check_tokens(tokens: np.ndarray, limits: ModelLimits, where: str) -> None:
    """Raise RefusedError if a token is not a whole number, or not of the vocabulary."""
    invalid = np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size) | (tokens != np.floor(tokens)))
    if invalid.size:
        index = int(invalid[0])
        raise RefusedError(
            f"{where}[{index}] is {tokens[index]}, and the model has the tokens 0 to {limits.vocab_size - 1}. Use its "
            "own tokenizer."
        )


def batch_of(rows: Sequence[TrainingRow], slots: Sequence[int], ranks: int) -> tuple[DataProto, list[int]]:
    """Make the batch of a call, with about equally many tokens for each rank.

    A row's first token is the prompt, and the response the tokens after it and one more, of which nothing is predicted.
    So the prediction after token i is that of response token i, for any targets. Rows that are added so that all ranks
    get equally many have no token that counts.

    Args:
        rows: at least one.
        slots: the slot of each.
        ranks: number of data-parallel ranks.

    Returns:
        the batch, and the row of it that has each of ``rows``.
    """
    by_length = sorted(range(len(rows)), key=lambda row: len(rows[row].tokens))
    dealt = [by_length[rank::ranks] for rank in range(ranks)]
    per_rank = len(dealt[0])
    count, width = per_rank * ranks, max(len(row.tokens) for row in rows)
    input_ids = torch.zeros(count, width + 1, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    attention_mask[:, :2] = 1
    columns: dict[str, Tensor] = {
        "responses": torch.zeros(count, width, dtype=torch.long),
        "response_mask": torch.zeros(count, width, dtype=torch.long),
        "old_log_probs": torch.zeros(count, width),
        "advantages": torch.zeros(count, width),
        "loss_index": torch.zeros(count, dtype=torch.long),
        "loss_settings": torch.zeros(count, SETTINGS),
        "row_index": torch.arange(count),
        SLOT: torch.full((count,), NO_SLOT, dtype=torch.long),
    }
    batch_rows = [0] * len(rows)
    for rank, rank_rows in enumerate(dealt):
        for offset, index in enumerate(rank_rows):
            batch_row = batch_rows[index] = rank * per_rank + offset
            row, length = rows[index], len(rows[index].tokens)
            input_ids[batch_row, :length] = torch.as_tensor(row.tokens)
            input_ids[batch_row, length] = int(row.targets[-1])
            attention_mask[batch_row, : length + 1] = 1
            columns["responses"][batch_row, :length] = torch.as_tensor(row.targets)
            columns["response_mask"][batch_row, :length] = 1
            for name, values in (("old_log_probs", row.old_log_probs), ("advantages", row.advantages)):
                if values is not None:
                    columns[name][batch_row, :length] = torch.as_tensor(values, dtype=torch.float32)
            columns["loss_index"][batch_row] = NAMES.index(row.loss)
            columns["loss_settings"][batch_row, : len(row.settings)] = torch.tensor(row.settings)
            columns[SLOT][batch_row] = slots[index]
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    columns |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    return DataProto.from_dict(tensors=columns), batch_rows
