"""The newest checkpoint of a run, and a manager of checkpoints for workers that build their own model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from verl.base.env import capacity_expires_at
from verl.checkpoint.ranks import RankState, on_all_ranks, save_together
from verl.checkpoint.shards import TrainingState, write_world_size
from verl.checkpoint.states import rng_state, set_rng_state
from verl.checkpoint.steps import LATEST, read_latest
from verl.compat.toolkit.fsdp import fsdp_version, get_fsdp_full_state_dict
from verl.errors import ConfigError
from verl.workers.engine.model.headed import own_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """Return the path of the file in a run's folder that names its newest step."""
    return str(Path(root_path) / LATEST)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Return the folder of a run's newest checkpoint, or None if there is none.

    Args:
        path: folder of the run's checkpoints.
        directory_format: name of a step's folder below it.

    Raises:
        CheckpointError: ``latest_checkpointed_iteration.txt`` names no step.
    """
    step = None if path is None else read_latest(Path(path))
    if path is None or step is None:
        return None
    folder = Path(path) / directory_format.format(step)
    return str(folder) if folder.exists() else None


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Return whether a rented machine expires before one more step and a save would be done.

    The time at which it expires is read from the environment; without it the answer is no.

    Args:
        max_steps_duration: seconds of the longest step so far; 0 before the first one, when the answer is no.
        save_ckpt_duration: seconds that a save takes.
        redundant_time: seconds to spare.
    """
    expires_at = capacity_expires_at()
    if expires_at is None or max_steps_duration <= 0:
        return False
    left = expires_at - time.time()
    return 0 < left <= max_steps_duration + save_ckpt_duration + redundant_time


class BaseCheckpointManager:
    """Base of checkpoint managers: contents, saved folders, random generators.

    Args:
        model: the model, or a list of its parts.
        optimizer: None for a frozen model.
        lr_scheduler: None if there is none.
        processing_class: a tokenizer or a processor.
        checkpoint_config: ``save_contents`` and ``load_contents``, any of model, optimizer, extra and (to save)
            hf_model; by default the first three.

    Raises:
        ConfigError: an unknown content is named.
    """

    CONTENTS = ("model", "optimizer", "extra")

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        checkpoint_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        config = checkpoint_config or {}
        self.checkpoint_save_contents = tuple(config.get("save_contents") or self.CONTENTS)
        self.checkpoint_load_contents = tuple(config.get("load_contents") or self.CONTENTS)
        contents = {*self.CONTENTS, "hf_model"}
        if unknown := {*self.checkpoint_save_contents, *self.checkpoint_load_contents} - contents:
            raise ConfigError(f"a checkpoint has no '{min(unknown)}'; its contents are {', '.join(sorted(contents))}.")
        self.previous_global_step: int | None = None
        self.previous_saved_paths: list[str] = []

    @property
    def should_save_model(self) -> bool:
        """True if weights are saved."""
        return "model" in self.checkpoint_save_contents

    @property
    def should_save_optimizer(self) -> bool:
        """True if the optimizer's state is saved."""
        return "optimizer" in self.checkpoint_save_contents

    @property
    def should_save_extra(self) -> bool:
        """True if schedule and random generators are saved."""
        return "extra" in self.checkpoint_save_contents

    @property
    def should_save_hf_model(self) -> bool:
        """True if a Hugging Face folder with weights is saved."""
        return "hf_model" in self.checkpoint_save_contents

    def ensure_checkpoint_capacity(self, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest folders that were saved, so that there is room for one more; None and 0 keep all.

        With ``max_ckpt_to_keep=1`` the newest stays until the next is written whole.
        """
        if max_ckpt_to_keep and max_ckpt_to_keep > 1:
            self._keep(max_ckpt_to_keep - 1)

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """Note a folder that was saved, and remove the oldest ones above ``max_ckpt_to_keep``; None and 0 keep all."""
        self.previous_saved_paths = [path for path in self.previous_saved_paths if path != new_path] + [new_path]
        if max_ckpt_to_keep:
            self._keep(max_ckpt_to_keep)

    def remove_previous_save_local_path(self, path: str | Sequence[str]) -> None:
        """Remove one or several folders; one that is gone already is passed over."""
        for folder in [path] if isinstance(path, str) else path:
            shutil.rmtree(Path(folder).expanduser(), ignore_errors=True)

    def _keep(self, count: int) -> None:
        surplus = self.previous_saved_paths[:-count]
        self.remove_previous_save_local_path(surplus)
        self.previous_saved_paths = self.previous_saved_paths[-count:]

    @staticmethod
    def get_rng_state() -> dict[str, object]:
        """Return the states of the random generators of Python, NumPy and PyTorch in this process."""
        return rng_state()

    @staticmethod
    def load_rng_state(rng_state: dict[str, object]) -> None:
        """Set them."""
        set_rng_state(rng_state)


class FSDPCheckpointManager(BaseCheckpointManager):
    """Saves and restores weights, optimizer, learning-rate schedule and random generators of all ranks.

    Args:
        model: sharded by FSDP2, or whole; its ``config`` is saved beside the weights.
        optimizer: None for a frozen model.
        lr_scheduler: None if there is none.
        processing_class: a tokenizer or a processor, saved beside the weights.
        checkpoint_config: ``save_contents`` and ``load_contents``, any of model, optimizer, extra and (to save)
            hf_model; by default the first three.
        kwargs: accepted as scripts give them, and unused.

    Raises:
        ConfigError: the model is wrapped by FSDP1, the schedule is no LambdaLR, or an unknown content is named.
    """

    lr_scheduler: LambdaLR | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        checkpoint_config: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        if fsdp_version(model) == 1:
            raise ConfigError(
                "the model is wrapped by FSDP1; shard it by FSDP2 (verl.compat.toolkit.fsdp.apply_fsdp2)."
            )
        if lr_scheduler is not None and not isinstance(lr_scheduler, LambdaLR):
            raise ConfigError(
                f"lr_scheduler is a {type(lr_scheduler).__name__}: a schedule is restored as a function of the step, "
                "which LambdaLR is. Use one of verl.utils.torch_functional, or of Transformers."
            )
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)

    def _state(self) -> TrainingState:
        parameters = dict(self.model.named_parameters())
        return TrainingState(own_state(self.model), parameters, self.optimizer, self.lr_scheduler)

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write a folder that appears whole or not at all. Collective.

        Args:
            local_path: the folder.
            hdfs_path: must be None; copy the folder by :func:`verl.compat.toolkit.files.copy`.
            global_step: stored with the checkpoint.
            max_ckpt_to_keep: of the folders that this manager saved, keep the newest ones only; None keeps all.
        """
        _refuse_remote(hdfs_path)
        states = self._state().states(self.checkpoint_save_contents, {"global_step": global_step}, copied=False)
        with_weights = "hf_model" in self.checkpoint_save_contents
        weights = get_fsdp_full_state_dict(self.model) if with_weights else None

        def describe(folder: Path) -> None:
            write_world_size(folder)
            place = folder / "huggingface"
            if weights is not None:
                self.model.save_pretrained(place, state_dict=weights)  # type: ignore[operator]
            for part in (getattr(self.model, "config", None), self.processing_class):
                if part is not None:
                    part.save_pretrained(place)

        state = RankState(states, describe if dist.get_rank() == 0 else None)
        save_together(Path(local_path).expanduser(), state.write)
        self.previous_global_step = global_step
        with on_all_ranks(f"remove checkpoints older than {local_path}"):
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def remove_previous_save_local_path(self, path: str | Sequence[str]) -> None:
        """Remove folders, by rank 0 alone."""
        if dist.get_rank() == 0:
            super().remove_previous_save_local_path(path)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore from a folder, whatever number of ranks wrote it; None does nothing. Collective.

        Args:
            local_path: the folder.
            hdfs_path: must be None.
            del_local_after_load: remove the folder when every rank has read it.

        Raises:
            CheckpointError: on every rank, if one finds a file missing, damaged or of another model.
        """
        _refuse_remote(hdfs_path)
        if local_path is None:
            return
        folder = Path(local_path).expanduser()
        self._state().load(folder, self.checkpoint_load_contents)
        if del_local_after_load:
            with on_all_ranks(f"remove {folder}"):
                if dist.get_rank() == 0:
                    shutil.rmtree(folder)


def _refuse_remote(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ConfigError(
            f"hdfs_path='{hdfs_path}': checkpoints are written to and read from local_path only. Copy the folder by "
            "verl.compat.toolkit.files.copy."
        )
