"""Where the ranks of a run live: in this process, or in actors on Ray. The driver is this process either way."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from verl.trainer.config.trainer import BaseTrainerConfig
from verl.utils.checkpoint import seed_everything
from verl.utils.import_utils import prepare_process
from verl.utils.lock import FolderLock


class Runner(Protocol):
    """Assembles and drives one run."""

    def run(self, config: Any) -> None:
        """Run to the end."""


def load_controller(name: str) -> Any:
    """The controller module, ``verl.single_controller.ray`` or ``.local``; Ray is imported only for the first."""
    return importlib.import_module(f"verl.single_controller.{name}")


def run_under_controller(runner_class: type[Runner], config: Any) -> None:
    """Drive a run where ``trainer.controller`` says.

    Args:
        runner_class: made without arguments, in the process that drives.
        config: a checked configuration with a ``trainer`` section and ``ray_kwargs``.

    Raises:
        CheckpointError: the run saves, and another one saves into the same folder.
    """
    prepare_process()
    if isinstance(config.trainer, BaseTrainerConfig):
        seed_everything(config.trainer.seed)  # for user code that draws in the driver; sampling has seeds of its own
    # Before anything starts, and until all of it has ended.
    with _lock(config.trainer):
        if config.trainer.controller == "local":
            runner_class().run(config)
        else:
            load_controller("ray").run_task(runner_class, config, config.ray_kwargs)


def _lock(trainer: Any) -> AbstractContextManager[Any]:
    """On the folder that the run saves into; a run that only reads disturbs nobody."""
    saves = isinstance(trainer, BaseTrainerConfig) and trainer.save_freq > 0
    return FolderLock(trainer.default_local_dir) if saves else nullcontext()
