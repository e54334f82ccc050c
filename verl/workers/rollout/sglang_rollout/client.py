"""Client of SGLang's HTTP server."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import pickle
import shutil
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.workers.rollout.client import (
    ENGINE_SIDE,
    EngineClient,
    PartialResponse,
    PendingRequests,
    ask_each,
)
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.engine_side.verl_engine import ADAPTER_REPORT, checksum
from verl.workers.rollout.http_client import HttpClient, refusals
from verl.workers.rollout.image_files import ImageFiles
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.placed_images import PlacedImages
from verl.workers.rollout.scoring import ScoreRequest, ScoreRule, TokenScores, by_temperature
from verl.workers.rollout.sglang_rollout.settings import machine_arguments
from verl.workers.rollout.weights import (
    ADAPTER,
    SharedPart,
    check_arrival,
    write_adapters,
)

LOADER = "verl_sglang.load_weights"
ORDER = "verl.order"
_PASS_PARAMS = json.dumps({"callable": b"cverl_sglang\nPassParams\n.".hex()})
"""The logit processor of every request, in SGLang's format: a pickle, as hex, that names a class."""
_ABORT_ALL = ("/abort_request", {"abort_all": True})
_SCORES_PER_CALL = 2**20
"""Most log-probs that one HTTP request asks for: its answer is JSON."""
_MODEL_ALONE = "target"
"""Updates are not for the heads that propose tokens, whose report would take the place of the model's."""
_MEMORY_TAGS = {"kv_cache": ("kv_cache",), "weights": ("weights", "cuda_graph")}


class SGLangClient(EngineClient):
    """SGLang's HTTP server in a separate process, which reads new weights and images from shared memory.

    Args:
        arguments: fields of SGLang's ``ServerArgs``.
        environment: variables that SGLang needs.
        launch: interpreter and time limits of the server.
        devices: ids of the GPUs that the server may use; None leaves CUDA_VISIBLE_DEVICES as it is.
        vision: of a model with images.
        machines: of an engine that has several.
    """

    metrics: ClassVar[Mapping[str, str]] = {
        "requests_running": "sglang_num_running_reqs",
        "requests_waiting": "sglang_num_waiting_reqs",
        "memory_use": "sglang_token_usage",
        "memory_tokens": "sglang_num_used_tokens",
    }
    # Reports of its load, which SGLang makes for balancing. Unlike its metrics they are also made where
    # ``enable_metrics`` is not set, and cost a scheduler no collector.
    metrics_path = "/v1/loads?format=prometheus&include=core"

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        launch: Launch,
        device: torch.device,
        devices: str | None = None,
        vision: VisionConfig | None = None,
        machines: EngineMachines | None = None,
    ) -> None:
        self.ranks = int(arguments["tp_size"])
        self._ranks_of_machine = self.ranks // (1 if machines is None else machines.placement.nodes)
        self._vision = vision
        self._has_adapters = False
        self._rule = ScoreRule()
        command, watch = command_of(arguments, launch, machines), None if machines is None else machines.watch
        super().__init__("sglang", command, environment, launch, devices, watch)
        self._folders = (self.server.memory_folder, self.server.folder)
        self._images, self._device = ImageFiles(self._folders), device

    def generate(self, responses: Sequence[PartialResponse], aborted: Event) -> None:
        """See :meth:`EngineClient.generate`."""
        self._follow(ScoreRule())
        if responses:
            # All in one HTTP request: if they arrive one by one, SGLang's batches, and with them the rounding of
            # log-probs, differ from run to run.
            bodies = [self._request_body(responses)]
            (answers,) = self.server.post_many("/generate", bodies, cancelled=aborted, cancel=_ABORT_ALL)
            take(responses, answers or [])

    def serve(self, requests: PendingRequests, aborted: Event) -> None:
        """See :meth:`EngineClient.serve`."""
        self._follow(ScoreRule())

        def work(http: HttpClient) -> Coroutine[object, object, None]:
            names: dict[int, str] = {}

            async def ask(request_id: int, response: PartialResponse) -> None:
                names[request_id] = uuid.uuid4().hex
                try:
                    with refusals(), self._request_body([response], names[request_id]) as body:
                        take([response], await http.request("POST", "/generate", body))
                finally:
                    del names[request_id]

            async def cancel(request_id: int) -> None:
                if request_id in names:  # else it was not sent yet
                    # Without this SGLang finds out after seconds that the connection was closed.
                    await http.request("POST", "/abort_request", {"rid": names[request_id]}, is_work=False)

            def abort_all() -> Coroutine[object, object, object]:
                return http.request("POST", *_ABORT_ALL, is_work=False)

            return ask_each(requests, ask, aborted, cancel=cancel, abort_all=abort_all)

        self.server.run(work)

    def score(
        self,
        requests: Mapping[int, ScoreRequest],
        take: Callable[[int, TokenScores], object],
        *,
        unknown_ids: Sequence[int] = (),
        has_adapters: bool = False,
    ) -> None:
        """See :meth:`EngineClient.score`."""
        for temperature, group in by_temperature(requests):
            self._follow(ScoreRule(temperature, tuple(unknown_ids)))
            for indices in _calls(group):
                responses = [
                    PartialResponse(group[index].as_prompt, {"max_new_tokens": 0}, has_adapters=has_adapters)
                    for index in indices
                ]
                with self._request_body(responses) as body:
                    body |= {
                        # SGLang counts from the token whose successor is scored first.
                        "logprob_start_len": [group[index].start - 1 for index in indices],
                        "top_logprobs_num": [group[index].top_k for index in indices],
                    }
                    answers = self.server.post("/generate", body)
                for index, answer in zip(indices, answers, strict=True):
                    take(index, scores_of(group[index], answer))

    def _follow(self, rule: ScoreRule) -> None:
        """Set the rule by which SGLang scores prompts, which in SGLang itself have no temperature."""
        if rule == self._rule:
            return
        report = str(self.server.folder / "rule")
        self._call("begin_weight_update", selector=_MODEL_ALONE)
        try:
            self._load(report, rule=rule)
        finally:
            self._call("end_weight_update")
        reports_of(report, self.ranks)
        self._rule = rule

    def weights_devices(self) -> Sequence[str | None]:
        """See :meth:`EngineClient.weights_devices`."""
        report = str(self.server.folder / "devices")
        self._call("begin_weight_update", selector=_MODEL_ALONE)
        try:
            self._load(report)
        finally:
            self._call("end_weight_update")
        return [loaded["device"] for loaded in reports_of(report, self.ranks)]

    def load_weights(self, parts: Iterable[SharedPart]) -> int:
        """See :meth:`EngineClient.load_weights`."""
        size = 0
        self._call("begin_weight_update", selector=_MODEL_ALONE)
        try:
            for index, part in enumerate(parts):
                report = str(self.server.folder / f"part-{index}")
                self._load(report, part)
                for rank, loaded in enumerate(reports_of(report, self.ranks)):
                    share = part.share(rank % self._ranks_of_machine, self._ranks_of_machine)
                    check_report(part.checksums, share, loaded, rank)
                size += part.nbytes
        finally:
            self._call("end_weight_update")
        return size

    def _load(self, report: str, part: SharedPart | None = None, rule: ScoreRule | None = None) -> None:
        """Make each rank load a part of the weights or follow a rule, if there is one, and write its report."""
        what = {"part": part and part.description(), "rule": rule and dataclasses.asdict(rule)}
        order = json.dumps({"report": report, "ranks": self._ranks_of_machine, **what}).encode()
        payload = base64.b64encode(pickle.dumps([(ORDER, _Bytes(order))])).decode()
        self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=[payload] * self.ranks,
            load_format=LOADER,
            selector=_MODEL_ALONE,
            flush_cache=True,
        )

    def load_adapters(self, adapters: Mapping[str, Tensor]) -> int:
        """See :meth:`EngineClient.load_adapters`. They get a new id in SGLang, so nothing cached for the old fits."""
        folder, tensors = write_adapters(adapters, self._folders)
        sent = {name: str(checksum(tensor)) for name, tensor in tensors.items()}
        try:
            if self._has_adapters:
                self._call("unload_lora_adapter", lora_name=ADAPTER)
            self._has_adapters = False
            self._call("load_lora_adapter", lora_name=ADAPTER, lora_path=str(folder))
            self._has_adapters = True
            for rank, loaded in enumerate(reports_of(str(folder / ADAPTER_REPORT), self.ranks)):
                check_report(sent, sent, loaded, rank)
        finally:
            shutil.rmtree(folder)
        return sum(tensor.nbytes for tensor in tensors.values())

    @contextlib.contextmanager
    def _request_body(
        self, responses: Sequence[PartialResponse], name: str | None = None
    ) -> Iterator[dict[str, object]]:
        """Yield :func:`request_of` with the images of the responses, whose files exist inside the context."""
        arguments = request_of(responses, name)
        images = [PlacedImages.from_request(response.request, self._vision) for response in responses]
        with contextlib.ExitStack() as files:
            if any(images):
                arguments["image_data"] = [
                    [] if prompt_images is None else [self._image_data(prompt_images, files)]
                    for prompt_images in images
                ]
            yield arguments

    def _image_data(self, images: PlacedImages, files: contextlib.ExitStack) -> str:
        """Return the images of a prompt as ``verl_sglang`` takes them: JSON, as SGLang's server passes texts on."""
        offsets: list[tuple[int, int]] = []
        for span, (steps, _, _) in zip(images.spans, images.tensors.arrays()[IMAGE_INPUTS[1]].tolist(), strict=True):
            size = len(span.places) // steps
            offsets += [(start, start + size - 1) for start in range(span.start, span.end, size)]
        description = {
            "files": files.enter_context(self._images.provide(images)),
            "offsets": offsets,
            "mrope_positions": images.positions[1:].tolist(),
            "mrope_position_delta": images.offset,
        }
        return json.dumps(description)

    def sleep(self, parts: Sequence[str]) -> None:
        """See :meth:`EngineClient.sleep`."""
        self._call("release_memory_occupation", tags=[tag for part in parts for tag in _MEMORY_TAGS[part]])

    def wake(self, parts: Sequence[str]) -> None:
        """See :meth:`EngineClient.wake`."""
        self._call("resume_memory_occupation", tags=[tag for part in parts for tag in _MEMORY_TAGS[part]])

    def _call(self, action: str, **arguments: object) -> None:
        """Call an action of SGLang, the server's path of the same name.

        Raises:
            RolloutError: SGLang reports that it failed.
        """
        answer = self.server.post(f"/{action}", arguments)
        if answer and not answer.get("success", True):
            raise RolloutError(f"SGLang refused {action}: {answer.get('message') or answer.get('error_message', '')}")


def command_of(
    arguments: Mapping[str, Any], launch: Launch, machines: EngineMachines | None = None
) -> Callable[[int], list[str]]:
    """Return the command line of this machine's processes, for a port; arguments as for :class:`SGLangClient`."""
    script = [launch.python, str(ENGINE_SIDE / "verl_sglang_server.py")]
    encoded = json.dumps(dict(arguments) | machine_arguments(machines))
    return lambda port: [*script, str(port), encoded]


def request_of(responses: Sequence[PartialResponse], name: str | None = None) -> dict[str, object]:
    """Arguments of SGLang's ``generate`` for all responses in one call; ``name`` is for aborting a single one."""
    arguments: dict[str, object] = {} if name is None else {"rid": [name]}
    arguments |= {
        "input_ids": [list(response.request.prompt_ids) for response in responses],
        "sampling_params": [response.params for response in responses],
        "return_logprob": True,
        "custom_logit_processor": [_PASS_PARAMS] * len(responses),
    }
    if any(response.request.returns_kept_ids for response in responses):
        requests = [response.request for response in responses]
        # As many places as verl's sampler fills; see engine_side/verl_sglang.py.
        arguments["top_logprobs_num"] = [
            request.sampling.top_k if request.returns_kept_ids else 0 for request in requests
        ]
    if any(response.has_adapters for response in responses):
        arguments["lora_path"] = [ADAPTER if response.has_adapters else None for response in responses]
    return arguments


def take(responses: Sequence[PartialResponse], answers: Sequence[Mapping[str, Any]]) -> None:
    """Append SGLang's answers to their responses; no answers at all mean that the request was aborted unsent.

    Raises:
        RolloutError: the numbers of tokens and log-probs differ.
    """
    for response, answer in zip(responses, answers, strict=bool(answers)):
        tokens, meta = answer["output_ids"], answer["meta_info"]
        reported = [entry[0] for entry in meta.get("output_token_logprobs") or ()][: len(tokens)]
        if len(reported) != len(tokens):
            raise RolloutError(f"SGLang gave {len(reported)} log-probs for {len(tokens)} tokens.")
        log_probs = [_or_nan(value) for value in reported]
        response.num_preempted = meta.get("num_retractions")
        kept_ids: list[set[int]] = []
        if response.request.returns_kept_ids:  # by verl's sampler, with -1 where there is none
            reported_ids = (meta.get("output_top_logprobs") or ())[: len(tokens)]
            kept_ids = [{token for _, token, _ in entries if token >= 0} for entries in reported_ids]
        response.take(tokens, log_probs, meta["finish_reason"]["type"], kept_ids)


def _calls(requests: Mapping[int, ScoreRequest]) -> Iterator[list[int]]:
    """Divide requests among HTTP requests, in their order; yield the indices of each."""
    indices: list[int] = []
    size = 0
    for index, request in requests.items():
        request_size = len(request.scored_ids) * (request.top_k + 1)
        if indices and size + request_size > _SCORES_PER_CALL:
            yield indices
            indices, size = [], 0
        indices.append(index)
        size += request_size
    yield indices


def scores_of(request: ScoreRequest, answer: Mapping[str, Any]) -> TokenScores:
    """Read the log-probs of a prompt in SGLang's format, which begins with the token before the first scored one.

    Raises:
        RolloutError: they are incomplete, of other tokens, or not finite.
    """
    meta = answer["meta_info"]
    reported = meta["input_token_logprobs"][1:]
    ids = [token for _, token, _ in reported]
    # SGLang calls the last id of the vocabulary, and tokens of images, 0.
    are_asked = [reported_id in (0, token) for reported_id, token in zip(ids, request.scored_ids, strict=False)]
    if len(ids) != len(request.scored_ids) or not all(are_asked):
        raise RolloutError(f"SGLang scored tokens {ids}, and was asked for {request.scored_ids}.")
    if request.top_k:
        top = [[(token, _or_nan(value)) for value, token, _ in entries] for entries in meta["input_top_logprobs"][1:]]
    else:
        top = [[] for _ in reported]
    return TokenScores.from_report(request, [_or_nan(value) for value, _, _ in reported], top, "SGLang")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def reports_of(path: str, ranks: int) -> list[dict[str, Any]]:
    """Read what each rank reports of a call of ``verl_sglang.load_weights``; RolloutError if there is no report."""
    try:
        reports = json.loads(Path(f"{path}.json").read_text())
    except FileNotFoundError:
        reports = []
    if len(reports) != ranks:
        raise RolloutError(
            f"{len(reports)} of SGLang's {ranks} ranks reported what they loaded, so it does not load with verl's "
            "functions: this version of SGLang is not supported."
        )
    return reports


def check_report(sent: Mapping[str, str], share: Mapping[str, str], report: Mapping[str, Any], rank: int) -> None:
    """Compare checksums with the report of ``verl_sglang.load_weights`` on one rank.

    Args:
        sent: of all weights that were sent.
        share: of those that this rank verifies on arrival.
        report: of the rank.
        rank: of SGLang's process.

    Raises:
        RolloutError: SGLang could not load the weights, or a checksum differs.
    """
    if report["problem"]:
        raise RolloutError(f"SGLang (rank {rank}) cannot load the new weights: {report['problem']}")
    if not report["sampler"]:
        raise RolloutError("SGLang does not use verl's sampler: this version of SGLang is not supported.")
    check_arrival(share, report["arrived"], f"SGLang (rank {rank})")
    held = {name: value for name, value in report["held"].items() if name in sent}
    check_arrival({name: sent[name] for name in held}, held, f"the model of SGLang (rank {rank})")


class _Bytes:
    """Bytes that are unpickled as a tensor, by one of the few functions that SGLang allows in a pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[object, tuple[list[int]]]:
        return torch.ByteTensor, (list(self._data),)
