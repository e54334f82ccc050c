"""Images of a data row: read from bytes, files or PIL, and brought to a size within limits."""

from __future__ import annotations

import base64
import io
import math
import struct
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from verl.errors import DataError
from verl.vision.data_urls import FORMATS, MAX_IMAGE_PIXELS, base64_of

MERGE = 2
"""Patches along an edge that become one token in all families of :mod:`verl.vision.families`."""
MIN_PIXELS, MAX_PIXELS = 4 * 28**2, 16384 * 28**2
"""Limits of an image that names its own size, as in the package qwen-vl-utils."""
LARGEST_RATIO = 200
"""Image processors of the Qwen-VL families refuse narrower images; here the error names the row."""
_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
# What Pillow's decoders raise for files that are damaged, cut off or enormous.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def read_image(value: object, where: str) -> Image.Image:
    """Decode an image to RGB: upright as its EXIF data say, transparent parts white, of an animation the first picture.

    Args:
        value: a PIL image, the bytes of a file, a path, a ``data:`` URL with base64 of a PNG, JPEG, GIF or WebP of at
            most ``MAX_IMAGE_PIXELS``, whichever of them its media type says; or a mapping with one of these as
            ``image``, ``bytes`` or ``path`` (``bytes`` first, as data sets of Hugging Face have both).
        where: file and row, for errors.

    Raises:
        DataError: it is none of these, or cannot be decoded; the message names ``where``.
    """
    source = _source(value, where)
    try:
        image = source if isinstance(source, Image.Image) else _opened(source)
        image.load()
        is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        return _rgb(image if is_upright else ImageOps.exif_transpose(image))
    except _BROKEN as error:
        is_other = isinstance(error, UnidentifiedImageError)  # whose text is the address of an object
        reason = "it is no image file that Pillow knows" if is_other else error or type(error).__name__
        raise DataError(
            f"{where}: the image {_shown(value)} cannot be read: {reason}. Replace the file, or take the row out."
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if not (image.width and image.height):
        raise ValueError(f"it has {image.width} x {image.height} pixels")
    if image.mode in ("I", "F"):
        raise ValueError(f"its values (mode {image.mode}) have no largest one that would be white; save it with 8 bits")
    if image.mode.startswith("I;16"):  # Pillow would make everything white that is brighter than 255 of 65,535
        values = np.asarray(image)
        grey = np.where(values == image.info.get("transparency"), 255, values >> 8)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


class _Sent(io.BytesIO):
    """The bytes of a file of a ``data:`` URL, which may come from anybody."""


def _opened(source: io.BytesIO | str) -> Image.Image:
    if not isinstance(source, _Sent):
        return Image.open(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is a lower one
        image = Image.open(source, formats=FORMATS)
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, and {MAX_IMAGE_PIXELS} are the most")
    return image


def _source(value: object, where: str) -> Image.Image | io.BytesIO | str:
    """The PIL image, the bytes or the path that a value stands for."""
    while isinstance(value, Mapping):
        source_key = next(
            (value[key] for key in ("bytes", "image", "path", "image_url", "url") if value.get(key) is not None), None
        )
        if source_key is None:
            raise DataError(
                f"{where}: an image is a mapping with {', '.join(map(str, value)) or 'nothing'}. It needs one of "
                "bytes, path and image."
            )
        value = source_key
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return io.BytesIO(value)
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: an image is {_shown(value)}. Give the bytes of an image file, its path, or a PIL image."
        )
    if value.startswith("data:"):
        try:
            return _Sent(base64.b64decode(base64_of(value, where), validate=True))
        except ValueError as error:
            raise DataError(f"{where}: the base64 text of an image is damaged: {error}.") from error
    if "://" in value and not value.startswith("file://"):
        raise DataError(
            f"{where}: the image '{value:.120}' is a remote address, and a run reads local files only. Download it "
            "first, or put its bytes into the data file."
        )
    return value.removeprefix("file://")


def process_image(image: object, image_patch_size: int = 14, where: str = "process_image") -> Image.Image:
    """Decode an image and bring it to the size that it asks for.

    A mapping may have ``min_pixels`` and ``max_pixels``, or ``resized_height`` and ``resized_width``; see
    :func:`smart_resize`. Without any of them the size stays: the model's image processor has limits of its own.

    Args:
        image: see :func:`read_image`.
        image_patch_size: edge of a patch in pixels; edges become multiples of twice that.
        where: file and row, for errors.

    Raises:
        DataError: it cannot be decoded, or its edges differ too much.
    """
    picture = read_image(image, where)
    limits = {key: image[key] for key in _LIMITS if image.get(key) is not None} if isinstance(image, Mapping) else {}
    if not limits:
        return picture
    invalid = {
        key: value
        for key, value in limits.items()
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 1)
    }
    if invalid:
        raise DataError(f"{where}: an image has {invalid}; limits of pixels are numbers of at least 1.")
    factor = MERGE * image_patch_size
    least, most = limits.get("min_pixels", MIN_PIXELS), limits.get("max_pixels", MAX_PIXELS)
    height = limits.get("resized_height", picture.height)
    width = limits.get("resized_width", picture.width)
    try:
        height, width = smart_resize(int(height), int(width), factor, int(least), int(most))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    return picture.resize((width, height))


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """Return the nearest height and width that are multiples of ``factor``, with an area within the limits.

    An area outside of them is scaled by one factor for both edges, rounded down at the upper and up at the lower
    limit, as in the image processor of Qwen2-VL (arXiv:2409.12191).

    >>> smart_resize(100, 50, 28)
    (112, 56)

    Raises:
        ValueError: one edge is more than 200 times the other, or the limits contradict each other.
    """
    if max(height, width) > LARGEST_RATIO * min(height, width):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: one edge may be at most {LARGEST_RATIO} times the "
            "other."
        )
    if min_pixels > max_pixels:
        raise ValueError(f"min_pixels={min_pixels} is more than max_pixels={max_pixels}.")
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor**2
    if area > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = math.floor(height / scale / factor), math.floor(width / scale / factor)
    elif area < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
    return max(1, rows) * factor, max(1, columns) * factor


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("path", "image", "bytes") if value.get(key) is not None), value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"of {len(value)} bytes"
    if isinstance(value, Image.Image):
        return f"of {value.width} x {value.height} pixels"
    if isinstance(value, str) and value.startswith("data:"):
        return f"'{value:.50}'"
    return f"'{value:.120}'" if isinstance(value, str) else f"{type(value).__name__} {value!r:.120}"
