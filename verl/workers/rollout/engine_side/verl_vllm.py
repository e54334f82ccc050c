"""Code that runs inside vLLM's processes: loads new weights and images, and checks each request's token."""

from __future__ import annotations

import functools
import gc
import hmac
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from verl_engine import (
    TOKEN_VARIABLE,
    Share,
    device_uuid,
    divided_by_columns,
    part_memory,
    weights_in_files,
    weights_in_part,
    with_checksums,
)
from verl_images import image_item, read_image_file

_RECENT_IMAGES = 32  # images kept in memory after they were read
_OPEN_PATHS = ("/health",)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class WeightLoader:
    """Load weights from shared memory; a mix-in of vLLM's worker (``worker_extension_cls``)."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    rank: int
    add_lora: Callable[..., bool]
    heads: HeadsAlone | None = None
    """Heads of multi-token prediction that this update has weights of."""
    absent_experts: Set[int] = frozenset()
    """Experts that this worker does not have, as others of its expert-parallel group do."""

    def weights_device(self) -> str | None:
        """Return the identity of the GPU on which this worker holds its weights; None on a CPU."""
        return device_uuid(self.device)

    def load_weights_part(self, part: dict[str, Any], is_first: bool) -> dict[str, object]:
        """Load a part of the new weights; return ``{"checksums": {name: checksum}}`` of this worker's share of it.

        If the part has ``checksums``, those that were sent, the worker compares them itself: vLLM hands on the answers
        of the first data-parallel copy alone. vLLM's loaders of a tensor-parallel layer cut this worker's slice out of
        a weight, so no more of it is read.
        """
        from vllm.config import set_current_vllm_config

        checksums: dict[str, str] = {}
        local_ranks = self.vllm_config.parallel_config.local_world_size
        share = Share(self.rank % local_ranks, local_ranks)
        with set_current_vllm_config(self.vllm_config):
            if is_first:
                self.begin_weights()
            memory, model = part_memory(part, self.device), self.model_runner.get_model()
            weights = weights_in_part(part, self.device, memory)
            checked = with_checksums(weights, checksums, self.device, share, divided_by_columns(model))
            self._load_weights(model, checked)
            weights.close()
            if _copy_waiting(memory) and memory.is_cuda:
                torch.cuda.synchronize(memory.device)  # the handle closes, which unmaps what the copies read
        storage = StorageWeakRef(memory.untyped_storage())
        del memory
        if not storage.expired():
            gc.collect()
        if not storage.expired():
            raise RuntimeError(
                "this vLLM keeps tensors that its loaders were given, which the next part of the weights overwrites. "
                "Install 0.32 (requirements/vllm.txt)."
            )
        sent = part.get("checksums", checksums)
        if changed := [name for name, value in checksums.items() if sent.get(name) != value]:
            raise RuntimeError(f"{len(changed)} weights did not arrive as they were sent, {changed[0]} among them")
        return {"checksums": checksums}

    def _load_weights(self, model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights into the model, and into its heads of multi-token prediction, which are named as further layers.

        vLLM has the heads in a model of their own, which shares embedding and output matrix with the model.
        """
        head_weights: list[tuple[str, Tensor]] = []
        layers = self.model_runner.model_config.hf_text_config.num_hidden_layers

        def model_weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                expert = _EXPERT.search(name)
                if expert is not None and int(expert[1]) in self.absent_experts:
                    continue  # vLLM would keep it until the whole layer has come
                match = _LAYER.match(name)
                if match is not None and int(match[1]) >= layers:
                    head_weights.append((name, tensor))
                else:
                    yield name, tensor

        model.load_weights(model_weights())
        heads = self.model_runner.get_draft_model() if head_weights else None
        if heads is not None:  # else another pipeline stage has them
            if self.heads is None:
                self.heads = HeadsAlone(heads, model)
                self.begin_layers(self.heads)
            heads.load_weights(iter(head_weights))

    def begin_weights(self) -> None:
        """Prepare vLLM to load all weights again."""
        model = self.model_runner.get_model()
        # With EPLB the maps have the numbers of copies, of which an expert may have several.
        has_copies = self.vllm_config.parallel_config.enable_eplb
        self.absent_experts = frozenset() if has_copies else absent_experts(model)
        self.begin_layers(model)

    def begin_layers(self, model: nn.Module) -> None:
        """Prepare vLLM to load all weights of a model again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(model)

    def end_weights(self) -> None:
        """Finish an update, also one that broke off, and drop what vLLM has computed from the weights before."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
            if self.heads is not None:
                finalize_layerwise_reload(self.heads, self.vllm_config.model_config)
                self.heads = None
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def follow_rule(self, temperature: float, unknown_ids: list[int]) -> None:
        """Divide all logits by a temperature and give some ids no probability, until another rule comes.

        vLLM's log-probs of a prompt are those of the logits as they are, whatever the request's temperature.
        """
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)  # of the rule before, over the method of the class
        if temperature == 1 and not unknown_ids:
            return
        compute, unknown = model.compute_logits, torch.tensor(unknown_ids, dtype=torch.long, device=self.device)

        def by_rule(*args: object, **kwargs: object) -> Tensor | None:
            logits = compute(*args, **kwargs)
            if logits is None:  # of all ranks but the first
                return None
            return (logits.float() / temperature).index_fill_(-1, unknown, -torch.inf)

        model.compute_logits = by_rule

    def load_adapters(self, name: str, adapter_id: int, folder: str) -> dict[str, object]:
        """Replace the LoRA adapters of that name by those in a folder of peft; return the checksums of their files."""
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(name, adapter_id, folder, load_inplace=True))
        checksums: dict[str, str] = {}
        for _ in with_checksums(weights_in_files(map(str, Path(folder).glob("*.safetensors"))), checksums):
            pass
        return {"checksums": checksums}


class HeadsAlone(nn.Module):
    """The modules of vLLM's model of the heads that it does not share with the model."""

    def __init__(self, heads: nn.Module, model: nn.Module) -> None:
        super().__init__()
        shared = set(model.modules())
        self._alone = [module for module in heads.modules() if module not in shared]

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Iterate over them."""
        return iter(self._alone)


def absent_experts(model: nn.Module) -> Set[int]:
    """Return the experts that no layer of this worker has, by vLLM's maps from all experts to the worker's (-1: none).

    To be called between two updates: within one the maps are on the device ``meta``.
    """
    tables = (getattr(layer, "expert_map", None) for layer in model.modules())
    maps = [table for table in tables if isinstance(table, Tensor)]
    absent = [{expert for expert, index in enumerate(table.tolist()) if index < 0} for table in maps]
    return set.intersection(*absent) if absent else frozenset()


def _copy_waiting(memory: Tensor) -> int:
    """Copy what vLLM keeps of a part's memory, weights of layers of which not all have come; return how many."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    begin, copies = memory.untyped_storage().data_ptr(), 0
    for layer in LAYERWISE_INFO.values():
        for _, call in layer.loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == begin:
                    call.arguments[name] = value.clone()
                    copies += 1
    return copies


class RequireToken:
    """ASGI middleware that requires the token on all paths but ``/health``, also those that vLLM leaves open."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: Any) -> None:
        """Pass a request with the token on; answer 401 to others."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN_PATHS:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b'{"error": "the token of this server is missing"}'})
                return
        await self.app(scope, receive, send)


class ReadImages:
    """ASGI middleware of a server for models with images: requests name files where vLLM has pixels as base64.

    Base64 in JSON takes the server's only thread longer than all else that it does for a request. The reader of this
    data is a private function of vLLM 0.32, and is replaced.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        from vllm.entrypoints.scale_out.token_in_token_out import mm_features

        if not hasattr(mm_features, "decode_mm_kwargs_item"):
            raise ImportError(
                "this vLLM does not read images of requests as 0.32 does. Install 0.32 (requirements/vllm.txt), or "
                "set rollout.name=native or sglang."
            )
        mm_features.decode_mm_kwargs_item = read_image
        self.app = app

    async def __call__(self, scope: MutableMapping[str, object], receive: object, send: object) -> None:
        """Pass a request on."""
        await self.app(scope, receive, send)


@functools.lru_cache(_RECENT_IMAGES)  # the responses to a prompt share its images
def read_image(index_and_path: str) -> object:
    """Return an image in a file as vLLM's ``MultiModalKwargsItem``; see :func:`verl_images.read_image_file`."""
    return image_item(*read_image_file(index_and_path, "vLLM's server"))
