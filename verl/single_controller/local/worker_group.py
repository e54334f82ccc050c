"""Worker groups of one rank in the driver's own process: calls are direct, and exceptions keep their traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from verl.errors import ResourceError, WorkerError
from verl.protocol import private_copy
from verl.single_controller.base.decorator import noting_rank, undecorated
from verl.single_controller.base.dispatch import PendingOutputs, receive, remove_padding
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, Worker, WorkerHost, free_port
from verl.single_controller.base.worker_group import Call, RegisteredCall, WorkerGroup
from verl.single_controller.local.limit import CallLimit


class LocalResourcePool(ResourcePool):
    """Pool of one rank in the current process."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        super().__init__([1] if process_on_nodes is None else process_on_nodes, max_colocate_count, n_gpus_per_node)
        if self.world_size != 1:
            raise ResourceError(
                f"the local controller runs one rank, in this process, not {self.world_size} (processes on nodes: "
                f"{self.store}). Use one (n_gpus_per_node=1, nnodes=1), or use Ray for more ranks (controller=ray)."
            )


class LocalResourcePoolManager(PoolManager):
    """Pools of the local controller, each of which is the current process."""

    pool_cls = LocalResourcePool


class LocalWorkerGroup(WorkerGroup):
    """Worker group of one rank in this process, with the interface of ``RayWorkerGroup``.

    All local groups of a process share one environment (rank 0 of 1) and one ``torch.distributed`` process group,
    which the workers create. Arguments and outputs are dispatched as on Ray. Batches, tensors and arrays are copied,
    so that in-place writes of worker and driver stay separate as on Ray; everything else is passed by reference.
    A non-blocking call has already run when it returns. ``device_name`` is ignored: the worker chooses its device; so
    is ``ray_wait_register_center_timeout``, because the constructor runs in this call.

    Raises:
        ResourceError: the pool or ``WORLD_SIZE`` in the environment has several ranks.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        device_name: str | None = None,
        ray_wait_register_center_timeout: float = 300,
    ) -> None:
        if ray_cls_with_init is None:
            raise WorkerError("LocalWorkerGroup needs ray_cls_with_init: LocalWorkerGroup.describe(cls, ...).")
        pool = LocalResourcePool() if resource_pool is None else resource_pool
        super().__init__(LocalResourcePool(pool.store), ray_cls_with_init)
        set_environment()
        self._limit = CallLimit()
        self._workers: list[Worker] = [ray_cls_with_init()]

    @property
    def workers(self) -> list[object]:
        """The worker; for colocated workers their host, in a spawned group the group's own worker."""
        return [self._worker()] if self._workers else []

    @property
    def worker_names(self) -> list[str]:
        """Class name and process id of the worker."""
        return [f"{type(worker).__name__}_{os.getpid()}" for worker in self.workers]

    @property
    def master_address(self) -> str:
        """``MASTER_ADDR`` of this process."""
        return os.environ["MASTER_ADDR"]

    @property
    def master_port(self) -> str:
        """``MASTER_PORT`` of this process."""
        return os.environ["MASTER_PORT"]

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Do nothing: the worker runs in the driver's process and cannot die alone."""

    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Limit the duration of calls; see :class:`CallLimit` for which calls it can interrupt."""
        self._limit.hang_timeout_s = hang_timeout_s

    def limit_silence(self, silent_s: Callable[[], float]) -> AbstractContextManager[None]:
        """Limit how long calls in a block are silent, not how long they take; see :meth:`CallLimit.limit_silence`."""
        return self._limit.limit_silence(silent_s)

    def shutdown(self) -> None:
        """Drop the reference to the worker."""
        self._workers.clear()

    def _start(self, method: str, calls: Sequence[Call]) -> PendingOutputs[object]:
        worker, outputs = self._worker(), []
        for call in calls:
            args, kwargs = map(private_copy, call.args), {k: private_copy(v) for k, v in call.kwargs.items()}
            with self._limit.applied_to(f"{type(worker).__name__}.{method}"):
                outputs.append(private_copy(getattr(worker, method)(*args, **kwargs)))
        return PendingOutputs(outputs, method, range(len(outputs)))

    def _call(self, rpc: RegisteredCall, /, *args: object, **kwargs: object) -> object:
        # Does the work of the @register wrapper itself, which keeps stack traces between driver and worker short.
        worker, outputs, materialize = self._worker(), [], rpc.registration.materialize_futures
        for call in self._deal(rpc, args, kwargs):
            copies = tuple(map(private_copy, call.args)), {k: private_copy(v) for k, v in call.kwargs.items()}
            with self._limit.applied_to(f"{type(worker).__name__}.{rpc.method}"), noting_rank(worker, rpc.method):
                (positional, named), padded = receive(*copies, materialize)
                output = undecorated(getattr(worker, rpc.method))(*positional, **named)
            outputs.append(private_copy(remove_padding(output, padded)))
        return self._collect(rpc, PendingOutputs(outputs, rpc.method, range(len(outputs))))

    def wait_for(self, outputs: PendingOutputs[object]) -> list[object]:
        """Return the outputs; the call has run already."""
        return list(outputs)

    def _worker(self) -> Worker:
        if not self._workers:
            raise WorkerError("this worker group was shut down.")
        host = self._workers[0]
        return host.workers[self._member] if self._member is not None and isinstance(host, WorkerHost) else host


def set_environment() -> None:
    """Set the environment variables of rank 0 of 1, unless they are set already.

    Raises:
        ResourceError: the environment describes several ranks, as torchrun sets it.
    """
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        if os.environ.setdefault(name, value) != value:
            raise ResourceError(
                f"the local controller runs one rank, but the environment says {name}={os.environ[name]}. Start it "
                "without torchrun, or use Ray (controller=ray)."
            )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
