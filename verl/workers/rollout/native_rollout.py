"""The ``native`` rollout engine: continuous batching with the model's Transformers code, in the trainer's process.

Trainer weights that are unsharded, on the same device and of ``rollout.dtype`` are used without copying them. Sharded
weights are gathered once per update. docs/rollout_engines.md says when to choose it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from verl.backends.cuda.layers import fuses_layers
from verl.errors import ConfigError
from verl.utils.available_memory import available_memory
from verl.utils.model import longrope_threshold, torch_dtype
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.adapted_layers import computes_adapters
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, RolloutOutput, RolloutRegistry, RolloutRequest
from verl.workers.rollout.native.check import check_model
from verl.workers.rollout.native.generation import Generation
from verl.workers.rollout.native.memory import KeyValueMemory
from verl.workers.rollout.native.model import NativeModel, cannot_serve
from verl.workers.rollout.native.prefixes import PAGE, PrefixCache
from verl.workers.rollout.quantized_layers import FORMATS
from verl.workers.rollout.request import DrawnPart, FinishReason
from verl.workers.rollout.request_queue import Answer, RequestQueue
from verl.workers.rollout.sampling import StopRules, TokenSampler
from verl.workers.rollout.state import EngineState
from verl.workers.rollout.weights import check_fit

logger = logging.getLogger(__name__)

# Share of the memory for keys and values that rows leave to the cache of prefixes.
_CACHE_SHARE = 0.25
# Longest texts that the cache has room for, for each row: several conversations wait for their tools while one runs.
_KEPT_TEXTS = 4


@RolloutRegistry.register("native")
class NativeRollout(BaseRollout):
    """Rollout engine in the trainer's process; arguments as for :class:`BaseRollout`.

    Raises:
        ConfigError: ``tensor_model_parallel_size`` is not 1.
        RolloutError: the architecture is not supported; the message names other engines.
    """

    shares_weights = True

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        dtype = torch_dtype(self.config.dtype)
        if (size := self.config.tensor_model_parallel_size) > 1:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size={size}: each rank of rollout.name=native holds a whole copy of "
                "the model. Set it to 1, or rollout.name to vllm or sglang, which split a model over ranks."
            )
        trusts_code = self.model_config.trust_remote_code
        with_graphs = self.device.type == "cuda" and not self.config.enforce_eager
        sizes = self.config.cudagraph_capture_sizes if with_graphs else ()
        fused = self.device.type == "cuda" and fuses_layers(self.model_config.use_liger)
        eight_bits = None if self.config.quantization is None else FORMATS[self.config.quantization]
        self._model = NativeModel(
            self.hf_config, dtype, self.device, trusts_code, sizes, fused, quantization=eight_bits
        )
        self._check_rotation()
        self._memory: KeyValueMemory | None = None
        self._cache: PrefixCache | None = None
        self._sized_for: tuple[int, ...] = (0, 0, 0)  # rows, prompt and response tokens that the memory is for
        self._lock = threading.Lock()
        """Held while responses are drawn, so that weights and memory are not replaced or freed meanwhile."""
        self._is_checked = self._holds_base = False
        self.applies_adapters = computes_adapters(self.config, self.model_config)
        self._generation: Generation | None = None
        self._prompt_tokens = self._hit_tokens = self._response_tokens = 0  # of generations that have ended

    takes_images = True

    def _check_rotation(self) -> None:
        short = longrope_threshold(self.hf_config)
        if short is not None and self.max_model_len > short:
            reason = (
                f"has longrope, whose rotation changes for a whole pass once a text in it is longer than {short} "
                f"tokens, and prompt and response may take {self.max_model_len} (data.max_prompt_length + "
                "data.max_response_length, or rollout.max_model_len)"
            )
            raise cannot_serve(self._model.module, reason)

    # ---- weights and memory

    def wake(self) -> None:
        """Do nothing: :meth:`load_weights` brings the weights, and the first requests allocate memory."""

    def sleep(self) -> None:
        """Free keys, values and weights if ``rollout.free_cache_engine``; otherwise only forget earlier texts.

        Waits for responses that another thread draws. On a CPU the memory of keys and values stays with the process
        until the operating system needs it.
        """
        with self._lock:
            if not self.config.free_cache_engine:
                self._forget_texts()
                return
            self._drop_memory()
            self._model.drop()
            self.weight_version, self._holds_base = NO_WEIGHTS, False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in use, whether the trainer's or copies; 0 after they were freed."""
        return self._model.nbytes

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all.

        Waits for responses that another thread draws, which end with the weights that they began with.
        """
        with self._lock:
            self._holds_base = False
            self._load_weights(weights, version)

    @torch.no_grad()
    def load_adapted(self, weights: AdaptedWeights, version: int) -> None:
        """See :meth:`BaseRollout.load_adapted`. Base weights are taken once, until the engine has freed them."""
        with self._lock:
            self._load_weights(() if self._holds_base else weights.base(), version, weights)

    def _load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, adapted: AdaptedWeights | None = None
    ) -> None:
        self.weight_version = NO_WEIGHTS
        self._forget_texts()
        if not self._holds_base:
            check_fit(self._model.load(weights), version, type(self._model.module).__name__)
        self._holds_base = adapted is not None
        self._model.load_adapters(adapted, version)
        if not self._is_checked:
            self._is_checked = check_model(self._model)
        self.weight_version = version

    def _forget_texts(self) -> None:
        if self._cache is not None:
            self._cache.clear()

    def state(self) -> EngineState:
        """See :meth:`BaseRollout.state`."""
        now = self._generation
        return EngineState(
            weight_version=self.weight_version,
            requests_running=0 if now is None else now.running,
            requests_waiting=0 if now is None else now.waiting,
            memory_use=0 if now is None or self._memory is None else self._memory.rows / self._memory.room,
            memory_tokens=0 if now is None or self._memory is None else self._memory.tokens,
            prefix_cache_tokens=0 if self._cache is None else len(self._cache) * PAGE,
            prompt_tokens=self._prompt_tokens + (0 if now is None else now.prompt_tokens),
            prefix_hit_tokens=self._hit_tokens + (0 if now is None else now.known_tokens),
            response_tokens=self._response_tokens + (0 if now is None else now.response_tokens),
            preemptions=0,  # a request is admitted when there is room for all of it
        )

    # ---- generation

    @torch.inference_mode()
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`. Thread-safe: calls run one after the other.

        Ranks that share the model all give the same requests, and get the same responses.
        """
        with self._lock:
            self.check_requests(requests)
            if not requests:
                return []
            answers: dict[int, Answer | DrawnPart] = {}
            queue = RequestQueue(answers.__setitem__)
            for request_id, request in enumerate(requests):
                queue.put(request_id, request)
            prompt = max(len(request.prompt_ids) for request in requests)
            response = max(request.sampling.max_tokens for request in requests) - 1
            self._answer_all(queue, self._memory_for(len(requests), prompt, response))
            unstarted = self._output([], [], "abort")  # aborted before it took any
        return [cast(RolloutOutput, answers.get(request_id, unstarted)) for request_id in range(len(requests))]

    @torch.inference_mode()
    def serve(self, queue: RequestQueue) -> None:
        """See :meth:`BaseRollout.serve`. A request is admitted within four tokens of those that run.

        With ``rollout.enable_prefix_caching`` keys and values of prompts and responses are kept for requests that begin
        with the same tokens, until the weights change. :meth:`abort` ends the requests that were taken; later ones are
        served. While there are none, other threads may replace the weights, or let the engine sleep.
        """
        longest, caches = self.max_model_len - 1, self.config.enable_prefix_caching
        while queue.wait():
            with self._lock:
                memory = self._memory_for(self.config.max_num_seqs, longest, longest, caches)
                self._answer_all(queue, memory, lambda request: self.check_requests([request]), self._cache)

    def _answer_all(
        self,
        queue: RequestQueue,
        memory: KeyValueMemory,
        check: Callable[[RolloutRequest], None] | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        """Answer all requests of the queue, and those that come meanwhile."""
        raw = self.config.logprobs_mode == "raw_logprobs"
        generation = Generation(
            queue,
            self._model,
            memory,
            TokenSampler([], self.device, raw, never=self.unknown_ids),
            StopRules([], self.eos_token_ids, self.tokenizer, self.device),
            self.config.max_num_batched_tokens,
            self._output,
            check,
            cache,
            on_pass=functools.partial(self.report_state, if_due=True),
            kept_width=self.config.kept_ids_width,
        )
        self._generation = generation
        try:
            with self.until_aborted() as aborted, contextlib.ExitStack() as on_error:
                on_error.callback(self._forget_states)
                generation.run(aborted)
                on_error.pop_all()
        finally:
            self._generation = None
            self._prompt_tokens += generation.prompt_tokens
            self._hit_tokens += generation.known_tokens
            self._response_tokens += generation.response_tokens
        memory.keep(torch.zeros(0, dtype=torch.long, device=self.device))

    def _output(self, token_ids: list[int], log_probs: list[float], finish_reason: FinishReason) -> RolloutOutput:
        output = RolloutOutput(token_ids, log_probs, finish_reason, self.weight_version, num_preempted=0)
        self.check_finite([output])
        return output

    def _forget_states(self) -> None:
        """Drop all keys and values after an error: they may be incomplete, or not finite."""
        self._memory = self._cache = None
        if self._model.buffers is not None:
            # Masked values are multiplied by 0, so a NaN or infinity left there would spoil later rows.
            self._model.buffers.free()

    def _memory_for(self, rows: int, prompt: int, response: int, caches: bool = False) -> KeyValueMemory:
        """Return memory for requests that may run at once; reuse what is allocated if it is large enough.

        Args:
            rows: number of requests; as many as ``rollout.max_num_seqs`` and the memory allow run at once.
            prompt: longest prompt.
            response: largest number of response tokens to store.
            caches: make a cache of prefixes too, unless there is one.
        """
        sizes = min(rows, self.config.max_num_seqs), prompt, response
        is_small = self._memory is None or any(new > old for new, old in zip(sizes, self._sized_for, strict=True))
        if is_small or (caches and self._cache is None):
            if self._memory is not None:  # training and validation alternate; one memory fits both
                sizes = tuple(map(max, sizes, self._sized_for))
            self._drop_memory()  # before the new one is allocated, or both would exist
            self._allocate(sizes[0], sizes[1], sizes[2], caches)
            self._sized_for = sizes
        assert self._memory is not None
        return self._memory

    def _allocate(self, rows: int, prompt: int, response: int, caches: bool) -> None:
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
        shape, text = self._model.shape, min(prompt + response, self.max_model_len - 1)
        allowed = int(free * self.config.gpu_memory_utilization) // shape.bytes_per_token  # tokens
        affordable = int(allowed * (1 - _CACHE_SHARE if caches else 1)) // text
        if affordable < rows:
            logger.warning("native engine: memory for %d rows of %d tokens at once, not %d", affordable, text, rows)
        self._memory = self._model.memory(max(1, min(rows, affordable)), prompt, response, text)
        mib = self._memory.nbytes / 2**20
        logger.info("native engine: up to %d concurrent rows, %.1f MiB", self._memory.room, mib)
        if caches:
            cache_tokens = min(allowed - self._memory.room * text, _KEPT_TEXTS * rows * self.max_model_len)
            self._cache = PrefixCache(shape, max(1, cache_tokens // PAGE))
            logger.info("native engine: prefix cache of %d tokens", cache_tokens)

    def _drop_memory(self) -> None:
        self._memory = self._cache = None
        if self._model.graphs is not None:
            self._model.graphs.forget()
        if self._model.buffers is not None:
            self._model.buffers.release()
