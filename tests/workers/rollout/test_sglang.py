"""The SGLang engine against the contract. Needs SGLang: ``make test-sglang``."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.waiting import eventually
from tests.workers.rollout.damage import damaged, handles_for_strangers
from tests.workers.rollout.losses import check_a_lost_process
from verl.errors import ConfigError, RolloutError
from verl.testing.rollout_conformance import (
    CHECKS,
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle_greedy,
    request,
    tokens_of,
    weights_of,
)
from verl.testing.rollout_conformance.scores import assert_of_the_model
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.workers.rollout import base, remote
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.client import EngineClient
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.scoring import ScoreRequest
from verl.workers.rollout.sglang_rollout import SGLangRollout
from verl.workers.rollout.sglang_rollout.client import SGLangClient
from verl.workers.rollout.sglang_rollout.settings import process_environment
from verl.workers.rollout.state import EngineState
from verl.workers.rollout.weights import DeviceBuffer, FileBuffer, SharedBuffer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here; `make test-sglang` has it"
)

ROOMY = {"max_running_requests": 1000, "max_prefill_tokens": 8192, "chunked_prefill_size": 8192}
"""Arguments of the engine that serves all checks which do not ask for a small one."""
CONTEXT, CACHED_TOKENS = 640, 16384
"""A token's keys and values are 1 KiB here and its prompt's place in the cache more: after 10,000 requests the cache is
full at 16,384 tokens and takes no more memory; at the 65,536 of the engine's own default it would still be filling.
"""
SIZE = sum(tensor.nbytes for _, tensor in weights_of())
KEEPS = "SGLang gives memory back through CUDA's virtual memory; on a CPU it has nothing of the kind"


@pytest.mark.parametrize("lora_rank", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_a_whole_run_scores_what_was_sampled(lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO by main_ppo with a server: the trainer's log-probs over the kept tokens are the engine's, also after
    updates; so are those of adapters, which SGLang gets merged."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    settings = {
        "actor_rollout_ref__rollout__name": "sglang",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
        "actor_rollout_ref__rollout__top_p": 0.9,
        "actor_rollout_ref__rollout__keep_sampling_mask": "true",
        "custom_reward_function__path": str(tmp_path / "reward.py"),
        "trainer__total_training_steps": 3,
        "actor_rollout_ref__model__lora_rank": lora_rank,
        "actor_rollout_ref__actor__optim__lr": 1e-2,
    }
    run_ppo(compose(overrides(make_tiny_run(tmp_path), tmp_path, **settings)))
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    assert list(steps) == [1, 2, 3]
    assert all(data["actor/grad_norm"] > 0 for data in steps.values())
    assert max(data["training/rollout_probs_diff_max"] for data in steps.values()) < 1e-5
    assert max(data["training/sampling_mask/unknown"] for data in steps.values()) == 0
    assert steps[3]["actor/entropy"] != steps[1]["actor/entropy"]


class Shared:
    """Running engines by what they were started with: a start takes much longer than a check."""

    def __init__(self) -> None:
        self.running: dict[str, EngineClient] = {}

    def start(self, engine: SGLangRollout, own_start: Callable[[], EngineClient]) -> EngineClient:
        engine._arguments |= self._roomier(engine._arguments)
        same = {"model_path": _weights_folder(engine), "tokenizer_path": ""}
        key = json.dumps(engine._arguments | same)
        if key not in self.running:
            for other in [k for k in self.running if '"max_running_requests": 1000' not in k]:
                self.running.pop(other).kill()
            self.running[key] = own_start()
        return self.running[key]

    @staticmethod
    def _roomier(arguments: dict[str, Any]) -> dict[str, Any]:
        """Of the settings that only bound sizes, the largest that any check asks for; a small engine stays small."""
        wider = {"context_length": CONTEXT, "max_total_tokens": CACHED_TOKENS}
        return wider if arguments["max_running_requests"] < 8 else wider | ROOMY

    def stop(self) -> None:
        while self.running:
            self.running.popitem()[1].kill()


def _weights_folder(engine: SGLangRollout) -> str:
    """Folders of one family differ in their end tokens only, and those go to SGLang with each request."""
    return re.sub(r"-(None|\[.*\])$", "", str(engine.model_config.path))


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    shared = Shared()

    class SharedSGLang(SGLangRollout):
        """The engine itself, but for starting an SGLang of its own where one with the same arguments runs."""

        def _start(self) -> EngineClient:
            return shared.start(self, super()._start)

    class SharedUnderTest(EngineUnderTest):
        def engine_class(self) -> type[SharedSGLang]:
            return SharedSGLang

    folder, settings = tmp_path_factory.mktemp("sglang"), {"tensor_model_parallel_size": 1}
    yield SharedUnderTest("sglang", folder, settings=settings, keeps_memory=KEEPS, counts_preemptions=True)
    shared.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine(under_test: EngineUnderTest, check: Callable[[EngineUnderTest], None]) -> None:
    check(under_test)


@pytest.mark.slow
def test_a_prompt_that_is_prefilled_in_chunks_is_scored_whole(under_test: EngineUnderTest) -> None:
    running = under_test.ready(max_num_seqs=4, max_num_batched_tokens=4)  # by a server of its own
    asked = [ScoreRequest([*prompt, 50, 3, 77, 60, 12], len(prompt), top_k=5, temperature=0.5) for prompt in PROMPTS]
    for one, scores in zip(asked, running.score(asked), strict=True):
        assert_of_the_model(under_test, one, scores)


def test_weights_that_do_not_arrive_as_sent_are_noticed(
    under_test: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = under_test.ready()
    parts = SharedBuffer.parts
    monkeypatch.setattr(SharedBuffer, "parts", lambda *args: damaged(parts(*args)))
    with pytest.raises(RolloutError, match=r"did not arrive in .*SGLang.* as they were sent"):
        running.load_weights(weights_of(seed=1), version=1)
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([greedy(PROMPTS[0])])
    monkeypatch.undo()


def test_weights_arrive_by_the_handle_of_a_device(under_test: EngineUnderTest) -> None:
    """As on the trainer's GPU; the memory of a CPU is shared in the place of a GPU's."""
    running = under_test.ready()
    parts = DeviceBuffer(torch.device("cpu")).parts(weights_of(seed=1), 2**16)
    with handles_for_strangers():
        assert running._engine.load_weights(parts) == SIZE
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12, seed=1)]


def test_a_weight_that_sglang_cannot_load_is_an_error_and_no_end(under_test: EngineUnderTest) -> None:
    running = under_test.ready()
    engine = running._engine
    unknown = [("model.layers.0.self_attn.q_proj.weight", dict(weights_of())["model.norm.weight"])]
    with pytest.raises(RolloutError, match="cannot load the new weights"):
        engine.load_weights(FileBuffer().parts(iter(unknown), 2**20))
    running.load_weights(weights_of(), version=1)
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12)]


def test_many_small_buckets_are_one_update(under_test: EngineUnderTest) -> None:
    running = under_test.ready()
    assert running._engine.load_weights(FileBuffer().parts(weights_of(seed=1), 4096)) == SIZE
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12, seed=1)]


def test_states(under_test: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang says of its load: requests and memory while it draws, and nothing of either afterwards."""
    monkeypatch.setattr(base, "_REPORT_EVERY_S", 0)
    monkeypatch.setattr(remote, "_POLL_S", 0.001)
    running = under_test.ready(response_length=200)
    told: list[EngineState] = []
    running.on_state = told.append
    longest, all_tokens = max(map(len, PROMPTS)), sum(map(len, PROMPTS)) + 200 * len(PROMPTS)

    def are_told_at_work() -> bool:  # a process that is held up asks nothing while SGLang draws: then once more
        running.generate([greedy(prompt, max_tokens=200) for prompt in PROMPTS])
        after = running.state()
        assert (after.requests_running, after.requests_waiting, after.memory_use, after.memory_tokens) == (0, 0, 0, 0)
        assert after.response_tokens is None  # SGLang does not count them
        assert {state.weight_version for state in told} <= {0}
        assert all(state.requests_running <= len(PROMPTS) for state in told)
        assert all(state.memory_use < 1 for state in told)
        assert all(state.memory_tokens <= all_tokens for state in told)
        at_work = [state for state in told if state.requests_running > 0 and state.memory_use > 0]
        return any(state.memory_tokens > longest for state in at_work)

    eventually(are_told_at_work, lambda: f"a state with requests that run, in {told}")


def test_an_argument_that_sglang_lacks_is_named_before_it_starts(under_test: EngineUnderTest) -> None:
    words = (
        r"engine_kwargs.sglang: this SGLang has no argument max_runing_requests. Did you mean 'max_running_requests'"
    )
    with pytest.raises(ConfigError, match=words):
        under_test.build(engine_kwargs={"sglang": {"page_size": 1, "max_runing_requests": 4}})


def test_an_sglang_of_another_version_is_an_error(under_test: EngineUnderTest) -> None:
    running: BaseRollout = under_test.build()
    running._arguments["a_field_of_another_version"] = 1
    with pytest.raises((ConfigError, RolloutError), match=r"not take verl's arguments: .*a_field_of_another_version"):
        running.wake()


def test_the_private_parts_are_where_they_were(under_test: EngineUnderTest) -> None:
    """What verl calls of SGLang without a promise: see ``engine_side/verl_sglang.py``."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.layers import sampler
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.managers import mm_schedule
    from sglang.srt.managers.scheduler import run_scheduler_process

    assert "run_scheduler_process_func" in inspect.signature(launch_server).parameters
    assert callable(run_scheduler_process)
    assert "get_logits_fn" in inspect.signature(InputLogprobProcessor.forward).parameters
    assert callable(LoRAAdapter.initialize_weights)
    assert "tensors" in inspect.signature(LoRAAdapter.initialize_weights_from_tensors).parameters
    assert callable(mm_schedule.MultiModalStaticCache.clear)
    assert hasattr(mm_schedule, "embedding_cache")
    assert list(inspect.signature(sampler.register_sampler_backend).parameters)[:2] == ["backend", "factory"]
    given = list(inspect.signature(sampler.Sampler.forward).parameters)
    assert given[1:4] == ["logits_output", "sampling_info", "return_logprob"]
    assert given[4:7] == ["top_logprobs_nums", "token_ids_logprobs", "positions"]


def test_two_tensor_parallel_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Each verifies half of the weights; the greedy tokens and all log-probs are the oracle's."""
    engine = EngineUnderTest("sglang", tmp_path, settings={"tensor_model_parallel_size": 1})
    rollout, device = engine.build(), torch.device("cpu")
    environment = process_environment(dataclasses.replace(rollout.config, tensor_model_parallel_size=2), device)
    server = SGLangClient(
        rollout._arguments | {"tp_size": 2}, environment, Launch(start_timeout_s=300), torch.device("cpu")
    )
    try:
        for seed in (0, 1):
            assert server.load_weights(FileBuffer().parts(weights_of(seed=seed), 2**20)) == SIZE
            sampled = [request(prompt, seed=3, temperature=1.5, top_k=5) for prompt in PROMPTS]
            asked = [*(greedy(prompt) for prompt in PROMPTS), *sampled]
            responses = {number: rollout._partial(one) for number, one in enumerate(asked)}
            server.generate([*responses.values()], threading.Event())
            outputs = [*rollout._outputs(responses).values()]
            assert tokens_of(outputs[: len(PROMPTS)]) == [oracle_greedy(prompt, 12, seed=seed) for prompt in PROMPTS]
            engine.assert_of_the_model(asked, outputs, seed)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("name", "number", "patience"),
    [
        ("sglang::scheduler", signal.SIGKILL, {}),
        pytest.param("sglang::detokenizer", signal.SIGKILL, {}, marks=pytest.mark.slow),
        pytest.param("sglang::scheduler", signal.SIGSTOP, {"hang_timeout_s": 10}, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_or_hangs_is_replaced(
    name: str, number: int, patience: dict[str, Any], tmp_path: Path
) -> None:
    """The same responses, by another engine that was given the weights."""
    settings = {"tensor_model_parallel_size": 1, "engine_kwargs": {"sglang": patience}}
    rollout = check_a_lost_process(EngineUnderTest("sglang", tmp_path, settings=settings), name, number)
    rollout._end_engine()
