"""What every controller shares: workers, groups of them, pools to put them in. Imports no Ray."""

from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
