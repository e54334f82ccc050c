"""The two ways to SGLang: an engine of this process, or a server of its own behind HTTP. The same calls on both."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from verl.errors import ConfigError, EngineLostError, RolloutError
from verl.utils.marked_processes import VARIABLE, kill_marked, new_mark
from verl.workers.rollout.checksum import checksum
from verl.workers.rollout.server import KILLED_CHILD, EngineServer, Patience, new_token
from verl.workers.rollout.sglang.settings import ENGINE_SIDE
from verl.workers.rollout.weights import write_weight_files

_LOADER = "verl_sglang.load_weights"
_ORDER = "verl.order"
_SERVER = "verl_sglang_server.py"
_TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"
_END_S = 60
_LOOK_EVERY_S = 0.5


class Backend(ABC):
    """A running SGLang. Every method raises RolloutError where SGLang refuses.

    Args:
        arguments: fields of SGLang's ``ServerArgs``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.ranks = int(arguments["tp_size"])

    @abstractmethod
    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Responses to the requests of ``body``, in their order."""

    @abstractmethod
    def abort(self, finished: threading.Event) -> None:
        """Ask SGLang to give up the requests that it has, unless ``finished``; may be called from any thread."""

    @abstractmethod
    def release_memory(self, tags: list[str]) -> None:
        """Give back the memory of ``weights``, ``kv_cache`` or ``cuda_graph``."""

    @abstractmethod
    def resume_memory(self, tags: list[str]) -> None:
        """Take it again."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes of SGLang. Idempotent."""

    @abstractmethod
    def kill(self) -> Path | None:
        """End all processes of SGLang at once, dead or alive; a copy of its log if there is one. Idempotent."""

    @abstractmethod
    def _session(self, action: str) -> None:
        """``begin_weight_update`` or ``end_weight_update``."""

    @abstractmethod
    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, dict[str, str]]]:
        """Weights, part by part: the path of the reports on a part without the rank, and the checksums of what was
        sent.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Replace the weights in place, and forget the keys and values of all prompts.

        Returns:
            number of weights sent.

        Raises:
            RolloutError: SGLang refused, or holds something else than was sent. Whatever it holds then is no use.
        """
        count = 0
        self._session("begin_weight_update")
        try:
            for path, sent in self._send(weights, bucket_bytes):
                count += len(sent)
                for rank in range(self.ranks):
                    _compare(sent, Path(f"{path}-{rank}.json"), rank)
        finally:
            self._session("end_weight_update")
        return count


def _compare(sent: Mapping[str, str], path: Path, rank: int) -> None:
    report = json.loads(path.read_text())
    if report["problem"]:
        raise RolloutError(f"SGLang (rank {rank}) cannot load the new weights: {report['problem']}")
    if not report["sampler"]:
        raise RolloutError("SGLang does not use verl's sampler: this version of SGLang is not supported.")
    wrong = [name for name in sent if report["arrived"].get(name) != sent[name]]
    wrong += [name for name, found in report["held"].items() if name in sent and found != sent[name]]
    wrong += [name for name in report["arrived"] if name not in sent]
    if wrong:
        raise RolloutError(
            f"weights in SGLang (rank {rank}) are not what was sent: {', '.join(wrong[:8])}"
            f"{f' and {len(wrong) - 8} more' if len(wrong) > 8 else ''} have another checksum."
        )


class InProcess(Backend):
    """``sglang.Engine``: SGLang's scheduler is a child of this process, tensors go there through shared memory.

    An error inside SGLang ends this process too (SIGQUIT, by SGLang's own design); a server's error raises here. A
    child that is killed, or stopped for longer than ``patience`` allows, is an error of the call.

    Raises:
        ConfigError: SGLang is not installed here, or does not know an argument.
    """

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], patience: Patience | None = None
    ) -> None:
        super().__init__(arguments)
        patience = patience or Patience()
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if str(ENGINE_SIDE) not in sys.path:  # SGLang's children get the module path of this process
            sys.path.insert(0, str(ENGINE_SIDE))
        try:
            import verl_sglang
            from sglang.srt.entrypoints.engine import Engine
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise ConfigError(
                f"rollout.name=sglang with rollout.mode=sync needs SGLang in this environment: {error}. Install it "
                "(requirements/sglang.txt), or use rollout.mode=async with engine_kwargs.sglang.python, the "
                "interpreter of another environment."
            ) from error
        try:
            ServerArgs(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"this SGLang does not take verl's arguments: {error}. Install the version of requirements/sglang.txt."
            ) from error

        class ContractEngine(Engine):
            run_scheduler_process_func = staticmethod(verl_sglang.run_scheduler_process)

        self._patience = patience
        self._reports = Path(tempfile.mkdtemp(prefix="verl-sglang-"))
        with _marked_children() as mark:
            self._engine = ContractEngine(**arguments)
        self._end = weakref.finalize(self, _end_engine, self._engine, mark, self._reports)
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()  # it ends this process when a child has died; _Supervised raises an error instead

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """See :meth:`Backend.generate`."""
        try:
            with self._supervised():
                return self._engine.generate(**body)
        except ValueError as error:
            raise RolloutError(f"SGLang refused a request: {error}") from error

    def _supervised(self) -> _Supervised:
        return _Supervised(self._engine, self._patience)

    def abort(self, finished: threading.Event) -> None:
        """See :meth:`Backend.abort`."""
        asyncio.run_coroutine_threadsafe(self._abort(finished), self._engine.loop)

    async def _abort(self, finished: threading.Event) -> None:
        if not finished.is_set():  # the loop may get here only in the next `generate`
            self._engine.tokenizer_manager.abort_request(abort_all=True)

    def release_memory(self, tags: list[str]) -> None:
        """See :meth:`Backend.release_memory`."""
        with self._supervised():
            self._engine.release_memory_occupation(tags=tags)

    def resume_memory(self, tags: list[str]) -> None:
        """See :meth:`Backend.resume_memory`."""
        with self._supervised():
            self._engine.resume_memory_occupation(tags=tags)

    def stop(self) -> None:
        """See :meth:`Backend.stop`."""
        self._end()

    def kill(self) -> None:
        """See :meth:`Backend.kill`."""
        self._end()

    def _session(self, action: str) -> None:
        with self._supervised():
            _check(action, getattr(self._engine, action)())

    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, dict[str, str]]]:
        for number, part in enumerate(_buckets(weights, bucket_bytes)):
            path = str(self._reports / f"part-{number}")
            order = torch.tensor(list(_order(path, [])), dtype=torch.uint8)
            tensors = [(_ORDER, order), *part.items()]
            with self._supervised():
                answer = self._engine.update_weights_from_tensor(tensors, load_format=_LOADER, flush_cache=True)
            _check("update_weights_from_tensor", answer)
            yield path, _checksums(part)


class _Supervised:
    """Around one call of SGLang in this process: ends the call when a child of SGLang has died or hangs.

    SGLang would wait for ever: its answers come through queues that a dead child leaves open.

    Raises:
        EngineLostError: in place of the cancelled call.
    """

    def __init__(self, engine: Any, patience: Patience) -> None:
        self._engine, self._patience = engine, patience
        self._problem: str | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sglang-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        began = well_at = time.monotonic()
        while True:
            now = time.monotonic()
            states = {pid: _state_of(pid) for pid in self._engine.get_all_child_pids()}
            dead = [pid for pid, state in states.items() if state in (None, psutil.STATUS_ZOMBIE)]
            stopped = [pid for pid, state in states.items() if state == psutil.STATUS_STOPPED]
            well_at = well_at if stopped else now
            if dead:
                self._problem = f"process {dead[0]} of SGLang ended"
            elif now - well_at > self._patience.hang_s:
                self._problem = f"process {stopped[0]} of SGLang was stopped (SIGSTOP) for {self._patience.hang_s:g} s"
            elif now - began > self._patience.answer_s:
                self._problem = f"SGLang gave no answer for {self._patience.answer_s:g} s"
            if self._problem is not None:  # again and again: the call may not have come to its waiting yet
                self._engine.loop.call_soon_threadsafe(self._cancel)
            if self._finished.wait(_LOOK_EVERY_S):
                return

    def _cancel(self) -> None:
        if not self._finished.is_set():
            for task in asyncio.all_tasks(self._engine.loop):
                task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._finished.set()
        self._thread.join()
        if error is not None and self._problem is not None:
            raise EngineLostError(f"the sglang engine in this process was lost: {self._problem}.") from error


def _state_of(pid: int) -> str | None:
    """The state of a process, as psutil has it; None if there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def _marked_children() -> Iterator[str]:
    """What is started inside bears a mark; it is ended if the start fails.

    Raises:
        EngineLostError: the start failed because a child was killed by a signal.
    """
    resource_tracker.ensure_running()  # serves this process beyond the engine's life, so it must not bear the mark
    mark, before = new_mark(), os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mark
    try:
        yield mark
    except (RuntimeError, EOFError, OSError) as error:
        kill_marked(mark)
        if KILLED_CHILD.search(str(error)):
            raise EngineLostError(f"a process of the sglang engine was killed while it started: {error}") from error
        raise
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _end_engine(engine: Any, mark: str, folder: Path) -> None:
    """End what SGLang started; its own ``shutdown`` would end every child of this process."""
    atexit.unregister(engine.shutdown)
    children = [psutil.Process(pid) for pid in engine.get_all_child_pids() if psutil.pid_exists(pid)]
    kill_marked(mark)
    psutil.wait_procs(children, timeout=_END_S)
    shutil.rmtree(folder, ignore_errors=True)


def _check(action: str, answer: tuple[bool, str]) -> None:
    done, message = answer
    if not done:
        raise RolloutError(f"SGLang refused {action}: {message}")


def _order(report: str, files: list[str]) -> bytes:
    return json.dumps({"report": report, "files": files}).encode()


def _checksums(part: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: str(checksum(tensor)) for name, tensor in part.items()}


def _buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Copies: what is sent is moved to shared memory, and the trainer's own tensors must stay where they are."""
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > size:
            yield part
            part, held = {}, 0
        part[name] = tensor.clone(memory_format=torch.contiguous_format)
        held += tensor.nbytes
    if part:
        yield part


class Server(Backend):
    """SGLang's HTTP server in a process of its own, maybe of another environment; weights go there by file.

    Args:
        arguments: fields of SGLang's ``ServerArgs``.
        environment: variables for the server.
        python: the interpreter of the environment with SGLang.
        start_timeout_s: longest start.
        patience: how long the server may hang.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        python: str,
        start_timeout_s: float,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(arguments)
        token = new_token()
        script = [python, str(ENGINE_SIDE / _SERVER)]
        self.server = EngineServer(
            "sglang",
            lambda port: [*script, str(port), json.dumps(dict(arguments))],
            token=token,
            environment={**environment, _TOKEN_VARIABLE: token},
            start_timeout_s=start_timeout_s,
            patience=patience,
        )
        self.server.start()

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """See :meth:`Backend.generate`."""
        return self.server.post("/generate", body)

    def abort(self, finished: threading.Event) -> None:
        """See :meth:`Backend.abort`."""
        if not finished.is_set():
            self.server.post("/abort_request", {"abort_all": True})

    def release_memory(self, tags: list[str]) -> None:
        """See :meth:`Backend.release_memory`."""
        self.server.post("/release_memory_occupation", {"tags": tags})

    def resume_memory(self, tags: list[str]) -> None:
        """See :meth:`Backend.resume_memory`."""
        self.server.post("/resume_memory_occupation", {"tags": tags})

    def stop(self) -> None:
        """See :meth:`Backend.stop`."""
        self.server.stop()

    def kill(self) -> Path | None:
        """See :meth:`Backend.kill`."""
        return self.server.kill()

    def _session(self, action: str) -> None:
        answer = self.server.post(f"/{action}", {})
        _check(action, (answer["success"], answer["message"]))

    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, dict[str, str]]]:
        folders = [self.server.memory_folder, self.server.folder]
        for file, part in write_weight_files(weights, folders, "weights", bucket_bytes):
            report = str(self.server.folder / file.stem)
            payload = base64.b64encode(pickle.dumps([(_ORDER, _Bytes(_order(report, [str(file)])))])).decode()
            body = {
                "serialized_named_tensors": [payload] * self.ranks,
                "load_format": _LOADER,
                "flush_cache": True,
            }
            try:
                answer = self.server.post("/update_weights_from_tensor", body)
            finally:
                file.unlink()
            _check("update_weights_from_tensor", (answer["success"], answer["message"]))
            yield report, _checksums(part)


class _Bytes:
    """Becomes a tensor of bytes where it is unpickled, by one of the few calls that SGLang allows there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[list[int]]]:
        return torch.ByteTensor, (list(self._data),)
