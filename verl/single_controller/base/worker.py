"""What a rank knows about itself."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.errors import WorkerError
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.allocator import keep_freed_memory
from verl.utils.stacks import write_stacks_on_signal

RANK_ENV = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STACKS_FOLDER_ENV = "VERL_STACKS_FOLDER"
"""Where the controller looks for the stacks of a worker that does not answer; not set if it does not look."""


class Worker:
    """One rank of a worker group; subclass it and :func:`register` the methods that the driver calls.

    Where the rank stands among the others is read from the environment, which the controller sets:
    ``WORLD_SIZE``, ``RANK``, ``LOCAL_WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``.
    Workers that share a process share these, and one ``torch.distributed`` group.

    Raises:
        WorkerError: the environment lacks ``WORLD_SIZE`` or ``RANK``.
    """

    def __init__(self) -> None:
        missing = [name for name in ("WORLD_SIZE", "RANK") if name not in os.environ]
        if missing:
            raise WorkerError(
                f"{type(self).__name__}: {' and '.join(missing)} not in the environment, so this worker does not know "
                "its rank. Start it through a worker group (RayWorkerGroup, LocalWorkerGroup) or torchrun."
            )
        if STACKS_FOLDER_ENV in os.environ:
            write_stacks_on_signal(os.environ[STACKS_FOLDER_ENV])
        keep_freed_memory()
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
        """Number of this rank, from 0."""
        return self._rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return self._local_world_size

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node, from 0."""
        return self._local_rank

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port at which the ranks of the group meet.

        Raises:
            WorkerError: the environment has none.
        """
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise WorkerError("MASTER_ADDR and MASTER_PORT are not in the environment; start workers through a group.")
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """``CUDA_VISIBLE_DEVICES`` of this process, ``"not set"`` if it is absent."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    # ---- place in a mesh ------------------------------------------------------------------------

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """File this rank's place in a mesh, for ``make_nd_compute_dataproto_dispatch_fn(mesh_name)``.

        Args:
            mesh_name: as in the decorator.
            dp_rank: which part of a batch this rank computes.
            is_collect: whether its output is the one that is used, among the ranks of equal ``dp_rank``.

        Raises:
            WorkerError: the mesh is filed already, with another place.
        """
        place = (dp_rank, is_collect)
        known = (self._dispatch_info.get(mesh_name, dp_rank), self._collect_info.get(mesh_name, is_collect))
        if known != place:
            raise WorkerError(
                f"mesh '{mesh_name}' is registered with (dp_rank, is_collect)={known}, and now with {place}. "
                "Give the second mesh another name, or replace the first with set_dispatch_collect."
            )
        self.set_dispatch_collect(mesh_name, dp_rank, is_collect)

    def set_dispatch_collect(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """File or replace this rank's place in a mesh, e.g. that of a worker which this one wraps:
        ``self.set_dispatch_collect("actor", **inner.get_dispatch_collect("train"))``.
        """
        self._dispatch_info[mesh_name] = dp_rank
        self._collect_info[mesh_name] = is_collect

    def get_dispatch_collect(self, mesh_name: str) -> dict[str, Any]:
        """``{"dp_rank": ..., "is_collect": ...}`` of this rank in a mesh."""
        return {"dp_rank": self.query_dispatch_info(mesh_name), "is_collect": self.query_collect_info(mesh_name)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_dispatch_info(self, mesh_name: str) -> int:
        """The data-parallel rank of this worker in a mesh."""
        self._check_mesh(mesh_name)
        return self._dispatch_info[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether the output of this worker is used, among those of its data-parallel rank in a mesh."""
        self._check_mesh(mesh_name)
        return self._collect_info[mesh_name]

    def _check_mesh(self, mesh_name: str) -> None:
        if mesh_name not in self._dispatch_info:
            raise WorkerError(
                f"mesh '{mesh_name}' is not known to {type(self).__name__} (known: {sorted(self._dispatch_info)}). "
                f"Call self._register_dispatch_collect_info('{mesh_name}', dp_rank, is_collect) in init_model, and "
                "init_model before any method that computes on it."
            )

    # ---- other workers and functions of the driver ----------------------------------------------

    def get_fused_worker_by_name(self, worker_name: str) -> Worker:
        """The worker called ``worker_name`` in this process, if the workers were fused.

        Raises:
            WorkerError: there is none of this name.
        """
        if worker_name not in self.fused_worker_dict:
            raise WorkerError(
                f"no fused worker '{worker_name}' beside {type(self).__name__} (there are: "
                f"{sorted(self.fused_worker_dict)}). Workers see each other when their class is made by "
                "create_colocated_worker_cls_fused."
            )
        return self.fused_worker_dict[worker_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, part of the batch, ...)`` on every rank; the outputs are joined."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(...)`` in the process of rank 0."""
        return func(*args, **kwargs)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now, and that the system gives to nobody by itself.

    Between this call and the listening of rank 0 lie seconds, in which a port of the system's own range could become
    that of somebody's connection.
    """
    first_given = _first_given_port()
    draw = random.SystemRandom()  # not the generators of the run
    for port in draw.sample(range(_FIRST_PORT, first_given), max(0, min(100, first_given - _FIRST_PORT))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


_FIRST_PORT = 20_000
"""Above the ports of Ray's workers."""


def _first_given_port() -> int:
    """The first of the ports that the system gives to connections and to those who ask for any."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49_152  # of IANA, which other systems follow
