"""Settings that are derived from other settings, before the configuration is frozen.

Sizes that depend on the length of the data set or on the device are in :mod:`verl.trainer.config.sizes`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from verl.base.engine_python import engine_python
from verl.config import JudgeRolloutConfig, Problem, RolloutConfig, RolloutCorrectionConfig, TeacherInferenceConfig
from verl.config.machine import gpus_of_nodes
from verl.config.megatron import CHECKPOINT, SHARING
from verl.config.megatron import SIZES as MEGATRON_SIZES
from verl.config.megatron_flags import PIPELINE_LAYOUT
from verl.config.rollout import SERVER_ENGINES
from verl.errors import ConfigError, SectionError
from verl.trainer.config.keys import FORWARD_PASSES, PAIRS, InactiveKey, Key, Tree, drop, get, put, same
from verl.utils.model_facts import model_files
from verl.utils.model_facts.time_limits import time_limits
from verl.vision.families import FAMILIES

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SHARED = "ulysses_sequence_parallel_size"

BYPASS = "bypass_mode"
"""Name of the policy loss that ``algorithm.rollout_correction.bypass_mode=true`` selects."""


def derive(
    tree: Tree,
    raw: Tree,
    keys: Mapping[str, Key],
    inactive: Mapping[str, InactiveKey],
    explicit: Collection[str],
    problems: list[Problem],
    chooses_engine: bool = True,
) -> list[str]:
    """Fill in the values that follow from other settings, in place; see also :func:`derive_from_algorithm`.

    Args:
        tree: the configuration after interpolation; changed in place.
        raw: the configuration before interpolation.
        keys: path → field or section.
        inactive: path → key that no code reads.
        explicit: keys that the user set on the command line.
        problems: list to which contradictions between two settings are appended.
        chooses_engine: take the engine that is fast on the GPUs of the run, unless one was named.

    Returns:
        messages about settings that were changed or that have no effect.
    """
    for path, key in keys.items():
        if key.meta.path:
            value = get(tree, path)
            put(tree, path, [expanded(v) for v in value] if isinstance(value, list) else expanded(value))
    _chat_templates(tree, keys, problems)
    for first_key, second_key in PAIRS:
        if first_key in keys and second_key in keys:
            _make_equal(tree, keys, (first_key, second_key), explicit, problems)
    _layouts(tree, keys, explicit)
    for older in inactive.values():
        if older.per_rank:
            _per_rank(tree, raw, keys[older.per_rank], older, problems)
    for path, key in keys.items():
        # Without a value, the field's default factory copies the field that it follows (clip_ratio_low: clip_ratio).
        if key.follows and path not in explicit and same(get(tree, path), key.default):
            drop(tree, path)
    remarks = _fast_engine(tree, keys, explicit) if chooses_engine else []
    remarks += _kept_tokens(tree)
    remarks += _separate_ranks(tree, keys, explicit)
    remarks += _engines(tree, raw, keys, explicit)
    _rows_in_driver(tree, keys, explicit)
    _staged_wake_up(tree, keys, explicit)
    _greedy_teachers(tree, raw, keys)
    remarks += _time_limits(tree, keys, explicit)
    if "algorithm.adv_estimator" in keys:
        for size, source in FORWARD_PASSES:
            if get(tree, size) is None:
                put(tree, size, get(tree, source))
    return remarks


def derive_from_algorithm(tree: Tree, explicit: Collection[str], problems: list[Problem]) -> list[str]:
    """Fill in what follows from the estimator and the loss, in place; imports PyTorch.

    Returns:
        messages about settings that were changed.
    """
    remarks = _importance_weights(tree, explicit)
    remarks += _algorithm(tree, problems)
    return remarks


def _greedy_teachers(tree: Tree, raw: Tree, keys: Mapping[str, Key]) -> None:
    """Give teachers that follow the rollout the temperature at which a greedy policy is trained, which is 1."""
    if get(tree, f"{_ROLLOUT}.do_sample") is not False:
        return
    for path in keys:
        is_teacher_temperature = path.startswith("distillation.teacher_models.") and path.endswith(
            ".inference.temperature"
        )
        if is_teacher_temperature and not isinstance(get(raw, path), int | float):
            put(tree, path, 1.0)


def _chat_templates(tree: Tree, keys: Mapping[str, Key], problems: list[Problem]) -> None:
    """Read chat templates that are files: ranks on other machines, and a checkpoint, need the text."""
    for path in keys:
        if path.endswith("custom_chat_template") and isinstance(template := get(tree, path), str):
            try:
                put(tree, path, model_files.read_chat_template(template))
            except ConfigError as error:
                problems.append(Problem(path, template, str(error), remedy="correct the path, or give the text"))


def expanded(path: object) -> Any:
    """Expand ``~`` and ``$VARIABLES`` in a path; return anything but a string unchanged."""
    return os.path.expanduser(os.path.expandvars(path)) if isinstance(path, str) else path


def _make_equal(
    tree: Tree, keys: Mapping[str, Key], pair: tuple[str, str], explicit: Collection[str], problems: list[Problem]
) -> None:
    values = [get(tree, path, keys[path].default) for path in pair]
    if same(values[0], values[1]):
        return
    set_paths = [p for p, v in zip(pair, values, strict=True) if p in explicit or not same(v, keys[p].default)]
    if len(set_paths) == 2:
        cause = f"this is the same setting as {pair[1]}, which is set to {values[1]}"
        problems.append(Problem(pair[0], values[0], cause, remedy="give both the same value, or set only one"))
        return
    source = set_paths[0] if set_paths else pair[0]
    for path in pair:
        put(tree, path, get(tree, source))


def _per_rank(tree: Tree, raw: Tree, per_rank: Key, older: InactiveKey, problems: list[Problem]) -> None:
    """Derive a micro-batch size per rank from the older key, which counts sequences over all ranks."""
    size = drop(tree, older.path)
    if size is None:
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        cause = "this value cannot be used here"
        problems.append(Problem(older.path, size, cause, "an integer >= 1, or null", f"set {per_rank.path} instead"))
        return
    default = per_rank.meta.interpolation
    is_followed = default is not None and get(raw, per_rank.path) == default
    now = get(tree, per_rank.path)
    if not is_followed and not same(now, per_rank.default):
        if not same(get(raw, older.path), older.yaml_default):
            cause = f"this counts sequences over all ranks, and {per_rank.path}={now} counts them per rank"
            problems.append(Problem(older.path, size, cause, remedy=f"set only {per_rank.path}"))
        return
    shared_by = _shared_by(tree, per_rank.path)
    ranks = max(1, _ranks(tree) // shared_by)
    if size % ranks:
        cause = f"it counts sequences over all ranks, and {ranks} ranks do not divide it"
        cause += "" if shared_by == 1 else f" (groups of {shared_by} that share sequences)"
        remedy = f"set {per_rank.path} instead, which counts them per rank"
        problems.append(Problem(older.path, size, cause, f"multiples of {ranks}", remedy))
        return
    put(tree, per_rank.path, size // ranks)


def _shared_by(tree: Tree, size: str) -> int:
    """Return the number of ranks that get the same rows in passes whose size is in the key ``size``."""
    section = size.rpartition(".")[0].replace(_ROLLOUT, _ACTOR)
    # Runs on given data have one model, whose back end is named in a section of its own.
    section, megatron = ("engine", "megatron") if section == "data" else (section, f"{section}.megatron")
    if get(tree, f"{section}.strategy") == "megatron":
        return math.prod(_count(get(tree, f"{megatron}.{name}")) or 1 for name in SHARING)
    section_name = "fsdp_config" if section.startswith("actor_rollout_ref") else "model.fsdp_config"
    placement = section if section == "engine" else f"{section}.{section_name}"
    tensor = _count(get(tree, f"{placement}.tensor_parallel_size")) or 1
    return tensor * (_count(get(tree, f"{section}.{_SHARED}")) or 1)


def _layouts(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> None:
    """Give models under Megatron the actor's sizes and layers of stages where theirs are not set.

    The reference, which is the actor's model, also gets its other flags and its checkpoint.
    """
    for section in ("actor_rollout_ref.ref", "critic", "reward_model"):
        if get(tree, f"{section}.strategy") != "megatron" or get(tree, f"{_ACTOR}.strategy") != "megatron":
            continue
        for name in MEGATRON_SIZES:
            key = f"{section}.megatron.{name}"
            if key in keys and key not in explicit and same(get(tree, key, keys[key].default), keys[key].default):
                size = get(tree, f"{_ACTOR}.megatron.{name}", keys[key].default)
                if size is None or _count(size):  # else it is reported once, where it was set
                    put(tree, key, size)
        checkpoints = [f"{section}.megatron.{name}" for name in CHECKPOINT]
        if section == "actor_rollout_ref.ref" and not any(key not in keys or key in explicit for key in checkpoints):
            values = {key: get(tree, key, keys[key].default) for key in checkpoints}
            if all(same(value, keys[key].default) for key, value in values.items()):
                for key, value in values.items():
                    put(tree, key, get(tree, key.replace(section, _ACTOR), value))
        key, actors_key = (f"{part}.megatron.override_transformer_config" for part in (section, _ACTOR))
        entries, actors = get(tree, key, {}), get(tree, actors_key, {})
        if key not in keys or key in explicit or not isinstance(entries, dict) or not isinstance(actors, dict):
            continue
        stages = [f"megatron.{name}" for name in MEGATRON_SIZES if "pipeline" in name]
        has_stages = all(same(get(tree, f"{section}.{name}"), get(tree, f"{_ACTOR}.{name}")) for name in stages)
        if not entries.keys() & set(PIPELINE_LAYOUT) and has_stages:
            is_same_model = section == "actor_rollout_ref.ref" and not entries
            followed = {k: v for k, v in actors.items() if is_same_model or k in PIPELINE_LAYOUT}
            if followed:
                put(tree, key, followed | entries)


def _rows_in_driver(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> None:
    """Read rows in the driver by default if a generator or a sampler follows the steps; processes would read ahead."""
    workers = "data.dataloader_num_workers"
    follows = any(get(tree, key) for key in ("data.datagen.path", "data.sampler.class_path", "data.sampler.class_name"))
    if workers in keys and follows and workers not in explicit and same(get(tree, workers), keys[workers].default):
        put(tree, workers, 0)


def _staged_wake_up(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> None:
    """Let engines allocate keys and values after they took new weights, if the trainer's leave the device by then."""
    key = f"{_ROLLOUT}.multi_stage_wake_up"
    offloads = any(get(tree, f"{_ACTOR}.{section}.param_offload") for section in ("fsdp_config", "megatron"))
    if key in keys and key not in explicit and offloads and get(tree, f"{_ROLLOUT}.name") in SERVER_ENGINES:
        put(tree, key, True)


def _time_limits(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> list[str]:
    """Raise limits that were not set to what the run's ranks and its largest model need; tell which."""
    ranks = _ranks(tree)
    needed = {"trainer.ray_wait_register_center_timeout": (2.0 * ranks, f"{ranks} ranks start")}
    models = [None, *(get(tree, path) for path in keys if path.endswith("model.path"))]
    limits = max(map(time_limits, models), key=lambda limits: limits.file_bytes)
    cause = f"a model of {limits.file_bytes / 1e9:.0f} GB is read"
    needed["actor_rollout_ref.nccl_timeout"] = limits.collective_s, cause
    needed["trainer.recovery.hang_timeout_s"] = limits.call_s, cause
    remarks = []
    for path, (seconds, cause) in needed.items():
        is_default = path in keys and path not in explicit and same(get(tree, path), keys[path].default)
        if is_default and seconds > keys[path].default:
            put(tree, path, seconds)
            remarks.append(f"{path}: {seconds:g} and not {keys[path].default:g}, because {cause}")
    return remarks


def _ranks(tree: Mapping[str, Any]) -> int:
    nodes, per_node = (_count(get(tree, f"trainer.{name}", 1)) for name in ("nnodes", "n_gpus_per_node"))
    return nodes * per_node if nodes and per_node else 1


def _count(value: Any) -> int | None:
    """Return a positive whole number, which may be written as text; None for what is none."""
    return int(value) or None if str(value).isdecimal() else None


_PROGRAMS_ONLY = (
    "enforce_eager",
    "cudagraph_capture_sizes",
    "load_format",
    "limit_images",
    "enable_chunked_prefill",
    "disable_log_stats",
    "scheduling_policy",
    "multi_stage_wake_up",
    "checkpoint_engine.update_weights_bucket_megabytes",
)
"""Settings of the rollout that only vLLM and SGLang read."""


_TEACHER_ENGINE_KEYS = (
    "data_parallel_size",
    "expert_parallel_size",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "engine_kwargs",
    "enable_prefix_caching",
)
"""Settings of a teacher's engine that one without an engine does not read, beside those of ``_PROGRAMS_ONLY``."""


_NATIVE_ENGINE_KEYS = ("enable_rollout_routing_replay", "keep_sampling_mask")
"""Settings of the rollout that vLLM and SGLang cannot follow, or follow at several times the cost."""


def _fast_engine(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> list[str]:
    """Choose the engine of a run on a GPU unless it was named; tell which and why."""
    remarks: list[str] = []
    for path, key in keys.items():
        name = f"{path}.name"
        # Without any key from a command line the settings come from a program, which may have chosen the default.
        if key.section is not RolloutConfig or not explicit or name in explicit or get(tree, "trainer.device") == "cpu":
            continue
        asks_native = any(get(tree, f"{path}.{setting}") is True for setting in _NATIVE_ENGINE_KEYS)
        if get(tree, name) != keys[name].default or asks_native:
            continue
        if gpus_of_nodes(get(tree, "trainer", {}), get(tree, "ray_kwargs.ray_init")):
            model = get(tree, f"{path.removesuffix('rollout')}model.path")
            kind = model_files.model_type(Path(model).expanduser()) if isinstance(model, str) else None
            engine, why = engine_for_gpu(engine_python("vllm") is not None, kind in FAMILIES)
            put(tree, name, engine)
            remarks.append(f"{name}: {engine}, because {why}; set it to choose yourself")
    return remarks


def engine_for_gpu(has_vllm: bool, takes_images: bool) -> tuple[str, str]:
    """Return the engine that a run on a GPU uses unless it names one, and why."""
    if takes_images:
        return "native", "the run is on a GPU, where vLLM was not tried with images"
    if has_vllm:
        return "vllm", "the run is on a GPU and vLLM is installed"
    return "native", "the run is on a GPU and vLLM is not installed here"


def _engines(tree: Tree, raw: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> list[str]:
    """Fit the settings of all engines; see :func:`_engine`."""
    remarks: list[str] = []
    for path, key in keys.items():
        ranks = "trainer.n_gpus_per_node"
        if key.section is RolloutConfig and get(tree, "actor_rollout_ref.hybrid_engine") is False:
            ranks = f"{path}.n_gpus_per_node"
        if key.section is JudgeRolloutConfig and get(tree, "reward_model.enable_resource_pool") is True:
            ranks = "reward_model.n_gpus_per_node"
        if key.section is TeacherInferenceConfig:
            if get(tree, "distillation.enabled") is not True:
                continue
            ranks = "distillation.n_gpus_per_node" if get(tree, "distillation.nnodes") else ranks
        sections = (RolloutConfig, JudgeRolloutConfig, TeacherInferenceConfig)
        if key.section in sections and get(tree, f"{path}.name") is not None:
            remarks += _engine(tree, raw, keys, path, explicit, ranks)
            remarks += _monitoring(tree, keys, f"{path}.prometheus")
    return remarks


def _separate_ranks(tree: Tree, keys: Mapping[str, Key], explicit: Collection[str]) -> list[str]:
    """Give rollout engines that sample beside training ranks of their own; prompts start there one by one."""
    key, size, mode = "actor_rollout_ref.hybrid_engine", "data.gen_batch_size", get(tree, "trainer.v1.trainer_mode")
    remarks = []
    if mode == "separate_async" and key in keys and key not in explicit and get(tree, key) is True:
        put(tree, key, False)
    if mode in ("colocate_async", "separate_async") and (prompts := get(tree, size)) is not None:
        put(tree, size, None)
        if prompts not in (1, get(tree, "data.train_batch_size")):
            remarks.append(f"no effect: {size} (with trainer.v1.trainer_mode={mode} each prompt starts by itself)")
    return remarks


def _kept_tokens(tree: Tree) -> list[str]:
    """Bound the number of tokens that sampling keeps, and training stores, unless the user did."""
    settings = get(tree, _ROLLOUT)
    if not isinstance(settings, Mapping) or settings.get("keep_sampling_mask") is not True:
        return []
    top_k, limit = settings.get("top_k"), settings.get("keep_sampling_mask_limit")
    if not isinstance(top_k, int) or top_k > 0 or not isinstance(limit, int) or truncating(settings) is None:
        return []
    put(tree, f"{_ROLLOUT}.top_k", limit)
    return [
        f"{_ROLLOUT}.top_k: {limit}, because keep_sampling_mask stores the tokens that sampling keeps, at most "
        "keep_sampling_mask_limit of them"
    ]


def _monitoring(tree: Tree, keys: Mapping[str, Key], prometheus: str) -> list[str]:
    """Tell the settings of a server of metrics that is not enabled."""
    if get(tree, f"{prometheus}.enable") is not False:
        return []
    paths = [f"{prometheus}.{setting}" for setting in ("host", "port", "file")]
    ignored = [path for path in paths if path in keys and not same(get(tree, path), keys[path].default)]
    return [f"no effect: {', '.join(ignored)} ({prometheus}.enable=false)"] if ignored else []


def _engine(
    tree: Tree, raw: Tree, keys: Mapping[str, Key], rollout: str, explicit: Collection[str], ranks_per_node: str
) -> list[str]:
    """Fit the tensor-parallel size to engine and machine unless it was set; tell which settings the engine ignores."""
    key, mode = f"{rollout}.tensor_model_parallel_size", f"{rollout}.mode"
    size, stages, ranks = (
        get(tree, path, 1) for path in (key, f"{rollout}.pipeline_model_parallel_size", ranks_per_node)
    )
    name, was_set = get(tree, f"{rollout}.name"), key in explicit or not same(size, keys[key].default)
    name_was_refused = get(raw, f"{rollout}.name") in keys[f"{rollout}.name"].meta.refuse_values
    remarks = []
    if name in SERVER_ENGINES:
        if get(tree, mode) == "sync":
            put(tree, mode, "async")
            remarks.append(f"{mode}: async and not sync, because {name} runs as a server only")
        is_valid = all(isinstance(n, int) and n > 0 for n in (size, stages, ranks))
        if not was_set and is_valid and ranks % (size * stages):
            put(tree, key, 1)
            remarks.append(f"{key}: 1 and not {size}, the usual value, because {ranks_per_node}={ranks}")
        return remarks
    ignored = [f"{rollout}.{setting}" for setting in _PROGRAMS_ONLY]
    ignored = [path for path in ignored if path in keys and not same(get(tree, path), keys[path].default)]
    if keys[rollout].section is TeacherInferenceConfig and name != "openai":
        unread = [f"{rollout}.{setting}" for setting in _TEACHER_ENGINE_KEYS]
        unread = [path for path in unread if not same(get(tree, path), keys[path].default)] + ignored
        if was_set and not same(size, 1):
            unread.insert(0, key)
        put(tree, key, 1)
        how = "a forward pass is divided over the ranks, and sized, as actor_rollout_ref.ref is"
        return [f"no effect: {', '.join(unread)} ({rollout}.name={name}: {how})"] if unread else []
    if name == "native" and get(tree, "trainer.device") != "cpu":
        ignored = [path for path in ignored if not path.endswith(("enforce_eager", "cudagraph_capture_sizes"))]
    if not was_set or name_was_refused:  # an engine that is not built is refused for that alone
        put(tree, key, 1)
    if mode in explicit and get(tree, mode) == "async":
        remarks.append(f"{mode}: {name} answers inside the worker's process, as sync does; vllm and sglang serve")
    if ignored:
        remarks.append(f"no effect: {', '.join(ignored)} (only vllm and sglang read it, and {rollout}.name={name})")
    caching = f"{rollout}.enable_prefix_caching"
    if name == "hf" and caching in keys and not same(get(tree, caching), keys[caching].default):
        remarks.append(f"no effect: {caching} ({rollout}.name=hf keeps nothing of earlier requests)")
    return remarks


def truncating(settings: Mapping[str, object]) -> tuple[str, float] | None:
    """Return the setting that truncates sampling in training and its neutral value, or None."""
    if settings.get("do_sample") is False or settings.get("temperature") == 0:
        return None
    top_p, top_k, min_p = (
        value if isinstance(value := settings.get(name), (int, float)) else off
        for name, off in (("top_p", 1), ("top_k", -1), ("min_p", 0))
    )
    candidates = (("top_p", top_p < 1, 1), ("top_k", top_k > 0, -1), ("min_p", min_p > 0, 0))
    return next(((name, off) for name, truncates, off in candidates if truncates), None)


def _other_distribution(tree: Tree) -> str | None:
    """Say why samples come from another distribution than the policy that trains on them; None if they do not."""
    settings, lag, mode = (get(tree, key) for key in (_ROLLOUT, "trainer.async.lag", "trainer.v1.trainer_mode"))
    if isinstance(settings, Mapping) and (cut := truncating(settings)) and not settings.get("keep_sampling_mask"):
        return f"{_ROLLOUT}.{cut[0]}={settings[cut[0]]} samples from a truncated distribution"
    if isinstance(lag, int) and lag > 0:
        return f"trainer.async.lag={lag} trains on samples of earlier weights"
    if mode in ("colocate_async", "separate_async"):
        return f"trainer.v1.trainer_mode={mode} trains on samples of earlier weights"
    return None


def _importance_weights(tree: Tree, explicit: Collection[str]) -> list[str]:
    """Weigh samples by default where they come from another distribution than the policy."""
    correction = "algorithm.rollout_correction"
    reason, settings = _other_distribution(tree), get(tree, correction)
    key = f"{correction}.rollout_is"
    if reason is None or not isinstance(settings, Mapping) or settings.get("rollout_is") is not None or key in explicit:
        return []
    if settings.get("bypass_mode") is True and settings.get("loss_type") == "ppo_clip":
        return []  # the ratio that is clipped is the weight
    loss = "reinforce" if settings.get("bypass_mode") is True else get(tree, f"{_ACTOR}.policy_loss.loss_mode")
    if loss != "reinforce" and not takes_weights(loss):
        return []  # the rules tell that this gradient is biased
    if loss != "reinforce" and compares_with_rollout(loss):
        return []  # the loss has the whole ratio
    put(tree, key, "token")
    return [f"{key}: token, because {reason}; without these weights the gradient is biased"]


def takes_weights(loss_mode: Any) -> bool:
    """Return whether a policy loss reads importance weights; true for an unknown loss, which the rules report."""
    from verl.algorithms import policy_loss_info

    try:
        return policy_loss_info(loss_mode).takes_weights
    except ConfigError:
        return True


def compares_with_rollout(loss_mode: Any) -> bool:
    """Return whether a policy loss reads the rollout's log-probs; false for an unknown loss, which the rules report."""
    from verl.algorithms import policy_loss_info

    try:
        return policy_loss_info(loss_mode).compares_with_rollout
    except ConfigError:
        return False


def _algorithm(tree: Tree, problems: list[Problem]) -> list[str]:
    """Derive the settings of actor and data that follow from the algorithm: seed, Σπ², rollout correction."""
    from verl.algorithms import adv_needs

    if get(tree, "data.seed") is None:
        # One seed for a run: the order of the prompts follows trainer.seed unless it has a seed of its own.
        put(tree, "data.seed", get(tree, "trainer.seed"))
    try:
        reads_sum = "sum_pi_squared" in adv_needs(get(tree, "algorithm.adv_estimator")).columns
    except ConfigError:
        reads_sum = False  # the rules report an unknown estimator
    if reads_sum:
        put(tree, f"{_ACTOR}.calculate_sum_pi_squared", True)
    correction = get(tree, "algorithm.rollout_correction")
    if not isinstance(correction, Mapping):
        return []
    bypasses = correction.get("bypass_mode") is True
    is_in_loss, remarks = bypasses or correction.get("prox_logp_method") == "loglinear", []
    if is_in_loss and correction.get("rollout_is_batch_normalize") is True and correction.get("rollout_is") is not None:
        correction = {**correction, "rollout_is_batch_normalize": False}
        put(tree, "algorithm.rollout_correction", correction)
        mode, other = ("bypass_mode=true", "false") if bypasses else ("prox_logp_method=loglinear", "recompute")
        remarks.append(
            f"no effect: algorithm.rollout_correction.rollout_is_batch_normalize (with {mode} weights are made "
            "inside the loss, which sees one micro-batch: their mean, and with it every gradient, would depend on how "
            f"the batch is cut and dealt to ranks; {mode.partition('=')[0]}={other} normalises over the whole batch)"
        )
    loss_key = f"{_ACTOR}.policy_loss.loss_mode"
    loss = get(tree, loss_key)
    if bypasses and loss not in ("vanilla", BYPASS):
        key = "algorithm.rollout_correction"
        cause = f"with {key}.bypass_mode=true the loss is {key}.loss_type"
        remedy = "leave it out, or set bypass_mode=false"
        problems.append(Problem(loss_key, loss, cause, f"vanilla, {BYPASS}", remedy))
    try:
        settings = RolloutCorrectionConfig(**correction)
    except SectionError:
        return remarks  # validation of the algorithm section reports it
    if not is_in_loss and not settings.weighs_by_response:
        return remarks
    if bypasses:
        put(tree, loss_key, BYPASS)
    for section in ("algorithm", f"{_ACTOR}.policy_loss"):
        put(tree, f"{section}.rollout_correction", settings)
    return remarks
