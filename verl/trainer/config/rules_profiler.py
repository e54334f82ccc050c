"""Rules about profilers: roles and ranks that exist, and a tool that the device has.

Settings that profile nothing harm nothing, so they are advised against and not refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import PPOConfig, Problem, RoleProfilerConfig
from verl.trainer.config.rules_sizes import needs_critic
from verl.trainer.config.sizes import resolve_device
from verl.trainer.ppo.utils import need_reference_policy

Problems = Iterator[Problem]

_TOOL = "global_profiler.tool"


def profilers(config: PPOConfig) -> Problems:
    """Roles are profiled by a tool of the device, and only those, on ranks, which the run has."""
    roles, reward, tool = config.actor_rollout_ref, config.reward_model, config.global_profiler.tool
    own_pool = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else config.trainer.ranks
    has_reference = need_reference_policy(config) and not roles.model.has_adapters
    sections: dict[str, tuple[RoleProfilerConfig, bool, int]] = {
        "actor_rollout_ref.actor": (roles.actor.profiler, True, config.trainer.ranks),
        "actor_rollout_ref.ref": (roles.ref.profiler, has_reference, config.trainer.ranks),
        "critic": (config.critic.profiler, needs_critic(config), config.trainer.ranks),
        "reward_model": (reward.profiler, reward.enable and config.judge is None, own_pool),
    }
    enabled = {name: found for name, found in sections.items() if found[0].enable}
    if tool and not enabled:
        remedy = (
            "set actor_rollout_ref.actor.profiler.enable=true and actor_rollout_ref.actor.profiler.ranks=[0], or those "
            "of another role"
        )
        yield Problem(_TOOL, tool, "no role is profiled", remedy=remedy, advice=True)
    if tool == "torch_memory" and resolve_device(config) == "cpu":
        yield Problem(_TOOL, tool, "it records the memory of a GPU, and this run uses the CPU", "torch")
    for name, (profiler, is_there, ranks) in enabled.items():
        path = f"{name}.profiler"
        if not tool:
            yield Problem(f"{path}.enable", True, f"{_TOOL} is null", "", f"set {_TOOL}=torch and steps", advice=True)
        if not is_there:
            wrong = "this run has no workers of this role"
            yield Problem(
                f"{path}.enable", True, wrong, "false", "profile another role, such as the actor", advice=True
            )
        elif beyond := [rank for rank in profiler.ranks if not 0 <= rank < ranks]:
            wrong = f"the role has {ranks} rank(s), and none with the number {', '.join(map(str, beyond))}"
            yield Problem(f"{path}.ranks", list(profiler.ranks), wrong, f"numbers from 0 to {ranks - 1}", advice=True)
