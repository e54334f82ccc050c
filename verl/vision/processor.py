"""Processors of vision-language models, with images prepared by Pillow on every machine.

Transformers has two implementations of an image processor, one by torchvision and one by Pillow, whose resized images
differ slightly. The one by Pillow is always taken, so that a run sees the same pixels everywhere, and the frames of
videos are prepared by it too (:mod:`verl.vision.prompts`): the library's processors of videos need torchvision. Of
their files the limits of pixels are read here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin

from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.vision.families import FAMILIES, IMAGE_TOKEN, TIMESTAMPED, VisionConfig
from verl.vision.videos import VideoLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_TOKENS, MAX_TOKENS = 128, 768
"""Limits of a frame, or for Qwen3-VL of a whole video, where the model's files have none; those of Transformers."""
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a processor beside those of its tokenizer."""


def load_processor(path: str, tokenizer: Callable[[], PreTrainedTokenizerBase], **kwargs: Any) -> ProcessorMixin | None:
    """Load the processor of a model folder or hub name; None if the model has none.

    Args:
        path: model folder or hub name.
        tokenizer: loads the tokenizer of ``path``.
        kwargs: for ``from_pretrained``.

    Raises:
        OSError, ValueError: Transformers cannot read the files.
    """
    family = _family_in(path, kwargs.get("trust_remote_code", False))
    if family is None:
        processor_or_tokenizer = AutoProcessor.from_pretrained(path, **kwargs)
        return processor_or_tokenizer if isinstance(processor_or_tokenizer, ProcessorMixin) else None
    images = AutoImageProcessor.from_pretrained(path, backend="pil", **kwargs)
    processor: Any
    if find_spec("torchvision") is None:
        loaded = tokenizer()
        processor = _for_images(family)(image_processor=images, tokenizer=loaded, chat_template=loaded.chat_template)
    else:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
        processor.image_processor = images
    processor.video_settings = _video_settings(path, images, kwargs.get("trust_remote_code", False))
    return processor


_SHARED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""Settings of frames, which are those of images."""


def _video_settings(path: str, images: object, trust_remote_code: bool) -> JsonObject:
    """Read a model's settings of videos from its files: limits of pixels, None without any, and its count of seconds.

    ``unlike_images`` are settings of frames that its images have otherwise.
    """
    sizes: JsonObject = {}
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        file = _file_of(path, name)
        if file is not None:
            read = json.loads(file.read_text())
            sizes |= (read.get("video_processor") or {}) if name == "processor_config.json" else read
    size = sizes.get("size") or {}
    settings = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    settings |= {key: sizes[key] for key in settings if sizes.get(key) is not None}
    vision = VisionConfig.from_config(
        transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    )
    unlike = [key for key in _SHARED if key in sizes and _listed(sizes[key]) != _listed(getattr(images, key))]
    seconds = None if vision is None else vision.positions_per_second
    return settings | {"positions_per_second": seconds, "unlike_images": unlike}


def _file_of(path: str, name: str) -> Path | None:
    """A file of a model folder or hub name; None if there is none."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    try:
        return Path(hf_hub_download(path, name))
    except EntryNotFoundError:  # also one that is not in the cache of a machine without a network
        return None


def _listed(value: object) -> object:
    """Convert a tuple to a list, as JSON would."""
    return list(value) if isinstance(value, tuple) else value


def video_limits(processor: ProcessorMixin) -> VideoLimits:
    """Return how a model wants its videos.

    Raises:
        ConfigError: the processor was not loaded by :func:`load_processor`, or prepares frames unlike images.
    """
    name = type(processor).__name__
    settings = getattr(processor, "video_settings", None)
    if settings is None:
        raise ConfigError(
            f"this {name} does not say how videos are prepared. Load it by verl.utils.hf_processor, which reads the "
            "files of the model."
        )
    if settings["unlike_images"]:
        raise ConfigError(
            f"the files of this {name} have other {', '.join(settings['unlike_images'])} for videos than for images, "
            "and frames are prepared as images here. Make video_preprocessor_config.json like preprocessor_config.json."
        )
    size = processor.image_processor.patch_size
    area = (processor.image_processor.merge_size * size) ** 2
    least, most = settings["min_pixels"], settings["max_pixels"]
    return VideoLimits(
        patch_size=size,
        min_pixels=MIN_TOKENS * area if least is None else least,
        max_pixels=MAX_TOKENS * area if most is None else most,
        are_totals=name in TIMESTAMPED,
    )


def positions_per_second(processor: object) -> float | None:
    """Return the positions that a second of a video takes along time; None for a model that does not count seconds."""
    return getattr(processor, "video_settings", {}).get("positions_per_second")


def write_processor(source: str, target: Path, **kwargs: Any) -> None:
    """Write the files of the processor of a model folder or hub name to ``target``; nothing for a model of text."""
    if Path(source).is_dir():
        for name in FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, target / name)
    elif _family_in(source, kwargs.get("trust_remote_code", False)) is not None:
        AutoImageProcessor.from_pretrained(source, backend="pil", **kwargs).save_pretrained(target)


def _family_in(path: str, trust_remote_code: bool) -> str | None:
    """The class of the processor of a model folder, if its config is of one of our families."""
    config = Path(path) / "config.json"
    if config.is_file():
        return FAMILIES.get(json.loads(config.read_text()).get("model_type", ""))
    if Path(path).is_dir():  # a folder of a tokenizer alone
        return None
    return FAMILIES.get(transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).model_type)


@cache
def _for_images(name: str) -> type[ProcessorMixin]:
    """Derive a processor class of Transformers that has no part for videos; it has the same name, which files hold."""
    base = getattr(transformers, name)

    def initialize(self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return type(name, (base,), {"__init__": initialize, "__module__": base.__module__})
