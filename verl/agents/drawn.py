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
    kept: dict[str, torch.Tensor] = {}
    if widths:
        rows = [output.kept_of_each(max(widths)) for output in outputs]
        kept["kept_ids"] = pad_sequence(rows, batch_first=True, padding_value=NOT_KEPT)
    return DataProto.from_dict(
        tensors=kept
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
        of_tokens = {key: batch.batch[key][row, :size].tolist() for key in ("token_ids", "log_probs", "versions")}
        versions = tuple((version, len(list(tokens))) for version, tokens in groupby(of_tokens["versions"]))
        responses[name] = RolloutOutput(
            of_tokens["token_ids"],
            of_tokens["log_probs"],
            columns["finish_reason"][row],
            min(of_tokens["versions"], default=NO_WEIGHTS),
            num_preempted=columns["num_preempted"][row],
            versions=versions,
            kept_ids=batch.batch["kept_ids"][row, :size] if "kept_ids" in batch.batch.keys() else None,
        )
    return responses


class SingleTurn:
    """The way to the engines of a trajectory of one turn, whose response can be had before its end.

    It is a :class:`verl.serving.connection.Connection`.

    Args:
        connection: the way to the engines.
        begun: what an earlier run has drawn of the response, which goes on from there, or is this if it has ended.
    """

    def __init__(self, connection: Connection, begun: RolloutOutput | None) -> None:
        self._connection, self._begun = connection, begun
        self._conversation = ""
        self._response: RolloutOutput | None = None

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> GenerationCall:
        """See :class:`verl.serving.connection.Connection`."""
        self._conversation = conversation
        begun, most = self._begun, request.sampling.max_tokens
        if begun is not None and len(begun.token_ids) > most:  # the limit has been lowered since
            begun = self._begun = None
        if begun is None:
            return _ChangedCall(self._connection.send(conversation, request, on_part), self._take)
        if begun.finish_reason == "stop" or len(begun.token_ids) == most:
            ended = begun if begun.finish_reason == "stop" else replace(begun, finish_reason="length")
            whole: Future[RolloutOutput] = Future()
            whole.set_result(self._take(ended))
            return LocalCall(whole)
        call = self._connection.send(conversation, request.after(begun.token_ids), on_part)
        return _ChangedCall(call, lambda rest: self._take(begun.followed_by(rest)))

    def _take(self, response: RolloutOutput) -> RolloutOutput:
        self._response = response
        return response

    def end(self, conversation: str) -> None:
        """See :class:`verl.serving.connection.Connection`."""
        self._connection.end(conversation)

    def drawn(self, of_requests: Mapping[str, RolloutOutput]) -> RolloutOutput | None:
        """Return the response, or what there is of it; None if there is no token.

        Args:
            of_requests: see :meth:`verl.serving.router.Router.drawn`.
        """
        part = of_requests.get(self._conversation)
        if self._response is not None or part is None:
            return self._response or self._begun
        return part if self._begun is None else self._begun.followed_by(part)


class _ChangedCall:
    """A request whose answer is changed."""

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
