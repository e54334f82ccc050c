"""Processors of vision-language models, with images prepared by Pillow on every machine.

Transformers has two implementations of an image processor, one by torchvision and one by Pillow, whose resized images
differ slightly. The one by Pillow is always taken, so that a run sees the same pixels everywhere. The processors of
videos need torchvision; without it a processor has no part for videos.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin

from verl.vision.families import FAMILIES, IMAGE_TOKEN

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a processor beside those of its tokenizer."""


def load_processor(path: str, tokenizer: Callable[[], Any], **kwargs: Any) -> ProcessorMixin | None:
    """Load the processor of a model folder or hub name; None if Transformers makes none of its files.

    Args:
        path: model folder or hub name.
        tokenizer: loads the tokenizer of ``path``.
        kwargs: for ``from_pretrained``.

    Raises:
        OSError, ValueError: the files cannot be read, as Transformers has it.
    """
    family = _family_in(path, kwargs.get("trust_remote_code", False))
    if family is None:
        found = AutoProcessor.from_pretrained(path, **kwargs)
        return found if isinstance(found, ProcessorMixin) else None
    images = AutoImageProcessor.from_pretrained(path, backend="pil", **kwargs)
    if find_spec("torchvision") is None:
        loaded = tokenizer()
        return _for_images(family)(image_processor=images, tokenizer=loaded, chat_template=loaded.chat_template)
    processor = AutoProcessor.from_pretrained(path, **kwargs)
    processor.image_processor = images
    return processor


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
