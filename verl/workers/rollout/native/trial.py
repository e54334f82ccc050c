"""Whether the engine computes what the model's own forward computes: tried once, with the first weights.

A model whose layers look beyond keys and values (recurrent states, convolutions, keys that layers share) would go on
from the wrong past without an error. It shows in this trial, whatever the architecture is called. Sliding windows are
made shorter than its texts meanwhile, or a window that attention is not told of would not show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.packed_attention import short_windows
from verl.workers.rollout.native.model import NativeModel, cannot_serve

_PROMPT_TOKENS = (5, 3)
_NEW_TOKENS = 3
_WINDOW = 3
"""Tokens of a sliding window meanwhile."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest logit, that is rounding."""


@torch.no_grad()
def check_model(model: NativeModel) -> bool:
    """Two prompts and some tokens after them, in one batch, against the model's own forward.

    Returns:
        whether that told something: weights whose logits are not finite tell nothing.

    Raises:
        RolloutError: they differ, or the model cannot run at all; the message names other engines.
    """
    vocabulary = model.module.config.get_text_config().vocab_size
    count = sum(_PROMPT_TOKENS) + len(_PROMPT_TOKENS) * _NEW_TOKENS
    ids = (torch.arange(1, count + 1, device=model.device) * 7919) % vocabulary
    sequences = ids.split([n + _NEW_TOKENS for n in _PROMPT_TOKENS])
    with short_windows(model.module, _WINDOW):
        try:
            found = torch.cat(_go_on(model, sequences))
        except (ConfigError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise cannot_serve(model.module, f"stops its code with: {error}".rstrip(".")) from error
        finally:
            model.forget()  # it has seen short windows
        logits = [model.standard_logits(ids)[n - 1 :] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    expected = torch.cat(logits)
    if not expected.isfinite().all():
        return False
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE[model.dtype] * max(1.0, largest):  # also if it is not a number
        raise cannot_serve(model.module, f"gives logits that differ by {difference:.2g} from those of its own forward")
    return True


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
