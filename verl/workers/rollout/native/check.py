"""A check, made once with the first weights, that the native engine and the model's own forward pass agree."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.protocol.shared import SharedTensors
from verl.workers.forward_check import is_rounding, largest_difference, probe_sequences, short_windows
from verl.workers.rollout.native.model import NativeModel, cannot_serve
from verl.workers.rollout.placed_images import PlacedImages
from verl.workers.rollout.request import RolloutRequest, SamplingParams

_PROMPT_TOKENS = (5, 3)
_NEW_TOKENS = 3  # decoded after each prompt
_CACHED_TOKENS = 6  # of the prompt and of the response; two are left to compute
_IMAGE_AT = 2  # of the first prompt of a model with images
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
    images = _with_an_image(model, sequences)
    with short_windows(model.module, _WINDOW):
        try:
            native_logits = torch.cat(_prefill_and_decode(model, sequences, images))
        except (ConfigError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise cannot_serve(model.module, f"stops its code with: {error}".rstrip(".")) from error
        finally:
            model.forget()  # it has stored the shortened windows
        logits = [
            model.standard_logits(ids, **inputs)[n - 1 :]
            for ids, n, inputs in zip(sequences, _PROMPT_TOKENS, images, strict=True)
        ]
    expected = torch.cat([torch.cat([rows, rows[-1:]]) for rows in logits])
    if not expected.isfinite().all():
        return False
    if not is_rounding(native_logits, expected, model.dtype):
        difference = largest_difference(native_logits, expected)
        raise cannot_serve(model.module, f"gives logits that differ by {difference:.2g} from those of its own forward")
    return True


def _with_an_image(model: NativeModel, sequences: list[Tensor]) -> list[dict[str, Tensor]]:
    """Give the first sequence of a model with images one of one token; return the images of each sequence."""
    if model.vision is None:
        return [{} for _ in sequences]
    for ids in sequences:
        ids[model.vision.marked(ids)] = 0
    sequences[0][_IMAGE_AT] = model.vision.image_token_id
    size = model.vision.merge_size
    pixels = torch.linspace(-1, 1, size**2 * model.vision.patch_values, device=model.device)
    image = {
        "pixel_values": pixels.view(size**2, -1),
        "image_grid_thw": torch.tensor([[1, size, size]], device=model.device),
    }
    return [image, *[{} for _ in sequences[1:]]]


def _place_images(model: NativeModel, ids: list[int], images: dict[str, Tensor]) -> PlacedImages | None:
    request = RolloutRequest(ids, SamplingParams(max_tokens=1, seed=0), SharedTensors(images) if images else None)
    return PlacedImages.from_request(request, model.vision)


def _prefill_and_decode(model: NativeModel, sequences: list[Tensor], images: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return (_NEW_TOKENS + 2, vocab) logits for each sequence, from the end of its prompt on; the last ones twice."""
    lengths = [len(ids) for ids in sequences]
    memory = model.memory(room=len(sequences), prompt_room=max(lengths), response_room=_NEW_TOKENS)
    prompts = [ids[:n].tolist() for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)]
    prompt_images = [_place_images(model, ids, inputs) for ids, inputs in zip(prompts, images, strict=True)]
    offsets = [0 if row_images is None else row_images.offset for row_images in prompt_images]
    memory.admit(_PROMPT_TOKENS, [1] * len(sequences), offsets=offsets)
    logits = [model.prefill(memory, prompts, images=prompt_images)]
    for step in range(_NEW_TOKENS):
        newest = torch.stack([ids[n + step] for ids, n in zip(sequences, _PROMPT_TOKENS, strict=True)])
        logits.append(model.decode(memory, newest))
    cached = [memory.row_states(0, 0, _CACHED_TOKENS), *[None] * (len(sequences) - 1)]
    memory.keep(torch.zeros(0, dtype=torch.long, device=model.device))
    memory.admit(lengths, [1] * len(sequences), cached)
    starts = [_CACHED_TOKENS, *[0] * (len(sequences) - 1)]
    sequence_ids = [ids.tolist() for ids in sequences]
    prompt_images = [_place_images(model, ids, inputs) for ids, inputs in zip(sequence_ids, images, strict=True)]
    logits.append(model.prefill(memory, sequence_ids, starts, prompt_images))
    return list(torch.stack(logits, dim=1))
