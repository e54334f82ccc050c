"""The tensor columns of training sequences, padded as those of single turns are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from verl.agents.images import INPUTS, NO_IMAGES, sequence_positions
from verl.agents.loop import AgentLoopOutput
from verl.agents.worker import Trajectory, TrajectoryResult
from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.protocol.rows import fill_column
from verl.protocol.shared import SharedTensors
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import joined_columns, padded, routing_column
from verl.workers.routers import unknown

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
        self._images = ImagePrompts.of(processor)

    def of(self, ended: Iterable[Ended]) -> DataProto:
        """Return a row for each sequence, in their order.

        Returns:
            the columns of :func:`verl.workers.rollout.request.joined_columns`, ``response_mask``, 1 on the policy's
            tokens alone, ``rollout_log_probs``, and ``routed_experts`` if the experts of some token are known. For a
            model with images ``position_ids`` are (bsz, 4, length).
        """
        rows = [(trajectory, output) for trajectory, result in ended for output in result.outputs]
        outputs = [output for _, output in rows]
        longest = self._rollout.response_length
        response_mask, _ = padded([output.response_mask for output in outputs], longest, 0)
        log_probs, _ = padded([output.response_logprobs or [] for output in outputs], longest, 0.0)
        prompt_ids = [output.prompt_ids for output in outputs]
        prompts = padded(prompt_ids, self._rollout.prompt_length, self._pad, left=True)
        responses = padded([output.response_ids for output in outputs], longest, self._pad)
        columns = joined_columns(prompts, responses)
        if self._images is not None:
            images = [images_of(*row) for row in rows]
            positions = sequence_positions(prompts, responses, response_mask, images, self._images.config)
            columns["position_ids"] = positions
        columns |= routing_column(
            [output.routed_experts for output in outputs], list(map(len, prompt_ids)), prompts[0].shape[1], longest
        )
        return DataProto.from_dict(tensors={**columns, "response_mask": response_mask, "rollout_log_probs": log_probs})


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
        parts = fill_column(self._parts, "routed_experts", unknown)
        return DataProto.concat(parts).select_idxs(torch.tensor(rows))
