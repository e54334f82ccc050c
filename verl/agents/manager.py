"""The driver's side of agent loops: a batch of prompts becomes trajectories, and these a batch of responses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verl.agents.columns import ColumnsInParts, SequenceColumns, images_of
from verl.agents.images import FOR_TEXT, INPUTS
from verl.agents.loop import JUDGE_ADDRESS, AgentLoopOutput
from verl.agents.policy import SampleId
from verl.agents.worker import Trajectory, TrajectoryResult, agent_loops
from verl.config import PPOConfig
from verl.config.agent import TrajectoryStatus
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import requests_from_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.single_controller.base.worker_group import WorkerGroup

LEFT_OUT = ("mask", "redraw")
"""Treatments of trajectories that are not trained on."""
SHOWN_FAILURES = 8
"""Most kinds of failures of a batch that the log shows, the most frequent first."""
logger = logging.getLogger(__name__)

FINISH_REASONS: dict[TrajectoryStatus, str] = {"done": "stop", "turns_used_up": "stop", "context_full": "length"}
"""The column ``finish_reason`` by how a trajectory ended, in the words of the engines; "abort" after all others."""
REDRAWS = 2
"""How often a trajectory whose status asks for it is drawn again."""
NOT_FOR_LOOPS = ("uid", "sample_index")
"""Columns that the trainer made, which a row of the data set does not have."""


def trajectory_id(uid: str, sample_index: int) -> str:
    """Name the trajectory that is response ``sample_index`` to the prompt ``uid``."""
    return f"{uid}/{sample_index}"


class Agents(Protocol):
    """What runs trajectories: :class:`verl.agents.local.LocalAgents` or :class:`verl.agents.ray.RayAgents`."""

    def run(self, trajectories: Sequence[Trajectory], group: WorkerGroup) -> tuple[list[TrajectoryResult], DataProto]:
        """Run all trajectories to their end; ``group`` is that of the engines.

        Returns:
            the results, in the order of the trajectories, and the columns of their sequences
            (:meth:`verl.agents.columns.SequenceColumns.of`). The tokens of a sequence are read there alone: its output
            may come without them.
        """
        ...

    def shutdown(self) -> None:
        """End what runs."""
        ...


class AgentLoopManager:
    """Answers batches of prompts by agent loops.

    Args:
        config: the whole configuration.
        worker_group: the ranks with the rollout engines; may be replaced between two calls.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
        judge_address: where the judge answers while conversations are held; None if none does.

    Raises:
        ConfigError: an agent loop of the configuration cannot be loaded.
    """

    def __init__(
        self,
        config: PPOConfig,
        worker_group: WorkerGroup,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
        judge_address: str | None = None,
    ) -> None:
        # Here too, so that what cannot be loaded ends the run before a process starts.
        self._loops = agent_loops(config)
        self.worker_group = worker_group
        self._rollout = config.actor_rollout_ref.rollout
        self._of_run = {} if judge_address is None else {JUDGE_ADDRESS: judge_address}
        self._takes_images = ImagePrompts.of(processor) is not None
        self._agents: Agents = _agents(
            config, SequenceColumns(self._rollout, tokenizer, processor), tokenizer, processor
        )

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer each row by its agent loop.

        Args:
            prompts: as for the ranks' ``generate_sequences`` (:mod:`verl.workers.rollout.request`), with ``raw_prompt``
                and the other columns of the data set.

        Returns:
            a row for each training sequence, in the order of the prompts, with the columns of the ranks'
            ``generate_sequences``, where ``response_mask`` is 1 on the policy's tokens alone, and ``trajectory_id``,
            ``agent``, ``trajectory_status``, ``trajectory_message``, ``__num_turns__``, ``agent_loop_metrics``,
            ``trajectory_conversation``, ``agent_name`` if the prompts lack it, and those of ``extra_fields``. For a
            model with images ``position_ids`` are (bsz, 4, length), and ``multi_modal_inputs`` has the images of each
            sequence, those of tools among them.

        Raises:
            DataError: a row has images, and its agent loop or the policy takes none.
            RolloutError: too many trajectories failed.
        """
        trajectories = self._trajectories(prompts)
        self._check_images(trajectories)
        parts = ColumnsInParts()
        results, columns = self._agents.run(trajectories, self.worker_group)
        parts.add(range(len(results)), results, columns)
        for attempt in range(1, REDRAWS + 1):
            again = [row for row, result in enumerate(results) if self._treatment(result) == "redraw"]
            if not again:
                break
            redrawn = [
                replace(trajectories[row], sample=replace(trajectories[row].sample, attempt=attempt)) for row in again
            ]
            new, columns = self._agents.run(redrawn, self.worker_group)
            parts.add(again, new, columns)
            for row, result in zip(again, new, strict=True):
                results[row] = result
        self._report_failures(results)
        batch = parts.joined() | self._described(trajectories, results)
        if "agent_name" in prompts.non_tensor_batch:
            return batch
        names = (trajectory.agent_name for trajectory, *_ in _sequences(trajectories, results))
        return batch | DataProto.from_dict(non_tensors={"agent_name": _objects(names)})

    def shutdown(self) -> None:
        """End the processes and threads of agent loops; the manager cannot be used afterwards."""
        self._agents.shutdown()

    def _treatment(self, result: TrajectoryResult) -> str:
        return self._rollout.agent.treatment_of(result.status)

    def _trajectories(self, prompts: DataProto) -> list[Trajectory]:
        step = int(prompts.meta_info.get("global_steps", 0))
        columns = prompts.non_tensor_batch
        is_trained_on = not prompts.meta_info.get("validate", False) and prompts.meta_info.get("do_sample") is not False
        trajectories = []
        for index, request in enumerate(requests_from_prompts(prompts, self._rollout)):
            row = {name: values[index] for name, values in columns.items() if name not in NOT_FOR_LOOPS}
            sample = SampleId(
                step=step,
                uid=str(columns["uid"][index]),
                sample_index=int(columns["sample_index"][index]),
                prompt_ids=tuple(request.prompt_ids),
            )
            name = row.get("agent_name") or self._rollout.default_agent_loop
            row = {**row, "agent_name": name, "raw_prompt_ids": request.prompt_ids, **self._of_run}
            trajectories.append(
                Trajectory(
                    agent_name=name,
                    sample=sample,
                    sampling=request.sampling,
                    row=row,
                    returns_routing=request.returns_routing,
                    is_trained_on=is_trained_on,
                )
            )
        return trajectories

    def _check_images(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if not len(trajectory.row.get(INPUTS) or ()):
                continue
            if not self._takes_images:
                raise DataError(f"a row has images, and {FOR_TEXT}. Take the rows with images out.")
            loop = self._loops.get(trajectory.agent_name)  # an unknown one fails the trajectory
            if loop is not None and not loop[0].takes_images:
                raise DataError(
                    f"a row has images, and its agent loop '{trajectory.agent_name}' takes none in this version. Give "
                    "rows with images another agent_name (single_turn_agent), or take them out."
                )

    def _report_failures(self, results: Sequence[TrajectoryResult]) -> None:
        """Log each kind of failure once, with its number.

        Raises:
            RolloutError: too many trajectories failed.
        """
        failures = [result for result in results if self._treatment(result) in LEFT_OUT]
        kinds = Counter((result.status, result.message) for result in failures)
        shown = [f"{count} x {status}: {message}" for (status, message), count in kinds.most_common(SHOWN_FAILURES)]
        if not failures:
            return
        said = f"{len(failures)} of {len(results)} trajectories failed:\n  " + "\n  ".join(shown)
        limit = self._rollout.agent.max_failure_rate
        if len(failures) > limit * len(results):
            raise RolloutError(f"{said}\nMore than rollout.agent.max_failure_rate={limit:g} ends the run.")
        logger.warning("%s", said)

    def _described(self, trajectories: Sequence[Trajectory], results: Sequence[TrajectoryResult]) -> DataProto:
        """Return the columns of objects: what became of each sequence and of its trajectory."""
        rows = _sequences(trajectories, results)
        outputs = [output for *_, output in rows]
        images = [images_of(trajectory, output) for trajectory, _, output in rows]
        extra = {name: None for output in outputs for name in output.extra_fields}
        own_scores = [output.reward_score for output in outputs]
        return DataProto.from_dict(
            non_tensors={
                "trajectory_id": _objects(
                    trajectory_id(trajectory.sample.uid, trajectory.sample.sample_index) for trajectory, *_ in rows
                ),
                "agent": _objects(output.agent for output in outputs),
                "finish_reason": _objects(FINISH_REASONS.get(output.status, "abort") for output in outputs),
                "weight_version": np.array([result.weight_version for _, result, _ in rows]),
                "trajectory_status": _objects(result.status for _, result, _ in rows),
                "trajectory_message": _objects(result.message for _, result, _ in rows),
                "__num_turns__": np.array([output.num_turns for output in outputs]),
                "agent_loop_metrics": _objects(output.metrics.model_dump() for output in outputs),
                "trajectory_conversation": _objects(output.conversation for output in outputs),
                **({INPUTS: _objects(images)} if self._takes_images else {}),
                **({} if own_scores == [None] * len(outputs) else {"reward_score": _objects(own_scores)}),
                **{name: _objects(output.extra_fields.get(name) for output in outputs) for name in extra},
            },
        )


def _agents(
    config: PPOConfig, columns: SequenceColumns, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
) -> Agents:
    if config.trainer.controller == "local":
        from verl.agents.local import LocalAgents

        return LocalAgents(config, columns, tokenizer, processor)
    from verl.agents.ray import RayAgents  # Ray need not be installed for the other

    return RayAgents(config, columns)


def _sequences(
    trajectories: Sequence[Trajectory], results: Sequence[TrajectoryResult]
) -> list[tuple[Trajectory, TrajectoryResult, AgentLoopOutput]]:
    """The training sequences, each with its trajectory and what became of that."""
    pairs = zip(trajectories, results, strict=True)
    return [(trajectory, result, output) for trajectory, result in pairs for output in result.outputs]


def _objects(values: Iterable[object]) -> np.ndarray:
    listed = list(values)
    return np.fromiter(listed, dtype=object, count=len(listed))
