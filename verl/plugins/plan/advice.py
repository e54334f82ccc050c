"""Changes that make a stage fit, cheapest first; each change is tried by planning again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from verl.config.rollout import SERVER_ENGINES
from verl.errors import ConfigError
from verl.plugins.plan.plan import Plan
from verl.utils.model_facts.model_files import head_split_problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")  # the whole configuration or one of its sections

_ROLES = "actor_rollout_ref"


@dataclass(frozen=True)
class Change:
    """Settings to change together, and what the worst stage then takes."""

    settings: Mapping[str, object]
    bytes: float
    fits: bool

    def __str__(self) -> str:
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.settings.items()
        )


def changes(plan: Plan) -> list[Change]:
    """Return changes, one after the other, until every stage fits; empty if all fit already.

    The last one says by ``fits`` whether they suffice.
    """
    changes_to_try: list[Change] = []
    for settings in _candidates(plan):
        if plan.excess <= 0:
            break
        try:
            tried = replace(plan, config=with_settings(plan.config, settings))
            excess = tried.excess
        except ConfigError:  # the ranks do not divide so
            continue
        if excess < plan.excess:
            plan = tried
            worst = max(stage.bytes for stage in plan.stages)
            changes_to_try.append(Change(settings, worst, excess <= 0))
    return changes_to_try


def _candidates(plan: Plan) -> Iterator[dict[str, object]]:
    for stage in plan.stages[1:]:
        if stage.micro_batch is not None and stage.largest and stage.largest < stage.micro_batch:
            yield {stage.micro_batch_key: stage.largest}
    yield from _recomputation(plan)
    if plan.config.actor_rollout_ref.actor.strategy == "megatron":
        yield {f"{_ROLES}.actor.megatron.optimizer_offload": True}
        megatron, shape = plan.config.actor_rollout_ref.actor.megatron, plan.models["actor"].memory.shape
        for size in _larger(megatron.tensor_model_parallel_size):
            if shape.heads % (size * megatron.context_parallel_size) or shape.kv_heads % size:
                continue
            yield {f"{_ROLES}.actor.megatron.tensor_model_parallel_size": size}
    else:
        yield from _fsdp(plan)
    rollout = plan.config.actor_rollout_ref.rollout
    if rollout.name in SERVER_ENGINES:
        for size in _larger(rollout.tensor_model_parallel_size):
            if _can_share_rollout(plan, size):
                yield {f"{_ROLES}.rollout.tensor_model_parallel_size": size}
        yield {f"{_ROLES}.rollout.gpu_memory_utilization": 0.4}


def _can_share_rollout(plan: Plan, size: int) -> bool:
    """Return whether so many ranks of one machine can share an engine of the policy."""
    shape = plan.models["actor"].memory.shape
    rollout = plan.config.actor_rollout_ref.rollout
    ranks = size * rollout.pipeline_model_parallel_size
    per_node = rollout.n_gpus_per_node if plan.has_rollout_pool else plan.cluster.gpus_per_node
    return per_node % ranks == 0 and head_split_problem(shape.heads, shape.kv_heads, size) is None


def _recomputation(plan: Plan) -> Iterator[dict[str, object]]:
    roles = plan.config.actor_rollout_ref
    if not roles.model.enable_gradient_checkpointing:
        yield {f"{_ROLES}.model.enable_gradient_checkpointing": True}
    if "critic" in plan.models and not plan.config.critic.model.enable_gradient_checkpointing:
        yield {"critic.model.enable_gradient_checkpointing": True}
    if not roles.rollout.free_cache_engine:
        yield {f"{_ROLES}.rollout.free_cache_engine": True}


def _fsdp(plan: Plan) -> Iterator[dict[str, object]]:
    if "reference" in plan.models:
        yield {f"{_ROLES}.ref.fsdp_config.param_offload": True}
    if "critic" in plan.models:
        yield {f"critic.model.fsdp_config.{part}_offload": True for part in ("optimizer", "param")}
    yield {f"{_ROLES}.actor.fsdp_config.optimizer_offload": True}
    yield {f"{_ROLES}.actor.fsdp_config.param_offload": True}
    for stage in plan.stages[1:]:
        if stage.micro_batch is not None and stage.micro_batch > 1 and "micro_batch" in stage.micro_batch_key:
            yield {stage.micro_batch_key: 1}
    for size in _larger(plan.config.actor_rollout_ref.actor.ulysses_sequence_parallel_size):
        if plan.models["actor"].memory.shape.heads % size == 0:
            models = (f"{_ROLES}.actor", f"{_ROLES}.ref")
            sections = [section for model in models for section in (model, f"{model}.fsdp_config")]
            yield {f"{section}.ulysses_sequence_parallel_size": size for section in sections}


def _larger(size: int) -> list[int]:
    return [candidate for candidate in (2, 4, 8) if candidate > size]


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Return a configuration with other values of some dotted keys."""
    for path, value in settings.items():
        config = _with(config, path.split("."), value)
    return config


def _with(section: Config, names: list[str], value: object) -> Config:
    first, *rest = names
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})
