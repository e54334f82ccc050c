"""Resource pools (how many worker processes run on each node) and the manager that assigns roles to pools."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from verl.errors import ResourceError
from verl.utils.device import get_device_name


class ResourcePool:
    """Processes on nodes; worker groups in the same pool share the device of each rank.

    Args:
        process_on_nodes: number of processes on each node, e.g. ``[8, 8]``; None for an empty pool.
        max_colocate_count: how many worker groups may share the pool.
        n_gpus_per_node: default number of processes for :meth:`add_node`.
    """

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self.store = [int(count) for count in process_on_nodes or []]
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node
        if any(count < 1 for count in [*self.store, max_colocate_count, n_gpus_per_node]):
            raise ResourceError(
                f"process_on_nodes={self.store}, max_colocate_count={max_colocate_count} and "
                f"n_gpus_per_node={n_gpus_per_node} must be positive."
            )

    def add_node(self, process_count: int | None = None) -> None:
        """Add a node with ``process_count`` processes, or ``n_gpus_per_node`` of them."""
        self.store.append(self.n_gpus_per_node if process_count is None else process_count)

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return sum(self.store)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes on its node."""
        return [count for count in self.store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its index on its node."""
        return [local_rank for count in self.store for local_rank in range(count)]

    def release(self) -> None:
        """Free the reserved resources; workers that still run on them end."""


class PoolManager:
    """Named pools and the mapping from roles to pools; each controller has a subclass for its kind of pool.

    Args:
        resource_pool_spec: number of processes on each node, by pool name: ``{"global_pool": [8, 8]}``.
        mapping: pool name by role.
        device_name: ``"cuda"`` gives each process a GPU, ``"cpu"`` a core; None is what this machine has.
        max_colocate_count: how many worker groups may share a pool.
        resource_pool_dict: pools that are made already, by name.
        sections: the section of the configuration that has the size of a pool, by pool name; for messages.
    """

    pool_cls: ClassVar[type[ResourcePool]]
    replacement_timeout_s: float = 60
    """Seconds to wait for a new node, after one on which a pool was has died."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Hashable, str],
        device_name: str | None = None,
        *,
        max_colocate_count: int = 10,
        resource_pool_dict: Mapping[str, ResourcePool] | None = None,
        sections: Mapping[str, str] | None = None,
    ) -> None:
        for role, name in mapping.items():
            if name not in resource_pool_spec:
                raise ResourceError(
                    f"role '{role}' is mapped to pool '{name}'; there are: {sorted(resource_pool_spec)}."
                )
        self.resource_pool_spec = {name: list(counts) for name, counts in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.device_name = device_name or get_device_name()
        self.max_colocate_count = max_colocate_count
        self.sections = dict(sections or {})
        self.resource_pool_dict: dict[str, ResourcePool] = dict(resource_pool_dict or {})

    def create_resource_pool(self) -> None:
        """Create the pools.

        Raises:
            ResourceError: all pools together need more devices than there are.
        """
        self.check_resources()
        self.resource_pool_dict = {
            name: self._make_pool(name, counts) for name, counts in self.resource_pool_spec.items()
        }

    def renew(self, name: str) -> None:
        """Release a pool and make it anew, without its workers; the other pools keep theirs.

        Raises:
            ResourceError: all pools together need more devices than there are.
        """
        self.resource_pool_dict[name].release()
        self.resource_pool_dict[name] = self._make_pool(name, self.resource_pool_spec[name])

    def release(self) -> None:
        """Free the resources of all pools, for another run in the same cluster."""
        for pool in self.resource_pool_dict.values():
            pool.release()

    def check_resources(self) -> None:
        """Raise a ResourceError unless all pools fit at the same time."""

    def _make_pool(self, name: str, process_on_nodes: list[int]) -> ResourcePool:
        return self.pool_cls(process_on_nodes, self.max_colocate_count)

    def get_resource_pool(self, role: Hashable) -> ResourcePool:
        """Return the pool of a role."""
        if role not in self.mapping:
            raise ResourceError(f"role '{role}' has no pool; mapped are: {sorted(map(str, self.mapping))}.")
        if not self.resource_pool_dict:
            raise ResourceError("the pools are not made yet; call create_resource_pool() first.")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of processes in all pools, each of which has its own device."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
