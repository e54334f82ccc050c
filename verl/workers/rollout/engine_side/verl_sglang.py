"""Code that runs inside SGLang's processes: verl's sampler in SGLang's scheduler, and the loading of new weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor
from verl_engine import checksum, weights_in_files, with_checksums

CONTRACT_BACKEND = "pytorch"
"""Sampling backend under which verl's sampler is registered; SGLang accepts this one on every device."""
_LOADING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)


def _load_sampling() -> ModuleType:
    # By path, because verl need not be importable here; the file itself imports nothing of verl.
    file = Path(__file__).resolve().parents[1] / "sampling.py"
    spec = importlib.util.spec_from_file_location("verl_sampling", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sampling = _load_sampling()


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler with verl's sampler."""
    from sglang.srt.managers import scheduler

    sglang_sampler.register_sampler_backend(CONTRACT_BACKEND, ContractSampler)
    return scheduler.run_scheduler_process(*args, **kwargs)


# ---- sampling


@dataclass(frozen=True)
class RowParams:
    """The sampling parameters that ``TokenSampler`` reads."""

    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    is_greedy: bool
    truncates: bool


class PassParams(CustomLogitProcessor):
    """Leave the logits unchanged. SGLang passes ``custom_params`` to the sampler only if a request has a processor."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        """Return the logits unchanged."""
        return logits


class ContractSampler(sglang_sampler.Sampler):
    """Sample with verl's ``TokenSampler``, each request with its own seed.

    ``custom_params`` of a request: ``{"prompt_length": int, "raw": bool, "row": fields of RowParams}``; ``raw`` as in
    ``TokenSampler``.
    """

    made = False
    """Whether SGLang has created this sampler in this process; reported with each update of the weights."""

    def __init__(self) -> None:
        super().__init__()
        ContractSampler.made = True
        self._known: dict[int, tuple[int, dict[str, Any]]] = {}
        """id() of a request's params: its row in the token sampler, and the params, so that the id is not reused."""
        self._most_rows = 0
        self._raw = False
        self._tokens: Any = None

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Return the next tokens, (rows,) int32, and store their log-probs in ``logits_output``."""
        params = sampling_info.custom_params
        if not params or any("row" not in (p or {}) for p in params):  # warm-up and other requests not from verl
            return super().forward(
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
                **kwargs,
            )
        logits = logits_output.next_token_logits
        if any(id(p) not in self._known for p in params):
            self._learn(params, logits.device)
        rows = torch.tensor([self._known[id(p)][0] for p in params]).to(logits.device, non_blocking=True)
        starts = torch.tensor([p["prompt_length"] - 1 for p in params]).to(logits.device, non_blocking=True)
        tokens, log_probs = self._tokens(logits, rows, positions - starts)
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        group = self.tp_sync_group
        if torch.distributed.get_world_size(group) > 1:  # GPU ranks may round sums differently
            torch.distributed.broadcast(tokens, torch.distributed.get_global_rank(group, 0), group=group)
        return tokens.to(torch.int32)

    def _learn(self, params: list[dict[str, Any]], device: torch.device) -> None:
        """Give new requests rows of the token sampler."""
        # SGLang prefills new prompts between decoding steps of the running batch, so known requests keep their rows. It
        # does not report which requests have ended: when too many are known, all but those of this call are forgotten.
        self._most_rows = max(self._most_rows, len(params))
        raw = params[0]["raw"]
        if self._tokens is None or raw != self._raw:
            self._known, self._raw, self._tokens = {}, raw, sampling.TokenSampler([], device, raw=raw)
        new = [p for p in params if id(p) not in self._known]
        if len(self._known) + len(new) > 2 * self._most_rows:
            current = {id(p) for p in params}
            forgotten = [key for key in self._known if key not in current]
            self._tokens.drop([self._known.pop(key)[0] for key in forgotten])
        taken = {row for row, _ in self._known.values()}
        rows = [row for row in range(len(taken) + len(new)) if row not in taken][: len(new)]
        self._tokens.put(rows, [RowParams(**p["row"]) for p in new])
        self._known |= {id(p): (row, p) for row, p in zip(rows, new, strict=True)}


# ---- weights


def load_weights(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a part of the weights, and write a report with their checksums.

    The report is ``{"problem": "", "arrived": {name: checksum}, "held": {name: checksum}, "sampler": bool}``, where
    ``held`` has, after loading, the model's parameters with the name and the shape of a given tensor. ``problem`` is
    the error, if any.

    Args:
        model: the model of this rank.
        named_tensors: first ``verl.order``, a JSON object as bytes: ``report``, the path of the report without
            ``-<rank>.json``, and ``files``, safetensors files to read; then tensors by name, if there are no files.
    """
    (_, order_bytes), *tensors = named_tensors
    order = json.loads(bytes(order_bytes.tolist()))
    arrived: dict[str, str] = {}
    report: dict[str, Any] = {"problem": "", "sampler": ContractSampler.made, "arrived": arrived}
    shapes: dict[str, torch.Size] = {}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in with_checksums(tensors or weights_in_files(order["files"]), arrived):
            shapes[name] = tensor.shape
            yield name, tensor

    try:
        model.load_weights(weights())
        report["held"] = {
            name: str(checksum(parameter.data))
            for name, parameter in model.named_parameters()
            if shapes.get(name) == parameter.shape
        }
    except _LOADING_ERRORS as error:  # raised, it would end SGLang and the process that started it
        report["problem"] = f"{type(error).__name__}: {error}"
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(f"{order['report']}-{rank}.json").write_text(json.dumps(report))
