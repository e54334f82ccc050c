"""Write the YAML files and the reference from the configuration classes.

python -m verl.trainer.config.generate
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.base_config import BaseConfig
from verl.trainer.config.evaluation import EvalConfig
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.keys import Key, iter_keys, plain
from verl.trainer.config.overrides import CONFIG_DIR
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.preference import DPOConfig, RMConfig
from verl.trainer.config.reference import reference_page
from verl.trainer.config.sft import SFTConfig

logger = logging.getLogger(__name__)

_NOTE = """\
# Made from the classes in verl/trainer/config and verl/workers/config by
#     python -m verl.trainer.config.generate
"""


@dataclass(frozen=True)
class Entry:
    """The configuration of one entry point."""

    name: str
    root: type[BaseConfig]
    groups: Mapping[str, str] = field(default_factory=dict)
    """Section path → file of the group (``actor/dp_actor``) that holds it."""


ENTRIES = (
    Entry(
        "ppo_trainer",
        PPOConfig,
        {
            "actor_rollout_ref.actor": "actor/dp_actor",
            "data": "data/legacy_data",
            "actor_rollout_ref.ref": "ref/dp_ref",
            "actor_rollout_ref.rollout": "rollout/rollout",
            "actor_rollout_ref.model": "model/hf_model",
            "critic": "critic/dp_critic",
            "reward_model": "reward_model/dp_reward_model",
            "algorithm.rollout_correction": "algorithm/rollout_correction",
        },
    ),
    Entry("sft_trainer", SFTConfig, {"model": "model/hf_model", "engine": "engine/fsdp", "optim": "optim/fsdp"}),
    Entry("rm_trainer", RMConfig, {"model": "model/hf_model", "engine": "engine/fsdp"}),
    Entry("dpo_trainer", DPOConfig, {"model": "model/hf_model", "engine": "engine/fsdp"}),
    Entry("generation", GenerationConfig, {"model": "model/hf_model"}),
    Entry("evaluation", EvalConfig),
)

MEGATRON = """
# Scripts for Megatron compose with this file, and are refused with the reason.
defaults:
  - ppo_trainer
  - _self_

actor_rollout_ref:
  actor:
    strategy: megatron
critic:
  strategy: megatron
"""


def files() -> dict[Path, str]:
    """Every generated YAML file, by its path in the config folder."""
    made: dict[Path, str] = {Path("ppo_megatron_trainer.yaml"): _NOTE + MEGATRON}
    for entry in ENTRIES:
        made[Path(f"{entry.name}.yaml")] = "\n".join(_entry_lines(entry)) + "\n"
        for key in iter_keys(entry.root):
            if key.path in entry.groups:
                assert key.section is not None
                text = "\n".join([_NOTE, *_heading(key.section), *_lines(key.section, key.default)]) + "\n"
                path = Path(f"{entry.groups[key.path]}.yaml")
                assert made.setdefault(path, text) == text, f"{path} would hold two different things"
    return made


def _entry_lines(entry: Entry) -> Iterator[str]:
    yield _NOTE
    yield from _heading(entry.root)
    if entry.groups:
        yield "defaults:"
        for section, path in entry.groups.items():
            group, _, name = path.partition("/")
            yield f"  - {group}@{section}: {name}"
        yield "  - _self_"
        yield ""
    yield from _lines(entry.root, entry.root(), skip=frozenset(entry.groups))


def _heading(section: type[BaseConfig]) -> Iterator[str]:
    assert section.__doc__ is not None
    yield f"# {section.__doc__.splitlines()[0]}"


def _lines(
    section: type[BaseConfig], default: BaseConfig, skip: frozenset[str] = frozenset(), path: str = "", indent: str = ""
) -> Iterator[str]:
    """The keys of a section with their sentences; ``skip`` are dotted paths that stand elsewhere."""
    target = getattr(section, "hydra_target", None)
    if target is not None:
        yield f"{indent}_target_: {target}"
    for key in iter_keys(section, default):
        full = path + key.path
        if "." in key.path or full in skip:
            continue
        yield f"{indent}# {key.sentence}"
        if key.section is not None and isinstance(key.default, BaseConfig):
            yield f"{indent}{key.name}:"
            yield from _lines(key.section, key.default, skip, f"{full}.", indent + "  ")
        else:
            yield from _value(key, indent)


def _value(key: Key, indent: str) -> Iterator[str]:
    value = plain(key.yaml_default)
    if isinstance(value, Mapping) and value:
        text = yaml.safe_dump({key.name: value}, sort_keys=False, default_flow_style=False)
        yield from (indent + line for line in text.splitlines())
    else:
        yield f"{indent}{key.name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def main() -> None:
    """Write everything; run from the root of the repository."""
    for path, text in files().items():
        target = CONFIG_DIR / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    page = CONFIG_DIR.parents[2] / "docs" / "configuration.md"
    page.write_text(reference_page({entry.name: entry.root for entry in ENTRIES}))
    logger.info("wrote %d YAML files and %s", len(files()), page)


if __name__ == "__main__":
    main()
