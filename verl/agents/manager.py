"""The driver's side of agent loops: a batch of prompts becomes trajectories, and these a batch of responses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verl.agents.columns import ColumnsInParts, SequenceColumns, images_of
from verl.agents.images import FOR_TEXT, INPUTS
from verl.agents.loop import JUDGE_ADDRESS, AgentLoopOutput
from verl.agents.policy import SampleId
from verl.agents.worker import Trajectory, TrajectoryProgress, TrajectoryResult, agent_loops, trajectory_id
from verl.base.repeats import without_repeated_traceback
from verl.config import AgentLoopConfig, PPOConfig
from verl.config.agent import SINGLE_TURN, TrajectoryStatus
from verl.errors import DataError, RolloutError
from verl.protocol import DataProto
from verl.tools.threads import LoopThread
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import RolloutOutput, requests_from_prompts

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
ENDS_OF_ONE_TURN: tuple[TrajectoryStatus, ...] = ("done", "context_full")
"""Statuses of a single turn that an engine has answered."""
REDRAWS = 2
"""Number of times that a trajectory whose status asks for it is sampled again."""
NOT_FOR_LOOPS = ("uid", "sample_index")
"""Columns that the trainer made, which a row of the data set does not have."""


class Agents(Protocol):
    """Runner of trajectories: :class:`verl.agents.local.LocalAgents` or :class:`verl.agents.ray.RayAgents`."""

    thread: LoopThread
    """The event loop in which :meth:`run` is awaited."""

    async def run(self, trajectories: Sequence[Trajectory]) -> tuple[list[TrajectoryResult], DataProto]:
        """Run trajectories to their end, at once; their requests wait while no engine serves.

        Returns:
            the results, in the order of the trajectories, and the columns of their sequences
            (:meth:`verl.agents.columns.SequenceColumns.of`). The tokens of a sequence are read there alone: its output
            may come without them.

        Raises:
            WorkerError: a process of agent loops cannot start.
        """
        ...

    async def partial_responses(self) -> list[DataProto]:
        """See :meth:`AgentLoopManager.partial_responses`; awaited in :attr:`thread`."""
        ...

    def serve_until(self, group: WorkerGroup, is_enough: Callable[[], bool]) -> None:
        """See :meth:`AgentLoopManager.serve_until`."""
        ...

    def notify(self) -> None:
        """Let :meth:`serve_until` ask ``is_enough`` at once; from any thread."""
        ...

    def progress(self) -> TrajectoryProgress:
        """See :meth:`AgentLoopManager.progress`."""
        ...

    @property
    def weight_version(self) -> int:
        """See :attr:`AgentLoopManager.weight_version`."""
        ...

    @property
    def has_ended(self) -> bool:
        """See :attr:`AgentLoopManager.has_ended`."""
        ...

    def shutdown(self) -> None:
        """End what runs."""
        ...


class AgentLoopManager:
    """Answers prompts by agent loops: a batch at once, or trajectories that go on from one training step to the next.

    ::

        batch = manager.generate_sequences(prompts)      # all begins and ends here

        future = manager.submit(prompts_of_a_group)      # begins now, at any time, in any thread
        manager.serve_until(group, is_enough)            # engines serve; returns with trajectories under way
        ...                                              # training: tools go on, requests wait
        manager.serve_until(group, future.done)          # all go on, with the newest weights
        future.result()

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
        self._run_columns = {} if judge_address is None else {JUDGE_ADDRESS: judge_address}
        self._takes_images = ImagePrompts.from_processor(processor) is not None
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
        future = self.submit(prompts)
        try:
            self.serve_until(self.worker_group, future.done)
        finally:
            future.cancel()  # does nothing once it is done
        batch = future.result()
        if not self._is_plain(prompts):
            check_failures(batch, self._rollout.agent)
        return batch

    def submit(self, prompts: DataProto, resume_from: Mapping[str, RolloutOutput] | None = None) -> Future[DataProto]:
        """Begin the trajectories of these rows, for example of one group; may be called at any time, in any thread.

        Args:
            prompts: as for :meth:`generate_sequences`. The random numbers of a sample follow from its
                ``global_steps``, ``uid`` and ``sample_index``, and not from what runs beside it.
            resume_from: partial responses of single turns from an earlier run, by the name of the trajectory, with
                ``finish_reason`` "abort" unless they have ended. They go on from there.

        Returns:
            what :meth:`generate_sequences` returns for these rows, trajectories that are drawn again included. How many
            failed is not judged here: see :func:`check_failures`. It fails with WorkerError if a process of agent loops
            cannot start, and is cancelled by :meth:`shutdown` and when the manager :attr:`has_ended`.

            Prompts without the column ``agent_name``, in a run whose default is ``single_turn_agent``, get exactly the
            columns of the ranks' ``generate_sequences``, and a RolloutError if an engine cannot serve one.

        Raises:
            DataError: a row has images, and its agent loop or the policy takes none.
        """
        trajectories = self._trajectories(prompts, resume_from or {})
        self._check_images(trajectories)
        future = self._agents.thread.submit(self._answered(prompts, trajectories))
        future.add_done_callback(lambda _: self._agents.notify())
        return future

    def serve_until(self, group: WorkerGroup, is_enough: Callable[[], bool]) -> None:
        """Let the engines serve all submitted trajectories until it is enough.

        The engines wake with their newest weights. At the end what they draw is interrupted, and goes on in the next
        call; between two calls trajectories run on (tools, simulated users, programs), and only their requests wait.
        All trajectories under way are served, also while :meth:`generate_sequences` answers prompts of validation.

        Args:
            group: the ranks of the engines.
            is_enough: asked at least every 0.1 s and whenever a submitted future is done, perhaps in another thread; it
                must return at once.

        Raises:
            ProcessLostError: a rank died or hangs; trajectories go on, and their requests wait for the engines of
                another call, without the tokens drawn since this one began. Or the router died: see :attr:`has_ended`.
            WorkerError: an engine failed, or a process of agent loops cannot start.
        """
        self._agents.serve_until(group, is_enough)

    def partial_responses(self) -> list[DataProto]:
        """Return what there is of responses of single turns whose columns are not there yet, for a checkpoint.

        Tokens that an engine has drawn since its last interruption are not among them.

        Returns:
            parts, of which :func:`verl.agents.partial_responses.from_batch` makes what :meth:`submit` takes.
        """
        try:
            return [
                batch for batch in self._agents.thread.submit(self._agents.partial_responses()).result() if len(batch)
            ]
        except CancelledError:  # another thread that serves has lost the router meanwhile: see `has_ended`
            return []

    def cancel(self, futures: Iterable[Future[DataProto]]) -> None:
        """Drop submitted trajectories that nobody wants any more; those that are done stay as they are."""
        for future in futures:
            future.cancel()

    def progress(self) -> TrajectoryProgress:
        """Return what the trajectories under way are doing; on Ray as of up to half a second ago."""
        return self._agents.progress()

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engines have, or had when they served last; -1 before the first time."""
        return self._agents.weight_version

    @property
    def has_ended(self) -> bool:
        """Return whether the loss of the router, or an error of engines or processes, cancelled all trajectories.

        Columns of trajectories that had ended can be read until :meth:`shutdown`; another manager has to run the rest.
        """
        return self._agents.has_ended

    def shutdown(self) -> None:
        """End the processes and threads of agent loops; the manager cannot be used afterwards."""
        self._agents.shutdown()

    def _is_plain(self, prompts: DataProto) -> bool:
        """Return whether the rows are those of a run in which each prompt has one response of the engines."""
        return "agent_name" not in prompts.non_tensor_batch and self._rollout.default_agent_loop == SINGLE_TURN

    async def _answered(self, prompts: DataProto, trajectories: list[Trajectory]) -> DataProto:
        parts, agent = ColumnsInParts(), self._rollout.agent
        results, columns = await self._agents.run(trajectories)
        parts.add(range(len(results)), results, columns)
        for attempt in range(1, REDRAWS + 1):
            again = [row for row, result in enumerate(results) if agent.treatment_of(result.status) == "redraw"]
            if not again:
                break
            redrawn = [
                replace(trajectories[row], sample=replace(trajectories[row].sample, attempt=attempt)) for row in again
            ]
            new, columns = await self._agents.run(redrawn)
            parts.add(again, new, columns)
            for row, result in zip(again, new, strict=True):
                results[row] = result
        return await asyncio.to_thread(self._joined, parts, prompts, trajectories, results)

    def _joined(
        self,
        parts: ColumnsInParts,
        prompts: DataProto,
        trajectories: Sequence[Trajectory],
        results: Sequence[TrajectoryResult],
    ) -> DataProto:
        if self._is_plain(prompts):
            for result in results:
                if result.status not in ENDS_OF_ONE_TURN:
                    raise RolloutError(result.message)
            return parts.joined() | DataProto.from_dict(non_tensors=_of_engines(trajectories, results))
        batch = parts.joined() | self._described(trajectories, results)
        if "agent_name" in prompts.non_tensor_batch:
            return batch
        names = (trajectory.agent_name for trajectory, *_ in _sequences(trajectories, results))
        return batch | DataProto.from_dict(non_tensors={"agent_name": _objects(names)})

    def _trajectories(self, prompts: DataProto, resume_from: Mapping[str, RolloutOutput]) -> list[Trajectory]:
        is_plain = self._is_plain(prompts)
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
            row = {**row, "agent_name": name, "raw_prompt_ids": request.prompt_ids, **self._run_columns}
            trajectories.append(
                Trajectory(
                    agent_name=name,
                    sample=sample,
                    sampling=request.sampling,
                    row=row,
                    returns_routing=request.returns_routing,
                    returns_kept_ids=request.returns_kept_ids,
                    is_trained_on=is_trained_on,
                    is_plain=is_plain,
                    resume_from=resume_from.get(trajectory_id(sample.uid, sample.sample_index)),
                )
            )
        return trajectories

    def _check_images(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if not len(trajectory.row.get(INPUTS) or ()):
                continue
            if not self._takes_images:
                raise DataError(f"a row has images, and {FOR_TEXT}. Take the rows with images out.")
            entry = self._loops.get(trajectory.agent_name)  # an unknown one fails the trajectory
            if entry is not None and not entry.load().takes_images:
                raise DataError(
                    f"a row has images, and its agent loop '{trajectory.agent_name}' takes none in this version. Give "
                    "rows with images another agent_name (single_turn_agent), or take them out."
                )

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
                **_of_engines(trajectories, results),
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


def check_failures(batch: DataProto, agent: AgentLoopConfig) -> None:
    """Log each kind of failure of a batch once, with its number.

    Args:
        batch: sequences of trajectories, as :meth:`AgentLoopManager.submit` gives them, perhaps of many groups.
        agent: says which failures are left out, and how many may be.

    Raises:
        RolloutError: more trajectories failed than ``rollout.agent.max_failure_rate`` allows.
    """
    columns = batch.non_tensor_batch
    names = ("trajectory_id", "trajectory_status", "trajectory_message")
    ended = {name: (status, message) for name, status, message in zip(*(columns[n] for n in names), strict=True)}
    kinds = Counter(kind for kind in ended.values() if agent.treatment_of(kind[0]) in LEFT_OUT)
    if not kinds:
        return
    shown = [f"{count} x {status}: {message}" for (status, message), count in kinds.most_common(SHOWN_FAILURES)]
    head = f"{kinds.total()} of {len(ended)} trajectories failed:"
    if kinds.total() > agent.max_failure_rate * len(ended):
        limit = f"More than rollout.agent.max_failure_rate={agent.max_failure_rate:g} ends the run."
        raise RolloutError("\n".join([head, *(f"  {kind}" for kind in shown), limit]))
    logger.warning("%s", "\n  ".join([head, *map(without_repeated_traceback, shown)]))


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


def _of_engines(trajectories: Sequence[Trajectory], results: Sequence[TrajectoryResult]) -> dict[str, np.ndarray]:
    """The columns of objects that the ranks' ``generate_sequences`` gives too."""
    rows = _sequences(trajectories, results)
    return {
        "finish_reason": _objects(FINISH_REASONS.get(output.status, "abort") for *_, output in rows),
        "weight_version": np.array([result.weight_version for _, result, _ in rows]),
    }


def _objects(values: Iterable[object]) -> np.ndarray:
    listed = list(values)
    return np.fromiter(listed, dtype=object, count=len(listed))
