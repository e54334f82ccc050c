"""The saved step that a run resumes from: the newest whole one of its own, or the one that a user names."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from verl.base.remote import is_remote
from verl.checkpoint import steps
from verl.checkpoint.remote import RemoteSteps
from verl.checkpoint.shards import WORLD_SIZE_FILE
from verl.checkpoint.states import RNG, STATE
from verl.checkpoint.steps import LATEST, MANIFEST, contains_step, read_lineage, saved_steps, step_folder
from verl.config import BaseTrainerConfig, TrainerConfig
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

FETCHED = "fetched"
"""Folder, below that of the run, of the remote step that ``resume_from_path`` names."""


class TrainedGroup(Protocol):
    """A worker group of :class:`verl.workers.engine_worker.EngineWorker`."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def __getattr__(self, name: str) -> Any:
        """A registered method of the workers: ``check_files``, ``begin_save``, ``save_report``, ``load_checkpoint``."""
        ...


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Plan of a run's checkpoints: the folder, how many are kept, the one to resume from, the reaction to failures."""

    root: str
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    keep: dict[str, int | None] = field(default_factory=dict)
    """Number of newest checkpoints to keep, for each sub-folder; None keeps all."""
    delete_after_load: bool = False
    on_damaged: Literal["previous", "stop"] = "previous"
    on_failed_save: Literal["retry", "stop"] = "retry"
    remote: str | None = None
    """URL of a folder that gets a copy of each step; see :mod:`verl.checkpoint.remote`."""

    @classmethod
    def from_config(
        cls, trainer: BaseTrainerConfig, keep: dict[str, int | None], delete_after_load: bool = False
    ) -> CheckpointPlan:
        """Create from a run's ``trainer`` section."""
        return cls(
            root=trainer.default_local_dir,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            keep=keep,
            delete_after_load=delete_after_load,
            on_damaged=trainer.recovery.on_damaged_checkpoint,
            on_failed_save=trainer.recovery.on_failed_save,
            remote=trainer.default_hdfs_dir,
        )

    @classmethod
    def from_ppo_config(cls, trainer: TrainerConfig) -> CheckpointPlan:
        """Create for a PPO run, which limits actor and critic checkpoints separately."""
        single = 1 if trainer.remove_previous_ckpt_in_save else None
        keep = {"actor": single or trainer.max_actor_ckpt_to_keep, "critic": single or trainer.max_critic_ckpt_to_keep}
        return cls.from_config(trainer, keep, trainer.del_local_ckpt_after_load)


class ResumeChoice:
    """Chooses the step to resume from, and verifies it.

    Args:
        plan: resume settings.
        root: folder of the run.
        groups: worker groups, whose ranks read the files that are verified.
        remote: copies of the steps, or None.
    """

    def __init__(
        self, plan: CheckpointPlan, root: Path, groups: Mapping[str, TrainedGroup], remote: RemoteSteps | None
    ) -> None:
        self._plan = plan
        self._root = root
        self._groups = groups
        self._remote = remote

    def folder(self) -> Path | None:
        """Return the folder of the step that ``trainer.resume_mode`` says, verified; None for a fresh start.

        Raises:
            CheckpointError: no whole step is allowed to take the place of a missing or damaged one.
        """
        mode = self._plan.resume_mode
        if mode == "disable":
            if earlier_steps := list(saved_steps(self._root).values()):
                logger.warning(
                    "starting anew in a folder where another run saved: %s", ", ".join(map(str, earlier_steps))
                )
            return None
        if mode == "resume_path" and is_remote(str(self._plan.resume_from_path)):
            parent, _, name = str(self._plan.resume_from_path).rstrip("/").rpartition("/")
            # Below the folder of the run, which all ranks see.
            return RemoteSteps(parent, self._root).fetch(int(name.rpartition("_")[2]), self._root / FETCHED)
        if mode == "resume_path":
            folder = Path(str(self._plan.resume_from_path)).expanduser().absolute()
            if problem := self._problem(folder):
                raise CheckpointError(
                    f"the checkpoint to resume from is not whole: {problem}. Set resume_from_path to an existing "
                    ".../global_step_N folder that is."
                )
            return folder
        steps.repair(self._root)
        if self._remote is not None:
            self._remote.fetch_newest(self._plan.on_damaged)
        return self._newest_whole()

    def _newest_whole(self) -> Path | None:
        """The latest step, or the newest intact one before it if it is damaged."""
        saved, problems = saved_steps(self._root), []
        try:
            latest = steps.read_latest(self._root)
        except CheckpointError as error:
            latest = None
            problems.append(str(error))
        if latest is None and not saved and not problems:
            logger.info("no checkpoint in %s: starting from step 0", self._root)
            return None
        if latest is None and not problems:
            problems.append(f"{self._root / LATEST} is missing")
        if latest is not None and latest not in saved:
            problems.append(f"{step_folder(self._root, latest)}, which {LATEST} names, does not exist")
        before = {step: path for step, path in saved.items() if latest is None or step <= latest}
        lineages = {step: of for step, path in before.items() if (of := read_lineage(path, STATE)) is not None}
        lineage = lineages[max(lineages)] if lineages else ()
        foreign_steps = [step for step, of in lineages.items() if not contains_step(lineage, step, of[-1][0])]
        if foreign_steps and latest not in lineages:
            problems.append("steps of several runs lie there, and none of them is named as the latest")
            before = {}
        own_steps = {step: path for step, path in before.items() if step not in foreign_steps}
        return self.first_whole(
            [own_steps[step] for step in sorted(own_steps, reverse=True)],
            problems,
            [saved[step].name for step in foreign_steps],
        )

    def first_whole(self, folders: Sequence[Path], problems: list[str], foreign_steps: Sequence[str] = ()) -> Path:
        """The first intact one of ``folders``, which are ordered the best first.

        ``problems`` are known problems of better checkpoints, ``foreign_steps`` were skipped: another run saved them.
        """
        passed_over = f"{', '.join(foreign_steps)}: saved by another run, passed over. " if foreign_steps else ""
        for folder in folders:
            if problems and self._plan.on_damaged == "stop":
                break
            if problem := self._problem(folder):
                problems.append(problem)
                continue
            if problems:
                logger.warning("damaged checkpoints: %s. %sGoing on from %s.", "; ".join(problems), passed_over, folder)
            return folder
        raise CheckpointError(
            f"cannot resume from {self._root}: {'; '.join(problems)}. {passed_over}"
            + (
                "By on_damaged_checkpoint=stop no other step takes its place. "
                if self._plan.on_damaged == "stop"
                else "There is no whole step before it. "
            )
            + "Restore it, name another step with resume_mode=resume_path and resume_from_path=.../global_step_N, or "
            "set resume_mode=disable to start anew."
        )

    def _problem(self, folder: Path) -> str | None:
        """The first problem of a saved step; None if it is intact."""
        if not folder.is_dir():
            return f"{folder} does not exist"
        try:
            files = steps.read_manifest(folder)
        except CheckpointError as error:
            if is_public(folder):
                return None
            if _is_of_format_1(folder):
                logger.warning(
                    "%s has no %s: it was saved by an earlier version, and is not verified", folder, MANIFEST
                )
                return None
            return str(error)
        if problems := steps.wrong_sizes(folder, files):
            return problems[0]
        # Every byte is read, so every rank takes a share of the files: the largest ones first, dealt in turn.
        group = next(iter(self._groups.values()))
        names = sorted(files, key=lambda name: -files[name].size)
        shares = [{name: files[name] for name in names[rank :: group.world_size]} for rank in range(group.world_size)]
        missing = group.check_files([str(folder)] * group.world_size, shares)
        return next((problem for problems in missing for problem in problems), None)


def is_public(folder: Path) -> bool:
    """Return whether verl 0.8 saved ``folder`` under FSDP: it has that release's shards and no files of this driver."""
    if any((folder / name).exists() for name in (MANIFEST, STATE, RNG)):
        return False
    return any((folder / name / WORLD_SIZE_FILE).is_file() for name in (".", "actor", "critic"))


def _is_of_format_1(folder: Path) -> bool:
    """Return whether ``folder`` was saved by a version without manifests, where the latest step counted as complete."""
    try:
        return "format" not in json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError, TypeError):
        return False
