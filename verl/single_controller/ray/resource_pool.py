"""Resource pools on a Ray cluster: one placement group per node, one bundle per rank."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from verl.errors import ResourceError
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.single_controller.ray.processes import dead_nodes
from verl.single_controller.ray.session import restart_if_lost

START_TIMEOUT_S = 30  # for a reservation: finished workers may still be freeing theirs, or a dead node still count


@dataclass(eq=False)
class Bundle:
    """The reserved resources of one rank: a bundle of its node's placement group."""

    group: PlacementGroup
    index: int
    node_id: str
    occupants: int = 0
    """Number of worker groups with a rank in this bundle; pools split from the same pool count together."""


class RayResourcePool(ResourcePool):
    """Ranks on the nodes of a Ray cluster, each with its own GPU or CPU core.

    Resources are reserved when the first worker group is created. Worker groups in the same pool share the device of
    each rank.

    Args:
        process_on_nodes: number of ranks on each node.
        use_gpu: reserve a GPU for each rank; otherwise a core.
        name_prefix: first part of the names of the placement groups.
        max_colocate_count: how many worker groups may share the pool.
        detached: keep the reservation after the program that made it has ended.
        accelerator_type: use only nodes with this type of accelerator, e.g. ``"H200"``.
        n_gpus_per_node: default number of ranks for :meth:`add_node`.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str = "verl",
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        n_gpus_per_node: int = 8,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count, n_gpus_per_node)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix
        self.detached = detached
        self.accelerator_type = accelerator_type
        self._placement_groups: list[PlacementGroup] | None = None
        self._bundles: list[Bundle] | None = None

    @property
    def device_name(self) -> str:
        """``"cuda"`` or ``"cpu"``."""
        return "cuda" if self.use_gpu else "cpu"

    def check_device(self, device_name: str | None) -> None:
        """Raise a ResourceError unless ``device_name`` is None or the device of this pool's ranks."""
        if device_name not in (None, self.device_name):
            raise ResourceError(
                f"device_name='{device_name}', but the pool gives each rank a {self.resource}. Make the pool with "
                f"use_gpu={device_name != 'cpu'}."
            )

    @property
    def resource(self) -> str:
        """Ray's name of the resource that each rank has: ``"GPU"`` or ``"CPU"``."""
        return "GPU" if self.use_gpu else "CPU"

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str | None = None
    ) -> list[PlacementGroup]:
        """Reserve resources on the first call and return one placement group per node, ordered by node address.

        Args:
            strategy: ``STRICT_PACK`` puts all ranks of a placement group on one node; ``PACK`` prefers to.
            name: first part of the names of the placement groups, followed by a random part.
            device_name: ``"cuda"`` or ``"cpu"``; must be the pool's, which is the default.

        Raises:
            ResourceError: the cluster has too few devices, or other programs use them; or the device is another.
        """
        self.check_device(device_name)
        if self._placement_groups is None:
            check_fits([(self.store, self.use_gpu)])
            prefix = f"{name or self.name_prefix}_{uuid.uuid4().hex[:8]}"
            groups = [
                placement_group(
                    [self._bundle() for _ in range(count)],
                    strategy=strategy,
                    name=f"{prefix}_{node}",
                    lifetime="detached" if self.detached else None,
                )
                for node, count in enumerate(self.store)
            ]
            self._wait_for(groups)
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            self._placement_groups = sorted(groups, key=lambda group: addresses[_nodes_of(group)[0]])
            self.store = [group.bundle_count for group in self._placement_groups]
        return self._placement_groups

    def _bundle(self) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": 1}
        if self.use_gpu:
            bundle["GPU"] = 1
        if self.accelerator_type:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        return bundle

    def _wait_for(self, groups: list[PlacementGroup]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        if all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
            return
        for group in groups:
            remove_placement_group(group)
        # A node may have died since it was counted.
        check_fits([(self.store, self.use_gpu)])
        free = ray.available_resources()
        raise ResourceError(
            f"{self.world_size} ranks are asked for (on nodes: {self.store}, each with {self._bundle()}), and the "
            f"cluster is large enough, but other programs use it: free are {free.get('GPU', 0):g} GPUs and "
            f"{free.get('CPU', 0):g} CPUs. Stop the other program, or use fewer ranks: n_gpus_per_node=..., "
            f"nnodes=... (process_on_nodes of the pool).{_losses()}"
        )

    def bundles(self, strategy: str = "STRICT_PACK") -> list[Bundle]:
        """Return the bundle of each rank; reserves them on the first call."""
        if self._bundles is None:
            self._bundles = _bundles_of(self.get_placement_groups(strategy))
        return self._bundles

    def release(self) -> None:
        """Free the reserved resources; workers that still run on them end. A detached pool is freed in no other way."""
        for group in self._placement_groups or []:
            remove_placement_group(group)
        self._placement_groups = self._bundles = None


class SubRayResourcePool(RayResourcePool):
    """``subgroup_world_size`` consecutive ranks of a pool with these placement groups.

    ``start_bundle_index`` is the index of the first rank, counted over all placement groups.
    """

    def __init__(
        self, placement_groups: list[PlacementGroup], start_bundle_index: int, subgroup_world_size: int, **kwargs: Any
    ) -> None:
        counts = [group.bundle_count for group in placement_groups]
        stop = start_bundle_index + subgroup_world_size
        if not 0 <= start_bundle_index < stop <= sum(counts):
            raise ResourceError(
                f"ranks {start_bundle_index} to {stop - 1} are no part of a pool with {sum(counts)} ranks "
                f"(on nodes: {counts})."
            )
        rank_nodes = [node for node, count in enumerate(counts) for _ in range(count)][start_bundle_index:stop]
        super().__init__([rank_nodes.count(node) for node in sorted(set(rank_nodes))], **kwargs)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size
        self._placement_groups = placement_groups
        self._bundles = _bundles_of(placement_groups)[start_bundle_index:stop]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Split a pool, which may itself be a part of another, into contiguous parts.

    ``split_size`` is the number of ranks of every part, or a list with that of each; they must add up to the pool.
    """
    size = resource_pool.world_size
    sizes = [split_size] * (size // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != size or min(sizes, default=0) < 1:
        raise ResourceError(
            f"a pool of {size} ranks cannot be split by split_size={split_size}: sizes must add up to it."
        )
    bundles, first, parts = resource_pool.bundles(), getattr(resource_pool, "start_bundle_index", 0), []
    for start, part_size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
        part = SubRayResourcePool(
            resource_pool.get_placement_groups(),
            first + start,
            part_size,
            use_gpu=resource_pool.use_gpu,
            name_prefix=resource_pool.name_prefix,
            max_colocate_count=resource_pool.max_colocate_count,
            detached=resource_pool.detached,
        )
        part._bundles = bundles[start : start + part_size]
        parts.append(part)
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Return a pool with the ranks of ``rp1`` followed by those of ``rp2``.

    Raises:
        ResourceError: only one of them has GPUs, or one is a part of a pool.
    """
    if rp1.use_gpu != rp2.use_gpu:
        raise ResourceError(f"a pool of {rp1.device_name} ranks cannot be merged with one of {rp2.device_name} ranks.")
    if isinstance(rp1, SubRayResourcePool) or isinstance(rp2, SubRayResourcePool):
        raise ResourceError("a part of a pool cannot be merged; merge whole pools, then split.")
    merged = RayResourcePool(
        [*rp1.store, *rp2.store],
        rp1.use_gpu,
        f"{rp1.name_prefix}_{rp2.name_prefix}",
        min(rp1.max_colocate_count, rp2.max_colocate_count),
        rp1.detached and rp2.detached,
        n_gpus_per_node=rp1.n_gpus_per_node,
    )
    merged._placement_groups = [*rp1.get_placement_groups(), *rp2.get_placement_groups()]
    merged._bundles = [*rp1.bundles(), *rp2.bundles()]
    return merged


class ResourcePoolManager(PoolManager):
    """Named pools on a Ray cluster, and the mapping from roles to pools; arguments as in PoolManager."""

    pool_cls = RayResourcePool

    def check_resources(self) -> None:
        """Raise a ResourceError unless all pools fit the cluster at the same time.

        If a node died since the pools were created, waits for a replacement to join. Restarts a Ray that this program
        started and that died on this node.
        """
        restart_if_lost()
        self._check_fits()

    def renew(self, name: str) -> None:
        """See :meth:`PoolManager.renew`; waits for a node that replaces one that died."""
        self._check_fits()
        super().renew(name)

    def _check_fits(self) -> None:
        requests = [(counts, self.device_name != "cpu") for counts in self.resource_pool_spec.values()]
        limit_s = self.replacement_timeout_s if self.resource_pool_dict and dead_nodes() else 0
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return check_fits(requests)
            except ResourceError as error:
                if time.monotonic() >= deadline:
                    key = "trainer.recovery.replacement_timeout_s"
                    waited = f" No machine came in its place within {key}={limit_s:g} s." if limit_s else ""
                    raise ResourceError(f"{error}{self._pools()}{waited}") from None
            time.sleep(0.5)

    def _pools(self) -> str:
        """The pools and the settings of their sizes, if there are several."""
        if len(self.resource_pool_spec) == 1:
            return ""
        sizes = [
            f"{counts} by {self.sections.get(name, name)}.{{nnodes,n_gpus_per_node}}"
            for name, counts in self.resource_pool_spec.items()
        ]
        return f" The ranks on nodes are those of {len(sizes)} pools: {'; '.join(sizes)}."

    def _make_pool(self, name: str, process_on_nodes: list[int]) -> RayResourcePool:
        return RayResourcePool(
            process_on_nodes,
            use_gpu=self.device_name != "cpu",
            name_prefix=name,
            max_colocate_count=self.max_colocate_count,
        )


def check_fits(pools: Sequence[tuple[Sequence[int], bool]]) -> None:
    """Raise a ResourceError if even the idle cluster is too small for these pools; Ray would wait instead.

    Args:
        pools: for each pool the number of ranks on each node, and whether each needs a GPU besides its core.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource in ("GPU", "CPU"):
        counts = [count for on_nodes, use_gpu in pools for count in on_nodes if use_gpu or resource == "CPU"]
        has = [int(node.get(resource, 0)) for node in nodes]
        free = list(has)
        for count in sorted(counts, reverse=True):
            node = next((i for i, room in enumerate(free) if room >= count), None)
            if node is None:
                raise ResourceError(_too_many(resource, counts, has))
            free[node] -= count


def _too_many(resource: str, counts: list[int], has: list[int]) -> str:
    if resource == "GPU" and not any(has):
        remedy = "device=cpu"
    elif any(has) and max(counts) > max(has):
        remedy = f"n_gpus_per_node={max(has)}"
    else:
        remedy = "fewer nodes (nnodes=...) or fewer ranks (n_gpus_per_node=...), or let roles share a pool"
    more = (
        " To run more ranks than cores, tell Ray so: ray.init(num_cpus=...), ray_kwargs.ray_init.num_cpus=..."
        if resource == "CPU"
        else ""
    )
    return (
        f"more ranks than {resource}s: asked for {sum(counts)} ranks with one {resource} each (ranks on nodes: "
        f"{counts}); the cluster has {sum(has)} {resource}s ({resource}s of its nodes: {has}). Set {remedy}, or add "
        f"nodes.{more}{_losses()}"
    )


def _losses() -> str:
    dead = dead_nodes().values()
    return f" Nodes that died: {'; '.join(dead)}." if dead else ""


def _bundles_of(groups: Sequence[PlacementGroup]) -> list[Bundle]:
    return [Bundle(group, index, node_id) for group in groups for index, node_id in enumerate(_nodes_of(group))]


def _nodes_of(group: PlacementGroup) -> list[str]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(nodes))]
