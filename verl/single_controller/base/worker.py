"""The base class of workers, and the host that holds several workers in one process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from verl.errors import WorkerError
from verl.single_controller.base.call_times import CallTime, take_call_times
from verl.single_controller.base.decorator import Dispatch, register
from verl.supervision.stacks import write_stacks_on_signal

# Folder into which a worker writes its stack traces when the controller asks for them; only the Ray controller sets it.
STACKS_FOLDER_ENV = "VERL_STACKS_FOLDER"

Coordinate = TypeVar("Coordinate", int, bool)


class Worker:
    """One rank of a worker group; subclass it and :func:`register` the methods that the driver calls.

    Rank and rendezvous are read from the environment, which the controller sets:
    ``WORLD_SIZE``, ``RANK``, ``LOCAL_WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``.
    Workers in the same process share these and the ``torch.distributed`` process group.

    Args:
        cuda_visible_devices: the devices of this process, as in ``CUDA_VISIBLE_DEVICES``; by default the controller's
            choice.
    """

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        missing = [name for name in ("WORLD_SIZE", "RANK") if name not in os.environ]
        if missing:
            raise WorkerError(
                f"{type(self).__name__}: {' and '.join(missing)} not in the environment, so this worker does not know "
                "its rank. Start it through a worker group (RayWorkerGroup, LocalWorkerGroup) or torchrun."
            )
        if STACKS_FOLDER_ENV in os.environ:
            write_stacks_on_signal(os.environ[STACKS_FOLDER_ENV])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._rank = int(os.environ["RANK"])
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        self._local_rank = int(os.environ.get("LOCAL_RANK", self._rank))
        self._dispatch_info: dict[str, int] = {}
        self._collect_info: dict[str, bool] = {}
        self.fused_worker_dict: dict[str, Worker] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self._world_size

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""
        return self._rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return self._local_world_size

    @property
    def local_rank(self) -> int:
        """Index of this rank on its node, from 0."""
        return self._local_rank

    def get_master_addr_port(self) -> tuple[str, str]:
        """Rendezvous address and port of the group's ranks."""
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise WorkerError("MASTER_ADDR and MASTER_PORT are not in the environment; start workers through a group.")
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """``CUDA_VISIBLE_DEVICES`` of this process, or ``"not set"``."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    # ---- place in a mesh ------------------------------------------------------------------------

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this rank's coordinates in a mesh, for ``make_nd_compute_dataproto_dispatch_fn(mesh_name)``.

        Args:
            mesh_name: name in the decorator.
            dp_rank: index of the batch part that this rank computes.
            is_collect: use the output of this rank, among the ranks with the same ``dp_rank``.
        """
        mesh_position = (dp_rank, is_collect)
        earlier = (self._dispatch_info.get(mesh_name, dp_rank), self._collect_info.get(mesh_name, is_collect))
        if earlier != mesh_position:
            raise WorkerError(
                f"mesh '{mesh_name}' is registered with (dp_rank, is_collect)={earlier}, and now with {mesh_position}. "
                "Give the second mesh another name, or replace the first with set_dispatch_collect."
            )
        self.set_dispatch_collect(mesh_name, dp_rank, is_collect)

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: int | Mapping[str, int], collect_dp_rank: bool | Mapping[str, bool]
    ) -> None:
        """Set or replace this rank's coordinates in a mesh, e.g. with those of a wrapped worker that has one mesh:
        ``self.set_dispatch_collect("actor", **inner.get_dispatch_collect())``.
        """
        self._dispatch_info[mesh_name] = _of_one_mesh(dispatch_dp_rank)
        self._collect_info[mesh_name] = _of_one_mesh(collect_dp_rank)

    def get_dispatch_collect(self, mesh_name: str | None = None) -> dict[str, dict[str, object]]:
        """Coordinates of this rank by mesh, in all meshes or in one: ``{"dispatch_dp_rank": {"actor": 0},
        "collect_dp_rank": {"actor": True}}``.
        """
        meshes = list(self._dispatch_info) if mesh_name is None else [mesh_name]
        return {
            "dispatch_dp_rank": {mesh: self.query_dispatch_info(mesh) for mesh in meshes},
            "collect_dp_rank": {mesh: self.query_collect_info(mesh) for mesh in meshes},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_dispatch_info(self, mesh_name: str) -> int:
        """Data-parallel rank of this worker in a mesh."""
        self._check_mesh(mesh_name)
        return self._dispatch_info[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this worker provides the output of its data-parallel rank in a mesh."""
        self._check_mesh(mesh_name)
        return self._collect_info[mesh_name]

    def _check_mesh(self, mesh_name: str) -> None:
        if mesh_name not in self._dispatch_info:
            raise WorkerError(
                f"mesh '{mesh_name}' is not known to {type(self).__name__} (known: {sorted(self._dispatch_info)}). "
                f"Call self._register_dispatch_collect_info('{mesh_name}', dp_rank, is_collect) in init_model, and "
                "init_model before any method that computes on it."
            )

    # ---- what the driver records ----------------------------------------------------------------

    def take_call_times(self) -> list[CallTime]:
        """Return the calls that this process answered since the last take, of all workers in it."""
        return take_call_times()

    # ---- other workers and functions of the driver ----------------------------------------------

    def get_fused_worker_by_name(self, worker_name: str) -> Worker:
        """Return another worker of this process, if the workers were fused."""
        if worker_name not in self.fused_worker_dict:
            raise WorkerError(
                f"{type(self).__name__} is not fused with a worker '{worker_name}' (fused are: "
                f"{sorted(self.fused_worker_dict)}). Create the class of both with "
                "create_colocated_worker_cls_fused."
            )
        return self.fused_worker_dict[worker_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call ``func(worker, part of the batch, ...)`` on every rank and concatenate the outputs."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call ``func(...)`` in the process of rank 0."""
        return func(*args, **kwargs)


WorkerType = type[Worker]
"""Type of the worker class of a role."""


class ClassWithInitArgs:
    """A class and its constructor arguments; calling it creates the object in the current process."""

    def __init__(self, cls: type, *args: object, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        """Create the object."""
        return self.cls(*self.args, **self.kwargs)

    @property
    def members(self) -> Mapping[str, ClassWithInitArgs]:
        """Colocated workers by name; empty for a single worker."""
        return self.kwargs["members"] if self.cls is WorkerHost else {}

    @property
    def fused(self) -> bool:
        """True if the colocated workers can access each other."""
        return self.cls is WorkerHost and self.kwargs["fused"]


class WorkerHost(Worker):
    """Worker that holds one worker for each role in the same process.

    Args:
        members: the workers by name; they are created in this order.
        fused: let the workers access each other with ``get_fused_worker_by_name``.
    """

    def __init__(self, members: Mapping[str, ClassWithInitArgs], fused: bool) -> None:
        super().__init__()
        self.workers: dict[str, Worker] = {name: make() for name, make in members.items()}
        if fused:
            for worker in self.workers.values():
                worker.fused_worker_dict = self.workers

    def invoke(self, member: str, method: str, *args: object, **kwargs: object) -> object:
        """Call a method of one of the workers."""
        return getattr(self.workers[member], method)(*args, **kwargs)


class HostArguments(TypedDict):
    """Constructor arguments of a :class:`WorkerHost`."""

    members: dict[str, ClassWithInitArgs]
    fused: bool


def host_arguments(members: Mapping[str, ClassWithInitArgs], fused: bool) -> HostArguments:
    """Check and return the arguments of a :class:`WorkerHost`."""
    if not members:
        raise WorkerError("colocated workers: there are none. Give a dict from name to class with arguments.")
    for name, member in members.items():
        if not issubclass(member.cls, Worker):
            raise WorkerError(f"colocated worker '{name}': {member.cls.__name__} is no subclass of Worker.")
    return {"members": dict(members), "fused": fused}


def free_port() -> int:
    """Find a free TCP port of this machine, preferably outside the range of ephemeral ports."""
    # Rank 0 listens seconds after this call. By then the system may have given an ephemeral port to a connection.
    first_given = _first_given_port()
    draw = random.SystemRandom()  # leaves the seeded generators of the run unchanged
    for port in draw.sample(range(_FIRST_PORT, first_given), max(0, min(100, first_given - _FIRST_PORT))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


_FIRST_PORT = 20_000  # above the ports of Ray's workers


def _first_given_port() -> int:
    """Start of the system's range of ephemeral ports."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49_152  # IANA's start of the range, which systems other than Linux use


def _of_one_mesh(value: Coordinate | Mapping[str, Coordinate]) -> Coordinate:
    if not isinstance(value, Mapping):
        return value
    if len(value) != 1:
        raise WorkerError(
            f"a mesh takes the coordinates of one other mesh, got those of {sorted(value)}. Name it: "
            "get_dispatch_collect(mesh_name)."
        )
    return next(iter(value.values()))
