"""Root sections of ``python -m verl.trainer.main_generation`` and ``python -m verl.trainer.main_eval``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.model import HFModelConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.problems import Problem
from verl.config.reward import CustomRewardFunctionConfig
from verl.config.rollout import RolloutConfig, all_the_same
from verl.config.trainer import PlacementConfig, RayConfig


@section
class GenerationDataConfig(BaseConfig):
    """Files of prompts and of their responses."""

    path: str | None = setting(None, missing=True, path=True, remote=True)
    """File of prompts: parquet, json or jsonl."""
    prompt_key: str = setting("prompt")
    """Column of the prompt, a list of messages."""
    tools_key: str | None = setting("tools")
    """Column of tool descriptions shown in the prompt; null ignores it."""
    enable_thinking_key: str | None = setting("enable_thinking")
    """Column with the chat template's switch for thinking; null ignores it."""
    n_samples: int = setting(5, ge=1)
    """Responses per prompt."""
    output_path: str | None = setting(None, missing=True, path=True)
    """Output file: the rows of the prompts with a column `responses`."""
    batch_size: int = setting(128, ge=1)
    """Prompts per batch."""
    apply_chat_template_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the chat template."""


@section
class GenerationConfig(BaseConfig):
    """Sampling from a model, without training."""

    trainer: PlacementConfig = subsection(PlacementConfig)
    """Ranks and device of the run."""
    data: GenerationDataConfig = subsection(GenerationDataConfig)
    """Files of prompts and of their responses."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model to sample from."""
    rollout: RolloutConfig = subsection(RolloutConfig, top_k=50, top_p=0.7, prompt_length=1536)
    """Sampling settings and engine."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """Settings with which Ray is started."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Greedy decoding has one response per prompt, and nothing is observed that only training has."""
        if not self.rollout.do_sample and self.data.n_samples > 1:
            yield all_the_same("rollout", "data.n_samples", self.data.n_samples)
        if not self.rollout.merge_adapters:
            cause = "weights are loaded once, so nothing is saved by sending adapters alone"
            yield Problem("rollout.merge_adapters", False, cause, "true", "leave it out")
        if self.rollout.nnodes:
            cause = "nothing is trained, and all ranks (trainer.nnodes, n_gpus_per_node) sample"
            yield Problem("rollout.nnodes", self.rollout.nnodes, cause, "0")
        if self.rollout.prometheus.enable:
            cause = "only training runs serve metrics (main_ppo)"
            yield Problem("rollout.prometheus.enable", True, cause, "false")
        if self.rollout.trace.backend is not None:
            cause = "only training runs are traced (main_ppo)"
            yield Problem("rollout.trace.backend", self.rollout.trace.backend, cause, "null")

    @property
    def roles(self) -> ActorRolloutRefConfig:
        """Configuration of workers that only sample."""
        # No trainer needs the memory between two batches, so the weights are loaded once and kept.
        return ActorRolloutRefConfig(model=self.model, rollout=replace(self.rollout, free_cache_engine=False))


@section
class EvalDataConfig(BaseConfig):
    """Responses to score."""

    path: str | None = setting(None, missing=True, path=True, remote=True)
    """File of responses, as written by `main_generation`."""
    prompt_key: str = setting("prompt")
    """Column of the prompt."""
    response_key: str = setting("responses")
    """Column of the responses, a list per row."""
    data_source_key: str = setting("data_source")
    """Column that chooses the scorer."""
    reward_model_key: str = setting("reward_model")
    """Column with the ground truth."""


@section
class EvalConfig(BaseConfig):
    """Scoring of stored responses."""

    data: EvalDataConfig = subsection(EvalDataConfig)
    """Responses to score."""
    custom_reward_function: CustomRewardFunctionConfig = subsection(CustomRewardFunctionConfig)
    """Your own scorer."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """Settings with which Ray is started."""
