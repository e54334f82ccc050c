"""The reward manager of a configuration, and scoring by it, for the trainer and for programs of users."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl.base.import_utils import load_object
from verl.config import PPOConfig
from verl.config.agent import ENVIRONMENT_AGENT
from verl.datasets.rl_dataset import RLHFDataset
from verl.errors import ConfigError
from verl.experience.scoring import compute_reward
from verl.protocol import DataProto
from verl.schema import require
from verl.scorers import FORMATS, check_settings, default_compute_score, scorer_for_all
from verl.scorers.code import code_settings
from verl.trainer.config.load import load_config
from verl.workers.reward_manager import AbstractRewardManager, NaiveRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.function import JUDGE_PARAMETERS, form_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_custom_reward_fn(config: PPOConfig | Mapping[str, object]) -> Callable[..., object] | None:
    """Load the function named by ``custom_reward_function``, with its ``reward_kwargs`` bound; None if unset.

    Args:
        config: the whole configuration, typed, or any part of it as :func:`load_reward_manager` takes it. Only the
            sections of rewards are checked.

    Raises:
        ConfigError: there is no such file or function, or it has none of the forms of
            :mod:`verl.workers.reward_manager.function`.
    """
    config = _typed(config, _FUNCTION_SECTIONS)
    section = config.custom_reward_function
    if not section.path:
        return None
    function = load_object(section.path, section.name, "custom_reward_function.path", "custom_reward_function.name")
    if not callable(function):
        raise ConfigError(f"custom_reward_function.name='{section.name}' is {type(function).__name__}, not a function.")
    judge = dict.fromkeys(_named(function, JUDGE_PARAMETERS)) if config.judge is not None else {}
    form_of(function, section.reward_kwargs | config.reward_model.scorer_kwargs | judge)
    return functools.partial(function, **section.reward_kwargs)


def load_reward_manager(
    config: PPOConfig | Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    num_examine: int = 0,
    **reward_kwargs: object,
) -> AbstractRewardManager:
    """Build the reward manager of a configuration.

    Its reward function is the custom function, else the scorer ``reward_model.reward_format`` for all rows, else the
    scorer of each row's data source; ``reward_model.scorer_kwargs`` are bound to it. Its class is the registered
    ``reward_manager.name`` or, with ``reward_manager.source=importlib``, the class of that name in the file
    ``reward_manager.module.path``. The class gets ``reward_model.reward_kwargs`` and those of ``max_error_rate``,
    ``num_workers``, ``timeout_s``, ``memory_limit_mb`` and ``max_resp_len`` (``data.max_response_length``) that its
    signature has.

    Args:
        config: the whole configuration, typed; or a ``DictConfig`` or dict with any part of it, of which the sections
            of rewards and data are checked.
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        reward_kwargs: further arguments of the manager; they override the configuration's. Those of
            :data:`JUDGE_PARAMETERS` go to the function and to the manager, if these name them.

    Raises:
        ConfigError: a name is unknown, a file is missing, the function has none of the forms, or there is a judge that
            neither function nor manager asks.
        UnknownDataSourceError: no scorer is called ``reward_format``.
    """
    config = _typed(config, _MANAGER_SECTIONS)
    judge = {name: reward_kwargs.pop(name) for name in JUDGE_PARAMETERS if name in reward_kwargs}
    scorer_kwargs = _judge_of_run(config, judge) | config.reward_model.scorer_kwargs
    function = _reward_function(config, scorer_kwargs)
    judge_arguments = {name: judge[name] for name in _named(function, judge) if config.custom_reward_function.path}
    if scorer_kwargs or judge_arguments:
        function = functools.partial(function, **scorer_kwargs, **judge_arguments)
    cls = resolve_reward_manager_cls(config)
    reward_kwargs |= {name: judge[name] for name in judge if name in inspect.signature(cls).parameters}
    if judge and not {*scorer_kwargs, *judge_arguments, *reward_kwargs} & {"reward_router_address", "base_url"}:
        raise ConfigError(
            f"reward_model.rollout.name={config.reward_model.rollout.name} serves a judge, but the reward function "
            "does not ask it: it has no parameter reward_router_address. Give it one, or leave reward_model.rollout "
            "out for a model that gives a score per response."
        )
    model = config.reward_model
    offered = {
        "max_error_rate": model.max_error_rate,
        "num_workers": model.num_workers,
        "timeout_s": model.timeout_s,
        "memory_limit_mb": model.memory_limit_mb,
        "max_resp_len": config.data.max_response_length,
    }
    parameters = set(inspect.signature(cls).parameters)
    if NaiveRewardManager in getattr(cls, "__mro__", ()):  # its subclasses pass **settings on to it
        parameters |= set(inspect.signature(NaiveRewardManager).parameters)
    settings = {"reward_fn_key": config.data.reward_fn_key}
    settings |= {name: value for name, value in offered.items() if name in parameters}
    return cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function,
        **{**settings, **model.reward_kwargs, **reward_kwargs},
    )


def check_reward_data(config: PPOConfig, reward_fn: object, dataset: object) -> None:
    """Check, before any model loads, that the data has the columns that scoring needs.

    Custom data sets, custom managers and runs with a reward model are not checked, nor are rows that environments
    score.

    Raises:
        DataError: a column is missing.
        UnknownDataSourceError: a row's data source has no scorer.
    """
    if config.reward_model.enable or not isinstance(dataset, RLHFDataset):
        return
    default = config.actor_rollout_ref.rollout.default_agent_loop
    if {name or default for name in dataset.source_column("agent_name")} == {ENVIRONMENT_AGENT}:
        return
    if isinstance(reward_fn, AbstractRewardManager):
        reward_fn.check_dataset(dataset)


class RewardTask:
    """Scores a batch in a process of Ray: ``ray.get(compute_reward_async.remote(data, reward_fn=manager))``.

    Within one process, ``reward_fn.start(data)`` does it without Ray.
    """

    def __call__(
        self, data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Any = None
    ) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """Score a batch by ``reward_fn``, or by the manager of ``config``; see :func:`compute_reward`."""
        return compute_reward(data, reward_fn or load_reward_manager(config, tokenizer))

    def remote(self, data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Any = None) -> Any:
        """Start scoring, and return the ``ObjectRef`` of the result.

        Raises:
            ConfigError: neither a manager nor the configuration and tokenizer to build one were given.
        """
        from verl.single_controller.ray import start_task

        if reward_fn is None and (config is None or tokenizer is None):
            raise ConfigError("compute_reward_async needs reward_fn, or config and tokenizer to build one.")
        return start_task(self, data, config, tokenizer, reward_fn)


compute_reward_async = RewardTask()


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, object]]:
    """Return the scores of a batch that was scored during the rollout.

    Returns:
        the column ``rm_scores`` (bsz, response_length), and the columns that ``meta_info["reward_extra_keys"]`` names.

    Raises:
        SchemaError: one of them is missing.
    """
    names = batch.meta_info.get("reward_extra_keys", [])
    require(batch, ("rm_scores", *names), "extract_reward")
    return batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in names}


_FUNCTION_SECTIONS = ("custom_reward_function", "reward_model", "reward")
_MANAGER_SECTIONS = (*_FUNCTION_SECTIONS, "reward_manager", "data")


def _typed(config: PPOConfig | Mapping[str, object], sections: Sequence[str]) -> PPOConfig:
    if isinstance(config, PPOConfig):
        return config
    return load_config(config, with_rules=False, for_program=True, sections=sections)


def _named(function: Callable[..., object], names: Iterable[str]) -> list[str]:
    """Return those of the names that a function takes as arguments."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if takes_any or name in parameters]


def _judge_of_run(config: PPOConfig, judge: Mapping[str, object]) -> dict[str, object]:
    """Settings by which the scorer ``llm_judge`` asks the judge of the run; empty if there is none."""
    if not judge or config.reward_model.reward_format != "llm_judge":
        return {}
    return {"base_url": f"http://{judge['reward_router_address']}/v1", "model": config.reward_model.model.path}


def _reward_function(config: PPOConfig, scorer_kwargs: Mapping[str, object]) -> Callable[..., object]:
    custom, name = get_custom_reward_fn(config), config.reward_model.reward_format
    if custom is not None and name:
        raise ConfigError(
            f"both custom_reward_function.path and reward_model.reward_format='{name}' choose the reward. Set one."
        )
    if custom is not None:
        return custom
    model, service = config.reward_model, config.reward_model.sandbox_fusion
    code = code_settings(
        url=service.url,
        max_concurrent=service.max_concurrent,
        memory_limit_mb=service.memory_limit_mb,
        num_workers=model.num_workers,
        timeout_s=model.timeout_s,
    )
    check_settings({**code, **scorer_kwargs})
    if not name:
        return functools.partial(default_compute_score, **code)
    source = FORMATS.get(name, name)
    check_settings({**code, **scorer_kwargs}, source)
    return functools.partial(scorer_for_all(source), **code)


def resolve_reward_manager_cls(config: PPOConfig | Mapping[str, object]) -> Any:
    """Return the class of ``reward_manager``: the registered one of its name, or that of a file.

    Raises:
        ConfigError: no class has this name, or the file is missing.
    """
    section = _typed(config, ("reward_manager",)).reward_manager
    if section.source == "register":
        return get_reward_manager_cls(section.name)
    if not section.module.path:
        raise ConfigError("reward_manager.source=importlib needs reward_manager.module.path, the file of the class.")
    return load_object(section.module.path, section.name, "reward_manager.module.path", "reward_manager.name")
