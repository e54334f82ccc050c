"""vLLM, the real one, against the contract: in this process and as a server.

Run by ``make test-vllm``, which makes an environment with vLLM; skipped where vLLM cannot be imported.
Starting an engine takes seconds, so the checks share engines: one for each set of arguments. In this process every
check runs; of the server only those in which the way over HTTP matters, ``make test-vllm-slow`` runs the others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rollout.conformance import (
    CHECKS,
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle_greedy,
    oracle_log_probs,
    weights_of,
)
from tests.rollout.losses import check_a_lost_process
from verl.errors import ConfigError, RolloutError
from verl.workers.rollout.vllm.job import Engine
from verl.workers.rollout.vllm.served import ServedEngine
from verl.workers.rollout.vllm.settings import engine_arguments
from verl.workers.rollout.vllm_rollout import VLLMRollout

REQUIRED = os.environ.get("VERL_TEST_VLLM") == "1"
pytestmark = pytest.mark.skipif(
    not REQUIRED and importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)

NO_SLEEP_ON_A_CPU = "vLLM has no sleep on a CPU: sleep forgets the version of the weights and frees nothing"
KWARGS = {"kv_cache_memory_bytes": 64 * 2**20}


class SharedEngine:
    """An engine of the pool, and whose weights it holds now."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.owner: Lease | None = None


POOL: dict[str, SharedEngine] = {}


class Lease:
    """The engine as one rollout sees it: its own weights are put back when another used it in between."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], name: str) -> int:
        self.weights = {}
        self.shared.owner = None
        self.weights = {key: tensor.clone() for key, tensor in weights}
        size = self.shared.engine.load_weights(iter(self.weights.items()), name)
        self.shared.owner = self
        return size

    def generate(self, jobs: list, aborted: threading.Event) -> None:
        if self.shared.owner is not self:
            self.load_weights(list(self.weights.items()), "again")
        self.shared.engine.generate(jobs, aborted)

    def sleep(self) -> None:
        self.weights = {}

    def wake(self, tags: list[str] | None) -> None:
        pass


class PooledVLLM(VLLMRollout):
    """The engine itself, but for starting a vLLM of its own where one with the same arguments runs."""

    def _start(self, arguments: dict[str, Any], devices: str | None) -> Any:
        if self.config.mode == "async":
            # Servers take long to start; what sizes do to vLLM's scheduler is seen in this process.
            arguments = arguments | {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 1024}
        model = (Path(arguments["model"]) / "config.json").read_text()
        key = json.dumps([self.config.mode, model, arguments | {"model": ""}], sort_keys=True)
        if key not in POOL:
            POOL[key] = SharedEngine(super()._start(arguments, devices))
        return Lease(POOL[key])


@dataclasses.dataclass(frozen=True)
class PooledUnderTest(EngineUnderTest):
    def engine_class(self) -> type[PooledVLLM]:
        return PooledVLLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the models of all checks; the engines end with them."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("VERL_TEST_VLLM=1, but vLLM cannot be imported here")
    yield tmp_path_factory.mktemp("vllm")
    for shared in POOL.values():
        if isinstance(shared.engine, ServedEngine):
            shared.engine.close()
    POOL.clear()


def under_test(folder: Path, mode: str) -> PooledUnderTest:
    settings = {"mode": mode, "tensor_model_parallel_size": 1, "enforce_eager": True, "engine_kwargs": {"vllm": KWARGS}}
    families = ("qwen3", "qwen2", "llama") if mode == "sync" else ("qwen3",)
    return PooledUnderTest("vllm", folder, families, settings=settings, keeps_memory=NO_SLEEP_ON_A_CPU)


OVER_HTTP = {
    "a_stop_text_ends_at_the_token_that_completes_it",  # streams
    "abort_gives_back_what_there_is",
    "an_end_token_ends_the_response_and_is_kept",
    "an_update_shows_in_prompts_that_were_just_served",
    "log_probs_are_of_the_distribution_that_is_drawn_from",
    "the_columns_by_hand",
    "weights_that_do_not_fit_are_named",
    "without_weights_nothing_is_generated",
}
"""Checks of the server that are not slow."""


def contract() -> Iterator[Any]:
    """Every check in both modes."""
    names = {check: check.__name__.removeprefix("check_") for check in CHECKS}
    assert set(names.values()) >= OVER_HTTP
    for mode in ("sync", "async"):
        for check, name in names.items():
            slow = mode == "async" and name not in OVER_HTTP
            yield pytest.param(mode, check, id=f"{mode}-{name}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("mode", "check"), contract())
def test_contract(mode: str, check: Callable[[EngineUnderTest], None], folder: Path) -> None:
    check(under_test(folder, mode))


# ---- the server


def test_the_server_demands_its_token(folder: Path) -> None:
    running = under_test(folder, "async").ready()
    server = running._engine.shared.engine.server
    for path in ("/collective_rpc", "/inference/v1/generate", "/v1/models"):
        for headers in ({}, {"Authorization": "Bearer guess"}):
            asked = urllib.request.Request(server.base_url + path, data=b"{}", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(asked, timeout=10)


def test_a_weight_that_arrives_changed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = under_test(folder, "async").ready()
    engine = running._engine.shared.engine
    load = engine._load_files

    def damage(paths: list[Path], sent: dict[str, str]) -> None:
        data = bytearray(paths[0].read_bytes())
        data[-1] ^= 1  # the last byte belongs to the last tensor of the file
        paths[0].write_bytes(data)
        load(paths, sent)

    monkeypatch.setattr(engine, "_load_files", damage)
    with pytest.raises(RolloutError, match=r"1 of 25 weights did not arrive in vLLM .* as they were sent: "):
        running.load_weights(weights_of(), version=1)
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([greedy(PROMPTS[0])])
    monkeypatch.undo()
    running.load_weights(weights_of(), version=2)
    assert running.generate([greedy(PROMPTS[0])])[0].token_ids == oracle_greedy(PROMPTS[0], 12)
    assert not list(engine.server.memory_folder.iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_argument_that_vllm_does_not_have_is_named(mode: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="this vLLM has no argument max_num_sequences"):
        under_test(folder, mode).build(engine_kwargs={"vllm": {"max_num_sequences": 3}})


def test_what_another_setting_decides_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm sets max_num_seqs"):
        under_test(folder, "sync").build(engine_kwargs={"vllm": {"max_num_seqs": 3}})


def test_one_rank_cannot_share_an_engine(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 does not divide the 1 rank"):
        under_test(folder, "async").build(tensor_model_parallel_size=2)


def test_two_tensor_parallel_workers_compute_what_one_does(folder: Path) -> None:
    """Both get all weights, by checksum; the greedy tokens and their log-probs are the oracle's."""
    rollout = under_test(folder, "async").build()
    arguments = engine_arguments(rollout.config, rollout.model_config, 64, torch.device("cpu"))
    engine = ServedEngine(sys.executable, arguments | {"tensor_parallel_size": 2}, torch.device("cpu"))
    try:
        for seed in (0, 1):
            engine.load_weights(weights_of(seed=seed), f"seed-{seed}")
            jobs = [rollout._job(greedy(prompt)) for prompt in PROMPTS]
            engine.generate(jobs, threading.Event())
            for prompt, job in zip(PROMPTS, jobs, strict=True):
                assert job.token_ids == oracle_greedy(prompt, 12, seed=seed)
                expected = oracle_log_probs(prompt, job.token_ids, 1.0, "qwen3", seed)
                torch.testing.assert_close(torch.tensor(job.log_probs), expected, atol=1e-5, rtol=1e-5)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("number", "patience"),
    [(signal.SIGKILL, {}), pytest.param(signal.SIGSTOP, {"hang_timeout_s": 3}, marks=pytest.mark.slow)],
)
def test_a_core_that_dies_or_hangs_is_replaced(number: int, patience: dict[str, Any], folder: Path) -> None:
    """The process that computes, below the server: the same responses, by another server that was given the weights."""
    settings = under_test(folder, "async").settings | {"engine_kwargs": {"vllm": KWARGS | patience}}
    rollout = check_a_lost_process(EngineUnderTest("vllm", folder, settings=settings), "EngineCore", number)
    rollout._end_engine()
