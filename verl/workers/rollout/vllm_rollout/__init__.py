"""vLLM as rollout engine, a server in both values of ``rollout.mode``.

vLLM gets and returns token ids only; stop texts are detected here. New weights, and the pixels of images as the trainer
has them, reach it as files in shared memory. See ``docs/rollout_engines.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from verl.config.distillation import VLLM_MAX_LOGPROBS
from verl.errors import ConfigError, RolloutError
from verl.utils.model import has_experts
from verl.utils.sharded_tensor import DividedTensor
from verl.workers.rollout.base import RolloutRegistry, RolloutRequest
from verl.workers.rollout.client import EngineClient, PartialResponse
from verl.workers.rollout.engine_process import EngineProcess
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.quantized_layers import FORMATS, rounded_weights
from verl.workers.rollout.remote import RemoteRollout
from verl.workers.rollout.request import continued_seed
from verl.workers.rollout.sampling import completes_stop_text
from verl.workers.rollout.vllm_rollout.client import VLLMClient, start_vllm_node
from verl.workers.rollout.vllm_rollout.settings import engine_arguments


@RolloutRegistry.register("vllm")
class VLLMRollout(RemoteRollout):
    """Generate with vLLM; see :class:`~verl.workers.rollout.remote.RemoteRollout`."""

    takes_images = True
    starts_at_once = True  # so that an unknown argument of vLLM is reported before anything else is built

    def _engine_arguments(self) -> dict[str, Any]:
        if self.device.type == "cpu" and getattr(self.hf_config.get_text_config(), "kv_lora_rank", None):
            raise ConfigError(
                f"rollout.name=vllm computes wrong log-probs of {type(self.hf_config).__name__}, a model with latent "
                "attention, on a CPU, also of weights that it has loaded itself. Set rollout.name=hf or sglang."
            )
        has_images, has_mixtures = self._vision is not None, has_experts(self.hf_config)
        if self.config.quantization == "int8" and (has_images or has_mixtures):
            kind = "a mixture of experts" if has_mixtures else "a model with images"
            raise ConfigError(
                f"rollout.quantization=int8 with rollout.name=vllm is for dense models of text, and "
                f"{type(self.hf_config).__name__} is of {kind}. Set rollout.name=native."
            )
        return engine_arguments(self.config, self.model_config, self.max_model_len, self.device, has_images)

    @property
    def _most_likely(self) -> int:
        """Number of most likely tokens that vLLM reports, for requests that return the ids kept by sampling.

        One more than is stored, so that it shows where more were kept.
        """
        return min(self.config.kept_ids_width + 1, self.hf_config.get_text_config().vocab_size)

    def _start(self) -> EngineClient:
        return VLLMClient(self._arguments, self.device, self._launch, self._devices, self._vision, self._machines)

    def _start_node(self, machines: EngineMachines) -> EngineProcess:
        return start_vllm_node(self._arguments, self.device, self._launch, self._devices, machines)

    def _in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | DividedTensor]]:
        if self.config.quantization == "int8":
            weights = rounded_weights(weights, self._empty_model, FORMATS["int8"])
        return super()._in_files(weights)

    def _partial(self, request: RolloutRequest) -> PartialResponse:
        sampling = request.sampling
        ends = self._ends(sampling)
        params: dict[str, object] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            # vLLM cannot go on in the random numbers of a seed.
            "seed": continued_seed(sampling.seed, request.drawn_count),
            # vLLM runs without a tokenizer, so it cannot find the end tokens itself.
            "ignore_eos": True,
            "stop_token_ids": sorted(ends),
            "logprobs": self._most_likely if request.returns_kept_ids else 0,
            "detokenize": False,
        }
        if sampling.truncates:
            params |= {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0), "min_p": sampling.min_p}
        texts, before = sampling.stop, request.drawn_ids
        is_end = (lambda tokens: completes_stop_text(before + tokens, texts, self.tokenizer)) if texts else None
        return PartialResponse(request, params, is_end, ends, has_adapters=self._holds_base)

    def _check_top_k(self, top_k: int) -> None:
        max_logprobs = self._arguments.get("max_logprobs", VLLM_MAX_LOGPROBS)
        if top_k > max_logprobs >= 0:  # -1 is no limit
            raise RolloutError(
                f"top_k={top_k}: this vLLM returns at most max_logprobs={max_logprobs} most likely tokens. Set "
                f"engine_kwargs.vllm.max_logprobs={top_k}."
            )


vLLMRollout = vLLMAsyncRollout = VLLMRollout  # noqa: N816 - names of other versions, one for each mode
