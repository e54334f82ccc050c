"""The real vLLM for tests: its engines start once for each set of arguments, and the checks of a file share them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from verl.config import PrometheusConfig
from verl.testing.rollout_conformance import EngineUnderTest
from verl.workers.rollout.client import EngineClient, PartialResponse, PendingRequests
from verl.workers.rollout.engine_side.verl_engine import weights_in_part
from verl.workers.rollout.scoring import ScoreRequest, TokenScores
from verl.workers.rollout.vllm_rollout import VLLMRollout
from verl.workers.rollout.weights import FileBuffer, SharedPart

REQUIRED = os.environ.get("VERL_TEST_VLLM") == "1"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not REQUIRED and not HAS_VLLM, reason="vLLM is not installed here: make test-vllm")

NO_SLEEP_ON_A_CPU = "vLLM has no sleep on a CPU: sleep forgets the version of the weights and frees nothing"
KWARGS = {"kv_cache_memory_bytes": 64 * 2**20}
SHARED = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 1024, "seed": 0}
"""Of every server, so that all checks share one: a server takes long to start. Requests have seeds of their own."""


class SharedEngine:
    """A server of the pool, and whose weights it holds now."""

    def __init__(self, key: str, engine: EngineClient) -> None:
        self.key = key
        self.engine = engine
        self.owner: Lease | None = None


POOL: dict[str, SharedEngine] = {}


class Lease(EngineClient):
    """The engine as one rollout sees it: its own weights are put back when another used it in between."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared  # no `super().__init__`, which would start another server
        self.weights: dict[str, Tensor] = {}

    def weights_devices(self) -> Sequence[str | None]:
        return self.shared.engine.weights_devices()

    def load_weights(self, parts: Iterable[SharedPart]) -> int:
        weights: dict[str, Tensor] = {}

        def kept() -> Iterator[SharedPart]:
            for part in parts:
                weights.update((name, tensor.clone()) for name, tensor in weights_in_part(part.description()))
                yield part

        self.weights, self.shared.owner = {}, None
        size = self.shared.engine.load_weights(kept())
        self.weights, self.shared.owner = weights, self
        return size

    def generate(self, responses: Sequence[PartialResponse], aborted: threading.Event) -> None:
        self._take_over()
        self.shared.engine.generate(responses, aborted)

    def serve(self, requests: PendingRequests, aborted: threading.Event) -> None:
        self._take_over()
        self.shared.engine.serve(requests, aborted)

    def score(
        self, requests: Mapping[int, ScoreRequest], take: Callable[[int, TokenScores], object], **settings: Any
    ) -> None:
        self._take_over()
        self.shared.engine.score(requests, take, **settings)

    def _take_over(self) -> None:
        if self.shared.owner is not self:
            self.load_weights(FileBuffer().parts(iter(self.weights.items()), 2**31))

    def load_adapters(self, adapters: Mapping[str, Tensor]) -> int:
        raise NotImplementedError("the checks of the contract have no adapters")

    def sleep(self, parts: Sequence[str]) -> None:
        self.weights = {}

    def wake(self, parts: Sequence[str]) -> None:
        pass

    def statistics(self) -> Mapping[str, float]:
        return self.shared.engine.statistics()

    def kill(self) -> Path | None:
        """The engine is lost for everyone; whoever asks next starts another."""
        POOL.pop(self.shared.key, None)
        return self.shared.engine.kill()


class PooledVLLM(VLLMRollout):
    """The engine itself, but for starting a vLLM of its own where one with the same arguments runs."""

    def _start(self) -> EngineClient:
        self._arguments |= SHARED
        model = (Path(self._arguments["model"]) / "config.json").read_text()
        key = json.dumps([model, self._arguments | {"model": ""}], sort_keys=True)
        if key not in POOL:
            POOL[key] = SharedEngine(key, super()._start())
        return Lease(POOL[key])


@dataclasses.dataclass(frozen=True)
class PooledUnderTest(EngineUnderTest):
    def engine_class(self) -> type[PooledVLLM]:
        return PooledVLLM


def under_test(folder: Path, families: tuple[str, ...] = ("qwen3",), **kwargs: Any) -> PooledUnderTest:
    """vLLM with the servers of the pool; ``kwargs`` are further ones of ``engine_kwargs.vllm``."""
    settings = {
        "tensor_model_parallel_size": 1,
        "enforce_eager": True,
        "prometheus": PrometheusConfig(enable=True),
        "engine_kwargs": {"vllm": KWARGS | kwargs},
    }
    return PooledUnderTest(
        "vllm",
        folder,
        families=families,
        settings=settings,
        keeps_memory=NO_SLEEP_ON_A_CPU,
        streams=True,
        draws_anew="vLLM gives each request a generator, which begins with its seed",
    )


def end_servers() -> None:
    """End the servers of the pool."""
    while POOL:
        POOL.popitem()[1].engine.close()


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """The servers that are started inside end with it."""
    if not HAS_VLLM:
        pytest.fail("VERL_TEST_VLLM=1, but vLLM cannot be imported here")
    try:
        yield
    finally:
        end_servers()
