"""vLLM's server, the real one, against the contract: by ``make test-vllm``.

Of the contract only the checks in which the way over HTTP matters are run; ``make test-vllm SLOW=1`` runs the others,
all of which ``test_vllm.py`` runs with vLLM inside of the process.
"""

from __future__ import annotations

import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout.damage import damaged
from tests.workers.rollout.losses import check_a_lost_process
from tests.workers.rollout.vllm_engines import (
    SERVER_SIZES,
    check_states,
    end_servers,
    names_of,
    needs_vllm,
    pool,
    under_test,
)
from verl.errors import ConfigError, RolloutError
from verl.testing.rollout_conformance import (
    CHECKS,
    PROMPTS,
    EngineUnderTest,
    check_ten_thousand_requests_leave_nothing_behind,
    greedy,
    oracle_greedy,
    oracle_log_probs,
    weights_of,
)
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.vllm_rollout.client import VLLMServer
from verl.workers.rollout.vllm_rollout.settings import engine_arguments
from verl.workers.rollout.weights import SharedBuffer

pytestmark = needs_vllm
NAMES = names_of(CHECKS)
OVER_HTTP = {
    "a_cancelled_request_is_dropped_and_others_go_on",
    "a_stop_text_ends_at_the_token_that_completes_it",  # streams
    "a_response_that_streams_is_told_while_it_is_drawn",
    "abort_answers_what_runs_and_serves_what_comes",
    "abort_gives_back_what_there_is",
    "an_end_token_ends_the_response_and_is_kept",
    "an_update_shows_in_prompts_that_were_just_served",
    "arrival_changes_no_response",
    "log_probs_are_of_the_distribution_that_is_drawn_from",
    "the_columns_by_hand",
    "weights_that_do_not_fit_are_named",
    "without_weights_nothing_is_generated",
}
"""Checks that are not slow."""
assert set(NAMES.values()) >= OVER_HTTP


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
        check_a_lost_process(under_test(folder, "async", **patience), "EngineCore", number)
    finally:
        if patience:  # the other checks have a server that nobody ends for a pause
            end_servers()


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, id=n, marks=() if n in OVER_HTTP else pytest.mark.slow) for c, n in NAMES.items()],
)
def test_contract(check: Callable[[EngineUnderTest], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if check is check_ten_thousand_requests_leave_nothing_behind:
        # vLLM keeps kernels for each number of tokens in a step; with few at once all numbers come in the warm-up.
        monkeypatch.setitem(SERVER_SIZES, "max_num_seqs", 8)
    check(under_test(folder, "async"))


def test_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_states(under_test(folder, "async"), monkeypatch)


def test_the_server_demands_its_token(folder: Path) -> None:
    running = under_test(folder, "async").ready()
    server = running._engine.shared.engine.server
    for path in ("/collective_rpc", "/inference/v1/generate", "/v1/models", "/metrics"):
        for headers in ({}, {"Authorization": "Bearer guess"}):
            asked = urllib.request.Request(server.base_url + path, data=b"{}", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(asked, timeout=60)


def test_a_weight_that_arrives_changed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = under_test(folder, "async").ready()
    engine = running._engine.shared.engine
    parts = SharedBuffer.parts
    monkeypatch.setattr(SharedBuffer, "parts", lambda *args: damaged(parts(*args)))
    with pytest.raises(RolloutError, match=r"1 of 25 weights did not arrive in vLLM .* as they were sent: "):
        running.load_weights(weights_of(), version=1)
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([greedy(PROMPTS[0])])
    monkeypatch.undo()
    running.load_weights(weights_of(), version=2)
    assert running.generate([greedy(PROMPTS[0])])[0].token_ids == oracle_greedy(PROMPTS[0], 12)
    assert [path.name for path in engine.server.memory_folder.iterdir()] == ["weights"]


@pytest.mark.slow
def test_an_argument_that_vllm_does_not_have_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="this vLLM has no argument max_num_sequences"):
        under_test(folder, "async", max_num_sequences=3).build()


@pytest.mark.slow
def test_two_tensor_parallel_workers_compute_what_one_does(folder: Path) -> None:
    """Both get all weights, by checksum; the greedy tokens and their log-probs are the oracle's."""
    rollout = under_test(folder, "async").build()
    arguments = engine_arguments(rollout.config, rollout.model_config, 64, torch.device("cpu"))
    engine = VLLMServer(arguments | {"tensor_parallel_size": 2}, torch.device("cpu"), Launch())
    try:
        for seed in (0, 1):
            engine.load_weights(weights_of(seed=seed), 2**20)
            responses = [rollout._partial(greedy(prompt)) for prompt in PROMPTS]
            engine.generate(responses, threading.Event())
            for prompt, response in zip(PROMPTS, responses, strict=True):
                assert response.token_ids == oracle_greedy(prompt, 12, seed=seed)
                expected = oracle_log_probs(prompt, response.token_ids, 1.0, "qwen3", seed)
                torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-5, rtol=1e-5)
    finally:
        engine.close()
