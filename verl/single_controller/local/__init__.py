"""The controller that needs no other process: one rank, in this one. For debuggers and small machines."""

from verl.single_controller.local.resource_pool import LocalResourcePool, LocalResourcePoolManager
from verl.single_controller.local.worker_group import LocalWorkerGroup

# What verl.trainer asks a controller for, under the same names in verl.single_controller.ray.
WorkerGroup = LocalWorkerGroup
ResourcePoolManager = pool_manager = LocalResourcePoolManager

__all__ = [
    "LocalResourcePool",
    "LocalResourcePoolManager",
    "LocalWorkerGroup",
    "ResourcePoolManager",
    "WorkerGroup",
    "pool_manager",
]
