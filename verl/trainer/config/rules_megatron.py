"""Rules about models under ``strategy=megatron``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.base.remote import is_remote
from verl.base.requirements import install_command
from verl.config import (
    DPOConfig,
    FSDPOptimizerConfig,
    McoreEngineConfig,
    PPOConfig,
    Problem,
    RMConfig,
    SupervisedConfig,
)
from verl.config.megatron import INDEX, MIXTURES, SIZES, ranks_per_copy
from verl.config.megatron_flags import ROUTERS
from verl.config.model import ALL_LINEAR
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.roles import need_reference_policy
from verl.utils.model_facts import model_files
from verl.utils.model_facts.config_fields import dropout_rates, with_dropout
from verl.utils.model_facts.megatron_fit import misfits
from verl.vision.families import FAMILIES

Problems = Iterator[Problem]


@dataclass(frozen=True)
class _Held:
    """A model that Megatron holds."""

    placement: McoreEngineConfig
    model: Any
    """Its section with ``path``."""
    ranks: int
    section: str
    """Section that has its ``strategy``."""
    sizes: str
    """Section of its layout."""
    trained: Any = None
    """The section with FSDP's ``ulysses_sequence_parallel_size`` if the model is trained."""
    model_key: str = ""
    """Section of the model if it is trained."""
    optim: FSDPOptimizerConfig | None = None
    optim_key: str = ""
    """Section of its optimizer."""

    @property
    def config_path(self) -> str:
        """Folder of the model's config, or a name on the hub."""
        return getattr(self.model, "hf_config_path", None) or self.model.path


def models(config: PPOConfig | SupervisedConfig) -> Problems:
    """megatron-core is installed and has the models; layouts divide ranks."""
    models_held = _held(config)
    if models_held and importlib.util.find_spec("megatron") is None:
        cause = "megatron-core is not installed"
        remedy = f"{install_command('megatron')} on every node, or use strategy=fsdp2"
        yield Problem(f"{models_held[0].section}.strategy", "megatron", cause, "fsdp2", remedy)
    yield from layouts(config)
    for held in models_held:
        yield from _checkpoint(held)


def _checkpoint(held: _Held) -> Problems:
    """A checkpoint of megatron-core is there, and one of a model that is read."""
    path = held.placement.dist_checkpointing_path
    if not held.placement.use_dist_checkpointing or path is None:
        return
    key, folder = f"{held.sizes}.dist_checkpointing_path", Path(path).expanduser()
    if is_remote(path):
        yield Problem(key, path, "it is read from a local folder", remedy="copy it to every node")
    elif not (folder / INDEX).is_file():
        cause = f"the folder is no torch_dist checkpoint of megatron-core: it has no file {INDEX}"
        yield Problem(
            key, path, cause, remedy="name the folder that has it; verl merge MODEL --to torch-dist makes one"
        )
    if model_files.model_type(Path(held.model.path).expanduser()) in FAMILIES:
        cause = "weights of models with images are read from model.path"
        yield Problem(f"{held.sizes}.use_dist_checkpointing", True, cause, "false")
    if held.model_key in {"actor_rollout_ref.model", "model"} and held.model.mtp.is_trained:
        cause = f"{held.model_key}.mtp trains heads, which are read from model.path"
        yield Problem(f"{held.sizes}.use_dist_checkpointing", True, cause, "false", "or set mtp.enable_train=false")


def layouts(config: PPOConfig | SupervisedConfig) -> Problems:
    """Check that parallel layouts divide the ranks and the models; independent of the machine."""
    models_held = _held(config)
    if not models_held:
        return
    reported = []  # models that follow the actor have its problems too, and may have others: they are trained or frozen
    for held in models_held:
        layout = held.config_path, held.model.override_config, held.ranks, _sizes(held.placement)
        for problem in _layout(held):
            same = layout, problem.key.removeprefix(held.section), problem.cause
            if same not in reported:
                yield problem
                reported.append(same)
    if (size := models_held[0].placement.expert_model_parallel_size) > 1:
        kinds = [model_files.model_type(Path(held.model.path).expanduser()) for held in models_held]
        if not any(kind is None or kind in MIXTURES for kind in kinds):
            cause = f"no model of this run has experts ({', '.join(sorted({str(kind) for kind in kinds}))})"
            yield Problem(f"{models_held[0].sizes}.expert_model_parallel_size", size, cause, "1")
    for held in models_held:
        if held.trained is not None:
            yield from _training(held)
            if held.section == "critic" or isinstance(config, RMConfig):
                yield from _policys_routers(held)


def _sizes(engine: McoreEngineConfig) -> dict[str, int] | str:
    """Return the sizes of a layout that null does not mean as well, or say that there are none."""
    usual = dict.fromkeys(SIZES, 1) | {"expert_tensor_parallel_size": engine.tensor_model_parallel_size}
    sizes = {size: engine[size] for size in SIZES} | {"virtual_pipeline_model_parallel_size": engine.model_chunks}
    return {size: count for size, count in sizes.items() if count not in (None, usual[size])} or "sizes of 1"


def _training(held: _Held) -> Problems:
    """Activations stay on the device, adapters are plain ones, and sequences are shared by Megatron's own sizes."""
    if held.model.enable_activation_offload:
        key = f"{held.model_key}.enable_activation_offload"
        remedy = "enable_gradient_checkpointing=true keeps each layer's input alone"
        yield Problem(key, True, "activations stay on the device under megatron", "false", remedy)
    if held.model.has_adapters and held.model.lora.use_dora:
        yield Problem(f"{held.model_key}.lora.use_dora", True, "strategy=megatron has no DoRA", "false", "or use fsdp2")
    yield from _latent_adapters(held)
    if (size := held.trained.ulysses_sequence_parallel_size) > 1:
        key = f"{held.section}.ulysses_sequence_parallel_size"
        yield Problem(key, size, "this is a setting of FSDP", f"1, and {held.sizes}.context_parallel_size")


def _policys_routers(held: _Held) -> Problems:
    """Check that only a policy has router losses and bias updates."""
    override = held.placement.override_transformer_config
    for name in ROUTERS:
        if (value := override.get(name)) not in (None, False, 0, "none"):
            cause = "routers of a model with values or scores have no such training"
            remedy = f"{held.model_key}.override_config.router_aux_loss_coef sets a balance loss over all layers"
            key = f"{held.sizes}.override_transformer_config.{name}"
            yield Problem(key, value, cause, "null", remedy)


def _latent_adapters(held: _Held) -> Problems:
    """Projections to the latent vectors of attention have no adapters: every tensor-parallel rank has them whole."""
    model, fields = held.model, model_files.config_entries(Path(held.config_path).expanduser())
    if model.lora_rank == 0 or fields.get("kv_lora_rank") is None or isinstance(model.exclude_modules, str):
        return
    latent_layers = ["kv_a_proj_with_mqa", *(["q_a_proj"] if fields.get("q_lora_rank") else [])]
    targets, excluded = model.target_modules, set(model.exclude_modules or ())
    adapted = [name for name in latent_layers if name not in excluded and (targets == ALL_LINEAR or name in targets)]
    if adapted and (targets == ALL_LINEAR or not isinstance(targets, str)):
        key = f"{held.model_key}.target_modules"
        cause = f"strategy=megatron has no adapters of {', '.join(adapted)}, which every tensor-parallel rank has whole"
        remedy = f"set {held.model_key}.exclude_modules=[{','.join(latent_layers)}], or use strategy=fsdp2"
        yield Problem(key, targets, cause, "other layers", remedy)


def _held(config: PPOConfig | SupervisedConfig) -> list[_Held]:
    """All models of the run that Megatron holds."""
    models_held: list[_Held] = []

    def add(placement: object, model: object, section: str, ranks: int = config.trainer.ranks, **more: Any) -> None:
        if isinstance(placement, McoreEngineConfig):
            sizes = "megatron" if section == "engine" else f"{section}.megatron"
            models_held.append(_Held(placement, model, ranks, section, sizes, **more))

    if isinstance(config, SupervisedConfig):
        trained = {"trained": config.engine, "model_key": "model", "optim": config.optim, "optim_key": "optim"}
        add(config.placement, config.model, "engine", **trained)
        if isinstance(config, DPOConfig) and config.reference_model.path != config.model.path:
            add(config.reference_engine, config.reference_model, "engine")
        return models_held
    roles, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    policy, policy_section = roles.model, "actor_rollout_ref"
    trained = {"trained": roles.actor, "optim": roles.actor.optim, "optim_key": f"{policy_section}.actor.optim"}
    add(roles.actor.placement, policy, f"{policy_section}.actor", model_key=f"{policy_section}.model", **trained)
    if need_reference_policy(config):
        add(roles.ref.placement, policy, f"{policy_section}.ref")
    if needs_critic(config):
        trained = {"trained": critic, "optim": critic.optim, "optim_key": "critic.optim"}
        add(critic.placement, critic.model, "critic", model_key="critic.model", **trained)
    if reward.enable and config.judge is None:
        ranks_of_pool = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else config.trainer.ranks
        add(reward.placement, reward.model, "reward_model", ranks_of_pool)
    return models_held


def _layout(held: _Held) -> Problems:
    engine, ranks = held.placement, held.ranks
    yield from engine.pipeline_problems(held.sizes)
    shared_by = ranks_per_copy(engine)
    if ranks % shared_by:
        cause = f"{shared_by} ranks share the model, which does not divide {ranks} ranks"
        yield Problem(held.sizes, _sizes(engine), cause, f"sizes whose product divides {ranks}")
    expert_tensor = engine.expert_tensor_parallel_size or engine.tensor_model_parallel_size
    experts_by = expert_tensor * engine.expert_model_parallel_size * engine.pipeline_model_parallel_size
    if ranks % experts_by and not ranks % shared_by:
        cause = f"{experts_by} ranks share the experts, which does not divide {ranks} ranks"
        key = f"{held.sizes}.expert_model_parallel_size"
        yield Problem(key, engine.expert_model_parallel_size, cause, f"sizes whose product divides {ranks}")
    fields = model_files.config_entries(Path(held.config_path).expanduser())
    if fields:  # else a name on the hub, whose model is looked at when it loads
        fields = with_dropout(fields, dict.fromkeys(dropout_rates(fields), 0.0)) | held.model.override_config
        yield from misfits(fields, engine, held.sizes, f"{held.section}.strategy")
