"""vLLM as rollout engine: in this process (``rollout.mode=sync``) or as a server (``async``, the default).

An engine that several ranks share is a server in both modes. A server may live in an environment of its own,
whose interpreter ``rollout.engine_kwargs.vllm.python`` names; then nothing of vLLM is needed here. Tokens go in
and tokens come out, stop texts are looked for here, new weights go by file through memory, and their checksums
come back. See ``docs/rollout_engines.md``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.errors import EngineLostError, RolloutError
from verl.utils.model import torch_dtype
from verl.workers.rollout.base import NO_WEIGHTS, RolloutOutput, RolloutRegistry, RolloutRequest
from verl.workers.rollout.engine_kwargs import patience, python_of, start_timeout_s
from verl.workers.rollout.placement import devices_of_the_engine, engine_group
from verl.workers.rollout.restarting import RestartingRollout
from verl.workers.rollout.stopping import completes_stop_text
from verl.workers.rollout.vllm.job import Engine, Job
from verl.workers.rollout.vllm.settings import engine_arguments
from verl.workers.rollout.weights import ExpectedWeights

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0
_NOT_FINITE = -9000.0
"""vLLM's server says -9999 for a log-prob that is not a number or minus infinity."""


@RolloutRegistry.register("vllm")
class VLLMRollout(RestartingRollout):
    """Generate with vLLM; arguments as for :class:`~verl.workers.rollout.base.BaseRollout`.

    With ``tensor_model_parallel_size`` t, t ranks that follow each other share one engine: the first of them
    starts it and generates, the others take part in gathering the weights.

    Raises:
        ConfigError: the ranks do not divide into engines, or a setting does not fit vLLM.
        RolloutError: the engine does not start.
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        super().set_up()
        config, model_config = self.config, self.model_config
        self.ranks_per_engine = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
        rank, self.leads = engine_group(self.ranks_per_engine, _setting(config))
        self._expected = ExpectedWeights(self.hf_config, torch_dtype(config.dtype), model_config.trust_remote_code)
        self._awake = False
        self._gives_memory_back = config.free_cache_engine and self.device.type == "cuda"
        self._devices = devices_of_the_engine(rank, self.ranks_per_engine, self.device)
        self._arguments = engine_arguments(config, model_config, self.max_model_len, self.device)
        self._engine: Engine | None = None
        """On a rank that leads None only after a loss, until the next :meth:`wake`."""
        if self.leads:
            self._start_or_replace()

    def _start_engine(self) -> None:
        self._engine = self._start(self._arguments, self._devices)
        self._awake = False
        if self._gives_memory_back:
            self._engine.sleep()

    def _end_engine(self) -> Path | None:
        engine, self._engine, self._awake = self._engine, None, False
        return engine.kill() if engine is not None else None

    def _start(self, arguments: dict[str, Any], devices: str | None) -> Engine:
        if self.config.mode == "sync" and self.ranks_per_engine == 1:
            from verl.workers.rollout.vllm.inprocess import InProcessEngine

            return InProcessEngine(arguments, self.device)
        from verl.workers.rollout.vllm.served import ServedEngine

        return ServedEngine(
            python_of(self.config),
            arguments,
            self.device,
            visible_devices=devices,
            start_timeout_s=start_timeout_s(self.config, _START_TIMEOUT_S),
            file_bytes=self.config.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
            patience=patience(self.config),
        )

    # ---- weights and memory

    def wake(self) -> None:
        """Take the memory of weights, keys and values again, where sleep gave it back (on a GPU)."""
        if self.leads and self._engine is None:
            self._start_or_replace()
        if self._engine is not None and self._gives_memory_back and not self._awake:
            self._engine.wake(["weights"] if self.config.multi_stage_wake_up else None)
        self._awake = True

    def sleep(self) -> None:
        """With ``rollout.free_cache_engine`` forget the weights and, on a GPU, give all memory back."""
        if not self.config.free_cache_engine:
            return
        try:
            if self._engine is not None and self._gives_memory_back and self._awake:
                self._engine.sleep()
        except EngineLostError as error:
            logger.warning("vllm engine lost at the end of its work; the next wake starts another. %s", error)
            self._end_lost(error)
        self._awake, self.weight_version = False, NO_WEIGHTS

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all.

        What the engine was handed is verified by a checksum of each tensor, computed in its own processes.
        """
        self.wake()
        self.weight_version = NO_WEIGHTS
        began, size = time.perf_counter(), 0
        weights = iter(weights)
        try:
            checked = self._expected.checked(weights, version)
            if self._engine is not None:
                size = self._engine.load_weights(checked, f"weights-{version}")
                if self._gives_memory_back and self.config.multi_stage_wake_up:
                    self._engine.wake(["kv_cache"])
            else:
                for _ in checked:
                    pass
        finally:
            for _ in weights:  # a collective iterator must come to its end on every rank, whatever happened here
                pass
        self.weight_version = version
        if self._engine is not None:
            took = time.perf_counter() - began
            logger.info("vllm engine: version %d loaded, %.1f MiB in %.3f s", version, size / 2**20, took)

    # ---- generation

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`RestartingRollout.generate`."""
        if self.config.free_cache_engine and not self._awake:
            raise RolloutError("the vllm engine sleeps. Generate inside `with rollout.awake(weights, version):`.")
        self.check_requests(requests)
        return super().generate(requests)

    def _answer(
        self, requests: Mapping[int, RolloutRequest], outputs: dict[int, RolloutOutput], aborted: Event
    ) -> None:
        jobs = {number: self._job(request) for number, request in requests.items()}
        try:
            if self._engine is None:
                raise EngineLostError("the vllm engine was lost, and no other one was started yet.")
            self._engine.generate([*jobs.values()], aborted)
        except EngineLostError:
            outputs |= self._outputs({number: job for number, job in jobs.items() if job.is_done})
            raise
        outputs |= self._outputs(jobs)

    def _outputs(self, jobs: Mapping[int, Job]) -> dict[int, RolloutOutput]:
        if any(not value > _NOT_FINITE for job in jobs.values() for value in job.log_probs):
            raise RolloutError(
                f"vLLM returned log-probs that are not finite with weights of version {self.weight_version}. The "
                "weights may have diverged (look at actor/grad_norm), or overflow in rollout.dtype="
                f"{self.config.dtype}; bfloat16 and float32 have a wider range than float16."
            )
        return {
            number: RolloutOutput(job.token_ids, job.log_probs, job.finish_reason, self.weight_version)
            for number, job in jobs.items()
        }

    def _job(self, request: RolloutRequest) -> Job:
        sampling = request.sampling
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            # Which tokens end a response is decided here: vLLM has no tokenizer to ask.
            "ignore_eos": True,
            "stop_token_ids": sorted(ends),
            "logprobs": 0,
            "detokenize": False,
        }
        if sampling.truncates:
            params |= {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0), "min_p": sampling.min_p}
        texts = sampling.stop
        is_stop = (lambda tokens: completes_stop_text(tokens, texts, self.tokenizer)) if texts else None
        return Job(list(request.prompt_ids), params, is_stop)


def _setting(config: RolloutConfig) -> str:
    """What decides how many ranks share an engine."""
    stages = config.pipeline_model_parallel_size
    split = f" times pipeline_model_parallel_size={stages}" if stages > 1 else ""
    return f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size}{split}"
