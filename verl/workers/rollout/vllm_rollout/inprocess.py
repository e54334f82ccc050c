"""vLLM inside this process (``rollout.mode=sync``)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from verl.base.registry import suggest
from verl.errors import ConfigError, RolloutError
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.workers.rollout.client import MEMORY, EngineClient, PartialResponse, ServedRequests
from verl.workers.rollout.engine_side.verl_engine import checksum, weights_in_files, with_checksums
from verl.workers.rollout.engine_side.verl_images import image_item
from verl.workers.rollout.placed_images import PlacedImages, seconds_of_each
from verl.workers.rollout.request import RolloutRequest
from verl.workers.rollout.state import fields_of
from verl.workers.rollout.vllm_rollout.settings import ADAPTER_ID, METRICS, process_environment
from verl.workers.rollout.weights import ADAPTER, ADAPTER_FILE, check_arrival, write_adapters

_FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))


class VLLMInProcess(EngineClient):
    """vLLM's ``LLMEngine`` in this process; it runs until this process ends.

    Raises:
        ConfigError: vLLM is not installed here, or has no argument of a given name.
    """

    def __init__(self, arguments: Mapping[str, Any], device: torch.device, vision: VisionConfig | None = None) -> None:
        variables = process_environment(device) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with _undisturbed(variables):
            try:
                from vllm.engine.arg_utils import EngineArgs
                from vllm.v1.engine.llm_engine import LLMEngine
            except ImportError as error:
                raise ConfigError(
                    f"rollout.name=vllm with mode=sync runs vLLM in this process, which cannot import it: {error}. "
                    "Install it here (requirements/vllm.txt), or use mode=async with the python of another "
                    "environment in rollout.engine_kwargs.vllm.python."
                ) from error
            known = [field.name for field in dataclasses.fields(EngineArgs)]
            for name in arguments:
                if name not in known:
                    raise ConfigError(
                        f"rollout.engine_kwargs.vllm: this vLLM has no argument {name}.{suggest(name, known)}"
                    )
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        # A base that stays while its adapters change is kept in the CPU's memory (1), other weights are dropped (2).
        self._sleep_level = 1 if arguments.get("enable_lora") else 2
        self._adapters: Any = None
        self._vision = vision
        self._served = 0

    def generate(self, responses: Sequence[PartialResponse], aborted: Event) -> None:
        """See :meth:`EngineClient.generate`."""
        running: dict[str, PartialResponse] = {}
        with self._ended(running):
            for response in responses:
                self._add(response, running)
            while running and not aborted.is_set():
                self._step(running)

    def serve(self, requests: ServedRequests, aborted: Event) -> None:
        """See :meth:`EngineClient.serve`. Requests are added between two tokens."""
        running: dict[str, PartialResponse] = {}
        names: dict[int, str] = {}
        with self._ended(running):
            while not aborted.is_set():
                for number in requests.take_cancelled() & names.keys():
                    name = names.pop(number)
                    del running[name]
                    self._engine.abort_request([name])
                taken = dict(requests.take())
                names |= {number: self._add(response, running) for number, response in taken.items()}
                if not running:
                    return
                responses = {number: running[name] for number, name in names.items()}
                self._step(running)
                for number, response in responses.items():
                    if response.is_done:
                        del names[number]
                        requests.answer(number, response)
                    else:
                        requests.tell(number, response)
            for number, name in names.items():
                requests.answer(number, running[name])

    def _add(self, response: PartialResponse, running: dict[str, PartialResponse]) -> str:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._served += 1
        name = str(self._served)
        params = SamplingParams(**response.params, output_kind=RequestOutputKind.DELTA)
        prompt = _prompt(response.request, self._vision)
        adapters = self._adapters if response.has_adapters else None
        self._engine.add_request(name, prompt, params, lora_request=adapters)
        running[name] = response
        return name

    @contextlib.contextmanager
    def _ended(self, running: Mapping[str, PartialResponse]) -> Iterator[None]:
        """End what still runs on exit, also after an interruption: the next call must not get the outputs."""
        try:
            yield
        finally:
            if running:
                self._engine.abort_request(list(running))

    def _step(self, running: dict[str, PartialResponse]) -> None:
        for output in self._engine.step():
            response, part = running[output.request_id], output.outputs[0]
            found = part.logprobs or []
            if output.metrics is not None:  # with rollout.disable_log_stats=false
                response.num_preempted = output.metrics.num_preemptions
            log_probs = [entry[token].logprob for token, entry in zip(part.token_ids, found, strict=True)]
            if response.take(part.token_ids, log_probs, part.finish_reason):
                del running[output.request_id]
                if part.finish_reason is None:  # ended by a stop text, which vLLM does not detect
                    self._engine.abort_request([output.request_id])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """See :meth:`EngineClient.load_weights`. Nothing is sent, so ``bucket_bytes`` is not used."""
        sent: dict[str, str] = {}
        arrived: dict[str, str] = {}
        failed: list[RolloutError] = []
        size = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal size
            try:
                for key, tensor in weights:
                    size += tensor.nbytes
                    sent[key] = str(checksum(tensor))
                    yield key, tensor
            except RolloutError as error:  # vLLM must finish a begun update, or it cannot start another
                failed.append(error)

        worker_of(self._engine).reload_weights(weights_iterator=with_checksums(counted(), arrived))
        if failed:
            raise failed[0]
        check_arrival(sent, arrived, "vLLM (in this process)")
        self._reset_cache()
        return size

    def load_adapters(self, adapters: Mapping[str, Tensor]) -> int:
        """See :meth:`EngineClient.load_adapters`. vLLM reads them from a file, in shared memory if it can be."""
        from vllm.lora.request import LoRARequest

        folder, tensors = write_adapters(adapters, [path for path in _FOLDERS if os.access(path, os.W_OK)])
        try:
            self._engine.add_lora(LoRARequest(ADAPTER, ADAPTER_ID, str(folder), load_inplace=True))
            self._adapters = LoRARequest(ADAPTER, ADAPTER_ID, str(folder))
            arrived: dict[str, str] = {}
            for _ in with_checksums(weights_in_files([str(folder / ADAPTER_FILE)]), arrived):
                pass
        finally:
            shutil.rmtree(folder)
        check_arrival({name: str(checksum(tensor)) for name, tensor in tensors.items()}, arrived, "vLLM")
        self._reset_cache()
        return sum(tensor.nbytes for tensor in tensors.values())

    def _reset_cache(self) -> None:
        if self._vision is not None:  # features of images that were computed by the previous weights
            self._engine.reset_encoder_cache()
        if not self._engine.reset_prefix_cache():
            raise RolloutError("vLLM kept its prefix cache over an update of the weights: it still serves requests.")

    def sleep(self, parts: Sequence[str]) -> None:
        """Release the memory of weights and cache, whatever the parts: vLLM cannot release them separately."""
        self._engine.sleep(level=self._sleep_level)

    def wake(self, parts: Sequence[str]) -> None:
        """See :meth:`EngineClient.wake`."""
        self._engine.wake_up(None if set(parts) == set(MEMORY) else list(parts))

    def statistics(self) -> Mapping[str, float]:
        """See :meth:`EngineClient.statistics`."""
        if not self._engine.log_stats:
            raise RolloutError("vLLM was started without statistics. Set rollout.prometheus.enable=true.")
        from prometheus_client import REGISTRY

        # Not by vLLM's `get_metrics`, which reads hundreds of histograms too.
        families = REGISTRY.restricted_registry(METRICS.values()).collect()
        return fields_of(((one.name, one.value) for family in families for one in family.samples), METRICS)

    def kill(self) -> None:
        """Do nothing: the engine has no process of its own, and ends with this one."""


def _prompt(request: RolloutRequest, vision: VisionConfig | None) -> dict[str, Any]:
    """Return a prompt in vLLM's own format, with the pixels of its images as the model's processor has made them."""
    ids = list(request.prompt_ids)
    placed = PlacedImages.of(request, vision)
    if placed is None:
        return {"prompt_token_ids": ids}
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    grids = placed.tensors[IMAGE_INPUTS[1]]
    pixels = placed.tensors[IMAGE_INPUTS[0]].split(grids.prod(-1).tolist())
    items = [image_item(*part) for part in zip(pixels, grids, seconds_of_each(placed.tensors), strict=True)]
    spans = [PlaceholderRange(offset=span.start, length=len(span.places)) for span in placed.spans]
    return {
        "type": "multimodal",
        "prompt_token_ids": ids,
        "mm_kwargs": MultiModalKwargsItems(placed.by_modality(items)),
        "mm_hashes": placed.by_modality([digest.hex() for digest in placed.digests]),
        "mm_placeholders": placed.by_modality(spans),
    }


def worker_of(engine: Any) -> Any:
    """Return the worker of an ``LLMEngine`` in this process, through private attributes of vLLM 0.32."""
    # vLLM's public call for new weights (``collective_rpc("reload_weights", ...)``) reads them from files only.
    return engine.engine_core.engine_core.model_executor.driver_worker.worker


@contextlib.contextmanager
def _undisturbed(variables: Mapping[str, str]) -> Iterator[None]:
    """Restore the random state, number of threads and environment variables that the start of vLLM changes.

    ``variables`` are added to the environment, unless the user has set them, and remain.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    environment, set_num_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
