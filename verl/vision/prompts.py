"""The images and videos of a row as tokens of its prompt and as inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from verl.errors import ConfigError, DataError
from verl.vision.families import FAMILIES, IMAGE_INPUTS, SECONDS, TIMESTAMPED, VIDEO_TOKEN, VisionConfig
from verl.vision.images import process_image
from verl.vision.positions import mrope_positions
from verl.vision.processor import positions_per_second, video_limits
from verl.vision.videos import FRAMES, Clip, Video, open_video

Picture = Image.Image | Clip
"""An image, or a video whose frames are chosen."""


class ImagePrompts:
    """Makes tokens, positions and inputs of images and videos by the processor of a model.

    Args:
        processor: of one of the families of :mod:`verl.vision.families`.
    """

    def __init__(self, processor: Any) -> None:
        self._images = processor.image_processor
        size = 3 * self._images.temporal_patch_size * self._images.patch_size**2
        name = type(processor).__name__
        self.has_times = name in TIMESTAMPED
        """True if a video is written as its steps of time, each after its second."""
        self.config = VisionConfig(
            image_token_id=processor.image_token_id,
            video_token_id=processor.tokenizer.convert_tokens_to_ids(VIDEO_TOKEN),
            merge_size=self._images.merge_size,
            patch_values=size,
            positions_per_second=positions_per_second(processor),
        )
        self._processor = processor

    @classmethod
    def from_processor(cls, processor: Any) -> ImagePrompts | None:
        """Make the object for a processor; None for a text model.

        Raises:
            ConfigError: the processor is of another family.
        """
        if processor is None:
            return None
        name = type(processor).__name__
        if name not in FAMILIES.values():
            return None
        if not isinstance(processor.image_token_id, int):
            raise ConfigError(f"the tokenizer of this {name} has no image token. Take the model's own tokenizer.")
        return cls(processor)

    def read(self, image: object, where: str) -> Image.Image:
        """Decode an image and bring it to the size that it asks for; see :func:`verl.vision.images.process_image`."""
        return process_image(image, self._images.patch_size, where)

    def open(self, video: Video, where: str) -> Clip:
        """Choose the frames of a video and their size; see :func:`verl.vision.videos.open_video`."""
        return open_video(video.value, video_limits(self._processor), where)

    def count_tokens(self, image: Picture, where: str) -> list[int]:
        """Return the number of tokens at each place that the prompt has for an image or a video.

        Raises:
            DataError: the image is too narrow; the message names ``where``.
        """
        if isinstance(image, Clip):
            return [self.config.tokens_of(grid) for grid in self._grid(image)]
        try:
            patches = self._images.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise DataError(f"{where}: an image of {image.width} x {image.height} pixels: {error}.") from error
        return [int(patches) // self.config.merge_size**2]

    def _grid(self, clip: Clip) -> Tensor:
        """``image_grid_thw`` of a video."""
        rows, columns = clip.height // self._images.patch_size, clip.width // self._images.patch_size
        if self.has_times:
            return torch.tensor([[1, rows, columns]] * clip.steps())
        return torch.tensor([[clip.steps(), rows, columns]])

    def inputs(self, images: Sequence[Picture], where: str) -> dict[str, Tensor]:
        """Return ``pixel_values`` and ``image_grid_thw`` of the images and videos of a row; nothing without any.

        With videos of a model that counts in seconds also ``second_per_grid_ts``.
        """
        if not images:
            return {}
        pixels, grids, seconds = [], [], []
        for image in images:
            if isinstance(image, Clip):
                pixels.append(self._pixels(image))
                grids.append(self._grid(image))
                seconds.append(image.seconds_per_step())
                continue
            try:
                features = self._images(images=[image], return_tensors="pt")
            except ValueError as error:
                raise DataError(f"{where}: the image processor refuses an image: {error}.") from error
            pixels.append(features[IMAGE_INPUTS[0]])
            grids.append(features[IMAGE_INPUTS[1]])
            seconds.append(0.0)
        tensors: dict[str, Tensor] = dict(zip(IMAGE_INPUTS, (torch.cat(pixels), torch.cat(grids)), strict=True))
        if self.config.positions_per_second is not None and any(seconds):
            tensors[SECONDS] = torch.tensor(seconds, dtype=torch.float32)
        return tensors

    def _pixels(self, clip: Clip) -> Tensor:
        """The patches of a video, (patches, values of a patch).

        The image processor makes patches of two equal frames; those of a step of time have the first of one frame and
        the second of the next.
        """
        grids = self._grid(clip)
        patches_of_video = torch.empty(int(grids.prod(-1).sum()), self.config.patch_values)
        by_step = patches_of_video.view(clip.steps(), -1, 3, FRAMES, self._images.patch_size**2)
        for frame_index, frame in enumerate(clip.frames()):
            patches = self._images(images=[frame], do_resize=False, return_tensors="pt")[IMAGE_INPUTS[0]]
            step, part = divmod(frame_index, FRAMES)
            by_step[step, :, :, part] = patches.view(-1, 3, FRAMES, self._images.patch_size**2)[:, :, part]
        return patches_of_video

    def pictures(self, inputs: Mapping[str, Tensor]) -> list[Image.Image]:
        """Return the images that inputs of :meth:`inputs` were made of, in the size in which the policy sees them.

        The same inputs can be made of them again: edges are whole tokens already. Inputs of videos are none of images.
        """
        if not inputs:
            return []
        processor = self._images
        size, merge, frames = processor.patch_size, self.config.merge_size, processor.temporal_patch_size
        pixels, grids = (inputs[name] for name in IMAGE_INPUTS)
        is_normalized = processor.do_normalize
        colours = (processor.image_mean, processor.image_std) if is_normalized else ([0.0] * 3, [1.0] * 3)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in colours)
        pictures = []
        parts = pixels.split([int(count) for count in grids.prod(-1)])
        for part, (_, rows, columns) in zip(parts, grids.tolist(), strict=True):
            blocks = part.view(rows // merge, columns // merge, merge, merge, 3, frames, size, size)[:, :, :, :, :, 0]
            # (3, rows / merge, merge, size, columns / merge, merge, size): patches lie in blocks of merge x merge.
            image = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size)
            bytes_of = (
                ((image * std + mean) / (processor.rescale_factor if processor.do_rescale else 1)).round().clamp(0, 255)
            )
            pictures.append(Image.fromarray(bytes_of.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()))
        return pictures

    def repeats(self, ids: Sequence[int], counts: Sequence[int], where: str) -> list[int]:
        """Return how often each token of a rendered text stands in the model's input: ``counts[n]`` times, or once.

        Raises:
            DataError: the number of image tokens is not that of images; the message names ``where``.
        """
        tokens = self.config.token_ids
        placeholders = sum(token in tokens for token in ids)
        if placeholders != len(counts):
            raise DataError(
                f"{where}: the text has {placeholders} token(s) of images and videos after the chat template, and "
                f"{len(counts)} belong there. Take the text of such a token out of the messages, or use a template "
                "that writes images and videos."
            )
        remaining = iter(counts)
        return [next(remaining) if token in tokens else 1 for token in ids]

    def expanded(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Repeat the n-th token of ``ids`` that stands for images or videos ``counts[n]`` times."""
        remaining, tokens = iter(counts), self.config.token_ids
        return [
            token for token_id in ids for token in ([token_id] * next(remaining) if token_id in tokens else [token_id])
        ]

    def positions(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the position ids of a prompt with these :meth:`inputs`, (4, tokens); see :func:`mrope_positions`."""
        grid, seconds = inputs.get(IMAGE_INPUTS[1]), inputs.get(SECONDS)
        return mrope_positions(torch.tensor(ids, dtype=torch.int64), grid, self.config, seconds=seconds)
