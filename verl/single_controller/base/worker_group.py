"""The base class of worker groups, whose registered methods run on all ranks like one call."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from verl.base.registry import suggest
from verl.errors import ConfigError, SchemaError, WorkerError
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Execute,
    Registration,
    get_dispatch_pair,
    mesh_of,
)
from verl.single_controller.base.dispatch import CallOutputs, Mesh, PendingOutputs
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, WorkerHost, host_arguments

__all__ = ["ClassWithInitArgs", "Mesh", "WorkerGroup"]


@dataclass(frozen=True)
class RegisteredCall:
    """A registered method; ``member`` names its worker if several share a process."""

    member: str | None
    method: str
    registration: Registration


@dataclass(frozen=True)
class Call:
    """Arguments of a call for one rank."""

    rank: int
    args: Sequence[object]
    kwargs: Mapping[str, object]


class WorkerGroup(ABC):
    """Workers of one class, one per rank, whose registered methods are methods of the group.

    Dispatching arguments and collecting outputs is the same for all controllers; subclasses implement how a call
    reaches a rank (``_start``, ``wait_for``).

    A group of colocated workers has the methods of all of them, prefixed by the worker's name
    (``group.actor_init_model()``); :meth:`spawn` returns one group per worker, without prefixes.

    Args:
        resource_pool: the processes of the ranks; None for workers that exist already.
        ray_cls_with_init: class and constructor arguments of the worker.
    """

    class_with_args: ClassVar[type[ClassWithInitArgs]] = ClassWithInitArgs
    outputs_survive_workers: ClassVar[bool] = False
    """True if outputs of a call remain available after the workers have died."""

    def __init__(self, resource_pool: ResourcePool | None, ray_cls_with_init: ClassWithInitArgs) -> None:
        self.resource_pool = resource_pool
        self.ray_cls_with_init = ray_cls_with_init
        self._member: str | None = None
        self._rpcs: dict[str, RegisteredCall] = {}
        self._meshes: dict[str, Mesh] = {}
        self._views: dict[str, Self] = {}
        self._bind(ray_cls_with_init.cls)
        for name, member in ray_cls_with_init.members.items():
            self._bind(member.cls, name)

    # ---- creation ---------------------------------------------------------------------------------

    @classmethod
    def describe(cls, worker_cls: type, *args: object, **kwargs: object) -> ClassWithInitArgs:
        """Combine a worker class and its constructor arguments into this controller's ``ClassWithInitArgs``."""
        return cls.class_with_args(worker_cls, *args, **kwargs)

    @classmethod
    def colocate(cls, members: Mapping[str, ClassWithInitArgs], fused: bool = False) -> ClassWithInitArgs:
        """Describe named workers that share one process per rank, for the constructor; then call :meth:`spawn`.

        ``fused`` lets the workers of a process access each other with ``get_fused_worker_by_name``.
        """
        return cls.class_with_args(WorkerHost, **host_arguments(members, fused))

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return one group for each of the named colocated workers, all over the same processes."""
        return {name: self._view(name) for name in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """As :meth:`spawn`, for workers made with ``create_colocated_worker_cls_fused`` or ``colocate(fused=True)``."""
        if not self.ray_cls_with_init.fused:
            raise WorkerError(
                "spawn_fused: these workers do not see each other. Use create_colocated_worker_cls_fused."
            )
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Set the groups of :meth:`spawn` as attributes of this one: ``group.actor.init_model()``."""
        for name, group in self.spawn(prefix_set).items():
            if hasattr(type(self), name) or name in self._rpcs:
                raise ConfigError(f"a worker called '{name}' would hide '{type(self).__name__}.{name}'; rename it.")
            setattr(self, name, group)

    def _view(self, name: str) -> Self:
        members = self.ray_cls_with_init.members
        if name not in members:
            raise WorkerError(
                f"no colocated worker '{name}'.{suggest(name, list(members))} There are: {list(members)}."
            )
        if name not in self._views:
            view = copy.copy(self)
            view._member, view._rpcs, view._meshes, view._views = name, {}, {}, {}
            view._bind(members[name].cls, name, prefixed=False)
            self._views[name] = view
        return self._views[name]

    def _bind(self, worker_cls: type, member: str | None = None, prefixed: bool = True) -> None:
        for method in dir(worker_cls):
            registration = getattr(getattr(worker_cls, method, None), MAGIC_ATTR, None)
            if registration is None:
                continue
            name = f"{member}_{method}" if member and prefixed else method
            if hasattr(WorkerGroup, name) or name in self.__dict__:
                raise ConfigError(
                    f"{worker_cls.__name__}.{method}: '{name}' is a method of worker groups. Register it under "
                    "another name."
                )
            self._rpcs[name] = RegisteredCall(member, method, registration)

    # ---- implemented by the controllers ------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> Sequence[object]:
        """The worker or actor handle of each rank."""

    @property
    @abstractmethod
    def worker_names(self) -> list[str]:
        """Name of each rank's worker."""

    @property
    @abstractmethod
    def master_address(self) -> str:
        """Rendezvous address of the ranks."""

    @property
    @abstractmethod
    def master_port(self) -> str:
        """Port at :attr:`master_address`."""

    @abstractmethod
    def _start(self, method: str, calls: Sequence[Call]) -> PendingOutputs[object]:
        """Start a call on some ranks without waiting for it."""

    @abstractmethod
    def wait_for(self, outputs: PendingOutputs[object]) -> list[Any]:
        """Wait for the outputs of a non-blocking call and return their values.

        Raises:
            ProcessLostError: a rank died or hangs.
            WorkerError: on Ray, a method raised.
        """

    def held_bytes_limit(self) -> int:
        """Bytes of outputs that can be held while workers die; 0 if they do not survive workers."""
        return 0

    def wait_until_made(self, outputs: Sequence[object]) -> bool:
        """Wait until a non-blocking call has returned on all ranks, be it with an error; outputs stay where they are.

        Returns:
            whether it did within ``hang_timeout_s``; if not, the next call says which rank hangs.
        """
        return True

    def outputs_arrived(self, outputs: Sequence[object]) -> bool:
        """Return whether a non-blocking call succeeded on all ranks, and its outputs still exist."""
        return True

    def any_returned(self, outputs: Sequence[object]) -> bool:
        """Return whether some rank has returned from a non-blocking call, be it with an error."""
        return True

    @abstractmethod
    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Start to watch the ranks; after one has died, every call of the group fails at once and names that rank."""

    @abstractmethod
    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Start to watch the ranks for deaths and hanging calls.

        If a rank dies, the others are ended at once. If a call takes longer than ``hang_timeout_s``, the stacks of
        all ranks are written to files and all ranks are ended; None sets no limit. In both cases the running call and
        all later ones raise a ProcessLostError.
        """

    @property
    def is_lost(self) -> bool:
        """True if a rank has died or hung, so that all ranks were ended and every call raises a ProcessLostError."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers, including those of spawned groups over the same processes."""

    # ---- calling ----------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._rpcs:
            methods = [] if name.startswith("_") else sorted(self._rpcs)
            raise AttributeError(
                f"'{type(self).__name__}' has no attribute and its workers no registered method '{name}'."
                f"{suggest(name, methods)} Registered: {', '.join(methods)}."
            )
        rpc = self._rpcs[name]
        group = self if rpc.member in (None, self._member) else self._view(rpc.member)
        return functools.partial(group._call, rpc)

    def _call(self, rpc: RegisteredCall, /, *args: object, **kwargs: object) -> object:
        return self._collect(rpc, self._start(rpc.method, self._deal(rpc, args, kwargs)))

    def _collect(self, rpc: RegisteredCall, started: PendingOutputs[object]) -> object:
        """Result of a started call for the driver."""
        outputs = CallOutputs(self.wait_for(started), rpc.method) if rpc.registration.blocking else started
        collect = get_dispatch_pair(rpc.registration.dispatch_mode)["collect_fn"]
        return collect(self, outputs[0] if rpc.registration.execute_mode is Execute.RANK_ZERO else outputs)

    def _deal(self, rpc: RegisteredCall, positional: Sequence[object], named: Mapping[str, object]) -> list[Call]:
        """Split the arguments of a call into one call per rank."""
        dispatch = get_dispatch_pair(rpc.registration.dispatch_mode)["dispatch_fn"]
        try:
            args, kwargs = dispatch(self, *positional, **named)
        except SchemaError as error:
            raise SchemaError(f"{rpc.method}: {error}") from error
        if rpc.registration.execute_mode is Execute.RANK_ZERO:
            return [Call(0, args, kwargs)]
        per_rank: dict[int | str, Sequence[object]] = {}
        for name, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, list | tuple) and len(value) == self.world_size:
                per_rank[name] = value
            else:
                description = (
                    f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
                )
                raise WorkerError(
                    f"{rpc.method}: argument {name!r} has {description}; this mode of dispatch deals element r to "
                    f"rank r, so it must be a list of {self.world_size} elements, one per rank. To give every rank the "
                    "same, register the method with Dispatch.ONE_TO_ALL."
                )
        return [
            Call(
                rank,
                [per_rank[position][rank] for position in range(len(args))],
                {name: per_rank[name][rank] for name in kwargs},
            )
            for rank in range(self.world_size)
        ]

    def num_parts(self, method: str) -> int:
        """Number of parts into which a call of ``method`` divides a batch: the data-parallel size of its mesh.

        For a method that is dispatched without a mesh it is the number of ranks.
        """
        rpc = self._rpcs[method]
        name = mesh_of(rpc.registration.dispatch_mode)
        group = self if rpc.member in (None, self._member) else self._view(rpc.member)
        return self.world_size if name is None else max(group.mesh(name).dp_ranks) + 1

    def mesh(self, mesh_name: str) -> Mesh:
        """Assignment of batch parts to ranks in a mesh; queried from the workers once, then cached."""
        if mesh_name not in self._meshes:
            dp_ranks = self.execute_all_sync("query_dispatch_info", mesh_name)
            collects = self.execute_all_sync("query_collect_info", mesh_name)
            self._meshes[mesh_name] = _checked_mesh(mesh_name, dp_ranks, collects)
        return self._meshes[mesh_name]

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> PendingOutputs[object]:
        """Call any method of every worker with the same arguments, without waiting (see :meth:`wait_for`)."""
        return self._start(method_name, [Call(rank, args, kwargs) for rank in range(self.world_size)])

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """Call any method of every worker with the same arguments; return the outputs in the order of ranks."""
        return self.wait_for(self.execute_all_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call any method of rank 0 without waiting; return a reference to its output."""
        return self._start(method_name, [Call(0, args, kwargs)])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:
        """Call any method of rank 0 and return its output."""
        return self.wait_for(self._start(method_name, [Call(0, args, kwargs)]))[0]

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async


def _checked_mesh(name: str, dp_ranks: list[int], collects: list[bool]) -> Mesh:
    collecting: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(max(dp_ranks) + 1)}
    for rank, (dp_rank, is_collect) in enumerate(zip(dp_ranks, collects, strict=True)):
        if is_collect:
            collecting.setdefault(dp_rank, []).append(rank)
    ambiguous = {dp_rank: ranks for dp_rank, ranks in collecting.items() if len(ranks) != 1}
    if ambiguous:
        raise WorkerError(
            f"mesh '{name}': every data-parallel rank needs exactly one rank that is collected, but (data-parallel "
            f"rank: collected ranks) is {ambiguous}; the ranks registered dp_rank={dp_ranks}, is_collect={collects}."
        )
    return Mesh(dp_ranks, [collecting[dp_rank][0] for dp_rank in sorted(collecting)])
