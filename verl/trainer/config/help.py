"""The answer to ``--help``: one screen, or the keys of a section with meaning, type and default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl.config import BaseConfig, DPOConfig, EvalConfig, GenerationConfig, PPOConfig, RMConfig, ServeConfig, SFTConfig
from verl.config.problems import shown
from verl.errors import ConfigError
from verl.trainer.config.keys import Key, all_inactive, allowed_values, keys_of, nearest

_TRAINER = (
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.n_gpus_per_node",
    "trainer.save_freq",
    "trainer.resume_mode",
    "trainer.logger",
)
_PAIRS = ("data.train_files", "data.val_files", "model.path", "data.train_batch_size", "optim.lr", *_TRAINER)

FIRST: dict[type[BaseConfig], tuple[str, ...]] = {
    PPOConfig: (
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "algorithm.adv_estimator",
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.use_kl_loss",
        "custom_reward_function.path",
        *_TRAINER,
    ),
    SFTConfig: _PAIRS,
    RMConfig: _PAIRS,
    DPOConfig: _PAIRS,
    GenerationConfig: (
        "data.path",
        "data.output_path",
        "data.n_samples",
        "model.path",
        "rollout.name",
        "rollout.temperature",
    ),
    EvalConfig: ("data.path", "data.response_key", "custom_reward_function.path"),
    ServeConfig: (
        "model.path",
        "server.port",
        "server.state_dir",
        "server.max_models",
        "server.max_lora_rank",
        "server.max_length",
        "trainer.n_gpus_per_node",
    ),
}
"""The keys on the first screen of each command."""


def help_page(says: str, root: type[BaseConfig], words: Sequence[str] = ()) -> RenderableType:
    """Describe a command.

    Args:
        says: docstring of the command's module; it begins with what the command does.
        root: root section of its configuration.
        words: sections or keys to describe; without any, the command itself on one screen.

    Raises:
        ConfigError: a word is no section or key.
    """
    keys = keys_of(root)
    if words:
        return Group(*(_about(word, keys, root) for word in words))
    command, _, purpose = says.splitlines()[0].replace("``", "").partition(": ")
    sections = Table.grid(padding=(0, 2))
    for key in keys.values():
        is_top = "." not in key.path.removeprefix("actor_rollout_ref.")
        if key.section is not None and is_top:
            sections.add_row(f"  {key.path}", Text(key.sentence, style="dim"))
    first = Table.grid(padding=(0, 2))
    for path in FIRST[root]:
        first.add_row(f"  {path}", Text(f"{keys[path].sentence} [{shown(keys[path].yaml_default)}]", style="dim"))
    return Group(
        Text(f"{command} KEY=VALUE ..."),
        Text(f"{purpose[:1].upper()}{purpose[1:]}"),
        Text("\nKeys that most runs set [default]", style="bold"),
        first,
        Text("\nSections", style="bold"),
        sections,
        Text("\nMore", style="bold"),
        Text(
            "  --help SECTION or KEY    meaning, type and default of each key, e.g. --help data\n"
            "  --cfg job                the composed configuration, and stop\n"
            "  --config-dir FOLDER --config-name NAME    a YAML file of your own with `defaults: [ppo_trainer]`"
        ),
    )


def _about(word: str, keys: Mapping[str, Key], root: type[BaseConfig]) -> RenderableType:
    """Describe one key, one section, or all keys whose path ends in or contains the word."""
    matches = [key for path, key in keys.items() if f"{path}.".startswith(f"{word}.")]
    matches = matches or [key for path, key in keys.items() if f".{path}".endswith(f".{word}")]
    matches = matches or [key for path, key in keys.items() if word in path]
    inactive = [key for key in all_inactive(root).values() if f".{key.path}".endswith(f".{word}")]
    if not matches and not inactive:
        guess = nearest(word, list(keys))
        raise ConfigError(f"there is no section or key '{word}'." + (f" Did you mean {guess}?" if guess else ""))
    parts: list[RenderableType] = []
    for key in matches:
        if key.section is None:
            meaning = Text(f"{key.sentence} ({allowed_values(key.field)})", style="dim")
            parts += [Text(f"{key.path} = {shown(key.yaml_default)}", style="bold"), Padding(meaning, (0, 0, 0, 4))]
    parts += [Text(f"{key.path}: {'not yet' if key.refused else 'no effect'}: {key.why}") for key in inactive]
    return Group(*parts)
