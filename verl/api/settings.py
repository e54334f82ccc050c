"""Settings of a call of Python: names of any kind become keys, and defaults for small data fill the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from verl.base.import_utils import prepare_process
from verl.base.lazy import importing
from verl.base.nested import flat
from verl.base.types import JsonMapping, JsonObject
from verl.config import BaseConfig
from verl.config.machine import local_gpus
from verl.errors import ConfigError
from verl.trainer.config.key_table import TYPED_FIRST
from verl.trainer.config.keys import Tree, keys_of, leaves, put
from verl.trainer.config.other_libraries import other_name
from verl.utils.model_facts.model_files import longest_context

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

PREFERRED_SECTIONS = ("", "trainer", "data", "algorithm")
"""Sections whose keys may be named by their last part alone; the first of them that has such a key is meant."""
FALLBACK_SECTIONS = (
    "model",
    "engine",
    "optim",
    "rollout",
    "loss",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.rollout.multi_turn",
    "custom_reward_function",
    "reward_model",
)
"""Sections whose keys may be named so if only one of them has such a key."""


def keys_of_call(settings: JsonMapping, root: type[BaseConfig]) -> JsonObject:
    """Convert settings as they are written in a call to values by key.

    A name is a key with dots, a section with a dict of its keys, a name of TRL or OpenRLHF, or the last part of a key.
    What is none of these stays, and is reported with the other problems of the configuration.

    Raises:
        ConfigError: a name of another library has no counterpart, a short name means several keys, or two names mean
            one key and have different values.
    """
    all_keys = leaves(root)
    values: JsonObject = {}
    written: dict[str, str] = {}
    for name, setting in settings.items():
        value = setting.item() if hasattr(setting, "item") else str(setting) if isinstance(setting, Path) else setting
        if (unusable := _no_setting(value)) is not None:
            raise ConfigError(
                f"{name}={setting!r:.100} holds {type(unusable).__name__}. A setting is a text, a number, true or "
                "false, None, or a list or dict of these."
            )
        for key, key_value in _keys(name, value, all_keys, root).items():
            if key in values and values[key] != key_value:
                raise ConfigError(
                    f"{written[key]} and {name} both mean {key}, with the values {values[key]!r} and {key_value!r}. "
                    "Keep one."
                )
            values[key], written[key] = key_value, name
    return values


def _no_setting(value: object) -> object:
    """Return the first object in a value that no configuration file can hold, or None."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((problem for item in value if (problem := _no_setting(item)) is not None), None)
    return None if value is None or isinstance(value, (str, int, float)) else value


def _keys(name: str, value: object, all_keys: Collection[str], root: type[BaseConfig]) -> JsonObject:
    if name in all_keys:
        return {name: value}
    if TYPED_FIRST.get(name) in all_keys:
        return {TYPED_FIRST[name]: value}
    if isinstance(value, Mapping) and (name in keys_of(root)):
        return dict(flat(value, f"{name}."))
    other = other_name(name)
    if "." in name and other is None:
        return {name: value}
    short = _keys_with_last_part(name, all_keys)
    if other is not None and (other[1].settable(all_keys) or not short):
        return other[1].settings(value, all_keys, other[0])
    if len(short) > 1:
        raise ConfigError(f"{name}={value!r:.60} is ambiguous: it can be {' or '.join(short)}. Write the whole key.")
    return {short[0] if short else name: value}


def _keys_with_last_part(name: str, all_keys: Collection[str]) -> list[str]:
    """Return the keys that a short name may mean; several if it is ambiguous."""
    first = [key for section in PREFERRED_SECTIONS if (key := f"{section}.{name}".lstrip(".")) in all_keys]
    return first[:1] or [key for section in FALLBACK_SECTIONS if (key := f"{section}.{name}") in all_keys]


COUNTED = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
"""Names of TRL that count completions on one device; together they decide our batch sizes."""


def batch_sizes(settings: JsonMapping, ranks: int, per_prompt: int) -> dict[str, int]:
    """Convert TRL's counts of completions to the prompts of a step and of an optimizer step.

        optimizer step     per_device_train_batch_size × ranks × gradient_accumulation_steps ÷ num_generations
        step               the same with steps_per_generation, or generation_batch_size ÷ num_generations

    Args:
        settings: those of :data:`COUNTED` that were given, at least one; the others have TRL's defaults: 8 completions
            on a device, 1 accumulation step, and as many of them per generation.
        ranks: devices of the run.
        per_prompt: responses of a prompt.

    Returns:
        the prompts of ``data.train_batch_size`` and of ``actor_rollout_ref.actor.ppo_mini_batch_size``, and the
        responses of ``actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu``.

    Raises:
        ConfigError: one is no positive integer, or responses of one prompt would be parted.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} is no integer >= 1.")
    on_device = settings.get("per_device_train_batch_size", 8)
    accumulated = settings.get("gradient_accumulation_steps", 1)
    mini = on_device * ranks * accumulated
    step = on_device * ranks * settings.get("steps_per_generation", accumulated)
    step = settings.get("generation_batch_size", step)
    for what, count in (("an optimizer step", mini), ("a step", step)):
        if count % per_prompt:
            raise ConfigError(
                f"{', '.join(f'{name}={value}' for name, value in settings.items())}: {what} would have {count} "
                f"completions on {ranks} device{'s' * (ranks > 1)}, which num_generations={per_prompt} does not "
                "divide. All responses to a prompt belong to one step; or set data.train_batch_size, in prompts."
            )
    return {
        "data.train_batch_size": step // per_prompt,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini // per_prompt,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": on_device,
    }


def rows_of_batch(settings: Mapping[str, object], ranks: int) -> dict[str, int]:
    """Convert TRL's counts to the rows of an optimizer step and of a pass of a supervised run."""
    sizes = batch_sizes(settings, ranks, 1)
    return {
        "data.train_batch_size": sizes["actor_rollout_ref.actor.ppo_mini_batch_size"],
        "data.micro_batch_size_per_gpu": sizes["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"],
    }


def tree_of(keys: Mapping[str, object], root: type[BaseConfig]) -> Tree:
    """Build the configuration of values by key; ``key[i]`` is one item of a list, whose others keep their defaults."""
    tree: Tree = {}
    items: dict[str, list[object]] = {}
    for path, value in keys.items():
        key, _, index = path.removesuffix("]").partition("[")
        if index:
            items.setdefault(key, list(keys_of(root)[key].default))[int(index)] = value
            value = items[key]
        put(tree, key, value)
    return tree


def settings_of(settings: Mapping[str, object] | None, more: Mapping[str, object]) -> JsonObject:
    """Join the settings of a call, which come in a dict and as arguments.

    Raises:
        ConfigError: one is given in both ways, or the dict is something else.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings={settings!r:.100} is {type(settings).__name__}. Give a dict: "
            'settings={"actor_rollout_ref.rollout.n": 4}.'
        )
    if twice := set(settings or {}) & set(more):
        raise ConfigError(f"{', '.join(sorted(twice))}: given in settings and as an argument. Keep one.")
    return {**(settings or {}), **more}


def placement(ray: bool) -> JsonObject:
    """Return where a call runs unless its settings say: one rank in this process, or with Ray one for each GPU."""
    return {"trainer.controller": "ray" if ray else "local", "trainer.nnodes": 1}


def prompt_length(model: str, key: str, limit: str, values: JsonMapping, root: type[BaseConfig]) -> JsonObject:
    """Return the longest prompt of a call that sets none, where the default leaves a model no room for responses.

    Args:
        model: a folder or a name.
        key: of the longest prompt.
        limit: key of the longest response.
        values: the settings of the call.
        root: root section of the command.
    """
    keys, positions = keys_of(root), longest_context(model)
    response = values.get(limit, keys[limit].default)
    if key in values or positions is None or not isinstance(response, int) or response >= positions:
        return {}
    return {key: min(keys[key].default, positions - response)}


def ranks_of(keys: JsonMapping) -> int:
    """Return the ranks of a run whose batch sizes follow from them, and so must be known before it is checked."""
    per_node = keys.get("trainer.n_gpus_per_node")
    if per_node is None:
        per_node = 1 if keys["trainer.controller"] == "local" else local_gpus() or 1
    return int(keys["trainer.nnodes"]) * int(per_node)


def checked_config(defaults: Mapping[str, object], values: Mapping[str, object], root: type[ConfigT]) -> ConfigT:
    """Compose and check a configuration, as the command line does.

    Args:
        defaults: values by key that the call has in place of the command's.
        values: values by key that the user gave.
        root: root section of the command.

    Raises:
        ConfigError: lists all problems.
    """
    with importing():
        from verl.trainer.config.load import load_config  # needs torch and transformers

        prepare_process()
        return load_config(tree_of({**defaults, **values}, root), root, set(values))
