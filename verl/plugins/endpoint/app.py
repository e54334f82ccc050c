"""The web application: who may ask, what a call says, and errors in the form of the vendor that the client knows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NoReturn, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from verl.base.types import JsonMapping, JsonObject
from verl.errors import VerlError
from verl.plugins.endpoint import chat, completions, messages, responses
from verl.plugins.endpoint.calls import CallRefusedError, ContextLengthError, ModelBackend, ModelCall
from verl.plugins.endpoint.stream import ReplyWriter, Vendor, disconnected, streamed

logger = logging.getLogger(__name__)

MAX_BYTES = 32 * 2**20
"""Longest body of a call, as Anthropic has it."""
TOO_LONG = 413
"""Status of a refused body."""
CLIENT_LEFT = 499
"""Status of a call whose client has closed the connection; it is not sent."""

Find = Callable[[str, str], ModelBackend]
"""Returns the backend of a path and a key; raises CallRefusedError for strangers. The path is what stands before
``/v1``, without slashes: the id of a trajectory, or empty."""


class CallRequest(Protocol):
    """Body of a request that was read."""

    @property
    def stream(self) -> bool | None:
        """Return whether the client wants a stream."""
        ...

    def call(self) -> ModelCall:
        """Return the call in no vendor's form."""
        ...


class OpenAIForm:
    """Errors as OpenAI writes them."""

    error_event: str | None = None

    def error(self, error: CallRefusedError) -> JsonObject:
        """See :class:`Vendor`."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class AnthropicForm:
    """Errors as Anthropic writes them."""

    error_event: str | None = "error"
    kinds: Mapping[int, str] = MappingProxyType(
        {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            500: "api_error",
        }
    )

    def error(self, error: CallRefusedError) -> JsonObject:
        """See :class:`Vendor`."""
        message = str(error)
        if isinstance(error, ContextLengthError):
            message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        kind = self.kinds.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


OPENAI, ANTHROPIC = OpenAIForm(), AnthropicForm()

Serve = Callable[[ModelBackend, Mapping[str, object]], Awaitable[Response]]


def endpoint_app(find: Find) -> Starlette:
    """Make the application.

    Args:
        find: see :data:`Find`.
    """
    routes = [
        ("chat/completions", _chat, OPENAI),
        ("completions", _completions, OPENAI),
        ("responses", _responses, OPENAI),
        ("messages", _messages, ANTHROPIC),
    ]
    served = [
        Route(f"{prefix}/v1/{path}", _Call(find, serve, vendor).respond, methods=["POST"])
        for prefix in ("", "/{trajectory}")
        for path, serve, vendor in routes
    ]
    listed = [
        Route(f"{prefix}/v1/models{path}", _Models(find).respond, methods=["GET"])
        for prefix in ("", "/{trajectory}")
        for path in ("", "/{model:path}")
    ]
    known_paths = f"Known: POST {', '.join(path for path, *_ in routes)}, GET models, each after /v1/."
    unknown = partial(_unknown, known_paths)
    handlers = {404: unknown, 405: unknown, 500: _internal_error}
    return Starlette(routes=[*served, *listed], exception_handlers=handlers)


async def _unknown(known_paths: str, request: Request, error: Exception) -> Response:
    """Answer a request for a path that the endpoint does not serve. The path stays out: it may have a key."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    refused = CallRefusedError(
        f"the endpoint does not serve this path by {request.method}. {known_paths}", status=status
    )
    return _json_response(OPENAI.error(refused), status)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer a call in which verl itself failed; the server logs the error."""
    message = f"the endpoint failed: {type(error).__name__}; its log says more."
    return _json_response(OPENAI.error(CallRefusedError(message, status=500)), 500)


async def _chat(backend: ModelBackend, body: JsonMapping) -> Response:
    request = chat.read(body)
    return await _answered(backend, request, chat.ChatReply(request, backend.tokenizer), OPENAI, "[DONE]")


async def _completions(backend: ModelBackend, body: JsonMapping) -> Response:
    request = completions.read(body, len(backend.tokenizer))
    return await _answered(backend, request, completions.CompletionReply(request, backend.tokenizer), OPENAI, "[DONE]")


async def _responses(backend: ModelBackend, body: JsonMapping) -> Response:
    request = responses.read(body, backend.responses)
    reply = responses.ResponsesReply(request, backend.tokenizer, backend.responses)
    return await _answered(backend, request, reply, OPENAI)


async def _messages(backend: ModelBackend, body: Mapping[str, object]) -> Response:
    request = messages.read(body)
    return await _answered(backend, request, messages.MessagesReply(request), ANTHROPIC)


async def _answered(
    backend: ModelBackend, request: CallRequest, reply: ReplyWriter, vendor: Vendor, end: str | None = None
) -> Response:
    """Draw the answers and send them, whole or as a stream; ``end`` is the data of a stream's last event."""
    if request.stream:
        return await streamed(backend, request.call(), reply, vendor, end)
    answers = await backend.answer(request.call())
    return Response(reply.whole(answers).model_dump_json(exclude_unset=True), media_type="application/json")


class _Models:
    def __init__(self, find: Find) -> None:
        self._find = find

    async def respond(self, request: Request) -> Response:
        try:
            backend = self._find(request.path_params.get("trajectory", ""), _key(request))
        except CallRefusedError as error:
            return _json_response(OPENAI.error(error), error.status)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "verl"} for name in backend.models]
        name = request.path_params.get("model")
        if name is not None:
            matching = [model for model in models if model["id"] == name]
            missing = CallRefusedError(f"the model {name!r:.100} is not listed.", status=404, code="model_not_found")
            return _json_response(matching[0]) if matching else _json_response(OPENAI.error(missing), 404)
        return _json_response({"object": "list", "data": models})


class _Call:
    """Handler of one route: find the backend, read the body, answer or refuse."""

    def __init__(self, find: Find, serve: Serve, vendor: Vendor) -> None:
        self._find, self._serve, self._vendor = find, serve, vendor

    async def respond(self, request: Request) -> Response:
        try:
            backend = self._find(request.path_params.get("trajectory", ""), _key(request))
            body = _json(await _bytes(request))
            return await _while_connected(self._serve(backend, body), request.receive)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except CallRefusedError as error:
            return _json_response(self._vendor.error(error), error.status)
        except VerlError as error:
            return _json_response(self._vendor.error(CallRefusedError(str(error), status=500)), 500)


async def _while_connected(work: Awaitable[Response], receive: Receive) -> Response:
    """Wait for a response; withdraw the call as soon as the client closes the connection.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        left.cancel()


def _key(request: Request) -> str:
    """The key of a client: OpenAI's sends a bearer token, Anthropic's either."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _bytes(request: Request) -> bytes:
    pieces, length = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BYTES:
            raise CallRefusedError(
                f"the body is longer than {MAX_BYTES} bytes.", status=TOO_LONG, code="request_too_large"
            )
    return b"".join(pieces)


def _json(body: bytes) -> Mapping[str, object]:
    try:
        text = body.decode()
        read = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(read, ensure_ascii=False).encode()  # half a character cannot be written
    except (ValueError, RecursionError) as error:
        raise CallRefusedError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(read, dict):
        raise CallRefusedError(f"the body is a JSON {type(read).__name__}; send an object.", code="invalid_json")
    return read


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _json_response(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
