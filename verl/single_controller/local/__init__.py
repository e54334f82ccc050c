"""The local controller: one rank in the driver's own process, for debuggers and small machines."""

from verl.single_controller.base.board import Board
from verl.single_controller.local.worker_group import LocalResourcePool, LocalResourcePoolManager, LocalWorkerGroup

# verl.trainer uses these names of either controller.
WorkerGroup = LocalWorkerGroup
ResourcePoolManager = LocalResourcePoolManager

__all__ = [
    "Board",
    "LocalResourcePool",
    "LocalResourcePoolManager",
    "LocalWorkerGroup",
    "ResourcePoolManager",
    "WorkerGroup",
]
