"""Rules about FSDP with tensor parallelism: the ranks divide the model, and nothing stands beside it that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config import FSDPEngineConfig, PPOConfig, Problem, SupervisedConfig
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.roles import need_reference_policy
from verl.utils.model_facts import model_files

_NAME = "tensor_parallel_size"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def divided_matrices(key: str, engine: FSDPEngineConfig, path: str, ranks: int) -> Iterator[Problem]:
    """Check that ``ranks`` ranks can divide the matrices of the model in ``path`` as the section ``key`` says."""
    size, folder = engine.tensor_parallel_size, Path(path).expanduser()
    if size == 1:
        return
    if ranks % size:
        yield Problem(f"{key}.{_NAME}", size, f"it does not divide {ranks} ranks", f"divisors of {ranks}")
    if engine.ulysses_sequence_parallel_size > 1:
        cause = f"ranks that divide matrices ({_NAME}={size}) compute whole sequences"
        shared = engine.ulysses_sequence_parallel_size
        yield Problem(f"{key}.ulysses_sequence_parallel_size", shared, cause, "1", f"or set {_NAME}=1")
    fields = model_files.config_entries(folder)
    text = fields["text_config"] if isinstance(fields.get("text_config"), dict) else fields
    assert isinstance(text, dict)
    remedy = f"set {_NAME}=1, or use strategy=megatron"
    for entry in ("num_attention_heads", "num_key_value_heads", "intermediate_size", *_EXPERTS):
        count = text.get(entry)
        if isinstance(count, int) and count % size:
            cause = f"each rank has equally many of the model's {entry}={count}"
            yield Problem(f"{key}.{_NAME}", size, cause, f"divisors of {count}", remedy)


def beside_divided_matrices(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    """Some adapters, Muon, Liger's layers and offloaded activations belong to models whose matrices are whole."""
    sections: list[tuple[str, FSDPEngineConfig, Any, str, Any]] = []
    if isinstance(config, PPOConfig):
        roles, critic, scorer = config.actor_rollout_ref, config.critic, config.reward_model
        model = "actor_rollout_ref.model"
        sections.append(("actor_rollout_ref.actor", roles.actor.fsdp_config, roles.model, model, roles.actor.optim))
        if needs_critic(config):
            sections.append(("critic", critic.model.fsdp_config, critic.model, "critic.model", critic.optim))
        # Frozen models have no optimizer.
        if need_reference_policy(config) and roles.actor.fsdp_config.tensor_parallel_size == 1:
            sections.append(("", roles.ref.fsdp_config, roles.model, model, None))
        if scorer.enable and config.judge is None:
            sections.append(("", scorer.model.fsdp_config, scorer.model, "reward_model.model", None))
    else:
        sections.append(("", config.engine, config.model, "model", config.optim))
    for section, engine, model, model_key, optim in sections:
        size = engine.tensor_parallel_size
        if size == 1 or engine.strategy == "megatron":
            continue
        cause = f"matrices are divided over ranks ({_NAME}={size})"
        remedy = f"or set {_NAME}=1"
        refused: list[tuple[str, object, str, str]] = [
            (f"{model_key}.use_liger", model.use_liger, "Liger's layers have whole ones", "false")
        ]
        if optim is not None:
            refused += [
                (f"{model_key}.lora.use_dora", model.lora.use_dora, "DoRA needs whole rows", "false"),
                (
                    f"{model_key}.lora.target_parameters",
                    model.lora.target_parameters,
                    "adapters of experts are not",
                    "[]",
                ),
                (
                    f"{model_key}.enable_activation_offload",
                    model.enable_activation_offload,
                    "activations are too",
                    "false",
                ),
                (
                    f"{section}.optim.optimizer".removeprefix("."),
                    "Muon" if optim.is_muon else "",
                    "Muon needs whole ones",
                    "AdamW",
                ),
            ]
        for key, value, why, allowed in refused:
            if value:
                yield Problem(key, value, f"{cause}, and {why}", allowed, remedy)
