"""The whole configuration of ``python -m verl.trainer.main_generation``."""

from __future__ import annotations

from typing import Any, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.trainer.config.config import RayConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.rollout import RolloutConfig


@section
class GenerationTrainerConfig(BaseConfig):
    """Where sampling runs."""

    nnodes: int = setting(1, ge=1)
    """Nodes."""
    n_gpus_per_node: int = setting(8, ge=1)
    """Ranks per node: one per GPU, or processes on a machine without one."""
    device: Literal["cuda", "cpu"] = setting("cuda")
    """`cuda` uses GPUs if there are any and otherwise the CPU; `cpu` always the CPU."""
    controller: Literal["ray", "local"] = setting("ray")
    """`ray` starts ranks as Ray actors; `local` runs one rank in this process, for a debugger."""


@section
class GenerationDataConfig(BaseConfig):
    """Prompts to answer, and where the answers go."""

    path: str | None = setting(None, missing=True, path=True)
    """File of prompts: parquet, json or jsonl."""
    prompt_key: str = setting("prompt")
    """Column of the prompt, a list of messages."""
    n_samples: int = setting(5, ge=1)
    """Responses per prompt."""
    output_path: str | None = setting(None, missing=True, path=True)
    """File to write: the prompts' rows and a column `responses`."""
    batch_size: int = setting(128, ge=1)
    """Prompts per batch."""
    apply_chat_template_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the chat template."""


def _wide_sampling() -> RolloutConfig:
    return RolloutConfig(top_k=50, top_p=0.7, prompt_length=1536)


@section
class GenerationConfig(BaseConfig):
    """Sampling from a model, without training."""

    trainer: GenerationTrainerConfig = subsection(GenerationTrainerConfig)
    """Where sampling runs."""
    data: GenerationDataConfig = subsection(GenerationDataConfig)
    """Prompts and answers."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model that answers."""
    rollout: RolloutConfig = subsection(_wide_sampling)
    """How responses are sampled."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """How Ray is started."""
