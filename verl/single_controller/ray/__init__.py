"""The Ray controller: one actor per rank, on one or many machines."""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "verl.single_controller.ray needs Ray, which is not installed: pip install 'ray>=2.60,<2.62'. Or run one rank "
        "without it: verl.single_controller.local, controller=local."
    ) from error

from verl.single_controller.ray.board import RayBoard
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.session import ray_session, run_task, start_task
from verl.single_controller.ray.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)

# verl.trainer uses these names and ResourcePoolManager of either controller.
WorkerGroup = RayWorkerGroup
Board = RayBoard

__all__ = [
    "Board",
    "RayBoard",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "ray_session",
    "run_task",
    "split_resource_pool",
    "start_task",
]
