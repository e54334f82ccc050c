"""Answers as server-sent events, sent while they are drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from verl.base.types import JsonObject
from verl.errors import VerlError
from verl.plugins.endpoint.calls import CallRefusedError, ModelAnswer, ModelBackend, ModelCall
from verl.plugins.endpoint.chat import Event


class Vendor(Protocol):
    """Format of errors in the API of one vendor."""

    error_event: str | None
    """Name of the event with an error, in a stream that has begun."""

    def error(self, error: CallRefusedError) -> JsonObject:
        """Return the body of an error."""
        ...


class ReplyWriter(Protocol):
    """Writes the answers to one request in the form of a vendor: whole, or as a stream in the order of the methods."""

    def whole(self, answers: Sequence[ModelAnswer]) -> BaseModel:
        """Return the answers that are not streamed."""
        ...

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the events before the first text."""
        ...

    def text(self, index: int, new: str) -> Iterator[Event]:
        """Yield the events of a piece of text of one answer."""
        ...

    def end(self, answers: Sequence[ModelAnswer]) -> Iterator[Event]:
        """Yield the events of what was not streamed, tool calls among it, and those that end the stream."""
        ...


class _Texts:
    """The texts that a backend tells, in their order; see :class:`verl.plugins.endpoint.calls.AnswerStream`."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        """Index of the answer and its new text; None when all answers are drawn, or will not be."""

    def begin(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def text(self, index: int, new: str) -> None:
        self.pieces.put_nowait((index, new))


async def streamed(
    backend: ModelBackend, call: ModelCall, reply: ReplyWriter, vendor: Vendor, end: str | None
) -> StreamingResponse:
    """Begin to draw, and return the response once there is something to send.

    So an error that comes before has its own status, as without a stream. Cancelling it, or a client that closes the
    connection later, withdraws the call, and nothing is recorded.

    Args:
        backend: draws the answers.
        call: what is asked.
        reply: writes the events.
        vendor: writes errors.
        end: data of a last event.

    Raises:
        CallRefusedError: the call is not answered.
    """
    texts = _Texts()
    work = asyncio.ensure_future(backend.answer(call, texts))
    work.add_done_callback(lambda _: texts.pieces.put_nowait(None))
    with ExitStack() as on_error:
        on_error.callback(work.cancel)
        first = await texts.pieces.get()
        if first is None:
            work.result()
        on_error.pop_all()
    return _EventStream(work, _events(work, texts, first, reply, vendor, end))


async def _events(
    work: asyncio.Future[list[ModelAnswer]],
    texts: _Texts,
    first: tuple[int, str] | None,
    reply: ReplyWriter,
    vendor: Vendor,
    end: str | None,
) -> AsyncIterator[str]:
    yield _lines(reply.begin(texts.prompt_tokens))
    piece = first
    while piece is not None:
        yield _lines(reply.text(*piece))
        piece = await texts.pieces.get()
    try:
        answers = work.result()
    except VerlError as error:
        refused = error if isinstance(error, CallRefusedError) else CallRefusedError(str(error), status=500)
        yield _lines([(vendor.error_event, vendor.error(refused))])
        return
    yield _lines(reply.end(answers)) + (f"data: {end}\n\n" if end else "")


def _lines(events: Iterable[tuple[str | None, BaseModel | Mapping[str, object]]]) -> str:
    lines = []
    for name, piece in events:
        lines.append(f"event: {name}\n" if name else "")
        data = piece.model_dump_json(exclude_unset=True) if isinstance(piece, BaseModel) else json.dumps(piece)
        lines.append(f"data: {data}\n\n")
    return "".join(lines)


class _EventStream(StreamingResponse):
    """A stream that ends as soon as the client closes the connection.

    The class of Starlette notices only when it sends, which may be much later.

    Args:
        work: draws the answers; cancelled at the end.
        events: the texts to send.
    """

    def __init__(self, work: asyncio.Future[list[ModelAnswer]], events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        left = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._work.cancel()
            sending.cancel()
            left.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
