"""Processes that die, at every moment: what is raised, and what can be done afterwards."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.single_controller.mortal import Mortal
from tests.single_controller.workers import Echo, batch_of
from tests.support.waiting import eventually, is_alive
from verl.errors import ProcessLostError, WorkerError
from verl.single_controller.base.dispatch import PendingOutputs
from verl.supervision import processes
from verl.supervision.stacks import silence_s


@pytest.fixture(scope="module")
def places(pool):
    """The same two places for all tests of this file: each must leave them free for the next."""
    from verl.single_controller.ray import SubRayResourcePool

    return SubRayResourcePool(pool.get_placement_groups(), 0, 2, use_gpu=False)


@contextmanager
def group_of(places, *args, guarded=False):
    from verl.single_controller.ray import RayWorkerGroup

    group = RayWorkerGroup(places, RayWorkerGroup.describe(Mortal, *args), device_name="cpu")
    if guarded:
        group.guard()
    try:
        yield group
    finally:
        group.shutdown()
        group.shutdown()


@pytest.fixture(params=[False, True], ids=["unguarded", "guarded"])
def guarded(request):
    return request.param


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_killed_in_a_collective_is_named_though_others_fail_first(places, guarded, rank, tmp_path, monkeypatch):
    from verl.single_controller.ray import failures

    monkeypatch.setattr(failures, "GRACE_S", 10.0)
    with group_of(places, guarded=guarded) as group:
        pids = group.execute_all_sync("pid")
        with pytest.raises(ProcessLostError) as caught:
            group.execute_all_sync("all_reduce", rank, "die", started=str(tmp_path / "started"))
        said = str(caught.value)
        assert said.startswith(
            f"rank {rank} of 2 died in Mortal.all_reduce ({group.worker_names[rank]}, pid {pids[rank]} on node "
        )
        assert "connection error code 2" in said
        assert "It was killed (kill -9, or the kernel's out-of-memory killer" in said
        assert f"-{pids[rank]}.err." in said
        assert f"  rank {1 - rank}: " in said.split("Failed after it:\n")[1]
        with pytest.raises(ProcessLostError, match=rf"^rank {rank} of 2 died in Mortal.*pid {pids[rank]} "):
            group.execute_all_sync("pid")
    eventually(lambda: not any(map(is_alive, pids)), "the end of all ranks")


def test_a_rank_killed_between_calls_is_found_by_the_next(places, guarded):
    with group_of(places, guarded=guarded) as group:
        pids = group.execute_all_sync("pid")
        os.kill(pids[1], signal.SIGKILL)
        if guarded:
            eventually(lambda: not any(map(is_alive, pids)), "the end of rank 0, by the guard")
        with pytest.raises(ProcessLostError, match=r"^rank 1 of 2 died .*SYSTEM_ERROR"):
            group.train(batch_of([1.0, 2.0]))  # asks for the mesh first
        with pytest.raises(ProcessLostError, match=r"^rank 1 of 2 died "):
            group.wait_for(group.execute_all_async("pid"))


def test_a_rank_killed_in_its_constructor_is_not_waited_for(places):
    start = time.monotonic()
    with (
        pytest.raises(ProcessLostError, match=r"^rank 1 of 2 died in Mortal.__init__ .*SYSTEM_ERROR"),
        group_of(places, 1),
    ):
        pass
    assert time.monotonic() - start < 200, "rank 0 waits for rank 1 for 5 minutes"


def test_a_death_that_only_the_broken_connection_of_another_tells_is_found(places, monkeypatch):
    from verl.single_controller.ray import failures

    with group_of(places) as group:
        pending = group.execute_all_async("all_reduce", 1, "die")
        with pytest.raises(
            ProcessLostError, match=r"(?s)^rank 1 of 2 died in Mortal.all_reduce .*rank 0: RuntimeError"
        ):
            group.wait_for(PendingOutputs(pending[:1], "all_reduce", [0]))  # nobody asks for the answer of rank 1
    monkeypatch.setattr(failures, "DEATH_GRACE_S", 0.1)
    with group_of(places) as group:
        with pytest.raises(WorkerError, match=r"^Mortal.all_reduce on rank 0 of 2: RuntimeError: Connection") as caught:
            group.execute_all_sync("all_reduce", 0, "break_connection")
        assert not isinstance(caught.value, ProcessLostError), "nobody died"


@pytest.mark.slow
def test_a_constructor_that_hangs_says_where(places):
    from verl.single_controller.ray import RayWorkerGroup

    worker = RayWorkerGroup.describe(Mortal, 1, "spin")
    with pytest.raises(ProcessLostError, match=r"^2 of 2 ranks of Mortal did not start within 10 s") as caught:
        RayWorkerGroup(places, worker, device_name="cpu", ray_wait_register_center_timeout=10)
    assert re.search(r"rank 0 .*: in .*, called by __init__ \(.*mortal.py", str(caught.value))
    assert re.search(r"rank 1 .*: in _spin \(.*mortal.py", str(caught.value))


def test_a_future_whose_rank_died_says_so(places):
    with group_of(places) as group:
        assert group.train_later(batch_of([1.0, 2.0])).get().batch["x"].tolist() == [1, 2]
        later = group.train_later(batch_of([1.0, 2.0]), dying=1)
        with pytest.raises(ProcessLostError, match=r"^rank 1 of 2 died in Mortal.train_later "):
            later.get()


def test_an_exception_is_no_loss(places, guarded):
    with group_of(places, guarded=guarded) as group:
        with pytest.raises(WorkerError, match=r"^Mortal.all_reduce on rank 0 of 2: ValueError: a row") as caught:
            group.execute_all_sync("all_reduce", 0, "raise")
        assert not isinstance(caught.value, ProcessLostError)


def test_a_helper_that_a_worker_lost_is_a_loss(places):
    with group_of(places) as group:
        expected = r"(?s)^Mortal.all_reduce on rank 0 of 2: ProcessLostError: the engine's server died"
        with pytest.raises(ProcessLostError, match=expected):
            group.execute_all_sync("all_reduce", 0, "lose_a_helper")


def test_the_signal_that_a_process_got_is_found_in_its_log(places):
    expected = r"^rank 1 of 2 died .*signal SIGBUS .*/dev/shm is full"
    with group_of(places) as group, pytest.raises(ProcessLostError, match=expected):
        group.execute_all_sync("all_reduce", 1, "bus_error")


def test_what_arrived_outlives_who_sent_it(places):
    with group_of(places) as group:
        received = group.train(batch_of([1.0, 2.0]).repeat(1 << 19))  # 4 MiB, in the object store
    assert received.batch["x"].sum().item() == 3 * 2**19


# ---- hangs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "what", "why"),
    [
        pytest.param(1, "stop", "its process is stopped, by a signal or a debugger", marks=pytest.mark.slow),
        pytest.param(0, "spin", "not in the collective of rank 1", marks=pytest.mark.slow),
        pytest.param(1, "sleep", "not in the collective of rank 0", marks=pytest.mark.slow),
        (1, "answer", "has answered, and never came to the collective of rank 0"),
    ],
)
def test_a_hang_names_who_keeps_the_others_waiting(places, rank, what, why):
    with group_of(places) as group:
        pids = group.execute_all_sync("pid")
        group.guard(hang_timeout_s=3)
        with pytest.raises(ProcessLostError) as caught:
            group.execute_all_sync("all_reduce", rank, what)
        first, second, *ranks, last = str(caught.value).splitlines()
        assert first.startswith(
            f"rank {rank} of 2 hangs in Mortal.all_reduce ({group.worker_names[rank]}, pid {pids[rank]} "
        )
        assert first.endswith(f"): {why}.")
        assert "hang_timeout_s=3 s" in second
        (waits,) = (line for line in ranks if line.startswith(f"  rank {1 - rank} "))
        assert re.search(
            r"in all_reduce \(.*/torch/distributed/distributed_c10d.py:\d+\), called by _sum \(.*/mortal.py:", waits
        )
        if what in ("spin", "sleep"):
            assert f"in _{what} (" in "\n".join(ranks)
        folder = Path(last.removeprefix("The stacks of all threads of all ranks are in ").removesuffix("."))
        assert "mortal.py" in (folder / f"rank_{1 - rank}.txt").read_text()
        assert (folder / f"rank_{rank}.txt").read_text()
        with pytest.raises(ProcessLostError, match=rf"^rank {rank} of 2 hangs"):
            group.execute_all_sync("pid")
    eventually(lambda: not any(map(is_alive, pids)), "the end of all ranks")


@pytest.mark.slow
def test_a_rank_that_shows_life_may_work_longer_than_the_limit(places):
    with group_of(places) as group:
        group.guard(hang_timeout_s=3)
        assert group.execute_all_sync("all_reduce", 1, "work") == [2.0, 2.0]


def test_the_youngest_sign_of_the_processes_counts(tmp_path):
    for pid, age_s in ((1, 100), (2, 10)):
        file = tmp_path / f"{pid}.life"
        file.touch()
        os.utime(file, (time.monotonic() - age_s,) * 2)
    assert silence_s(tmp_path, [1, 2, 3]) == pytest.approx(10, abs=5)
    assert silence_s(tmp_path, [3]) == math.inf


def test_the_time_limit_of_a_call_begins_when_those_before_it_are_answered(monkeypatch):
    from verl.single_controller.ray import failures

    now = 0.0
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now))
    calls = failures.WaitingCalls()
    update, scores = calls.new_number(), calls.new_number()
    with calls.waiting(scores):
        with ThreadPoolExecutor(1) as other:
            waits = calls.waiting(update)
            other.submit(waits.__enter__).result()
            now = 50.0
            assert calls.left_s(scores, 30.0) == 30.0  # the update is still computed
            assert other.submit(calls.left_s, update, 30.0).result() == -20.0
            other.submit(waits.__exit__, None, None, None).result()
        now = 60.0
        assert calls.left_s(scores, 30.0) == 20.0


# ---- without Ray ------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    from verl.single_controller.local import LocalWorkerGroup

    group = LocalWorkerGroup(None, LocalWorkerGroup.describe(Echo))
    yield group
    group.shutdown()


@pytest.mark.parametrize("what", ["sleep", "spin"])
def test_a_call_that_hangs_in_this_process_is_interrupted(alone, what, capfd):
    alone.guard(hang_timeout_s=0.5)
    before = signal.getsignal(signal.SIGUSR2)
    hangs = {"sleep": time.sleep, "spin": spin}[what]
    with pytest.raises(
        ProcessLostError, match=r"^Echo.execute_func_rank_zero has not answered within hang_timeout_s=0.5 s"
    ):
        alone.execute_func_rank_zero(hangs, 60)
    assert "test_losses.py" in capfd.readouterr().err, "the stacks are not on stderr"
    assert alone.execute_func_rank_zero(abs, -3) == 3
    assert signal.getsignal(signal.SIGUSR2) is before


def draw(monkeypatch):
    monkeypatch.setattr(processes, "LIFE_EVERY_S", 0.0)
    for _ in range(10):
        time.sleep(0.1)
        processes.show_life()


def test_a_call_that_gives_signs_of_life_may_take_its_time(alone, capfd, monkeypatch):
    alone.guard(hang_timeout_s=0.7)
    alone.execute_func_rank_zero(draw, monkeypatch)
    alone.guard(hang_timeout_s=0.2)
    with alone.limit_silence(lambda: 0.0):
        alone.execute_func_rank_zero(time.sleep, 0.7)
    assert capfd.readouterr().err == ""
    began = time.monotonic()
    with (
        alone.limit_silence(lambda: max(0.0, time.monotonic() - began - 0.3)),  # falls silent after 0.3 s
        pytest.raises(ProcessLostError, match=r"hang_timeout_s=0\.2 s"),
    ):
        alone.execute_func_rank_zero(time.sleep, 60)
    assert time.monotonic() - began >= 0.5


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_call_in_time_is_left_alone_and_so_is_what_follows_it(alone, capfd):
    alone.guard(hang_timeout_s=0.3)
    assert alone.execute_func_rank_zero(abs, -3) == 3
    time.sleep(0.6)
    with pytest.raises(ValueError, match="bad row"):
        alone.boom(0)
    time.sleep(1.5)
    assert capfd.readouterr().err == ""


def test_a_call_from_another_thread_cannot_be_interrupted_but_is_written_down(alone, capfd):
    alone.guard(hang_timeout_s=0.2)
    with ThreadPoolExecutor() as threads:
        threads.submit(alone.execute_func_rank_zero, time.sleep, 3).result()
    assert "Timeout (0:00:01.200000)!" in capfd.readouterr().err  # a second later than where it can be interrupted


def test_a_collective_that_waited_too_long_names_the_setting_of_its_limit():
    from ray.exceptions import RayTaskError

    from verl.single_controller.ray.failures import GroupCall, _failure_message

    said = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete"
    error = RayTaskError("all_reduce", "", RuntimeError(said))
    message = _failure_message({1: error}, error, GroupCall("Mortal", "all_reduce", [None, None]))
    assert message.startswith(f"Mortal.all_reduce on rank 1 of 2: RuntimeError: {said}\n")
    assert "raise actor_rollout_ref.nccl_timeout (seconds)" in message
