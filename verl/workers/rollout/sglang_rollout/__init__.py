"""SGLang as rollout engine, a server in both values of ``rollout.mode``.

SGLang schedules, prefills and decodes; verl's own sampler, which runs inside SGLang (``engine_side/verl_sglang.py``),
draws the tokens and computes the log-probs, as for every other engine. See ``docs/rollout_engines.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from verl.utils.sharded_tensor import DividedTensor
from verl.workers.rollout.base import RolloutRegistry, RolloutRequest
from verl.workers.rollout.client import EngineClient, PartialResponse, start_node
from verl.workers.rollout.engine_kwargs import extra_arguments
from verl.workers.rollout.engine_process import EngineProcess
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.remote import RemoteRollout
from verl.workers.rollout.sampling import completes_stop_text
from verl.workers.rollout.sglang_rollout.adapters import completed
from verl.workers.rollout.sglang_rollout.client import SGLangClient, command_of
from verl.workers.rollout.sglang_rollout.settings import check_names, engine_arguments, process_environment

_ROW_FIELDS = ("max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "is_greedy", "truncates")
"""Sampling parameters sent to verl's sampler; the fields of ``RowParams`` in ``engine_side/verl_sglang.py``."""


@RolloutRegistry.register("sglang")
class SGLangRollout(RemoteRollout):
    """Generate with SGLang; see :class:`~verl.workers.rollout.remote.RemoteRollout`.

    Raises:
        ConfigError: also if ``engine_kwargs.sglang`` has a name that is not an argument of SGLang.
    """

    takes_images = True
    starts_at_once = False

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        super().set_up()
        if self.leads:
            check_names(extra_arguments(self.config, decided=()), self._launch, self._environment())

    def _engine_arguments(self) -> dict[str, Any]:
        return engine_arguments(self.config, self.model_config, self.hf_config, self.max_model_len, self.device)

    def _environment(self) -> dict[str, str]:
        return process_environment(self.config, self.device, self._machines)

    def _start(self) -> EngineClient:
        return SGLangClient(
            self._arguments,
            self._environment(),
            self._launch,
            self.device,
            self._devices,
            self._vision,
            self._machines,
        )

    def _start_node(self, machines: EngineMachines) -> EngineProcess:
        command = command_of(self._arguments, self._launch, machines)
        return start_node("sglang", command, self._environment(), self._launch, self._devices)

    def _adapters_of(self, adapters: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return completed(adapters, self._expected.shapes, self._arguments["lora_target_modules"])

    def _in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | DividedTensor]]:
        """Return weights as the model's files have them, without heads: SGLang's reports are of one model."""
        return super()._in_files((name, tensor) for name, tensor in weights if name not in self._expected.head_shapes)

    def _partial(self, request: RolloutRequest) -> PartialResponse:
        sampling = request.sampling
        # In SGLang ignore_eos disables stop_token_ids too: the response continues there, and is cut off here.
        ends = set(sampling.stop_token_ids) if sampling.ignore_eos else set()
        params = {
            "max_new_tokens": sampling.max_tokens,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else [*self.eos_token_ids, *sampling.stop_token_ids],
            # With a tokenizer SGLang stops early at a stop text, which saves work; the exact end is determined here.
            "stop": [] if self._arguments["skip_tokenizer_init"] else list(sampling.stop),
            "no_stop_trim": True,
            "custom_params": {
                "prompt_length": len(request.prompt_ids) - request.drawn_count,
                "raw": self.config.logprobs_mode == "raw_logprobs",
                "row": {field: getattr(request.response_sampling, field) for field in _ROW_FIELDS},
            },
        }
        if self.model_config.mtp.is_in_rollout:  # SGLang's own sampler verifies what heads propose
            params |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
        before = request.drawn_ids

        def is_end(tokens: list[int]) -> bool:
            texts = sampling.stop
            return tokens[-1] in ends or bool(texts and completes_stop_text(before + tokens, texts, self.tokenizer))

        ends_here = is_end if ends or sampling.stop else None
        return PartialResponse(request, params, ends_here, self._ends(sampling), has_adapters=self._holds_base)
