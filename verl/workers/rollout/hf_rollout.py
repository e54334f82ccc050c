"""The reference engine: a Transformers model and a plain decoding loop, on a CPU or a GPU.

Small and exact, so that other engines can be measured against it. It holds a whole copy of the model
on each rank; ``rollout.max_num_seqs`` bounds the rows that are decoded at once (their keys and values
are kept), ``rollout.max_num_batched_tokens`` the prompt tokens that go through the model at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from threading import Event

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.utils.model import empty_causal_lm, torch_dtype
from verl.workers.rollout.base import (
    NO_WEIGHTS,
    BaseRollout,
    FinishReason,
    RolloutOutput,
    RolloutRegistry,
    RolloutRequest,
)
from verl.workers.rollout.decoding import DecodingBatch
from verl.workers.rollout.sampling import TokenSampler
from verl.workers.rollout.stopping import StopRules

logger = logging.getLogger(__name__)

_COMPACT_BELOW = 0.75
"""Finished rows leave the batch when less than this share of it still goes on; leaving costs a copy of the cache."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@RolloutRegistry.register("hf")
class HFRollout(BaseRollout):
    """Decode with a Transformers model; arguments as for :class:`BaseRollout`.

    Raises:
        RolloutError: the model keeps a state that is not keys and values (Mamba, linear attention).
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        self._dtype = torch_dtype(self.config.dtype)
        self._module: PreTrainedModel | None = None
        other = set(getattr(self.hf_config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
        if other:
            raise RolloutError(
                f"{type(self.hf_config).__name__} has layers of type {', '.join(sorted(other))}; the hf engine "
                "decodes attention layers only. Choose another rollout.name."
            )

    # ---- weights and memory

    def wake(self) -> None:
        """Allocate the model."""
        if self._module is None:
            self._module = empty_causal_lm(
                self.hf_config, self._dtype, self.device, self.model_config.trust_remote_code
            )

    def sleep(self) -> None:
        """Drop the model if ``rollout.free_cache_engine``; keys and values are gone after each batch anyway."""
        if self.config.free_cache_engine:
            self._module, self.weight_version = None, NO_WEIGHTS
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights that this engine holds, 0 when it sleeps without them."""
        return 0 if self._module is None else sum(p.nbytes for p in self._module.parameters())

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all."""
        self.wake()
        module = self._awake_module()
        self.weight_version = NO_WEIGHTS
        targets = dict(module.named_buffers()) | dict(module.named_parameters(remove_duplicate=False))
        problems, loaded = [], set()
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                problems.append(f"{name} is unknown")
            elif target.shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} where {list(target.shape)} is needed")
            else:
                target.copy_(tensor)
                loaded.add(target)
        problems += [f"{name} is missing" for name, parameter in module.named_parameters() if parameter not in loaded]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise RolloutError(
                f"weights of version {version} do not fit {type(module).__name__} of '{self.model_config.path}': "
                f"{shown}. Trainer and rollout must be built from the same model.path and override_config."
            )
        self.weight_version = version
        logger.info("hf engine: version %d loaded, %.1f MiB of weights", version, self.weight_bytes / 2**20)

    def _awake_module(self) -> PreTrainedModel:
        if self._module is None:
            raise RolloutError("the hf engine sleeps. Generate inside `with rollout.awake(weights, version):`.")
        return self._module

    # ---- generation

    @torch.inference_mode()
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`."""
        self.check_requests(requests)
        # Prompts of similar length share a batch, so there is little padding; equal prompts are neighbours.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        outputs = [RolloutOutput([], [], "abort", self.weight_version)] * len(requests)
        with self.until_aborted() as aborted:
            for start in range(0, len(order), self.config.max_num_seqs):
                if aborted.is_set():
                    break
                chosen = order[start : start + self.config.max_num_seqs]
                for i, output in zip(chosen, self._generate_batch([requests[i] for i in chosen], aborted), strict=True):
                    outputs[i] = output
        return outputs

    def _generate_batch(self, requests: list[RolloutRequest], aborted: Event) -> list[RolloutOutput]:
        params = [request.sampling for request in requests]
        longest = max(p.max_tokens for p in params)
        batch = DecodingBatch(
            [request.prompt_ids for request in requests],
            longest,
            self._awake_module(),
            self.config.max_num_batched_tokens,
        )
        raw = self.config.logprobs_mode == "raw_logprobs"
        sampler = TokenSampler(params, self.device, raw, never=self.unknown_ids)
        stop = StopRules(params, self.eos_token_ids, self.tokenizer, self.device)
        tokens = torch.zeros(len(requests), longest, dtype=torch.long, device=self.device)
        log_probs = torch.zeros(len(requests), longest, device=self.device)
        for step in range(longest):
            drawn, log_prob = sampler(batch.logits, batch.rows, step)
            tokens[batch.rows, step], log_probs[batch.rows, step] = drawn, log_prob
            going_on = stop.going_on(tokens, batch.rows, step)  # places in batch.rows
            if len(going_on) == 0 or aborted.is_set():
                break
            if len(going_on) < _COMPACT_BELOW * len(batch.rows):
                batch.keep(going_on)
            batch.forward(tokens[batch.rows, step])
        logger.debug("hf engine: %d rows, %.1f MiB of keys and values", len(requests), batch.nbytes / 2**20)
        return self._outputs(tokens, log_probs, *stop.results(drawn=step + 1))

    def _outputs(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        lengths: list[int],
        reasons: list[FinishReason],
    ) -> list[RolloutOutput]:
        rows = zip(tokens.tolist(), log_probs.tolist(), lengths, reasons, strict=True)
        outputs = [RolloutOutput(t[:n], p[:n], reason, self.weight_version) for t, p, n, reason in rows]
        if any(not math.isfinite(value) for output in outputs for value in output.log_probs):
            raise RolloutError(
                f"the model's logits are not finite with weights of version {self.weight_version}. The weights "
                "may have diverged (look at actor/grad_norm), or overflow in rollout.dtype="
                f"{self.config.dtype}; bfloat16 and float32 have a wider range than float16."
            )
        return outputs
