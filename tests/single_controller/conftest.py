"""Worker groups for this whole folder: starting actors is what costs time here."""

from __future__ import annotations

import pytest

from tests.single_controller.workers import Doubler, Echo, Meshed
from verl.single_controller.local import LocalResourcePool, LocalWorkerGroup

PAIR = {"echo": Echo, "doubler": Doubler}


@pytest.fixture(scope="package")
def pool(ray_cluster):
    """Four places, made of two pools of two; the groups of this folder share them, a tenth of a core each."""
    from verl.single_controller.ray import RayResourcePool, merge_resource_pool

    halves = [RayResourcePool([2], use_gpu=False, detached=True) for _ in range(2)]
    whole = merge_resource_pool(*halves)
    yield whole
    whole.release()


@pytest.fixture(scope="package")
def ray_pair(pool):
    """Two processes, each with an Echo and a Doubler that see each other."""
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayWorkerGroup,
        create_colocated_worker_cls_fused,
        split_resource_pool,
    )

    first, _ = split_resource_pool(pool, 2)
    members = {name: RayClassWithInitArgs(cls) for name, cls in PAIR.items()}
    members["echo"] = RayClassWithInitArgs(Echo, offset=7)
    group = RayWorkerGroup(first, create_colocated_worker_cls_fused(members), device_name="cpu")
    yield group
    group.shutdown()


@pytest.fixture(scope="package")
def local_pair():
    """The same in this process."""
    members = {name: LocalWorkerGroup.describe(cls) for name, cls in PAIR.items()}
    members["echo"] = LocalWorkerGroup.describe(Echo, offset=7)
    return LocalWorkerGroup(LocalResourcePool([1]), LocalWorkerGroup.colocate(members, fused=True), device_name="cpu")


@pytest.fixture(params=["local", "ray"])
def pair(request):
    return request.getfixturevalue(f"{request.param}_pair")


@pytest.fixture
def echo(pair):
    return pair.spawn(["echo"])["echo"]


@pytest.fixture(scope="package")
def meshed(pool):
    """Four ranks: data-parallel rank 0 is ranks 0 and 1, data-parallel rank 1 is ranks 2 and 3; 1 and 3 collect."""
    from verl.single_controller.ray import RayWorkerGroup

    group = RayWorkerGroup(pool, RayWorkerGroup.describe(Meshed), device_name="cpu")
    group.init_model([0, 0, 1, 1], [False, True, False, True])
    yield group
    group.shutdown()
