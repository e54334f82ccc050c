"""What a run needs to go on: the state of the workers and of the driver, whole for each step that is saved.

::

    {default_local_dir}/
      latest_checkpointed_iteration.txt     "N", written last: the step to go on from
      global_step_N/                        written as global_step_N.partial, renamed when it is whole
        manifest.json                       size and SHA-256 of every file
        actor/  critic/                     the engines' shards (workers/engine/fsdp/checkpoint.py)
        data.pt                             state of the data loader, its sampler and data set
        trainer_state.json                  step, controllers of KL and entropy, epochs
        driver_rng.pt                       random generators of the driver

How a folder becomes whole, and what a crash leaves, is in :mod:`verl.utils.checkpoint.steps`.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from verl.errors import CheckpointError, VerlError
from verl.trainer.run_state import RunState
from verl.utils.checkpoint import steps
from verl.utils.checkpoint.arrays import from_arrays
from verl.utils.checkpoint.files import UNREADABLE, FileEntry, sync_folder, write_bytes, write_states
from verl.utils.checkpoint.steps import LATEST, MANIFEST, Way, is_on, read_way, saved_steps, step_folder
from verl.utils.checkpoint.writing import SaveReport

if TYPE_CHECKING:
    from verl.trainer.config import TrainerConfig
    from verl.trainer.config.trainer import BaseTrainerConfig

logger = logging.getLogger(__name__)

STATE, DATA, RNG = "trainer_state.json", "data.pt", "driver_rng.pt"
FORMAT = 2
"""Of ``trainer_state.json``; a step of format 2 has a manifest, one without this number was saved before there were."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where a run saves, how much it keeps, what it resumes from, and what it does when a checkpoint fails it."""

    root: str
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    keep: dict[str, int | None] = field(default_factory=dict)
    """Newest N to keep, for each sub-folder; None keeps all."""
    delete_after_load: bool = False
    on_damaged: Literal["previous", "stop"] = "previous"
    on_failed_save: Literal["retry", "stop"] = "retry"

    @classmethod
    def of(
        cls, trainer: BaseTrainerConfig, keep: dict[str, int | None], delete_after_load: bool = False
    ) -> CheckpointPlan:
        """The plan of a run's ``trainer`` section."""
        return cls(
            root=trainer.default_local_dir,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            keep=keep,
            delete_after_load=delete_after_load,
            on_damaged=trainer.recovery.on_damaged_checkpoint,
            on_failed_save=trainer.recovery.on_failed_save,
        )

    @classmethod
    def of_ppo(cls, trainer: TrainerConfig) -> CheckpointPlan:
        """The plan of a PPO run, which keeps actors and critics by numbers of their own."""
        keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
        return cls.of(trainer, keep, trainer.del_local_ckpt_after_load)


class TrainerCheckpoint:
    """Saves and restores one run.

    ::

        state = checkpoint.load()              None: start anew
        ...each step:  checkpoint.save(state)  if one is due, or checkpoint.owed
                       checkpoint.poll()       what is written is committed: from now on it is gone on from
        checkpoint.finish()                    the last save is committed, or an error

    Between :meth:`save` and :meth:`poll` the step is reported to the trackers, so that no step that is gone on
    after is missing there.

    Args:
        plan: folder, keep-N and resume settings.
        groups: worker groups of an :class:`verl.workers.engine_workers.EngineWorker`, by the sub-folder that
            each writes; ``"."`` is the step's folder itself.
    """

    def __init__(self, plan: CheckpointPlan, groups: dict[str, Any]) -> None:
        self.plan = plan
        self.root = Path(plan.root).expanduser().absolute()
        self.groups = groups
        self.owed = False
        """A save has failed, and none has succeeded since: one is due after the next step."""
        self.failed_saves = 0
        self._writing: RunState | None = None
        self._last: RunState | None = None
        self._own_files: dict[str, FileEntry] = {}
        self._own_steps: list[int] = []
        self._loaded_from: Path | None = None
        self._id = uuid.uuid4().hex[:16]
        self._before: Way = ()
        """The way to the step that this process has gone on from."""

    # ---- saving -------------------------------------------------------------------------------

    def save(self, state: RunState) -> None:
        """Begin to write the run as it is now; a save that is being written ends first.

        Returns when the state is copied where ``checkpoint.async_save`` is on, and otherwise when it is written.
        It counts when :meth:`poll` or :meth:`finish` has committed it.

        Raises:
            CheckpointError: it cannot be written, and ``recovery.on_failed_save=stop``.
        """
        self._end_writing(wait=True)
        if state.global_step in self._own_steps[-1:]:
            return
        self._writing = self._last = state
        try:
            partial = steps.begin(self.root, state.global_step)
            self._own_files = _write_driver(partial, state, self._way(state.global_step))
        except OSError as error:
            self._failed(str(error))
            return
        for name, group in self.groups.items():
            group.begin_save(str(partial / name), state.global_step)

    def poll(self) -> None:
        """Commit what was saved if every rank has written it; waits for no rank.

        Raises:
            CheckpointError: it could not be written, and ``recovery.on_failed_save=stop``.
        """
        self._end_writing(wait=False)

    def finish(self) -> None:
        """Wait until what was saved last is on the disk; if it failed, try once more.

        To be called when no step has run since the last :meth:`save`, or none was due.

        Raises:
            CheckpointError: it could not be written.
        """
        self._end_writing(wait=True)
        if self.owed and self._last is not None:
            self.save(self._last)
            self._end_writing(wait=True)
        if self.owed:
            raise CheckpointError(
                f"the run is over and its last checkpoint could not be written to {self.root}; see the errors above. "
                f"{self._whole_before()} Free space there, or set trainer.default_local_dir to a writable folder, "
                "and start the run again: it goes on from there."
            )

    def save_held(
        self,
        state: RunState,
        ranks: Mapping[str, Sequence[Mapping[str, Any]]],
        documents: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        """Write a run as it was, without its workers: from what they have handed over.

        Args:
            state: of the driver.
            ranks: the ``snapshot`` of every rank, by the sub-folder of its group.
            documents: what ``documents`` gave, likewise. The model in another format (``hf_model``) is not written.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.forget_writing()
        if state.global_step in self._own_steps[-1:]:
            return
        try:
            partial = steps.begin(self.root, state.global_step)
            files = _write_driver(partial, state, self._way(state.global_step))
            for name, snapshots in ranks.items():
                files |= _write_group(partial, name, snapshots, documents[name])
            steps.commit(self.root, state.global_step, files, self._way(state.global_step))
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint: {error}. {self._whole_before()}") from error
        self._own_steps.append(state.global_step)

    def forget_writing(self) -> None:
        """Give up what the workers are writing, because they have ended."""
        if self._writing is not None:
            steps.discard(self.root, self._writing.global_step)
            self._writing, self.owed = None, True

    def rescue(self) -> None:
        """Commit what is still being written before the run ends by an error, which is worse than any of this."""
        try:
            self._end_writing(wait=True)
        except VerlError as error:
            logger.warning("the save that was being written is lost: %s", error)

    def workers_replaced(self, groups: dict[str, Any]) -> None:
        """Go on with new workers; what the old ones were writing is lost, and owed."""
        self.groups = groups
        self.forget_writing()

    def metrics(self) -> dict[str, float]:
        """``recovery/failed_saves`` since the run was started, if there are any."""
        return {"recovery/failed_saves": float(self.failed_saves)} if self.failed_saves else {}

    def _end_writing(self, wait: bool) -> None:
        if self._writing is None:
            return
        found = {name: group.save_report(wait) for name, group in self.groups.items()}
        if any(report is None for reports in found.values() for report in reports):
            return
        try:
            files = self._own_files | _joined(found)
            steps.commit(self.root, self._writing.global_step, files, self._way(self._writing.global_step))
        except (OSError, CheckpointError) as error:
            self._failed(str(error))
            return
        self._own_steps.append(self._writing.global_step)
        self._writing, self.owed = None, False
        self._drop_old(self._own_steps[-1])

    def _failed(self, problem: str) -> None:
        assert self._writing is not None
        step, self._writing = self._writing.global_step, None
        steps.discard(self.root, step)  # on a full disk the rest of the run needs the space
        self.failed_saves += 1
        self.owed = True
        message = f"the checkpoint of step {step} could not be written: {problem}. {self._whole_before()}"
        if self.plan.on_failed_save == "stop":
            raise CheckpointError(f"{message} Free space, or set trainer.default_local_dir to a writable folder.")
        logger.error("%s It is tried again after the next step.", message)

    def _whole_before(self) -> str:
        names = [path.name for path in saved_steps(self.root).values()]
        return f"What was saved before is untouched ({names[-1]})." if names else "No step has been saved yet."

    def _way(self, step: int) -> Way:
        return [*self._before, (self._id, step)]

    def _drop_old(self, newest: int) -> None:
        """What keep-N no longer wants, now that ``newest`` is whole.

        Steps that this run did not come by are of others that saved here; they neither count nor go.
        """
        way, found = self._way(newest), saved_steps(self.root)
        saved_by = {step: of[-1][0] for step, path in found.items() if (of := read_way(path, STATE)) is not None}
        folders = {step: found[step] for step, run in saved_by.items() if is_on(way, step, run)}
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
        """Restore the workers by ``trainer.resume_mode``, and give the driver's state; None for a fresh start.

        Raises:
            CheckpointError: what should be resumed from is missing or damaged, and by ``resume_mode`` and
                ``recovery.on_damaged_checkpoint`` no other may take its place, or none is whole. A run never
                starts anew in silence where one was saved.
        """
        self._loaded_from = self._folder_to_resume()
        if self._loaded_from is None:
            return None
        state = self._read(self._loaded_from)
        self._before = read_way(self._loaded_from, STATE) or ()
        return state

    def load_again(self) -> RunState | None:
        """As :meth:`load`, for a run that has lost its workers: the newest whole step that it saved itself.

        Without one it goes back to where it was resumed from; None if it was not.

        Raises:
            CheckpointError: what it saved or was resumed from is damaged.
        """
        steps.repair(self.root)
        own = [step_folder(self.root, step) for step in sorted(self._own_steps, reverse=True)]
        folders = [folder for folder in own if folder.is_dir()]
        if self._loaded_from is not None:
            folders.append(self._loaded_from)
        if not folders:
            return None
        state = self._read(self._first_whole(folders, []))
        self._own_steps = [step for step in self._own_steps if step <= state.global_step]  # damaged ones come again
        return state

    def _read(self, folder: Path) -> RunState:
        state = _read_file(folder / STATE, lambda path: json.loads(path.read_text()))
        dataloader, rng = (
            _read_file(folder / name, lambda path: torch.load(path, weights_only=True)) for name in (DATA, RNG)
        )
        for name, group in self.groups.items():
            if not (folder / name).is_dir():
                raise CheckpointError(
                    f"the checkpoint {folder} has no '{name}' folder, which this run needs. "
                    "Resume with the algorithm that wrote it, or set trainer.resume_mode=disable."
                )
            group.load_checkpoint(str(folder / name))
        logger.info("resumed from %s", folder)
        for key in ("format", "way"):
            state.pop(key, None)
        return RunState(global_step=state.pop("global_step"), dataloader=dataloader, controllers=state, rng=rng)

    def _folder_to_resume(self) -> Path | None:
        mode = self.plan.resume_mode
        if mode == "disable":
            if others := list(saved_steps(self.root).values()):
                logger.warning("starting anew in a folder where another run saved: %s", ", ".join(map(str, others)))
            return None
        if mode == "resume_path":
            folder = Path(str(self.plan.resume_from_path)).expanduser().absolute()
            if problem := self._problem(folder):
                raise CheckpointError(
                    f"the checkpoint to resume from is not whole: {problem}. Set trainer.resume_from_path to an "
                    "existing .../global_step_N folder that is."
                )
            return folder
        steps.repair(self.root)
        return self._newest_whole()

    def _newest_whole(self) -> Path | None:
        """The latest step, or where it is damaged the newest whole one before it."""
        found, problems = saved_steps(self.root), []
        try:
            latest = steps.read_latest(self.root)
        except CheckpointError as error:
            latest = None
            problems.append(str(error))
        if latest is None and not found and not problems:
            logger.info("no checkpoint in %s: starting from step 0", self.root)
            return None
        if latest is None and not problems:
            problems.append(f"{self.root / LATEST} is missing")
        if latest is not None and latest not in found:
            problems.append(f"{step_folder(self.root, latest)}, which {LATEST} names, does not exist")
        before = {step: path for step, path in found.items() if latest is None or step <= latest}
        ways = {step: way for step, path in before.items() if (way := read_way(path, STATE)) is not None}
        way = ways[max(ways)] if ways else ()
        others = [step for step, of in ways.items() if not is_on(way, step, of[-1][0])]
        if others and latest not in ways:
            problems.append("steps of several runs lie there, and none of them is named as the latest")
            before = {}
        ours = {step: path for step, path in before.items() if step not in others}
        return self._first_whole(
            [ours[step] for step in sorted(ours, reverse=True)], problems, [found[step].name for step in others]
        )

    def _first_whole(self, folders: Sequence[Path], problems: list[str], others: Sequence[str] = ()) -> Path:
        """The first of ``folders`` that is whole.

        Args:
            folders: to go on from, the best first.
            problems: what is known to be wrong already, so that the best is none of them.
            others: steps that are not gone on from, because another run saved them.
        """
        passed_over = f"{', '.join(others)}: saved by another run, passed over. " if others else ""
        for folder in folders:
            if problems and self.plan.on_damaged == "stop":
                break
            if problem := self._problem(folder):
                problems.append(problem)
                continue
            if problems:
                logger.warning("damaged checkpoints: %s. %sGoing on from %s.", "; ".join(problems), passed_over, folder)
            return folder
        raise CheckpointError(
            f"cannot resume from {self.root}: {'; '.join(problems)}. {passed_over}"
            + (
                "By trainer.recovery.on_damaged_checkpoint=stop no other step takes its place. "
                if self.plan.on_damaged == "stop"
                else "There is no whole step before it. "
            )
            + "Restore it, name another step with trainer.resume_mode=resume_path "
            "trainer.resume_from_path=.../global_step_N, or set trainer.resume_mode=disable to start anew."
        )

    def _problem(self, folder: Path) -> str | None:
        """The first thing that is wrong with a saved step."""
        if not folder.is_dir():
            return f"{folder} does not exist"
        try:
            files = steps.read_manifest(folder)
        except CheckpointError as error:
            if _is_of_format_1(folder):
                logger.warning(
                    "%s has no %s: it was saved by an earlier version, and is not verified", folder, MANIFEST
                )
                return None
            return str(error)
        if problems := steps.wrong_sizes(folder, files):
            return problems[0]
        # Every byte is read, so every rank takes a share of the files: the largest ones first, dealt in turn.
        group = next(iter(self.groups.values()))
        names = sorted(files, key=lambda name: -files[name].size)
        shares = [{name: files[name] for name in names[rank :: group.world_size]} for rank in range(group.world_size)]
        found = group.check_files([str(folder)] * group.world_size, shares)
        return next((problem for problems in found for problem in problems), None)


def _write_driver(folder: Path, state: RunState, way: Way) -> dict[str, FileEntry]:
    described = {"format": FORMAT, "global_step": state.global_step, "way": way} | state.controllers
    return {
        DATA: write_bytes(folder / DATA, _loadable(state.dataloader)),
        RNG: write_bytes(folder / RNG, _loadable(state.rng)),
        STATE: write_bytes(folder / STATE, json.dumps(described).encode()),
    }


def _write_group(
    folder: Path, name: str, snapshots: Sequence[Mapping[str, Any]], documents: Mapping[str, bytes]
) -> dict[str, FileEntry]:
    own, files = folder / name, {}
    for path, content in documents.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        files[path] = write_bytes(own / path, content)
    for snapshot in snapshots:
        files |= write_states(own, from_arrays(dict(snapshot)))
    for inner in [own, *(path for path in own.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    return {(Path(name) / path).as_posix(): entry for path, entry in files.items()}


def _loadable(state: dict[str, Any]) -> bytes:
    """A ``.pt`` file of ``state``.

    Raises:
        CheckpointError: it could not be read back, because it holds objects whose reading would run code.
    """
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


def _joined(found: dict[str, list[SaveReport]]) -> dict[str, FileEntry]:
    """All files by their path below the step's folder.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    files: dict[str, FileEntry] = {}
    for name, reports in found.items():
        for rank, report in enumerate(reports):
            if report.problem is not None:
                raise CheckpointError(f"{report.problem} (rank {rank})")
            files |= {(Path(name) / file).as_posix(): entry for file, entry in report.files.items()}
    return files


def _is_of_format_1(folder: Path) -> bool:
    """Whether ``folder`` was saved before there were manifests, when a step counted as soon as it was the latest."""
    try:
        return "format" not in json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _read_file(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint is incomplete: {path} is missing.") from None
    except UNREADABLE as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({error}). Resume from another step with "
            "trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N."
        ) from error
