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

from tests.support.waiting import eventually
from verl.config import PrometheusConfig
from verl.testing.rollout_conformance import PROMPTS, EngineUnderTest, greedy
from verl.workers.rollout import base, remote
from verl.workers.rollout.client import EngineClient, PartialResponse, ServedRequests
from verl.workers.rollout.vllm_rollout import VLLMRollout
from verl.workers.rollout.vllm_rollout.client import VLLMServer

REQUIRED = os.environ.get("VERL_TEST_VLLM") == "1"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not REQUIRED and not HAS_VLLM, reason="vLLM is not installed here: make test-vllm")

NO_SLEEP_ON_A_CPU = "vLLM has no sleep on a CPU: sleep forgets the version of the weights and frees nothing"
KWARGS = {"kv_cache_memory_bytes": 64 * 2**20}
SERVER_SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 1024}
"""Of every server: they take long to start, and what sizes do to vLLM's scheduler is seen inside of the process."""


class SharedEngine:
    """An engine of the pool, and whose weights it holds now."""

    def __init__(self, key: str, engine: EngineClient) -> None:
        self.key = key
        self.engine = engine
        self.owner: Lease | None = None


POOL: dict[str, SharedEngine] = {}


class Lease(EngineClient):
    """The engine as one rollout sees it: its own weights are put back when another used it in between."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        self.weights = {}
        self.shared.owner = None
        self.weights = {key: tensor.clone() for key, tensor in weights}
        size = self.shared.engine.load_weights(iter(self.weights.items()), bucket_bytes)
        self.shared.owner = self
        return size

    def generate(self, responses: Sequence[PartialResponse], aborted: threading.Event) -> None:
        self._take_over()
        self.shared.engine.generate(responses, aborted)

    def serve(self, requests: ServedRequests, aborted: threading.Event) -> None:
        self._take_over()
        self.shared.engine.serve(requests, aborted)

    def _take_over(self) -> None:
        if self.shared.owner is not self:
            self.load_weights(list(self.weights.items()), 2**31)

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
        if self.config.mode == "async":
            self._arguments |= SERVER_SIZES
        arguments = self._arguments
        model = (Path(arguments["model"]) / "config.json").read_text()
        key = json.dumps([self.config.mode, model, arguments | {"model": ""}], sort_keys=True)
        if key not in POOL:
            POOL[key] = SharedEngine(key, super()._start())
        return Lease(POOL[key])


@dataclasses.dataclass(frozen=True)
class PooledUnderTest(EngineUnderTest):
    def engine_class(self) -> type[PooledVLLM]:
        return PooledVLLM


def under_test(folder: Path, mode: str, **kwargs: Any) -> PooledUnderTest:
    """vLLM with the engines of the pool; ``kwargs`` are further ones of ``engine_kwargs.vllm``."""
    settings = {
        "mode": mode,
        "tensor_model_parallel_size": 1,
        "enforce_eager": True,
        "prometheus": PrometheusConfig(enable=True),
        "engine_kwargs": {"vllm": KWARGS | kwargs},
    }
    return PooledUnderTest(
        "vllm",
        folder,
        families=("qwen3", "qwen2", "llama") if mode == "sync" else ("qwen3",),
        settings=settings,
        keeps_memory=NO_SLEEP_ON_A_CPU,
        streams=True,
        counts_preemptions=mode == "sync",
    )


def check_states(engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says of its work: the tokens that were asked and drawn, and requests while they run."""
    monkeypatch.setattr(base, "_TELL_EVERY_S", 0)
    monkeypatch.setattr(remote, "_LOOK_S", 0.001)
    running = engine.ready(response_length=200, max_num_seqs=4)
    running.generate([greedy(PROMPTS[0])])  # so that nothing of it is counted later
    before, told = running.state(), []
    running.on_state = told.append
    outputs = running.generate([greedy(prompt, max_tokens=200) for prompt in PROMPTS])

    def told_all() -> bool:  # vLLM's server may answer before it has counted
        after = running.state()
        assert (after.requests_running, after.requests_waiting, after.memory_use) == (0, 0, 0)
        counts = ("prompt_tokens", "response_tokens", "preemptions", "prefix_hit_tokens")
        found = {name: getattr(after, name) - getattr(before, name) for name in counts}
        drawn = sum(len(output.token_ids) for output in outputs)
        asked = sum(map(len, PROMPTS))
        return found == {"prompt_tokens": asked, "response_tokens": drawn, "preemptions": 0, "prefix_hit_tokens": 0}

    eventually(told_all, lambda: f"the tokens of {running.state()}, not of {before}")
    assert {state.weight_version for state in told} == {0}
    assert 0 < max(state.requests_running for state in told) <= len(PROMPTS)
    assert 0 < max(state.memory_use for state in told) < 1
    assert any(before.response_tokens < state.response_tokens < running.state().response_tokens for state in told)


def names_of(checks: Iterable[Callable[[EngineUnderTest], None]]) -> dict[Callable[[EngineUnderTest], None], str]:
    """How tests call the checks of the contract."""
    return {check: check.__name__.removeprefix("check_") for check in checks}


def end_servers() -> None:
    """End the servers of the pool."""
    for key, shared in list(POOL.items()):
        if isinstance(shared.engine, VLLMServer):
            del POOL[key]
            shared.engine.close()


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """The engines that are started inside end with it."""
    if not HAS_VLLM:
        pytest.fail("VERL_TEST_VLLM=1, but vLLM cannot be imported here")
    try:
        yield
    finally:
        end_servers()
        POOL.clear()
