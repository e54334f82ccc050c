"""vLLM, the real one, inside of this process, against the contract.

Run by ``make test-vllm``, which makes an environment with vLLM; skipped where vLLM cannot be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.rollout.vllm_engines import check_states, names_of, needs_vllm, pool, under_test
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import CHECKS, PROMPTS, EngineUnderTest, Serving, greedy, oracle_greedy
from verl.testing.rollout_conformance.engine_under_test import tokens_of
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.vllm_rollout import VLLMRollout
from verl.workers.rollout.vllm_rollout.inprocess import worker_of

pytestmark = needs_vllm
NAMES = names_of(CHECKS)
SMALL_MEMORY = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the models of all checks; the engines end with them."""
    with pool():
        yield tmp_path_factory.mktemp("vllm")


@pytest.mark.parametrize("check", CHECKS, ids=NAMES.__getitem__)
def test_contract(check: Callable[[EngineUnderTest], None], folder: Path) -> None:
    check(under_test(folder, "sync"))


def test_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_states(under_test(folder, "sync"), monkeypatch)


def test_an_argument_that_vllm_does_not_have_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="this vLLM has no argument max_num_sequences"):
        under_test(folder, "sync", max_num_sequences=3).build()


def test_what_another_setting_decides_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm sets max_num_seqs"):
        under_test(folder, "sync", max_num_seqs=3).build()


@pytest.mark.slow
def test_interrupted_responses_are_counted(folder: Path) -> None:
    """Four responses of 600 tokens, and memory for little more than one: others are computed again."""
    engine = under_test(folder, "sync", kv_cache_memory_bytes=SMALL_MEMORY)
    running = engine.ready(response_length=600, disable_log_stats=False)
    asked = [greedy(prompt, max_tokens=600) for prompt in PROMPTS[1:5]]
    with Serving(running) as serving:
        outputs = serving.answered(serving.put(asked))
    assert max(output.num_preempted for output in outputs if output.num_preempted is not None) > 0
    assert tokens_of(outputs) == [oracle_greedy(prompt, 600) for prompt in PROMPTS[1:5]]


def test_one_rank_cannot_share_an_engine(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 does not divide the 1 rank"):
        under_test(folder, "async").build(tensor_model_parallel_size=2)


def test_the_private_parts_are_where_they_were(folder: Path) -> None:
    """What verl calls of vLLM without a promise: see ``worker_of``."""
    engine = under_test(folder, "sync").ready()._engine.shared.engine._engine
    # The worker hands all arguments on to its model runner.
    assert "weights_iterator" in inspect.signature(worker_of(engine).model_runner.reload_weights).parameters
    assert "level" in inspect.signature(engine.sleep).parameters
    assert "tags" in inspect.signature(engine.wake_up).parameters
    assert callable(engine.abort_request)
    assert callable(engine.reset_prefix_cache)


def test_mixtures_of_experts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """vLLM 0.32 computes wrong log-probs of them there, once they get weights a second time."""
    path = tiny_model_dir(tmp_path / "model", "qwen3_moe", head_dim=32)
    config = RolloutConfig(name="vllm", mode="sync", tensor_model_parallel_size=1)
    with pytest.raises(ConfigError, match="wrong log-probs of Qwen3MoeConfig, a mixture of experts"):
        VLLMRollout(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
