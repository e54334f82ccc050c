"""Programming tasks: the rules of where and how long programs run."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem


def code_rewards(config: PPOConfig) -> Iterator[Problem]:
    """The code service has an address, and a program's time ends before that of its sample."""
    model = config.reward_model
    url = model.sandbox_fusion.url
    if url and not url.startswith(("http://", "https://")):
        yield Problem(
            "reward_model.sandbox_fusion.url",
            url,
            "it is no address of http",
            "http://HOST:PORT or https://HOST/run_code",
            "leave it null to run programs in the sandbox of this machine",
        )
    total = model.scorer_kwargs.get("total_time_limit_s")
    if isinstance(total, (int, float)) and total >= model.timeout_s:
        yield Problem(
            "reward_model.scorer_kwargs.total_time_limit_s",
            total,
            f"the sample is given up after reward_model.timeout_s={model.timeout_s:g}, so a slow program would be a "
            "failure of the scorer and not a wrong answer",
            f"less than {model.timeout_s:g}",
            "lower it, or raise reward_model.timeout_s",
        )
