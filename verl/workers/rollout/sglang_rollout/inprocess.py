"""SGLang's ``Engine`` in this process (``rollout.mode=sync``), and the supervision of its child processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from verl.errors import ConfigError, EngineLostError, RolloutError
from verl.supervision.processes import MARK_VARIABLE, is_alive, is_stopped, kill_marked, new_mark
from verl.vision.families import VisionConfig
from verl.workers.rollout.client import ENGINE_SIDE, PartialResponse, ServedRequests, serve_each
from verl.workers.rollout.engine_side.verl_engine import checksum
from verl.workers.rollout.server import KILLED_CHILD, HangLimits, HangTimer
from verl.workers.rollout.sglang_rollout import private
from verl.workers.rollout.sglang_rollout.client import (
    LOADER,
    LOADS,
    ORDER,
    SentPart,
    SGLangClient,
    check_success,
    order_of,
    take,
)
from verl.workers.rollout.weights import buckets

_END_S = 60
_CHECK_S = 0.5
_ABORT_AGAIN_S = 0.05
_IN_MEMORY = Path("/dev/shm")
_ADAPTER_ACTIONS = ("load_lora_adapter", "unload_lora_adapter")


class SGLangInProcess(SGLangClient):
    """``sglang.Engine``, whose scheduler is a child of this process and gets tensors through shared memory.

    An error inside SGLang's scheduler ends this process too (SGLang sends it SIGQUIT), unlike an error in a server. A
    child that is killed, or hangs for longer than ``hang_limits`` allows, raises EngineLostError in the running call.

    Args:
        arguments: fields of SGLang's ``ServerArgs``.
        environment: variables that SGLang needs; they remain in this process's environment.
        hang_limits: limits after which SGLang counts as hung.
        vision: of a model with images.

    Raises:
        ConfigError: SGLang is not installed here, or has no argument of a given name.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        hang_limits: HangLimits,
        vision: VisionConfig | None = None,
    ) -> None:
        super().__init__(arguments, vision)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if str(ENGINE_SIDE) not in sys.path:  # SGLang's children inherit the module path
            sys.path.insert(0, str(ENGINE_SIDE))
        try:
            engine_class, arguments_class = private.engine_classes()
            if vision is not None:
                private.read_images_from_files()
        except ImportError as error:
            raise ConfigError(
                f"rollout.name=sglang with rollout.mode=sync needs SGLang in this environment: {error}. Install it "
                "(requirements/sglang.txt), or use rollout.mode=async with engine_kwargs.sglang.python, the "
                "interpreter of another environment."
            ) from error
        try:
            arguments_class(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"this SGLang does not take verl's arguments: {error}. Install the version of requirements/sglang.txt."
            ) from error

        self._hang_limits = hang_limits
        self._reports = Path(tempfile.mkdtemp(prefix="verl-sglang-"))
        memory = [_IN_MEMORY] if os.access(_IN_MEMORY, os.W_OK) else []
        self.folders = [Path(tempfile.mkdtemp(prefix="verl-sglang-", dir=folder)) for folder in memory] + [
            self._reports
        ]
        with contextlib.ExitStack() as undone:
            undone.callback(_remove, self.folders)
            with _marked_children() as mark:
                self._engine = engine_class(**arguments)
            undone.pop_all()
        self._end = weakref.finalize(self, _end_engine, self._engine, mark, self.folders)
        private.stop_watchdog(self._engine)

    def generate(self, responses: Sequence[PartialResponse], aborted: Event) -> None:
        """See :meth:`EngineClient.generate`."""
        if not responses:
            return
        try:
            with _WatchedCall(self._engine, self._hang_limits, aborted), self._asked(responses) as request:
                answers = self._engine.generate(**request)
        except ValueError as error:
            raise RolloutError(f"SGLang refused a request: {error}") from error
        take(responses, answers)

    def serve(self, requests: ServedRequests, aborted: Event) -> None:
        """See :meth:`EngineClient.serve`."""
        names: dict[int, str] = {}
        with _WatchedCall(self._engine, self._hang_limits, aborted) as watch:

            async def ask(number: int, response: PartialResponse) -> None:
                names[number] = uuid.uuid4().hex
                try:
                    with self._asked([response], names[number]) as request:
                        answers = await self._engine.async_generate(**request)
                except ValueError as error:
                    raise RolloutError(f"SGLang refused a request: {error}") from error
                finally:
                    del names[number]
                watch.heard_at = time.monotonic()
                take([response], answers)

            async def cancel(number: int) -> None:
                if number in names:  # else it was not sent yet
                    private.abort(self._engine, names[number])

            private.run(self._engine, serve_each(requests, ask, aborted, cancel=cancel))

    def statistics(self) -> Mapping[str, float]:
        """See :meth:`EngineClient.statistics`."""
        return {
            field: float(sum(getattr(load, name) for load in private.loads(self._engine)))
            for field, name in LOADS.items()
        }

    def kill(self) -> None:
        """End SGLang's processes; there is no separate log. Idempotent."""
        self._end()

    def _call(self, action: str, **arguments: Any) -> None:
        with _WatchedCall(self._engine, self._hang_limits):
            answer = getattr(self._engine, action)(**arguments)
        if isinstance(answer, tuple):
            check_success(action, *answer)
        elif action in _ADAPTER_ACTIONS:
            check_success(action, answer.success, answer.error_message)

    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[SentPart]:
        # Sending moves a tensor's storage to shared memory, which must not happen to the trainer's own tensors.
        parts = buckets(weights, bucket_bytes, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        for number, part in enumerate(parts):
            report = str(self._reports / f"part-{number}")
            order = torch.tensor(list(order_of(report)), dtype=torch.uint8)
            self._call(
                "update_weights_from_tensor",
                named_tensors=[(ORDER, order), *part.items()],
                load_format=LOADER,
                flush_cache=True,
            )
            sent = {name: str(checksum(tensor)) for name, tensor in part.items()}
            yield SentPart(report, sent, sum(tensor.nbytes for tensor in part.values()))


class _WatchedCall:
    """Context manager around one call of SGLang: cancel the call if a child died or hangs, abort it on request.

    Without it a call would never return after a child's death, because the queue of its answers stays open. A cancelled
    call raises EngineLostError.
    """

    def __init__(self, engine: Any, hang_limits: HangLimits, aborted: Event | None = None) -> None:
        self._engine, self._timer, self._aborted = engine, HangTimer(hang_limits), aborted
        self._problem: str | None = None
        self.heard_at = 0.0
        """``time.monotonic()`` of the newest answer, if the call gives several."""
        self._finished = Event()
        self._thread = Thread(target=self._watch, name="sglang-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _watch(self) -> None:
        check_at = 0.0
        while not self._finished.is_set():
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + _CHECK_S
                self._problem = self._problem or self._look()
                if self._problem is not None:  # repeated: the call may not wait for its answer yet
                    private.call_soon(self._engine, self._cancel)
            if self._aborted is not None and self._aborted.is_set():
                # Repeated: SGLang aborts only the requests that it has, and others may still be on their way to it.
                private.call_soon(self._engine, self._abort)
            self._finished.wait(_CHECK_S if self._aborted is None else _ABORT_AGAIN_S)

    def _look(self) -> str | None:
        children = private.child_pids(self._engine)
        dead = [pid for pid in children if not is_alive(pid)]
        if dead:
            return f"process {dead[0]} of SGLang ended"
        stopped = next(filter(is_stopped, children), None)
        problem = None if stopped is None else f"process {stopped} of SGLang was stopped (SIGSTOP)"
        return self._timer.check(problem, self.heard_at)

    def _cancel(self) -> None:
        if not self._finished.is_set():  # the event loop may run this during the next call
            private.cancel_all(self._engine)

    def _abort(self) -> None:
        if not self._finished.is_set():
            private.abort_all(self._engine)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._finished.set()
        self._thread.join()
        if error is not None and self._problem is not None:
            raise EngineLostError(f"the sglang engine in this process was lost: {self._problem}.") from error


@contextlib.contextmanager
def _marked_children() -> Iterator[str]:
    """Yield a mark that all processes started inside inherit; kill them if the start fails.

    Raises:
        EngineLostError: the start failed because a child was killed by a signal.
    """
    # Started before the mark is set: Python's resource tracker must outlive the engine's processes.
    resource_tracker.ensure_running()
    mark, before = new_mark(), os.environ.get(MARK_VARIABLE)
    os.environ[MARK_VARIABLE] = mark
    try:
        yield mark
    except (RuntimeError, EOFError, OSError) as error:
        kill_marked(mark)
        if KILLED_CHILD.search(str(error)):
            raise EngineLostError(f"a process of the sglang engine was killed while it started: {error}") from error
        raise
    finally:
        del os.environ[MARK_VARIABLE]
        if before is not None:
            os.environ[MARK_VARIABLE] = before


def _end_engine(engine: Any, mark: str, folders: Iterable[Path]) -> None:
    # Not by SGLang's own `shutdown`, which ends every child of this process.
    private.forget_shutdown(engine)
    children = [psutil.Process(pid) for pid in private.child_pids(engine) if psutil.pid_exists(pid)]
    kill_marked(mark)
    psutil.wait_procs(children, timeout=_END_S)
    _remove(folders)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
