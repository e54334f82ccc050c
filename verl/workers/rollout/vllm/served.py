"""vLLM's API server as a process of its own (``rollout.mode=async``): tokens in and out over HTTP on loopback."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError, RolloutError
from verl.workers.rollout.checksum import checksum
from verl.workers.rollout.server import LOOPBACK, EngineServer, Patience, new_token
from verl.workers.rollout.vllm import engine_side
from verl.workers.rollout.vllm.engine_side.verl_vllm_extension import TOKEN_VARIABLE
from verl.workers.rollout.vllm.job import Job
from verl.workers.rollout.vllm.settings import command_line, process_environment
from verl.workers.rollout.weights import write_weight_files

_GENERATE = "/inference/v1/generate"
_ABORT_ALL: tuple[str, Any] = ("/abort_requests", {})
_UNKNOWN_ARGUMENTS = "unrecognized arguments:"
_SHOWN_NAMES = 5


class ServedEngine:
    """The server, from its start to its end.

    Args:
        python: interpreter of the environment with vLLM.
        arguments: of vLLM, see :func:`verl.workers.rollout.vllm.settings.engine_arguments`.
        device: ``cpu`` or ``cuda``.
        visible_devices: ids of the GPUs that the server may use; None leaves the environment as it is.
        start_timeout_s: longest start.
        file_bytes: size of the files in which new weights travel.
        patience: how long the server may hang.

    Raises:
        ConfigError: vLLM does not know an argument.
        RolloutError: the server does not start.
    """

    def __init__(
        self,
        python: str,
        arguments: Mapping[str, Any],
        device: torch.device,
        *,
        visible_devices: str | None = None,
        start_timeout_s: float = 600.0,
        file_bytes: int = 2**31,
        patience: Patience | None = None,
    ) -> None:
        self._file_bytes = file_bytes
        token = new_token()
        environment: dict[str, str | None] = {
            **process_environment(device),
            TOKEN_VARIABLE: token,
            "PYTHONPATH": _module_path(python),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights, sleep and abort
            # A rank's own place in the trainer's world means nothing to the server.
            **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        }
        if visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices

        def command(port: int) -> list[str]:
            return [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK, "--port", str(port)),
                *("--tokens-only", "--disable-uvicorn-access-log"),
                *("--middleware", "verl_vllm_extension.RequireToken"),
                *("--worker-extension-cls", "verl_vllm_extension.WeightLoader"),
                *command_line(arguments),
            ]

        self.server = EngineServer(
            "vllm", command, token=token, environment=environment, start_timeout_s=start_timeout_s, patience=patience
        )
        try:
            self.server.start()
        except RolloutError as error:
            raise _explain(error, python) from None

    # ---- generation

    def generate(self, jobs: list[Job], aborted: threading.Event) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        if any(job.is_stop is not None for job in jobs):
            self.server.stream_many(
                _GENERATE,
                [_body(job) | {"stream": True} for job in jobs],
                lambda number, event: _take(jobs[number], event),
                cancelled=aborted,
            )
            return
        bodies = [_body(job) for job in jobs]
        self.server.post_many(
            _GENERATE,
            bodies,
            cancelled=aborted,
            cancel=_ABORT_ALL,
            take=lambda number, answer: _take(jobs[number], answer),
        )

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], name: str) -> int:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        folders = (self.server.memory_folder, self.server.folder)
        paths: list[Path] = []
        sent: dict[str, str] = {}
        size = 0
        try:
            for path, part in write_weight_files(weights, folders, name, self._file_bytes):
                paths.append(path)
                sent |= {key: str(checksum(tensor)) for key, tensor in part.items()}
                size += sum(tensor.nbytes for tensor in part.values())
            self._load_files(paths, sent)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        if not self.server.post("/reset_prefix_cache")["success"]:
            raise RolloutError("vLLM kept its prefix cache over an update of the weights: it still serves requests.")
        return size

    def _load_files(self, paths: list[Path], sent: dict[str, str]) -> None:
        call = {"method": "load_weight_files", "args": [[str(path) for path in paths]]}
        for number, worker in enumerate(self.server.post("/collective_rpc", call)["results"]):
            check_arrival(sent, worker["checksums"], f"worker {number}")

    # ---- memory

    def sleep(self) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        self.server.post("/sleep?level=2")

    def wake(self, tags: list[str] | None) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        self.server.post("/wake_up" + ("?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""))

    def kill(self) -> Path | None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        return self.server.kill()

    def close(self) -> None:
        """End the server; otherwise it ends with this process."""
        self.server.stop()


def check_arrival(sent: Mapping[str, str], arrived: Mapping[str, str], where: str) -> None:
    """Compare the checksums of all weights.

    Raises:
        RolloutError: a weight did not arrive, or not as it was sent.
    """
    wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
    if wrong:
        shown = ", ".join(wrong[:_SHOWN_NAMES]) + (" and more" if len(wrong) > _SHOWN_NAMES else "")
        raise RolloutError(
            f"{len(wrong)} of {len(sent)} weights did not arrive in vLLM ({where}) as they were sent: {shown}. Their "
            "checksums differ; the engine's weights cannot be trusted."
        )


def _module_path(python: str) -> str:
    own = str(Path(engine_side.__file__).parent)
    # Another environment must not see the modules of this one.
    inherited = os.environ.get("PYTHONPATH") if python == sys.executable else None
    return f"{own}{os.pathsep}{inherited}" if inherited else own


def _body(job: Job) -> dict[str, Any]:
    return {"token_ids": job.prompt_ids, "sampling_params": job.params}


def _take(job: Job, answer: Any) -> bool:
    """What an answer, or an event of a streamed one, adds to its job."""
    if "error" in answer:
        raise RolloutError(f"vLLM gave up a request: {answer['error']}")
    if not answer["choices"]:
        return False
    choice = answer["choices"][0]
    content = (choice["logprobs"] or {}).get("content") or []
    return job.take(choice["token_ids"] or [], [entry["logprob"] for entry in content], choice["finish_reason"])


def _explain(error: RolloutError, python: str) -> ConfigError | RolloutError:
    """The same error, or one that names the setting which is wrong."""
    text = str(error)
    if _UNKNOWN_ARGUMENTS in text:
        flags = text.split(_UNKNOWN_ARGUMENTS)[1].splitlines()[0].split()
        names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags if flag[:2] == "--"]
        return ConfigError(
            f"rollout.engine_kwargs.vllm: this vLLM has no argument {', '.join(names)}. `{python} -m "
            "vllm.entrypoints.openai.api_server --help=all` lists what it has."
        )
    if "No module named" in text and "vllm" in text:
        return ConfigError(
            f"rollout.name=vllm: vLLM is not installed for {python}. Make an environment with it (make .venv-vllm, or "
            "pip install -r requirements/vllm.txt) and name its python in rollout.engine_kwargs.vllm.python."
        )
    return error
