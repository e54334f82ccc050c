"""Rules about rollout engines: the ranks that share one, and engines that are slow on the device of the run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from verl.config import GenerationConfig, PPOConfig, Problem, RolloutConfig
from verl.config.base import defaults_of
from verl.config.distillation import VLLM_MAX_LOGPROBS, TeacherInferenceConfig
from verl.config.rollout import IN_PROCESS_ENGINES, SERVER_ENGINES
from verl.trainer.config.sizes import resolve_device
from verl.utils.model_facts import model_files
from verl.utils.model_facts.experts import ExpertSizes

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
)
"""Settings of a rollout engine that several ranks share."""


def parallel_sizes(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """The ranks that share an engine are on one machine, or are those of several; only some engines are shared."""
    for engine in _engines(config):
        if engine.settings.name in SERVER_ENGINES:
            yield from _of_machines(engine)
            yield from _experts(engine)
        if engine.settings.name in IN_PROCESS_ENGINES:
            yield from _of_one_rank(engine.path, engine.settings)


def context(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """The longest prompt with the longest response fits into the positions of the model."""
    if isinstance(config, PPOConfig):
        prefix, section = "actor_rollout_ref.", "data"
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        lengths, usual = ("max_prompt_length", "max_response_length"), defaults_of(PPOConfig).data
    else:
        model, rollout, prefix, section = config.model, config.rollout, "", "rollout"
        lengths, usual = ("prompt_length", "response_length"), defaults_of(GenerationConfig).rollout
    positions = model_files.longest_context(model.path, model.override_config)
    needed = rollout.prompt_length + rollout.response_length
    if positions is None or max(needed, rollout.max_model_len or 0) <= positions:
        return
    cause = f"the model has {positions:,} positions (max_position_embeddings of {model.path})"
    if needed <= positions:
        yield Problem(
            f"{prefix}rollout.max_model_len", rollout.max_model_len, cause, f"null, or {needed:,} to {positions:,}"
        )
        return
    values = {name: config[section][name] for name in lengths}
    # The one that was set is at fault: the other is the default, or else the smaller.
    name = max(lengths, key=lambda name: (values[name] != usual[name], values[name]))
    [other] = {*lengths} - {name}
    allowed, remedy = f"1 to {positions - values[other]:,}", f"lower it, or {section}.{other}"
    if values[other] >= positions:
        allowed, remedy = f"less than {positions:,} for both together", f"lower both it and {section}.{other}"
    remedy += f"; if the model can hold more, set {prefix}model.override_config.max_position_embeddings={needed}"
    cause = f"{cause}, and {section}.{other}={values[other]} leaves {max(0, positions - values[other]):,} of them"
    yield Problem(f"{section}.{name}", values[name], cause, allowed, remedy)


def quantization(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """Engines that round weights to this format, on this device; advise to correct for it in training."""
    for path, settings, *_ in _engines(config):
        if settings.quantization is not None:
            yield from _rounded(path, settings, resolve_device(config))
    if isinstance(config, GenerationConfig):
        return
    roles, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    rollout = roles.rollout
    if rollout.quantization is not None and rollout.name == "vllm" and roles.model.has_adapters:
        yield from _rounded_adapters(rollout, resolve_device(config))
    corrects = correction is not None and (correction.rollout_is is not None or correction.rollout_rs is not None)
    if rollout.quantization is not None and not corrects:
        key = "actor_rollout_ref.rollout.quantization"
        cause = "responses are drawn with rounded weights and trained with exact ones, and nothing corrects for it"
        remedy = "set algorithm.rollout_correction.rollout_is=token and watch training/rollout_probs_diff_mean"
        yield Problem(key, rollout.quantization, cause, "null", remedy, advice=True)


def _rounded(path: str, settings: RolloutConfig, device: str) -> Iterator[Problem]:
    key, format, native = f"{path}.quantization", settings.quantization, f"set {path}.name=native"
    if settings.name not in ("native", "vllm"):
        cause = f"{path}.name={settings.name} computes with the weights as the trainer has them"
        yield Problem(key, format, cause, "null", f"{native} or vllm")
    elif settings.name == "vllm" and format == "fp8" and device == "cpu":
        cause = "vllm's build for CPUs has no kernel that rounds weights to fp8 (static_scaled_fp8_quant)"
        yield Problem(key, format, cause, "int8, null", native)
    elif settings.name == "vllm" and format == "fp8" and settings.dtype in ("float32", "fp32"):
        cause = f"with {key}={format} vllm computes in bfloat16 or float16 alone"
        yield Problem(f"{path}.dtype", settings.dtype, cause, "bfloat16")


def _rounded_adapters(rollout: RolloutConfig, device: str) -> Iterator[Problem]:
    key, native = "actor_rollout_ref.rollout.merge_adapters", "actor_rollout_ref.rollout.name=native"
    if rollout.merge_adapters:
        cause = "adapters are rounded with the weights they are merged into, so most of what a step changes is lost"
        remedy = f"set {key}=false (on a GPU), or {native}, which computes them beside the weights"
        yield Problem(key, True, cause, "false", remedy, advice=True)
    elif device == "cpu":
        cause = f"layers of quantization={rollout.quantization} take no adapters in vllm on a CPU"
        yield Problem(key, False, cause, "true", f"set {native}, which computes them beside the weights")


def most_likely_tokens(
    path: str, engine: RolloutConfig | TeacherInferenceConfig, count: int, asks: str
) -> Iterator[Problem]:
    """Check that vLLM may return as many of the most likely tokens as the engine of the section ``path`` needs.

    Args:
        path: key of the engine's section.
        engine: its settings.
        count: number of most likely tokens.
        asks: settings that ask for them.
    """
    arguments = engine.engine_kwargs.get("vllm") if engine.name == "vllm" else None
    most = arguments.get("max_logprobs") if isinstance(arguments, Mapping) else None
    if isinstance(most, int) and 0 <= most < count:  # -1 is no limit
        cause = f"{asks} asks for the {count} most likely tokens"
        remedy = f"leave it out: vllm is then given {max(count, VLLM_MAX_LOGPROBS)}"
        yield Problem(f"{path}.engine_kwargs.vllm.max_logprobs", most, cause, f"-1, >= {count}", remedy)


def speed(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """Advise against an engine without the kernels of a server on a GPU."""
    device = resolve_device(config)
    for engine in _engines(config):
        yield from not_for_serving(engine.path, engine.settings.name, device)


def not_for_serving(path: str, name: str, device: str) -> Iterator[Problem]:
    """Advise against engine ``name`` of the section ``path`` on a GPU if it is none of those made for serving."""
    if device == "cuda" and name in IN_PROCESS_ENGINES:
        cause = "it starts each operation of each token from Python, and the GPU waits for it"
        if name == "native":
            cause = (
                "it has PyTorch's kernels, not those of an engine for serving, and only dense models of text are "
                "recorded as CUDA graphs: for others it starts each operation of each token from Python"
            )
        where = "which is installed here" if importlib.util.find_spec("vllm") else "in an environment of its own too"
        remedy = f"set {path}.name=vllm ({where}), unless this engine is what you want"
        yield Problem(f"{path}.name", name, cause, "vllm, sglang", remedy, advice=True)


class _PlacedEngine(NamedTuple):
    path: str
    """Key of its section."""
    settings: RolloutConfig
    model: str
    """Key of its model's path."""
    ranks_key: str
    ranks_per_node: int
    """Ranks of one machine, and the setting that says so."""
    nodes: int
    """Machines."""


def _engines(config: PPOConfig | GenerationConfig) -> Iterator[_PlacedEngine]:
    trainer_ranks = "trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, config.trainer.nnodes
    if isinstance(config, GenerationConfig):
        yield _PlacedEngine("rollout", config.rollout, config.model.path, *trainer_ranks)
        return
    roles = config.actor_rollout_ref
    pool_ranks = "actor_rollout_ref.rollout.n_gpus_per_node", roles.rollout.n_gpus_per_node, roles.rollout.nnodes
    ranks = trainer_ranks if roles.hybrid_engine else pool_ranks
    yield _PlacedEngine("actor_rollout_ref.rollout", roles.rollout, roles.model.path, *ranks)
    if config.judge is not None:
        reward = config.reward_model
        pool_ranks = "reward_model.n_gpus_per_node", reward.n_gpus_per_node, reward.nnodes
        ranks = pool_ranks if reward.enable_resource_pool else trainer_ranks
        yield _PlacedEngine("reward_model.rollout", config.judge.rollout, reward.model.path, *ranks)
    section = config.distillation
    for name, teacher in section.teachers.items() if section.enabled else ():
        if teacher.inference.is_engine and teacher.model_path is not None:
            path, settings = f"distillation.teacher_models.{name}.inference", teacher.inference.rollout()
            pool_ranks = "distillation.n_gpus_per_node", section.n_gpus_per_node, section.nnodes
            yield _PlacedEngine(path, settings, teacher.model_path, *(pool_ranks if section.ranks else trainer_ranks))


def _of_machines(engine: _PlacedEngine) -> Iterator[Problem]:
    rollout, ranks = engine.settings, engine.ranks_per_node
    key, size, tensor = f"{engine.path}.tensor_model_parallel_size", rollout.ranks_per_engine, PARALLEL_SIZES[0]
    other_sizes = size // rollout[tensor]
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    fitting += [ranks * n for n in range(2, engine.nodes + 1) if engine.nodes % n == 0]
    if size not in fitting:
        shared = "" if other_sizes == 1 else f" ({size} with the other sizes)"
        cause = f"so many ranks{shared} share an engine, and it does not divide {engine.ranks_key}={ranks}"
        if engine.nodes > 1:
            cause += f", nor is it that of 2 or more of {engine.nodes} nodes, divided evenly"
        allowed = ", ".join(str(n // other_sizes) for n in fitting if n % other_sizes == 0)
        remedy = f"set {key}=1, where the model fits on one device"
        yield Problem(key, rollout[tensor], cause, allowed or "fewer ranks in the other sizes", remedy)


def _experts(engine: _PlacedEngine) -> Iterator[Problem]:
    size = engine.settings.expert_parallel_size
    entries = model_files.config_entries(Path(engine.model).expanduser())
    text = entries.get("text_config")
    if (
        size > 1
        and entries
        and ExpertSizes.from_config(SimpleNamespace(**(text if isinstance(text, dict) else entries))) is None
    ):
        cause = f"the model has no experts ({engine.model})"
        yield Problem(f"{engine.path}.expert_parallel_size", size, cause, "1")


def _of_one_rank(path: str, rollout: RolloutConfig) -> Iterator[Problem]:
    """Refuse to split a model over ranks where the engine is in the trainer's process."""
    for name in PARALLEL_SIZES:
        if rollout[name] > 1:
            cause = f"with {path}.name={rollout.name} each rank generates with a whole copy of the model"
            remedy = f"leave it out; to split a model over ranks so, set {path}.name=vllm or sglang"
            yield Problem(f"{path}.{name}", rollout[name], cause, "1", remedy)
