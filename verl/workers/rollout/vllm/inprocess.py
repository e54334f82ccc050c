"""vLLM inside this process (``rollout.mode=sync``), driven step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError, RolloutError
from verl.utils.registry import suggest
from verl.workers.rollout.checksum import checksum
from verl.workers.rollout.vllm.engine_side.verl_vllm_extension import with_checksums
from verl.workers.rollout.vllm.job import Job
from verl.workers.rollout.vllm.served import check_arrival
from verl.workers.rollout.vllm.settings import process_environment


class InProcessEngine:
    """The engine, from its start to its end.

    Args:
        arguments: of vLLM, see :func:`verl.workers.rollout.vllm.settings.engine_arguments`.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: vLLM is not installed here, or does not know an argument.
    """

    def __init__(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        variables = process_environment(device) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with _undisturbed(variables):
            try:
                from vllm.engine.arg_utils import EngineArgs
                from vllm.v1.engine.llm_engine import LLMEngine
            except ImportError as error:
                raise ConfigError(
                    f"rollout.name=vllm with mode=sync runs vLLM in this process, which cannot import it: {error}. "
                    "Install it here (requirements/vllm.txt), or use mode=async with the python of another "
                    "environment in rollout.engine_kwargs.vllm.python."
                ) from error
            known = [field.name for field in dataclasses.fields(EngineArgs)]
            for name in arguments:
                if name not in known:
                    raise ConfigError(
                        f"rollout.engine_kwargs.vllm: this vLLM has no argument {name}.{suggest(name, known)}"
                    )
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._served = 0

    # ---- generation

    def generate(self, jobs: list[Job], aborted: threading.Event) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        running: dict[str, Job] = {}
        for job in jobs:
            self._served += 1
            name = str(self._served)
            params = SamplingParams(**job.params, output_kind=RequestOutputKind.DELTA)
            self._engine.add_request(name, {"prompt_token_ids": job.prompt_ids}, params)
            running[name] = job
        try:
            while running and not aborted.is_set():
                self._step(running)
        finally:
            if running:  # also after an interruption: the next call must not find them
                self._engine.abort_request(list(running))

    def _step(self, running: dict[str, Job]) -> None:
        for output in self._engine.step():
            job, part = running[output.request_id], output.outputs[0]
            found = part.logprobs or []
            log_probs = [entry[token].logprob for token, entry in zip(part.token_ids, found, strict=True)]
            if job.take(part.token_ids, log_probs, part.finish_reason):
                del running[output.request_id]
                if part.finish_reason is None:  # a stop text, of which vLLM knows nothing
                    self._engine.abort_request([output.request_id])

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], name: str) -> int:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        sent: dict[str, str] = {}
        size = 0

        failed: list[RolloutError] = []

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal size
            try:
                for key, tensor in weights:
                    size += tensor.nbytes
                    sent[key] = str(checksum(tensor))
                    yield key, tensor
            except RolloutError as error:  # vLLM must finish what it began, or it cannot begin again
                failed.append(error)

        arrived: dict[str, str] = {}
        core: Any = self._engine.engine_core
        worker = core.engine_core.model_executor.driver_worker.worker
        worker.reload_weights(weights_iterator=with_checksums(counted(), arrived))
        if failed:
            raise failed[0]
        check_arrival(sent, arrived, "in this process")
        if not self._engine.reset_prefix_cache():
            raise RolloutError("vLLM kept its prefix cache over an update of the weights: it still serves requests.")
        return size

    # ---- memory

    def sleep(self) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        self._engine.sleep(level=2)

    def wake(self, tags: list[str] | None) -> None:
        """See :class:`verl.workers.rollout.vllm.job.Engine`."""
        self._engine.wake_up(tags)

    def kill(self) -> None:
        """Nothing to end: the engine has no process of its own and is lost with this one."""


@contextlib.contextmanager
def _undisturbed(variables: Mapping[str, str]) -> Iterator[None]:
    """vLLM's start sets seeds, threads and environment variables as if the process were its own; put them back.

    ``variables`` are set for vLLM, where the user has not, and stay.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    environment, set_num_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
