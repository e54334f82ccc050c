"""The web application: who may ask, requests checked and put on the board, results and errors as clients read them."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.base.types import JsonMapping
from verl.errors import VerlError
from verl.plugins.serve import protocol
from verl.plugins.serve.clients import Clients
from verl.plugins.serve.jobs import Job
from verl.plugins.serve.messages import read_training_data
from verl.plugins.serve.refusals import GONE, RefusedError

logger = logging.getLogger(__name__)

ROOT = "/api/v1"
WAIT_S = 30.0
"""Seconds that a request for a result waits for it, before the client asks again."""
STILL_RUNNING = 408
"""Status of a result that is not there yet, on which clients ask again."""
MAX_BODY_BYTES = 256 * 2**20
"""Longest body of a request."""
FAILED = 400
"""Status of a request in which verl itself failed: on one of 500 and more clients ask again for minutes."""

BodyT = TypeVar("BodyT", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


def tinker_app(clients: Clients, key: str) -> Starlette:
    """Make the application.

    Args:
        clients: sessions, models and requests.
        key: what clients send as ``X-API-Key``.
    """
    return Starlette(
        routes=_Routes(clients, key).all(), exception_handlers={404: _unknown, 405: _unknown, 500: _failed}
    )


class _Routes:
    def __init__(self, clients: Clients, key: str) -> None:
        self._clients, self._key = clients, key.encode()

    def all(self) -> list[Route]:
        clients = self._clients
        run_path, run = "training_runs/{run}", "run"
        return [
            self._get("healthz", lambda _: {"status": "ok"}),
            self._get("get_server_capabilities", lambda _: clients.capabilities()),
            self._get("sessions", lambda _: {"sessions": clients.session_ids()}),
            self._get("sessions/{session}", lambda r: clients.session(r.path_params["session"])),
            self._get("samplers/{sampler}", lambda r: clients.sampler(r.path_params["sampler"])),
            self._get("training_runs", lambda r: clients.runs(r.query_params)),
            self._get(run_path, lambda r: clients.run(r.path_params[run])),
            self._get(f"{run_path}/checkpoints", lambda r: clients.checkpoints(r.path_params[run])),
            self._post("client/config", protocol.Anything, lambda _: clients.flags()),
            self._post("client/dynamic_config", protocol.Anything, lambda _: {"sample_cancel_enabled": False}),
            self._post("telemetry", protocol.Anything, lambda _: {"status": "accepted"}),
            self._post("create_session", protocol.CreateSession, clients.create_session),
            self._post("session_heartbeat", protocol.OfSession, clients.heartbeat),
            self._post("create_sampling_session", protocol.CreateSamplingSession, clients.create_sampling_session),
            self._post("join_sampling_session", protocol.JoinSamplingSession, clients.join_sampling_session),
            self._post("get_info", protocol.OfModel, clients.info),
            self._post("weights_info", protocol.OfPath, clients.weights_info),
            self._start("create_model", protocol.CreateModel, clients.create_model),
            self._start("load_weights", protocol.LoadWeights, clients.load),
            self._start("save_weights", protocol.SaveWeights, clients.save_state),
            self._start("save_weights_for_sampler", protocol.SaveWeights, clients.save_for_sampler),
            self._start("optim_step", protocol.OptimStep, clients.optim_step),
            self._start("asample", protocol.SampleRequest, clients.sample),
            self._route("forward_backward", self._train, "POST"),
            self._route("retrieve_future", self._retrieve, "POST"),
            self._route("sessions/{session}/finish", self._finish, "POST"),
            self._route(f"{run_path}/checkpoints/{{checkpoint:path}}", self._delete, "DELETE"),
        ]

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        async def respond(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), self._key):
                return _error(401, "the key is wrong. Set TINKER_API_KEY to the one that `verl serve` printed.")
            try:
                return await handler(request)
            except RefusedError as error:
                return _error(error.status, str(error))

        return Route(f"{ROOT}/{path}", respond, methods=[method])

    def _get(self, path: str, answer: Callable[[Request], JsonMapping]) -> Route:
        async def handler(request: Request) -> Response:
            return JSONResponse(answer(request))

        return self._route(path, handler, "GET")

    def _post(self, path: str, kind: type[BodyT], answer: Callable[[BodyT], JsonMapping]) -> Route:
        async def handler(request: Request) -> Response:
            raw = await _json_of(request)
            try:
                return JSONResponse(answer(_checked(raw, kind)))
            except RefusedError:
                if isinstance(raw, Mapping) and isinstance(raw.get("seq_id"), int):
                    self._clients.board.skip(str(raw.get("model_id")), raw["seq_id"])
                raise

        return self._route(path, handler, "POST")

    def _start(self, path: str, kind: type[BodyT], start: Callable[[BodyT], Job]) -> Route:
        return self._post(path, kind, lambda body: _promise(start(body)))

    async def _train(self, request: Request) -> Response:
        data = read_training_data(await _body_of(request))
        try:
            return JSONResponse(_promise(self._clients.train(data)))
        except RefusedError:
            self._clients.board.skip(data.model_id, data.seq_id, is_training=not data.forward_only)
            raise

    async def _retrieve(self, request: Request) -> Response:
        body = _checked(await _json_of(request), protocol.RetrieveFuture)
        job = self._clients.board.job(body.request_id)
        answer = await _result(job)
        if answer.status_code != STILL_RUNNING:
            self._clients.board.note_retrieved(job)
        return answer

    async def _finish(self, request: Request) -> Response:
        self._clients.finish(request.path_params["session"])
        return Response(status_code=204)

    async def _delete(self, request: Request) -> Response:
        self._clients.delete(request.path_params["run"], request.path_params["checkpoint"])
        return Response(status_code=204)


async def _body_of(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(
                f"the body has more than {MAX_BODY_BYTES >> 20} MiB. Send less data at once.", status=413
            )
    return bytes(body)


async def _json_of(request: Request) -> object:
    try:
        return json.loads(await _body_of(request) or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {error}.") from error


def _checked(raw: object, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedError(f"{field}: {first['msg']}, not {first['input']!r:.100}.") from error


def _promise(job: Job) -> JsonMapping:
    promise: dict[str, object] = {"request_id": job.request_id}
    if job.model is not None:
        promise["model_id"] = job.model.model_id
    if job.responses:
        promise["sample_sequence_ids"] = [f"{job.request_id}:{index}" for index in range(job.responses)]
    return promise


async def _result(job: Job) -> Response:
    waiting = asyncio.wrap_future(job.result)
    done, _ = await asyncio.wait({waiting}, timeout=WAIT_S)
    if not done:
        pending = {"type": "try_again", "request_id": job.request_id, "queue_state": "active"}
        return JSONResponse(pending, STILL_RUNNING)
    error = waiting.exception()
    if error is not None:
        is_users = isinstance(error, RefusedError) and error.status != GONE
        return JSONResponse({"error": str(error), "category": "user" if is_users else "server"})
    result = waiting.result()
    return Response(result.body, media_type=result.media_type)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return _error(status, f"this service does not answer {request.method} {request.url.path}.")


async def _failed(request: Request, error: Exception) -> Response:
    details = f": {error}" if isinstance(error, VerlError) else "; its log says more."
    return _error(FAILED, f"the service failed: {type(error).__name__}{details}")
