"""A check, made once with the first weights, that the native engine and the model's own forward pass agree."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.forward_check import is_rounding, largest_difference, probe_sequences, short_windows
from verl.workers.rollout.native.model import NativeModel, cannot_serve

_PROMPT_TOKENS = (5, 3)
_NEW_TOKENS = 3
_KNOWN_TOKENS = 6  # of the prompt and of the response; two are left to compute
_WINDOW = 3  # tokens of sliding windows during the check, fewer than the sequences have, or windows would not matter


@torch.inference_mode()
def check_model(model: NativeModel) -> bool:
    """Compare passes over two prompts in one batch with the model's own forward pass.

    They are a prefill, a few decoding steps, and a prefill of the whole texts, the first of them with kept states.

    Returns:
        False if nothing could be compared, because the model's own logits are not finite.

    Raises:
        RolloutError: the logits differ, or the model cannot run; the message names other engines.
    """
    lengths = [n + _NEW_TOKENS for n in _PROMPT_TOKENS]
    sequences = probe_sequences(model.module.config, lengths, model.device)
    with short_windows(model.module, _WINDOW):
        try:
            found = torch.cat(_prefill_and_decode(model, sequences))
        except (ConfigError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise cannot_serve(model.module, f"stops its code with: {error}".rstrip(".")) from error
        finally:
            model.forget()  # it has stored the shortened windows
        logits = [model.standard_logits(ids)[n - 1 :] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    expected = torch.cat([torch.cat([rows, rows[-1:]]) for rows in logits])
    if not expected.isfinite().all():
        return False
    if not is_rounding(found, expected, model.dtype):
        difference = largest_difference(found, expected)
        raise cannot_serve(model.module, f"gives logits that differ by {difference:.2g} from those of its own forward")
    return True


def _prefill_and_decode(model: NativeModel, sequences: list[Tensor]) -> list[Tensor]:
    """Return (_NEW_TOKENS + 2, vocab) logits for each sequence, from the end of its prompt on; the last ones twice."""
    lengths = [len(ids) for ids in sequences]
    memory = model.memory(room=len(sequences), prompt_room=max(lengths), own_room=_NEW_TOKENS)
    memory.admit(_PROMPT_TOKENS, [1] * len(sequences))
    prompts = [ids[:n].tolist() for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    logits = [model.prefill(memory, prompts)]
    for step in range(_NEW_TOKENS):
        newest = torch.stack([ids[n + step] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)])
        logits.append(model.decode(memory, newest))
    known = [memory.row_states(0, 0, _KNOWN_TOKENS), *[None] * (len(sequences) - 1)]
    memory.keep(torch.zeros(0, dtype=torch.long, device=model.device))
    memory.admit(lengths, [1] * len(sequences), known)
    starts = [_KNOWN_TOKENS, *[0] * (len(sequences) - 1)]
    logits.append(model.prefill(memory, [ids.tolist() for ids in sequences], starts))
    return list(torch.stack(logits, dim=1))
