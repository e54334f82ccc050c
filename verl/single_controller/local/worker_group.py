"""Workers in the driver's own process: a call is a call, and an exception keeps its traceback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from verl.errors import ResourceError, WorkerError
from verl.protocol import private_copy
from verl.single_controller.base.colocate import ClassWithInitArgs
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import free_port
from verl.single_controller.base.worker_group import Call, WorkerGroup
from verl.single_controller.local.limit import CallLimit
from verl.single_controller.local.resource_pool import LocalResourcePool


class LocalWorkerGroup(WorkerGroup):
    """One rank in this process, under the contract of ``RayWorkerGroup``.

    All local groups of a process share one environment (rank 0 of 1) and one ``torch.distributed``
    group, which the workers make. Arguments and outputs go through the same dispatch as on Ray. Batches,
    tensors and arrays are copied, so that a write of the worker or of the driver stays where it is made, as
    on Ray; all else is passed by reference. A call that is not waited for has run when it returns.

    Args:
        resource_pool: a pool of one process; None makes it.
        ray_cls_with_init: the worker's class and constructor arguments.
        device_name: ``"cuda"`` or ``"cpu"``; taken for the sake of the contract, the worker chooses.

    Raises:
        ResourceError: several ranks are asked for, by the pool or by ``WORLD_SIZE`` in the environment.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        device_name: str | None = None,
    ) -> None:
        if ray_cls_with_init is None:
            raise WorkerError("LocalWorkerGroup needs ray_cls_with_init: LocalWorkerGroup.describe(cls, ...).")
        pool = LocalResourcePool() if resource_pool is None else resource_pool
        super().__init__(LocalResourcePool(pool.store), ray_cls_with_init)
        set_environment()
        self._limit = CallLimit()
        self._workers: list[Any] = [ray_cls_with_init()]

    @property
    def workers(self) -> list[Any]:
        """The worker itself; for colocated workers their host, or in a spawned group the group's own."""
        return [self._target(self._member)] if self._workers else []

    @property
    def worker_names(self) -> list[str]:
        """Class and process number."""
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
        """Nothing to watch: the worker lives as long as its driver."""

    def guard(self, hang_timeout_s: float | None = None) -> None:
        """Limit the time that a call may take; what that can end, and what not, says :class:`CallLimit`."""
        self._limit.hang_timeout_s = hang_timeout_s

    def shutdown(self) -> None:
        """Let go of the worker."""
        self._workers.clear()

    def _target(self, member: str | None) -> Any:
        if not self._workers:
            raise WorkerError("this worker group was shut down.")
        return self._workers[0] if member is None else self._workers[0].workers[member]

    def _start(self, member: str | None, method: str, calls: Sequence[Call]) -> list[Any]:
        worker = self._target(member)
        outputs = []
        for call in calls:
            args, kwargs = map(private_copy, call.args), {k: private_copy(v) for k, v in call.kwargs.items()}
            with self._limit.over(f"{type(worker).__name__}.{method}"):
                outputs.append(private_copy(getattr(worker, method)(*args, **kwargs)))
        return outputs

    def _wait(self, references: Sequence[Any], method: str, ranks: Sequence[int]) -> list[Any]:
        return list(references)


def set_environment() -> None:
    """Describe rank 0 of 1 in ``os.environ``; what the user has set stays.

    Raises:
        ResourceError: a launcher has started several ranks.
    """
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        if os.environ.setdefault(name, value) != value:
            raise ResourceError(
                f"trainer.controller=local runs one rank, but the environment says {name}={os.environ[name]}. Start it "
                "without torchrun, or use trainer.controller=ray."
            )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
