"""Bounds of what a service may answer, so that it cannot fill the memory of a run.

::

    httpx2.Client(headers=UNCOMPRESSED, event_hooks=answer_limit())
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx2

MAX_BYTES = 64 * 2**20
"""Longest answer of a service."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of requests. A compressed answer is refused: a few bytes of it may become gigabytes."""


class AnswerTooLongError(httpx2.DecodingError):
    """A service answered more than ``MAX_BYTES``."""


def answer_limit() -> dict[str, list[Callable[[httpx2.Response], None]]]:
    """Return the event hooks of a client whose answers have at most ``MAX_BYTES``.

    The client raises AnswerTooLongError on longer ones, and httpx2.DecodingError on compressed ones.
    """
    return {"response": [_limit]}


def async_answer_limit() -> dict[str, list[Callable[[httpx2.Response], Awaitable[None]]]]:
    """See :func:`answer_limit`; for an asynchronous client."""

    async def limit(response: httpx2.Response) -> None:
        _limit(response)

    return {"response": [limit]}


def _limit(response: httpx2.Response) -> None:
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise httpx2.DecodingError(
            f"the answer is compressed ({encoding}); send it as it is (Accept-Encoding: identity)",
            request=response.request,
        )
    response.stream = _BoundedStream(response.stream, response.request)


class _BoundedStream(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """Passes on the pieces of an answer, up to a limit."""

    def __init__(self, stream: httpx2.SyncByteStream | httpx2.AsyncByteStream, request: httpx2.Request) -> None:
        self._stream, self._request, self._bytes = stream, request, 0

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._stream, httpx2.SyncByteStream)
        for piece in self._stream:
            yield self._counted(piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        async for piece in self._stream:
            yield self._counted(piece)

    def close(self) -> None:
        """Close the connection, or give it back."""
        assert isinstance(self._stream, httpx2.SyncByteStream)
        self._stream.close()

    async def aclose(self) -> None:
        """See :meth:`close`."""
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        await self._stream.aclose()

    def _counted(self, piece: bytes) -> bytes:
        self._bytes += len(piece)
        if self._bytes > MAX_BYTES:
            raise AnswerTooLongError(f"the answer has more than {MAX_BYTES} bytes", request=self._request)
        return piece
