"""Images in vLLM's own format, in this process or in that of its server."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import Tensor

_IMAGE = "image"


def image_items(pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
    """Return images as vLLM's ``MultiModalKwargsItems``.

    Args:
        pixel_values: (patches, values of a patch) of all images.
        image_grid_thw: (images, 3) patches of each along time, height and width.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(_IMAGE, image_grid_thw.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}, fields
    )


def image_digest(pixels: np.ndarray, grid: np.ndarray) -> bytes:
    """Return a hash of the pixels of one image, (patches, values of a patch), and of its grid, (3,)."""
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, key=grid.tobytes(), digest_size=32).digest()
