"""Client of vLLM's API server."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError, EngineLostError, RolloutError
from verl.vision.families import VisionConfig
from verl.workers.rollout.client import (
    ENGINE_SIDE,
    MEMORY,
    EngineClient,
    PartialResponse,
    PendingRequests,
    ask_each,
    start_node,
)
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.engine_process import LOOPBACK, EngineProcess
from verl.workers.rollout.engine_side.verl_engine import checksum
from verl.workers.rollout.http_client import HttpClient, refusals
from verl.workers.rollout.image_files import ImageFiles
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.placed_images import PlacedImages
from verl.workers.rollout.scoring import (
    ScoreRequest,
    ScoreRule,
    TokenScores,
    by_temperature,
    finite_or_not,
    scores_of_prompt,
)
from verl.workers.rollout.vllm_rollout.settings import (
    ADAPTER_ID,
    METRICS,
    command_line,
    machine_arguments,
    process_environment,
)
from verl.workers.rollout.weights import ADAPTER, SharedPart, check_arrival, write_adapters

_GENERATE = "/inference/v1/generate"
_ROUTES = ("--tokens-only",)
# The route for tokens, with the tokenizer that vLLM starts no model with images without; it reads images from files.
_ROUTES_WITH_IMAGES = ("--enable-scale-out", "--middleware", "verl_vllm.ReadImages")
_ABORT_ALL: tuple[str, object] = ("/abort_requests", {})
_UNKNOWN_ARGUMENTS = "unrecognized arguments:"
# vLLM refuses to drop its prefix cache while blocks of ended requests are still in use, for some steps.
_RESET_WITHIN_S = 10.0


class VLLMClient(EngineClient):
    """vLLM's API server in a separate process.

    Raises:
        ConfigError: vLLM is not installed there, or has no argument of a given name.
        RolloutError: the server does not start.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        device: torch.device,
        launch: Launch,
        devices: str | None = None,
        vision: VisionConfig | None = None,
        machines: EngineMachines | None = None,
    ) -> None:
        # A base that stays while its adapters change is kept in the CPU's memory (1), other weights are dropped (2).
        self._sleep_level = 1 if arguments.get("enable_lora") else 2
        self._knows_adapters = False
        self._rule = ScoreRule()
        copies = int(str(arguments.get("data_parallel_size", 1)))
        self._has_copies = copies > 1
        self._nodes_of_copy = 1 if machines is None else max(1, machines.placement.nodes // copies)
        environment = process_environment(device, machines)

        def command(port: int) -> list[str]:
            return [
                *(launch.python, "-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK, "--port", str(port)),
                *(_ROUTES if vision is None else _ROUTES_WITH_IMAGES),
                "--disable-uvicorn-access-log",
                *("--middleware", "verl_vllm.RequireToken"),
                *command_line(dict(arguments) | machine_arguments(machines)),
            ]

        watch = None if machines is None else machines.watch
        try:
            # The routes for weights, sleep and abort exist in development mode only.
            super().__init__("vllm", command, environment | {"VLLM_SERVER_DEV_MODE": "1"}, launch, devices, watch)
        except RolloutError as error:
            raise _explain(error, launch.python) from None
        self._vision = vision
        folders = (self.server.memory_folder, self.server.folder)
        self._images, self._folders = ImageFiles(folders), folders

    def generate(self, responses: Sequence[PartialResponse], aborted: Event) -> None:
        """See :meth:`EngineClient.generate`. With stop texts, tokens are streamed so that work ends at a stop text."""
        self._follow(ScoreRule())

        def take(index: int, answer: object) -> bool:
            return self.take(responses[index], answer)

        if any(response.is_end is not None for response in responses):
            streamed = [self._body(response, stream=True) for response in responses]
            self.server.stream_many(_GENERATE, streamed, take, cancelled=aborted)
        else:
            bodies = [self._body(response) for response in responses]
            self.server.post_many(_GENERATE, bodies, cancelled=aborted, cancel=_ABORT_ALL, take=take)

    def serve(self, requests: PendingRequests, aborted: Event) -> None:
        """See :meth:`EngineClient.serve`. vLLM drops a request whose connection is closed."""
        self._follow(ScoreRule())

        def work(http: HttpClient) -> Coroutine[object, object, None]:
            async def ask(request_id: int, response: PartialResponse) -> None:
                def take(answer: object) -> bool:
                    is_done = self.take(response, answer)
                    if not is_done:
                        requests.answer_part(request_id, response)
                    return is_done

                streams = response.is_end is not None or response.request.streams
                with refusals(), self._body(response, streams) as body:
                    if streams:
                        await http.stream(_GENERATE, body, take, aborted)
                    else:
                        self.take(response, await http.request("POST", _GENERATE, body))

            def abort_all() -> Coroutine[object, object, object]:
                return http.request("POST", *_ABORT_ALL, is_work=False)

            return ask_each(requests, ask, aborted, abort_all=abort_all)

        self.server.run(work)

    def score(
        self,
        requests: Mapping[int, ScoreRequest],
        take: Callable[[int, TokenScores], object],
        *,
        unknown_ids: Sequence[int] = (),
        has_adapters: bool = False,
    ) -> None:
        """See :meth:`EngineClient.score`. vLLM computes a prompt's log-probs anew, whatever its prefix cache holds."""
        for temperature, group in by_temperature(requests):
            self._follow(ScoreRule(temperature, tuple(unknown_ids)))

            def take_answer(position: int, answer: Any, indices: Sequence[int] = list(group)) -> None:
                take(indices[position], scores_of(requests[indices[position]], answer))

            bodies = [
                self._body(PartialResponse(request.as_prompt, params_of(request), has_adapters=has_adapters))
                for request in group.values()
            ]
            self.server.post_many(_GENERATE, bodies, take=take_answer)

    def _follow(self, rule: ScoreRule) -> None:
        """Set the rule by which vLLM's workers score prompts, which in vLLM itself have no temperature."""
        if rule != self._rule:
            self._call_workers("follow_rule", rule.temperature, list(rule.unknown_ids))
            self._rule = rule

    @contextlib.contextmanager
    def _body(self, response: PartialResponse, stream: bool = False) -> Iterator[dict[str, object]]:
        """Return a request in the server's format; the files of its images are there in the context."""
        request = response.request
        body: dict[str, object] = {"token_ids": request.prompt_ids, "sampling_params": response.params}
        if stream:
            body["stream"] = True
        if response.has_adapters:
            body["model"] = ADAPTER
        images = PlacedImages.from_request(request, self._vision)
        if images is None:
            yield body
            return
        with self._images.provide(images) as files:
            body["features"] = {
                "mm_hashes": images.by_modality([digest.hex() for digest in images.digests]),
                "mm_placeholders": images.by_modality(
                    [{"offset": span.start, "length": len(span.places)} for span in images.spans]
                ),
                "kwargs_data": images.by_modality(files),  # read by verl_vllm.ReadImages
            }
            yield body

    def take(self, response: PartialResponse, answer: Any) -> bool:
        """Add an answer, or an event of a streamed one, to its response; return whether the response is done."""
        if "error" in answer:
            raise RolloutError(f"vLLM gave up a request: {answer['error']}")
        if not answer["choices"]:
            return False
        choice = answer["choices"][0]
        reported = (choice["logprobs"] or {}).get("content") or []
        log_probs = [finite_or_not(entry["logprob"]) for entry in reported]
        kept_ids: list[set[int]] = []
        # vLLM reports probability 0 for those of the most likely tokens that sampling excluded.
        if response.request.returns_kept_ids:
            kept_ids = [
                {top["token_id"] for top in entry["top_logprobs"] if finite_or_not(top["logprob"]) > -math.inf}
                for entry in reported
            ]
        return response.take(choice["token_ids"] or [], log_probs, choice["finish_reason"], kept_ids)

    def weights_devices(self) -> Sequence[str | None]:
        """See :meth:`EngineClient.weights_devices`."""
        return self._call_workers("weights_device")

    def load_weights(self, parts: Iterable[SharedPart]) -> int:
        """See :meth:`EngineClient.load_weights`."""
        size, is_lost = 0, False
        # Copies that share experts compute without requests too, while one of them has some or had them just now.
        pauses = self._has_copies and not self.server.get("/is_paused")["is_paused"]
        if pauses:
            self.server.post("/pause")
        try:
            for index, part in enumerate(parts):
                description = part.description()
                if self._has_copies:
                    description["checksums"] = dict(part.checksums)
                loaded = self._call_workers("load_weights_part", description, index == 0)
                local_ranks = len(loaded) // self._nodes_of_copy
                for worker_index, worker in enumerate(loaded):
                    share = part.share(worker_index % local_ranks, local_ranks)
                    check_arrival(share, worker["checksums"], f"vLLM (worker {worker_index})")
                size += part.nbytes
        except EngineLostError:
            is_lost = True
            raise
        finally:
            if not is_lost:  # vLLM must finish a begun update, or it cannot begin another
                try:
                    self._call_workers("end_weights")
                finally:
                    if pauses:
                        self.server.post("/resume")
        self._reset_cache()
        return size

    def load_adapters(self, adapters: Mapping[str, Tensor]) -> int:
        """See :meth:`EngineClient.load_adapters`."""
        folder, tensors = write_adapters(adapters, self._folders)
        sent = {name: str(checksum(tensor)) for name, tensor in tensors.items()}
        try:
            if not self._knows_adapters:  # the server's front end must know the name; the workers load them below
                self.server.post("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)})
                self._knows_adapters = True
            for worker_index, worker in enumerate(
                self._call_workers("load_adapters", ADAPTER, ADAPTER_ID, str(folder))
            ):
                check_arrival(sent, worker["checksums"], f"vLLM (worker {worker_index})")
        finally:
            shutil.rmtree(folder)
        self._reset_cache()
        return sum(tensor.nbytes for tensor in tensors.values())

    def _reset_cache(self) -> None:
        if self._vision is not None:  # features of images that were computed by the previous weights
            self.server.post("/reset_encoder_cache")
        deadline = time.monotonic() + _RESET_WITHIN_S
        while not self.server.post("/reset_prefix_cache")["success"]:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"vLLM kept its prefix cache over an update of the weights for {_RESET_WITHIN_S} s: it still "
                    "serves requests."
                )
            time.sleep(0.05)

    def _call_workers(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of ``verl_vllm.WeightLoader`` in each of vLLM's workers."""
        return self.server.post("/collective_rpc", {"method": method, "args": arguments})["results"]

    metrics = METRICS

    def sleep(self, parts: Sequence[str]) -> None:
        """Release the memory of weights and cache, whatever the parts: vLLM cannot release them separately."""
        self.server.post(f"/sleep?level={self._sleep_level}")

    def wake(self, parts: Sequence[str]) -> None:
        """See :meth:`EngineClient.wake`."""
        tags = "" if set(parts) == set(MEMORY) else "?" + "&".join(f"tags={part}" for part in parts)
        self.server.post(f"/wake_up{tags}")


def start_vllm_node(
    arguments: Mapping[str, object],
    device: torch.device,
    launch: Launch,
    devices: str | None,
    machines: EngineMachines,
) -> EngineProcess:
    """Start the workers of an engine on this machine, whose server is on another; arguments as for VLLMClient."""
    flags = command_line(dict(arguments) | machine_arguments(machines))
    command = [launch.python, str(ENGINE_SIDE / "verl_vllm_node.py"), *flags]
    return start_node("vllm", lambda port: command, process_environment(device, machines), launch, devices)


def params_of(request: ScoreRequest) -> dict[str, object]:
    """Sampling parameters of vLLM that ask for the log-probs of a prompt; vLLM must draw one token."""
    return {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "prompt_logprobs": request.top_k,
        "detokenize": False,
    }


def scores_of(request: ScoreRequest, answer: Mapping[str, Any]) -> TokenScores:
    """Read the scores of a request from vLLM's answer.

    Raises:
        RolloutError: vLLM gave up the request, or its log-probs are incomplete or not finite.
    """
    if "error" in answer:
        raise RolloutError(f"vLLM gave up a request: {answer['error']}")
    return scores_of_prompt(request, answer.get("prompt_logprobs") or [], "vLLM")


def _explain(error: RolloutError, python: str) -> RolloutError | ConfigError:
    """Turn a failed start into a ConfigError if the log shows a wrong setting; otherwise return the error itself."""
    text = str(error)
    if _UNKNOWN_ARGUMENTS in text:
        flags = text.split(_UNKNOWN_ARGUMENTS)[1].splitlines()[0].split()
        names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags if flag[:2] == "--"]
        return ConfigError(
            f"rollout.engine_kwargs.vllm: this vLLM has no argument {', '.join(names)}. `{python} -m "
            "vllm.entrypoints.openai.api_server --help=all` lists what it has."
        )
    if "No module named" in text and "vllm" in text:
        return ConfigError(
            f"rollout.name=vllm: vLLM is not installed for {python}. Make an environment with it (make .venv-vllm, or "
            "pip install -r requirements/vllm.txt) and name its python in rollout.engine_kwargs.vllm.python."
        )
    return error
