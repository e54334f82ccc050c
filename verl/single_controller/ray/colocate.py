"""Several workers in one actor: a class with arguments made of others."""

from __future__ import annotations

from collections.abc import Mapping

from verl.single_controller.base.colocate import ClassWithInitArgs, WorkerHost, host_arguments
from verl.single_controller.ray.worker_group import RayClassWithInitArgs


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """Workers that share one process per rank, for ``RayWorkerGroup(..., ray_cls_with_init=...)``.

    ``group.spawn(prefix_set=class_dict.keys())`` then gives one group for each.

    Args:
        class_dict: class and constructor arguments of each worker, by name.

    Raises:
        WorkerError: there are none, or one is no Worker.
        ConfigError: two of them ask for different values of an actor option.
    """
    return RayClassWithInitArgs(WorkerHost, **host_arguments(class_dict, fused=False))


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """As :func:`create_colocated_worker_cls`; the workers also see each other (``get_fused_worker_by_name``)."""
    return RayClassWithInitArgs(WorkerHost, **host_arguments(class_dict, fused=True))
