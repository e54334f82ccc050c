"""Sections of ``python -m verl.trainer.sft_trainer``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from verl.config.base import BaseConfig, OneOrMany, section, setting, subsection
from verl.config.distillation import DivergenceConfig
from verl.config.megatron import McoreEngineConfig, with_own_files
from verl.config.model import FSDPEngineConfig, HFModelConfig
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
class SFTDistillationConfig(BaseConfig):
    """A frozen teacher, whose distributions the model learns at the tokens of the data (off-policy distillation)."""

    model_path: str | None = setting(None, path=True, remote=True)
    """Model folder or Hugging Face name of the teacher, with the model's vocabulary; null learns from the data alone.
    """
    param_offload: bool = setting(False)
    """Keep its parameters in host memory while it is idle."""
    cross_entropy_coef: float = setting(0.0, ge=0)
    """Weight of -log p of the data's tokens beside the divergence from the teacher; 0 leaves it out."""
    distillation_loss: DivergenceConfig = subsection(DivergenceConfig, loss_mode="forward_kl")
    """The divergence, and its weight."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Something is left to learn from."""
        loss = self.distillation_loss
        if self.model_path is not None and not loss.distillation_loss_coef:
            cause = "a teacher is loaded, and nothing would be learnt from it"
            remedy = f"set {path}.model_path=null to learn from the data alone"
            yield Problem(f"{path}.distillation_loss.distillation_loss_coef", 0, cause, "a number > 0", remedy)


@section
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: data, model, optimizer, run."""

    data: SFTDataConfig = subsection(SFTDataConfig)
    """Conversations."""
    distillation: SFTDistillationConfig = subsection(SFTDistillationConfig)
    """A teacher beside the data."""

    @property
    def teacher_model(self) -> HFModelConfig:
        """The teacher's model, loaded as the trained one but for its files, their changes and adapters."""
        changes = {"lora_rank": 0, "lora_adapter_path": None, "hf_config_path": None, "tokenizer_path": None}
        path = self.distillation.model_path or self.model.path
        return replace(self.model, path=path, override_config={}, **changes)

    @property
    def teacher_engine(self) -> FSDPEngineConfig | McoreEngineConfig:
        """Sharding and precision of the teacher: the model's, with its own ``param_offload``."""
        return with_own_files(replace(self.placement, param_offload=self.distillation.param_offload))
