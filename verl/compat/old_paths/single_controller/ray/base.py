"""Public path of the Ray controller, :mod:`verl.single_controller.ray`."""

from verl.single_controller.ray import RayClassWithInitArgs as RayClassWithInitArgs
from verl.single_controller.ray import RayResourcePool as RayResourcePool
from verl.single_controller.ray import RayWorkerGroup as RayWorkerGroup
from verl.single_controller.ray import ResourcePoolManager as ResourcePoolManager
from verl.single_controller.ray import SubRayResourcePool as SubRayResourcePool
from verl.single_controller.ray import create_colocated_worker_cls as create_colocated_worker_cls
from verl.single_controller.ray import create_colocated_worker_cls_fused as create_colocated_worker_cls_fused
from verl.single_controller.ray import create_colocated_worker_raw_cls as create_colocated_worker_raw_cls
from verl.single_controller.ray import merge_resource_pool as merge_resource_pool
from verl.single_controller.ray import split_resource_pool as split_resource_pool
