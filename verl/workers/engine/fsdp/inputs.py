"""From batch columns to what the model reads: one packed row, or a padded rectangle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.workers.packed_attention import Packing


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One micro-batch on the device. N is the number of its response tokens."""

    input_ids: Tensor
    """(1, tokens) packed, or (bsz, length) padded."""
    position_ids: Tensor
    """As ``input_ids``."""
    attention_mask: Tensor | None
    """(bsz, length) padded; None packed."""
    packing: Packing | None
    """The sequences of a packed row; None padded."""
    take: Tensor
    """(N,) place in the flattened ``input_ids`` where the model is read for each response token: the token
    before it, whose hidden state predicts it, or the response token itself."""
    targets: Tensor
    """(N,) the response tokens."""
    rows: Tensor
    columns: Tensor
    """(N,) where each of them stands in the response."""
    shape: tuple[int, int]
    """(bsz, response_length)."""

    def scatter(self, flat: Tensor) -> Tensor:
        """(N,) values to (bsz, response_length), 0 elsewhere."""
        return flat.new_zeros(self.shape).index_put((self.rows, self.columns), flat)


def prepare_inputs(batch: DataProto, packed: bool, device: torch.device, at_token: bool = False) -> ModelInputs:
    """Drop the padding of a micro-batch: all of it if ``packed``, else the columns that are padding in every row.

    Args:
        batch: input_ids, attention_mask, position_ids (bsz, prompt_length + response_length),
            responses, response_mask (bsz, response_length).
        packed: which of the two forms.
        device: of the model.
        at_token: read the model at each response token itself instead of at the token before it.

    Raises:
        SchemaError: a response token has no token before it to predict it, or padding lies between tokens.
    """
    assert batch.batch is not None
    columns = batch.batch
    mask, chosen = columns["attention_mask"].bool(), columns["response_mask"].bool()
    response_length = chosen.shape[1]
    prompt_length = mask.shape[1] - response_length
    _check(mask, chosen, prompt_length, at_token)
    rows, places = chosen.nonzero(as_tuple=True)
    where = places + prompt_length - (0 if at_token else 1)
    if packed:
        place_of = (mask.flatten().cumsum(0) - 1).view_as(mask)  # (bsz, length): place in the packed row
        input_ids = columns["input_ids"][mask].unsqueeze(0)
        position_ids = columns["position_ids"][mask].unsqueeze(0)
        lengths = [n for n in mask.sum(-1).tolist() if n]
        take = place_of[rows, where]
        attention_mask = None
        packing = Packing.of(lengths, device)
    else:
        used = mask.any(0).nonzero().flatten()
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        input_ids = columns["input_ids"][:, first:last]
        position_ids = columns["position_ids"][:, first:last]
        attention_mask = mask[:, first:last].to(device)
        take = rows * (last - first) + where - first
        packing = None
    return ModelInputs(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        attention_mask=attention_mask,
        packing=packing,
        take=take.to(device),
        targets=columns["responses"][rows, places].to(device),
        rows=rows.to(device),
        columns=places.to(device),
        shape=(mask.shape[0], response_length),
    )


def check_token_ids(batch: DataProto, vocab_size: int) -> None:
    """Refuse a token that has no row in the embedding; on a GPU it would end the process without a word.

    Raises:
        SchemaError: there is one.
    """
    assert batch.batch is not None
    ids = batch.batch["input_ids"]
    if ids.numel() and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        row, place = ((ids >= vocab_size) | (ids < 0)).nonzero()[0].tolist()
        raise SchemaError(
            f"row {row} of the batch has the token id {int(ids[row, place])}, and the model's embedding has "
            f"{vocab_size} rows. Tokenize with the model's own tokenizer (model.tokenizer_path), take the text with "
            "that token out, or use a model whose embedding was resized."
        )


def check_one_rotation(batch: DataProto, threshold: int | None) -> None:
    """Refuse a pass in which long texts would change the rotation of short ones (longrope).

    Args:
        batch: of one pass.
        threshold: see :func:`verl.utils.model.longrope_threshold`.

    Raises:
        ConfigError: some texts are longer than ``threshold`` and some are not.
    """
    if threshold is None:
        return
    assert batch.batch is not None
    lengths = batch.batch["attention_mask"].sum(-1)
    is_long = lengths > threshold
    if is_long.any() and not is_long.all():
        raise ConfigError(
            f"a pass has texts of {int(lengths.min())} to {int(lengths.max())} tokens, and the model's longrope "
            f"rotates all texts of a pass in another way once one has more than {threshold}: log-probs of the short "
            "ones would depend on their company. Set use_dynamic_bsz=false and micro-batch sizes of 1 (actor, ref "
            "and rollout.log_prob), or keep data.max_prompt_length + data.max_response_length at or below "
            f"{threshold}."
        )


def _check(mask: Tensor, chosen: Tensor, prompt_length: int, at_token: bool) -> None:
    """Refuse what the two forms would read differently."""
    blocks = (mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0]
    problems = {
        "has padding between its tokens; attention_mask must be zeros, then ones, then zeros": blocks > 1,
        "has response tokens (response_mask 1) where attention_mask is 0": (chosen & ~mask[:, prompt_length:]).any(-1),
        "has a response without a prompt; its first token has nothing before it to predict it": (
            chosen.any(-1) & ~mask[:, :prompt_length].any(-1) & (not at_token)
        ),
        "has no token at all": blocks == 0,
    }
    for problem, rows in problems.items():
        if rows.any():
            raise SchemaError(f"row {int(rows.nonzero()[0])} of the batch {problem}.")
