"""The ``hf`` rollout engine: a Transformers model and a plain decoding loop, a reference for other engines.

It holds a copy of the whole model on each rank. ``rollout.max_num_seqs`` bounds the rows decoded at once, and so the
memory of keys and values; ``rollout.max_num_batched_tokens`` bounds the prompt tokens in one pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from threading import Event

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.utils.model import empty_causal_lm, torch_dtype
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.adapted_layers import AdaptedLayers, computes_adapters
from verl.workers.rollout.base import (
    NO_WEIGHTS,
    BaseRollout,
    RolloutOutput,
    RolloutRegistry,
    RolloutRequest,
)
from verl.workers.rollout.decoding import DecodingBatch, PromptWithImages
from verl.workers.rollout.request import NOT_KEPT
from verl.workers.rollout.sampling import StopRules, TokenSampler
from verl.workers.rollout.state import EngineState
from verl.workers.rollout.weights import ExpectedWeights
from verl.workers.routers import Routers

logger = logging.getLogger(__name__)

# Finished rows are removed when less than this share of the batch is unfinished: removing copies the cache.
_COMPACT_BELOW = 0.75
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@RolloutRegistry.register("hf")
class HFRollout(BaseRollout):
    """Rollout engine that decodes with a Transformers model; arguments as for :class:`BaseRollout`.

    Raises:
        RolloutError: the model has a state other than keys and values (Mamba, linear attention).
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        self._dtype = torch_dtype(self.config.dtype)
        self._module: PreTrainedModel | None = None
        self._adapters: AdaptedLayers | None = None
        self.applies_adapters = computes_adapters(self.config, self.model_config)
        self._drawing = self._waiting = 0  # responses
        self._prompt_tokens = self._response_tokens = 0
        other = set(getattr(self.hf_config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
        if other:
            raise RolloutError(
                f"{type(self.hf_config).__name__} has layers of type {', '.join(sorted(other))}; the hf engine "
                "decodes attention layers only. Choose another rollout.name."
            )

    takes_images = True

    # ---- weights and memory

    def wake(self) -> None:
        """Allocate the weights, unset."""
        if self._module is None:
            self._module = empty_causal_lm(
                self.hf_config, self._dtype, self.device, self.model_config.trust_remote_code
            )
            self._routers = Routers(self._module)
            self._adapters = AdaptedLayers(self._module, self._dtype, self.device)

    def sleep(self) -> None:
        """Free the weights if ``rollout.free_cache_engine``."""
        # Keys and values are freed after each batch.
        if self.config.free_cache_engine:
            self._module, self.weight_version = None, NO_WEIGHTS
            self._adapters = None  # it refers to the module
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that this engine holds; 0 after it has freed them."""
        return 0 if self._module is None else sum(p.nbytes for p in self._module.parameters())

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all."""
        self.wake()
        module = self._awake_module()
        self.weight_version = NO_WEIGHTS
        if self._adapters is not None:
            self._adapters.drop()
        targets = dict(module.named_buffers()) | dict(module.named_parameters())
        for name, tensor in ExpectedWeights(module, with_buffers=True).checked(weights, version):
            targets[name].copy_(tensor)
        self.weight_version = version
        logger.info("hf engine: version %d loaded, %.1f MiB of weights", version, self.weight_bytes / 2**20)

    @torch.no_grad()
    def load_adapted(self, weights: AdaptedWeights, version: int) -> None:
        """See :meth:`BaseRollout.load_adapted`."""
        self.load_weights(weights.base(), version)
        self.weight_version = NO_WEIGHTS
        assert self._adapters is not None, "load_weights wakes the engine"
        self._adapters.load(weights, version)
        self.weight_version = version

    def _awake_module(self) -> PreTrainedModel:
        if self._module is None:
            raise RolloutError("the hf engine sleeps. Generate inside `with rollout.awake(weights, version):`.")
        return self._module

    def state(self) -> EngineState:
        """See :meth:`BaseRollout.state`."""
        return EngineState(
            weight_version=self.weight_version,
            requests_running=self._drawing,
            requests_waiting=self._waiting,
            prompt_tokens=self._prompt_tokens,
            response_tokens=self._response_tokens,
            preemptions=0,
        )

    # ---- generation

    @torch.inference_mode()
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`."""
        self.check_requests(requests)
        # Sorted, so that a batch has prompts of similar length and little padding, and equal prompts are neighbours.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        outputs = [RolloutOutput([], [], "abort", self.weight_version, num_preempted=0)] * len(requests)
        try:
            with self.until_aborted() as aborted:
                for start in range(0, len(order), self.config.max_num_seqs):
                    if aborted.is_set():
                        break
                    indices = order[start : start + self.config.max_num_seqs]
                    self._waiting = len(order) - start - len(indices)
                    batch_outputs = self._generate_batch([requests[i] for i in indices], aborted)
                    for i, output in zip(indices, batch_outputs, strict=True):
                        outputs[i] = output
        finally:
            self._drawing = self._waiting = 0
        return outputs

    def _generate_batch(self, requests: list[RolloutRequest], aborted: Event) -> list[RolloutOutput]:
        params = [request.response_sampling for request in requests]
        longest, max_new_tokens = (
            max(p.max_tokens for p in params),
            max(request.sampling.max_tokens for request in requests),
        )
        returns_routing = any(request.returns_routing for request in requests)
        batch = DecodingBatch(
            [PromptWithImages(tuple(r.prompt_ids), r.images, tuple(r.places_of_text)) for r in requests],
            max_new_tokens,
            self._awake_module(),
            self.config.max_num_batched_tokens,
            self._routers if returns_routing else None,
        )
        self._drawing = len(requests)
        self._prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        raw = self.config.logprobs_mode == "raw_logprobs"
        sampler = TokenSampler(params, self.device, raw, never=self.unknown_ids)
        stop = StopRules(params, self.eos_token_ids, self.tokenizer, self.device)
        tokens = torch.zeros(len(requests), longest + 1, dtype=torch.long, device=self.device)
        log_probs = torch.zeros(len(requests), longest + 1, device=self.device)
        kept_ids = None
        if any(request.returns_kept_ids for request in requests):
            kept_ids = tokens.new_full((*tokens.shape, self.config.kept_ids_width), NOT_KEPT, dtype=torch.int32)
        before = torch.tensor([request.drawn_count for request in requests], device=self.device)
        for row, request in enumerate(requests):
            tokens[row, : request.drawn_count] = torch.tensor(request.drawn_ids, device=self.device)
        for step in range(max_new_tokens):
            self.report_state(if_due=True)
            # Rows that have ended may still be in the batch.
            at = (before[batch.rows] + step).clamp(max=longest)
            kept_now = None if kept_ids is None else kept_ids.new_full((len(at), kept_ids.shape[-1]), NOT_KEPT)
            newest, log_prob = sampler(batch.logits, batch.rows, at.clamp(max=longest - 1), kept_now)
            if kept_ids is not None and kept_now is not None:
                kept_ids[batch.rows, at] = kept_now
            tokens[batch.rows, at], log_probs[batch.rows, at] = newest, log_prob
            self._response_tokens += self._drawing
            unfinished = stop.unfinished(tokens, batch.rows, at)  # indices into batch.rows
            self._drawing = len(unfinished)
            if len(unfinished) == 0 or aborted.is_set():
                break
            if len(unfinished) < _COMPACT_BELOW * len(batch.rows):
                batch.keep(unfinished)
                at = at[unfinished]
            batch.forward(tokens[batch.rows, at])
        logger.debug("hf engine: %d rows, %.1f MiB of keys and values", len(requests), batch.nbytes / 2**20)
        rows = zip(tokens.tolist(), log_probs.tolist(), before.tolist(), *stop.results(before + step + 1), strict=True)
        version = self.weight_version
        outputs = [RolloutOutput(t[b:n], p[b:n], reason, version, num_preempted=0) for t, p, b, n, reason in rows]
        self.check_finite(outputs)
        if kept_ids is not None:
            outputs = [
                replace(
                    output, kept_ids=kept_ids[row, request.drawn_count :][: len(output.token_ids)].to("cpu", copy=True)
                )
                if request.returns_kept_ids
                else output
                for row, (request, output) in enumerate(zip(requests, outputs, strict=True))
            ]
        if batch.routing is None:
            return outputs
        return [
            replace(output, routed_experts=batch.routing.row_choices(row, 0, len(output.token_ids)))
            if requests[row].returns_routing
            else output
            for row, output in enumerate(outputs)
        ]
