"""The local controller: one rank in the driver's own process, for debuggers and small machines."""

from verl.single_controller.local.worker_group import LocalResourcePool, LocalResourcePoolManager, LocalWorkerGroup

# verl.trainer uses these names of either controller.
WorkerGroup = LocalWorkerGroup
ResourcePoolManager = LocalResourcePoolManager

__all__ = [
    "LocalResourcePool",
    "LocalResourcePoolManager",
    "LocalWorkerGroup",
    "ResourcePoolManager",
    "WorkerGroup",
]
