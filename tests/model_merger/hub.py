"""A server that speaks the Hugging Face hub's protocol of uploads, as far as a model folder needs it."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOKEN = "hf_of_the_test"


class Hub:
    """Repositories in memory: files of committed repositories, and which are private."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.url = ""
        self._objects: dict[str, bytes] = {}
        self.app = Starlette(
            routes=[
                Route("/api/repos/create", self._create, methods=["POST"]),
                Route("/api/models/{owner}/{name}/preupload/{revision}", self._preupload, methods=["POST"]),
                Route("/{owner}/{name}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
                Route("/objects/{oid}", self._put, methods=["PUT"]),
                Route("/api/models/{owner}/{name}/commit/{revision}", self._commit, methods=["POST"]),
            ]
        )

    async def _create(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid credentials"}, 401)
        asked = await request.json()
        name = f"{asked.get('organization', 'me')}/{asked['name']}"
        is_new = name not in self.files
        self.files.setdefault(name, {})
        self.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        answer = {"url": f"{self.url}/{name}", "name": name, "id": name}
        return JSONResponse(
            answer if is_new else answer | {"error": "You already created this repo"}, 200 if is_new else 409
        )

    async def _preupload(self, request: Request) -> Response:
        asked = (await request.json())["files"]
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for one in asked
        ]
        return JSONResponse({"files": modes})

    async def _batch(self, request: Request) -> Response:
        objects = [
            one | {"actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}}
            for one in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _put(self, request: Request) -> Response:
        data = await request.body()
        if hashlib.sha256(data).hexdigest() != request.path_params["oid"]:
            return Response("checksum", 400)
        self._objects[request.path_params["oid"]] = data
        return Response()

    async def _commit(self, request: Request) -> Response:
        repository = f"{request.path_params['owner']}/{request.path_params['name']}"
        files = self.files[repository]
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
        return JSONResponse(
            {"commitUrl": f"{self.url}/{repository}/commit/0", "commitOid": "0" * 40, "hookOutput": "", "success": True}
        )


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Serve an empty hub on this machine."""
    hub = Hub()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        hub.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(hub.app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.should_exit = True
            thread.join(10)
