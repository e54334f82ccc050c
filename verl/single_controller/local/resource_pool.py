"""The pool of the local controller: this process."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ResourceError
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool


class LocalResourcePool(ResourcePool):
    """One rank, in the process that asks for it.

    Raises:
        ResourceError: more than one rank is asked for.
    """

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        super().__init__([1] if process_on_nodes is None else process_on_nodes, max_colocate_count, n_gpus_per_node)
        if self.world_size != 1:
            raise ResourceError(
                f"trainer.controller=local runs one rank, in this process; asked for {self.world_size} "
                f"(processes on nodes: {self.store}). Set trainer.n_gpus_per_node=1 trainer.nnodes=1, or use "
                "trainer.controller=ray for more ranks."
            )


class LocalResourcePoolManager(PoolManager):
    """Pools of the local controller: each of them is this process."""

    pool_cls = LocalResourcePool
