"""Pools of processes on a Ray cluster: one placement group per node, one bundle per rank."""

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

START_TIMEOUT_S = 30
"""How long a pool may wait for places: finished workers are just giving them back, or a node died unnoticed."""
REPLACEMENT_TIMEOUT_S = 60
"""How long pools that had their places before, and lost a node, may wait for another one to join."""


@dataclass(eq=False)
class Bundle:
    """The place of one rank: a bundle of the placement group of a node."""

    group: PlacementGroup
    index: int
    node_id: str
    occupants: int = 0
    """Worker groups that have a rank here; pools that were cut from one another count together."""


class RayResourcePool(ResourcePool):
    """Ranks on the nodes of a Ray cluster, each with a GPU or a core that no other pool uses.

    The places are reserved when the first worker group moves in. Groups that share the pool share the
    device of each rank.

    Args:
        process_on_nodes: number of ranks on each node.
        use_gpu: each rank has a GPU; otherwise a core.
        name_prefix: first part of the names of the placement groups.
        max_colocate_count: how many worker groups may share the pool.
        detached: the reservation outlives the program that made it.
        accelerator_type: only on nodes with this type of accelerator, e.g. ``"H200"``.
        n_gpus_per_node: ranks that :meth:`add_node` puts on a node unless told otherwise.
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

    @property
    def resource(self) -> str:
        """What Ray calls the device of a rank."""
        return "GPU" if self.use_gpu else "CPU"

    def get_placement_groups(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[PlacementGroup]:
        """Reserve the places, once; one placement group per node, in the order of the nodes' addresses.

        Args:
            strategy: ``STRICT_PACK`` keeps the ranks of a node together; ``PACK`` only tries to.
            name: first part of the names of the placement groups; a random one follows it.

        Raises:
            ResourceError: the cluster has fewer devices than ranks are asked for, or others use them.
        """
        if self._placement_groups is None:
            check_fits([(self.store, self.use_gpu)])
            prefix = f"{name or self.name_prefix}_{uuid.uuid4().hex[:8]}"
            made = [
                placement_group(
                    [self._bundle() for _ in range(count)],
                    strategy=strategy,
                    name=f"{prefix}_{node}",
                    lifetime="detached" if self.detached else None,
                )
                for node, count in enumerate(self.store)
            ]
            self._wait_for(made)
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            self._placement_groups = sorted(made, key=lambda group: addresses[_nodes_of(group)[0]])
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
            f"cluster is large enough, but others use it: free are {free.get('GPU', 0):g} GPUs and "
            f"{free.get('CPU', 0):g} CPUs. Stop the other program, or ask for fewer: "
            f"trainer.n_gpus_per_node=..., trainer.nnodes=...{_losses()}"
        )

    def bundles(self, strategy: str = "STRICT_PACK") -> list[Bundle]:
        """The place of each rank; reserves them if that is not done yet."""
        if self._bundles is None:
            self._bundles = _bundles_of(self.get_placement_groups(strategy))
        return self._bundles

    def release(self) -> None:
        """Give the places back, for a detached pool the only way; workers that still live there end."""
        for group in self._placement_groups or []:
            remove_placement_group(group)
        self._placement_groups = self._bundles = None


class SubRayResourcePool(RayResourcePool):
    """Some of the ranks of a pool, as a pool.

    Args:
        placement_groups: those of the whole pool.
        start_bundle_index: number of the first rank, counted over all placement groups.
        subgroup_world_size: number of ranks.
        kwargs: further arguments of RayResourcePool.

    Raises:
        ResourceError: the whole pool does not have these ranks.
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
        whole = [node for node, count in enumerate(counts) for _ in range(count)][start_bundle_index:stop]
        super().__init__([whole.count(node) for node in sorted(set(whole))], **kwargs)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size
        self._placement_groups = placement_groups
        self._bundles = _bundles_of(placement_groups)[start_bundle_index:stop]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Cut a pool into parts.

    Args:
        resource_pool: the pool; a part may be cut again.
        split_size: ranks of every part, or of each.

    Raises:
        ResourceError: the sizes do not add up to the pool.
    """
    size = resource_pool.world_size
    sizes = [split_size] * (size // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != size or min(sizes, default=0) < 1:
        raise ResourceError(
            f"a pool of {size} ranks cannot be split by split_size={split_size}: sizes must add up to it."
        )
    whole, first, parts = resource_pool.bundles(), getattr(resource_pool, "start_bundle_index", 0), []
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
        part._bundles = whole[start : start + part_size]
        parts.append(part)
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """A pool with the ranks of ``rp1``, then those of ``rp2``.

    Raises:
        ResourceError: one has GPUs and the other has not, or one is a part of a pool.
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
    """Named pools on a Ray cluster, and which role lives in which.

    Args:
        resource_pool_spec: ranks on each node, by the name of the pool: ``{"global_pool": [8, 8]}``.
        mapping: name of the pool, by role.
        device_name: ``"cuda"`` gives each rank a GPU, ``"cpu"`` a core.
    """

    pool_cls = RayResourcePool

    def check_resources(self) -> None:
        """Raise a ResourceError unless all pools fit the cluster at the same time.

        Pools that were made before, and do not fit any more because a node died, wait for another one to join. A Ray
        that this program started itself, and that died on this node, is started anew.
        """
        restart_if_lost()
        asked = [(counts, self.device_name != "cpu") for counts in self.resource_pool_spec.values()]
        deadline = time.monotonic() + (REPLACEMENT_TIMEOUT_S if self.resource_pool_dict and dead_nodes() else 0)
        while True:
            try:
                return check_fits(asked)
            except ResourceError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)

    def _make_pool(self, name: str, process_on_nodes: list[int]) -> RayResourcePool:
        return RayResourcePool(process_on_nodes, use_gpu=self.device_name != "cpu", name_prefix=name)


def check_fits(pools: Sequence[tuple[Sequence[int], bool]]) -> None:
    """Raise at once if the cluster could never hold these pools, instead of waiting for it.

    Args:
        pools: of each pool the ranks on each node, and whether a rank needs a GPU beside its core.

    Raises:
        ResourceError: they do not fit; says what is asked for, what there is, and what to set.
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
        remedy = "trainer.device=cpu"
    elif any(has) and max(counts) > max(has):
        remedy = f"trainer.n_gpus_per_node={max(has)}"
    else:
        remedy = (
            "fewer nodes (trainer.nnodes=...) or fewer ranks (trainer.n_gpus_per_node=...), or let roles share a pool"
        )
    more = " To run more ranks than cores, tell Ray so: ray_kwargs.ray_init.num_cpus=..." if resource == "CPU" else ""
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
