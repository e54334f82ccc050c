"""Settings of a generative reward model: what makes a run serve one, what is refused, and what has no effect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.config.support import Run, only


@pytest.fixture
def judged(run: Run) -> dict[str, Any]:
    (run.folder / "reward.py").write_text("def compute_score(solution_str, reward_router_address): return 0.0")
    return {
        "reward_model.enable": True,
        "reward_model.rollout.name": "native",
        "reward_model.model.path": str(run.folder / "model"),
        "custom_reward_function.path": str(run.folder / "reward.py"),
    }


def test_a_judge_is_a_served_model_that_a_reward_function_asks(run: Run, judged: dict[str, Any]):
    more = {"reward_model.rollout.max_num_seqs": 7, "trainer.seed": 5, "reward_model.model.use_shm": True}
    judge = run.load(judged | more).judge
    assert judge is not None
    assert (judge.model.path, judge.model.use_shm) == (str(run.folder / "model"), True)
    rollout = judge.rollout
    assert (rollout.name, rollout.max_num_seqs, rollout.seed, rollout.prompt_length) == ("native", 7, 5, 2048)
    by_name = {key: value for key, value in judged.items() if "custom" not in key}
    assert run.load(by_name | {"reward_model.reward_format": "llm_judge"}).judge is not None
    assert run.load(judged | {"reward_model.enable": False}).judge is None
    assert run.load(judged | {"reward_model.rollout.name": "???"}).judge is None
    assert run.load(by_name).judge is None  # a model that gives a score per response


def test_the_keys_of_later_scripts_are_the_same(run: Run, judged: dict[str, Any]):
    later = {key.replace("reward_model.", "reward.reward_model.", 1): value for key, value in judged.items()}
    later["reward.custom_reward_function.path"] = later.pop("custom_reward_function.path")
    assert run.load(later).judge == run.load(judged).judge


def test_memory_is_kept_on_ranks_that_have_no_other_work(run: Run, judged: dict[str, Any]):
    own = {"reward_model.enable_resource_pool": True, "reward_model.nnodes": 1, "reward_model.n_gpus_per_node": 1}
    assert run.load(judged).judge.rollout.free_cache_engine
    assert not run.load(judged | own).judge.rollout.free_cache_engine


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"launch_reward_fn_async": True}, "the judge and the policy, which computes log-probs meanwhile, share"),
        ({"rollout.max_model_len": 100}, "prompt_length + response_length is 4096"),
        ({"rollout.name": "vlm"}, "reward_model.rollout.name=vlm"),
        ({"rollout.expert_parallel_size": 2}, "expert_parallel_size=2: with reward_model.rollout.name=native"),
        ({"rollout.name": "trtllm"}, "this engine is not in this version"),
        ({"rollout.engine_kwargs": {"vlm": {}}}, "no engine of that name takes arguments"),
    ],
)
def test_what_cannot_serve_is_refused(run: Run, judged: dict[str, Any], changes: dict[str, Any], said: str):
    assert said in only(run.refusal(judged | {f"reward_model.{key}": value for key, value in changes.items()}))


def test_a_judge_of_the_run_and_another_one_are_not_both_asked(run: Run, judged: dict[str, Any]):
    del judged["custom_reward_function.path"]
    changes = {"reward_model.reward_format": "llm_judge", "reward_model.scorer_kwargs": {"base_url": "http://x/v1"}}
    assert "serves a judge in this run, and this one is asked" in only(run.refusal(judged | changes))


def test_settings_of_the_other_kind_of_reward_model_are_told(
    run: Run, judged: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    run.load(judged | {"reward_model.max_length": 100, "reward_model.rollout.enable_chunked_prefill": False})
    assert "no effect: reward_model.max_length (reward_model.rollout.name=native serves the model" in caplog.text
    assert "no effect: reward_model.rollout.enable_chunked_prefill (only vllm and sglang read it" in caplog.text
    del judged["custom_reward_function.path"]
    caplog.clear()
    run.load(judged)
    assert "no effect: reward_model.rollout.name (the model gives a score per response itself, unless" in caplog.text
