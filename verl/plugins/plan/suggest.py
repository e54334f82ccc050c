"""The fastest layouts that fit: candidates are enumerated, and each is planned.

First every training layout (back end, parallel sizes, offload, tokens of a micro-batch) is planned for its passes
alone; the fastest of each kind of offload are then planned with every rollout layout. Pieces of pipeline stages
(``virtual_pipeline_model_parallel_size``) are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from verl.config.megatron import MEGATRON_FAMILIES
from verl.config.rollout import SERVER_ENGINES
from verl.errors import ConfigError
from verl.plugins.plan.advice import with_settings
from verl.plugins.plan.plan import Plan, Stage
from verl.utils.model_facts.model_files import head_split_problem

_ROLES = "actor_rollout_ref"
_ACTOR, _ROLLOUT, _MEGATRON = f"{_ROLES}.actor", f"{_ROLES}.rollout", f"{_ROLES}.actor.megatron"
_BACK_ENDS = (f"{_ACTOR}.strategy", "model_engine")
_MICRO_BATCHES = ("micro_batch_size", "use_dynamic_bsz", "max_token_len_per_gpu")
"""Parts of the keys of micro-batches; if one is set, all are kept."""
_FULL_PASS = 32_768
"""Tokens of a pass on one rank beyond which larger ones are assumed to be no faster."""
_MAX_ENGINE_MEMORY = 0.9
"""Largest ``gpu_memory_utilization`` of an engine in another process."""
_SAME_SPEED = 1.02
"""Ratio of seconds within which two layouts are about as fast: less than the plan knows."""
_MAX_CANDIDATES = 8
"""Training layouts of each kind of offload that are planned with all rollout layouts."""

Settings = Mapping[str, object]


@dataclass(frozen=True)
class SuggestedLayout:
    """A layout of a run.

    Attributes:
        settings: key → value, of the settings that are not kept from the command line.
        plan: of the run with them.
    """

    settings: Settings
    plan: Plan

    @property
    def words(self) -> list[str]:
        """The settings as words of a command line."""
        pairs: list[tuple[str, object]] = []
        for key, value in self.settings.items():
            if isinstance(value, dict):
                pairs += [(f"++{key}.{name}", entry) for name, entry in value.items()]
            else:
                pairs.append((key, value))
        return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pairs]

    @property
    def bytes(self) -> float:
        """Bytes of the largest stage."""
        return max(stage.bytes for stage in self.plan.stages)

    @property
    def sizes(self) -> tuple[object, ...]:
        """Back end and parallel sizes, without offload and micro-batches."""
        return (self.plan.models["actor"].memory.layout, self.rollout_sizes)

    @property
    def rollout_sizes(self) -> tuple[int, int, int]:
        """Tensor and pipeline parallel sizes of a rollout engine, and copies that share its experts."""
        engine = self.plan.engine_layout
        return engine.tensor, engine.pipeline, engine.copies

    def __str__(self) -> str:
        layout, (tensor, _, copies) = self.plan.models["actor"].memory.layout, self.rollout_sizes
        if layout.is_megatron:
            sizes = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.sequence, "EP": layout.expert}
            words = ["Megatron", *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
        else:
            words = [f"FSDP {layout.shards}", *([f"TP {layout.tensor}"] if layout.tensor > 1 else [])]
            words += [f"Ulysses {layout.sequence}"] if layout.sequence > 1 else []
        held = self.plan.models["actor"]
        offloaded = [*([] if held.keeps_weights else ["weights"]), *([] if held.keeps_optimizer else ["optimizer"])]
        words += [f"rollout TP {tensor}", *([f"DP {copies} that share experts"] if copies > 1 else [])]
        words += [f"offload {' and '.join(offloaded)}"] if offloaded else []
        return ", ".join(words)


@dataclass(frozen=True)
class Suggestions:
    """The fastest layouts, and what was planned for them.

    Attributes:
        layouts: the fastest that fit, of different sizes, fastest first; empty if none fits. Of those within 2 % of the
            fastest the one that fewest ranks share is first.
        tried: training layouts that were planned.
        fitting: those of them whose passes fit.
        least_bytes: bytes of the largest stage of passes, of the layout that needs least.
    """

    layouts: Sequence[SuggestedLayout]
    tried: int
    fitting: int
    least_bytes: float


def suggest(plan: Plan, keeps: Collection[str], check: Callable[[Plan], None], most: int = 5) -> Suggestions:
    """Return the fastest layouts that fit.

    Args:
        plan: of the run as it is set.
        keeps: keys whose values stay as they are.
        check: raises :class:`~verl.errors.ConfigError` where `verl train` would refuse the layout.
        most: number of layouts to return.
    """
    tried, least = 0, math.inf
    fitting: dict[int, list[SuggestedLayout]] = {}
    for settings in _training_layouts(plan, keeps):
        tried += 1
        for level, offload in enumerate(_offloads(plan, settings)):
            allowed = {key: value for key, value in {**settings, **offload}.items() if key not in keeps}
            try:
                layout = _with_micro_batches(plan, allowed, keeps)
            except ConfigError:  # the ranks do not divide so
                break
            bytes_of_passes = max(stage.bytes for stage in layout.plan.stages[1:])
            least = min(least, bytes_of_passes)
            if bytes_of_passes <= plan.cluster.usable_bytes:
                fitting.setdefault(level, []).append(layout)
    candidates: list[SuggestedLayout] = []
    for layouts in fitting.values():
        for layout in sorted(layouts, key=lambda layout: _seconds_of_passes(layout.plan))[:_MAX_CANDIDATES]:
            candidates += _with_rollout(layout, keeps)
    suggested: list[SuggestedLayout] = []
    fastest = min((layout.plan.seconds for layout in candidates), default=0.0)

    def rank(layout: SuggestedLayout) -> tuple[float, ...]:
        # Layouts about as fast as the fastest: first the one that fewest ranks share. Of equally fast ones the one that
        # keeps most on the device: that offload takes next to no time for a small model is no reason for it.
        seconds, held = layout.plan.seconds, layout.plan.models["actor"]
        is_close = seconds <= fastest * _SAME_SPEED
        shared_by, num_on_device = held.memory.layout.ranks_per_model, held.keeps_weights + held.keeps_optimizer
        return (not is_close, shared_by if is_close else 0, round(seconds, 2), -num_on_device, layout.bytes)

    for layout in sorted(candidates, key=rank):
        if len(suggested) == most:
            break
        if any(layout.sizes == other.sizes for other in suggested):
            continue
        try:
            check(layout.plan)
        except ConfigError:
            continue
        suggested.append(layout)
    return Suggestions(suggested, tried, sum(map(len, fitting.values())), least)


def _seconds_of_passes(plan: Plan) -> float:
    return sum(stage.seconds for stage in plan.stages[1:])


def _powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``."""
    return [2**power for power in range(most.bit_length())] if most > 0 else []


# ---- training


def _training_layouts(plan: Plan, keeps: Collection[str]) -> list[dict[str, object]]:
    """Return settings of a back end and its parallel sizes, without those that cannot divide the model."""
    family, current = plan.models["actor"].memory.shape.family, plan.config.actor_rollout_ref.actor.strategy
    is_kept = any(key in keeps for key in _BACK_ENDS) or current == "megatron"
    layouts: list[dict[str, object]] = []
    if not is_kept or current != "megatron":
        layouts += _fsdp_layouts(plan, keeps)
    if current == "megatron" or (not is_kept and family in MEGATRON_FAMILIES):
        back_end = {} if current == "megatron" else {"model_engine": "megatron"}
        layouts += [back_end | sizes for sizes in _megatron_layouts(plan, keeps)]
    return layouts


def _fsdp_layouts(plan: Plan, keeps: Collection[str]) -> Iterator[dict[str, object]]:
    shape, cluster, actor = plan.models["actor"].memory.shape, plan.cluster, plan.config.actor_rollout_ref.actor
    shards = [-1] if cluster.gpus <= cluster.gpus_per_node else [-1, cluster.gpus_per_node]
    if f"{_ACTOR}.fsdp_config.fsdp_size" in keeps:
        shards = [actor.fsdp_config.fsdp_size]
    sequences = tensors = _powers(cluster.gpus_per_node)
    if any(key.endswith(".ulysses_sequence_parallel_size") for key in keeps):
        sequences = [actor.fsdp_config.ulysses_sequence_parallel_size]
    if any(key.endswith(".fsdp_config.tensor_parallel_size") for key in keeps):
        tensors = [actor.fsdp_config.tensor_parallel_size]
    elif shape.experts or plan.config.actor_rollout_ref.model.has_adapters or actor.optim.is_muon:
        tensors = [1]
    followers = [f"{_ROLES}.ref.fsdp_config"] * plan.needs.reference + ["critic.model.fsdp_config"] * plan.needs.critic
    for size, sequence, tensor in product(shards, sequences, tensors):
        if shape.heads % sequence or cluster.gpus % sequence or cluster.gpus % tensor or min(sequence, tensor) > 1:
            continue
        if any(count % tensor for count in (shape.heads, shape.kv_heads, shape.feed_forward)):
            continue
        settings: dict[str, object] = {f"{_ACTOR}.fsdp_config.fsdp_size": size}
        settings[f"{_ACTOR}.ulysses_sequence_parallel_size"] = sequence
        if tensor > 1:
            sections = [f"{_ACTOR}.fsdp_config", *followers]
            settings |= dict.fromkeys((f"{section}.tensor_parallel_size" for section in sections), tensor)
        yield settings


def _megatron_layouts(plan: Plan, keeps: Collection[str]) -> Iterator[dict[str, object]]:
    shape, ranks, megatron = plan.models["actor"].memory.shape, plan.ranks, plan.config.actor_rollout_ref.actor.megatron

    def sizes(name: str, tried: list[int]) -> list[int]:
        return [megatron[name]] if f"{_MEGATRON}.{name}" in keeps else tried

    override = f"{_MEGATRON}.override_transformer_config"
    has_own_stages = any(key.startswith(override) and ("pipeline" in key or key == override) for key in keeps)
    for tensor, pipeline, context, expert in product(
        sizes("tensor_model_parallel_size", _powers(8)),
        sizes("pipeline_model_parallel_size", _powers(16)),
        sizes("context_parallel_size", _powers(8)),
        sizes("expert_model_parallel_size", _powers(shape.experts) if shape.experts else [1]),
    ):
        is_even = has_own_stages or shape.layers % pipeline == 0
        if (
            ranks % (tensor * pipeline * context)
            or ranks % (pipeline * expert)
            or shape.heads % (tensor * context)
            or shape.kv_heads % tensor
            or (shape.experts and shape.experts % expert)
            or not (is_even or (shape.layers + 2) % pipeline == 0)
        ):
            continue
        settings: dict[str, object] = {
            f"{_MEGATRON}.tensor_model_parallel_size": tensor,
            f"{_MEGATRON}.pipeline_model_parallel_size": pipeline,
            f"{_MEGATRON}.context_parallel_size": context,
        }
        if shape.experts:
            settings[f"{_MEGATRON}.expert_model_parallel_size"] = expert
            settings[f"{_MEGATRON}.expert_tensor_parallel_size"] = 1
        if not is_even:  # embedding and head count as a layer each
            counted = dict.fromkeys(
                ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True
            )
            present = plan.config.actor_rollout_ref.actor.megatron.override_transformer_config
            settings[override] = {**present, **counted}
        yield settings


def _offloads(plan: Plan, settings: Settings) -> list[dict[str, object]]:
    """Return settings of what leaves the device while it is idle, from nothing to all."""
    is_megatron = "model_engine" in settings or plan.config.actor_rollout_ref.actor.strategy == "megatron"
    trained = [f"{_ACTOR}.megatron" if is_megatron else f"{_ACTOR}.fsdp_config"]
    if "critic" in plan.models:
        trained.append("critic.megatron" if is_megatron else "critic.model.fsdp_config")
    levels: list[dict[str, object]] = [{}]
    if "reference" in plan.models:
        levels.append({f"{_ROLES}.ref.{'megatron' if is_megatron else 'fsdp_config'}.param_offload": True})
    for part in ("optimizer", "param"):
        levels.append(levels[-1] | {f"{section}.{part}_offload": True for section in trained})
    return levels


def _planned(plan: Plan, settings: Settings, keeps: Collection[str]) -> Plan:
    """Plan with other settings, and those that follow them if they are not set."""
    followers: dict[str, object] = {}
    if "model_engine" in settings:
        followers = {f"{role}.strategy": "megatron" for role in (_ACTOR, f"{_ROLES}.ref", "critic")}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section == _MEGATRON and not name.endswith("_offload"):
            followers |= {f"{_ROLES}.ref.megatron.{name}": value, f"critic.megatron.{name}": value}
        elif name == "ulysses_sequence_parallel_size":
            roles = (_ACTOR, f"{_ROLES}.ref")
            followers |= {f"{part}.{name}": value for role in roles for part in (role, f"{role}.fsdp_config")}
    followers = {key: value for key, value in followers.items() if key not in keeps}
    return replace(plan, config=with_settings(plan.config, {**followers, **settings}))


def _with_micro_batches(plan: Plan, settings: Settings, keeps: Collection[str]) -> SuggestedLayout:
    """Return the fastest layout by the tokens of its passes, whether or not it fits.

    Passes take at least a row. Without a pipeline the largest that fit are fastest, up to :data:`_FULL_PASS` tokens;
    in a pipeline every size is tried, as stages wait less for more passes.
    """
    if any(part in key.rpartition(".")[2] for key in keeps for part in _MICRO_BATCHES):
        return SuggestedLayout(settings, _planned(plan, settings, keeps))
    sections = [f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.log_prob_use_dynamic_bsz"]
    if plan.needs.reference:
        sections.append(f"{_ROLES}.ref.log_prob_use_dynamic_bsz")
    if plan.needs.critic:
        sections.append("critic.use_dynamic_bsz")
    dynamic: dict[str, object] = {**settings, **dict.fromkeys(sections, True)}
    first = _planned(plan, dynamic, keeps)
    sequence = first.models["actor"].memory.layout.sequence
    row = -(-plan.row_tokens // sequence)
    choices = [_tokens(first, stage, row) for stage in first.stages[1:] if "max_token_len" in stage.micro_batch_key]
    largest = {key: sizes[-1] for key, sizes in choices}
    if first.models["actor"].memory.layout.pipeline == 1:
        tried = [largest]
    else:
        tried = [
            {key: sizes[min(index, len(sizes) - 1)] for key, sizes in choices}
            for index in range(max(len(sizes) for _, sizes in choices))
        ]
    layouts = [SuggestedLayout(dynamic | sizes, _planned(plan, dynamic | sizes, keeps)) for sizes in tried]
    return min(layouts, key=lambda layout: (layout.plan.excess > 0, _seconds_of_passes(layout.plan)))


def _tokens(plan: Plan, stage: Stage, row: int) -> tuple[str, list[int]]:
    """Return the key of a stage's tokens, and rows' tokens times powers of two that fit; at least one row's."""
    rank_tokens = plan.row_tokens * plan.rows(1)
    if stage.micro_batch_key.endswith("ppo_max_token_len_per_gpu"):
        model = "critic" if stage.micro_batch_key.startswith("critic") else "actor"
        memory = plan.models[model].memory
        rank_tokens = plan.row_tokens * plan.mini_batch_rows(model) // memory.layout.sequence
    most = min(stage.largest or 0, max(row, _FULL_PASS), max(row, rank_tokens))
    return stage.micro_batch_key, [row * size for size in _powers(most // row)] or [row]


# ---- rollout


def _with_rollout(layout: SuggestedLayout, keeps: Collection[str]) -> Iterator[SuggestedLayout]:
    """Yield layouts that fit, with each size of a rollout engine."""
    plan = layout.plan
    rollout, shape = plan.config.actor_rollout_ref.rollout, plan.models["actor"].memory.shape
    is_program = rollout.name in SERVER_ENGINES
    sizes: list[int] = [1]
    if f"{_ROLLOUT}.tensor_model_parallel_size" in keeps:
        sizes = [rollout.tensor_model_parallel_size]
    elif is_program:
        sizes = [
            size
            for size in _powers(min(32, plan.rollout_ranks))
            if head_split_problem(shape.heads, shape.kv_heads, size) is None
        ]
    memory_key = f"{_ROLLOUT}.gpu_memory_utilization"
    for size, copies in product(sizes, _copies(plan, keeps)):
        settings: dict[str, object] = {f"{_ROLLOUT}.tensor_model_parallel_size": size}
        if copies > 1:
            if plan.rollout_ranks % (size * copies) or shape.experts % (size * copies):
                continue
            settings |= {f"{_ROLLOUT}.data_parallel_size": copies, f"{_ROLLOUT}.expert_parallel_size": size * copies}
        if is_program and memory_key not in keeps:
            settings[memory_key] = _engine_share(plan)
        settings = {key: value for key, value in settings.items() if key not in keeps}
        planned = _planned(plan, settings, keeps)
        if planned.excess <= 0:
            yield SuggestedLayout({**layout.settings, **settings}, planned)


def _copies(plan: Plan, keeps: Collection[str]) -> list[int]:
    """Return how many copies of all but the experts share these in an engine; only vLLM's do."""
    rollout, shape = plan.config.actor_rollout_ref.rollout, plan.models["actor"].memory.shape
    is_kept = any(f"{_ROLLOUT}.{name}_parallel_size" in keeps for name in ("data", "expert"))
    if is_kept or rollout.name != "vllm" or not shape.experts:
        return [rollout.data_parallel_size if is_kept else 1]
    return _powers(min(32, plan.rollout_ranks))


def _engine_share(plan: Plan) -> float:
    """Return the part of a device's memory that is left for an engine in another process, in steps of 0.05."""
    resident = 0.0 if plan.has_rollout_pool else sum(held.idle_bytes for held in plan.models.values())
    share = (plan.cluster.usable_bytes - resident) / (plan.cluster.memory_gb * 1e9)
    return max(0.05, min(_MAX_ENGINE_MEMORY, math.floor(share * 20 + 1e-9) / 20))
