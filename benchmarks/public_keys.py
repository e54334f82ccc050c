"""Which settings of public run scripts the commands accept, and what refuses most of the others.

python -m benchmarks.public_keys                     # every key of tests/public_keys.txt
python -m benchmarks.public_keys --only main_ppo --refused
python -m benchmarks.public_keys --release 0.9.1 --since 0.9.0    # what a release on PyPI changes, and breaks here

Each line of the list is one key, in how many scripts of three versions it stands, and its commonest values. Every
value is put behind a small command of its kind (``BASES``) and goes through the command's own composition and checks.
What belongs to the script's machine is replaced: files, trackers, the interpreter of a rollout engine, and the package
TransformerEngine, of which an empty one takes the place. VeOmni is rejected where it is not installed.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from benchmarks.public_names import public_names
from benchmarks.public_release import report
from verl.config import BaseConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.errors import ConfigError
from verl.testing.models import hollow_model_dir
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.overrides import keys_set

VERSIONS = ("0.8.0.dev", "v0.8.0", "0.10")
LIST = Path(__file__).parents[1] / "tests" / "public_keys.txt"
NAMES = LIST.with_name("public_names.txt")
NEWEST = "0.9.1"
"""The newest release whose keys and names are in the lists of the tests."""
ELSEWHERE = "…"
"""In the list: a value that belongs to the script's machine."""

POLICY = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=FOLDER/rows.jsonl",
    "data.val_files=FOLDER/rows.jsonl",
    "data.train_batch_size=1024",
    "actor_rollout_ref.model.path=FOLDER/model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    f"actor_rollout_ref.rollout.engine_kwargs.vllm.python={sys.executable}",
    f"actor_rollout_ref.rollout.engine_kwargs.sglang.python={sys.executable}",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "trainer.logger=[console]",
    "trainer.n_gpus_per_node=16",
    "trainer.nnodes=8",
]
SUPERVISED = [
    "data.train_files=FOLDER/rows.jsonl",
    "data.train_batch_size=128",
    "model.path=FOLDER/model",
    "trainer.logger=[console]",
    "trainer.n_gpus_per_node=8",
]
GENERATION = [
    "data.path=FOLDER/rows.jsonl",
    "data.output_path=FOLDER/out.parquet",
    "model.path=FOLDER/model",
    "rollout.name=vllm",
    f"rollout.engine_kwargs.vllm.python={sys.executable}",
    "trainer.n_gpus_per_node=16",
]
SERVED = [
    "data.train_files=FOLDER/rows.jsonl",
    "data.output_path=FOLDER/out.parquet",
    "actor_rollout_ref.model.path=FOLDER/model",
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.engine_kwargs.vllm.python={sys.executable}",
]


@dataclass(frozen=True)
class Base:
    """A command: its configuration, and settings that are accepted without any further one."""

    config_name: str
    root: type[BaseConfig]
    settings: list[str]


BASES = {
    "main_ppo": Base("ppo_trainer", PPOConfig, POLICY),
    "main_ppo_sync": Base("ppo_trainer", PPOConfig, POLICY),
    "sft_trainer": Base("sft_trainer_engine", SFTConfig, SUPERVISED),
    "fsdp_sft_trainer": Base("sft_trainer", SFTConfig, SUPERVISED),
    "main_generation": Base("generation", GenerationConfig, GENERATION),
    "main_generation_server": Base("generation_server", GenerationConfig, SERVED),
}

_MEGATRON = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
_CRITIC = ["algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=1", "critic.model.path=FOLDER/model"]
_REWARD_MODEL = ["reward_model.enable=True", "reward_model.model.path=FOLDER/model"]
_DEEP = "actor_rollout_ref.model.path=org/deep"  # on the hub, so that its number of layers is not known
_STAGES = [_DEEP, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4"]


def _recomputation(section: str) -> list[str]:
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [f"{section}.override_transformer_config.{name}={value}" for name, value in fields.items()]


TOGETHER: Mapping[str, list[str]] = {
    "actor_rollout_ref.*megatron.*": _MEGATRON,
    "actor_rollout_ref.*override_optimizer_config.*": _MEGATRON,
    "optim.override_optimizer_config.*": ["engine.strategy=megatron"],
    "actor_rollout_ref.model.lora.*": [*_MEGATRON, "actor_rollout_ref.model.lora.rank=32"],
    "critic.megatron.*": _MEGATRON + _CRITIC,
    "critic.*": [setting for setting in _CRITIC if not setting.startswith("critic.ppo_micro")]
    + ["critic.use_dynamic_bsz=True"],
    "critic.enable": [],
    "algorithm.adv_estimator": ["critic.ppo_micro_batch_size_per_gpu=1", "critic.model.path=FOLDER/model"],
    "main_ppo* data.train_batch_size": ["actor_rollout_ref.actor.ppo_mini_batch_size=128", "trainer.nnodes=1"],
    "*.megatron.override_transformer_config.recompute_*": _recomputation("actor_rollout_ref.actor.megatron"),
    "engine.override_transformer_config.recompute_*": _recomputation("engine"),
    "*.num_layers_in_*_pipeline_stage": _STAGES,
    "*.account_for_*_in_pipeline_split": _STAGES,
    "*.pipeline_model_parallel_layout": [_DEEP, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8"],
    "*.moe_enable_deepep": [
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex"
    ],
    "actor_rollout_ref.*virtual_pipeline_model_parallel_size": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
    ],
    "engine.virtual_pipeline_model_parallel_size": ["engine.pipeline_model_parallel_size=2"],
    "critic.megatron.*_size": ["actor_rollout_ref.actor.megatron.{name}={value}"],
    "actor_rollout_ref.rollout.expert_parallel_size": [_DEEP],
    "main_ppo* actor_rollout_ref.rollout.prompt_length": ["data.max_prompt_length={value}"],
    "main_ppo* actor_rollout_ref.rollout.response_length": ["data.max_response_length={value}"],
    "distillation.enabled": [
        "distillation.teacher_models.teacher_model.model_path=FOLDER/model",
        f"distillation.teacher_models.teacher_model.inference.engine_kwargs.vllm.python={sys.executable}",
    ],
    "actor_rollout_ref.actor.ppo_micro_batch_size": [
        "actor_rollout_ref.actor.ppo_mini_batch_size={value}",
        "data.train_batch_size={value}",
    ],
    "data.custom_cls.path": ["data.custom_cls.name=CustomRLHFDataset"],
    "fsdp_sft_trainer data.prompt_key": ["data.response_key=extra_info"],
    "fsdp_sft_trainer data.response_key": ["data.prompt_key=extra_info"],
    "*.megatron.use_dist_checkpointing": ["{section}.dist_checkpointing_path=FOLDER/dist_checkpoint"],
    "*.megatron.dist_checkpointing_path": ["{section}.use_dist_checkpointing=True"],
    "*val_kwargs.do_sample": ["actor_rollout_ref.rollout.val_kwargs.temperature=1.0"],
    "reward_model.enable": _REWARD_MODEL,
    "reward.reward_model.enable": _REWARD_MODEL,
    "actor_rollout_ref.model.lora_adapter_path": ["actor_rollout_ref.model.lora_rank=32"],
    "reward_model.rollout.*": [*_REWARD_MODEL, "reward_model.rollout.name=hf"],
    "reward_model.model.*": [*_REWARD_MODEL],
    "engine.*model_parallel_size": ["engine.strategy=megatron"],
    "engine.*mbridge": ["engine.strategy=megatron"],
    "engine.override_transformer_config.*": ["engine.strategy=megatron"],
    "*.megatron.router_replay.mode": ["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"],
    "*router_replay.mode": ["actor_rollout_ref.rollout.name=native"],
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": [
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.actor.router_replay.mode=R3",
    ],
    "data.sampler.*": [
        "data.sampler.class_path=FOLDER/code.py",
        "data.sampler.class_name=RandomCurriculumSampler",
        "data.dataloader_num_workers=0",
    ],
    "data.custom_cls.name": ["data.custom_cls.path=FOLDER/code.py"],
    "*custom_reward_function.name": ["custom_reward_function.path=FOLDER/code.py"],
    "*.profiler.*": [
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        "actor_rollout_ref.actor.profiler.enable=True",
    ],
    "actor_rollout_ref.ref.profiler.*": ["actor_rollout_ref.actor.use_kl_loss=True"],
    "algorithm.gdpo_reward_keys": ["algorithm.adv_estimator=gdpo"],
    "trainer.resume_from_path": ["trainer.resume_mode=resume_path"],
    "*overlong_buffer_cfg.enable": ["reward_model.reward_kwargs.overlong_buffer_cfg.len=8"],
    "*.multi_turn.*": ["actor_rollout_ref.rollout.multi_turn.enable=True"],
}
"""Pattern of keys to the settings that scripts with such a key have too."""

_CORRECTION = "algorithm.rollout_correction"
WITH_VALUE: Mapping[tuple[str, str], list[str]] = {
    ("optim.optimizer", "FusedAdam"): ["optim.optimizer_impl=transformer_engine.pytorch.optimizers.fused_adam"],
    ("actor_rollout_ref.actor.router_replay.mode", "R3"): [
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    ],
    ("actor_rollout_ref.actor.veomni.router_replay.mode", "R3"): [
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    ],
    ("actor_rollout_ref.rollout.enable_rollout_routing_replay", "False"): [
        "actor_rollout_ref.actor.router_replay.mode=disabled"
    ],
    ("actor_rollout_ref.rollout.expert_parallel_size", "4"): ["actor_rollout_ref.rollout.tensor_model_parallel_size=4"],
    ("actor_rollout_ref.rollout.expert_parallel_size", "8"): ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
    ("actor_rollout_ref.rollout.expert_parallel_size", "128"): [
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        "actor_rollout_ref.rollout.data_parallel_size=16",
    ],
    ("critic.enable", "False"): ["algorithm.adv_estimator=grpo"],
    ("engine.expert_model_parallel_size", "32"): ["trainer.nnodes=4"],
    (f"{_CORRECTION}.loss_type", "reinforce"): [f"{_CORRECTION}.bypass_mode=True"],
    (f"{_CORRECTION}.rollout_rs", "'token_k1,seq_max_k2'"): [f"{_CORRECTION}.rollout_rs_threshold='0.6_1.6,2.5'"],
    (f"{_CORRECTION}.rollout_rs_threshold", "'0.6_1.6,2.5'"): [f"{_CORRECTION}.rollout_rs='token_k1,seq_max_k2'"],
}
"""Key and value to the settings that scripts with this value have too."""
_OVER_ALL_RANKS = ("log_prob_micro_batch_size", "ppo_micro_batch_size", "data.micro_batch_size")

STAND_INS: Mapping[str, str] = {
    "hydra.searchpath": "[file://FOLDER]",
    "*lora_adapter_path": "FOLDER/adapter",
    "*dist_checkpointing_path": "FOLDER/dist_checkpoint",
    "*_files": "FOLDER/rows.jsonl",
    "data.path": "FOLDER/rows.jsonl",
    "data.output_path": "FOLDER/out.parquet",
    "*custom_reward_function.path": "FOLDER/code.py",
    "data.custom_cls.path": "FOLDER/code.py",
    "data.sampler.class_path": "FOLDER/code.py",
    "*tool_config_path": "FOLDER/tools.yaml",
    "*interaction_config_path": "FOLDER/interactions.yaml",
    "trainer.resume_from_path": "FOLDER/global_step_5",
    "*url": "http://127.0.0.1:8080/run_code",
    "*_name": "a_name",
    "*.key": "openai/gsm8k",
    "*": "FOLDER/model",
}
CODE = """from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.sampler import AbstractCurriculumSampler


class CustomRLHFDataset(RLHFDataset):
    pass


class RandomCurriculumSampler(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        pass

    def update(self, batch):
        pass


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""
TOOL = {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}
PARAMETERS = {"type": "object", "properties": {"answer": {"type": "string", "description": "it"}}, "required": []}
FUNCTION = {"name": "calc_gsm8k_reward", "description": "Score.", "parameters": PARAMETERS}
INTERACTION = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}


@dataclass(frozen=True)
class Line:
    """One key of the list."""

    command: str
    key: str
    scripts: tuple[int, ...]
    """Scripts of each of ``VERSIONS`` that set it."""
    values: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the command says to one value of one key; no ``reason`` if it is accepted."""

    line: Line
    value: str
    reason: str | None


def read(file: Path) -> Iterator[Line]:
    """Yield the lines of the list."""
    for text in file.read_text().splitlines():
        if text and not text.startswith("#"):
            head, counts, values = re.split(r"  +", text, maxsplit=2)
            command, key = head.split(" ", 1)
            scripts = tuple(int(number) for number in counts.split("/"))
            yield Line(command, key, scripts, tuple(values.split("; ")))


def make_files(folder: Path) -> None:
    """Write what a script's files are replaced by."""
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "?"}]}
    (folder / "rows.jsonl").write_text(json.dumps(row | {"reward_model": {"ground_truth": "1"}}) + "\n")
    hollow_model_dir(folder / "model")
    (folder / "code.py").write_text(CODE)
    tool = TOOL | {"tool_schema": {"type": "function", "function": FUNCTION}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    (folder / "interactions.yaml").write_text(json.dumps({"interaction": [INTERACTION]}))
    (folder / "global_step_5").mkdir()
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 32, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "adapter" / "adapter_model.safetensors").touch()
    (folder / "dist_checkpoint").mkdir()
    (folder / "dist_checkpoint" / ".metadata").touch()
    (folder / "packages" / "transformer_engine").mkdir(parents=True)
    (folder / "packages" / "transformer_engine" / "__init__.py").touch()


def outcomes(line: Line, folder: Path) -> Iterator[Outcome]:
    """Yield what becomes of each value of a key."""
    base = BASES[line.command]
    settings = list(base.settings)
    for pattern, more in TOGETHER.items():
        if fnmatch.fnmatchcase(f"{line.command} {line.key}" if " " in pattern else line.key, pattern):
            settings += more
    over_all_ranks = line.key.endswith(_OVER_ALL_RANKS)
    if over_all_ranks:
        settings = [setting for setting in settings if not setting.startswith(f"{line.key}_per_gpu=")]
        settings.append("trainer.nnodes=1")
    section, _, name = line.key.rpartition(".")
    for value in line.values:
        beside = [text.format(section=section, name=name, value=value) for text in settings]
        beside += WITH_VALUE.get((line.key, value), [])
        if over_all_ranks:  # such a script has a number of ranks that divides it
            beside.append(f"trainer.n_gpus_per_node={math.gcd(int(value), 16)}")
        written = value
        if value == ELSEWHERE:
            written = next(text for pattern, text in STAND_INS.items() if fnmatch.fnmatchcase(line.key, pattern))
        if line.key == "trainer.logger":
            written = "console" if not value.startswith("[") else "[console]"
        config_name = base.config_name
        if line.key == "--config-name":
            own = value.removesuffix(".yaml")
            config_name, more = (own, []) if own != "gsm8k_multiturn_grpo" else (config_name, [])
        elif line.key == "--config-path":
            more = []
        else:
            more = [f"{line.key}={quoted(written)}"]
        overrides = [text.replace("FOLDER", str(folder)) for text in beside + more]
        yield Outcome(line, value, refusal(overrides, config_name, base.root))


def quoted(value: str) -> str:
    """Write a value as scripts do, where the list has lost its quotes; those around a list are the shell's."""
    if value.startswith("'["):
        return value.strip("'")
    needs = re.search(r"[\s{}*|'\"]", value) and not value.startswith(("[", "'", '"', "{"))
    return f"'{value}'" if needs else value


@functools.cache
def composed(config_name: str, overrides: tuple[str, ...]) -> DictConfig:
    """Compose a configuration; most lines share the one of their command."""
    return compose(overrides, config_name)


def refusal(overrides: list[str], config_name: str, root: type[BaseConfig]) -> str | None:
    """Return what a command says against its settings, the last of which is on trial."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    *others, last = overrides
    key, _, _ = last.partition("=")
    try:
        if "." in key and "@" not in key and not key.startswith("hydra."):
            config = copy.deepcopy(composed(config_name, tuple(others)))
            value = OverridesParser.create().parse_override(last).value()
            OmegaConf.update(config, key, value, force_add=True)
        else:  # it may choose a group of files
            config = compose(overrides, config_name)
        load_config(config, root, keys_set(overrides))
    except (ConfigError, HydraException) as error:
        return str(error)
    return None


def main() -> None:
    """Print, for each version, how many lines are accepted, and the refusals by the number of scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one command, such as main_ppo")
    parser.add_argument("--key", default="*", help="pattern of keys")
    parser.add_argument("--refused", action="store_true", help="print every refused value with its reason")
    parser.add_argument("--release", help="compare a release on PyPI, or a wheel, with an earlier one")
    parser.add_argument("--since", default=NEWEST, help=f"the earlier release (default: {NEWEST}, the newest known)")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.release:
            modules = {module for module, _ in public_names(NAMES.read_text().splitlines())}
            sys.exit(min(1, report(chosen.release, chosen.since, modules, folder)))
        make_files(folder)
        sys.path.append(str(folder / "packages"))
        lines = [line for line in read(LIST) if chosen.only in (None, line.command)]
        lines = [line for line in lines if fnmatch.fnmatchcase(line.key, chosen.key)]
        found = [outcome for line in lines for outcome in outcomes(line, folder)]
    show(found, chosen.refused)


def show(found: list[Outcome], refused: bool) -> None:
    """Print the counts, and the refusals."""
    for number, version in enumerate(VERSIONS):
        of_version = [outcome for outcome in found if outcome.line.scripts[number]]
        accepted = [outcome for outcome in of_version if outcome.reason is None]
        uses = sum(outcome.line.scripts[number] / len(outcome.line.values) for outcome in of_version)
        taken = sum(outcome.line.scripts[number] / len(outcome.line.values) for outcome in accepted)
        print(
            f"{version:<10} {len(accepted):>4} of {len(of_version):>4} values of keys accepted; weighted by scripts "
            f"{taken:7.1f} of {uses:7.1f} ({taken / max(uses, 1):.2%})"
        )
    if not refused:
        return
    for outcome in sorted(found, key=lambda outcome: -max(outcome.line.scripts)):
        if outcome.reason is not None:
            counts = "/".join(map(str, outcome.line.scripts))
            said = re.sub(r"^\d+ problems? in the configuration:\s+1\. ", "", outcome.reason).split("\n")[0]
            print(f"{counts:>9}  {outcome.line.command} {outcome.line.key}={outcome.value} | {said[:200]}")


if __name__ == "__main__":
    main()
