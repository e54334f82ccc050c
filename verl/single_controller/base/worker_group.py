"""A group of workers that is called like one object."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from verl.errors import ConfigError, WorkerError
from verl.single_controller.base.colocate import ClassWithInitArgs, WorkerHost, host_arguments
from verl.single_controller.base.decorator import MAGIC_ATTR, Execute, Registration, get_dispatch_pair
from verl.single_controller.base.dispatch import Pending
from verl.single_controller.base.resource_pool import ResourcePool
from verl.utils.registry import suggest

__all__ = ["ClassWithInitArgs", "Mesh", "WorkerGroup"]


@dataclass(frozen=True)
class Mesh:
    """How the ranks of a group divide the rows of a batch."""

    dp_ranks: list[int]
    """For each rank, which part it computes."""
    collecting_ranks: list[int]
    """The rank whose output is used, for each part."""


@dataclass(frozen=True)
class _Rpc:
    """A registered method, and the worker that it belongs to where several share a process."""

    member: str | None
    method: str
    registration: Registration


@dataclass(frozen=True)
class Call:
    """What one rank is asked to do."""

    rank: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class WorkerGroup(ABC):
    """Workers of one class, one per rank, whose registered methods are methods of the group.

    The two controllers differ in how a call reaches a rank (``_start``, ``_wait``); dealing arguments
    and collecting outputs is done here, for both in the same way.

    A group of colocated workers has the methods of all of them, under the worker's name
    (``group.actor_init_model()``); :meth:`spawn` gives one group per worker, without prefixes.

    Args:
        resource_pool: where the ranks live; None for workers that exist already.
        ray_cls_with_init: class and constructor arguments of the worker.
    """

    class_with_args: ClassVar[type[ClassWithInitArgs]] = ClassWithInitArgs
    outlived_by_outputs: ClassVar[bool] = False
    """Whether what a call returned is still there when the workers have died."""

    def __init__(self, resource_pool: ResourcePool | None, ray_cls_with_init: ClassWithInitArgs) -> None:
        self.resource_pool = resource_pool
        self.ray_cls_with_init = ray_cls_with_init
        self._member: str | None = None
        self._rpcs: dict[str, _Rpc] = {}
        self._meshes: dict[str, Mesh] = {}
        self._views: dict[str, Self] = {}
        self._bind(ray_cls_with_init.cls)
        for name, member in ray_cls_with_init.members.items():
            self._bind(member.cls, name)

    # ---- making one -------------------------------------------------------------------------------

    @classmethod
    def describe(cls, worker_cls: type, *args: Any, **kwargs: Any) -> ClassWithInitArgs:
        """A worker class with constructor arguments, in the form that this controller takes."""
        return cls.class_with_args(worker_cls, *args, **kwargs)

    @classmethod
    def colocate(cls, members: Mapping[str, ClassWithInitArgs], fused: bool = False) -> ClassWithInitArgs:
        """Workers that share one process per rank, to be given to the constructor, then :meth:`spawn`.

        Args:
            members: class and constructor arguments of each, by name.
            fused: let the workers of a process find each other (``get_fused_worker_by_name``).
        """
        return cls.class_with_args(WorkerHost, **host_arguments(members, fused))

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """One group for each colocated worker, all over the same processes.

        Args:
            prefix_set: names of the workers.

        Raises:
            WorkerError: a name is unknown, or the workers are not colocated.
        """
        return {name: self._view(name) for name in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """As :meth:`spawn`, for workers that see each other.

        Raises:
            WorkerError: the workers were not made by ``create_colocated_worker_cls_fused``.
        """
        if not self.ray_cls_with_init.fused:
            raise WorkerError(
                "spawn_fused: these workers do not see each other. Use create_colocated_worker_cls_fused."
            )
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the groups of :meth:`spawn` attributes of this one: ``group.actor.init_model()``.

        Raises:
            ConfigError: the group has an attribute of this name already.
        """
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
            self._rpcs[name] = _Rpc(member, method, registration)

    # ---- what a controller implements -------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> list[Any]:
        """The worker of each rank, as the controller holds it."""

    @property
    @abstractmethod
    def worker_names(self) -> list[str]:
        """A name for each rank."""

    @property
    @abstractmethod
    def master_address(self) -> str:
        """Where the ranks meet."""

    @property
    @abstractmethod
    def master_port(self) -> str:
        """Port at :attr:`master_address`."""

    @abstractmethod
    def _start(self, member: str | None, method: str, calls: Sequence[Call]) -> list[Any]:
        """Begin a call on some ranks; a reference for each result."""

    @abstractmethod
    def _wait(self, references: Sequence[Any], method: str, ranks: Sequence[int]) -> list[Any]:
        """The results of :meth:`_start`, when they are there; or the error of the rank that failed first."""

    def outputs_arrived(self, outputs: Sequence[Any]) -> bool:
        """Whether a call that was not waited for has returned on all ranks, without an error, and nothing is lost."""
        return True

    @abstractmethod
    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the ranks from now on; if one dies, every call of the group fails at once, naming it."""

    @abstractmethod
    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Watch the ranks from now on, so that no loss stays unnoticed and none is waited for.

        A rank that dies ends the others at once. A call that takes longer than ``hang_timeout_s`` hangs: the
        stacks of all ranks are written down, and all are ended. Either raises a ProcessLostError, from the
        running call and all later ones.

        Args:
            hang_timeout_s: longest that one call may take; None waits for ever.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; views of the same processes end with them."""

    # ---- calling ----------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def __getattr__(self, name: str) -> Any:
        """A registered method of the workers, as one call."""
        if name.startswith("_") or name not in self._rpcs:
            known = [] if name.startswith("_") else sorted(self._rpcs)
            raise AttributeError(
                f"'{type(self).__name__}' has no attribute and its workers no registered method '{name}'."
                f"{suggest(name, known)} Registered: {', '.join(known)}."
            )
        rpc = self._rpcs[name]
        group = self if rpc.member in (None, self._member) else self._view(rpc.member)
        return functools.partial(group._call, rpc)

    def _call(self, rpc: _Rpc, /, *args: Any, **kwargs: Any) -> Any:
        registration = rpc.registration
        pair = get_dispatch_pair(registration.dispatch_mode)
        dealt_args, dealt_kwargs = pair["dispatch_fn"](self, *args, **kwargs)
        if registration.execute_mode is Execute.RANK_ZERO:
            calls = [Call(0, dealt_args, dealt_kwargs)]
        else:
            calls = self._deal(rpc.method, dealt_args, dealt_kwargs)
        outputs = Pending(self._start(self._member, rpc.method, calls), rpc.method)
        if registration.blocking:
            outputs = self._wait(outputs, rpc.method, [call.rank for call in calls])
        one = registration.execute_mode is Execute.RANK_ZERO
        return pair["collect_fn"](self, outputs[0] if one else outputs)

    def _deal(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        for name, value in [*enumerate(args), *kwargs.items()]:
            if not isinstance(value, list | tuple) or len(value) != self.world_size:
                found = f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
                raise WorkerError(
                    f"{method}: argument {name!r} has {found}; this mode of dispatch deals element r to rank r, "
                    f"so it must be a list of {self.world_size} elements, one per rank. To give every rank the same, "
                    "register the method with Dispatch.ONE_TO_ALL."
                )
        return [
            Call(rank, [value[rank] for value in args], {name: value[rank] for name, value in kwargs.items()})
            for rank in range(self.world_size)
        ]

    def mesh(self, mesh_name: str) -> Mesh:
        """How the ranks divide a batch in a mesh; asked from the workers once.

        Raises:
            WorkerError: the workers do not know the mesh, or what they say does not fit together.
        """
        if mesh_name not in self._meshes:
            dp_ranks = self.execute_all_sync("query_dispatch_info", mesh_name)
            collects = self.execute_all_sync("query_collect_info", mesh_name)
            self._meshes[mesh_name] = _checked_mesh(mesh_name, dp_ranks, collects)
        return self._meshes[mesh_name]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Call any method of every worker with the same arguments, without waiting.

        Returns:
            What :meth:`wait_for` turns into the outputs.
        """
        calls = [Call(rank, args, kwargs) for rank in range(self.world_size)]
        return Pending(self._start(self._member, method_name, calls), method_name)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method of every worker with the same arguments; the outputs in the order of ranks."""
        outputs = self.execute_all_async(method_name, *args, **kwargs)
        return self._wait(outputs, method_name, range(self.world_size))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """The same as :meth:`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method of rank 0, without waiting; a reference to its output."""
        return self._start(self._member, method_name, [Call(0, args, kwargs)])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method of rank 0; its output."""
        return self._wait([self.execute_rank_zero_async(method_name, *args, **kwargs)], method_name, [0])[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The same as :meth:`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def wait_for(self, outputs: Pending[Any]) -> list[Any]:
        """The outputs of a call of all ranks that was not waited for.

        Raises:
            ProcessLostError: a rank died or hangs.
            WorkerError: on Ray, a method raised.
        """
        return self._wait(outputs, outputs.method, outputs.ranks)


def _checked_mesh(name: str, dp_ranks: list[int], collects: list[bool]) -> Mesh:
    collecting: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(max(dp_ranks) + 1)}
    for rank, (dp_rank, is_collect) in enumerate(zip(dp_ranks, collects, strict=True)):
        if is_collect:
            collecting.setdefault(dp_rank, []).append(rank)
    wrong = {dp_rank: ranks for dp_rank, ranks in collecting.items() if len(ranks) != 1}
    if wrong:
        raise WorkerError(
            f"mesh '{name}': every data-parallel rank needs exactly one rank that is collected, but (data-parallel "
            f"rank: collected ranks) is {wrong}; the ranks registered dp_rank={dp_ranks}, is_collect={collects}."
        )
    return Mesh(dp_ranks, [collecting[dp_rank][0] for dp_rank in sorted(collecting)])
