"""Save, verify, prune and resume the checkpoints of a run: state of the workers and of the driver.

::

    {default_local_dir}/
      latest_checkpointed_iteration.txt     "N", written last: the step to resume from
      global_step_N/                        written as global_step_N.partial, renamed when complete
        manifest.json                       size and SHA-256 of every file
        actor/  critic/                     the engines' shards (:mod:`verl.checkpoint.shards`)
        data.pt                             state of the data loader, its sampler and data set
        trainer_state.json                  step, controllers of KL and entropy, epochs
        driver_rng.pt                       random generators of the driver

:mod:`verl.checkpoint.steps` describes how folders are committed and what a crash leaves.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from verl.checkpoint import steps
from verl.checkpoint.files import UNREADABLE, FileEntry, sync_folder, sync_tree, write_bytes, write_states
from verl.checkpoint.ranks import SaveReport
from verl.checkpoint.remote import RemoteSteps
from verl.checkpoint.resume import CheckpointPlan, ResumeChoice, TrainedGroup, is_public
from verl.checkpoint.states import DATA, PENDING, RNG, STATE, BatchForFile, RunState, from_arrays
from verl.checkpoint.steps import (
    LINEAGE,
    Lineage,
    contains_step,
    read_lineage,
    saved_steps,
    step_folder,
)
from verl.errors import CheckpointError, DataError, VerlError
from verl.utils.deferred import Deferred

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 2
"""Version of ``trainer_state.json``. Steps of version 2 have a manifest; version 1 had neither number nor manifest."""


class TrainerCheckpoint:
    """Saves and restores one run.

    ::

        state = checkpoint.load()              None: start from scratch
        ...each step:  checkpoint.save(state)  if a save is due, or checkpoint.owed
                       checkpoint.poll()       commits a finished save: from now on a run resumes from it
        checkpoint.finish()                    commits the last save, or raises

    Report a step to the trackers between :meth:`save` and :meth:`poll`, so that they have every step up to the one that
    a resumed run starts from.

    Args:
        plan: folder, retention and resume settings.
        groups: worker groups of an :class:`verl.workers.engine_worker.EngineWorker`, by the sub-folder that each
            writes; ``"."`` is the step's folder itself.
    """

    def __init__(self, plan: CheckpointPlan, groups: Mapping[str, TrainedGroup]) -> None:
        self.plan = plan
        self.root = Path(plan.root).expanduser().absolute()
        self.groups = groups
        self.remote = None if plan.remote is None else RemoteSteps(plan.remote, self.root)
        self.owed = False
        """A save failed and none has succeeded since: save after the next step."""
        self.failed_saves = 0
        self._writing: RunState | None = None
        self._last: RunState | None = None
        self._own_files: dict[str, FileEntry] = {}
        self._own_steps: list[int] = []
        self._loaded_from: Path | None = None
        self._id = uuid.uuid4().hex[:16]
        self._before: Lineage = ()
        """Lineage of the step that this process resumed from."""

    @property
    def last_saved(self) -> int | None:
        """The last step that this process saved."""
        return self._own_steps[-1] if self._own_steps else None

    # ---- saving -------------------------------------------------------------------------------

    def save(self, state: RunState) -> None:
        """Start saving the current state; waits for a save in progress first.

        Returns when the state is copied if ``checkpoint.async_save`` is on, else when it is written. :meth:`poll` or
        :meth:`finish` commits it. A failure is a ``CheckpointError`` with ``recovery.on_failed_save=stop``, else
        logged.
        """
        self._end_writing(wait=True)
        if state.global_step in self._own_steps[-1:]:
            return
        self._writing = self._last = state
        try:
            partial = steps.begin(self.root, state.global_step)
            self._own_files = _write_driver(partial, state, self._lineage(state.global_step))
        except OSError as error:
            self._failed(str(error))
            return
        for name, group in self.groups.items():
            group.begin_save(str(partial / name), state.global_step)

    def poll(self) -> None:
        """Commit the save in progress if every rank has written its part; does not wait. Fails as :meth:`save`."""
        self._end_writing(wait=False)
        if self.remote is not None and (problem := self.remote.problem()):
            if self.plan.on_failed_save == "stop":
                raise problem
            logger.error("%s The next step that is saved is copied too.", problem)

    def finish(self) -> None:
        """Wait for the last save and its remote copy, and commit it; if a save or a copy failed, try once more.

        Call it only when the last :meth:`save` holds the current state, or no save was due.

        Raises:
            CheckpointError: it could not be written.
        """
        self._end_writing(wait=True)
        if self.owed and self._last is not None:
            self.save(self._last)
            self._end_writing(wait=True)
        if self.remote is not None:
            self.remote.finish()
        if self.owed:
            raise CheckpointError(
                f"the run has finished, but its last checkpoint could not be written to {self.root}; see the errors "
                f"above. {self._whole_before()}{self._remedy()}"
            )

    def save_held(
        self,
        state: RunState,
        ranks: Mapping[str, Sequence[Mapping[str, object]]],
        documents: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        """Save from state that was collected before the workers ended.

        Args:
            state: of the driver.
            ranks: the ``snapshot`` of every rank, by the sub-folder of its group.
            documents: the result of ``documents``, likewise. The model as ``hf_model`` is not written.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.discard_writing()
        if state.global_step in self._own_steps[-1:]:
            return
        try:
            partial = steps.begin(self.root, state.global_step)
            files = _write_driver(partial, state, self._lineage(state.global_step))
            for name, snapshots in ranks.items():
                files |= _write_group(partial, name, snapshots, documents[name])
            steps.commit(self.root, state.global_step, files, self._lineage(state.global_step))
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint: {error}. {self._whole_before()}") from error
        self._own_steps.append(state.global_step)
        if self.remote is not None:
            self.remote.begin(state.global_step)
            self.remote.finish()

    def discard_writing(self) -> None:
        """Discard the save in progress, because the workers that write it have ended."""
        if self._writing is not None:
            steps.discard(self.root, self._writing.global_step)
            self._writing, self.owed = None, True

    def rescue(self) -> None:
        """Commit the save in progress while the run ends with an error; only logs failures, to keep that error."""
        try:
            self._end_writing(wait=True)
            if self.remote is not None:
                self.remote.wait()
        except VerlError as error:
            logger.warning("the save that was being written is lost: %s", error)

    def workers_replaced(self, groups: Mapping[str, TrainedGroup]) -> None:
        """Continue with new workers; the save that the old ones were writing is lost and due again."""
        self.groups = groups
        self.discard_writing()

    def metrics(self) -> dict[str, float]:
        """``recovery/failed_saves`` and ``recovery/failed_uploads`` since the start of the run, if any."""
        uploads = self.remote.failed_uploads if self.remote is not None else 0
        counts = {"recovery/failed_saves": self.failed_saves, "recovery/failed_uploads": uploads}
        return {name: float(count) for name, count in counts.items() if count}

    def _end_writing(self, wait: bool) -> None:
        if self._writing is None:
            return
        written = {name: group.save_report(wait) for name, group in self.groups.items()}
        if any(report is None for reports in written.values() for report in reports):
            return
        try:
            files = self._own_files | _joined(written)
            steps.commit(self.root, self._writing.global_step, files, self._lineage(self._writing.global_step))
        except (OSError, CheckpointError) as error:
            self._failed(str(error))
            return
        self._own_steps.append(self._writing.global_step)
        self._writing, self.owed = None, False
        if self.remote is not None:
            self.remote.begin(self._own_steps[-1])
        self._drop_old(self._own_steps[-1])

    def _failed(self, problem: str) -> None:
        assert self._writing is not None
        step, self._writing = self._writing.global_step, None
        steps.discard(self.root, step)  # on a full disk the rest of the run needs the space
        self.failed_saves += 1
        self.owed = True
        message = f"the checkpoint of step {step} could not be written: {problem}. {self._whole_before()}"
        if self.plan.on_failed_save == "stop":
            raise CheckpointError(message + self._remedy())
        logger.error("%s It is tried again after the next step.", message)

    def _whole_before(self) -> str:
        names = [path.name for path in saved_steps(self.root).values()]
        return f"What was saved before is untouched ({names[-1]})." if names else "No step has been saved yet."

    def _remedy(self) -> str:
        names = [path.name for path in saved_steps(self.root).values()]
        continuation = f"resumes from {names[-1]}" if names else "starts from the first step"
        return f" Free space in this folder and repeat the command, which then {continuation}."

    def _lineage(self, step: int) -> Lineage:
        return [*self._before, (self._id, step)]

    def _drop_old(self, newest: int) -> None:
        """Remove steps beyond the limits of ``plan.keep``, after ``newest`` is committed.

        Steps outside this run's lineage belong to other runs that saved here; they are neither counted nor removed.
        """
        lineage, steps = self._lineage(newest), saved_steps(self.root)
        saved_by = {step: of[-1][0] for step, path in steps.items() if (of := read_lineage(path, STATE)) is not None}
        folders = {step: steps[step] for step, run in saved_by.items() if contains_step(lineage, step, run)}
        try:
            for name in self.groups:
                limit = self.plan.keep.get(name)
                holders = [path for path in folders.values() if (path / name).is_dir()]
                for path in holders[:-limit] if limit and limit > 0 else []:
                    shutil.rmtree(path / name)
            for path in folders.values():
                if path.is_dir() and not any((path / name).is_dir() for name in self.groups):
                    shutil.rmtree(path)
            if self.plan.delete_after_load and self._loaded_from not in (None, step_folder(self.root, newest)):
                shutil.rmtree(self._loaded_from, ignore_errors=True)
                self._loaded_from = None
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    # ---- loading ------------------------------------------------------------------------------

    def load(self) -> RunState | None:
        """Restore the workers as ``trainer.resume_mode`` says and return the driver's state; None for a fresh start.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, and ``resume_mode`` or
                ``recovery.on_damaged_checkpoint`` forbids another one, or no complete one exists. A run never starts
                from scratch silently where one was saved.
        """
        self._loaded_from = self._choice().folder()
        if self._loaded_from is None:
            return None
        state = self._read(self._loaded_from)
        self._before = read_lineage(self._loaded_from, STATE) or ()
        return state

    def load_again(self) -> RunState | None:
        """Restore lost workers from the newest intact step that this process saved.

        Without one, restores the step that the run resumed from; None if it did not resume.

        Raises:
            CheckpointError: all of these are damaged, or the first of them and ``recovery.on_damaged_checkpoint=stop``.
        """
        steps.repair(self.root)
        own_folders = [step_folder(self.root, step) for step in sorted(self._own_steps, reverse=True)]
        folders = [folder for folder in own_folders if folder.is_dir()]
        if self._loaded_from is not None:
            folders.append(self._loaded_from)
        if not folders:
            return None
        state = self._read(self._choice().first_whole(folders, []))
        self._own_steps = [step for step in self._own_steps if step <= state.global_step]  # damaged ones come again
        return state

    def _choice(self) -> ResumeChoice:
        return ResumeChoice(self.plan, self.root, self.groups, self.remote)

    def _read(self, folder: Path) -> RunState:
        if is_public(folder):
            return self._read_public(folder)
        state = _read_file(folder / STATE, lambda path: json.loads(path.read_text()))
        dataloader, rng = (
            _read_file(folder / name, lambda path: torch.load(path, weights_only=True)) for name in (DATA, RNG)
        )
        self._load_groups(folder)
        for key in ("format", LINEAGE):
            state.pop(key, None)
        pending = {path.stem: path for path in (folder / PENDING).glob("*.safetensors")}
        return RunState(
            global_step=state.pop("global_step"),
            dataloader=dataloader,
            controllers=state,
            rng=rng,
            pending=Deferred.from_value(pending),
        )

    def _read_public(self, folder: Path) -> RunState:
        """Restore from a step of verl 0.8; its data loader, controllers and random states are those of other code."""
        self._load_groups(folder)
        step = int(folder.name.rpartition("_")[2])
        logger.warning(
            "%s was saved by verl 0.8 under FSDP and has no checksums. Taken from it: weights, moments and their step, "
            "the step of the schedule, the number of steps. Not in it, or not used: optimizer settings (the command's "
            "hold), random states, the order of the rows (%d batches of this run's order are skipped), adaptive KL or "
            "entropy coefficients, runs of trackers.",
            folder,
            step,
        )
        return RunState(global_step=step, dataloader=None, controllers={}, rng=None)

    def _load_groups(self, folder: Path) -> None:
        for name, group in self.groups.items():
            if not (folder / name).is_dir():
                raise CheckpointError(
                    f"the checkpoint {folder} has no '{name}' folder, which this run needs. "
                    "Resume with the algorithm that wrote it, or set resume_mode=disable."
                )
            group.load_checkpoint(str(folder / name))
        logger.info("resumed from %s", folder)


def _write_driver(folder: Path, state: RunState, lineage: Lineage) -> dict[str, FileEntry]:
    assert state.dataloader is not None  # only a state that was read from a step of verl 0.8 lacks them
    assert state.rng is not None
    described = {"format": FORMAT, "global_step": state.global_step, LINEAGE: lineage} | state.controllers
    return {
        **_write_pending(folder, state.pending.result()),
        DATA: write_bytes(folder / DATA, _loadable(state.dataloader)),
        RNG: write_bytes(folder / RNG, _loadable(state.rng)),
        STATE: write_bytes(folder / STATE, json.dumps(described).encode()),
    }


def _write_pending(folder: Path, batches: Mapping[str, BatchForFile | Path]) -> dict[str, FileEntry]:
    """Write a file for each batch.

    Raises:
        CheckpointError: a column holds what files cannot.
    """
    try:
        for name, batch in batches.items():
            path = folder / PENDING / f"{name}.safetensors"
            if isinstance(batch, Path):  # of the checkpoint that the run has just resumed from
                path.parent.mkdir(exist_ok=True)
                shutil.copyfile(batch, path)
            else:
                batch.save_to_disk(path)
    except DataError as error:
        raise CheckpointError(f"responses that wait for their training step cannot be saved: {error}") from error
    entries = sync_tree(folder / PENDING) if batches else {}
    return {(Path(PENDING) / path).as_posix(): entry for path, entry in entries.items()}


def _write_group(
    folder: Path, name: str, snapshots: Sequence[Mapping[str, object]], documents: Mapping[str, bytes]
) -> dict[str, FileEntry]:
    group_folder, files = folder / name, {}
    for path, content in documents.items():
        (group_folder / path).parent.mkdir(parents=True, exist_ok=True)
        files[path] = write_bytes(group_folder / path, content)
    for snapshot in snapshots:
        files |= write_states(group_folder, from_arrays(dict(snapshot)))
    for inner in [group_folder, *(path for path in group_folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    return {(Path(name) / path).as_posix(): entry for path, entry in files.items()}


def _loadable(state: dict[str, object]) -> bytes:
    """Serialize ``state`` as a ``.pt`` file; refuse objects that could not be loaded with ``weights_only=True``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the state of the data loader cannot be saved: the state_dict() of a data set or sampler may hold tensors, "
            f"numbers, strings, lists and dicts only. {str(error).splitlines()[0]}"
        ) from error
    return buffer.getvalue()


def _joined(parts: dict[str, list[SaveReport]]) -> dict[str, FileEntry]:
    """Merge the ranks' files by path below the step's folder; a ``CheckpointError`` if a rank failed."""
    files: dict[str, FileEntry] = {}
    for name, reports in parts.items():
        for rank, report in enumerate(reports):
            if report.problem is not None:
                raise CheckpointError(f"{report.problem} (rank {rank})")
            files |= {(Path(name) / file).as_posix(): entry for file, entry in report.files.items()}
    return files


def _read_file(path: Path, reader: Callable[[Path], T]) -> T:
    try:
        return reader(path)
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint is incomplete: {path} is missing.") from None
    except UNREADABLE as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({error}). Resume from another step with "
            "resume_mode=resume_path and resume_from_path=.../global_step_N."
        ) from error
