"""``RayWorkerGroup``: one actor per rank, called like one object."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import ConfigError, ProcessLostError, ResourceError, WorkerError
from verl.single_controller.base.colocate import ClassWithInitArgs
from verl.single_controller.base.dispatch import Share, is_batch
from verl.single_controller.base.worker import STACKS_FOLDER_ENV, free_port
from verl.single_controller.base.worker_group import Call, WorkerGroup
from verl.single_controller.ray.failures import Asked, explain
from verl.single_controller.ray.hangs import hang, late_start, stacks_folder
from verl.single_controller.ray.processes import brief, dead_nodes, end
from verl.single_controller.ray.resource_pool import Bundle, RayResourcePool
from verl.single_controller.ray.watch import Watch

MEETING_TIMEOUT_S = 60.0
"""How long the node of rank 0 may take to name a port."""
LOST_NODE = "Places on a node that died do not come back: release() the pool, and make it anew."

# What is worth a place in the object store where several ranks get the same one.
_LARGE = (Share, torch.Tensor, np.ndarray)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, its constructor's arguments, and options of the actor that it becomes.

    Args:
        cls: a subclass of Worker, as it is or wrapped by ``ray.remote``.
        args: positional arguments of its constructor.
        kwargs: named arguments of its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.options: dict[str, Any] = {}
        if isinstance(cls, ActorClass):
            wrapped: Any = cls
            self.options = {name: value for name, value in wrapped._default_options.items() if value is not None}
            cls = wrapped.__ray_actor_class__
        super().__init__(cls, *args, **kwargs)
        for name, member in self.members.items():
            self._adopt(name, getattr(member, "options", {}))

    def _adopt(self, name: str, options: Mapping[str, Any]) -> None:
        for key, value in options.items():
            if self.options.setdefault(key, value) != value:
                raise ConfigError(
                    f"colocated worker '{name}' asks for the actor option {key}={value!r}, another one for "
                    f"{self.options[key]!r}; they share one process. Give them the same options, or pools of their own."
                )

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set options of the actor, as in ``ray.remote(...).options``; they win over the pool's."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources of the cluster, for each rank."""
        self.options["resources"] = {**self.options.get("resources", {}), **additional_resource}


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors: one per rank, pinned to the places of a pool.

    Args:
        resource_pool: where the ranks live.
        ray_cls_with_init: the worker's class and constructor arguments.
        bin_pack: keep the ranks of a node together; otherwise only try to.
        name_prefix: first part of the actors' names; made up if not given, so that runs never clash.
        detached: the workers outlive this program; :meth:`from_detached` finds them by name.
        worker_names: names of workers that exist already, instead of a pool.
        worker_handles: handles of workers that exist already, instead of a pool.
        device_name: ``"cuda"`` or ``"cpu"``; must be the pool's, which is the default.
        start_timeout_s: how long all constructors may take.

    Raises:
        ResourceError: the pool does not fit the cluster, holds as many groups as it may, or ends before them.
        ProcessLostError: a process died or hangs in its constructor, or a node of the pool is gone.
        WorkerError: a constructor raised, or there was no room for its process in time.
    """

    class_with_args = RayClassWithInitArgs
    outlived_by_outputs = True

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        device_name: str | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        if ray_cls_with_init is None:
            raise WorkerError("RayWorkerGroup needs ray_cls_with_init: RayClassWithInitArgs(cls, ...).")
        super().__init__(resource_pool, ray_cls_with_init)
        self.name_prefix = name_prefix or uuid.uuid4().hex[:8]
        self._workers: list[Any] = list(worker_handles or [])
        self._watch = Watch(self._workers)
        self._worker_names = list(worker_names or [])
        self._bundles: list[Bundle] = []
        self._rendezvous: tuple[str, str] | None = None
        if resource_pool is None:
            self._attach()
        else:
            if device_name not in (None, resource_pool.device_name):
                raise ResourceError(
                    f"device_name='{device_name}', but the pool gives each rank a {resource_pool.resource}. Make the "
                    f"pool with use_gpu={device_name != 'cpu'}."
                )
            self._create(resource_pool, resource_pool.bundles("STRICT_PACK" if bin_pack else "PACK"), detached)
            self._wait_for_constructors(start_timeout_s)

    # ---- making one -------------------------------------------------------------------------------

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """A group over workers that run already, e.g. those that another program left (``detached=True``).

        Args:
            name_prefix: the prefix for names of new actors of this group; a running group has none.
            worker_names: ``group.worker_names`` of the running group, in the order of ranks.
            worker_handles: or its ``workers``.
            ray_cls_with_init: the class that they were made of; its arguments are not used.

        Raises:
            WorkerError: there is no such worker.
        """
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
        )

    def _attach(self) -> None:
        if not self._workers:
            for name in self._worker_names:
                try:
                    self._workers.append(ray.get_actor(name))
                except ValueError as error:
                    raise WorkerError(
                        f"no running worker is called '{name}'. Detached workers are found from the Ray namespace in "
                        "which they were made: ray.init(namespace=...)."
                    ) from error
        if not self._workers:
            raise WorkerError("a worker group needs resource_pool, worker_names or worker_handles.")

    def _create(self, pool: RayResourcePool, bundles: list[Bundle], detached: bool) -> None:
        inside = max(bundle.occupants for bundle in bundles)
        if inside >= pool.max_colocate_count:
            raise ResourceError(
                f"the pool holds {inside} worker groups already, and was made for max_colocate_count="
                f"{pool.max_colocate_count}. Raise it, colocate the workers in one group, or shut a group down."
            )
        if detached and not pool.detached:
            raise ResourceError(
                "detached workers would die with their places when this program ends. Make the pool with detached=True."
            )
        lost = {bundle.node_id for bundle in bundles} & dead_nodes().keys()
        if lost:
            raise ProcessLostError(f"the pool has places on nodes that died ({', '.join(sorted(lost))}). {LOST_NODE}")
        self._rendezvous = _rendezvous(bundles[0])
        self._bundles.extend(bundles)
        for bundle in bundles:
            bundle.occupants += 1
        cls_with_args = self.ray_cls_with_init
        actor_cls = ray.remote(cls_with_args.cls)
        for rank in range(len(bundles)):
            options = self._options(rank, bundles, pool)
            options["lifetime"] = "detached" if detached else None
            self._workers.append(actor_cls.options(**options).remote(*cls_with_args.args, **cls_with_args.kwargs))
            self._worker_names.append(options["name"])

    def _options(self, rank: int, bundles: list[Bundle], pool: RayResourcePool) -> dict[str, Any]:
        bundle = bundles[rank]
        on_node = [other for other, place in enumerate(bundles) if place.node_id == bundle.node_id]
        share = _share_of_one(pool.max_colocate_count)
        environment = {
            "WORLD_SIZE": len(bundles),
            "RANK": rank,
            "LOCAL_WORLD_SIZE": len(on_node),
            "LOCAL_RANK": on_node.index(rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            STACKS_FOLDER_ENV: stacks_folder(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or _threads(bundle.node_id, len(on_node)),
        }
        wanted = getattr(self.ray_cls_with_init, "options", {})
        runtime = wanted.get("runtime_env", {})
        variables = {name: str(value) for name, value in environment.items()} | runtime.get("env_vars", {})
        return {
            "name": f"{self.name_prefix}_{self.ray_cls_with_init.cls.__name__}_{rank}",
            "num_cpus": share,
            "num_gpus": share if pool.use_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            **wanted,
            "runtime_env": {**runtime, "env_vars": variables},
        }

    def _wait_for_constructors(self, timeout_s: float) -> None:
        ready = {rank: worker.__ray_ready__.remote() for rank, worker in enumerate(self._workers)}
        asked = self._asked("__init__")
        try:
            # Raises as soon as one of them fails: the others may be waiting for it.
            ray.get(list(ready.values()), timeout=timeout_s)
        except RayError as error:
            late = isinstance(error, GetTimeoutError)
            explained = late_start(ready, asked, timeout_s) if late else explain(error, ready, asked)
            self.shutdown()
            raise explained from error

    # ---- the contract -----------------------------------------------------------------------------

    @property
    def workers(self) -> list[Any]:
        """The actors, in the order of ranks."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, in the order of ranks."""
        return self._worker_names

    @property
    def master_address(self) -> str:
        """Where the ranks meet."""
        return self._meeting_point()[0]

    @property
    def master_port(self) -> str:
        """Port at :attr:`master_address`."""
        return self._meeting_point()[1]

    def _meeting_point(self) -> tuple[str, str]:
        if self._rendezvous is None:
            self._rendezvous = tuple(self.execute_rank_zero_sync("get_master_addr_port"))
        return self._rendezvous

    def _start(self, member: str | None, method: str, calls: Sequence[Call]) -> list[Any]:
        if not self._workers:
            raise WorkerError("this worker group was shut down.")
        self._watch.raise_if_lost(self._asked(method).stage)
        try:
            return self._send(member, method, calls)
        except RayError as error:
            raise self._explained(error, {}, method) from error

    def _send(self, member: str | None, method: str, calls: Sequence[Call]) -> list[Any]:
        shared = _Shared(calls)
        references = []
        for call in calls:
            worker = self._workers[call.rank]
            args, kwargs = shared.place(call)
            if member is None:
                references.append(getattr(worker, method).remote(*args, **kwargs))
            else:
                references.append(worker.invoke.remote(member, method, *args, **kwargs))
        return references

    def _wait(self, references: Sequence[Any], method: str, ranks: Sequence[int]) -> list[Any]:
        limit_s = self._watch.hang_timeout_s
        try:
            return ray.get(list(references), timeout=limit_s)
        except GetTimeoutError as error:
            asked = self._asked(method)
            self._watch.raise_if_lost(asked.stage)
            hung = hang(dict(zip(ranks, references, strict=True)), asked, limit_s or 0)
            self._watch.end(str(hung))
            raise hung from error
        except RayError as error:
            raise self._explained(error, dict(zip(ranks, references, strict=True)), method) from error

    def _explained(self, error: RayError, calls: Mapping[int, Any], method: str) -> WorkerError:
        """What to raise for an error of Ray; if a process is gone, the other ranks of a guarded group end first."""
        asked = self._asked(method)
        self._watch.raise_if_lost(asked.stage)
        explained = explain(error, calls, asked)
        if isinstance(explained, ProcessLostError) and self._watch.is_on:
            self._watch.end(str(explained))
        return explained

    def _asked(self, method: str) -> Asked:
        return Asked(self._title(), method, self._workers)

    def outputs_arrived(self, outputs: Sequence[Any]) -> bool:
        """See :meth:`WorkerGroup.outputs_arrived`."""
        references = list(outputs)
        try:
            _, late = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            if not late:
                ray.get(references)
        except (RayError, ValueError):
            # ValueError: of a Ray that has been started anew since.
            return False
        return not late

    def _title(self) -> str:
        members = self.ray_cls_with_init.members
        return members[self._member].cls.__name__ if self._member else self.ray_cls_with_init.cls.__name__

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the ranks from now on.

        If one dies, the others are ended too: a rank that waits for the dead one in a collective would
        hang for ever. Running calls then fail with a ProcessLostError that names the rank that died first,
        and so do all later ones.
        """
        self._watch.start(every_n_seconds)

    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Watch the ranks from now on: a death (see :meth:`start_worker_aliveness_check`), and calls that hang."""
        self._watch.hang_timeout_s = hang_timeout_s
        self.start_worker_aliveness_check()

    def shutdown(self) -> None:
        """End the workers, detached ones too; views of the same processes end with them.

        Returns when the processes are gone, so that others may move in at once. May be called again, and
        after any of the ranks, or their node, has died.
        """
        self._watch.stop()
        if ray.is_initialized():
            end(self._workers)
        for bundle in self._bundles:
            bundle.occupants -= 1
        self._bundles.clear()
        self._workers.clear()


class _Shared:
    """Arguments that several ranks get are put into the object store once."""

    def __init__(self, calls: Sequence[Call]) -> None:
        counts: dict[int, int] = {}
        for call in calls:
            for value in (*call.args, *call.kwargs.values()):
                counts[id(value)] = counts.get(id(value), 0) + 1
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._references: dict[int, Any] = {}

    def place(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, with references for what is shared."""
        return [self._one(v) for v in call.args], {name: self._one(v) for name, v in call.kwargs.items()}

    def _one(self, value: Any) -> Any:
        if id(value) not in self._repeated or not (isinstance(value, _LARGE) or is_batch(value)):
            return value
        if id(value) not in self._references:
            self._references[id(value)] = ray.put(value)
        return self._references[id(value)]


def _share_of_one(parts: int) -> float:
    # Ray counts in ten-thousandths and rounds to the nearest, by which the last part may not fit.
    return math.floor(1e4 / parts) / 1e4


def _threads(node_id: str, ranks: int) -> int:
    """OpenMP threads of a rank: the node's cores, divided among its ranks."""
    cores = next((int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["NodeID"] == node_id), 1)
    if node_id == ray.get_runtime_context().get_node_id():
        # Ray may have been told of more cores than there are.
        cores = min(cores, os.cpu_count() or 1)
    return max(1, cores // ranks)


def _rendezvous(bundle: Bundle) -> tuple[str, str]:
    """Address of rank 0's node and a free port there."""
    if bundle.node_id == ray.get_runtime_context().get_node_id():
        return _address_and_port()
    there = ray.remote(num_cpus=0)(_address_and_port).options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
    )
    try:
        return ray.get(there.remote(), timeout=MEETING_TIMEOUT_S)
    except RayError as error:
        raise ProcessLostError(
            f"node {bundle.node_id}, where rank 0 was to start, does not answer: {brief(str(error))} {LOST_NODE}"
        ) from error


def _address_and_port() -> tuple[str, str]:
    return ray.util.get_node_ip_address(), str(free_port())
