"""Images and videos in an engine's process: read from files, and in vLLM's own format."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def modality_of(grid: np.ndarray) -> str:
    """Return vLLM's modality of a picture by its ``grid``, (3,) patches along time, height and width."""
    return "image" if grid[0] == 1 else "video"


def image_item(pixels: Tensor, grid: Tensor, seconds: float | None) -> object:
    """Return an image or a video as vLLM's ``MultiModalKwargsItem``.

    Args:
        pixels: (patches, values of a patch).
        grid: (3,) patches along time, height and width.
        seconds: of a video between two steps of time; None if the model does not count them.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    kind, patches = modality_of(grid.numpy()), grid.prod().unsqueeze(0)
    pixels_name, grid_name = (
        ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
    )
    fields = {
        pixels_name: MultiModalFieldConfig.flat_from_sizes(kind, patches),
        grid_name: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
    }
    inputs = {pixels_name: pixels, grid_name: grid.unsqueeze(0)}
    if kind == "video" and seconds is not None:
        fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
        inputs["second_per_grid_ts"] = torch.tensor([seconds])
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)[kind][0]


def read_image_file(index_and_path: str, engine: str) -> tuple[Tensor, Tensor, float | None]:
    """Return pixels, grid and seconds of an image, as :func:`image_item` takes them.

    Args:
        index_and_path: its index in the prompt, a colon, and its file, whose name is the hash of its content.
        engine: whose process this is, for messages.

    Raises:
        ValueError: the file is missing or damaged, or its content is not the one of its name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    image_index, path = index_and_path.split(":", 1)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"image {image_index} of the prompt did not reach {engine}: {error}") from None
    pixels, grid = tensors["pixel_values"], tensors["image_grid_thw"]  # (patches, values), (3,)
    seconds = float(tensors["second_per_grid_ts"]) if "second_per_grid_ts" in tensors else None
    if image_digest(pixels.numpy(), grid.numpy(), seconds).hex() != Path(path).stem:
        raise ValueError(f"image {image_index} of the prompt did not reach {engine} as it was sent: its hash differs.")
    return pixels, grid, seconds


def image_digest(pixels: np.ndarray, grid: np.ndarray, seconds: float | None) -> bytes:
    """Return a hash of the pixels of an image or video, (patches, values of a patch), its grid, (3,), and speed."""
    key = grid.tobytes() + (b"" if seconds is None else np.float32(seconds).tobytes())
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, key=key, digest_size=32).digest()
