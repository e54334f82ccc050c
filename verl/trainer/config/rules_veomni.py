"""Rules about VeOmni: it can be imported, and its model of the folder gives what Transformers' own gives."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base.requirements import install_command, requirements
from verl.config import FSDPEngineConfig, PPOConfig, Problem
from verl.config.model import VEOMNI_FAMILIES
from verl.config.problems import shown
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.config.sizes import resolve_device
from verl.trainer.roles import need_reference_policy
from verl.utils.model_facts import model_files

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def model(section: str, engine: FSDPEngineConfig, path: str) -> Iterator[Problem]:
    """Check that VeOmni can hold the model in the folder ``path`` as ``section`` says."""
    key = f"{section.removesuffix('.fsdp_config').removesuffix('.model')}.strategy"
    if cause := _why_not_importable(requirements("veomni")):
        remedy = f"{install_command('veomni')} on every node, or use strategy=fsdp2"
        yield Problem(key, "veomni", cause, "fsdp2", remedy)
    kind = model_files.config_entries(Path(path).expanduser()).get("model_type")
    if kind is not None and kind not in VEOMNI_FAMILIES:
        cause = f"VeOmni's {kind} has not been compared with that of Transformers"
        yield Problem(key, "veomni", cause, "fsdp2", f"or train one of {', '.join(VEOMNI_FAMILIES)}")
    if engine.tensor_parallel_size > 1:
        size, remedy = engine.tensor_parallel_size, "or use strategy=fsdp2"
        yield Problem(f"{section}.tensor_parallel_size", size, "VeOmni's matrices are not divided", "1", remedy)


def one_kernel(config: PPOConfig) -> Iterator[Problem]:
    """Models of one process have the same kernels: VeOmni keeps the last choice, for all of them."""
    roles, critic = config.actor_rollout_ref, config.critic.model
    are_both = roles.actor.strategy == config.critic.strategy == "veomni" and needs_critic(config)
    layers = [model.use_liger is not False for model in (roles.model, critic)]
    if are_both and layers[0] != layers[1] and config.trainer.device != "cpu":
        policy_value = shown(roles.model.use_liger)
        cause = f"VeOmni's models of a process have the same kernels, and actor_rollout_ref.model has {policy_value}"
        yield Problem("critic.model.use_liger", critic.use_liger, cause, policy_value)
    held = [("actor_rollout_ref.actor.fsdp_config", roles.actor.fsdp_config, roles.model.path)]
    if need_reference_policy(config):
        held.append(("actor_rollout_ref.ref.fsdp_config", roles.ref.fsdp_config, roles.model.path))
    if needs_critic(config):
        held.append(("critic.model.fsdp_config", critic.fsdp_config, critic.path))
    moe_implementations = {
        f"{name}.moe_implementation": engine.moe_implementation
        for name, engine, path in held
        if engine.strategy == "veomni" and model_files.model_type(Path(path).expanduser()) == "qwen3_moe"
    }
    if len(set(moe_implementations.values())) < 2:
        return
    usual = "fused_triton" if resolve_device(config) == "cuda" else "eager"
    (key, kernel), *other_kernels = ((key, kernel or usual) for key, kernel in moe_implementations.items())
    for name, other in other_kernels:
        if other != kernel:
            cause = f"all models of a process have one kernel for experts, and {key}={kernel}"
            yield Problem(name, moe_implementations[name], cause, kernel, "give both the same value")


def _why_not_importable(required: Iterable[Requirement]) -> str | None:
    """Describe the first package that is missing, or whose version VeOmni cannot be imported with; None if none."""
    for requirement in required:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f"{'VeOmni' if requirement.name == 'veomni' else requirement.name} is not installed"
        if not requirement.specifier.contains(version, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            return f"{requirement.name} {version} is installed, and VeOmni's models here need {needed}"
    return None
