"""Groups of workers: colocated, fused, detached; their environment, their failures, their ends."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.single_controller.workers import Broken, Doubler, Echo, batch_of
from tests.support.waiting import eventually
from verl.errors import ConfigError, ProcessLostError, ResourceError, WorkerError
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.dispatch import PendingOutputs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.worker_groups import WorkerGroups


def test_workers_of_one_process_are_groups_of_their_own(pair):
    views = pair.spawn(prefix_set=["echo", "doubler"])
    pids = [about["pid"] for about in views["echo"].about()]
    assert views["doubler"].pid() == pids
    assert len(set(pids)) == pair.world_size
    assert views["doubler"].double(batch_of([1.0, 2.0])).batch["x"].tolist() == [2.0, 4.0]
    assert views["echo"].world_size == pair.world_size


def test_the_whole_group_has_all_methods_by_prefix(pair):
    assert pair.echo_rank_zero(3) == (0, 3)
    assert pair.doubler_double(batch_of([1.5, 2.5])).batch["x"].tolist() == [3.0, 5.0]
    with pytest.raises(AttributeError, match="rank_zero"):
        pair.rank_zero(3)


def test_fused_workers_see_each_other(pair):
    fused = pair.spawn_fused(["doubler"])
    assert fused["doubler"].offset_of_echo() == [7] * pair.world_size
    pair.fuse(["echo", "doubler"])
    assert pair.doubler.offset_of_echo() == pair.echo.execute_all_sync("not_registered", 0)


def test_colocated_workers_that_are_not_fused_do_not():
    members = {"echo": LocalWorkerGroup.describe(Echo), "doubler": LocalWorkerGroup.describe(Doubler)}
    group = LocalWorkerGroup(None, LocalWorkerGroup.colocate(members))
    with pytest.raises(WorkerError, match="Doubler is not fused with a worker 'echo'"):
        group.doubler_offset_of_echo()
    with pytest.raises(WorkerError, match="spawn_fused: these workers do not see each other"):
        group.spawn_fused(["echo"])


def test_spawn_names_the_nearest_worker(pair):
    with pytest.raises(WorkerError, match="Did you mean 'doubler'"):
        pair.spawn(["double"])


def test_ranks_know_their_place(ray_pair, monkeypatch):
    echo = ray_pair.spawn(["echo"])["echo"]
    abouts = echo.about()
    assert [(a["RANK"], a["rank"], a["LOCAL_RANK"]) for a in abouts] == [("0", 0, "0"), ("1", 1, "1")]
    assert {(a["WORLD_SIZE"], a["world_size"], a["LOCAL_WORLD_SIZE"], a["offset"]) for a in abouts} == {
        ("2", 2, "2", 7)
    }
    assert {a["master"] for a in abouts} == {(echo.master_address, echo.master_port)}
    assert {a["OMP_NUM_THREADS"] for a in abouts} == {os.environ["OMP_NUM_THREADS"]}
    assert len(set(echo.worker_names)) == 2


def test_cores_of_a_node_are_divided_among_its_ranks(ray_cluster, monkeypatch):
    import ray

    from verl.single_controller.ray.worker_group import _threads

    nodes = ray.nodes()
    node, calls = nodes[0]["NodeID"], []  # Ray counts four cores
    monkeypatch.setattr(ray, "nodes", lambda: calls.append(1) or nodes)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [_threads({node: range(ranks)})[node] for ranks in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 1]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert _threads({node: range(2), "left": range(8)}) == {node: 1, "left": 1}
    assert len(calls) == 6, "once for all nodes and ranks"


def test_the_limit_of_the_start_reaches_the_processes(pool):
    from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager

    pools = ResourcePoolManager({"global": [4]}, {"echo": "global"}, "cpu", resource_pool_dict={"global": pool})
    groups = WorkerGroups(worker_classes={"echo": Echo}, pools=pools, group_class=RayWorkerGroup, device_name="cpu")
    groups.start_timeout_s = 0.01
    with pytest.raises(WorkerError, match=r"4 of 4 ranks of WorkerHost.* did not start within 0\.01 s"):
        groups._start_processes({"echo": {}})


def test_ranks_compute_with_their_share_of_the_cores(pool, monkeypatch):
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, split_resource_pool

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for ranks, threads in ((1, 2), (2, 1)):
        part = split_resource_pool(pool, [ranks, pool.world_size - ranks])[0]
        group = RayWorkerGroup(part, RayClassWithInitArgs(Echo))
        assert [about["threads"] for about in group.about()] == [threads] * ranks
        group.shutdown()


def test_the_local_environment_is_rank_0_of_1_and_keeps_what_is_set(local_pair, monkeypatch):
    about = local_pair.spawn(["echo"])["echo"].about()[0]
    assert (about["WORLD_SIZE"], about["RANK"], about["pid"]) == ("1", "0", os.getpid())
    assert about["master"] == (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.delenv("MASTER_ADDR")
    group = LocalWorkerGroup(None, ClassWithInitArgs(Echo))
    assert (group.master_address, group.master_port) == ("127.0.0.1", "12345")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ResourceError, match=r"WORLD_SIZE=2.*controller=ray"):
        LocalWorkerGroup(None, ClassWithInitArgs(Echo))


def test_a_worker_without_a_rank_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WorkerError, match="Echo: RANK"):
        Echo()


def test_methods_must_not_hide_those_of_groups():
    class Spawner(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def spawn(self): ...

    with pytest.raises(ConfigError, match=r"Spawner.spawn.*under another name"):
        LocalWorkerGroup(None, ClassWithInitArgs(Spawner))


# ---- failures ---------------------------------------------------------------------------------------


def test_an_error_names_rank_class_and_method(ray_pair, tmp_path):
    echo = ray_pair.spawn(["echo"])["echo"]
    # The rank that failed does not wait for the other, which would go on for ever.
    with pytest.raises(WorkerError, match=r"^Echo.boom on rank 1 of 2: ValueError: bad row on rank 1$") as caught:
        echo.boom(1, until=str(tmp_path / "go"))
    (tmp_path / "go").touch()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "workers.py" in str(caught.value.__cause__), "the remote traceback is lost"
    assert "raised in Echo.boom on rank 1" in str(caught.value.__cause__)


def test_the_rank_that_failed_first_comes_first(ray_pair, tmp_path):
    import ray

    echo = ray_pair.spawn(["echo"])["echo"]
    pending = echo.execute_all_async("boom", 1, until=str(tmp_path / "go"))
    assert ray.wait(pending[1:], timeout=60)[0] == pending[1:]
    (tmp_path / "go").touch()
    echo.execute_all_sync("not_registered", 0)  # by now both have failed
    with pytest.raises(WorkerError) as caught:
        echo.wait_for(pending)
    assert str(caught.value).splitlines() == [
        "Echo.boom on rank 1 of 2: ValueError: bad row on rank 1",
        "Failed after it:",
        "  rank 0: RuntimeError: connection closed by peer",
    ]


def test_a_local_error_is_the_error_itself(local_pair):
    echo = local_pair.spawn(["echo"])["echo"]
    with pytest.raises(ValueError, match=r"^bad row on rank 0\n") as caught:
        echo.boom(0)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename.endswith("workers.py")
    assert caught.value.__notes__ == ["raised in Echo.boom on rank 0"]


def test_a_constructor_that_raises_ends_the_start(pool):
    from verl.single_controller.ray import RayWorkerGroup, SubRayResourcePool

    place = SubRayResourcePool(pool.get_placement_groups(), 0, 1, use_gpu=False)
    with pytest.raises(WorkerError, match=r"^Broken.__init__ on rank 0 of 1: FileNotFoundError: no model in /nowhere"):
        RayWorkerGroup(place, RayWorkerGroup.describe(Broken))
    assert place.bundles()[0].occupants == 0


def test_detached_workers_are_found_and_a_dead_one_frees_those_who_wait_for_it(pool):
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, SubRayResourcePool

    places = SubRayResourcePool(pool.get_placement_groups(), 2, 2, use_gpu=False)
    echo = RayClassWithInitArgs(Echo, 5)
    with pytest.raises(ResourceError, match=r"die with their places.*detached=True"):
        RayWorkerGroup(places, echo, detached=True)
    places.detached = True
    made = RayWorkerGroup(places, echo, detached=True, name_prefix="left_behind")
    assert made.worker_names == ["left_behind_Echo_0", "left_behind_Echo_1"]
    found = RayWorkerGroup.from_detached(worker_names=made.worker_names, ray_cls_with_init=echo, device_name="cpu")
    assert found.about() == made.about()
    assert (found.master_address, found.master_port) == (made.master_address, made.master_port)
    assert found.execute_all_sync("not_registered", 1) == [6, 6]

    found.start_worker_aliveness_check(every_n_seconds=0.1)
    waiting = found.execute_rank_zero_async("sleep", 60)
    start = time.monotonic()
    # This group does not watch its ranks; Ray tells it, because the rank that died took part in the call.
    with pytest.raises(
        ProcessLostError, match=r"^rank 1 of 2 died in Echo.die \(left_behind_Echo_1, pid \d+ on node .*exit"
    ):
        made.die(1)
    # Rank 0 alone is in this one, and would sleep on.
    with pytest.raises(ProcessLostError, match=r"(?s)^rank 1 of 2 died .*left_behind_Echo_1, .*Found by Echo.sleep"):
        found.wait_for(PendingOutputs([waiting], "sleep", [0]))
    assert time.monotonic() - start < 50
    with pytest.raises(ProcessLostError, match=r"(?s)^rank 1 of 2 .*Found by Echo.about"):
        found.about()

    made.shutdown()
    assert [bundle.occupants for bundle in places.bundles()] == [0, 0]
    with pytest.raises(WorkerError, match="was shut down"):
        made.about()


def test_workers_that_do_not_run_are_not_found(ray_cluster):
    from verl.single_controller.ray import RayWorkerGroup

    with pytest.raises(WorkerError, match="no running worker is called 'nobody'"):
        RayWorkerGroup.from_detached(worker_names=["nobody"], ray_cls_with_init=RayWorkerGroup.describe(Echo))
    with pytest.raises(WorkerError, match="needs resource_pool, worker_names or worker_handles"):
        RayWorkerGroup(ray_cls_with_init=RayWorkerGroup.describe(Echo))


def spoil(worker, batch):
    """Writes into all that it was given, and keeps what it returns."""
    seen = batch.select(deepcopy=True)
    for column in batch.batch.values():
        column.fill_(-1)
    batch.non_tensor_batch["name"][:] = "spoiled"
    batch.meta_info["step"] = -1
    worker.kept = seen
    return seen


def spoil_what_was_returned(worker):
    worker.kept.batch["x"].fill_(-2)
    worker.kept.non_tensor_batch["name"][:] = "late"


def four(**kwargs):
    tensors = {
        "x": torch.arange(4.0),
        "from_numpy": torch.from_numpy(np.arange(4)),
        "strided": torch.arange(12).view(4, 3)[:, 1],
    }
    with torch.inference_mode():
        tensors["sampled"] = torch.arange(4, dtype=torch.bfloat16)
    return DataProto.from_dict(tensors, {"name": ["a", "b", "c", "d"]}, {"step": 3})


def same_rows(a, b):
    tensors = all(torch.equal(a.batch[key], b.batch[key]) for key in b.batch.keys())
    return tensors and a.non_tensor_batch["name"].tolist() == b.non_tensor_batch["name"].tolist()


def test_writes_of_a_worker_stay_with_the_worker(echo):
    sent = four()
    back = echo.execute_with_func_generator(spoil, sent)
    assert same_rows(sent, four())
    assert sent.meta_info == {"step": 3}
    assert same_rows(back, four())
    echo.execute_all_sync("execute_with_func_generator", spoil_what_was_returned)
    assert same_rows(back, four())


def test_writes_of_the_driver_stay_with_the_driver(echo):
    sent = four()
    back = echo.execute_with_func_generator(spoil, sent)
    for column in (*sent.select(["x", "from_numpy", "strided"]).batch.values(), *back.batch.values()):
        column.fill_(7)
    assert same_rows(echo.execute_with_func_generator(returned, four()), four())


def returned(worker, batch):
    return worker.kept


def spoil_tensors(worker, batch):
    for column in (
        batch.values() if isinstance(batch, TensorDict) else [*batch.batch.values(), *batch.meta_info.values()]
    ):
        column.fill_(-1)


def test_what_is_no_plain_batch_stays_the_drivers_too(echo):
    rows = TensorDict({"x": torch.arange(4.0)}, batch_size=[4])
    echo.execute_with_func_generator(spoil_tensors, rows)
    assert rows["x"].tolist() == [0, 1, 2, 3]
    constants = batch_of([1.0, 2.0], meta_info={"weights": torch.ones(2)})
    echo.execute_with_func_generator(spoil_tensors, constants)
    assert constants.meta_info["weights"].tolist() == [1, 1]
    # 11 and 12 of the first rank; of two ranks the second adds 20
    future = echo.proto_later(batch_of([1.0, 2.0]))
    echo.execute_with_func_generator(spoil_tensors, future)
    expected = [11, 12] if echo.world_size == 1 else [11, 22]
    future.get().batch["x"].zero_()
    assert future.get().batch["x"].tolist() == expected


def write_in_parallel(worker, batch):
    barrier = threading.Barrier(len(batch))

    def write(row):
        barrier.wait()
        batch.batch["x"][row] = row

    threads = [threading.Thread(target=write, args=(row,)) for row in range(len(batch))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return batch


def test_threads_of_a_worker_may_write_to_one_column(echo):
    for _ in range(20):
        written = echo.execute_with_func_generator(
            write_in_parallel, DataProto.from_dict({"x": torch.zeros(8, 1 << 14)})
        )
        rows = 8 // echo.world_size
        assert torch.equal(written.batch["x"], (torch.arange(8.0) % rows)[:, None].expand(8, 1 << 14))


def test_a_received_batch_is_freed_when_the_method_returns(echo):
    batch = DataProto.from_dict({"x": torch.zeros(4, 1 << 16)})
    ranks = echo.world_size
    for state in ("none", "freed"):
        found = echo.execute_with_func_generator(earlier_batch, batch)
        assert found.non_tensor_batch["earlier"].tolist() == [state] * ranks


def earlier_batch(worker, batch):
    gc.disable()  # what waits for the garbage collector is not freed
    earlier = getattr(worker, "earlier", None)
    worker.earlier = weakref.ref(batch)
    if earlier is None:
        state = "none"
    else:
        gc.enable()
        state = "freed" if earlier() is None else "alive"
    return DataProto.from_dict(non_tensors={"earlier": [state]})


def test_the_object_store_does_not_grow(ray_pair):
    echo = ray_pair.spawn(["echo"])["echo"]
    batch = DataProto.from_dict({"x": torch.zeros(64, 1 << 13)})  # 2 MiB
    echo.proto(batch)
    wait_until_in_use_are_less_than(4 << 20)
    for _ in range(50):
        assert len(echo.proto(batch)) == 64
    # 50 calls moved 200 MiB
    wait_until_in_use_are_less_than(4 << 20)


def test_a_failed_call_leaves_nothing_in_the_object_store(ray_pair):
    echo = ray_pair.spawn(["echo"])["echo"]
    batch = DataProto.from_dict({"x": torch.zeros(64, 1 << 13)})  # 2 MiB
    gc.disable()  # what waits for the garbage collector is not freed
    try:
        for _ in range(5):
            with pytest.raises(WorkerError, match="on rank 1 of 2: ValueError: no rows"):
                echo.execute_with_func_generator(fail_on_rank_1, batch)
        wait_until_in_use_are_less_than(1 << 20)
    finally:
        gc.enable()


def fail_on_rank_1(worker, batch):
    if worker.rank == 1:
        raise ValueError("no rows")
    return batch


def store_bytes():
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    # Other Rays may run on this machine.
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def wait_until_in_use_are_less_than(size):
    eventually(lambda: store_bytes() < size, lambda: f"{store_bytes()} bytes are in use")


def test_a_worker_outside_of_a_group_takes_its_devices(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(name, value)
    assert Worker().get_cuda_visible_devices() == "0,1"
    assert Worker(cuda_visible_devices="1").get_cuda_visible_devices() == "1"
