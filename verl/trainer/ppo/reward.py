"""From the configuration to a reward manager, and from a batch to its scores."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.trainer.config import PPOConfig
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_object
from verl.utils.reward_score import check_settings, default_compute_score, is_async
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.function import form_of, tensors_of

FORMATS = {"math": "math_reward"}
"""Names of ``reward_model.reward_format`` that are not data sources."""


def get_custom_reward_fn(config: PPOConfig) -> Callable[..., Any] | None:
    """The function that ``custom_reward_function`` names, with its ``reward_kwargs`` bound; None if it names none.

    Raises:
        ConfigError: there is no such file or function, or it has neither form of
            :mod:`verl.workers.reward_manager.function`.
    """
    chosen = config.custom_reward_function
    if not chosen.path:
        return None
    function = load_object(chosen.path, chosen.name, "custom_reward_function")
    if not callable(function):
        raise ConfigError(f"custom_reward_function.name='{chosen.name}' is {type(function).__name__}, not a function.")
    form_of(function, chosen.reward_kwargs | config.reward_model.scorer_kwargs)
    return functools.partial(function, **chosen.reward_kwargs)


def load_reward_manager(
    config: PPOConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager:
    """The reward manager of a configuration.

    Its function is the custom one, or the scorer of ``reward_model.reward_format`` for all rows, or
    goes by data source; ``reward_model.scorer_kwargs`` are bound to it. The manager is the
    registered one called ``reward_manager.name``, or, with ``reward_manager.source=importlib``, the
    class of that name in the file ``reward_manager.module.path``; it is given
    ``reward_model.reward_kwargs``, and ``max_error_rate`` if it has such a parameter.

    Args:
        config: the whole configuration.
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        reward_kwargs: further arguments of the manager; they win over the configuration's.

    Raises:
        ConfigError: a name is unknown, a file is missing, or a function has neither form.
        UnknownDataSourceError: ``reward_format`` is no scorer.
    """
    function = _reward_function(config)
    if config.reward_model.scorer_kwargs:
        function = functools.partial(function, **config.reward_model.scorer_kwargs)
    cls = _manager_class(config)
    settings: dict[str, Any] = {"reward_fn_key": config.data.reward_fn_key}
    if "max_error_rate" in inspect.signature(cls).parameters:
        settings["max_error_rate"] = config.reward_model.max_error_rate
    return cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function,
        **{**settings, **config.reward_model.reward_kwargs, **reward_kwargs},
    )


def check_reward_data(config: PPOConfig, reward_fn: Any, dataset: Any) -> None:
    """Say what scoring will miss in the data before any model loads.

    A custom data set or manager answers for itself; where a reward model scores, the data needs nothing.

    Raises:
        DataError: a column is missing.
        UnknownDataSourceError: nothing scores a row's data source.
    """
    if config.reward_model.enable or not isinstance(dataset, RLHFDataset):
        return
    if isinstance(reward_fn, AbstractRewardManager):
        reward_fn.check_dataset(dataset)


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Scores of a batch, and what the reward function said beside them.

    Args:
        data: batch with responses.
        reward_fn: a reward manager.

    Returns:
        scores (bsz, response_length), and lists of length bsz by name: ``score``,
        ``reward_status`` (``ok`` or ``error``), and the function's own.

    Raises:
        RewardError: too many samples failed, or the manager returned something of another shape.
    """
    result = reward_fn(data, return_dict=True)
    scores, extra = (result, {}) if isinstance(result, torch.Tensor) else _unpacked(result)
    expected = tensors_of(data)["responses"].shape
    if scores.shape != expected:
        raise RewardError(
            f"{type(reward_fn).__name__} returned scores of shape {tuple(scores.shape)}; "
            f"expected that of the responses, {tuple(expected)}."
        )
    if wrong := [name for name, values in extra.items() if len(values) != len(data)]:
        raise RewardError(
            f"{type(reward_fn).__name__} returned reward_extra_info['{wrong[0]}'] with {len(extra[wrong[0]])} values "
            f"for {len(data)} samples."
        )
    extra.setdefault("score", scores.sum(-1).tolist())
    extra.setdefault("reward_status", ["ok"] * len(data))
    return scores, extra


def _unpacked(result: dict[str, Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    extra = result.get("reward_extra_info") or {}
    return result["reward_tensor"], {name: list(values) for name, values in extra.items()}


def _reward_function(config: PPOConfig) -> Callable[..., Any]:
    custom, name = get_custom_reward_fn(config), config.reward_model.reward_format
    if custom is not None and name:
        raise ConfigError(
            f"both custom_reward_function.path and reward_model.reward_format='{name}' choose the reward. Set one."
        )
    if custom is not None:
        return custom
    check_settings(config.reward_model.scorer_kwargs)
    if not name:
        return default_compute_score
    source = FORMATS.get(name, name)
    check_settings(config.reward_model.scorer_kwargs, source)

    async def compute_score_async(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **kwargs: Any
    ) -> float | dict[str, Any]:
        return await default_compute_score(source, solution_str, ground_truth, extra_info, **kwargs)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **kwargs: Any
    ) -> float | dict[str, Any]:
        return default_compute_score(source, solution_str, ground_truth, extra_info, **kwargs)

    return compute_score_async if is_async(source) else compute_score


def _manager_class(config: PPOConfig) -> Any:
    chosen = config.reward_manager
    if chosen.source == "register":
        return get_reward_manager_cls(chosen.name)
    if not chosen.module.path:
        raise ConfigError("reward_manager.source=importlib needs reward_manager.module.path, the file of the class.")
    return load_object(chosen.module.path, chosen.name, "reward_manager.module")
