"""Write the YAML files in verl/trainer/config from the configuration classes; takes seconds.

python -m verl.trainer.config.generate
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from verl.config import (
    BaseConfig,
    DPOConfig,
    EvalConfig,
    GenerationConfig,
    PPOConfig,
    RMConfig,
    ServeConfig,
    SFTConfig,
)
from verl.config.base import named_section_of
from verl.trainer.config.fully_async import FULLY_ASYNC, ONE_STEP_OFF
from verl.trainer.config.keys import InactiveKey, inactive_keys, iter_keys, plain, put
from verl.trainer.config.other_spellings import OTHER_SPELLINGS, other_spellings
from verl.trainer.config.overrides import CONFIG_DIR

logger = logging.getLogger(__name__)

_NOTE = """\
# Made from the classes in verl/config by
#     python -m verl.trainer.config.generate
"""


@dataclass(frozen=True)
class Entry:
    """Root class and YAML file of one entry point."""

    name: str
    root: type[BaseConfig]
    module: str
    """The entry point: ``python -m verl.trainer.<module>``."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Section path → Hydra config group and option that holds the section (``actor/dp_actor``)."""


ENTRIES = (
    Entry(
        "ppo_trainer",
        PPOConfig,
        "main_ppo",
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
    Entry(
        "sft_trainer",
        SFTConfig,
        "sft_trainer",
        {"model": "model/hf_model", "engine": "engine/fsdp", "optim": "optim/fsdp"},
    ),
    Entry("rm_trainer", RMConfig, "rm_trainer", {"model": "model/hf_model", "engine": "engine/fsdp"}),
    Entry("dpo_trainer", DPOConfig, "dpo_trainer", {"model": "model/hf_model", "engine": "engine/fsdp"}),
    Entry("generation", GenerationConfig, "main_generation", {"model": "model/hf_model"}),
    Entry("evaluation", EvalConfig, "main_eval"),
    Entry("serve", ServeConfig, "main_serve", {"model": "model/hf_model", "engine": "engine/fsdp"}),
)

# Files that change others, under names that public scripts and configurations choose.
_MEGATRON_FILE = """
# {what}, trained by Megatron.
defaults:
  - {base}
  - _self_

strategy: megatron
"""
_VEOMNI_FILE = _MEGATRON_FILE.replace("by Megatron", "with VeOmni's models").replace(": megatron", ": veomni")
_NOT_YET = """
# The engine {name}, which is refused with what takes its place.
defaults:
  - fsdp
  - _self_

strategy: {name}
"""
_SAME_OPTIMIZER = """
# Optimizer and schedule, which are the same with every engine.
defaults:
  - fsdp
  - _self_
"""
_RUN_BY_MEGATRON = """
# {what}, trained by Megatron.
defaults:
  - {base}
  - _self_

actor_rollout_ref:
  actor:
    strategy: megatron
critic:
  strategy: megatron
reward_model:
  strategy: megatron
"""
_NO_SPELLINGS = f"""\
# @package _global_
{_NOTE}
# For the commands of verl, which take any key.
"""
_OTHER_SPELLINGS = """\
# Keys under the names of other releases, so that programs may override them; null is not set."""
_FULLY_ASYNC = "One RL run whose responses are sampled by other ranks, while these train"
_ONE_STEP_OFF = "One RL run whose responses are sampled by other ranks, one step before these train on them"
CHANGED = {
    "ppo_megatron_trainer": _RUN_BY_MEGATRON.format(
        what="One RL run with PPO, GRPO or another algorithm", base="ppo_trainer"
    ),
    "fully_async_ppo_trainer": f"""
# {_FULLY_ASYNC}.
defaults:
  - ppo_trainer
  - _self_

data:
  train_batch_size: 0
  gen_batch_size: 1
actor_rollout_ref:
  hybrid_engine: false
algorithm:
  rollout_correction:
    bypass_mode: true
{yaml.safe_dump(FULLY_ASYNC, sort_keys=False)}""",
    "fully_async_ppo_megatron_trainer": _RUN_BY_MEGATRON.format(what=_FULLY_ASYNC, base="fully_async_ppo_trainer"),
    "one_step_off_ppo_trainer": f"""
# {_ONE_STEP_OFF}.
defaults:
  - ppo_trainer
  - _self_

actor_rollout_ref:
  hybrid_engine: false
trainer:
  async:
    lag: 1
{yaml.safe_dump(ONE_STEP_OFF, sort_keys=False)}""",
    "one_step_off_ppo_megatron_trainer": _RUN_BY_MEGATRON.format(what=_ONE_STEP_OFF, base="one_step_off_ppo_trainer"),
    "actor/megatron_actor": _MEGATRON_FILE.format(what="The policy", base="dp_actor"),
    "critic/megatron_critic": _MEGATRON_FILE.format(what="The value model", base="dp_critic"),
    "ref/megatron_ref": _MEGATRON_FILE.format(what="The frozen reference", base="dp_ref"),
    "engine/megatron": _MEGATRON_FILE.format(what="The model of a supervised run", base="fsdp"),
    "actor/veomni_actor": _VEOMNI_FILE.format(what="The policy", base="dp_actor"),
    "critic/veomni_critic": _VEOMNI_FILE.format(what="The value model", base="dp_critic"),
    "ref/veomni_ref": _VEOMNI_FILE.format(what="The frozen reference", base="dp_ref"),
    "engine/veomni": _VEOMNI_FILE.format(what="The model of a supervised run", base="fsdp"),
    **{f"engine/{name}": _NOT_YET.format(name=name) for name in ("automodel", "torchtitan")},
    **{f"optim/{name}": _SAME_OPTIMIZER for name in ("automodel", "megatron", "torchtitan", "veomni")},
    "sft_trainer_engine": """
# Supervised fine-tuning, under its name in the releases of verl.
defaults:
  - sft_trainer
  - _self_
""",
    "generation_server": """
# Sampling from a model, with the default of main_generation_server.
defaults:
  - generation
  - _self_

data:
  n_samples: 1
""",
}


def files() -> dict[Path, str]:
    """Return the text of every generated YAML file, by its path in the config folder."""
    texts: dict[Path, str] = {Path(f"{name}.yaml"): _NOTE + text for name, text in CHANGED.items()}
    for entry in ENTRIES:
        texts[Path(f"{entry.name}.yaml")] = "\n".join(_entry_lines(entry)) + "\n"
        if nulls := other_spellings(entry.root):
            lines = ["# @package _global_", _NOTE, _OTHER_SPELLINGS, *_block(nulls, "")]
            texts[Path("other_spellings/none.yaml")] = _NO_SPELLINGS
            texts[Path(f"other_spellings/{entry.name}.yaml")] = "\n".join(lines) + "\n"
        for key in iter_keys(entry.root):
            if key.path in entry.groups:
                assert key.section is not None
                text = "\n".join([_NOTE, *_heading(key.section), *_lines(key.section, key.default)]) + "\n"
                path = Path(f"{entry.groups[key.path]}.yaml")
                assert texts.setdefault(path, text) == text, f"{path} would hold two different things"
    return texts


def _entry_lines(entry: Entry) -> Iterator[str]:
    yield _NOTE
    yield from _heading(entry.root)
    if entry.groups:
        yield "defaults:"
        if other_spellings(entry.root):
            yield f"  - other_spellings: ${{oc.env:{OTHER_SPELLINGS},{entry.name}}}"
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
    """Yield the keys of a section with their sentences; ``skip`` holds dotted paths that have a file of their own."""
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
        elif (named := named_section_of(key.field)) is not None:
            yield f"{indent}{key.name}:"
            for name, item in key.default.items():
                yield f"{indent}  {name}:"
                yield from _lines(named, item, skip, f"{full}.{name}.", indent + "    ")
        elif isinstance(value := plain(key.yaml_default), Mapping) and value:
            yield from _block({key.name: value}, indent)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
            scalar = text.removesuffix("\n...\n").strip()  # PyYAML ends a document of one scalar with dots
            yield f"{indent}{key.name}: {scalar}"
    yield from _inactive(section, indent)


def _inactive(section: type[BaseConfig], indent: str) -> Iterator[str]:
    """Yield the inactive keys of a section, grouped by branch, each branch under its reasons."""
    branches: dict[str, list[InactiveKey]] = {}
    for key in inactive_keys(section):
        branches.setdefault(key.path.partition(".")[0], []).append(key)
    by_reasons: dict[tuple[str, ...], list[InactiveKey]] = {}
    for keys in branches.values():
        by_reasons.setdefault(tuple(dict.fromkeys(map(status, keys))), []).extend(keys)
    for reasons, keys in by_reasons.items():
        yield from (f"{indent}# {reason}" for reason in reasons)
        tree: dict[str, object] = {}
        for key in keys:
            put(tree, key.path, plain(key.yaml_default))
        yield from _block(tree, indent)


def status(key: InactiveKey) -> str:
    """Return why a key has no effect, after ``not yet`` if setting it is refused."""
    return f"not yet: {key.why}" if key.refused else f"{'' if key.is_spelling else 'no effect: '}{key.why}"


def _block(tree: Mapping[str, object], indent: str) -> Iterator[str]:
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=10_000)
    yield from (indent + line for line in text.splitlines())


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that repeats equal values instead of writing anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> None:
    """Write all generated YAML files next to this package's source."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in files().items():
        target = CONFIG_DIR / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    logger.info("wrote %d YAML files", len(files()))


if __name__ == "__main__":
    main()
