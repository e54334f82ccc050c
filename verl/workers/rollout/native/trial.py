"""Whether the engine computes what the model's own forward computes: tried once, with the first weights.

A model whose layers look beyond keys and values (recurrent states, convolutions, keys that layers share) would go on
from the wrong past without an error. It shows in this trial, whatever the architecture is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.rollout.native.model import NativeModel, cannot_serve

_PROMPT_TOKENS = (5, 3)
_NEW_TOKENS = 3
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest logit, that is rounding."""


@torch.no_grad()
def check_model(model: NativeModel) -> None:
    """Two prompts and some tokens after them, in one batch, against the model's own forward.

    Raises:
        RolloutError: they differ, or the model cannot run at all; the message names other engines.
    """
    vocabulary = model.module.config.get_text_config().vocab_size
    count = sum(_PROMPT_TOKENS) + len(_PROMPT_TOKENS) * _NEW_TOKENS
    ids = (torch.arange(1, count + 1, device=model.device) * 7919) % vocabulary
    sequences = ids.split([n + _NEW_TOKENS for n in _PROMPT_TOKENS])
    try:
        found = _go_on(model, sequences)
    except (ConfigError, RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise cannot_serve(model.module, f"stops its code with: {error}".rstrip(".")) from error
    expected = [model.standard_logits(ids)[n - 1 :] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    largest = max(float(logits.abs().max()) for logits in expected)
    if difference > _TOLERANCE[model.dtype] * max(1.0, largest):
        raise cannot_serve(model.module, f"gives logits that differ by {difference:.2g} from those of its own forward")


def _go_on(model: NativeModel, sequences: tuple[Tensor, ...]) -> list[Tensor]:
    """(_NEW_TOKENS + 1, vocab) logits for each sequence, from its prompt on."""
    memory = model.memory(room=len(sequences), prompt_room=max(_PROMPT_TOKENS), own_room=_NEW_TOKENS)
    memory.admit(_PROMPT_TOKENS, [1] * len(sequences))
    prompts = [ids[:n].tolist() for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    logits = [model.prefill(memory, prompts)]
    for step in range(_NEW_TOKENS):
        newest = torch.stack([ids[n + step] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)])
        logits.append(model.decode(memory, newest))
    return list(torch.stack(logits, dim=1))
