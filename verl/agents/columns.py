"""The tensor columns of training sequences, padded as those of single turns are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from verl.agents.images import INPUTS, NO_IMAGES
from verl.agents.loop import AgentLoopOutput
from verl.agents.worker import Trajectory, TrajectoryResult
from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.columns import ResponseRow, joined_rows, padded_prompts, sequence_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Ended = tuple[Trajectory, TrajectoryResult]
"""A trajectory and its result."""


class SequenceColumns:
    """Makes the tensor columns of sequences, each row from its own sequence alone.

    Args:
        rollout: ``actor_rollout_ref.rollout``, for the lengths.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
    """

    def __init__(
        self, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        self._rollout = rollout
        self._pad = cast(int, tokenizer.pad_token_id)  # transformers annotates all special tokens alike
        self._images = ImagePrompts.from_processor(processor)

    def to_batch(self, ended: Iterable[Ended]) -> DataProto:
        """Return a row for each sequence, in their order.

        Returns:
            the columns of :mod:`verl.workers.rollout.columns`; ``response_mask`` is 1 on the policy's tokens alone.
        """
        rows = [(trajectory, output) for trajectory, result in ended for output in result.outputs]
        outputs = [output for _, output in rows]
        log_probs = [output.response_logprobs or [] for output in outputs]
        responses = [
            ResponseRow(
                output.response_ids,
                values,
                output.routed_experts,
                output.response_mask,
                output.weight_versions,
                output.kept_ids,
            )
            for output, values in zip(outputs, log_probs, strict=True)
        ]
        images = None if self._images is None else ([images_of(*row) for row in rows], self._images.config)
        prompts = padded_prompts([output.prompt_ids for output in outputs], self._rollout.prompt_length, self._pad)
        return DataProto.from_dict(
            tensors=sequence_columns(prompts, responses, self._rollout.response_length, self._pad, images)
        )


def images_of(trajectory: Trajectory, output: AgentLoopOutput) -> SharedTensors:
    """The images of a sequence, by default those of its row, which the responses to a prompt share."""
    inputs = (output.multi_modal_data or trajectory.row).get(INPUTS)
    return inputs if isinstance(inputs, SharedTensors) else SharedTensors(inputs) if inputs else NO_IMAGES


class ColumnsInParts:
    """Columns that come in parts, each with the rows of some trajectories, until they are joined.

    Rows are only chosen and put one after the other, so that columns in Ray's object store stay where they lie.
    """

    def __init__(self) -> None:
        self._parts: list[DataProto] = []
        self._rows: dict[int, range] = {}
        """The rows of each trajectory, by its number, in all parts one after the other."""
        self._count = 0

    def add(self, numbers: Iterable[int], results: Sequence[TrajectoryResult], part: DataProto) -> None:
        """Take the rows of trajectories, in the order of ``part``; they replace those that a trajectory had."""
        for trajectory_index, result in zip(numbers, results, strict=True):
            self._rows[trajectory_index] = range(self._count, self._count + len(result.outputs))
            self._count += len(result.outputs)
        self._parts.append(part)

    def joined(self) -> DataProto:
        """Return all rows, in the order of the trajectories' numbers."""
        rows = [row for trajectory_index in sorted(self._rows) for row in self._rows[trajectory_index]]
        # A process may have had only sequences without a turn.
        return joined_rows(self._parts).select_idxs(torch.tensor(rows))
