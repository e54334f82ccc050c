"""Turn functions and classes passed as objects into settings that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType

from verl.api.data import DataFiles
from verl.api.functions import with_resolved_types, write_module
from verl.api.rewards import Reward, check_columns, combine, named_rewards, no_reward
from verl.base.types import JsonObject
from verl.config.agent import ENVIRONMENT_AGENT
from verl.environments.base import Environment
from verl.errors import ConfigError

RewardArgument = Callable[..., object] | Sequence[Callable[..., object]] | str | None
REWARD = "reward"
NO_REWARD = (
    "the call has no reward: give reward=f, a function of a response (docs/python.md), or rows whose data_source names "
    "a scorer."
)
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def rewards_of(reward: RewardArgument, weights: Sequence[float] | None) -> list[Reward]:
    """Return the functions of a call, none if it gives the name of a scorer or nothing.

    Raises:
        ConfigError: one of them cannot be used, or there are weights without functions.
    """
    if reward is None or isinstance(reward, str):
        if weights is not None:
            raise ConfigError("reward_weights is given without reward functions.")
        return []
    return named_rewards(list(reward) if isinstance(reward, Sequence) else [reward], weights)


def write_rewards(
    reward: RewardArgument, weights: Sequence[float] | None, files: DataFiles, folder: Path
) -> JsonObject:
    """Write reward functions into the folder and return the settings that name them, of ``verl eval``.

    Raises:
        ConfigError: one of them cannot be used with these columns, or a scorer is named.
    """
    if isinstance(reward, str):
        raise ConfigError(
            f"reward='{reward}': rows are scored by their data_source or by a function. Give the rows "
            f"data_source='{reward}'."
        )
    if not (rewards := rewards_of(reward, weights)):
        if "data_source" not in files.columns:
            raise ConfigError(NO_REWARD)
        return {}
    check_columns(rewards, files.columns, files.has_truth)
    module = write_module({REWARD: combine(rewards, files.columns, files.prompt_key, files.text_prompts)}, folder)
    return {"custom_reward_function.path": str(module), "custom_reward_function.name": REWARD}


def write_objects(
    reward: RewardArgument,
    weights: Sequence[float] | None,
    tools: Sequence[Callable[..., object]],
    environments: Sequence[type],
    files: DataFiles,
    folder: Path,
) -> JsonObject:
    """Write reward functions, tools and environments into the folder and return the settings that name them.

    Raises:
        ConfigError: one of them cannot be used, or two have one name.
    """
    rewards = rewards_of(no_reward if environments and reward is None else reward, weights)
    named: list[tuple[str, object]] = []
    if rewards:
        check_columns(rewards, files.columns, files.has_truth)
        named.append((REWARD, combine(rewards, files.columns, files.prompt_key, files.text_prompts)))
    if not isinstance(tools, Sequence):
        raise ConfigError(f"tools={tools!r:.100} is {type(tools).__name__}. Give a list: tools=[f].")
    named += [(tool.__name__, tool) for tool in map(_as_tool, tools)]
    named += [(environment.__name__, environment) for environment in environments]
    names = [name for name, _ in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two of the functions and classes are called {twice}. Give them different names.")
    keys: JsonObject = {"reward_model.reward_format": reward} if isinstance(reward, str) else {}
    if not named:
        return keys
    module = str(write_module(dict(named), folder))
    if rewards:
        keys |= {"custom_reward_function.path": module, "custom_reward_function.name": REWARD}
    if tools:
        keys[f"{_MULTI_TURN}.function_tool_path"] = module
    if environments:
        entries = [
            {"name": environment.__name__, "class_name": f"{module}:{environment.__name__}"}
            for environment in environments
        ]
        keys[f"{_MULTI_TURN}.environment_config_path"] = entries
        keys["actor_rollout_ref.rollout.agent.default_agent_loop"] = ENVIRONMENT_AGENT
    if tools or environments:
        keys[f"{_MULTI_TURN}.enable"] = True
    return keys


def check_environments(environments: Sequence[type]) -> None:
    """Check that a call's environments are a list of their classes.

    Raises:
        ConfigError: they are anything else.
    """
    if not isinstance(environments, Sequence) or isinstance(environments, str):
        shown = f"{environments!r:.100} is {type(environments).__name__}"
        raise ConfigError(f"environments={shown}. Give a list of classes: environments=[Stairs].")
    for environment in environments:
        if not (isinstance(environment, type) and issubclass(environment, Environment)):
            raise ConfigError(
                f"environments: {environment!r:.100} is no subclass of verl.environments.base.Environment."
            )


def _as_tool(tool: Callable[..., object]) -> Callable[..., object]:
    """Return a function as a tool that can be sent to other processes; the function itself stays as it is.

    Raises:
        ConfigError: it is no function with a name.
    """
    from verl.tools.function_tool import function_tool, is_tool

    if not isinstance(tool, FunctionType) or not tool.__name__.isidentifier():
        raise ConfigError(f"tools: {tool!r:.100} is no function of Python with a name. Write one by def.")
    resolved = with_resolved_types(tool)
    return resolved if is_tool(resolved) else function_tool(resolved)
