"""The worker groups of a run: which roles it has, in which processes, and how a batch is dealt to their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.trainer.config import PPOConfig
from verl.trainer.ppo.balance import layout_for_ranks
from verl.trainer.ppo.utils import Needs, Role
from verl.trainer.schedule import with_total_steps
from verl.utils.seqlen_balancing import get_reverse_idx, log_seqlen_unbalance
from verl.workers.engine.non_finite import NonFinite, in_batch_order


@dataclass(kw_only=True)
class RoleWorkers:
    """Starts and ends the workers.

    Roles of one pool share its processes.
    """

    worker_classes: Mapping[Role, type]
    """The worker class of each role."""
    pools: Any
    """Which pool of processes each role lives in."""
    group_class: Any
    """The controller, RayWorkerGroup or LocalWorkerGroup."""
    device_name: str | None
    groups: dict[Role, Any] = field(default_factory=dict)
    """The worker group of each role, once started."""
    processes: list[Any] = field(default_factory=list)
    """The processes of each pool, as one group."""

    def start(self, config: PPOConfig, needs: Needs, total_steps: int) -> None:
        """Start the workers of all roles that are needed, and load their models."""
        self.pools.create_resource_pool()
        for pool, members in self._by_pool(roles_of(needs), worker_arguments(config, total_steps)).items():
            colocated = self.group_class.colocate({str(role): worker for role, worker in members.items()})
            group = self.group_class(resource_pool=pool, ray_cls_with_init=colocated, device_name=self.device_name)
            self.processes.append(group)
            group.guard(config.trainer.recovery.hang_timeout_s)
            views = group.spawn(prefix_set=[str(role) for role in members])
            self.groups |= {role: views[str(role)] for role in members}
        # The actor last: its rollout engine sizes itself by the memory that the others left.
        for role in sorted(self.groups, key=lambda role: role is Role.ActorRollout):
            self.groups[role].init_model()

    def end(self) -> None:
        """End the workers and give their places back; they can be started again."""
        for processes in self.processes:
            processes.shutdown()
        self.processes.clear()
        self.groups.clear()
        self.pools.release()

    def _by_pool(
        self, roles: Sequence[Role], arguments: Mapping[Role, dict[str, Any]]
    ) -> dict[Any, dict[Role, ClassWithInitArgs]]:
        pools: dict[Any, dict[Role, ClassWithInitArgs]] = {}
        for role in roles:
            worker = self.group_class.describe(
                self.worker_classes[role], **arguments[role], device_name=self.device_name
            )
            pools.setdefault(self.pools.get_resource_pool(role), {})[role] = worker
        return pools


def roles_of(needs: Needs) -> list[Role]:
    """The roles of a run, in an order that is the same in every run."""
    wanted = {
        Role.ActorRollout: True,
        Role.Critic: needs.critic,
        Role.RefPolicy: needs.reference,
        Role.RewardModel: needs.reward_model,
    }
    return sorted((role for role, is_wanted in wanted.items() if is_wanted), key=str)


def worker_arguments(config: PPOConfig, total_steps: int) -> dict[Role, dict[str, Any]]:
    """What the worker of each role is made with; schedules know the steps of the run."""
    roles = config.actor_rollout_ref
    actor = replace(roles.actor, optim=with_total_steps(roles.actor.optim, total_steps))
    critic = replace(config.critic, optim=with_total_steps(config.critic.optim, total_steps))
    return {
        Role.ActorRollout: {"config": replace(roles, actor=actor), "role": "actor_rollout"},
        Role.RefPolicy: {"config": roles, "role": "ref"},
        Role.Critic: {"config": critic},
        Role.RewardModel: {"config": config.reward_model},
    }


def compute_columns(
    workers: Any, method: str, batch: DataProto, columns: Sequence[str], seqlens: list[int], balance: bool
) -> DataProto:
    """Columns from a worker group, with tokens dealt evenly to its ranks, back in the batch's order.

    Args:
        workers: the group.
        method: of its workers.
        batch: rows in the order of the data.
        columns: what the method reads.
        seqlens: tokens of each row.
        balance: deal rows by length.
    """
    order, _ = layout_for_ranks(seqlens, dp_size=workers.world_size, num_mini_batches=1, balance=balance)
    inputs = batch.select(batch_keys=list(columns), non_tensor_batch_keys=[])
    return getattr(workers, method)(inputs.select_idxs(order)).select_idxs(get_reverse_idx(order))


def update_weights(
    workers: Any,
    method: str,
    batch: DataProto,
    columns: Sequence[str],
    seqlens: list[int],
    balance: bool,
    num_mini_batches: int,
    **arguments: Any,
) -> tuple[dict[str, float], DataProto, list[NonFinite]]:
    """One pass of updates over a batch, and how evenly its tokens were dealt.

    Args:
        workers: the group.
        method: of its workers.
        batch: rows in the order of the data.
        columns: what the method reads.
        seqlens: tokens of each row.
        balance: deal rows by length.
        num_mini_batches: optimizer steps; mini-batch k is the k-th contiguous part of the batch.
        arguments: further arguments of the method.

    Returns:
        the metrics of the update, the same on every rank, and ``global_seqlen/...``; the columns that it
        made, in the order of the batch, if any; what was not finite, by rows of the batch.
    """
    order, ranks = layout_for_ranks(
        seqlens, dp_size=workers.world_size, num_mini_batches=num_mini_batches, balance=balance
    )
    inputs = batch.select(batch_keys=list(columns), non_tensor_batch_keys=[])
    updated = getattr(workers, method)(inputs.select_idxs(order), **arguments)
    metrics = {**log_seqlen_unbalance(seqlens, ranks, "global_seqlen"), **updated.meta_info["metrics"]}
    problems = in_batch_order(updated.meta_info.get("non_finite", []), order, workers.world_size)
    made = updated.select(meta_info_keys=[])
    return metrics, made.select_idxs(get_reverse_idx(order)) if len(made) else made, problems
