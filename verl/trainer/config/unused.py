"""Settings that have no effect because another setting turns off what would read them."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.algorithms import adv_needs, distillation
from verl.algorithms.estimator_registry import SETTINGS
from verl.algorithms.loss_registry import policy_loss_info
from verl.config import (
    ActorConfig,
    DistillationConfig,
    DivergenceConfig,
    DPOConfig,
    PPOConfig,
    SFTConfig,
    SupervisedConfig,
)
from verl.config.async_plan import AsyncPlan
from verl.config.base import named_section_of
from verl.config.megatron import CHECKPOINT
from verl.trainer.config.derive import expanded
from verl.trainer.config.interpolations import Interpolations
from verl.trainer.config.keys import FORWARD_PASSES, Key, Tree, get, same
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.roles import need_reference_policy

if TYPE_CHECKING:
    from verl.config import BaseConfig

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_SCORING_MODEL_KEYS = (
    "strategy",
    "micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "max_length",
    "model.input_tokenizer",
    "model.use_remove_padding",
    "model.fsdp_config.*",
    "megatron.*",
)
_BACK_ENDS = {_ACTOR: "fsdp_config", _REF: "fsdp_config", "critic": "model.fsdp_config"}
"""Sections with a training back end, and the key of FSDP's settings in each."""
_REWARD_MODEL_KEYS = ("model.*", "rollout.*", *_SCORING_MODEL_KEYS)


# Keys of the actor that only some policy losses read; others take them as arguments of these names.
_LOSS_KEYS = (
    *(f"policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")),
    *(f"policy_loss.{name}" for name in ("ppo_kl_coef", "dro_beta", "m2_threshold")),
    *(f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
    *("tau_pos", "tau_neg", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
)
_SELECTION = {
    "clip_cov": {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
    "kl_cov": {"kl_cov_ratio"},
    "m2po": {"m2_threshold"},
}
"""Settings by which a loss selects tokens of the whole mini-batch, which are no arguments of its function."""

_LOG_PROBS = (
    "log_prob_use_dynamic_bsz",
    ("log_prob_max_token_len_per_gpu",),
    ("log_prob_micro_batch_size_per_gpu",),
)
_PASSES = {
    _ACTOR: ("use_dynamic_bsz", ("ppo_max_token_len_per_gpu",), ("ppo_micro_batch_size_per_gpu",)),
    _REF: _LOG_PROBS,
    _ROLLOUT: _LOG_PROBS,
    "critic": (
        "use_dynamic_bsz",
        ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
        ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"),
    ),
    "reward_model": ("use_dynamic_bsz", ("forward_max_token_len_per_gpu",), ("micro_batch_size_per_gpu",)),
    "data": ("use_dynamic_bsz", ("max_token_len_per_gpu",), ("micro_batch_size_per_gpu",)),
}
"""Section to the switch, the keys read when it is on (passes filled by tokens), and those read when it is off."""

_TRANSFER_KEYS = ("backend", "engine_kwargs", "custom_backend_module")
"""Settings of ``checkpoint_engine`` for rollout engines on ranks of their own."""

_VALIDATION_KEYS = (
    *(f"data.{name}" for name in ("val_max_samples", "val_batch_size", "validation_shuffle")),
    *(f"trainer.{name}" for name in ("test_freq", "validation_data_dir", "log_val_generations")),
    f"{_ROLLOUT}.val_kwargs.*",
)

Silent = tuple[tuple[str, ...], str]
"""Patterns of keys that nothing reads, and why."""


def unused(
    config: PPOConfig | SupervisedConfig, raw: Tree, keys: Mapping[str, Key], interpolations: Interpolations
) -> list[str]:
    """Return messages about settings away from their default that this run does not read, one for each reason.

    Args:
        config: the checked configuration.
        raw: the configuration before interpolation.
        keys: path → field or section.
        interpolations: those of ``raw``.
    """
    lines, reported = [], set[str]()
    silent = _turned_off(config) if isinstance(config, PPOConfig) else _turned_off_supervised(config)
    for patterns, reason in (*silent, *_of_device(config)):
        any_of_them = re.compile("|".join(map(fnmatch.translate, patterns)))
        matches = [path for path in keys if any_of_them.match(path)] if patterns else []
        if paths := [path for path in matches if path not in reported and _is_set(keys[path], raw, interpolations)]:
            lines.append(f"no effect: {', '.join(paths)} ({reason})")
            reported.update(paths)
    return lines


def _is_set(key: Key, raw: Tree, interpolations: Interpolations) -> bool:
    """Return whether a key's value is not its default."""
    written = get(raw, key.path, key.yaml_default)
    if (
        key.section is not None
        or named_section_of(key.field) is not None
        or any(same(written, usual) for usual in (key.yaml_default, key.default))
    ):
        return False
    source = dict(FORWARD_PASSES).get(key.path)
    if source is not None and same(written, get(raw, source)):  # in a configuration that a run saved
        return False
    default = key.yaml_default
    if "${" in str(default):
        default = interpolations.value_of(key.path, default)
    return not same(written, expanded(default))


def _turned_off(config: PPOConfig) -> Iterator[Silent]:
    """Yield what nothing reads in this run."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    needs = adv_needs(algorithm.adv_estimator)
    if not needs.wants_all and "config" not in needs.settings:
        unread = tuple(f"algorithm.{name}" for name in SETTINGS - {"config"} - needs.settings)
        unread += () if "role_baselines" in needs.columns else ("algorithm.rae_decay",)
        yield unread, f"algorithm.adv_estimator={algorithm.adv_estimator} does not take it"
    if not needs_critic(config) and not config.reward_model.enable:  # whose sizes follow the critic's
        yield ("critic.*",), f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic"
    teachers, distillation_loss = config.distillation.teachers, config.distillation.distillation_loss
    has_frozen_teachers = config.distillation.has_forward_passes and not config.distillation.is_self_distillation
    runs_like_reference = config.distillation.enabled and has_frozen_teachers
    if not need_reference_policy(config) and not runs_like_reference:
        yield (f"{_REF}.*",), "no KL term needs the reference: use_kl_loss and use_kl_in_reward are false"
    if not config.data.val_files:
        yield _VALIDATION_KEYS, "data.val_files=null"
    reward_model, penalty = config.reward_model, algorithm.kl_ctrl
    unselected_engines = [
        name for name, arguments in rollout.engine_kwargs.items() if arguments and name != rollout.name
    ]
    switches = (
        (
            actor.use_kl_loss,
            f"{_ACTOR}.use_kl_loss=false",
            _ACTOR,
            ("kl_loss_coef", "kl_loss_type", "use_bias_correction_kl"),
        ),
        (actor.use_echo_loss, f"{_ACTOR}.use_echo_loss=false", _ACTOR, ("echo_loss_coef",)),
        (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=false", "algorithm", ("kl_ctrl.*", "kl_penalty")),
        (
            penalty.type == "adaptive" or not algorithm.use_kl_in_reward,
            f"algorithm.kl_ctrl.type={penalty.type}",
            "algorithm.kl_ctrl",
            ("horizon", "target_kl"),
        ),
        (algorithm.use_pf_ppo, "algorithm.use_pf_ppo=false", "algorithm", ("pf_ppo.*",)),
        (
            actor.entropy_target is not None,
            f"{_ACTOR}.entropy_target=null",
            _ACTOR,
            ("entropy_target_step", "entropy_coeff_min", "entropy_coeff_max"),
        ),
        (reward_model.enable, "reward_model.enable=false", "reward_model", _REWARD_MODEL_KEYS),
        (
            config.judge is None,
            f"reward_model.rollout.name={reward_model.rollout.name} serves the model to the reward function",
            "reward_model",
            _SCORING_MODEL_KEYS,
        ),
        (
            config.judge is not None or not reward_model.enable,
            "the model gives a score per response itself, unless rollout.name is set and a reward function asks it",
            "reward_model.rollout",
            ("*",),
        ),
        (
            not config.actor_rollout_ref.hybrid_engine,
            "actor_rollout_ref.hybrid_engine=true",
            _ROLLOUT,
            ("n_gpus_per_node", *(f"checkpoint_engine.{name}" for name in _TRANSFER_KEYS)),
        ),
        (
            reward_model.enable_resource_pool,
            "reward_model.enable_resource_pool=false",
            "reward_model",
            ("nnodes", "n_gpus_per_node"),
        ),
        (
            rollout.val_kwargs.do_sample,
            f"{_ROLLOUT}.val_kwargs.do_sample=false takes the most likely token",
            f"{_ROLLOUT}.val_kwargs",
            ("temperature", "top_k", "top_p", "min_p"),
        ),
        (rollout.skip_rollout, f"{_ROLLOUT}.skip_rollout=false", _ROLLOUT, ("skip_dump_dir",)),
        (
            rollout.keep_sampling_mask,
            f"{_ROLLOUT}.keep_sampling_mask=false",
            _ROLLOUT,
            ("keep_sampling_mask_limit",),
        ),
        (
            not unselected_engines,
            f"{', '.join(unselected_engines)}: {_ROLLOUT}.name={rollout.name}",
            _ROLLOUT,
            ("engine_kwargs",),
        ),
    )
    switches += (
        (config.distillation.enabled, "distillation.enabled=false", "distillation", ("*",)),
        (config.distillation.nnodes > 0, "distillation.nnodes=0", "distillation", ("n_gpus_per_node",)),
        (
            any(teacher.key is not None for teacher in teachers.values()),
            "one teacher scores all rows",
            "distillation",
            ("teacher_key",),
        ),
        (
            config.distillation.is_self_distillation,
            "distillation.self_distillation.enabled=false",
            "distillation.self_distillation",
            ("*",),
        ),
        (
            not config.distillation.is_self_distillation,
            "distillation.self_distillation.enabled=true",
            "distillation",
            ("alignment",),
        ),
        (
            config.distillation.self_distillation.weights == "ema",
            f"distillation.self_distillation.weights={config.distillation.self_distillation.weights}",
            "distillation.self_distillation",
            ("ema_decay",),
        ),
        (
            distillation_loss.use_policy_gradient,
            "distillation.distillation_loss.use_policy_gradient=false",
            "distillation.distillation_loss",
            ("policy_loss_mode", "clip_ratio*"),
        ),
    )
    for is_on, reason, section, names in switches:
        if not is_on:
            yield tuple(f"{section}.{name}" for name in names), reason
    yield from _of_modes(config)
    yield from _of_other_losses(actor, config.distillation)
    if config.distillation.enabled:
        yield _of_other_divergences(distillation_loss)
    yield from _of_back_ends(config)
    for section in (_ACTOR, "critic"):
        yield from _of_schedule(config, f"{section}.optim")
        yield from _of_state(f"{section}.optim", f"{section}.strategy", _at(config, section).strategy)
        if not _at(config, section).shuffle:
            yield (f"{section}.data_loader_seed",), f"{section}.shuffle=false"
    for section in (_ACTOR, _REF, _ROLLOUT, "critic", "reward_model"):
        yield from _of_passes(config, section)
    for section in ("actor_rollout_ref.model", "critic.model"):
        yield from _of_adapters(config, section)


def _of_back_ends(config: PPOConfig) -> Iterator[Silent]:
    for section, fsdp in _BACK_ENDS.items():
        strategy = _at(config, section).strategy
        unread = f"{section}.{fsdp}.*" if strategy == "megatron" else f"{section}.megatron.*"
        yield (unread,), f"{section}.strategy={strategy}"
        if strategy != "veomni":
            yield (f"{section}.{fsdp}.moe_implementation",), f"{section}.strategy={strategy}"
        if not _at(config, section).megatron.use_dist_checkpointing:
            reads, *unread_of_it = (f"{section}.megatron.{key}" for key in CHECKPOINT)
            yield tuple(unread_of_it), f"{reads}=false"


def _turned_off_supervised(config: SupervisedConfig) -> Iterator[Silent]:
    """Yield what nothing reads in this run of supervised or preference training."""
    yield from _of_schedule(config, "optim")
    yield from _of_passes(config, "data")
    yield from _of_adapters(config, "model")
    if not config.data.val_files:
        yield ("data.val_max_samples", "trainer.test_freq"), "data.val_files=null"
    strategy = config.engine.strategy
    yield from _of_state("optim", "engine.strategy", strategy)
    fsdp_keys = tuple(f"engine.{name}*" for name in config.engine if name != "strategy")
    yield fsdp_keys if strategy == "megatron" else ("megatron.*",), f"engine.strategy={strategy}"
    if strategy != "veomni":
        yield ("engine.moe_implementation",), f"engine.strategy={strategy}"
    if isinstance(config, SFTConfig) and config.data.prompt_key:
        yield ("data.messages_key", "data.tools_key", "data.enable_thinking_key"), "data.prompt_key takes their place"
    elif isinstance(config, SFTConfig):
        yield ("data.prompt_dict_keys", "data.response_dict_keys"), "data.prompt_key=null"
    if isinstance(config, SFTConfig) and config.distillation.model_path is None:
        yield ("distillation.*",), "distillation.model_path=null"
    elif isinstance(config, SFTConfig):
        yield _of_other_divergences(config.distillation.distillation_loss)
    if isinstance(config, DPOConfig) and config.loss.reference_free:
        yield ("ref.param_offload",), "loss.reference_free=true"


def _of_device(config: PPOConfig | SupervisedConfig) -> Iterator[Silent]:
    if config.trainer.device == "cpu":
        yield ("*model.use_liger",), "trainer.device=cpu, and Liger's kernels are for GPUs"


def _of_other_divergences(config: DivergenceConfig) -> Silent:
    section, mode = "distillation.distillation_loss", config.loss_mode
    info = distillation.distillation_loss_info(mode)
    unread = {"topk": info.reads != "topk", "beta": mode not in ("jsd", "jsd_topk")}
    if info.function.__module__ != distillation.__name__:  # one of the user's own is given the whole section
        unread = {}
    return tuple(f"{section}.{name}" for name, is_unread in unread.items() if is_unread), f"{section}.loss_mode={mode}"


def _of_state(optim: str, key: str, strategy: str) -> Iterator[Silent]:
    if strategy != "megatron":
        remedy = "FSDP has offload_policy, and optimizer_offload between updates"
        yield (f"{optim}.offload_fraction",), f"{key}={strategy}; {remedy}"


def _of_adapters(config: BaseConfig, section: str) -> Iterator[Silent]:
    model = _at(config, section)
    unread = tuple(f"{section}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules", "lora.*"))
    if not model.has_adapters:
        yield unread, f"{section}.lora_rank=0 trains the model's weights"
    elif model.lora_adapter_path is not None:
        yield unread, f"the adapters of {section}.lora_adapter_path bring theirs"


def _of_modes(config: PPOConfig) -> Iterator[Silent]:
    """Yield the settings of modes of asynchronous training other than the chosen one."""
    plan, mode = AsyncPlan.from_config(config), f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}"
    if not plan.is_free_running:
        names = ("volume", "sync_every", "partial_rollout", "record_dir")
        yield ("trainer.v1.*", *(f"trainer.async.{name}" for name in names)), mode
    elif plan.mode == "colocated":
        yield ("trainer.v1.separate_async.*", "trainer.async.volume", "trainer.async.sync_every"), mode
    else:
        yield ("trainer.v1.colocate_async.*",), mode
    if plan.volume is not None:
        keys = ("trainer.v1.sampler.*", "trainer.v1.separate_async.num_warmup_batches")
        yield keys, f"trainer.async.volume={plan.volume:g} bounds the number of prompts instead"


def _of_other_losses(actor: ActorConfig, taught: DistillationConfig) -> Iterator[Silent]:
    mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    info = policy_loss_info(mode)
    read = {*inspect.signature(info.function).parameters} | _SELECTION.get(mode, set())
    if taught.enabled and taught.distillation_loss.use_policy_gradient:  # which has clip ranges of its own
        teacher_loss = policy_loss_info(taught.distillation_loss.policy_loss_mode)
        read |= {*inspect.signature(teacher_loss.function).parameters} - {"clip_ratio_low", "clip_ratio_high"}
    if info.returns_terms:  # others are given the whole section
        unread = [key for key in _LOSS_KEYS if key.rpartition(".")[2] not in read]
        if {"clip_ratio_low", "clip_ratio_high"}.issubset(unread):
            unread.append("clip_ratio")
        yield tuple(f"{_ACTOR}.{key}" for key in unread), f"{_ACTOR}.policy_loss.loss_mode={mode} does not take it"
    if aggregation != "seq-mean-token-sum-norm":
        yield (f"{_ACTOR}.loss_scale_factor",), f"{_ACTOR}.loss_agg_mode={aggregation}"


def _of_schedule(config: BaseConfig, section: str) -> Iterator[Silent]:
    optim = _at(config, section)
    if optim.lr_scheduler_type != "cosine":
        reason = f"{section}.lr_scheduler_type={optim.lr_scheduler_type}"
        yield (f"{section}.min_lr_ratio", f"{section}.num_cycles"), reason
    if optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio == 0:
        yield (f"{section}.init_lr_ratio",), "there is no warm-up"
    if optim.lr_warmup_steps > 0:
        yield (f"{section}.lr_warmup_steps_ratio",), f"{section}.lr_warmup_steps={optim.lr_warmup_steps}"


def _of_passes(config: BaseConfig, section: str) -> Iterator[Silent]:
    switch, by_tokens, by_rows = _PASSES[section]
    is_dynamic = bool(_at(config, section)[switch])
    unread = by_rows if is_dynamic else by_tokens
    yield tuple(f"{section}.{name}" for name in unread), f"{section}.{switch}={str(is_dynamic).lower()}"


def _at(config: BaseConfig, path: str) -> Any:
    for name in path.split("."):
        config = config[name]
    return config
