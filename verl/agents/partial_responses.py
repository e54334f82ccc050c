"""Tokens of responses to single turns that are under way, for checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl.protocol import DataProto
from verl.serving.connection import Connection, GenerationCall, LocalCall
from verl.workers.rollout.request import NO_WEIGHTS, NOT_KEPT, DrawnPart, RolloutOutput, RolloutRequest


def to_batch(responses: Mapping[str, RolloutOutput]) -> DataProto:
    """Put responses into a batch for a file.

    Args:
        responses: by the name of their trajectory; ``finish_reason`` is "abort" of those that go on.

    Returns:
        a row for each: ``token_ids``, ``log_probs``, ``versions`` (rows, longest) and, if some response has them,
        ``kept_ids`` (rows, longest, K), padded on the right, and ``name``, ``length``, ``finish_reason`` and
        ``num_preempted``. Nothing if there are no responses.
    """
    if not responses:
        return DataProto()
    outputs = list(responses.values())
    longest = max(len(output.token_ids) for output in outputs)

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, value: int) -> torch.Tensor:
        column = torch.full((len(rows), longest), value, dtype=dtype)
        for place, row in zip(column, rows, strict=True):
            place[: len(row)] = torch.tensor(row, dtype=dtype)
        return column

    widths = [output.kept_ids.shape[1] for output in outputs if output.kept_ids is not None]
    tensors: dict[str, torch.Tensor] = {}
    if widths:
        rows = [output.kept_of_each(max(widths)) for output in outputs]
        tensors["kept_ids"] = pad_sequence(rows, batch_first=True, padding_value=NOT_KEPT)
    return DataProto.from_dict(
        tensors=tensors
        | {
            "token_ids": padded([output.token_ids for output in outputs], torch.int32, 0),
            "log_probs": padded([output.log_probs for output in outputs], torch.float32, 0),
            "versions": padded([output.weight_versions for output in outputs], torch.int32, NO_WEIGHTS),
        },
        non_tensors={
            "name": np.array(list(responses), dtype=object),
            "length": np.array([len(output.token_ids) for output in outputs]),
            "finish_reason": np.array([output.finish_reason for output in outputs], dtype=object),
            "num_preempted": np.array([output.num_preempted for output in outputs], dtype=object),
        },
    )


def from_batch(batch: DataProto) -> dict[str, RolloutOutput]:
    """Invert :func:`to_batch`."""
    columns, responses = batch.non_tensor_batch, {}
    for row, name in enumerate(columns.get("name", [])):
        size = int(columns["length"][row])
        lists = {key: batch.batch[key][row, :size].tolist() for key in ("token_ids", "log_probs", "versions")}
        versions = tuple((version, len(list(tokens))) for version, tokens in groupby(lists["versions"]))
        responses[name] = RolloutOutput(
            lists["token_ids"],
            lists["log_probs"],
            columns["finish_reason"][row],
            min(lists["versions"], default=NO_WEIGHTS),
            num_preempted=columns["num_preempted"][row],
            versions=versions,
            kept_ids=batch.batch["kept_ids"][row, :size] if "kept_ids" in batch.batch.keys() else None,
        )
    return responses


class SingleTurn:
    """Connection of a trajectory of one turn, which gives the tokens of its response before the end.

    It is a :class:`verl.serving.connection.Connection`.

    Args:
        connection: the way to the engines.
        resume_from: tokens that an earlier run sampled; the response continues them, or is them if they had ended.
    """

    def __init__(self, connection: Connection, resume_from: RolloutOutput | None) -> None:
        self._connection, self._resume_from = connection, resume_from
        self._conversation = ""
        self._response: RolloutOutput | None = None

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> GenerationCall:
        """See :class:`verl.serving.connection.Connection`."""
        self._conversation = conversation
        resume_from, most = self._resume_from, request.sampling.max_tokens
        if resume_from is not None and len(resume_from.token_ids) > most:  # the limit has been lowered since
            resume_from = self._resume_from = None
        if resume_from is None:
            return _MappedCall(self._connection.send(conversation, request, on_part), self._take)
        if resume_from.finish_reason == "stop" or len(resume_from.token_ids) == most:
            ended = resume_from if resume_from.finish_reason == "stop" else replace(resume_from, finish_reason="length")
            outcome: Future[RolloutOutput] = Future()
            outcome.set_result(self._take(ended))
            return LocalCall(outcome)
        call = self._connection.send(conversation, request.after(resume_from.token_ids), on_part)
        return _MappedCall(call, lambda rest: self._take(resume_from.followed_by(rest)))

    def _take(self, response: RolloutOutput) -> RolloutOutput:
        self._response = response
        return response

    def end(self, conversation: str) -> None:
        """See :class:`verl.serving.connection.Connection`."""
        self._connection.end(conversation)

    def partial_response(self, by_conversation: Mapping[str, RolloutOutput]) -> RolloutOutput | None:
        """Return the response, or its tokens so far; None if there is none.

        Args:
            by_conversation: see :meth:`verl.serving.router.Router.partial_responses`.
        """
        part = by_conversation.get(self._conversation)
        if self._response is not None or part is None:
            return self._response or self._resume_from
        return part if self._resume_from is None else self._resume_from.followed_by(part)


class _MappedCall:
    """A request whose answer is passed through a function."""

    def __init__(self, call: GenerationCall, change: Callable[[RolloutOutput], RolloutOutput]) -> None:
        self._call, self._change = call, change

    def future(self) -> Future[RolloutOutput]:
        outcome: Future[RolloutOutput] = Future()
        outcome.set_running_or_notify_cancel()  # it is the call that is cancelled

        def pass_on(done: Future[RolloutOutput] | asyncio.Future[RolloutOutput]) -> None:
            if done.cancelled():
                outcome.set_exception(CancelledError())
            elif (error := done.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(self._change(done.result()))

        self._call.future().add_done_callback(pass_on)
        return outcome

    def cancel(self) -> None:
        self._call.cancel()
