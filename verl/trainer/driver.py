"""The driver process of a run: its set-up, and its restart after a signal kills it.

::

    python -m verl.trainer.main_ppo …       reads and checks the configuration, then waits
      └─ driver                             runs the training; when it is killed (out of memory, kill -9, a crash in
                                            C code), a new driver resumes from the newest checkpoint
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from verl.base import env
from verl.base.import_utils import prepare_process
from verl.base.lazy import importing_meanwhile
from verl.config import BaseTrainerConfig
from verl.utils.file_log import THIS_RUN, cut_own_end

ConfigT = TypeVar("ConfigT")

logger = logging.getLogger(__name__)


def load_controller(name: str) -> Any:
    """Import the controller ``verl.single_controller.{name}``, ``ray`` or ``local``; only the first needs Ray."""
    return importlib.import_module(f"verl.single_controller.{name}")


@contextmanager
def driving(config: Any, modules: Sequence[str] = ()) -> Iterator[None]:
    """Set up this process as the driver of a run, in a Ray session if ``trainer.controller`` is ``ray``.

    For a training run, seeds the process's random generators, and locks the checkpoint folder if the run saves.

    Args:
        config: a checked configuration with a ``trainer`` section and ``ray_kwargs``.
        modules: names of modules that the run imports next; they are imported while Ray's processes start.

    Raises:
        CheckpointError: another running training saves into the same folder.
    """
    from verl.checkpoint.states import seed_everything  # needs torch; the others too are what `--help` can do without
    from verl.supervision.lock import FolderLock
    from verl.utils.console import working

    trainer = config.trainer
    prepare_process()
    is_training = isinstance(trainer, BaseTrainerConfig)
    if is_training:
        seed_everything(trainer.seed)  # for user code that draws in the driver; sampling uses its own seeds
    # Taken before workers start and held until they have ended. A run that only reads needs no lock.
    lock = FolderLock(trainer.default_local_dir) if is_training and trainer.saves else nullcontext()
    keeps_nothing = is_training and trainer.save_freq < 0
    if keeps_nothing:
        logger.warning("trainer.save_freq=-1: this run saves no checkpoint, and no model at its end (0 saves there).")
    with ExitStack() as run:
        run.enter_context(lock)
        if trainer.controller == "ray":
            with working("starting Ray"):
                ray = load_controller("ray")
                with importing_meanwhile(modules):
                    run.enter_context(ray.ray_session(config.ray_kwargs, trainer.nnodes))
        yield
    if keeps_nothing:
        logger.warning("The run is over, and no model was saved (trainer.save_freq=-1).")


@contextmanager
def restarting_driver(config: ConfigT) -> Iterator[ConfigT]:
    """Execute the block in a child process, restarted up to ``trainer.recovery.driver_restarts`` times if killed.

    A restarted driver resumes from the newest checkpoint of this run, whatever ``trainer.resume_mode`` says. If the
    run has saved nothing, it starts as it did first, and this run's lines are removed from the ``file`` log.
    With 0 restarts, and on systems other than Linux, the block runs in this process.

    Yields:
        the configuration to run with; after a restart its ``resume_mode`` may differ from that of ``config``.
    """
    from verl.supervision.restarts import restarted_when_killed

    trainer: Any = config.trainer  # pyright: ignore[reportAttributeAccessIssue]
    if trainer.recovery.driver_restarts == 0 or sys.platform != "linux":
        yield config
        return
    saved_before = _latest(trainer)
    log = env.file_logger_path(trainer.project_name, trainer.experiment_name)
    log_size = log.stat().st_size if log.exists() else 0
    with restarted_when_killed(trainer.recovery.driver_restarts) as attempt:
        if attempt and _latest(trainer) != saved_before:
            config = replace(config, trainer=replace(trainer, resume_mode="auto"))  # pyright: ignore
        elif attempt and "file" in trainer.logger and log.exists():
            cut_own_end(log, THIS_RUN, 0, log_size)
        yield config


def _latest(trainer: Any) -> tuple[int, ...] | None:
    """Inode, modification time and size of the file that names the latest checkpoint, to see whether it changed."""
    from verl.checkpoint.steps import LATEST

    try:
        status = (Path(trainer.default_local_dir).expanduser() / LATEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
