"""The samples of a free-running run on disk, so that its steps can be repeated: ``trainer.async.{record_dir,replay}``.

Which samples a step of such a run trains on, and which weights drew their tokens, depends on the time that everything
took. ``{folder}/{step}.safetensors`` has the batch of a step as it was sampled. A run that reads these files draws
nothing, and computes the same weights with the same seeds, on one process if wished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.base.fs import below
from verl.errors import DataError, ProcessLostError
from verl.experience.background import RolloutPool
from verl.experience.lockstep import Lockstep
from verl.experience.rewards import RewardRecord
from verl.experience.source import Experience, ExperienceSource
from verl.protocol import DataProto
from verl.utils.step_context import StepContext


def record(folder: Path, step: int, batch: DataProto) -> None:
    """Write the batch of a step, before its scores, and remove those of later steps, which another run has left."""
    for path in folder.glob("*.safetensors"):
        if path.stem.isdigit() and int(path.stem) > step:
            path.unlink()
    batch.save_to_disk(_file(folder, step))


class Replay(ExperienceSource):
    """Reads the batch of each step from a folder, and scores it.

    Args:
        source: scores batches.
        folder: where :func:`record` wrote.
        pool: rollout engines with a pool of their own, which serve validation.
    """

    def __init__(self, source: Lockstep, folder: Path, pool: RolloutPool | None = None) -> None:
        self._source, self._folder, self._pool = source, folder, pool
        self._updates = 0

    def next(self, context: StepContext) -> Experience:
        """See :meth:`ExperienceSource.next`.

        Raises:
            DataError: there is no batch of this step, or its file is damaged.
        """
        path = _file(self._folder, context.number)
        if not path.is_file():
            steps = sorted(int(file.stem) for file in self._folder.glob("*.safetensors") if file.stem.isdigit())
            shown = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise DataError(
                f"trainer.async.replay={self._folder} has {shown}, not step {context.number}. Set "
                "trainer.total_training_steps to the last recorded step, or name the folder of the whole run."
            )
        with context.stage("gen"):
            batch = DataProto.load_from_disk(path)
        rewards = RewardRecord()
        return Experience(batch, self._source.score(batch, context, rewards), rewards)

    def updated(self, version: int) -> None:
        """See :meth:`ExperienceSource.updated`."""
        self._updates += 1

    @contextmanager
    def rest(self) -> Iterator[None]:
        """See :meth:`ExperienceSource.rest`; engines of a pool have the newest weights then."""
        if self._pool is not None:
            self._pool.update(self._updates)
        yield

    def replace_lost(self, error: ProcessLostError) -> None:
        """See :meth:`ExperienceSource.replace_lost`."""
        if self._pool is None:
            raise error
        self._pool.replace(error)

    def state_dict(self) -> dict[str, object]:
        """See :meth:`ExperienceSource.state_dict`; the number of the step is all that counts."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See :meth:`ExperienceSource.load_state_dict`."""

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """See :meth:`ExperienceSource.load_pending`; what a recorded run had under way is in its files."""


def _file(folder: Path, step: int) -> Path:
    return below(folder, f"{step}.safetensors")
