"""Spans of the trajectories of a step.

::

    trajectory                      a trace of its own
      ├─ turn                       the policy's message and what answered it
      │    ├─ generation
      │    ├─ tool_call             one for each call
      │    └─ environment, user     whichever answered
      ├─ turn ...
      └─ reward                     the stage in which the batch was scored

Spans are made on the driver once the step has its scores, from the times that the loops noted beside their messages.
So the processes of agent loops, on whatever machine, need neither a client nor a way to the collector.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl.base.redact import redacted, redacted_texts, secrets_in
from verl.config import PPOConfig
from verl.protocol import DataProto, compute_response_mask
from verl.trainer.ppo.spans import Interval, PlannedSpan, SpanSender
from verl.utils.transformers_private import decoded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from verl.base.types import JsonMapping


LONGEST_TEXT = 20_000
"""Characters of an attribute that are kept."""


class RolloutTraces:
    """Sends the trajectories of steps to the collector or server of ``rollout.trace.backend``.

    Args:
        config: the run's.
        tokenizer: the policy's.
    """

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._with_texts = rollout.trace.token2text
        per_worker = rollout.trace.max_samples_per_step_per_worker
        self._most = None if per_worker is None else per_worker * rollout.agent.num_workers
        self._tokenizer = tokenizer
        self._secrets = secrets_in(config.to_dict())
        self._sender = _sender(rollout.trace.backend, config.trainer.project_name, config.trainer.experiment_name)

    def write(self, step: int, batches: Iterable[DataProto], stages: Sequence[tuple[str, float, float]]) -> None:
        """Send the trajectories of a step.

        Args:
            step: its number.
            batches: scored responses; the rows of a trajectory lie side by side.
            stages: name, begin and end of the stages of the step; those of a name belong to the batches in order.
        """
        left = self._most
        for index, batch in enumerate(batches):
            sampled, scored = (_nth(stages, name, index) for name in ("gen", "reward"))
            for rows in _by_trajectory(batch):
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                self._sender.send(self._shown(self._trajectory(step, batch, rows, sampled, scored)))

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._sender.close()

    def _shown(self, part: PlannedSpan) -> PlannedSpan:
        """Leave out secrets, attributes without a value, and the ends of long texts."""
        present = {name: value for name, value in part.attributes.items() if value is not None}
        attributes = {
            name: value[:LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in redacted_texts(present, self._secrets).items()
        }
        error = redacted(part.error, self._secrets)[:LONGEST_TEXT]
        return PlannedSpan(part.name, part.interval, attributes, error, [self._shown(inner) for inner in part.parts])

    def _trajectory(self, step: int, batch: DataProto, rows: range, sampled: Interval, scored: Interval) -> PlannedSpan:
        last = rows[-1]
        columns = {name: values[last] for name, values in batch.non_tensor_batch.items()}
        present = compute_response_mask(batch)[rows.start : rows.stop].bool()
        score = float(batch.batch["token_level_scores"][rows.start : rows.stop].sum())
        conversation = columns.get("trajectory_conversation")
        turns = [] if conversation is None else list(self._turns(conversation))
        if not turns:
            turns = [PlannedSpan("turn", sampled, parts=[PlannedSpan("generation", sampled)])]
        # The driver's clock timed the scoring, and may differ from that of the machine of the loop.
        intervals = [scored, *(turn.interval for turn in turns)]
        begin, end = min(begin for begin, _ in intervals), max(end for _, end in intervals)
        status, message = columns.get("trajectory_status"), columns.get("trajectory_message")
        reward = PlannedSpan(
            "reward", scored, {"verl.score": score, "verl.reward_status": columns.get("reward_status")}
        )
        attributes = {
            "verl.step": step,
            "verl.uid": columns.get("uid"),
            "verl.sample_index": _plain(columns.get("sample_index")),
            "verl.trajectory_id": columns.get("trajectory_id"),
            "verl.agent_name": columns.get("agent_name"),
            "verl.data_source": columns.get("data_source"),
            "verl.status": status or columns.get("finish_reason"),
            "verl.sequences": len(rows),
            "verl.response_tokens": int(present.sum()),
            "verl.trained_tokens": int(batch.batch["response_mask"][rows.start : rows.stop].sum()),
            "verl.weight_version": _plain(columns.get("weight_version")),
            "verl.score": score,
        }
        if self._with_texts:
            attributes["verl.prompt"] = self._text(batch.batch["prompts"][rows.start])
            attributes["verl.response"] = self._text(batch.batch["responses"][last][present[-1]])
        error = f"{status}: {message}" if message else ""
        return PlannedSpan("trajectory", (begin, end), attributes, error, [*turns, reward])

    def _turns(self, conversation: Sequence[JsonMapping]) -> Iterable[PlannedSpan]:
        """A part for each message of the policy that has times, with those of the messages that answer it."""
        turn: PlannedSpan | None = None
        for message in conversation:
            if "began" not in message:
                continue
            begin, seconds = message["began"], message["seconds"] + message.get("waited_s", 0.0)
            interval = (begin, begin + seconds)
            if message["role"] == "assistant":
                if turn is not None:
                    yield turn
                turn = PlannedSpan(
                    "turn", interval, parts=[PlannedSpan("generation", interval, self._message_attributes(message))]
                )
                if "environment_seconds" in message:
                    answered = (interval[1], interval[1] + message["environment_seconds"])
                    turn.parts.append(PlannedSpan("environment", answered, {"verl.reward": message["reward"]}))
            elif turn is not None:
                name = "tool_call" if message["role"] == "tool" else str(message["role"])
                turn.parts.append(
                    PlannedSpan(name, interval, self._message_attributes(message), message.get("failure", ""))
                )
            if turn is not None:
                turn.interval = (turn.interval[0], max(part.interval[1] for part in turn.parts))
        if turn is not None:
            yield turn

    def _message_attributes(self, message: Mapping[str, object]) -> dict[str, object]:
        """Attributes of a message."""
        attributes = {
            "verl.tool": message.get("name"),
            "verl.waited_s": message.get("waited_s"),
            "verl.reward": message.get("reward"),
            "verl.is_left_out": message.get("is_left_out"),
        }
        if self._with_texts:
            calls = message.get("tool_calls")
            attributes["verl.content"] = str(message.get("content") or "")
            attributes["verl.tool_calls"] = json.dumps(calls, ensure_ascii=False, default=str) if calls else None
        return attributes

    def _text(self, ids: torch.Tensor) -> str:
        return decoded(self._tokenizer, ids.tolist(), skip_special_tokens=True)


def _sender(backend: str | None, project: str, experiment: str) -> SpanSender:
    if backend == "mlflow":
        from verl.trainer.ppo.mlflow_spans import MlflowSpans  # needs the extra `mlflow`

        return MlflowSpans(project, experiment)
    from verl.trainer.ppo.otel_spans import OtelSpans  # needs the extra `otel`

    return OtelSpans(project, experiment)


def _by_trajectory(batch: DataProto) -> Iterable[range]:
    """Rows of each trajectory, which lie side by side; without a column of trajectories each row is one."""
    ids = batch.non_tensor_batch.get("trajectory_id")
    if ids is None:
        yield from (range(row, row + 1) for row in range(len(batch)))
        return
    starts = [0, *(row for row in range(1, len(ids)) if ids[row] != ids[row - 1])]
    yield from (range(start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True))


def _nth(stages: Sequence[tuple[str, float, float]], name: str, index: int) -> Interval:
    """Begin and end of the stage of a batch; of all stages so far, if a subclass has none of that name."""
    intervals = [(begin, end) for stage, begin, end in stages if stage == name]
    times = 2 if name == "reward" else 1  # it is entered to start the scoring, and to take the scores
    mine = intervals[times * index : times * (index + 1)] or [(begin, end) for _, begin, end in stages]
    return min(begin for begin, _ in mine), max(end for _, end in mine)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
