"""The controller over Ray: one actor per rank, on one machine or many."""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "trainer.controller=ray needs Ray, which is not installed: pip install 'verl[ray]'. Or run one rank without "
        "it: trainer.controller=local."
    ) from error

from verl.single_controller.ray.colocate import create_colocated_worker_cls, create_colocated_worker_cls_fused
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.session import run_task
from verl.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup

# What verl.trainer asks a controller for, under the same names in verl.single_controller.local.
WorkerGroup = RayWorkerGroup
pool_manager = ResourcePoolManager

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "merge_resource_pool",
    "pool_manager",
    "run_task",
    "split_resource_pool",
]
