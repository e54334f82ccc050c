"""SGLang as rollout engine: in this process (``rollout.mode=sync``) or as a server (``async``, the default).

An engine that several ranks share is a server in both modes. A server may live in an environment of its own, whose
interpreter ``rollout.engine_kwargs.sglang.python`` names; then nothing of SGLang is needed here.

SGLang schedules, prefills and decodes; the tokens are drawn by verl's own sampler inside of SGLang
(``sglang/engine_side``), so a response depends on its seed and on the weights as with every other engine, and its
log-probs are those of the contract. New weights are verified by checksums that SGLang's processes compute.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import EngineLostError, RolloutError
from verl.utils.model import torch_dtype
from verl.workers.rollout.base import (
    NO_WEIGHTS,
    FinishReason,
    RolloutOutput,
    RolloutRegistry,
    RolloutRequest,
    SamplingParams,
)
from verl.workers.rollout.engine_kwargs import extra_arguments, patience, python_of, start_timeout_s
from verl.workers.rollout.placement import devices_of_the_engine, engine_group
from verl.workers.rollout.restarting import RestartingRollout
from verl.workers.rollout.sglang.argument_names import check_names
from verl.workers.rollout.sglang.backends import Backend, InProcess, Server
from verl.workers.rollout.sglang.settings import engine_arguments, process_environment
from verl.workers.rollout.stopping import StopRules
from verl.workers.rollout.weights import ExpectedWeights

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0
_ABORT_AGAIN_S = 0.05
_MIB = 2**20


@RolloutRegistry.register("sglang")
class SGLangRollout(RestartingRollout):
    """Generate with SGLang, which starts at the first :meth:`wake`; arguments as for
    :class:`~verl.workers.rollout.base.BaseRollout`.

    With ``tensor_model_parallel_size`` t, t ranks that follow each other share one engine: the first of them starts
    it and generates, the others take part in gathering the weights.

    Raises:
        ConfigError: the ranks do not divide into engines, a setting asks for what SGLang cannot do here, or
            ``engine_kwargs.sglang`` has a name that SGLang does not know.
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        super().set_up()
        config, model_config = self.config, self.model_config
        self._arguments = engine_arguments(config, model_config, self.hf_config, self.max_model_len, self.device)
        self.ranks_per_engine = config.tensor_model_parallel_size
        self._in_process = config.mode == "sync" and self.ranks_per_engine == 1
        self._python = sys.executable if self._in_process else python_of(config)
        self._start_timeout_s = start_timeout_s(config, _START_TIMEOUT_S)
        setting = f"rollout.tensor_model_parallel_size={self.ranks_per_engine}"
        rank, self.leads = engine_group(self.ranks_per_engine, setting)
        self._devices = devices_of_the_engine(rank, self.ranks_per_engine, self.device)
        if self.leads:
            environment = process_environment(config, self.device)
            check_names(extra_arguments(config, decided=()), self._python, environment, self._start_timeout_s)
        self._expected = ExpectedWeights(self.hf_config, torch_dtype(config.dtype), model_config.trust_remote_code)
        self._backend: Backend | None = None
        self._released: list[str] = []
        """Kinds of memory that SGLang has given back."""

    # ---- weights and memory

    def wake(self) -> None:
        """Start SGLang, or let it take its memory again: with ``multi_stage_wake_up`` that of the weights only."""
        if not self.leads:
            return
        if self._backend is None:
            self._start_or_replace()
        first = ["weights", "cuda_graph"] if self.config.multi_stage_wake_up else list(self._released)
        self._resume([tag for tag in self._released if tag in first])

    def _start_engine(self) -> None:
        self._released = []
        self._backend = self._start()

    def _end_engine(self) -> Path | None:
        backend, self._backend, self._released = self._backend, None, []
        return backend.kill() if backend is not None else None

    def _start(self) -> Backend:
        environment = process_environment(self.config, self.device)
        if self._in_process:
            return InProcess(self._arguments, environment, patience(self.config))
        if self._devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        return Server(self._arguments, environment, self._python, self._start_timeout_s, patience(self.config))

    def _resume(self, tags: list[str]) -> None:
        if tags:
            self._awake_backend().resume_memory(tags)
            self._released = [tag for tag in self._released if tag not in tags]

    def sleep(self) -> None:
        """With ``rollout.free_cache_engine`` forget the weights and, on a GPU, give all memory back."""
        if not self.config.free_cache_engine:
            return
        self.weight_version = NO_WEIGHTS
        if self._backend is None:
            return
        tags = [tag for tag in ("kv_cache", "weights", "cuda_graph") if tag not in self._released]
        if self.device.type != "cuda" or not tags:
            return
        try:
            self._backend.release_memory(tags)
        except EngineLostError as error:
            logger.warning("sglang engine lost at the end of its work; the next wake starts another. %s", error)
            self._end_lost(error)
        else:
            self._released += tags

    def shutdown(self) -> None:
        """End SGLang; the next :meth:`wake` starts another. It also ends with this object and with this process."""
        if self._backend is not None:
            self._backend.stop()
        self._backend, self._released, self.weight_version = None, [], NO_WEIGHTS

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may come under one of their names or under all.

        Raises:
            RolloutError: also if the checksum of a weight in SGLang is not that of the weight that was sent.
        """
        self.wake()
        self.weight_version = NO_WEIGHTS
        began, weights = time.perf_counter(), iter(weights)
        checked = self._expected.checked(weights, version)
        bucket = self.config.checkpoint_engine.update_weights_bucket_megabytes * _MIB
        try:
            # On a rank that does not lead, the weights are only gathered and checked.
            count = self._awake_backend().update_weights(checked, bucket) if self.leads else sum(1 for _ in checked)
        finally:
            for _ in weights:  # a collective iterator must come to its end on every rank, whatever happened here
                continue
        self._resume(list(self._released))
        self.weight_version = version
        took = time.perf_counter() - began
        logger.info("sglang engine: version %d loaded, %d weights verified in %.3f s", version, count, took)

    def _awake_backend(self) -> Backend:
        if self._backend is None:
            raise RolloutError("the sglang engine sleeps. Generate inside `with rollout.awake(weights, version):`.")
        return self._backend

    # ---- generation

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`RestartingRollout.generate`."""
        self.check_requests(requests)
        return super().generate(requests)

    def _answer(
        self, requests: Mapping[int, RolloutRequest], outputs: dict[int, RolloutOutput], aborted: threading.Event
    ) -> None:
        asked = [*requests.values()]
        with _Aborter(self._awake_backend(), aborted):
            answers = self._awake_backend().generate(self._body(asked))
        outputs |= zip(requests, self._outputs(asked, answers), strict=True)

    def _body(self, requests: list[RolloutRequest]) -> dict[str, Any]:
        return {
            "input_ids": [request.prompt_ids for request in requests],
            "sampling_params": [self._params(request) for request in requests],
            "return_logprob": True,
            "custom_logit_processor": [_PASS_PARAMS] * len(requests),
        }

    def _params(self, request: RolloutRequest) -> dict[str, Any]:
        sampling = request.sampling
        row = {field: getattr(sampling, field) for field in _ROW_FIELDS}
        # ignore_eos silences stop_token_ids in SGLang too: such a response runs on, and is cut here.
        return {
            "max_new_tokens": sampling.max_tokens,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else [*self.eos_token_ids, *sampling.stop_token_ids],
            "stop": [] if self._arguments["skip_tokenizer_init"] else list(sampling.stop),
            "no_stop_trim": True,
            "custom_params": {
                "prompt_length": len(request.prompt_ids),
                "raw": self.config.logprobs_mode == "raw_logprobs",
                "row": row,
            },
        }

    def _outputs(self, requests: list[RolloutRequest], answers: list[dict[str, Any]]) -> list[RolloutOutput]:
        outputs = [self._output(answer) for answer in answers]
        cut = [i for i, request in enumerate(requests) if _stops_here(request.sampling) and outputs[i].token_ids]
        if cut:
            params = [requests[i].sampling for i in cut]
            for i, output in zip(cut, self._cut(params, [outputs[i] for i in cut]), strict=True):
                outputs[i] = output
        return outputs

    def _output(self, answer: dict[str, Any]) -> RolloutOutput:
        meta = answer["meta_info"]
        tokens = answer["output_ids"]
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or ()][: len(tokens)]
        if len(log_probs) != len(tokens):
            raise RolloutError(f"SGLang gave {len(log_probs)} log-probs for {len(tokens)} tokens.")
        if any(value is None or not math.isfinite(value) for value in log_probs):
            raise RolloutError(
                f"the model's logits are not finite with weights of version {self.weight_version}. The weights may "
                "have diverged (look at actor/grad_norm), or overflow in rollout.dtype="
                f"{self.config.dtype}; bfloat16 and float32 have a wider range than float16."
            )
        reason: FinishReason = meta["finish_reason"]["type"]
        return RolloutOutput(tokens, log_probs, reason, self.weight_version)

    def _cut(self, params: list[SamplingParams], outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        """End responses where the rules say so, in case SGLang went further."""
        rules = StopRules(params, self.eos_token_ids, self.tokenizer, torch.device("cpu"))
        longest = max(len(output.token_ids) for output in outputs)
        tokens = torch.zeros(len(outputs), longest, dtype=torch.long)
        for row, output in zip(tokens, outputs, strict=True):
            row[: len(output.token_ids)] = torch.tensor(output.token_ids)
        lengths = torch.tensor([len(output.token_ids) for output in outputs])
        rows = torch.arange(len(outputs))
        for step in range(longest):
            rows = rows[lengths[rows] > step]
            rows = rows[rules.going_on(tokens, rows, step)]
        return [
            output  # the rules did not end it: SGLang did, or it was aborted
            if reason == "abort"
            else RolloutOutput(output.token_ids[:length], output.log_probs[:length], reason, output.weight_version)
            for output, length, reason in zip(outputs, *rules.results(), strict=True)
        ]


class _Aborter:
    """Around one ``generate`` of the backend: once ``aborted`` is set, SGLang is told so until it has ended.

    Once is not enough: SGLang gives up what it has, and requests may still be on their way to it.
    """

    def __init__(self, backend: Backend, aborted: threading.Event) -> None:
        self._backend = backend
        self._aborted = aborted
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sglang-abort", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        while not self._finished.wait(_ABORT_AGAIN_S):
            try:
                if self._aborted.is_set():
                    self._backend.abort(self._finished)
            except RolloutError:  # SGLang is gone; the thread in `generate` says so
                return

    def __exit__(self, *error: object) -> None:
        self._finished.set()
        self._thread.join()


_PASS_PARAMS = json.dumps({"callable": b"cverl_sglang\nPassParams\n.".hex()})
"""The processor of a request, as SGLang takes it: a pickle that names a class."""
_ROW_FIELDS = ("max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "is_greedy", "truncates")


def _stops_here(sampling: SamplingParams) -> bool:
    return bool(sampling.stop or (sampling.ignore_eos and sampling.stop_token_ids))
