"""Whole runs of mixtures of experts: the choice of experts reaches the update, through the driver and its ranks."""

import json

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.testing.models import MIXTURES, tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

DIGITS = "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"


OTHERS = [pytest.param(family, False, marks=pytest.mark.slow) for family in MIXTURES]


@pytest.mark.parametrize("family, has_agents", [("qwen3_moe", True), *OTHERS])
def test_the_second_mini_batch_has_the_experts_of_the_first_passes(family, has_agents, tmp_path, monkeypatch):
    """In fp32 the rollout and the pass for old log-probs choose alike, so R2 and R3 must make the same step.

    Without replay the experts of the second mini-batch are those of weights that the first has changed.
    """
    paths = make_tiny_run(tmp_path) | {"model": tiny_model_dir(tmp_path / family, family)}
    (tmp_path / "reward.py").write_text(DIGITS)
    found = {}
    for mode in ("R2", "R3") if has_agents else ("disabled", "R2", "R3"):
        log = tmp_path / f"{mode}.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        settings = {
            "actor_rollout_ref__actor__router_replay__mode": mode,
            "actor_rollout_ref__rollout__enable_rollout_routing_replay": mode == "R3",
            "actor_rollout_ref__rollout__name": "hf" if family == "deepseek_v3" else "native",
            "actor_rollout_ref__rollout__multi_turn__enable": has_agents,
            "trainer__log_expert_counts": True,
            "custom_reward_function__path": tmp_path / "reward.py",
            "trainer__total_training_steps": 1,
            "trainer__test_freq": 1,
        }
        run_ppo(compose(overrides(paths, tmp_path / mode, **settings)))
        line, table = map(json.loads, log.read_text().splitlines())
        found[mode] = metrics = line["data"]
        assert table["table"] == "moe/tokens_per_expert"
        for layer, row in enumerate(table["rows"]):  # two experts for each token that the update reads
            assert row.pop("layer") == layer
            assert row.keys() == {f"expert {number}" for number in range(8)}
            assert sum(row.values()) == 2 * metrics["perf/total_num_tokens"]
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert 1 < metrics["moe/load_max"] <= 4  # 8 experts / 2 per token, if one gets every token
        assert metrics["critic/score/mean"] == next(iter(found.values()))["critic/score/mean"] > 0
        assert any(name.startswith("val-core/") for name in metrics)
    for name in ("actor/ppo_kl", "actor/pg_loss", "actor/grad_norm"):
        assert found["R2"][name] == pytest.approx(found["R3"][name], rel=1e-4, abs=1e-5)
    for name in () if has_agents else ("actor/ppo_kl", "actor/pg_loss"):
        assert abs(found["disabled"][name] - found["R2"][name]) > 2e-3
