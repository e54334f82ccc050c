"""vLLM, the real one, against the contract.

Run by ``make test-vllm``, which makes an environment with vLLM; skipped where vLLM cannot be imported.
"""

from __future__ import annotations

import copy
import dataclasses
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from tests.workers.rollout.damage import damaged, handles_for_strangers
from tests.workers.rollout.losses import check_a_lost_process
from tests.workers.rollout.vllm_engines import SHARED, end_servers, needs_vllm, pool, under_test
from verl.errors import ConfigError, RolloutError
from verl.testing.rollout_conformance import (
    CHECKS,
    PROMPTS,
    EngineUnderTest,
    check_ten_thousand_requests_leave_nothing_behind,
    greedy,
    oracle,
    oracle_greedy,
    oracle_log_probs,
    weights_of,
)
from verl.testing.rollout_conformance.sampling import (
    check_greedy_takes_the_most_likely_token,
    check_log_probs_are_of_the_distribution_that_is_drawn_from,
)
from verl.workers.rollout import base, remote
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.quantized_layers import FORMATS
from verl.workers.rollout.vllm_rollout.client import VLLMClient
from verl.workers.rollout.vllm_rollout.settings import engine_arguments
from verl.workers.rollout.weights import DeviceBuffer, FileBuffer, SharedBuffer

pytestmark = needs_vllm
NAMES = {check: check.__name__.removeprefix("check_") for check in CHECKS}
SLOW = {
    "draws_follow_the_distribution",
    "raw_log_probs_equal_a_full_forward_pass",  # by a server of its own
    "ten_thousand_requests_leave_nothing_behind",
}
assert set(NAMES.values()) >= SLOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the models of all checks; the servers end with them."""
    with pool():
        yield tmp_path_factory.mktemp("vllm")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "patience"), [(signal.SIGKILL, {}), (signal.SIGSTOP, {"hang_timeout_s": 10})])
def test_a_core_that_dies_or_hangs_is_replaced(number: int, patience: dict[str, Any], folder: Path) -> None:
    """The process that computes, below the server: the same responses, by another server that was given the weights.

    The first test, because the server in place of the lost one is that of the checks below.
    """
    end_servers()
    try:
        check_a_lost_process(under_test(folder, **patience), "EngineCore", number)
    finally:
        if patience:  # the other checks have a server that nobody ends for a pause
            end_servers()


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, id=n, marks=pytest.mark.slow if n in SLOW else ()) for c, n in NAMES.items()],
)
def test_contract(check: Callable[[EngineUnderTest], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if check is check_ten_thousand_requests_leave_nothing_behind:
        # vLLM keeps kernels for each number of tokens in a step; with few at once all numbers come in the warm-up.
        monkeypatch.setitem(SHARED, "max_num_seqs", 8)
    check(under_test(folder))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe", "mixtral"])
def test_other_families(family: str, folder: Path) -> None:
    """Their weights have other names than Qwen3's, those of experts are joined, and are put in the right places."""
    end_servers()
    engine = under_test(folder, families=(family,))
    check_greedy_takes_the_most_likely_token(engine)
    check_log_probs_are_of_the_distribution_that_is_drawn_from(engine)
    end_servers()


def test_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says of its work: the tokens that were asked and drawn, and requests while they run."""
    monkeypatch.setattr(base, "_REPORT_EVERY_S", 0)
    monkeypatch.setattr(remote, "_POLL_S", 0.001)
    running = under_test(folder).ready(response_length=200, max_num_seqs=4)
    running.generate([greedy(PROMPTS[0])])  # so that nothing of it is counted later
    before = running.state()
    asked = [greedy(prompt, max_tokens=200) for prompt in PROMPTS]
    running.generate(asked)
    drawn = 200 * len(asked)

    def are_counted() -> bool:  # vLLM's server may answer before it has counted
        after = running.state()
        assert (after.requests_running, after.requests_waiting, after.memory_use) == (0, 0, 0)
        counts = ("prompt_tokens", "response_tokens", "preemptions", "prefix_hit_tokens")
        counted = [getattr(after, name) - getattr(before, name) for name in counts]
        return counted == [sum(map(len, PROMPTS)), drawn, 0, 0]

    eventually(are_counted, lambda: f"the tokens of {running.state()}, not of {before}")
    counted, states = running.state().response_tokens, []
    running.on_state = states.append

    def are_told_at_work() -> bool:  # a process that is held up asks nothing while vLLM draws: then once more
        running.generate(asked)
        assert {state.weight_version for state in states} <= {0}
        assert all(state.requests_running <= len(PROMPTS) for state in states)
        assert all(state.memory_use < 1 for state in states)
        at_work = [state for state in states if state.requests_running > 0 and state.memory_use > 0]
        return any(state.response_tokens > counted for state in at_work)

    eventually(are_told_at_work, lambda: f"a state with requests that run, in {states}")


def test_the_server_demands_its_token(folder: Path) -> None:
    running = under_test(folder).ready()
    server = running._engine.shared.engine.server
    for path in ("/collective_rpc", "/inference/v1/generate", "/v1/models", "/metrics"):
        for headers in ({}, {"Authorization": "Bearer guess"}):
            asked = urllib.request.Request(server.base_url + path, data=b"{}", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(asked, timeout=60)


def test_a_weight_that_arrives_changed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = under_test(folder).ready()
    parts = SharedBuffer.parts
    monkeypatch.setattr(SharedBuffer, "parts", lambda *args: damaged(parts(*args)))
    with pytest.raises(RolloutError, match=r"1 of 25 weights did not arrive in vLLM .* as they were sent: "):
        running.load_weights(weights_of(), version=1)
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([greedy(PROMPTS[0])])
    monkeypatch.undo()
    running.load_weights(weights_of(), version=2)
    assert running.generate([greedy(PROMPTS[0])])[0].token_ids == oracle_greedy(PROMPTS[0], 12)


def test_weights_arrive_by_the_handle_of_a_device(folder: Path) -> None:
    """As on the trainer's GPU; the memory of a CPU is shared in the place of a GPU's. Layers reach over parts."""
    running = under_test(folder).ready()
    parts = DeviceBuffer(torch.device("cpu")).parts(weights_of(seed=1), 2**16)
    with handles_for_strangers():
        running._engine.shared.engine.load_weights(parts)
    running._engine.shared.owner = running._engine
    assert running.generate([greedy(PROMPTS[0])])[0].token_ids == oracle_greedy(PROMPTS[0], 12, seed=1)


@pytest.mark.slow
def test_an_argument_that_vllm_does_not_have_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="this vLLM has no argument max_num_sequences"):
        under_test(folder, max_num_sequences=3).build()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_int8_is_that_of_rounded_weights_and_rounded_inputs(folder: Path, size: int) -> None:
    """In each version: q is loaded anew, and the inputs of a layer are rounded token by token, as its weights are.

    A worker rounds its part of the inputs of layers that are divided by columns.
    """
    rollout = under_test(folder).build()
    rollout.config = dataclasses.replace(rollout.config, quantization="int8")
    arguments = engine_arguments(rollout.config, rollout.model_config, 64, torch.device("cpu"))
    engine = VLLMClient(arguments | {"tensor_parallel_size": size}, torch.device("cpu"), Launch())
    try:
        for seed in (0, 1):
            model = copy.deepcopy(oracle(seed=seed)).double()
            for name, layer in model.named_modules():
                if ".layers." in name and isinstance(layer, torch.nn.Linear):
                    q, s = FORMATS["int8"].quantize(layer.weight.float())
                    layer.weight.data = q.double() * s
                    parts = size if name.endswith(("o_proj", "down_proj")) else 1
                    layer.register_forward_pre_hook(lambda _, inputs, parts=parts: rounded_inputs(inputs[0], parts))
            engine.load_weights(FileBuffer().parts(rollout._in_files(weights_of(seed=seed)), 2**16))
            responses = [rollout._partial(greedy(prompt)) for prompt in PROMPTS]
            engine.generate(responses, threading.Event())
            for prompt, response in zip(PROMPTS, responses, strict=True):
                ids = torch.tensor([prompt + response.token_ids])
                expected = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                expected = expected.gather(-1, ids[0, len(prompt) :, None])[:, 0]
                torch.testing.assert_close(torch.tensor(response.log_probs).double(), expected, atol=1e-5, rtol=1e-5)
    finally:
        engine.close()


def rounded_inputs(inputs: torch.Tensor, parts: int) -> torch.Tensor:
    divided = inputs.unflatten(-1, (parts, -1))
    s = divided.abs().amax(-1, keepdim=True) / 127
    return ((divided / s.where(s > 0, 1)).round() * s).flatten(-2)  # the embedding of padding is 0


@pytest.mark.slow
def test_two_tensor_parallel_workers_compute_what_one_does(folder: Path) -> None:
    """Each verifies half of the weights; the greedy tokens and their log-probs are the oracle's."""
    rollout = under_test(folder).build()
    arguments = engine_arguments(rollout.config, rollout.model_config, 64, torch.device("cpu"))
    engine = VLLMClient(arguments | {"tensor_parallel_size": 2}, torch.device("cpu"), Launch())
    try:
        for seed in (0, 1):
            engine.load_weights(FileBuffer().parts(weights_of(seed=seed), 2**16))
            responses = [rollout._partial(greedy(prompt)) for prompt in PROMPTS]
            engine.generate(responses, threading.Event())
            for prompt, response in zip(PROMPTS, responses, strict=True):
                assert response.token_ids == oracle_greedy(prompt, 12, seed=seed)
                expected = oracle_log_probs(prompt, response.token_ids, 1.0, "qwen3", seed)
                torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-5, rtol=1e-5)
    finally:
        engine.close()
