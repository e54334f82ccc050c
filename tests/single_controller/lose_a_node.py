"""A cluster of three nodes on this machine, of which one dies, and whose disks are full; what was seen, as JSON.

A program of its own, because the tests' process has its Ray already: ``python -m tests.single_controller.lose_a_node``.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ray
import torch
from ray.cluster_utils import Cluster

from tests.single_controller.mortal import Mortal
from tests.single_controller.workers import batch_of
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager, resource_pool

SYSTEM = {
    # A dead node is noticed after a second, instead of a quarter of a minute.
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3,
    # Disks count as full, whatever is free there.
    "local_fs_capacity_threshold": 1e-6,
}  # fmt: skip
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


def said_by(function, *args, **kwargs) -> list[str]:
    """The error that a call raises."""
    try:
        function(*args, **kwargs)
    except VerlError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def new_group(pools: ResourcePoolManager) -> RayWorkerGroup:
    return RayWorkerGroup(pools.get_resource_pool("actor"), RayWorkerGroup.describe(Mortal), device_name="cpu")


def main() -> dict[str, object]:
    seen: dict[str, object] = {}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": SYSTEM})
    victim = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    pools = ResourcePoolManager({"global": [1, 1]}, {"actor": "global"}, "cpu")
    pools.create_resource_pool()
    group = new_group(pools)
    pids = group.execute_all_sync("pid")
    there = next(b for b in pools.get_resource_pool("actor").bundles() if b.node_id == victim.node_id)
    rank = pools.get_resource_pool("actor").bundles().index(there)
    seen |= {"pids": pids, "rank": rank}

    # A hang on two nodes: each is asked for its stack.
    group.guard(hang_timeout_s=3)
    seen["hang"] = said_by(group.execute_all_sync, "all_reduce", rank, "spin")
    group.shutdown()

    # A node dies in a collective.
    group = new_group(pools)
    received = group.train(batch_of([1.0, 2.0]).repeat(1 << 19))
    group.guard()
    pending = group.execute_all_async("all_reduce", 1 - rank, "sleep")
    time.sleep(0.5)
    cluster.remove_node(victim, allow_graceful=False)
    seen["node"] = said_by(group.wait_for, pending)
    seen["received"] = received.batch["x"].sum().item()
    group.shutdown()
    seen["same pool"] = said_by(new_group, pools)
    pools.release()

    # Another node joins while the pools wait for it.
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(pools.create_resource_pool)
        time.sleep(1)
        cluster.add_node(**NODE)
        waiting.result()
    group = new_group(pools)
    seen["sum"] = group.execute_all_sync("all_reduce", None, "")

    # What does not fit the store has no disk to go to: 96 MB in all, on the way there and back.
    large = DataProto.from_dict({"x": torch.zeros(2, 12 << 20)})
    seen["store"] = said_by(group.train, large)
    seen["after"] = group.train(batch_of([1.0, 2.0])).batch["x"].tolist()
    group.shutdown()
    pools.release()

    # Nobody replaces the next one.
    resource_pool.REPLACEMENT_TIMEOUT_S = 4
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        time.sleep(0.1)
    seen["no node"] = said_by(pools.create_resource_pool)
    ray.shutdown()
    cluster.shutdown()
    return seen


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main())}\n")
