"""Runs inside SGLang's processes: draws tokens as every engine of verl does, and takes new weights.

    run_scheduler_process   starts SGLang's scheduler with the sampler below
    ContractSampler         the draws and log-probs of ``verl.workers.rollout.sampling``
    load_weights            new weights, from tensors or files, and a report of what arrived

This folder is put on the module path of SGLang, whose environment need not have verl: only PyTorch, safetensors,
SGLang and the standard library may be imported here. The two files that are needed from verl are loaded by their
path; they import no other.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

CONTRACT_BACKEND = "pytorch"
"""SGLang allows this sampling backend on every device; here its sampler is ours."""
_ORDER = "verl.order"
_LOADING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)


def _verl_module(path: str) -> ModuleType:
    file = Path(__file__).resolve().parents[2] / path
    spec = importlib.util.spec_from_file_location(f"verl_sglang_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sampling = _verl_module("sampling.py")
checksum = _verl_module("checksum.py").checksum


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """SGLang's own, with the contract's sampler in place."""
    from sglang.srt.managers import scheduler

    sglang_sampler.register_sampler_backend(CONTRACT_BACKEND, ContractSampler)
    return scheduler.run_scheduler_process(*args, **kwargs)


# ---- sampling


@dataclass(frozen=True)
class RowParams:
    """What ``TokenSampler`` reads of a request."""

    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    is_greedy: bool
    truncates: bool


class PassParams(CustomLogitProcessor):
    """Changes nothing: a request that names a processor has its ``custom_params`` handed to the sampler."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        """The logits as they are."""
        return logits


class ContractSampler(sglang_sampler.Sampler):
    """Draws by the request's own random numbers; log-probs are of the distribution that was drawn from, or raw.

    ``custom_params`` of a request: ``{"prompt_length": int, "raw": bool, "row": fields of RowParams}``.
    """

    made = False

    def __init__(self) -> None:
        super().__init__()
        ContractSampler.made = True
        self._known: dict[int, tuple[int, dict[str, Any]]] = {}
        """id of a request's params → its row in the token sampler, and the params, so that the id stays taken."""
        self._most_rows = 0
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
        """Next tokens, (rows,) int32; their log-probs go into ``logits_output``."""
        params = sampling_info.custom_params
        if not params or any("row" not in (p or {}) for p in params):  # warm-up and other requests that are not ours
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
        return self._agreed(tokens)

    def _learn(self, params: list[dict[str, Any]], device: torch.device) -> None:
        """Rows for these requests beside those that are known: prompts come in small batches between the steps of
        the large one. Who has ended is not told, so the old are forgotten when there are too many.
        """
        self._most_rows = max(self._most_rows, len(params))
        new = [p for p in params if id(p) not in self._known]
        other_kind = any(p["raw"] != params[0]["raw"] for _, p in self._known.values())
        if other_kind or len(self._known) + len(new) > 2 * self._most_rows:
            self._known, new = {}, params
        rows = [*(p for _, p in self._known.values()), *new]
        self._known = {id(p): (row, p) for row, p in enumerate(rows)}
        self._tokens = sampling.TokenSampler([RowParams(**p["row"]) for p in rows], device, raw=rows[0]["raw"])

    def _agreed(self, tokens: Tensor) -> Tensor:
        """The tokens of the first rank: sums on a GPU need not come out alike on all ranks."""
        group = self.tp_sync_group
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.broadcast(tokens, torch.distributed.get_global_rank(group, 0), group=group)
        return tokens.to(torch.int32)


# ---- weights


def load_weights(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a part of the weights, and report which checksums arrived.

    Args:
        model: of this rank.
        named_tensors: first ``verl.order``, a JSON object as bytes: ``report``, the path of the report without the
            rank, and ``files``, safetensors files to read; then tensors by name, if there are no files.

    The report is ``{"problem": "", "arrived": {name: checksum}, "held": {name: checksum}, "sampler": bool}``;
    ``held`` are the parameters of the model that have the name and the shape of a given tensor, after loading.
    An error goes there too: raised, it would end SGLang and the process that started it.
    """
    (_, order_bytes), *tensors = named_tensors
    order = json.loads(bytes(order_bytes.tolist()))
    report: dict[str, Any] = {"problem": "", "sampler": ContractSampler.made}
    arrived: dict[str, str] = {}
    shapes: dict[str, torch.Size] = {}
    try:
        model.load_weights(_observed(tensors or _of_files(order["files"]), arrived, shapes))
        report["held"] = _checksums_of(dict(model.named_parameters()), shapes)
    except _LOADING_ERRORS as error:
        report["problem"] = f"{type(error).__name__}: {error}"
    report["arrived"] = arrived
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(f"{order['report']}-{rank}.json").write_text(json.dumps(report))


def _observed(
    weights: Iterable[tuple[str, Tensor]], arrived: dict[str, str], shapes: dict[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        arrived[name], shapes[name] = str(checksum(tensor)), tensor.shape
        yield name, tensor


def _of_files(paths: list[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _checksums_of(parameters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    return {
        name: str(checksum(parameters[name].data))
        for name, shape in shapes.items()
        if name in parameters and parameters[name].shape == shape
    }
