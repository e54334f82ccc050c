"""Start and shut down the worker groups of a run."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl.single_controller.base.call_times import CallTime
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs
from verl.single_controller.base.worker_group import WorkerGroup
from verl.utils.console import working

RoleT = TypeVar("RoleT", bound=Hashable)


@dataclass(kw_only=True)
class WorkerGroups:
    """The worker groups of a run by role; roles assigned to one pool share its processes."""

    worker_classes: Mapping[Any, type]
    """The worker class of each role."""
    pools: PoolManager
    """The assignment of roles to pools of processes."""
    group_class: Any
    """The controller's class, RayWorkerGroup or LocalWorkerGroup."""
    device_name: str | None
    start_timeout_s: float = 300
    """Seconds in which the constructors of a pool's workers must return."""
    hang_timeout_s: float | None = None
    """Seconds after which a call without an answer counts as a lost process; None waits without limit."""
    groups: dict[Hashable, WorkerGroup] = field(default_factory=dict)
    """The worker group of each role; empty while no workers run."""
    _processes: dict[str, WorkerGroup] = field(default_factory=dict)
    """The group that holds the processes of a pool, by the pool's name."""
    _arguments: dict[Any, Mapping[str, object]] = field(default_factory=dict)
    """Constructor arguments of the workers that were started, by role."""
    _changing: threading.RLock = field(default_factory=threading.RLock)
    """Held while workers start or end, which two threads may ask for."""

    def start(self, arguments: Mapping[RoleT, Mapping[str, object]]) -> Mapping[RoleT, WorkerGroup]:
        """Start the workers of all roles with these arguments, load their models in this order, return their groups."""
        with self._changing:
            self._arguments = dict(arguments)
            self.pools.create_resource_pool()
            self._start(arguments)
            return {role: self.groups[role] for role in arguments}

    def replace(self, role: Hashable) -> None:
        """Start the workers of a role's pool anew, because it has lost a process; other pools go on.

        Does nothing if the pool was replaced meanwhile, or all workers have ended.

        Raises:
            ProcessLostError: a new process was lost too; :meth:`replace` may be called again.
            ResourceError: the cluster has become too small.
        """
        pool = self.pools.mapping[role]
        with self._changing:
            processes = self._processes.get(pool)
            if not self.groups or (processes is not None and not processes.is_lost):
                return
            if processes is not None:
                del self._processes[pool]
                processes.shutdown()
            self.pools.renew(pool)
            self._start({each: of for each, of in self._arguments.items() if self.pools.mapping[each] == pool})

    @property
    def lost_pools(self) -> set[str]:
        """Names of the pools that have lost a process."""
        return {pool for pool, processes in self._processes.copy().items() if processes.is_lost}

    def _start(self, arguments: Mapping[Any, Mapping[str, object]]) -> None:
        names = ", ".join(map(str, arguments))
        with working(f"starting the processes of {names}"):
            self._start_processes(arguments)
        for role in arguments:
            with working(f"loading the model of {role} on {self.groups[role].world_size} rank(s)"):
                self.groups[role].init_model()

    def _start_processes(self, arguments: Mapping[Any, Mapping[str, object]]) -> None:
        members: dict[ResourcePool, dict[Hashable, ClassWithInitArgs]] = {}
        for role, kwargs in arguments.items():
            worker = self.group_class.describe(self.worker_classes[role], **kwargs, device_name=self.device_name)
            members.setdefault(self.pools.get_resource_pool(role), {})[role] = worker
        for pool, workers in members.items():
            colocated = self.group_class.colocate({str(role): worker for role, worker in workers.items()})
            limit = {"ray_wait_register_center_timeout": self.start_timeout_s}
            group = self.group_class(pool, colocated, device_name=self.device_name, **limit)
            self._processes[self.pools.mapping[next(iter(workers))]] = group
            group.guard(self.hang_timeout_s)
            views = group.spawn(prefix_set=[str(role) for role in workers])
            self.groups |= {role: views[str(role)] for role in workers}

    def call_times(self, busy: Hashable = None) -> dict[str, list[CallTime]]:
        """Fetch the calls that each process answered since the last fetch, by pool and rank (``global_pool 0``).

        One call per process. It waits for calls that are still under way, so the pool of the role ``busy`` is left for
        a later fetch, and so are pools that are lost.
        """
        left = self.lost_pools | ({self.pools.mapping[busy]} if busy is not None else set())
        fetched = {pool: group for pool, group in self._processes.copy().items() if pool not in left}
        pending = {pool: group.execute_all_async("take_call_times") for pool, group in fetched.items()}
        return {
            f"{pool} {rank}": calls
            for pool, outputs in pending.items()
            for rank, calls in enumerate(fetched[pool].wait_for(outputs))
        }

    def end(self) -> None:
        """End the workers and release their pools; :meth:`start` may be called again."""
        with self._changing:
            for processes in self._processes.values():
                processes.shutdown()
            self._processes.clear()
            self.groups.clear()
            self.pools.release()
