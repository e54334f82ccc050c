"""Videos of a data row: which frames are taken, in which size, and their pictures one after the other."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from verl.base.requirements import install_command
from verl.base.types import JsonMapping, JsonObject
from verl.errors import ConfigError, DataError
from verl.vision.data_urls import MAX_IMAGE_PIXELS
from verl.vision.images import MERGE, process_image, smart_resize

if TYPE_CHECKING:
    from av import VideoFrame

FRAMES = 2
"""Frames that become one step of time in all families of :mod:`verl.vision.families`."""
RATE = 2.0
"""Frames of each second that are taken of a file, and that a list of frames has, unless the row says otherwise."""
MIN_FRAMES, MAX_FRAMES = 4, 768
"""Fewest frames that are taken of a file which has as many, and most that are taken of anything."""
MAX_TOKENS = 115_200
"""Most tokens of a video whose row sets no ``total_pixels``: 0.9 x 128,000, as in the package qwen-vl-utils."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,gif,ogg,asf,m4v,apng,webp_anim"
"""Containers that are opened. FFmpeg knows others that read further files or addresses, or draw texts."""
_NUMBERS = {
    "fps": 0.0, "nframes": 1.0, "min_frames": 1.0, "max_frames": 1.0, "min_pixels": 1.0, "max_pixels": 1.0,
    "total_pixels": 1.0, "resized_height": 1.0, "resized_width": 1.0,
}  # fmt: skip
"""Settings of a video, with their lower bounds; that of ``fps`` is not allowed itself."""
_SOURCES = ("bytes", "video", "path")
"""Keys under which a row may hold the file of a video."""


@dataclass(frozen=True)
class Video:
    """A video in a row of data."""

    value: object


@dataclass(frozen=True)
class VideoLimits:
    """Settings of videos in a model's files."""

    patch_size: int
    min_pixels: float
    max_pixels: float
    are_totals: bool = False
    """True if the limits are for all frames together, else for each."""

    @property
    def factor(self) -> int:
        """Edge of a token in pixels."""
        return MERGE * self.patch_size


@dataclass(frozen=True)
class Clip:
    """A video with its chosen frames and their size; the pictures are decoded on demand."""

    source: Sequence[object] | bytes | str
    """Pictures, the bytes of a file, or its path."""
    frame_indices: tuple[int, ...]
    """Indices of the frames that are used, an even number of them; the last may stand twice."""
    rate: float
    """Frames per second before any were left out."""
    total: int
    """Frames before any were left out."""
    height: int
    width: int
    """Size of each frame as the model sees it."""
    where: str = field(repr=False)
    """File and row, for errors."""

    def steps(self) -> int:
        """Steps of time."""
        return len(self.frame_indices) // FRAMES

    def seconds_per_step(self) -> float:
        """Seconds between two steps of time."""
        return FRAMES * self.total / (len(set(self.frame_indices)) * self.rate)

    def times(self) -> list[float]:
        """Seconds from the beginning to the middle of each step."""
        pairs = zip(self.frame_indices[::FRAMES], self.frame_indices[1::FRAMES], strict=True)
        return [(first + second) / 2 / self.rate for first, second in pairs]

    def frames(self) -> Iterator[Image.Image]:
        """Decode the chosen frames in turn; only the latest is kept in memory.

        Raises:
            DataError: a frame cannot be read, or has another size than the first; the message names the row.
        """
        frames = _frames_of_file(self) if isinstance(self.source, bytes | str) else _frames_of_list(self, self.source)
        last, size = None, (self.width, self.height)
        for last in frames:
            last = last if last.size == size else last.resize(size)
            yield last
        if last is not None and len(set(self.frame_indices)) < len(self.frame_indices):
            yield last


def open_video(value: object, limits: VideoLimits, where: str) -> Clip:
    """Choose frames and size of a video, decoding only the first picture of a list, and only the start of a file.

    Args:
        value: a list of pictures (see :func:`verl.vision.images.read_image`), the path or the bytes of a file, or a
            mapping with one of these as ``video``, ``path`` or ``bytes`` and settings as in qwen-vl-utils: ``fps`` or
            ``nframes``, ``min_frames``, ``max_frames``, ``min_pixels``, ``max_pixels``, ``total_pixels``,
            ``resized_height``, ``resized_width``. Of a list ``fps`` says how many frames a second of it has.
        limits: of the model.
        where: file and row, for errors.

    Raises:
        DataError: it is none of these, has no frames, or cannot be read; the message names ``where``.
        ConfigError: it is a file, and the package ``av`` is not installed.
    """
    source, settings = _source(value, where)
    invalid = {key: n for key, n in settings.items() if not _is_number(n, _NUMBERS[key]) or (key == "fps" and n <= 0)}
    if invalid:
        raise DataError(f"{where}: a video has {invalid}; settings of videos are numbers of at least 1, fps above 0.")
    if "fps" in settings and "nframes" in settings:
        raise DataError(f"{where}: a video has fps and nframes; each alone says how many frames are taken. Keep one.")
    if isinstance(source, bytes | str):
        total, rate, size = _looked_at(source, where)
        frame_indices = _indices_at_rate(total, rate, settings)
    else:
        total, rate = len(source), float(settings.get("fps", RATE))
        size = process_image(source[0], limits.patch_size, f"{where}, frame 0").size
        most = settings.get("max_frames", settings.get("nframes", MAX_FRAMES))
        frame_indices = _spread(total, _whole(min(settings.get("nframes", total), most, total)))
    frame_indices += frame_indices[-1:] * (len(frame_indices) % FRAMES)
    try:
        height, width = _size(size[1], size[0], len(frame_indices), settings, limits)
    except ValueError as error:
        raise DataError(f"{where}: {str(error).replace('an image', 'a video')}") from error
    return Clip(source, frame_indices, rate, total, height, width, where)


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least


def _source(value: object, where: str) -> tuple[Sequence[object] | bytes | str, JsonObject]:
    """Pictures, bytes or path of a video, and its settings."""
    settings: JsonObject = {}
    while isinstance(value, Mapping):
        inner = {key: v for key, v in value.items() if v is not None and key != "type"}
        unknown = [key for key in inner if key not in (*_SOURCES, *_NUMBERS)]
        if unknown:
            raise DataError(
                f"{where}: a video has {', '.join(map(str, unknown))}, which is not read here. Known are "
                f"{', '.join((*_SOURCES, *_NUMBERS))}."
            )
        settings |= {key: inner[key] for key in _NUMBERS if key in inner}
        value = next((inner[key] for key in _SOURCES if key in inner), None)
        if value is None:
            raise DataError(f"{where}: a video is a mapping without {', '.join(_SOURCES)}. It needs one of them.")
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise DataError(f"{where}: a video has 0 bytes.")
        return bytes(value), settings
    if isinstance(value, Path):
        return str(value), settings
    if isinstance(value, str):
        return _path(value, where), settings
    if not isinstance(value, Sequence | np.ndarray):
        raise DataError(
            f"{where}: a video is {type(value).__name__} {value!r:.120}. Give a list of pictures, or the path or bytes "
            "of a video file."
        )
    if not len(value):
        raise DataError(f"{where}: a video has no frames.")
    return list(value), settings


def _path(value: str, where: str) -> str:
    if ("://" in value and not value.startswith("file://")) or value.startswith("data:"):
        raise DataError(
            f"{where}: the video '{value:.120}' is an address, and a run reads local files only. Download it first, or "
            "put its bytes into the data file."
        )
    path = Path(value.removeprefix("file://")).expanduser()
    if not path.is_file():
        raise DataError(f"{where}: the video '{value:.120}' is no file. Give its path, or take the row out.")
    return str(path)


def _whole(value: float) -> int:
    return max(1, int(value))


def _spread(total: int, count: int) -> tuple[int, ...]:
    """Numbers of ``count`` frames from the first to the last, in even steps."""
    return tuple(int(n) for n in np.linspace(0, total - 1, count).round())


def _indices_at_rate(total: int, rate: float, settings: JsonMapping) -> tuple[int, ...]:
    """Frames of a file: ``nframes``, or ``fps`` of each second within ``min_frames`` and ``max_frames``; all even."""
    if "nframes" in settings:
        count = round(settings["nframes"] / FRAMES) * FRAMES
        most = settings.get("max_frames", count)
    else:
        count = max(total / rate * settings.get("fps", RATE), settings.get("min_frames", MIN_FRAMES))
        most = settings.get("max_frames", MAX_FRAMES)
    count = min(count, most, total)
    return _spread(total, _whole(count if count < FRAMES else count // FRAMES * FRAMES))


def _size(height: int, width: int, count: int, settings: JsonMapping, limits: VideoLimits) -> tuple[int, int]:
    share = count if limits.are_totals else 1
    least = settings.get("min_pixels", limits.min_pixels / share)
    total = settings.get("total_pixels", MAX_TOKENS * limits.factor**2)
    max_pixels = settings.get("max_pixels", limits.max_pixels / share)
    most = min(max_pixels, total * FRAMES / count)
    if "min_pixels" not in settings:  # a long video may go below the model's lower limit, not much above its share
        least = min(least, most)
    height, width = int(settings.get("resized_height", height)), int(settings.get("resized_width", width))
    return smart_resize(height, width, limits.factor, int(least), max(int(most), limits.factor**2))


# ---- pictures of a list


def _frames_of_list(clip: Clip, pictures: Sequence[object]) -> Iterator[Image.Image]:
    size = None
    for frame_index in sorted(set(clip.frame_indices)):
        image = process_image(pictures[frame_index], where=f"{clip.where}, frame {frame_index}")
        size = size or image.size
        if image.size != size:
            raise DataError(
                f"{clip.where}: frame {frame_index} of a video has {image.width} x {image.height} pixels, and the "
                f"first has {size[0]} x {size[1]}. Bring the frames of a video to one size."
            )
        yield image


# ---- pictures of a file


def _library(where: str) -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"{where}: reading video files needs the package av, which is not installed ({error}). Install "
            f"it ({install_command('video')}), or give each video as a list of pictures."
        ) from error
    return av


@contextmanager
def _opened(source: bytes | str, where: str) -> Iterator[tuple[Any, Any]]:
    """Open a file; give its container and its stream of pictures.

    Raises:
        DataError: what goes wrong in the context with the file.
    """
    av = _library(where)
    # A file object keeps FFmpeg from taking a path for an address.
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        try:
            options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
            with av.open(file, options=options, metadata_errors="replace") as container:
                if not container.streams.video:
                    raise ValueError("it has no pictures")
                stream = container.streams.video[0]
                if stream.width * stream.height > MAX_IMAGE_PIXELS:
                    raise ValueError(
                        f"it has {stream.width} x {stream.height} pixels, and {MAX_IMAGE_PIXELS} are the most"
                    )
                yield container, stream
        except (av.FFmpegError, OSError, ValueError) as error:
            shown = f"of {len(source)} bytes" if isinstance(source, bytes) else f"'{source}'"
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{where}: the video {shown} cannot be read: {reason}. Replace the file, or take the row out."
            ) from error


def _looked_at(source: bytes | str, where: str) -> tuple[int, float, tuple[int, int]]:
    """Number of frames, frames per second, and width and height of the first frame."""
    with _opened(source, where) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError("it has no frames")
        total = stream.frames
        rate: Fraction | None = stream.average_rate or stream.guessed_rate
        size = _upright(first).size
    if not total:  # some containers do not say
        with _opened(source, where) as (container, stream):
            total = sum(1 for packet in container.demux(stream) if packet.size)
    if not rate:
        raise DataError(f"{where}: a video file does not say how many frames a second it has. Give pictures instead.")
    return total, float(rate), size


def _frames_of_file(clip: Clip) -> Iterator[Image.Image]:
    assert isinstance(clip.source, bytes | str)
    wanted_indices, frame_index = set(clip.frame_indices), -1
    with _opened(clip.source, clip.where) as (container, stream):
        for frame_index, frame in enumerate(container.decode(stream)):
            if frame_index in wanted_indices:
                yield _upright(frame)
            if frame_index >= clip.frame_indices[-1]:
                return
        raise ValueError(f"it ends after {frame_index + 1} of its {clip.total} frames")


def _upright(frame: VideoFrame) -> Image.Image:
    """The picture of a decoded frame, turned as the file says."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
