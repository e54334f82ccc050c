"""``python -m verl.trainer.plan``: memory and time of a run before it starts, on GPUs that need not be here.

::

    python -m verl.trainer.plan actor_rollout_ref.model.path=… data.train_batch_size=… --gpus 64 --gpu h100
    verl plan … --gpus 8 --response_tokens 900 --mfu 0.35
    verl plan … --gpus 64 --suggest

The settings are those of ``verl.trainer.main_ppo``; of the model only ``config.json`` is read. Exit status 1 says that
a stage does not fit. docs/plugins/plan.md says what is counted, docs/internals/planning.md how well it agrees with
measured runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from verl.base.streams import printable
from verl.config import PPOConfig
from verl.config.machine import assumed_gpus, local_gpus
from verl.config.problems import report
from verl.errors import ConfigError, VerlError
from verl.plugins.plan.advice import Change, changes, with_settings
from verl.plugins.plan.hardware import GPUS, Cluster, gpu_named
from verl.plugins.plan.plan import OtherModels, Plan
from verl.plugins.plan.shapes import config_file
from verl.plugins.plan.suggest import Suggestions, suggest
from verl.trainer.config import rules_engines, rules_megatron, rules_sizes, rules_tensor_parallel
from verl.trainer.config.command_line import compose
from verl.trainer.config.flags import read_words
from verl.trainer.config.load import load_config
from verl.trainer.config.overrides import CONFIG_DIR, keys_set
from verl.trainer.config.rules_shared_prompts import without_sharing
from verl.trainer.roles import need_critic, need_reference_policy
from verl.utils.console import console, parameters_in_words, show
from verl.utils.model_facts.time_limits import CALL_S, COLLECTIVE_S, DISK_BYTES_PER_S, START_S, TimeLimits

logger = logging.getLogger(__name__)

_GB = 1e9
_FILE_BYTES = 2
"""Bytes of a parameter in a model's files."""
PER_NODE = 8
"""GPUs of a node, where neither the settings nor this machine say it."""


def arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line into options and settings."""
    parser = argparse.ArgumentParser(
        prog="verl plan",
        usage="verl plan KEY=VALUE ... --gpus N --gpu NAME",
        description="Memory and time of a run before it starts. KEY=VALUE, --config-name, --config-dir and "
        "--config-path are those of verl train.",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="number of GPUs that train; else that of trainer.nnodes and n_gpus_per_node, or of this machine, or 8",
    )
    parser.add_argument("--gpu", default="h100", help=f"their kind: {', '.join(GPUS)}; default h100")
    parser.add_argument("--memory_gb", type=float, help="memory of one in 10^9 bytes, if not that of the data sheet")
    parser.add_argument("--prompt_tokens", type=int, help="expected tokens of a prompt; else the longest")
    parser.add_argument("--response_tokens", type=int, help="expected tokens of a response; else the longest")
    parser.add_argument(
        "--mfu", type=float, help="part of the peak FLOP/s that passes reach, as measured; else it is derived"
    )
    parser.add_argument(
        "--bandwidth_use",
        type=float,
        default=Cluster.bandwidth_use,
        help=f"part of the memory bandwidth that operations reach ({Cluster.bandwidth_use})",
    )
    parser.add_argument(
        "--network_gbit_s", type=float, default=400, help="bandwidth between nodes per GPU, in Gbit/s (400)"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="name the fastest layouts that fit: back end, parallel sizes, offload, micro-batches; KEY=VALUE are kept",
    )
    parser.add_argument("--json", action="store_true", help="write the plan as JSON")
    options, rest = parser.parse_known_args(words)
    for name in ("gpus", "memory_gb", "prompt_tokens", "response_tokens", "mfu", "bandwidth_use", "network_gbit_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value}: must be a number above 0")
    for name in ("mfu", "bandwidth_use"):
        if (value := getattr(options, name)) is not None and value > 1:
            parser.error(f"--{name} {value}: is a part of the peak, at most 1; for 40 % write 0.4")
    if options.memory_gb is not None and options.memory_gb <= Cluster.reserved_gb:
        parser.error(
            f"--memory_gb {options.memory_gb}: {Cluster.reserved_gb:g} GB are kept for CUDA, NCCL and the allocator; "
            "must be above that"
        )
    return options, rest


def make_plan(words: list[str]) -> tuple[Plan, argparse.Namespace, frozenset[str]]:
    """Make the plan of a command line; return it, the options, and the keys of its settings.

    Raises:
        ConfigError: settings or GPUs cannot be planned with. Models are read when the plan is looked at.
    """
    options, settings = arguments(words)
    gpu = gpu_named(options.gpu)
    read = read_words(settings, PPOConfig)
    if read.problems:
        raise ConfigError(report(read.problems))
    for flag in {"--cfg", "--package", "--resolve"}.intersection(read.flags):
        raise ConfigError(f"{flag}: verl plan does not print settings. Write verl train ... --cfg job.")
    settings = read.overrides
    keys = frozenset(keys_set(settings))
    if options.gpus:
        settings.extend(_placement(options.gpus, settings))
    try:
        composed = compose(read)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        if isinstance(error, MissingConfigException) and read.flags.keys() <= {"--config-name"}:
            names = ", ".join(sorted(file.stem for file in CONFIG_DIR.glob("ppo*trainer.yaml")))
            name = read.flags.get("--config-name")
            raise ConfigError(f"--config-name {name}: there is no such file. Known are {names}.") from error
        raise ConfigError(f"the configuration cannot be composed: {error}") from error
    with assumed_gpus(PER_NODE if options.gpus else local_gpus() or PER_NODE):
        config = load_config(composed, explicit=keys_set(settings), with_rules=False, with_algorithms=False)
    config, unshared = without_sharing(config)
    for text in unshared:
        logger.warning("%s", text)
    cluster = Cluster(
        gpu=gpu,
        gpus=config.trainer.ranks,
        gpus_per_node=config.trainer.n_gpus_per_node,
        memory_gb=options.memory_gb or gpu.memory_gb,
        mfu=options.mfu,
        bandwidth_use=options.bandwidth_use,
        network_bytes_per_s=options.network_gbit_s / 8 * 1e9,
    )
    for name, longest in (("prompt", config.data.max_prompt_length), ("response", config.data.max_response_length)):
        expected = getattr(options, f"{name}_tokens")
        if expected is not None and expected > longest:
            raise ConfigError(
                f"--{name}_tokens {expected}: no {name} is longer than data.max_{name}_length={longest}. Expect at "
                "most that, or raise the limit."
            )
    needs = OtherModels(critic=need_critic(config), reference=need_reference_policy(config))
    return Plan(config, cluster, needs, prompt=options.prompt_tokens, response=options.response_tokens), options, keys


def check_layouts(plan: Plan) -> None:
    """Refuse what `verl train` refuses of how ranks share models and batches, on every machine.

    Heads and layers are read where the plan reads them, so names on the hub are checked too.

    Raises:
        ConfigError: lists all problems; or a model has no config.json.
    """
    model = plan.config.actor_rollout_ref.model
    read = {"actor_rollout_ref.model.path": config_file(model.hf_config_path or model.path).parent}
    if plan.needs.critic:
        read["critic.model.path"] = config_file(plan.config.critic.model.path).parent
    located = {key: str(folder) for key, folder in read.items()}
    # With critic.enable the rules do not ask the estimator, which would import PyTorch.
    config = with_settings(plan.config, {**located, "critic.enable": plan.needs.critic})
    rules = (
        rules_engines.parallel_sizes,
        rules_megatron.layouts,
        rules_sizes.mini_batches,
        rules_tensor_parallel.beside_divided_matrices,
    )
    if problems := [problem for rule in rules for problem in rule(config)]:
        raise ConfigError(report(problems))


def _placement(gpus: int, settings: list[str]) -> list[str]:
    """Return the settings of nodes for ``gpus`` GPUs."""
    set_sizes = {key: setting.partition("=")[2] for setting in settings for key in keys_set([setting])}
    for key in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        if key in set_sizes and not (set_sizes[key].isdecimal() and int(set_sizes[key]) > 0):
            raise ConfigError(f"{key}={set_sizes[key]}: must be a whole number above 0. Leave it out to follow --gpus.")
    per_node = int(set_sizes.get("trainer.n_gpus_per_node", min(gpus, PER_NODE)))
    if gpus % per_node:
        raise ConfigError(
            f"--gpus {gpus}: nodes of {per_node} GPUs do not add up to that. Use a multiple of {per_node}, or set "
            "trainer.n_gpus_per_node."
        )
    nodes = gpus // per_node
    if int(set_sizes.get("trainer.nnodes", nodes)) != nodes:
        raise ConfigError(
            f"--gpus {gpus}: trainer.nnodes={set_sizes['trainer.nnodes']} nodes of {per_node} GPUs are another number. "
            "Leave one of them out."
        )
    return [f"trainer.n_gpus_per_node={per_node}", f"trainer.nnodes={nodes}"]


def as_json(plan: Plan, advice: list[Change]) -> dict[str, object]:
    """Return the plan as plain values: bytes and seconds."""
    return {
        "gpus": plan.gpus,
        "gpu": plan.cluster.gpu.name,
        "usable_bytes": plan.cluster.usable_bytes,
        "parameters": plan.models["actor"].memory.shape.parameters(),
        "fits": plan.excess <= 0,
        "stages": [
            {
                "name": stage.name,
                "bytes": stage.bytes,
                "parts": dict(stage.parts),
                "seconds": stage.seconds,
                "operation_seconds": stage.operation_seconds,
                "micro_batch_key": stage.micro_batch_key,
                "micro_batch": stage.micro_batch,
                "largest": stage.largest,
            }
            for stage in plan.stages
        ],
        "step_seconds": plan.seconds,
        "step_seconds_range": list(plan.seconds_range),
        "tokens_per_second": plan.tokens_per_step / plan.seconds,
        "snapshot_bytes": plan.snapshot_bytes,
        "snapshot_steps": plan.snapshot_steps,
        "time_limits": _time_limits(plan),
        "changes": [
            {"settings": dict(change.settings), "bytes": change.bytes, "fits": change.fits} for change in advice
        ],
    }


def seconds_in_words(plan: Plan) -> str:
    """Seconds of a step, and between which they probably are."""
    low, high = plan.seconds_range
    digits = 0 if low >= 10 else 1
    return f"{plan.seconds:.{digits}f} s ({low:.{digits}f} to {high:.{digits}f} s)"


def show_plan(plan: Plan, advice: list[Change]) -> None:
    """Print the plan for people."""
    from rich.table import Table

    cluster, shape = plan.cluster, plan.models["actor"].memory.shape
    usable = cluster.usable_bytes / _GB
    show(
        f"{shape.family}, {parameters_in_words(shape.parameters())}, on {plan.gpus} x {cluster.gpu.name} "
        f"({_placement_text(plan)}): {usable:.0f} GB of each are for tensors, "
        f"{cluster.reserved_gb:.0f} GB are kept for CUDA, NCCL and the allocator"
    )
    memory = Table(title="Memory of one GPU at the highest point of each stage, GB", title_justify="left")
    for name in ("stage", "in all", "parts"):
        memory.add_column(name, justify="right" if name == "in all" else "left")
    for stage in plan.stages:
        parts = ", ".join(f"{name} {size / _GB:.1f}" for name, size in stage.parts.items() if size >= 0.05 * _GB)
        fits = stage.bytes <= cluster.usable_bytes
        memory.add_row(stage.name, f"{stage.bytes / _GB:.1f}{'' if fits else ' !'}", parts)
    console().print(memory)
    time = Table(title="One step", title_justify="left")
    for name in ("stage", "seconds", "by its operations", "passes at a time", "largest that fits", "key"):
        time.add_column(name, justify="left" if name in ("stage", "key") else "right")
    for stage in plan.stages:
        now = "not set" if stage.micro_batch is None else f"{stage.micro_batch:,}"
        key = stage.micro_batch_key.removeprefix("actor_rollout_ref.")
        seconds = f"{stage.seconds:.1f}", f"{stage.operation_seconds:.1f}"
        time.add_row(stage.name, *seconds, now, f"{stage.largest:,}", key)
    console().print(time)
    work, speed = plan.work(1), plan.tokens_per_step / plan.seconds
    reached = f"if passes reach {cluster.mfu:.0%} of the peak" if cluster.mfu else "by the operations of its passes"
    show(
        f"About {seconds_in_words(plan)} per step of {plan.tokens_per_step:,} tokens "
        f"({work.prompt} + {work.response} per row): {speed:,.0f} tokens/s, {speed / plan.gpus:,.0f} per GPU, "
        f"{reached}, with {cluster.bandwidth_use:.0%} of the memory bandwidth. Of published steps of another "
        "framework, on 8 to 512 GPUs, 80 % were in the range that brackets show. Rewards that take "
        "longer than a rule, and teachers behind an endpoint, are not counted."
    )
    if plan.overlaps:
        show("Sampling and training overlap: the step takes as long as the longer one.")
    if plan.snapshot_steps:
        often = "each step" if plan.snapshot_steps == 1 else f"every {plan.snapshot_steps} steps"
        show(
            f"For restarts Ray's object stores hold {2 * plan.snapshot_bytes / _GB:.1f} GB over all nodes: two copies "
            f"of the training state, one made {often} (trainer.recovery.snapshot_freq)."
        )
    limits = ", ".join(f"{key}={seconds:g}" for key, seconds in _time_limits(plan).items())
    show(f"Time limits in seconds, for a disk that gives {DISK_BYTES_PER_S / 1e9:g} GB/s: {limits}.")
    if plan.excess <= 0:
        return
    worst = max(plan.stages, key=lambda stage: stage.bytes)
    if worst.bytes > cluster.usable_bytes:
        show(f"{worst.name} does not fit: {worst.bytes / _GB:.1f} GB of {cluster.usable_bytes / _GB:.1f} GB.")
    else:
        show("rollout does not fit: there is no room for the keys and values of one row.")
    for change in advice:
        show(f"  {change}   ({change.bytes / _GB:.1f} GB{', fits' if change.fits else ''})")
    if not advice or not advice[-1].fits:
        show("  No setting makes room enough: take more GPUs, shorter responses, or LoRA (model.lora_rank).")


def suggestions_as_json(suggestions: Suggestions) -> dict[str, object]:
    """Return layouts as plain values, each with its plan."""
    return {
        "tried": suggestions.tried,
        "fitting": suggestions.fitting,
        "least_bytes": suggestions.least_bytes,
        "layouts": [
            {"layout": str(layout), "settings": layout.words, "plan": as_json(layout.plan, [])}
            for layout in suggestions.layouts
        ],
    }


def show_suggestions(plan: Plan, suggestions: Suggestions) -> None:
    """Print the fastest layouts for people."""
    from rich.table import Table

    cluster, shape = plan.cluster, plan.models["actor"].memory.shape
    show(
        f"{shape.family}, {parameters_in_words(shape.parameters())}, on {plan.gpus} x {cluster.gpu.name} "
        f"({_placement_text(plan)}): {suggestions.tried} layouts for training were planned, each with up to 4 kinds of "
        f"offload; {suggestions.fitting} of these fit in {cluster.usable_bytes / _GB:.0f} GB."
    )
    if not suggestions.layouts:
        least = f"The passes of the smallest need {suggestions.least_bytes / _GB:.1f} GB of each GPU. "
        fits = "None fits with a rollout engine beside it. "
        show(
            f"{fits if suggestions.fitting else least}Take more GPUs, shorter responses, LoRA (model.lora_rank), fewer "
            "settings that are kept, or, if the engine is wider than a machine, actor_rollout_ref.rollout.name=vllm."
        )
        return
    ranking = Table(title="The fastest layouts that fit", title_justify="left")
    for name in ("layout", "seconds per step", "GB"):
        ranking.add_column(name, justify="left" if name == "layout" else "right")
    for layout in suggestions.layouts:
        ranking.add_row(str(layout), f"{layout.plan.seconds:.1f}", f"{layout.bytes / _GB:.1f}")
    console().print(ranking)
    compared = suggestions.layouts[:2]
    stages = Table(title="Their stages", title_justify="left")
    stages.add_column("stage")
    for name in ("fastest", "second")[: len(compared)]:
        stages.add_column(f"{name}: seconds", justify="right")
        stages.add_column("GB", justify="right")
        stages.add_column("parts, GB")
    for layout_stages in zip(*(layout.plan.stages for layout in compared), strict=True):
        cells = [layout_stages[0].name]
        for stage in layout_stages:
            parts = [f"{name} {size / _GB:.1f}" for name, size in stage.parts.items() if size >= 0.05 * _GB]
            cells += [f"{stage.seconds:.1f}", f"{stage.bytes / _GB:.1f}", ", ".join(parts)]
        stages.add_row(*cells)
    console().print(stages)
    show("Settings of the fastest, besides yours:")
    sys.stdout.write(" \\\n".join(f"    {word}" for word in suggestions.layouts[0].words) + "\n")


def _placement_text(plan: Plan) -> str:
    """Say on which nodes the GPUs of the run are, and what they do."""
    nodes, config = plan.cluster.gpus // plan.cluster.gpus_per_node, plan.config
    nodes_text, rollout = f"{nodes} node{'s' * (nodes != 1)}", config.actor_rollout_ref.rollout
    sampling_text = f", {rollout.ranks} on {rollout.nnodes} of their own sample" if plan.has_rollout_pool else ""
    teacher_text = f", {plan.teachers.ranks} on {config.distillation.nnodes} of their own teach"
    further = sampling_text + (teacher_text if plan.teachers.ranks else "")
    return f"{plan.ranks} on {nodes_text} train{further}" if further else nodes_text


def _time_limits(plan: Plan) -> dict[str, float]:
    """Key → seconds: what is set, or what a run derives from files in bf16 of the largest model."""
    config = plan.config
    models = plan.models | plan.passing_teachers
    largest = max(held.memory.shape.parameters(held.memory.outputs) for held in models.values())
    limits, rollout = TimeLimits(_FILE_BYTES * largest), config.actor_rollout_ref.rollout
    collective, call = config.actor_rollout_ref.nccl_timeout, config.trainer.recovery.hang_timeout_s
    collective = limits.collective_s if collective == COLLECTIVE_S else collective
    seconds: dict[str, float] = {"actor_rollout_ref.nccl_timeout": collective}
    if call is not None:
        seconds["trainer.recovery.hang_timeout_s"] = limits.call_s if call == CALL_S else call
    if rollout.name in START_S:
        settings = rollout.engine_kwargs.get(rollout.name) or {}
        key = f"actor_rollout_ref.rollout.engine_kwargs.{rollout.name}.start_timeout_s"
        seconds[key] = settings.get("start_timeout_s") or limits.start_s(rollout.name)
    return seconds


def main() -> None:
    """Plan, print, and end with status 1 if a stage or no layout fits, 2 if settings cannot be planned with."""
    try:
        plan, options, keys = make_plan(sys.argv[1:])
        if options.suggest:
            suggestions = suggest(plan, keys, check_layouts)
            if options.json:
                sys.stdout.write(json.dumps(suggestions_as_json(suggestions), indent=2) + "\n")
            else:
                show_suggestions(plan, suggestions)
            raise SystemExit(0 if suggestions.layouts else 1)
        check_layouts(plan)
        advice = changes(plan)
        if options.json:
            sys.stdout.write(json.dumps(as_json(plan, advice), indent=2) + "\n")
        else:
            show_plan(plan, advice)
    except VerlError as error:
        sys.stderr.write(printable(f"{type(error).__name__}: {error}\n"))
        raise SystemExit(2) from None
    raise SystemExit(1 if plan.excess > 0 else 0)
