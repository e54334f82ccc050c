"""Checkpoints of a run whose whole model is one tensor: crashes at every write, damage to every file, full disks."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint.files import DurableFile, FileEntry, write_states
from verl.checkpoint.ranks import SaveReport, Writing
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.states import RunState, rng_state
from verl.checkpoint.steps import wrong_contents
from verl.errors import CheckpointError
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.deferred import Deferred

SHARD = "model_world_size_1_rank_0.pt"


class OneWeight(Worker):
    """What a checkpoint asks of workers, around a single tensor."""

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.weight = torch.zeros(100)
        self.background = background
        self.fails = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str, global_step: int) -> None:
        states = {SHARD: {"weight": self.weight.clone()}}

        def write(place: Path) -> dict[str, FileEntry]:
            if self.fails:
                raise OSError(28, "No space left on device")
            place.mkdir(parents=True, exist_ok=True)
            return write_states(place, states)

        self.writing = Writing(write, Path(folder), self.background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_report(self, wait: bool = False) -> SaveReport | None:
        return self.writing.report(wait)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_files(self, folder: str, files: dict[str, FileEntry]) -> list[str]:
        return wrong_contents(Path(folder), files)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        self.weight = torch.load(Path(local_path) / SHARD, weights_only=True)["weight"]


class Run:
    """A run that writes the number of its step everywhere, so that a mixture of two steps would show."""

    def __init__(self, root: Path, critic: bool = False, background: bool = False, **plan: Any) -> None:
        names = ("actor", "critic") if critic else ("actor",)
        describe = LocalWorkerGroup.describe
        groups = {name: LocalWorkerGroup(ray_cls_with_init=describe(OneWeight, background)) for name in names}
        self.workers: list[OneWeight] = [group.workers[0] for group in groups.values()]
        self.checkpoint = TrainerCheckpoint(CheckpointPlan(root=str(root), **plan), groups)

    def state(self, step: int) -> RunState:
        for worker in self.workers:
            worker.weight.fill_(step)
        torch.manual_seed(step)
        return RunState(
            global_step=step, dataloader={"at": step}, controllers={"kl_ctrl": {"value": step / 10}}, rng=rng_state()
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpoint.save(self.state(step))
            self.checkpoint.poll()

    def resume(self) -> int | None:
        """The step that was gone on from; all parts are of that step."""
        found = self.checkpoint.load()
        if found is None:
            return None
        step = found.global_step
        assert found.dataloader == {"at": step}
        assert found.controllers == {"kl_ctrl": {"value": step / 10}}
        assert all(torch.equal(worker.weight, torch.full((100,), float(step))) for worker in self.workers)
        torch.manual_seed(step)
        assert torch.equal(found.rng["torch"], torch.get_rng_state())
        return step

    def step_after_a_loss(self) -> int | None:
        """The step that new workers go on from."""
        found = self.checkpoint.load_again()
        return None if found is None else found.global_step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ---- a crash at every operation -----------------------------------------------------------------


class Crash:
    """Ends the process at the ``at``-th operation on files, as ``kill -9`` does: nothing is flushed.

    Of the writes only each ``every_write``-th counts. With ``power_lost`` also what is not on the disk yet is
    gone: the contents of files that were not synced, and names in folders that were not.
    """

    def __init__(self, at: int, power_lost: bool, every_write: int) -> None:
        self.left = at
        self.writes = 0
        self.power_lost = power_lost
        self.unsynced_files: set[str] = set()
        self.unsynced_renames: list[tuple[str, str]] = []
        for name in ("mkdir", "rmdir", "unlink", "fsync", "rename", "replace"):
            setattr(os, name, self.counted(name, getattr(os, name)))
        original = DurableFile.write

        def write(file: DurableFile, data: Any) -> int:
            path = str(file._file.name)
            self.unsynced_files.add(path)
            self.writes += 1
            if self.writes % every_write == 0:
                if self.left == 1:
                    file._file.write(bytes(data)[: len(bytes(data)) // 2])
                    file._file.flush()
                self.count()
            return original(file, data)

        DurableFile.write = write  # type: ignore[method-assign]

    def count(self) -> None:
        self.left -= 1
        if self.left > 0:
            return
        if self.power_lost:
            for path in self.unsynced_files:
                if os.path.exists(path):
                    os.truncate(path, 0)
            for source, target in reversed(self.unsynced_renames):
                RENAME(target, source)
        os._exit(9)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count()
            result = function(*args, **kwargs)
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{args[0]}")
                self.unsynced_files.discard(path)
                self.unsynced_renames = [(a, b) for a, b in self.unsynced_renames if os.path.dirname(b) != path]
            if name in ("rename", "replace"):
                self.unsynced_renames.append((str(args[0]), str(args[1])))
            return result

        return operation


RENAME = os.rename


def in_a_process(task: Callable[[], None]) -> int:
    """Do ``task`` in a copy of this process; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            task()
        except BaseException:
            logging.getLogger("test").exception("the save failed")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def every_crash(
    folder: Path, before: Path, task: Callable[[Path], None], power_lost: bool = False, every_write: int = 7
) -> Iterator[Path]:
    """``folder`` as a crash of ``task`` leaves it, for each operation that it does; ``before`` is how it began."""
    for at in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)

        def crashing(at: int = at) -> None:
            Crash(at, power_lost, every_write)
            task(folder)

        code = in_a_process(crashing)
        yield folder
        if code == 0:
            assert at > 15
            return
        assert code == 9
    raise AssertionError("the task never ended")


CRASHES = [
    pytest.param(False, 7, id="killed", marks=pytest.mark.slow),
    pytest.param(True, 7, id="power lost"),
    pytest.param(False, 1, id="killed in any write", marks=pytest.mark.slow),
    pytest.param(True, 1, id="power lost in any write", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("power_lost, every_write", CRASHES)
def test_a_crash_at_any_operation_leaves_the_step_before_or_the_new_one(tmp_path, power_lost, every_write):
    before = tmp_path / "before"
    Run(before).save(1, 2)
    found = []

    def go_on(root: Path) -> None:
        run = Run(root, keep={"actor": 2})
        run.resume()
        run.save(3)

    for root in every_crash(tmp_path / "run", before, go_on, power_lost, every_write):
        found.append(Run(root).resume())
        # Going on works, and sweeps up what the crash has left.
        Run(root).save(4)
        assert Run(root).resume() == 4
        assert not [name for name in names(root) if name.endswith((".partial", ".replaced"))]
    assert set(found) == {2, 3}
    assert found == sorted(found)  # once the new step is there it does not go away again


@pytest.mark.parametrize("power_lost, every_write", CRASHES)
def test_a_crash_while_a_step_is_saved_again_never_leaves_none(tmp_path, power_lost, every_write):
    before = tmp_path / "before"
    Run(before).save(1)
    for root in every_crash(tmp_path / "run", before, lambda root: Run(root).save(1), power_lost, every_write):
        assert Run(root).resume() == 1


def test_a_crash_of_the_very_first_save_starts_anew_or_goes_on(tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    found = [Run(root).resume() for root in every_crash(tmp_path / "run", before, lambda root: Run(root).save(1))]
    assert set(found) == {None, 1}
    assert found == sorted(found, key=lambda step: step or 0)


# ---- damage -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ("manifest.json", "trainer_state.json", "data.pt", "driver_rng.pt", f"actor/{SHARD}", f"critic/{SHARD}")


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["a bit flipped", "cut short", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_step_before_is_used(tmp_path, name, damage, caplog):
    Run(tmp_path, critic=True).save(1, 2)
    damage(tmp_path / "global_step_2" / name)
    if (name, damage) == ("manifest.json", flip):
        name = ""  # the bit may be one of the sum of another file, which is named then
    with pytest.raises(CheckpointError, match=rf"global_step_2/{name}.*on_damaged_checkpoint=stop no other step"):
        Run(tmp_path, critic=True, on_damaged="stop").resume()
    named = str(tmp_path / "global_step_2")
    with pytest.raises(CheckpointError, match=rf"not whole: .*global_step_2/{name}"):
        Run(tmp_path, critic=True, resume_mode="resume_path", resume_from_path=named).resume()
    assert Run(tmp_path, critic=True).resume() == 1
    assert f"global_step_2/{name}" in caplog.text
    assert f"Going on from {tmp_path}/global_step_1" in caplog.text
    damage(tmp_path / "global_step_1" / (name or "manifest.json"))
    with pytest.raises(CheckpointError, match=rf"global_step_2/{name}.*global_step_1/{name}.* no whole step before"):
        Run(tmp_path, critic=True).resume()


def test_every_file_is_in_the_manifest(tmp_path):
    Run(tmp_path, critic=True).save(1)
    step = tmp_path / "global_step_1"
    assert {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("content", [None, "", "latest", "-3", "9", "1e3"])
def test_a_latest_file_that_names_no_step_is_no_fresh_start(tmp_path, content, caplog):
    Run(tmp_path).save(1, 2)
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.unlink() if content is None else latest.write_text(content)
    with pytest.raises(CheckpointError, match="latest_checkpointed_iteration"):
        Run(tmp_path, on_damaged="stop").resume()
    assert Run(tmp_path).resume() == 2
    assert "latest_checkpointed_iteration.txt" in caplog.text
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    if content is None:
        assert Run(tmp_path).resume() is None  # there is nothing
    else:
        with pytest.raises(CheckpointError, match="latest_checkpointed_iteration"):
            Run(tmp_path).resume()


def test_the_user_may_go_back_by_the_latest_file(tmp_path):
    Run(tmp_path).save(1, 2, 3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    run = Run(tmp_path, keep={"actor": 1})
    assert run.resume() == 2
    flip(tmp_path / "global_step_2" / "data.pt")
    assert Run(tmp_path).resume() == 1  # not 3, which it was gone back from


def test_a_step_of_an_earlier_version_is_taken_as_it_is(tmp_path, caplog):
    Run(tmp_path).save(1)
    step = tmp_path / "global_step_1"
    (step / "manifest.json").unlink()
    (step / "trainer_state.json").write_text('{"global_step": 1, "kl_ctrl": {"value": 0.1}}')
    assert Run(tmp_path).resume() == 1
    assert "saved by an earlier version, and is not verified" in caplog.text


def test_a_checkpoint_of_another_algorithm_is_no_damage(tmp_path):
    Run(tmp_path).save(1)
    with pytest.raises(CheckpointError, match=r"has no 'critic' folder, which this run needs"):
        Run(tmp_path, critic=True).resume()


def damaged_after_another_run(root: Path) -> None:
    """A saves 1, 2, 3; B starts anew, saves 2 and 4; step 4 loses a bit."""
    Run(root).save(1, 2, 3)
    run = Run(root, resume_mode="disable", keep={"actor": 2})
    run.resume()
    run.save(2, 4)
    flip(root / "global_step_4" / "actor" / SHARD)


def test_no_step_of_another_run_takes_the_place_of_a_damaged_one(tmp_path, caplog):
    damaged_after_another_run(tmp_path)
    run = Run(tmp_path)
    assert run.resume() == 2
    assert "global_step_1, global_step_3: saved by another run, passed over" in caplog.text
    run.save(3)  # and a process that goes on is the same run
    flip(tmp_path / "global_step_3" / "actor" / SHARD)
    assert Run(tmp_path).resume() == 2
    flip(tmp_path / "global_step_2" / "actor" / SHARD)
    with pytest.raises(CheckpointError, match=r"global_step_1: saved by another run, passed over.*no whole step"):
        Run(tmp_path).resume()


@pytest.mark.parametrize("lost", ["manifest.json", "trainer_state.json"])
def test_one_of_two_files_is_enough_to_know_the_run(tmp_path, lost):
    damaged_after_another_run(tmp_path)
    (tmp_path / "global_step_4" / lost).write_bytes(b"{")
    assert Run(tmp_path).resume() == 2


def test_steps_that_were_gone_back_from_are_of_another_run(tmp_path):
    Run(tmp_path).save(2, 3, 4)
    run = Run(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_2"))
    run.resume()
    run.save(5)
    flip(tmp_path / "global_step_5" / "data.pt")
    assert Run(tmp_path).resume() == 2


def test_several_runs_and_no_latest_is_an_error(tmp_path):
    damaged_after_another_run(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="steps of several runs lie there"):
        Run(tmp_path).resume()


def test_steps_saved_before_steps_named_their_run_are_one_run(tmp_path):
    Run(tmp_path).save(1, 2)
    for path in [*tmp_path.glob("*/manifest.json"), *tmp_path.glob("*/trainer_state.json")]:
        described = json.loads(path.read_text())
        del described["way"]
        path.write_text(json.dumps(described))
    for path in tmp_path.glob("*/manifest.json"):
        described, text = json.loads(path.read_text()), (path.parent / "trainer_state.json").read_bytes()
        described["files"]["trainer_state.json"] = {"size": len(text), "sha256": sha256(text).hexdigest()}
        path.write_text(json.dumps(described))
    flip(tmp_path / "global_step_2" / "data.pt")
    run = Run(tmp_path)
    assert run.resume() == 1
    run.save(3)
    flip(tmp_path / "global_step_3" / "data.pt")
    assert Run(tmp_path).resume() == 1


# ---- what is kept -------------------------------------------------------------------------------


def test_only_old_steps_go(tmp_path):
    run = Run(tmp_path, critic=True, keep={"actor": 2, "critic": 1})
    run.save(1, 2, 3)
    assert names(tmp_path) == ["global_step_2", "global_step_3", "latest_checkpointed_iteration.txt"]
    assert not (tmp_path / "global_step_2" / "critic").exists()
    # Back to 2: what comes after it belongs to another run, and neither counts nor goes.
    back = Run(tmp_path, keep={"actor": 1}, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_3"))
    assert back.resume() == 3
    (tmp_path / "global_step_3").rename(tmp_path / "global_step_9")
    back.save(4)
    assert names(tmp_path) == ["global_step_4", "global_step_9", "latest_checkpointed_iteration.txt"]
    assert Run(tmp_path).resume() == 4


def test_steps_of_another_run_neither_count_nor_go(tmp_path):
    Run(tmp_path).save(1, 2, 3)
    run = Run(tmp_path, resume_mode="disable", keep={"actor": 1})
    run.resume()
    run.save(4, 5)
    assert names(tmp_path)[:-1] == [f"global_step_{step}" for step in (1, 2, 3, 5)]


def test_a_replaced_step_that_is_a_link_or_cannot_be_removed_is_no_failed_save(tmp_path, caplog, monkeypatch):
    root = tmp_path / "run"
    Run(root).save(1)
    (root / "global_step_1").rename(tmp_path / "elsewhere")
    (root / "global_step_1").symlink_to(tmp_path / "elsewhere")
    run = Run(root)
    run.save(1)
    assert run.checkpoint.failed_saves == 0
    assert names(root) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "elsewhere").is_dir()

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy", ".nfs0001")

    again = Run(root)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)  # what NFS answers while another machine reads a file
        again.save(1)
    assert again.checkpoint.failed_saves == 0
    assert "cannot be removed" in caplog.text
    assert Run(root).resume() == 1


def test_what_was_resumed_from_goes_only_when_the_next_step_is_whole(tmp_path):
    Run(tmp_path).save(1)
    run = Run(tmp_path, delete_after_load=True, keep={"actor": 1})
    assert run.resume() == 1
    run.workers[0].fails = True
    run.save(2)
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    run.workers[0].fails = False
    run.save(3)
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]
    again = Run(tmp_path, delete_after_load=True)
    assert again.resume() == 3
    again.save(4)
    assert names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]


# ---- saves that fail, and saves in the background ------------------------------------------------


@pytest.mark.parametrize("background", [False, True], ids=["in place", "background"])
def test_a_failed_save_is_tried_again_after_the_next_step(tmp_path, background, caplog):
    run = Run(tmp_path, background=background)
    run.save(1)
    run.checkpoint.finish()
    run.workers[0].fails = True
    run.save(2)
    run.workers[0].writing.report(wait=True)
    run.checkpoint.poll()
    assert run.checkpoint.owed
    assert run.checkpoint.metrics() == {"recovery/failed_saves": 1.0}
    assert "step 2 could not be written: OSError: [Errno 28] No space left on device (rank 0)" in caplog.text
    assert "untouched (global_step_1)" in caplog.text
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]  # no rest that fills the disk
    run.workers[0].fails = False
    run.save(3)
    run.checkpoint.finish()
    assert not run.checkpoint.owed
    assert Run(tmp_path).resume() == 3


def test_the_last_save_must_succeed(tmp_path, caplog):
    run = Run(tmp_path)
    run.workers[0].fails = True
    run.save(1)
    with pytest.raises(CheckpointError, match=r"could not be written .* starts from the first step\."):
        run.checkpoint.finish()
    assert run.checkpoint.failed_saves == 2  # once more at the end
    assert caplog.text.count("could not write to") == 2
    assert "Traceback" not in caplog.text
    run.workers[0].fails = False
    run.checkpoint.finish()
    assert Run(tmp_path).resume() == 1


@pytest.mark.parametrize("background", [False, True], ids=["in place", "background"])
def test_a_failed_save_stops_where_asked(tmp_path, background):
    run = Run(tmp_path, background=background, on_failed_save="stop")
    run.workers[0].fails = True

    def save() -> None:
        run.save(1)
        run.checkpoint.finish()

    with pytest.raises(CheckpointError, match=r"step 1 could not be written: .*No space left"):
        save()


@pytest.mark.parametrize("limit", [10, 400, 1500])
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_a_failed_save(tmp_path, limit, caplog):
    """The largest size of a file stands for the space that is left: the system refuses what goes beyond."""
    run = Run(tmp_path, background=True)
    run.save(1)
    run.checkpoint.finish()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        run.checkpoint.save(run.state(3))
        run.checkpoint.rescue()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be written: " in caplog.text
    assert "File too large" in caplog.text
    assert run.checkpoint.owed
    run.checkpoint.finish()
    assert Run(tmp_path).resume() == 3


def test_an_unwritable_folder_is_a_failed_save(tmp_path):
    (tmp_path / "file").write_text("no folder")
    run = Run(tmp_path / "file")
    run.save(1)
    assert run.checkpoint.owed
    with pytest.raises(CheckpointError, match="could not be written"):
        run.checkpoint.finish()


def test_a_save_in_the_background_holds_what_was_when_it_began(tmp_path):
    run = Run(tmp_path, background=True)
    run.save(1)
    for worker in run.workers:
        worker.weight.fill_(-1)  # the next step
    run.checkpoint.save(run.state(2))  # waits for the first
    assert Run(tmp_path).resume() == 1
    run.workers[0].writing.report(wait=True)
    assert not (tmp_path / "global_step_2").exists()  # written, and not committed by anybody
    run.checkpoint.poll()
    assert Run(tmp_path).resume() == 2
    run.checkpoint.save(run.state(3))
    run.checkpoint.rescue()
    assert Run(tmp_path).resume() == 3


def test_what_lost_workers_were_writing_is_owed(tmp_path):
    run = Run(tmp_path, background=True)
    run.save(1)
    run.checkpoint.finish()
    run.checkpoint.save(run.state(2))
    run.workers[0].writing.report(wait=True)  # it had written all, and died before anybody heard of it
    run.checkpoint.workers_replaced(Run(tmp_path).checkpoint.groups)
    assert run.checkpoint.owed
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert run.step_after_a_loss() == 1


def test_a_run_that_lost_its_workers_takes_its_own_newest_step(tmp_path):
    Run(tmp_path).save(1, 5)
    run = Run(tmp_path, resume_mode="disable")
    assert run.resume() is None
    assert run.step_after_a_loss() is None  # those are of another run
    run.save(1, 2)
    assert run.step_after_a_loss() == 2
    flip(tmp_path / "global_step_2" / "data.pt")
    assert run.step_after_a_loss() == 1
    run.save(2)  # the damaged one is not taken for saved
    assert run.step_after_a_loss() == 2
    resumed = Run(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_5"))
    assert resumed.resume() == 5
    assert resumed.step_after_a_loss() == 5


def test_a_data_set_whose_state_could_not_be_read_back_says_so(tmp_path):
    run = Run(tmp_path)
    state = RunState(global_step=1, dataloader={"sampler": Path("x")}, controllers={}, rng={})
    with pytest.raises(CheckpointError, match="data set or sampler may hold tensors, numbers, strings"):
        run.checkpoint.save(state)


def test_a_disk_without_room_for_what_was_sampled_ahead_is_a_failed_save(tmp_path):
    batch = DataProto.from_dict({"ids": torch.arange(100_000)})
    run = Run(tmp_path)
    run.save(1)
    state = replace(run.state(2), pending=Deferred.from_value({"3-batch": batch}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        run.checkpoint.save(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.checkpoint.owed
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    run.checkpoint.save(state)
    run.checkpoint.finish()
    read = Run(tmp_path).checkpoint.load()
    assert read is not None
    ((name, path),) = read.pending.result().items()
    assert name == "3-batch"
    assert torch.equal(DataProto.load_from_disk(path).batch["ids"], batch.batch["ids"])
    flip(path)  # it is one of the files that are checked
    assert Run(tmp_path).resume() == 1


def test_files_that_this_process_cannot_see_are_no_checkpoint(tmp_path, caplog):
    run = Run(tmp_path, background=True)
    run.checkpoint.save(run.state(1))
    run.workers[0].writing.report(wait=True)
    (tmp_path / "global_step_1.partial" / "actor" / SHARD).unlink()
    run.checkpoint.poll()
    assert "must lie on a file system that all nodes share" in caplog.text
    assert names(tmp_path) == []
