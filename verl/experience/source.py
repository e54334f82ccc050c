"""Contract between ``experience`` and trainers: what a training step asks of the part that samples and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from verl.errors import CheckpointError, ProcessLostError
from verl.experience.rewards import RewardRecord
from verl.protocol import DataProto
from verl.utils.deferred import Deferred
from verl.utils.step_context import StepContext


@dataclass(frozen=True)
class Experience:
    """Scored responses for one training step."""

    batch: DataProto
    """The responses to train on, with the columns of their prompts; :attr:`scores` are not part of it yet."""
    scores: Deferred[DataProto]
    """``token_level_scores``, the other values of the reward function, and ``response_mask`` and ``uid`` changed to
    exclude samples that could not be scored. Columns that replace those of the batch; wait for them once."""
    rewards: RewardRecord
    """All responses scored for the step, those that dynamic sampling dropped too; complete once :attr:`scores` are."""
    draws_once: bool = True
    """False with dynamic sampling, which draws several batches for a step and has scored the selected one already."""


class ExperienceSource(ABC):
    """Samples responses to the prompts of the data and scores them.

    A source takes prompts from the data by itself, as many as it needs and as early as it likes: it may have prompts in
    flight across steps. The position in the data is saved by the training loop and counts prompts taken, so the state
    of a source holds those that were taken and not trained on yet.
    """

    @abstractmethod
    def next(self, context: StepContext) -> Experience:
        """Return the responses to train on in step ``context.number``; stages and metrics go into ``context``."""

    @abstractmethod
    def updated(self, version: int) -> None:
        """Called after the policy's update of step ``version``: from now on its new weights may sample."""

    def trained(self, context: StepContext) -> None:
        """Called when a step has trained, before sampler and data set hear of its batch."""
        return

    @property
    def is_sampling(self) -> bool:
        """Return whether engines are at work, so that a call of their ranks would wait for them."""
        return False

    def rest(self) -> AbstractContextManager[None]:
        """While this is entered nothing is sampled, so that the engines can serve others, such as validation.

        What was under way goes on afterwards.
        """
        return nullcontext()

    def replace_lost(self, error: ProcessLostError) -> None:
        """Start rollout engines with a pool of their own anew, if they alone were lost while they served others.

        Raises:
            ProcessLostError: the error itself, if workers in training are lost, or the engines share their ranks.
        """
        raise error

    def close(self) -> None:
        """Drop what is under way, because the workers end. Idempotent; the source cannot be used afterwards."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """State between two steps for a checkpoint, as JSON."""

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """Return what was sampled and not trained on yet, by name, for files of a checkpoint.

        Called between two steps; waited for when a checkpoint is written, or the run goes back to this state.
        """
        return Deferred.from_value({})

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """Take back what :meth:`pending` gave, after :meth:`load_state_dict`.

        Raises:
            CheckpointError: the source trains on what it samples at once, and ``batches`` is not empty.
        """
        if batches:
            raise CheckpointError(
                f"the checkpoint has responses of {len(batches)} batches that were sampled ahead (trainer.async.lag, "
                "or a trainer.v1.trainer_mode other than sync), and this run would not train on them. Resume with the "
                "lag and the mode that the checkpoint was made with."
            )

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of a checkpoint; the data goes on behind the prompts that are part of it."""
