"""What a run needs to continue: worker states, data order, KL controller, and which step is whole.

::

    {default_local_dir}/
      latest_checkpointed_iteration.txt     "N", written last: the step that is whole
      global_step_N/
        actor/  critic/                     the engines' shards (workers/engine/fsdp/checkpoint.py)
        data.pt                             state of the data loader
        trainer_state.json                  step, controllers of KL and entropy
        driver_rng.pt                       random generators of the driver
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import CheckpointError
from verl.trainer.run_state import RunState

if TYPE_CHECKING:
    from verl.trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where a run saves, how much it keeps, and what it resumes from."""

    root: str
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    keep: dict[str, int | None] = field(default_factory=dict)
    """Newest N to keep, for each sub-folder; None keeps all."""
    delete_after_load: bool = False

    @classmethod
    def of(cls, trainer: TrainerConfig) -> CheckpointPlan:
        """The plan of a PPO run's ``trainer`` section."""
        return cls(
            root=trainer.default_local_dir,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            keep={"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep},
            delete_after_load=trainer.del_local_ckpt_after_load,
        )


class TrainerCheckpoint:
    """Saves and restores one run.

    Args:
        plan: folder, keep-N and resume settings.
        groups: worker groups with ``save_checkpoint`` and ``load_checkpoint``, by the sub-folder
            that each writes; ``"."`` is the step's folder itself.
    """

    def __init__(self, plan: CheckpointPlan, groups: dict[str, Any]) -> None:
        self.plan = plan
        self.root = Path(plan.root).expanduser().absolute()
        self.groups = groups

    def save(self, state: RunState) -> Path:
        """Write ``global_step_N``, name it the latest, then drop what keep-N no longer wants.

        Raises:
            CheckpointError: the folder cannot be written; the previous checkpoint stays the latest.
        """
        folder = self.root / f"global_step_{state.global_step}"
        for name, group in self.groups.items():
            group.save_checkpoint(str(folder / name), None, state.global_step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state.dataloader, folder / "data.pt")
            torch.save(state.rng, folder / "driver_rng.pt")
            (folder / "trainer_state.json").write_text(
                json.dumps({"global_step": state.global_step} | state.controllers)
            )
            _replace_text(self.root / LATEST, str(state.global_step))
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {folder}: {error}. The checkpoint before it is untouched. "
                "Free space, or set trainer.default_local_dir to a writable folder."
            ) from error
        self._drop_old()
        return folder

    def _drop_old(self) -> None:
        folders = saved_steps(self.root)
        for name in self.groups:
            limit = self.plan.keep.get(name)
            holders = [folder for folder in folders if (folder / name).is_dir()]
            for folder in holders[:-limit] if limit and limit > 0 else []:
                shutil.rmtree(folder / name)
        for folder in folders:
            if folder.is_dir() and not any((folder / name).is_dir() for name in self.groups):
                shutil.rmtree(folder)

    def load(self) -> RunState | None:
        """Restore the workers by ``trainer.resume_mode``, and give the driver's state; None for a fresh start.

        Raises:
            CheckpointError: what should be resumed from is missing or damaged. A run never starts
                anew in silence when a checkpoint was named.
        """
        folder = self._folder_to_resume()
        if folder is None:
            return None
        state = self._read(folder / "trainer_state.json", lambda path: json.loads(path.read_text()))
        dataloader, rng = (
            self._read(folder / name, lambda path: torch.load(path, weights_only=True))
            for name in ("data.pt", "driver_rng.pt")
        )
        for name, group in self.groups.items():
            if not (folder / name).is_dir():
                raise CheckpointError(
                    f"the checkpoint {folder} has no '{name}' folder, which this run needs. "
                    "Resume with the algorithm that wrote it, or set trainer.resume_mode=disable."
                )
            group.load_checkpoint(str(folder / name), None, self.plan.delete_after_load)
        logger.info("resumed from %s", folder)
        return RunState(global_step=state.pop("global_step"), dataloader=dataloader, controllers=state, rng=rng)

    def _folder_to_resume(self) -> Path | None:
        mode = self.plan.resume_mode
        if mode == "disable":
            return None
        if mode == "resume_path":
            folder = Path(str(self.plan.resume_from_path)).expanduser().absolute()
            remedy = "Set trainer.resume_from_path to an existing .../global_step_N folder."
        else:
            latest = self.root / LATEST
            if not latest.exists():
                logger.info("no checkpoint in %s: starting from step 0", self.root)
                return None
            folder = self.root / f"global_step_{latest.read_text().strip()}"
            remedy = f"Restore it, write another step into {latest}, or set trainer.resume_mode=disable to start anew."
        if not folder.is_dir():
            raise CheckpointError(f"the checkpoint to resume from does not exist: {folder}. {remedy}")
        return folder

    @staticmethod
    def _read(path: Path, reader: Any) -> Any:
        try:
            return reader(path)
        except FileNotFoundError:
            raise CheckpointError(f"the checkpoint is incomplete: {path} is missing.") from None
        except (ValueError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"the checkpoint file {path} cannot be read ({error}). Resume from another step with "
                "trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N."
            ) from error


def saved_steps(root: Path) -> list[Path]:
    """The ``global_step_N`` folders under ``root``, by N."""
    found = [
        (int(m.group(1)), p) for p in root.glob("global_step_*") if (m := re.fullmatch(r"global_step_(\d+)", p.name))
    ]
    return [path for _, path in sorted(found)]


def _replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
