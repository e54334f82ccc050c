"""Code that runs inside SGLang's processes: verl's sampler in SGLang's scheduler, and the loading of new weights."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import logprob_processor
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.managers import mm_schedule
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor
from verl_engine import (
    ADAPTER_REPORT,
    Share,
    as_text,
    device_uuid,
    divided_by_columns,
    signed_checksum,
    weights_in_files,
    weights_in_part,
    with_checksums,
)
from verl_images import read_image_file

CONTRACT_BACKEND = "pytorch"
"""Sampling backend under which verl's sampler is registered; SGLang accepts this one on every device."""
_RECENT_IMAGES = 32  # images kept in memory after they were read
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


def run_scheduler_process(*args: object, **kwargs: object) -> object:
    """Run SGLang's scheduler with verl's sampler."""
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.managers import scheduler

    LoRAAdapter.initialize_weights = read_adapters
    score_by_rule()
    sglang_sampler.register_sampler_backend(CONTRACT_BACKEND, ContractSampler)
    if not torch.accelerator.is_available():
        pin_nothing()
    return scheduler.run_scheduler_process(*args, **kwargs)


def pin_nothing() -> None:
    """Replace requests for pinned memory by requests for ordinary memory, the only one without an accelerator."""

    def unpinned(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **kwargs: create(*args, **kwargs)

    # SGLang's LoRA layers ask for it on every device, and PyTorch refuses it on a CPU.
    torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda self, device=None: self


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

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, object]] | None = None) -> Tensor:
        """Return the logits unchanged."""
        return logits


class ContractSampler(sglang_sampler.Sampler):
    """Sample with verl's ``TokenSampler``, each request with its own seed.

    ``custom_params`` of a request: ``{"prompt_length": int, "raw": bool, "row": fields of RowParams}``; ``raw`` as in
    ``TokenSampler``.
    """

    is_created = False
    """True once SGLang has created this sampler in this process; reported with each update of the weights."""

    def __init__(self) -> None:
        super().__init__()
        ContractSampler.is_created = True
        self._rows_of_params: dict[int, tuple[int, dict[str, object]]] = {}
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
        if any(id(p) not in self._rows_of_params for p in params):
            self._learn(params, logits.device)
        rows = torch.tensor([self._rows_of_params[id(p)][0] for p in params]).to(logits.device, non_blocking=True)
        starts = torch.tensor([p["prompt_length"] - 1 for p in params]).to(logits.device, non_blocking=True)
        # Requests for what sampling kept ask for as many of the most likely tokens, and get these in their place.
        kept_ids = None
        if return_logprob and top_logprobs_nums and (width := max(top_logprobs_nums)):
            kept_ids = torch.full((len(rows), width), -1, dtype=torch.int32, device=logits.device)
        tokens, log_probs = self._tokens(logits, rows, positions - starts, kept_ids)
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        if kept_ids is not None:
            # SGLang copies row by row what is not on the CPU, and waits for the device before it reads.
            logits_output.next_token_top_logprobs_val = list(torch.zeros(len(rows), width))
            logits_output.next_token_top_logprobs_idx = list(kept_ids.to("cpu", non_blocking=True))
        group = self.tp_sync_group
        if torch.distributed.get_world_size(group) > 1:  # GPU ranks may round sums differently
            torch.distributed.broadcast(tokens, torch.distributed.get_global_rank(group, 0), group=group)
        return tokens.to(torch.int32)

    def _learn(self, params: list[dict[str, Any]], device: torch.device) -> None:
        """Assign rows of the token sampler to new requests."""
        # SGLang prefills new prompts between decoding steps of the running batch, so known requests keep their rows. It
        # does not report which requests have ended: when there are too many, all but this call's are dropped.
        self._most_rows = max(self._most_rows, len(params))
        raw = params[0]["raw"]
        if self._tokens is None or raw != self._raw:
            self._rows_of_params, self._raw, self._tokens = {}, raw, sampling.TokenSampler([], device, raw=raw)
        new = [p for p in params if id(p) not in self._rows_of_params]
        if len(self._rows_of_params) + len(new) > 2 * self._most_rows:
            current = {id(p) for p in params}
            forgotten = [key for key in self._rows_of_params if key not in current]
            self._tokens.drop([self._rows_of_params.pop(key)[0] for key in forgotten])
        used_rows = {row for row, _ in self._rows_of_params.values()}
        rows = [row for row in range(len(used_rows) + len(new)) if row not in used_rows][: len(new)]
        self._tokens.put(rows, [RowParams(**p["row"]) for p in new])
        self._rows_of_params |= {id(p): (row, p) for row, p in zip(rows, new, strict=True)}


# ---- scores


@dataclass
class FollowedRule:
    """Rule by which a prompt's logits become a distribution; see ``verl.workers.rollout.scoring``."""

    temperature: float = 1.0
    unknown_ids: list[int] = field(default_factory=list)


rule = FollowedRule()


def score_by_rule() -> None:
    """Let SGLang's log-probs of prompts follow ``rule``; without it they follow the unchanged logits."""
    forward = logprob_processor.InputLogprobProcessor.forward

    @functools.wraps(forward)
    def by_rule(self: object, *args: object, get_logits_fn: Callable[..., Tensor], **kwargs: object) -> object:
        def shaped(*args: object, **kwargs: object) -> Tensor:
            logits = get_logits_fn(*args, **kwargs)
            unknown = torch.tensor(rule.unknown_ids, dtype=torch.long, device=logits.device)
            return (logits.float() / rule.temperature).index_fill_(-1, unknown, -torch.inf)

        follows = rule.temperature != 1 or rule.unknown_ids
        return forward(self, *args, get_logits_fn=shaped if follows else get_logits_fn, **kwargs)

    logprob_processor.InputLogprobProcessor.forward = by_rule


# ---- weights


def load_weights(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a part of the weights, and write a report with their checksums.

    The report has for each rank ``{"problem": "", "arrived": {name: checksum}, "held": {name: checksum}, "sampler":
    bool, "device": uuid}``, where ``arrived`` has the rank's share of the weights, and ``held``, after loading, the
    model's parameters with the name and the shape of a given tensor. ``problem`` is the error, if any, and ``device``
    the GPU of the weights.

    Args:
        model: the model of this rank.
        named_tensors: ``verl.order``, a JSON object as bytes: ``report``, the path of the report without
            ``.json``, the number of ``ranks`` of each machine, ``part``, the description of a part in shared memory,
            and ``rule``, that of the scores from now on; null leaves weights or rule as they are.
    """
    global rule
    ((_, order_bytes),) = named_tensors
    order = json.loads(bytes(order_bytes.tolist()))
    if order["rule"]:
        rule = FollowedRule(**order["rule"])
    device = next(model.parameters()).device
    arrived: dict[str, str] = {}
    report: dict[str, object] = {
        "problem": "",
        "sampler": ContractSampler.is_created,
        "device": device_uuid(device),
        "arrived": arrived,
    }
    shapes: dict[str, torch.Size] = {}

    def weights() -> Iterator[tuple[str, Tensor]]:
        # The loaders copy this rank's slice of each into its parameter before the next is asked for.
        share, parts = Share(_rank() % order["ranks"], order["ranks"]), weights_in_part(order["part"], device)
        for name, tensor in with_checksums(parts, arrived, device, share, divided_by_columns(model)):
            shapes[name] = tensor.shape
            yield name, tensor

    try:
        if order["part"]:
            model.load_weights(weights())
        held = {
            name: signed_checksum(parameter.data)
            for name, parameter in model.named_parameters()
            if shapes.get(name) == parameter.shape
        }
        report["held"] = as_text(held)
        if mm_schedule.embedding_cache is not None:  # features of images by the previous weights
            mm_schedule.embedding_cache.clear()
    except _LOADING_ERRORS as error:  # raised, it would end SGLang's server
        report["problem"] = f"{type(error).__name__}: {error}"
    _write_reports(order["report"], report)


def read_adapters(adapter: Any) -> None:
    """Read LoRA adapters from their folder, and write a report as :func:`load_weights` does.

    It takes the place of SGLang's own reader, which wants the ``load_format`` of the whole model to be one of files.
    """
    folder = Path(adapter.config.path)
    arrived: dict[str, str] = {}
    files = map(str, folder.glob("*.safetensors"))
    adapter.initialize_weights_from_tensors(dict(with_checksums(weights_in_files(files), arrived)))
    _write_reports(
        str(folder / ADAPTER_REPORT),
        {"problem": "", "sampler": ContractSampler.is_created, "arrived": arrived, "held": {}},
    )


def _write_reports(path: str, report: dict[str, object]) -> None:
    """Write the reports of all ranks, in their order, to a file on the first rank's machine. Collective."""
    reports = [report]
    if torch.distributed.is_initialized():
        group = parallel_state.get_world_group()
        reports = reports * group.world_size
        torch.distributed.all_gather_object(reports, report, group=group.cpu_group)
    if _rank() == 0:
        Path(f"{path}.json").write_text(json.dumps(reports))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


# ---- images


def read_images_from_files() -> None:
    """Patch SGLang's processor of models with images to accept names of files for pixels; in its main process."""
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    process = QwenVLImageProcessor.process_mm_data_async

    @functools.wraps(process)
    async def with_pixels(self: object, image_data: Any, *args: object, **kwargs: object) -> Any:
        prompts = [json.loads(encoded) for encoded in image_data or ()]
        output = await process(self, [_with_pixels(images) for images in prompts], *args, **kwargs)
        if prompts:
            _set_identities(output, [step for images in prompts for step in _identities(images["files"])])
        return output

    QwenVLImageProcessor.process_mm_data_async = with_pixels


@functools.lru_cache(_RECENT_IMAGES)  # the responses to a prompt share its images
def _image_in(file: str) -> tuple[Tensor, Tensor, float | None]:
    return read_image_file(file, "SGLang")


def _identities(files: list[str]) -> Iterator[bytes]:
    """Yield 32 bytes for each step of the images in files, equal only for equal pixels, grids, speeds and steps."""
    for file in files:
        for step in range(int(_image_in(file)[1][0])):
            yield hashlib.blake2b(f"{Path(file).stem} {step}".encode(), digest_size=32).digest()


def _set_identities(output: Any, identities: list[bytes]) -> None:
    """Set the identities by which SGLang caches features and keys: its own, of pixels alone, ignore grids."""
    for item, identity in zip(output.mm_items, identities, strict=True):
        item.set_identity(identity)
    output.padded_input_ids = output.build_padded_input_ids(output.input_ids, output.mm_items)


def _with_pixels(images: dict[str, Any]) -> dict[str, object]:
    """Return the images of a prompt in SGLang's own format, with each step of a video as an image of its own.

    To the tower the steps of a video are apart; SGLang lets those of Qwen2.5-VL see each other.

    Args:
        images: ``files``, see :func:`verl_images.read_image_file`; ``offsets``, the first and the last place of each
            step; ``mrope_positions``, (3, tokens) of the prompt, and ``mrope_position_delta``.
    """
    read = [_image_in(file) for file in images["files"]]
    placement = {name: value for name, value in images.items() if name != "files"}
    return placement | {
        "format": "processor_output",
        "modality": "image",
        "pixel_values": torch.cat([pixels for pixels, _, _ in read]),
        "image_grid_thw": torch.cat([grid.new_tensor([[1, *grid[1:]]] * int(grid[0])) for _, grid, _ in read]),
    }
