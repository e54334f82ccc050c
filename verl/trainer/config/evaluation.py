"""The whole configuration of ``python -m verl.trainer.main_eval``."""

from __future__ import annotations

from verl.base_config import BaseConfig, section, setting, subsection
from verl.trainer.config.config import CustomRewardFunctionConfig, RayConfig


@section
class EvalDataConfig(BaseConfig):
    """Responses to score."""

    path: str | None = setting(None, missing=True, path=True)
    """File of responses, as `main_generation` writes it."""
    prompt_key: str = setting("prompt")
    """Column of the prompt."""
    response_key: str = setting("responses")
    """Column of the responses, a list per row."""
    data_source_key: str = setting("data_source")
    """Column that chooses the scorer."""
    reward_model_key: str = setting("reward_model")
    """Column that holds the ground truth."""


@section
class EvalConfig(BaseConfig):
    """Scoring of stored responses."""

    data: EvalDataConfig = subsection(EvalDataConfig)
    """Responses to score."""
    custom_reward_function: CustomRewardFunctionConfig = subsection(CustomRewardFunctionConfig)
    """A scorer of your own."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """How Ray is started."""
