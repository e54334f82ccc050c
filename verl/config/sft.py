"""Sections of ``python -m verl.trainer.sft_trainer``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from verl.config.base import OneOrMany, section, setting, subsection
from verl.config.problems import Problem
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig


@section
class SFTDataConfig(SupervisedDataConfig):
    """Conversations, or pairs of prompt and response."""

    messages_key: str = setting("messages")
    """Column of the conversation; the loss is computed on the assistant's messages."""
    tools_key: str | None = setting("tools")
    """Column of tool descriptions shown to the assistant; null ignores it."""
    enable_thinking_key: str | None = setting("enable_thinking")
    """Column with the chat template's switch for thinking; null ignores it."""
    image_key: str = setting("images")
    """Column of images, one for each `<image>` in the messages; for models with an image processor."""
    prompt_key: str | None = setting(None)
    """Column of a single prompt; with `response_key` it replaces `messages_key`."""
    response_key: str | None = setting(None)
    """Column of its response, on which the loss is computed."""
    prompt_dict_keys: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Keys to follow inside `prompt_key`."""
    response_dict_keys: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Keys to follow inside `response_key`."""
    pad_mode: Literal["no_padding", "right"] = setting("no_padding")
    """Batches without padding, or padded at the right to `max_length`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """``prompt_key`` and ``response_key`` are set together."""
        if (self.prompt_key is None) != (self.response_key is None):
            present, absent = ("prompt_key", "response_key")[:: 1 if self.response_key is None else -1]
            remedy = f"set {path}.{absent} too, or neither of them to read conversations from {path}.messages_key"
            yield Problem(f"{path}.{present}", self[present], f"{path}.{absent} is not set", remedy=remedy)


@section
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: data, model, optimizer, run."""

    data: SFTDataConfig = subsection(SFTDataConfig)
    """Conversations."""
