"""Steps whose update was left out, because a loss or a gradient was not finite: counted, kept, and not for ever."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import DataError, NonFiniteError
from verl.protocol import DataProto
from verl.workers.engine.non_finite import NonFinite

if TYPE_CHECKING:
    from verl.trainer.config.trainer import BaseTrainerConfig

logger = logging.getLogger(__name__)

KEPT_OF_A_ROW = 3
"""Batches that are kept of bad steps that follow each other: the first ones."""
KEPT = 12
"""Batches in the folder; older ones give way."""
SHOWN = 4
"""Problems that a message names."""


class BadSteps:
    """Counts the steps that left an update out, keeps their batches, and stops the run after several in a row.

    Part of a checkpoint: a run that is resumed goes on counting.

    Args:
        limit: so many in a row stop the run; None never does.
        folder: of the batches.
    """

    def __init__(self, limit: int | None, folder: Path) -> None:
        self.limit = limit
        self.folder = folder
        self.total = 0
        self.in_a_row = 0
        self.last_step = 0
        self._texts: list[str] = []
        self._kept: Path | None = None

    @classmethod
    def of(cls, trainer: BaseTrainerConfig) -> BadSteps:
        """As ``trainer.recovery`` says."""
        recovery = trainer.recovery
        folder = recovery.bad_batch_dir or Path(trainer.default_local_dir) / "bad_batches"
        return cls(recovery.max_bad_steps, Path(folder).expanduser())

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"total": self.total, "in_a_row": self.in_a_row, "last_step": self.last_step}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self.total, self.in_a_row, self.last_step = (int(state[name]) for name in ("total", "in_a_row", "last_step"))

    def see(
        self, step: int, update: str, metrics: Mapping[str, float], batch: DataProto, problems: Sequence[NonFinite]
    ) -> None:
        """Take in an update; nothing happens unless an optimizer step of it was left out.

        Args:
            step: of the run.
            update: its name, ``update_actor`` for one.
            metrics: with ``.../skipped_steps``.
            batch: what it was made with.
            problems: why, by rows of ``batch``.
        """
        skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_steps"))
        if not skipped:
            return
        if step != self.last_step:
            self.in_a_row = self.in_a_row + 1 if step == self.last_step + 1 else 1
            self.total += 1
            self.last_step = step
        self._texts = [_named(one, batch) for one in problems]
        if self.in_a_row <= KEPT_OF_A_ROW or self._kept is None:
            self._kept = self._keep(step, update, metrics, batch)
        logger.warning(
            "%s of step %d left out %d optimizer step(s), and weights and optimizer are as they were: %s. Batch: %s",
            update,
            step,
            int(skipped),
            "; ".join(self._texts[:SHOWN]),
            self._kept or "not kept",
        )

    def metrics(self) -> dict[str, float]:
        """``recovery/bad_steps``: bad steps of the run so far."""
        return {"recovery/bad_steps": float(self.total)}

    def stop_if_too_many(self, step: int) -> None:
        """Called after every step.

        Raises:
            NonFiniteError: the last ``limit`` steps, this one among them, were bad.
        """
        if self.limit is None or step != self.last_step or self.in_a_row < self.limit:
            return
        where = f"The batch lies in {self._kept} (DataProto.load_from_disk)." if self._kept else ""
        raise NonFiniteError(
            f"the update of {self.in_a_row} step(s) in a row, up to step {step}, was left out because a loss or a "
            f"gradient was not finite (trainer.recovery.max_bad_steps={self.limit}). In step {step}: "
            f"{'; '.join(self._texts[:SHOWN])}. {where} The weights are those before these steps. If a column of the "
            "batch is the cause, look where it is made; if it is the model's output, lower the learning rate "
            "(optim.lr), clip more (optim.clip_grad), compute in fp32, or resume from an earlier checkpoint."
        )

    def _keep(self, step: int, update: str, metrics: Mapping[str, float], batch: DataProto) -> Path | None:
        """Write the batch, with the problems and the metrics in its ``meta_info``; None if it cannot be written."""
        path = self.folder / f"step_{step}_{update}.dataproto"
        about = {"global_steps": step, "non_finite": list(self._texts), "metrics": dict(metrics)}
        try:
            _write(replace(batch, meta_info=about), path)
            for old in sorted(self.folder.glob("step_*.dataproto"), key=_step_of)[:-KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the batch of step %d cannot be kept in %s: %s", step, path, error)
            return None
        return path


def _step_of(path: Path) -> int:
    """By the name: the clock of a machine may be set back."""
    number = path.stem.split("_")[1]
    return int(number) if number.isdecimal() else 0


def _write(batch: DataProto, path: Path) -> None:
    """Everything that a file can hold; columns of other objects, of a data set of one's own, are left out."""
    try:
        batch.save_to_disk(path)
    except DataError as error:
        logger.warning("%s holds the tensors and uid only: %s", path, error)
        names = [name for name in ("uid",) if name in batch.non_tensor_batch]
        batch.select(non_tensor_batch_keys=names).save_to_disk(path)


def _named(problem: NonFinite, batch: DataProto) -> str:
    """With the ``uid`` of its sample, if it has one."""
    uids = batch.non_tensor_batch.get("uid")
    return str(problem) if problem.row is None or uids is None else f"{problem} [uid {uids[problem.row]}]"
