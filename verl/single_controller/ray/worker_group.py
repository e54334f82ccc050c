"""Worker groups on Ray, with one actor per rank."""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import ConfigError, ProcessLostError, ResourceError, WorkerError
from verl.protocol import DataProto
from verl.protocol.shared import store_all
from verl.protocol.stored import by_reference
from verl.single_controller.base.dispatch import BatchPart, PendingOutputs, is_batch
from verl.single_controller.base.worker import (
    STACKS_FOLDER_ENV,
    ClassWithInitArgs,
    WorkerHost,
    free_port,
    host_arguments,
)
from verl.single_controller.base.worker_group import Call, WorkerGroup
from verl.single_controller.ray.failures import (
    GroupCall,
    WaitingCalls,
    Watchdog,
    explain,
    group_silence_s,
    hang,
    late_start,
    stacks_folder,
)
from verl.single_controller.ray.private import brief, has_started, unwrapped
from verl.single_controller.ray.processes import dead_nodes, end_workers, finished_of
from verl.single_controller.ray.resource_pool import Bundle, RayResourcePool

MEETING_TIMEOUT_S = 60.0  # for the node of rank 0 to find a free port
LOST_NODE = "Places on a node that died do not come back: release() the pool, and make it anew."

# Types that are put into the object store once if several ranks get the same object.
_LARGE = (BatchPart, torch.Tensor, np.ndarray)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain or wrapped by ``ray.remote``), its constructor arguments, and options of its actor."""

    def __init__(self, cls: type | ActorClass, *args: object, **kwargs: object) -> None:
        cls, self.options = unwrapped(cls)
        super().__init__(cls, *args, **kwargs)
        for name, member in self.members.items():
            for key, value in getattr(member, "options", {}).items():
                if self.options.setdefault(key, value) != value:
                    raise ConfigError(
                        f"colocated worker '{name}' has the actor option {key}={value!r}, another one "
                        f"{self.options[key]!r}; they share one process. Give them the same options, or separate "
                        "pools."
                    )

    def update_options(self, options: Mapping[str, object]) -> None:
        """Set actor options as in ``ray.remote(...).options``; they take precedence over the pool's."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Request custom resources of the cluster for each rank."""
        self.options["resources"] = {**self.options.get("resources", {}), **additional_resource}


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """Describe named workers that share one process per rank, for ``RayWorkerGroup(..., ray_cls_with_init=...)``.

    ``group.spawn(prefix_set=class_dict.keys())`` then returns one group for each. The workers may not set different
    values of the same actor option.
    """
    return RayClassWithInitArgs(WorkerHost, **host_arguments(class_dict, fused=False))


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[WorkerHost]:
    """Return the plain class, without arguments, of a process of :func:`create_colocated_worker_cls`."""
    arguments = host_arguments(class_dict, fused=False)

    class WorkerDict(WorkerHost):
        """The workers of one rank."""

        def __init__(self) -> None:
            super().__init__(**arguments)

    return WorkerDict


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """As :func:`create_colocated_worker_cls`; the workers can also access each other (``get_fused_worker_by_name``)."""
    return RayClassWithInitArgs(WorkerHost, **host_arguments(class_dict, fused=True))


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors, one per rank, each in its bundle of a resource pool.

    Args:
        resource_pool: the pool whose resources the ranks use.
        ray_cls_with_init: the worker's class and constructor arguments.
        bin_pack: put all ranks of a placement group on one node; otherwise only prefer to.
        name_prefix: first part of the actors' names; random by default, so that names of several runs differ.
        detached: keep the workers after this program has ended; :meth:`from_detached` finds them by name.
        worker_names: names of workers that exist already, instead of a pool.
        worker_handles: handles of workers that exist already, instead of a pool.
        ray_wait_register_center_timeout: seconds in which all constructors must return.
        device_name: ``"cuda"`` or ``"cpu"``; must be the pool's, which is the default.

    Raises:
        ResourceError: the pool does not fit the cluster, is full, or is not detached while the workers are.
        ProcessLostError: a process died or hangs in its constructor, or a node of the pool is gone.
        WorkerError: a constructor raised, or its process was not started in time.
    """

    class_with_args = RayClassWithInitArgs
    outputs_survive_workers = True

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str | None = None,
    ) -> None:
        if ray_cls_with_init is None:
            raise WorkerError("RayWorkerGroup needs ray_cls_with_init: RayClassWithInitArgs(cls, ...).")
        super().__init__(resource_pool, ray_cls_with_init)
        self.name_prefix = name_prefix or uuid.uuid4().hex[:8]
        self._workers: list[ActorHandle] = list(worker_handles or [])
        self._watchdog = Watchdog(self._workers)
        self._ordering = threading.Lock()
        self._waiting_calls = WaitingCalls()
        self._worker_names = list(worker_names or [])
        self._bundles: list[Bundle] = []
        self._rendezvous: tuple[str, str] | None = None
        if resource_pool is None:
            self._attach()
        else:
            resource_pool.check_device(device_name)
            self._create(resource_pool, resource_pool.bundles("STRICT_PACK" if bin_pack else "PACK"), detached)
            self._wait_for_constructors(ray_wait_register_center_timeout)

    # ---- creation ---------------------------------------------------------------------------------

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Return a group over running workers, e.g. those of a program that created them with ``detached=True``.

        Needs the running group's ``worker_names`` or its ``workers`` as ``worker_handles``, in the order of ranks. Of
        ``ray_cls_with_init`` only the class is used; ``name_prefix`` has no effect on running workers.
        ``kwargs`` are further arguments of the class.
        """
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    def _attach(self) -> None:
        if not self._workers:
            for name in self._worker_names:
                try:
                    self._workers.append(ray.get_actor(name))
                except ValueError as error:
                    raise WorkerError(
                        f"no running worker is called '{name}'. Detached workers are only visible in the Ray "
                        "namespace in which they were created: ray.init(namespace=...)."
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
        actor_cls: Any = ray.remote(cls_with_args.cls)
        ranks_on_node: dict[str, list[int]] = {}
        for rank, bundle in enumerate(bundles):
            ranks_on_node.setdefault(bundle.node_id, []).append(rank)
        threads = _threads(ranks_on_node)
        for rank, bundle in enumerate(bundles):
            options = self._options(rank, bundle, ranks_on_node[bundle.node_id], threads[bundle.node_id], pool)
            options["lifetime"] = "detached" if detached else None
            self._workers.append(actor_cls.options(**options).remote(*cls_with_args.args, **cls_with_args.kwargs))
            self._worker_names.append(options["name"])

    def _options(
        self, rank: int, bundle: Bundle, on_node: list[int], threads: int, pool: RayResourcePool
    ) -> dict[str, Any]:
        # Ray rounds shares to the nearest 1e-4. Rounded down here, as otherwise the last group may not fit.
        share = math.floor(1e4 / pool.max_colocate_count) / 1e4
        environment = {
            "WORLD_SIZE": len(self._bundles),
            "RANK": rank,
            "LOCAL_WORLD_SIZE": len(on_node),
            "LOCAL_RANK": on_node.index(rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            STACKS_FOLDER_ENV: stacks_folder(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads,
        }
        actor_options = getattr(self.ray_cls_with_init, "options", {})
        runtime = actor_options.get("runtime_env", {})
        variables = {name: str(value) for name, value in environment.items()} | runtime.get("env_vars", {})
        return {
            "name": f"{self.name_prefix}_{self.ray_cls_with_init.cls.__name__}_{rank}",
            "num_cpus": share,
            "num_gpus": share if pool.use_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            **actor_options,
            "runtime_env": {**runtime, "env_vars": variables},
        }

    def _wait_for_constructors(self, timeout_s: float) -> None:
        ready = {rank: has_started(worker) for rank, worker in enumerate(self._workers)}
        call = self._described("__init__")
        try:
            # Raises as soon as one constructor fails; the others may wait for that rank and never return.
            ray.get(list(ready.values()), timeout=timeout_s)
        except RayError as error:
            late = isinstance(error, GetTimeoutError)
            explained = late_start(ready, call, timeout_s) if late else explain(error, ready, call)
            self.shutdown()
            raise explained from error

    # ---- interface of WorkerGroup -----------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors, in the order of ranks."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, in the order of ranks."""
        return self._worker_names

    @property
    def master_address(self) -> str:
        """Rendezvous address of the ranks."""
        return self._host_and_port()[0]

    @property
    def master_port(self) -> str:
        """Port at :attr:`master_address`."""
        return self._host_and_port()[1]

    def _host_and_port(self) -> tuple[str, str]:
        if self._rendezvous is None:
            self._rendezvous = tuple(self.execute_rank_zero_sync("get_master_addr_port"))
        return self._rendezvous

    def _start(self, method: str, calls: Sequence[Call]) -> PendingOutputs[object]:
        if not self._workers:
            raise WorkerError("this worker group was shut down.")
        self._watchdog.raise_if_lost(self._described(method).stage)
        shared, references = _Shared(calls), []
        try:
            _store_shared(calls)
            # Calls of two threads come in the same order on all ranks, as collectives need them to.
            with by_reference(), self._ordering:
                call_number = self._waiting_calls.new_number()
                for call in calls:
                    worker = self._workers[call.rank]
                    args, kwargs = shared.place(call)
                    if self._member is None:
                        references.append(getattr(worker, method).remote(*args, **kwargs))
                    else:
                        references.append(worker.invoke.remote(self._member, method, *args, **kwargs))
        except RayError as error:
            raise self._explained(error, {}, method) from error
        return PendingOutputs(references, method, [call.rank for call in calls], call_number)

    def wait_for(self, outputs: PendingOutputs[Any]) -> list[Any]:
        """See :meth:`WorkerGroup.wait_for`."""
        try:
            values = self._values(outputs)
        except GetTimeoutError as error:
            raise self.end_hanging(outputs) from error
        except RayError as error:
            by_rank = dict(zip(outputs.ranks, outputs, strict=True))
            raise self._explained(error, by_rank, outputs.method) from error
        for value, reference in zip(values, outputs, strict=True):
            if isinstance(value, DataProto):
                value.remember(reference)
        return values

    def _values(self, outputs: PendingOutputs[Any]) -> list[Any]:
        limit_s = left_s = self.hang_timeout_s
        with self._waiting_calls.waiting(outputs.call_number):
            while True:
                try:
                    return ray.get(list(outputs), timeout=left_s)
                except GetTimeoutError:
                    assert limit_s is not None
                    left_s = self._waiting_calls.left_s(outputs.call_number, limit_s)
                    if left_s <= 0:
                        left_s = limit_s - group_silence_s(self._workers)
                    if left_s <= 0:
                        raise

    @property
    def hang_timeout_s(self) -> float | None:
        """Seconds after which a call without an answer counts as a lost process; None waits without limit."""
        return self._watchdog.hang_timeout_s

    @property
    def is_lost(self) -> bool:
        """See :attr:`WorkerGroup.is_lost`."""
        return self._watchdog.is_lost

    def end_hanging(self, outputs: PendingOutputs[Any]) -> ProcessLostError:
        """End the ranks, because a call has hung for ``hang_timeout_s``; return the error that says where they are.

        Raises:
            ProcessLostError: it hung because a rank is lost.
        """
        call = self._described(outputs.method)
        self._watchdog.raise_if_lost(call.stage)
        hung = hang(dict(zip(outputs.ranks, outputs, strict=True)), call, self.hang_timeout_s or 0)
        self._watchdog.end(str(hung))
        return hung

    def _explained(self, error: RayError, outputs: Mapping[int, ObjectRef], method: str) -> WorkerError:
        """Convert an error of Ray; if a process is lost and the group is watched, end the other ranks first."""
        call = self._described(method)
        self._watchdog.raise_if_lost(call.stage)
        explained = explain(error, outputs, call)
        if isinstance(explained, ProcessLostError) and self._watchdog.is_on:
            self._watchdog.end(str(explained))
        return explained

    def _described(self, method: str) -> GroupCall:
        cls = (self.ray_cls_with_init.members[self._member] if self._member else self.ray_cls_with_init).cls
        return GroupCall(cls.__name__, method, self._workers)

    def held_bytes_limit(self) -> int:
        """See :meth:`WorkerGroup.held_bytes_limit`: the size of the object stores of all nodes."""
        return int(ray.cluster_resources().get("object_store_memory", 0))

    def wait_until_made(self, outputs: Sequence[Any]) -> bool:
        """See :meth:`WorkerGroup.wait_until_made`."""
        references = list(outputs)
        return len(finished_of(references, self._watchdog.hang_timeout_s, fetch_local=False)) == len(references)

    def outputs_arrived(self, outputs: Sequence[Any]) -> bool:
        """See :meth:`WorkerGroup.outputs_arrived`."""
        references = list(outputs)
        try:
            if len(finished_of(references, 0, fetch_local=False)) < len(references):
                return False
            ray.get(references, timeout=self._watchdog.hang_timeout_s)  # from another node, it may not arrive
        except (RayError, ProcessLostError, ValueError):
            # ValueError: the references are of a Ray that was restarted since.
            return False
        return True

    def any_returned(self, outputs: Sequence[Any]) -> bool:
        """See :meth:`WorkerGroup.any_returned`."""
        return bool(finished_of(list(outputs), 0, fetch_local=False))

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Start to watch the ranks.

        If one dies, the others are ended too, because a rank that waits for the dead one in a collective would never
        return. Running and later calls then raise a ProcessLostError that names the rank that died first.
        """
        self._watchdog.start(every_n_seconds)

    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Start to watch the ranks for deaths (see :meth:`start_worker_aliveness_check`) and hanging calls."""
        self._watchdog.hang_timeout_s = hang_timeout_s
        self.start_worker_aliveness_check()

    def shutdown(self) -> None:
        """End the workers, including detached ones and those of spawned groups over the same processes.

        Returns when the processes are gone, so that their resources can be used at once. May be called repeatedly and
        after ranks or nodes have died.
        """
        self._watchdog.stop()
        if ray.is_initialized():
            end_workers(self._workers)
        for bundle in self._bundles:
            bundle.occupants -= 1
        self._bundles.clear()
        self._workers.clear()


class _Shared:
    """Puts large arguments that several ranks get into the object store once."""

    def __init__(self, calls: Sequence[Call]) -> None:
        counts: dict[int, int] = {}
        for call in calls:
            for value in (*call.args, *call.kwargs.values()):
                counts[id(value)] = counts.get(id(value), 0) + 1
        self._repeated = {key for key, count in counts.items() if count > 1}
        self._references: dict[int, ObjectRef] = {}

    def place(self, call: Call) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of a call, with object references in place of shared large ones."""
        return [self._one(v) for v in call.args], {name: self._one(v) for name, v in call.kwargs.items()}

    def _one(self, value: object) -> object:
        if id(value) not in self._repeated or not (isinstance(value, _LARGE) or is_batch(value)):
            return value
        if id(value) not in self._references:
            self._references[id(value)] = ray.put(value)
        return self._references[id(value)]


def _store_shared(calls: Sequence[Call]) -> None:
    """Put tensors that rows share into the object store, each once in a run; calls then carry references to them."""
    for call in calls:
        for value in (*call.args, *call.kwargs.values()):
            rows = value.rows if isinstance(value, BatchPart) else value
            if isinstance(rows, DataProto):
                store_all(rows.non_tensor_batch.values(), ray.put)


def _threads(ranks_on_node: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return for each node the number of OpenMP threads of a rank: the node's cores divided by its ranks."""
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    if here in cores:
        # num_cpus of ray.init may be more than the node has.
        cores[here] = min(cores[here], os.cpu_count() or 1)
    return {node: max(1, cores.get(node, 1) // len(ranks)) for node, ranks in ranks_on_node.items()}


def _rendezvous(bundle: Bundle) -> tuple[str, str]:
    """Address of rank 0's node and a free port on it."""
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
