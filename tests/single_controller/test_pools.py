"""Pools: how many ranks fit, and what is said at once if they do not."""

from __future__ import annotations

import time

import pytest

from tests.single_controller.workers import Echo
from verl.errors import ConfigError, ResourceError, WorkerError
from verl.single_controller.base import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalResourcePool, LocalResourcePoolManager, LocalWorkerGroup


def test_ranks_on_nodes():
    pool = ResourcePool([2, 3], n_gpus_per_node=4)
    assert (pool.world_size, pool.max_colocate_count) == (5, 10)
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    pool.add_node(1)
    pool.add_node()
    assert pool.store == [2, 3, 1, 4]
    with pytest.raises(ResourceError, match=r"process_on_nodes=\[2, 0\].*must be positive"):
        ResourcePool([2, 0])


def test_the_local_controller_runs_one_rank():
    assert LocalResourcePool().world_size == 1
    with pytest.raises(ResourceError, match=r"not 8 .*n_gpus_per_node=1.*controller=ray"):
        LocalResourcePool([8])
    with pytest.raises(ResourceError, match="not 2"):
        LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Echo))
    with pytest.raises(WorkerError, match="needs ray_cls_with_init"):
        LocalWorkerGroup(ResourcePool([1]))


def test_a_manager_gives_each_role_its_pool():
    manager = LocalResourcePoolManager(
        {"global": [1], "reward": [1]}, {"actor": "global", "rm": "reward", "ref": "global"}
    )
    with pytest.raises(ResourceError, match="not made yet"):
        manager.get_resource_pool("actor")
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("ref")
    assert manager.get_resource_pool("actor") is not manager.get_resource_pool("rm")
    assert manager.get_n_gpus() == 2
    with pytest.raises(ResourceError, match="role 'critic' has no pool"):
        manager.get_resource_pool("critic")
    with pytest.raises(ResourceError, match="role 'rm' is mapped to pool 'rewards'"):
        LocalResourcePoolManager({"global": [1]}, {"rm": "rewards"})


def asks_for(counts: dict[str, list[int]], device: str, **sections: str) -> str:
    from verl.single_controller.ray import ResourcePoolManager

    start = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        ResourcePoolManager(counts, {}, device, sections=sections).create_resource_pool()
    assert time.monotonic() - start < 20
    return str(caught.value)


def test_more_ranks_than_there_are_is_said_at_once(ray_cluster):
    said = asks_for({"global": [5]}, "cpu")
    assert "asked for 5 ranks with one CPU each" in said
    assert "has 4 CPUs" in said
    assert "Set n_gpus_per_node=4" in said
    assert "ray_kwargs.ray_init.num_cpus" in said


def test_pools_must_fit_together(ray_cluster):
    said = asks_for({"a": [2], "b": [3]}, "cpu", a="trainer", b="actor_rollout_ref.rollout")
    assert "[2] by trainer.{nnodes,n_gpus_per_node}; [3] by actor_rollout_ref.rollout.{nnodes,n_gpus_per_node}" in said
    assert "asked for 5 ranks with one CPU each (ranks on nodes: [2, 3])" in said
    assert "let roles share a pool" in said
    assert "Set fewer nodes (nnodes=...)" in asks_for({"a": [4, 4]}, "cpu")


def test_a_cluster_without_gpus_says_so(ray_cluster):
    said = asks_for({"global": [8]}, "cuda")
    assert "the cluster has 0 GPUs" in said
    assert "Set device=cpu" in said


def test_places_that_others_hold_are_not_waited_for(pool, monkeypatch):
    from verl.single_controller.ray import RayResourcePool, resource_pool

    pool.get_placement_groups()  # all four cores
    monkeypatch.setattr(resource_pool, "START_TIMEOUT_S", 0.2)
    with pytest.raises(ResourceError, match=r"large enough, but other programs use it: free are 0 GPUs and 0 CPUs"):
        RayResourcePool([1], use_gpu=False).get_placement_groups()


def test_parts_of_a_pool(pool):
    from verl.single_controller.ray import SubRayResourcePool, merge_resource_pool, split_resource_pool

    first, second = split_resource_pool(pool, [1, 3])
    assert isinstance(second, SubRayResourcePool)
    assert (first.world_size, second.world_size) == (1, 3)
    # the pool is two placement groups of two places
    assert second.store == [1, 2]
    assert [b is w for b, w in zip(second.bundles(), pool.bundles()[1:], strict=True)] == [True] * 3
    third = split_resource_pool(second, [2, 1])[1]
    assert third.bundles()[0] is pool.bundles()[3]
    with pytest.raises(ResourceError, match="4 ranks cannot be split by split_size=3"):
        split_resource_pool(pool, 3)
    with pytest.raises(ResourceError, match="ranks 3 to 4 are no part of a pool with 4 ranks"):
        SubRayResourcePool(pool.get_placement_groups(), 3, 2)
    with pytest.raises(ResourceError, match="a part of a pool cannot be merged"):
        merge_resource_pool(first, second)


def test_a_full_pool_takes_no_group(pool):
    from verl.single_controller.ray import RayWorkerGroup, SubRayResourcePool, split_resource_pool

    part = split_resource_pool(pool, 4)[0]
    inside = max(bundle.occupants for bundle in part.bundles())
    part.max_colocate_count = inside
    with pytest.raises(ResourceError, match=f"holds {inside} worker groups already"):
        RayWorkerGroup(part, RayWorkerGroup.describe(Echo))
    with pytest.raises(ResourceError, match=r"device_name='cuda', but the pool gives each rank a CPU"):
        RayWorkerGroup(
            SubRayResourcePool(pool.get_placement_groups(), 0, 1, use_gpu=False),
            RayWorkerGroup.describe(Echo),
            device_name="cuda",
        )


def test_options_of_actors(ray_cluster):
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls

    one = RayClassWithInitArgs(ray.remote(num_cpus=0.5)(Echo), 3)
    assert (one.cls, one.args, one.options) == (Echo, (3,), {"num_cpus": 0.5})
    one.update_options({"max_restarts": 0})
    one.set_additional_resource({"disk": 1})
    other = RayClassWithInitArgs(Echo)
    assert create_colocated_worker_cls({"a": one, "b": other}).options == {
        "num_cpus": 0.5, "max_restarts": 0, "resources": {"disk": 1},
    }  # fmt: skip
    other.update_options({"num_cpus": 2})
    with pytest.raises(ConfigError, match=r"'b' has the actor option num_cpus=2, another one 0.5"):
        create_colocated_worker_cls({"a": one, "b": other})
    with pytest.raises(WorkerError, match="'c': int is no subclass of Worker"):
        create_colocated_worker_cls({"c": RayClassWithInitArgs(int)})


def test_run_task_drives_from_this_process_and_leaves_a_running_ray(ray_cluster, tmp_path):
    import os
    from types import SimpleNamespace

    import ray

    from verl.single_controller.ray import run_task

    seen = []

    class Runner:
        def run(self, config):
            seen.append((config, os.getpid(), ray.is_initialized()))

    timeline = tmp_path / "timeline.json"
    run_task(Runner, "configuration", SimpleNamespace(ray_init={"num_cpus": None}, timeline_json_file=str(timeline)))
    assert seen == [("configuration", os.getpid(), True)]
    assert ray.is_initialized()
    assert timeline.read_text().startswith("[")
