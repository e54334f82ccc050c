"""A cluster of three nodes on this machine, of which one dies, and whose disks are full; what was seen, as JSON.

A program of its own, because the tests' process has its Ray already: ``python -m tests.single_controller.lose_a_node``,
and with ``own`` the death of the one node of a Ray that the run started itself.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import ray
import torch
from ray._private import worker as ray_worker
from ray.cluster_utils import Cluster

from tests.single_controller.mortal import Mortal
from tests.single_controller.workers import batch_of
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager, run_task

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
    pools.replacement_timeout_s = 4
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        time.sleep(0.1)
    seen["no node"] = said_by(pools.create_resource_pool)
    ray.shutdown()
    cluster.shutdown()
    return seen


class LosesItsRay:
    """A run under a Ray of its own, whose process on this node is killed."""

    seen: ClassVar[dict[str, object]] = {}

    def run(self, config: None) -> None:
        pools = ResourcePoolManager({"global": [2]}, {"actor": "global"}, "cpu")
        pools.create_resource_pool()
        group = new_group(pools)
        group.guard()
        held = group.execute_all_async("pid")
        self.seen["arrived"] = [group.wait_for(held) is not None and group.outputs_arrived(held)]
        pending = group.execute_all_async("all_reduce", 0, "sleep")
        time.sleep(0.5)
        ray_worker._global_node.all_processes["raylet"][0].process.kill()
        self.seen["ray"] = said_by(group.wait_for, pending)
        group.shutdown()
        pools.release()
        pools.create_resource_pool()
        group = new_group(pools)
        self.seen["sum"] = group.execute_all_sync("all_reduce", None, "")
        self.seen["arrived"] += [group.outputs_arrived(held)]
        group.shutdown()


def lose_own_ray() -> dict[str, object]:
    ray_init = {"num_cpus": 2, "log_to_driver": False, "include_dashboard": False, "_system_config": SYSTEM}
    run_task(LosesItsRay, None, SimpleNamespace(ray_init=ray_init, timeline_json_file=None))
    return LosesItsRay.seen


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(lose_own_ray() if 'own' in sys.argv else main())}\n")
