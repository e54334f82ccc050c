"""Workers, worker groups and resource pools as the Ray and the local controller share them; imports no Ray."""

from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, Worker
from verl.single_controller.base.worker_group import WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
