"""Our own engine: continuous batching with the model's Transformers code, on the trainer's own weights.

It lives in the trainer's process. Where the trainer's tensors are whole, on the same device and of ``rollout.dtype``,
they are used as they are: an update is visible at once, and nothing is copied. Sharded weights are gathered once per
update. See :mod:`verl.workers.rollout.native` for its parts, and docs/rollout_engines.md for what it serves.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.utils.available_memory import available_memory
from verl.utils.model import longrope_threshold, torch_dtype
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, RolloutOutput, RolloutRegistry, RolloutRequest
from verl.workers.rollout.native.generation import Generation
from verl.workers.rollout.native.memory import KeyValueMemory
from verl.workers.rollout.native.model import NativeModel, cannot_serve
from verl.workers.rollout.native.trial import check_model
from verl.workers.rollout.sampling import TokenSampler
from verl.workers.rollout.stopping import StopRules

logger = logging.getLogger(__name__)


@RolloutRegistry.register("native")
class NativeRollout(BaseRollout):
    """Decode in the trainer's process; arguments as for :class:`BaseRollout`.

    Raises:
        RolloutError: the architecture cannot be served; the message names the engines that may.
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        dtype = torch_dtype(self.config.dtype)
        self._model = NativeModel(self.hf_config, dtype, self.device, self.model_config.trust_remote_code)
        self._check_rotation()
        self._memory: KeyValueMemory | None = None
        self._sized_for: tuple[int, ...] = (0, 0, 0)  # rows, prompt, response: what the memory was asked to hold
        self._lock = threading.Lock()
        """Of weights and memory: nobody takes them from a running ``generate``."""
        self._is_checked = False

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
        """Nothing to do: weights come with :meth:`load_weights`, memory with the first requests."""

    def sleep(self) -> None:
        """With ``rollout.free_cache_engine`` forget keys, values and weights; else keep the memory for the next time.

        A ``generate`` that runs in another thread ends first. On a CPU the pages of keys and values are lent to the
        system, which takes them when memory is short.
        """
        if not self.config.free_cache_engine:
            return
        with self._lock:
            self._drop_memory()
            self._model.drop()
            self.weight_version = NO_WEIGHTS
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights in use, the trainer's own or copies; 0 when it sleeps without them."""
        return self._model.nbytes

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all.

        A ``generate`` that runs in another thread ends first, with the weights that it began with.
        """
        with self._lock:
            self._load_weights(weights, version)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weight_version = NO_WEIGHTS
        problems = self._model.load(weights)
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise RolloutError(
                f"weights of version {version} do not fit {type(self._model.module).__name__} of "
                f"'{self.model_config.path}': {shown}. Trainer and rollout must be built from the same model.path and "
                "override_config."
            )
        if not self._is_checked:
            self._is_checked = check_model(self._model)
        self.weight_version = version

    # ---- generation

    @torch.inference_mode()
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`; a call from another thread waits until this one has ended."""
        with self._lock:
            return self._generate(requests)

    def _generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        self.check_requests(requests)
        if not requests:
            return []
        params = [request.sampling for request in requests]
        raw = self.config.logprobs_mode == "raw_logprobs"
        sampler = TokenSampler(params, self.device, raw, never=self.unknown_ids)
        stop = StopRules(params, self.eos_token_ids, self.tokenizer, self.device)
        memory, budget = self._memory_for(requests), self.config.max_num_batched_tokens
        generation = Generation(requests, self._model, memory, sampler, stop, budget)
        with self.until_aborted() as aborted:
            try:
                generation.run(aborted)
            finally:
                memory.keep(torch.zeros(0, dtype=torch.long, device=self.device))
        lengths, reasons = stop.results(generation.drawn)
        rows = zip(generation.tokens.tolist(), generation.log_probs.tolist(), lengths, reasons, strict=True)
        outputs = [RolloutOutput(t[:n], p[:n], reason, self.weight_version) for t, p, n, reason in rows]
        if any(not math.isfinite(value) for output in outputs for value in output.log_probs):
            self._memory = None
            if self._model.pages is not None:
                self._model.pages.free()  # what is not finite would reach the next rows through their masks
            raise RolloutError(
                f"the model's logits are not finite with weights of version {self.weight_version}. The weights "
                "may have diverged (look at actor/grad_norm), or overflow in rollout.dtype="
                f"{self.config.dtype}; bfloat16 and float32 have a wider range than float16."
            )
        return outputs

    def _memory_for(self, requests: list[RolloutRequest]) -> KeyValueMemory:
        """Room for as many of them as may run at once; what is there already if it is large enough."""
        prompt = max(len(request.prompt_ids) for request in requests)
        own = max(request.sampling.max_tokens for request in requests) - 1
        wanted = min(len(requests), self.config.max_num_seqs), prompt, own
        if self._memory is None or any(new > old for new, old in zip(wanted, self._sized_for, strict=True)):
            if self._memory is not None:  # batches of two kinds by turns share one that fits both
                wanted = tuple(map(max, wanted, self._sized_for))
            self._drop_memory()  # before the next is allocated
            room, prompt, own = self._sized_for = wanted
            self._memory = self._model.memory(self._affordable(room, prompt + own), prompt, own)
            mib = self._memory.nbytes / 2**20
            logger.info("native engine: room for %d rows at once, up to %.1f MiB", self._memory.room, mib)
        return self._memory

    def _drop_memory(self) -> None:
        self._memory = None
        if self._model.pages is not None:
            self._model.pages.lend()

    def _affordable(self, room: int, tokens: int) -> int:
        """At most ``room`` rows, of so many tokens each, in the share of free memory that the engine may take."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
        affordable = int(free * self.config.gpu_memory_utilization) // (self._model.shape.bytes_per_token * tokens)
        if affordable < room:
            logger.warning("native engine: memory for %d rows of %d tokens at once, not %d", affordable, tokens, room)
        return max(1, min(room, affordable))
