"""Rules about models under ``strategy=megatron``."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from verl.base.requirements import install_command
from verl.config import McoreEngineConfig, PPOConfig, Problem, SupervisedConfig
from verl.config.megatron import MEGATRON_FAMILIES, MIXTURES, SIZES, ranks_per_copy
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils import model_files

Problems = Iterator[Problem]


def models(config: PPOConfig) -> Problems:
    """megatron-core is installed and has the models; layouts divide ranks, and are one where models share processes."""
    found = _sections(config)
    if found and importlib.util.find_spec("megatron") is None:
        wrong = "megatron-core is not installed"
        remedy = f"{install_command('megatron')} on every node, or use strategy=fsdp2"
        yield Problem(f"{next(iter(found))}.strategy", "megatron", wrong, "fsdp2", remedy)
    yield from layouts(config)


def layouts(config: PPOConfig) -> Problems:
    """What holds on every machine: layouts divide ranks and models, and are one where models share processes."""
    found = _sections(config)
    if not found:
        return
    first = next(iter(found))
    for name, (engine, path, ranks) in found.items():
        assert isinstance(engine, McoreEngineConfig)
        yield from _layout(name, engine, path, ranks)
    sizes_of = {name: [engine[size] for size in SIZES] for name, (engine, _, _) in found.items()}
    pool = config.reward_model.enable_resource_pool
    together = {name: sizes for name, sizes in sizes_of.items() if not (pool and name == "reward_model")}
    for name, sizes in together.items():
        if sizes != next(iter(together.values())):
            wrong = f"megatron-core has one layout in a process, and {next(iter(together))} has another one"
            yield Problem(f"{name}.megatron", dict(zip(SIZES, sizes, strict=True)), wrong, "the same sizes")
    if (size := found[first][0].expert_model_parallel_size) > 1:
        kinds = [model_files.model_type(Path(path).expanduser()) for _, path, _ in found.values()]
        if not any(kind is None or kind in MIXTURES for kind in kinds):
            wrong = f"no model of this run has experts ({', '.join(sorted({str(kind) for kind in kinds}))})"
            yield Problem(f"{first}.megatron.expert_model_parallel_size", size, wrong, "1")
    adapters = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.model.has_adapters,
        "critic": config.critic.model.has_adapters,
    }
    yield from _offloaded_activations(config, found)
    for name, has_some in adapters.items():
        if has_some and name in found:
            wrong, remedy = "strategy=megatron has no LoRA", "set lora_rank=0 (and no lora_adapter_path), or use fsdp2"
            yield Problem(f"{name}.strategy", "megatron", wrong, "fsdp2", remedy)
    for name, section in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
        if name in found and section.ulysses_sequence_parallel_size > 1:
            key = f"{name}.ulysses_sequence_parallel_size"
            yield Problem(key, section.ulysses_sequence_parallel_size, "this is a setting of FSDP", "1 with megatron")


def _offloaded_activations(config: PPOConfig, found: Collection[str]) -> Iterator[Problem]:
    """Activations stay on the device under Megatron."""
    models = {"actor_rollout_ref.actor": config.actor_rollout_ref.model, "critic": config.critic.model}
    for name, model in models.items():
        if name in found and model.enable_activation_offload:
            key = f"{name.removesuffix('.actor')}.model.enable_activation_offload"
            remedy = "enable_gradient_checkpointing=true keeps each layer's input alone"
            yield Problem(key, True, "activations stay on the device under megatron", "false", remedy)


def _sections(config: PPOConfig) -> dict[str, tuple]:
    """Back end, model folder and ranks of each model of the run that Megatron holds."""
    roles, critic, reward, ranks = config.actor_rollout_ref, config.critic, config.reward_model, config.trainer.ranks
    found: dict[str, tuple] = {"actor_rollout_ref.actor": (roles.actor.placement, roles.model.path, ranks)}
    if need_reference_policy(config):
        found["actor_rollout_ref.ref"] = (roles.ref.placement, roles.model.path, ranks)
    if needs_critic(config):
        found["critic"] = (critic.placement, critic.model.path, ranks)
    if reward.enable and config.judge is None:
        own = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else ranks
        found["reward_model"] = (reward.placement, reward.model.path, own)
    return {name: part for name, part in found.items() if isinstance(part[0], McoreEngineConfig)}


def _layout(name: str, engine: McoreEngineConfig, path: str, ranks: int) -> Problems:
    shared_by = ranks_per_copy(engine)
    if ranks % shared_by:
        wrong = f"{shared_by} ranks share the model, which does not divide {ranks} ranks"
        value = {size: engine[size] for size in SIZES}
        yield Problem(f"{name}.megatron", value, wrong, f"sizes whose product divides {ranks}")
    expert_tensor = engine.expert_tensor_parallel_size or engine.tensor_model_parallel_size
    experts_by = expert_tensor * engine.expert_model_parallel_size * engine.pipeline_model_parallel_size
    if ranks % experts_by and not ranks % shared_by:
        wrong = f"{experts_by} ranks share the experts, which does not divide {ranks} ranks"
        key = f"{name}.megatron.expert_model_parallel_size"
        yield Problem(key, engine.expert_model_parallel_size, wrong, f"sizes whose product divides {ranks}")
    kind = model_files.model_type(Path(path).expanduser())
    if kind is not None and kind not in MEGATRON_FAMILIES:
        wrong = f"it has no {kind} models ({path})"
        yield Problem(f"{name}.strategy", "megatron", wrong, "fsdp2", f"or a model of {', '.join(MEGATRON_FAMILIES)}")
    yield from _parts(name, engine, Path(path).expanduser())


def _parts(name: str, engine: McoreEngineConfig, folder: Path) -> Problems:
    """Check that each rank gets equally many heads and each piece of a pipeline equally many layers."""
    tensor, pieces = engine.tensor_model_parallel_size, engine.virtual_pipeline_model_parallel_size
    of_heads, of_layers = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    key_heads, stages = model_files.key_value_heads(folder), engine.pipeline_model_parallel_size * (pieces or 1)
    by_context = "" if engine.context_parallel_size == 1 else " × context_parallel_size"
    by_pieces = "" if pieces in (None, 1) else " × virtual_pipeline_model_parallel_size"
    for key, by, parts, count, what in (
        (of_heads, by_context, tensor * engine.context_parallel_size, model_files.attention_heads(folder), "heads"),
        (of_heads, "", tensor, key_heads, "key/value heads"),
        (of_layers, by_pieces, stages, model_files.layers(folder), "layers"),
    ):
        if count is not None and count % parts:
            product = f"{key}{by}={parts}" if by else "it"
            wrong = f"{product} does not divide the model's {count} {what} ({folder})"
            yield Problem(f"{name}.megatron.{key}", engine[key], wrong, f"divisors of {count}{by and ' in all'}")


def only_ppo(config: SupervisedConfig) -> Problems:
    """Supervised and preference training have FSDP2 alone."""
    if config.engine.strategy == "megatron":
        yield Problem("engine.strategy", "megatron", "only main_ppo trains with Megatron yet", "fsdp2")
