"""Sections of ``python -m verl.trainer.rm_trainer`` and ``python -m verl.trainer.dpo_trainer``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from verl.config.base import BaseConfig, OneOrMany, section, setting, subsection
from verl.config.megatron import McoreEngineConfig, with_own_files
from verl.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.config.problems import Problem
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig
from verl.config.trainer import SFTTrainerConfig


@section
class PreferenceDataConfig(SupervisedDataConfig):
    """Pairs of responses to one prompt, the better one and the worse one."""

    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/preference/train.parquet", validate_default=True, path=True, remote=True
    )
    max_token_len_per_gpu: int = setting(8192, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`; both sides of a pair count."""
    prompt_key: str | None = setting("prompt")
    """Column of the prompt, text or messages; null if both sides are whole conversations."""
    chosen_key: str = setting("chosen")
    """Column of the better response, text or messages."""
    rejected_key: str = setting("rejected")
    """Column of the worse response, text or messages."""
    tools_key: str | None = setting("tools")
    """Column of tool descriptions, shown on both sides; null ignores it."""
    enable_thinking_key: str | None = setting("enable_thinking")
    """Column with the chat template's switch for thinking; null ignores it."""
    image_key: str = setting("images")
    """Column of images, one for each `<image>` in the prompt; for models with an image processor."""
    truncation: Literal["error", "left", "right"] = setting("error")
    """Treatment of a longer pair: an error, or truncation of both sides, of the prompt (left) or of the ends
    (right)."""


@section
class RewardModelLossConfig(BaseConfig):
    """The Bradley-Terry loss of the reward model."""

    margin: float = setting(0.0, ge=0)
    """Difference of rewards, chosen minus rejected, at which the model of the loss gives both sides equal odds."""
    label_smoothing: float = setting(0.0, ge=0, le=0.5)
    """Share of the pairs that are assumed to be labelled the wrong way round."""
    center_rewards_coefficient: float = setting(0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which keeps rewards around zero; 0.01 is usual."""


@section
class DirectPreferenceLossConfig(BaseConfig):
    """The loss of direct preference optimisation."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = setting("sigmoid")
    """`sigmoid` (DPO), `hinge` (SLiC) or `ipo`."""
    beta: float = setting(0.1, gt=0)
    """Strength of the penalty on deviating from the reference; implicit rewards are beta times the log-ratio to it."""
    label_smoothing: float = setting(0.0, ge=0, le=0.5)
    """Share of the pairs that are assumed to be labelled the wrong way round (cDPO); with `loss_type=sigmoid`."""
    margin: float = setting(0.0, ge=0)
    """Margin by which the reward of the chosen response should exceed the other (the gamma of SimPO)."""
    reference_free: bool = setting(False)
    """Use log-probs as rewards instead of their ratio to a reference (SimPO); no reference is loaded."""
    average_log_prob: bool = setting(False)
    """Use the mean of the tokens' log-probs instead of the sum (SimPO), to normalise by length."""
    sft_coef: float = setting(0.0, ge=0)
    """Weight of an additional supervised loss on the chosen responses, -log p per token, which keeps them likely."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Label smoothing needs `sigmoid`, and `ipo` needs summed log-probs."""
        if self.label_smoothing and self.loss_type != "sigmoid":
            cause = f"{path}.loss_type={self.loss_type} has no label smoothing"
            remedy = f"set {path}.loss_type=sigmoid, or this to 0"
            yield Problem(f"{path}.label_smoothing", self.label_smoothing, cause, "0", remedy)
        if self.average_log_prob and self.loss_type == "ipo":
            remedy = f"set it to false, or {path}.loss_type=sigmoid"
            yield Problem(f"{path}.average_log_prob", True, "IPO is defined on whole responses", "false", remedy)


@section
class ReferenceModelConfig(BaseConfig):
    """The frozen reference policy, for the log-ratios of the loss."""

    path: str | None = setting(None, path=True, remote=True)
    """Folder or `.gguf` file of the model, or its name on the hub; null uses `model.path`, as before training."""
    param_offload: bool = setting(False)
    """Keep its parameters in host memory while it is idle."""


@section
class PreferenceConfig(SupervisedConfig):
    """Training on pairs of a better and a worse response: data, model, optimizer, run."""

    data: PreferenceDataConfig = subsection(PreferenceDataConfig)
    """Pairs of responses."""


@section
class RMConfig(PreferenceConfig):
    """A reward model from preferences: data, model, loss, optimizer, run."""

    trainer: SFTTrainerConfig = subsection(
        SFTTrainerConfig, project_name="reward-model", experiment_name="test", total_epochs=1
    )
    loss: RewardModelLossConfig = subsection(RewardModelLossConfig)
    """The loss."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Tokens of experts are counted in policies alone."""
        if self.trainer.log_expert_counts:
            yield Problem("trainer.log_expert_counts", True, "the experts of a reward model are not counted", "false")


@section
class DPOConfig(PreferenceConfig):
    """Direct preference optimisation: data, model, reference, loss, optimizer, run."""

    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig, lr=5e-7, lr_scheduler_type="cosine")
    trainer: SFTTrainerConfig = subsection(SFTTrainerConfig, project_name="dpo", experiment_name="test", total_epochs=1)
    loss: DirectPreferenceLossConfig = subsection(DirectPreferenceLossConfig)
    """The loss."""
    ref: ReferenceModelConfig = subsection(ReferenceModelConfig)
    """The reference."""

    def problems(self, path: str) -> Iterator[Problem]:
        """A reference is named only if the loss uses one."""
        if self.loss.reference_free and self.ref.path is not None:
            cause = "no reference is read with loss.reference_free=true"
            yield Problem("ref.path", self.ref.path, cause, "null", "leave it null, or set loss.reference_free=false")

    @property
    def reference_model(self) -> HFModelConfig:
        """The reference's model: the policy before training, unless `ref.path` names another."""
        return replace(self.model, path=self.ref.path or self.model.path)

    @property
    def reference_is_policy(self) -> bool:
        """True if the reference is the policy without its LoRA adapters, so that no second model is loaded."""
        return self.model.has_adapters and self.ref.path is None

    @property
    def reference_engine(self) -> FSDPEngineConfig | McoreEngineConfig:
        """Sharding and precision of the reference: the policy's, with its own ``param_offload``."""
        placement = replace(self.placement, param_offload=self.ref.param_offload)
        return placement if self.ref.path is None else with_own_files(placement)
