"""Metrics of a step: numbers by hand, samples without a valid token, missing columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import tensor

from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    _compute_response_info,
    compute_data_metrics,
    compute_mfu_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
)
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils.flops_counter import Arithmetic
from verl.utils.metric import AggregationType, Metric, reduce_metrics


def step_batch(**changes: torch.Tensor) -> DataProto:
    """Three samples, prompts of 2 and responses of 3 at most; the second's reward failed, the third is aborted."""
    columns = {
        "responses": torch.zeros(3, 3, dtype=torch.int64),
        "attention_mask": tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
        "response_mask": tensor([[1, 0, 1], [0, 0, 0], [0, 0, 0]]),
        "token_level_scores": tensor([[0.0, 0.0, 2.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0]]),
        "token_level_rewards": tensor([[-0.5, 0.0, 1.5], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0]]),
        "advantages": tensor([[1.0, 7.0, -3.0], [7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
        "returns": tensor([[1.0, 7.0, 3.0], [7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
        "values": tensor([[0.0, 7.0, 1.0], [7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
        **changes,
    }
    return DataProto.from_dict(tensors=columns)


def test_data_metrics_by_hand():
    found = compute_data_metrics(step_batch(), use_critic=True)
    expected = {
        # only the first sample is trained on
        "critic/score/mean": 2.0,
        "critic/score/max": 2.0,
        "critic/score/min": 2.0,
        "critic/rewards/mean": 1.0,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 1.0,
        # its two valid tokens
        "critic/advantages/mean": -1.0,
        "critic/advantages/max": 1.0,
        "critic/advantages/min": -3.0,
        "critic/advantages/zero_ratio": 0.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 0.5,
        "critic/values/max": 1.0,
        "critic/values/min": 0.0,
        "critic/vf_explained_var": 1 - 0.5 / (2 + 1e-5),  # R - V = 1, 2; R = 1, 3
        # lengths of responses 3 2 0, of prompts 2 1 2
        "response_length/mean": 5 / 3,
        "response_length/max": 3.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 2.5,
        "response_length_non_aborted/max": 3.0,
        "response_length_non_aborted/min": 2.0,
        "response_length_non_aborted/clip_ratio": 0.5,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 5 / 3,
        "prompt_length/max": 2.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 2 / 3,
    }
    assert found == pytest.approx(expected)


def test_responses_whose_advantages_are_all_zero_teach_nothing():
    # Both of the first two are trained on; the advantages of the second are 0 on its valid tokens.
    mask = tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
    advantages = tensor([[1.0, 0.0, -3.0], [7.0, 0.0, 7.0], [7.0, 7.0, 7.0]])
    found = compute_data_metrics(step_batch(response_mask=mask, advantages=advantages), use_critic=False)
    assert found["critic/advantages/zero_ratio"] == 0.5


def test_without_a_critic_there_are_no_values():
    found = compute_data_metrics(step_batch(), use_critic=False)
    assert not any("values" in name or "vf_" in name for name in found)


def test_a_batch_without_a_valid_token_says_nan():
    found = compute_data_metrics(step_batch(response_mask=torch.zeros(3, 3, dtype=torch.int64)))
    assert math.isnan(found["critic/score/mean"])
    assert math.isnan(found["critic/vf_explained_var"])
    assert found["response_length/mean"] == pytest.approx(5 / 3)


def test_turns_and_tool_calls_where_the_batch_has_them():
    turns = DataProto.from_dict(non_tensors={"__num_turns__": np.array([2, 4, 6], dtype=object)})
    found = compute_data_metrics(step_batch() | turns)
    assert (found["num_turns/min"], found["num_turns/mean"], found["num_turns/max"]) == (2.0, 4.0, 6.0)
    assert not any(name.startswith("tool_call_counts") for name in found)


def test_timing_metrics_by_hand():
    timing = {"gen": 0.5, "update_actor": 2.0, "reward": 1.0}
    assert compute_timing_metrics(step_batch(), timing) == pytest.approx(
        {
            "timing_s/gen": 0.5,
            "timing_s/update_actor": 2.0,
            "timing_s/reward": 1.0,
            "timing_per_token_ms/gen": 100.0,  # 5 response tokens
            "timing_per_token_ms/update_actor": 200.0,  # 10 tokens
        }
    )


def test_throughput_metrics_by_hand():
    found = compute_throughout_metrics(step_batch(), {"step": 2.0}, n_gpus=4)
    assert found["perf/total_num_tokens"] == 10
    assert found["perf/time_per_step"] == 2.0
    assert found["perf/throughput"] == 10 / 2 / 4


def test_mfu_by_hand():
    timing = {"step": 2.0, "update_actor": 0.5, "old_log_prob": 0.25, "update_critic": 0.1}
    actor = Arithmetic.from_ranks([Arithmetic(None, 1e10)] * 2)  # two ranks: 2e10 FLOP/s
    arithmetic = {"update_actor": actor, "old_log_prob": actor, "update_critic": Arithmetic(None, None)}
    found = compute_mfu_metrics({"update_actor": 6e9, "old_log_prob": 2e9, "update_critic": 1e9}, arithmetic, timing)
    # 6e9 / (0.5 · 2e10), 2e9 / (0.25 · 2e10); the critic's peak is not known
    assert found == pytest.approx({"perf/mfu/actor": 0.6, "perf/mfu/actor_infer": 0.4})
    # old_log_probs without a pass of their own, and a model whose work is not known
    assert compute_mfu_metrics({"update_actor": None}, arithmetic, timing) == {}


def gap_batch(rollout: list, actor: list, mask: list) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "rollout_log_probs": tensor([rollout]).log(),
            "old_log_probs": tensor([actor]).log(),
            "response_mask": tensor([mask]),
        }
    )


def test_rollout_gap_by_hand():
    p, q = [0.5, 0.2, 0.8, 0.9], [0.4, 0.2, 0.6, 0.1]  # the last is masked; gaps 0.1 0 0.2
    found = compute_rollout_gap_metrics(gap_batch(p, q, [1, 1, 1, 0]))
    deltas = [math.log(b / a) for a, b in zip(p[:3], q[:3], strict=True)]
    own = {name: value for name, value in found.items() if name in ("rollout_corr/kl", "rollout_corr/k3_kl")}
    own |= {name: value for name, value in found.items() if not name.startswith("rollout_corr/")}
    assert own == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": 0.2,
            "training/rollout_probs_diff_mean": 0.1,
            "training/rollout_probs_diff_std": math.sqrt(0.02 / 3),
            "training/rollout_actor_probs_pearson_corr": np.corrcoef(p[:3], q[:3])[0, 1],
            "rollout_corr/kl": -sum(deltas) / 3,
            "rollout_corr/k3_kl": sum(math.exp(d) - d - 1 for d in deltas) / 3,
        },
        rel=1e-5,
    )
    assert found["rollout_corr/kl"] > 0  # this policy moved away from what was sampled
    expected = compute_offpolicy_metrics(tensor([q]).log(), tensor([p]).log(), tensor([[1, 1, 1, 0]]))
    assert {name: value for name, value in found.items() if name.startswith("rollout_corr/")} == {
        f"rollout_corr/{name}": value for name, value in expected.items()
    }


def test_no_gap_is_zero_and_correlated():
    found = compute_rollout_gap_metrics(gap_batch([0.5, 0.2], [0.5, 0.2], [1, 1]))
    assert found["training/rollout_probs_diff_max"] == 0.0
    assert found["rollout_corr/k3_kl"] == 0.0
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    constant = compute_rollout_gap_metrics(gap_batch([0.5, 0.5], [0.5, 0.5], [1, 1]))
    assert math.isnan(constant["training/rollout_actor_probs_pearson_corr"])


def test_nothing_to_compare_is_said():
    nothing = {"training/rollout_probs_diff_valid": 0.0}
    batch = gap_batch([0.5], [0.5], [0])
    assert compute_rollout_gap_metrics(batch) == nothing
    assert compute_rollout_gap_metrics(step_batch()) == nothing


def test_reduce_metrics_by_hand():
    found = reduce_metrics(
        {
            "actor/loss": [1.0, 3.0],
            "actor/lr": 5,
            "critic/score/max": [1.0, 3.0],
            "rollout_is_min": [1.0, 3.0],
            "perf/minmax_diff": [1, 3],
            "perf/max_memory_allocated_gb": [1, 3],
            "actor/lowest": Metric(AggregationType.MIN, [3.0, 1.0]),
            "actor/parts_sum": [Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 6.0])],
            "actor/parts_lowest": [Metric("min", [4.0, 2.0]), Metric("min", 3.0)],
            "actor/max_sum": Metric.chain([Metric("sum", [1.0]), Metric("sum", torch.tensor(2.0))]),
        }
    )
    assert found == {
        "actor/loss": 2.0,
        "actor/lr": 5.0,
        "critic/score/max": 3.0,
        "rollout_is_min": 1.0,
        "perf/minmax_diff": 2.0,
        "perf/max_memory_allocated_gb": 3.0,
        "actor/lowest": 1.0,
        "actor/max_sum": 3.0,
        "actor/parts_sum": 12.0,
        "actor/parts_lowest": 2.0,
    }
    ranks = [Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 6.0])]
    assert Metric.aggregate_dp(ranks) == 6.0  # (1 + 3) / 2 + (2 + 6) / 2
    assert Metric.aggregate_dp([Metric("max", [1.0, 5.0]), Metric("max", 3.0)]) == 5.0
    with pytest.raises(ConfigError, match=r"a mean over ranks takes equally many values of each, got \[1, 2\]"):
        Metric.aggregate_dp([Metric("mean", 1.0), Metric("mean", [1.0, 2.0])])
    assert math.isnan(Metric("max").aggregate())
    with pytest.raises(ConfigError, match="a metric of sum cannot take the values of one of max"):
        Metric("sum").append(Metric("max", 1.0))
    with pytest.raises(ConfigError, match="aggregation 'median' is unknown"):
        Metric("median")


def test_metrics_without_values_are_left_out_and_what_is_no_number_is_named():
    assert reduce_metrics({"a": [], "a/max": [], "b": Metric("sum"), "c": [1, torch.tensor(3.0)]}) == {"c": 2.0}
    assert math.isnan(reduce_metrics({"undefined": [math.nan, 1.0]})["undefined"])
    for values, said in (([None, 1], "None is no number"), ("text", "could not convert"), ([[1], [2, 3]], "shape")):
        with pytest.raises(SchemaError, match=rf"metric 'actor/x' is .*{said}"):
            reduce_metrics({"actor/x": values})


def test_variance_proxies_by_hand():
    # π = ½ and Σπ² = ½ everywhere, so each token has 1 - 2·½ + ½ = ½ and W = 1, ½ for 2 and 1 valid tokens.
    half = torch.full((3, 2), 0.5)
    batch = DataProto.from_dict(
        tensors={
            "advantages": tensor([[2.0, 2.0], [-1.0, 9.0], [7.0, 7.0]]),
            "response_mask": tensor([[1, 1], [1, 0], [0, 0]]),
            "old_log_probs": half.log(),
            "sum_pi_squared": half,
        }
    )
    # A² = 4, 1; A²·W = 4, ½; the signal is 0.5² = ¼, the noise (2.25 - 0.25) / (2 - 1).
    assert compute_variance_proxy_metrics(batch, gradient_norm=0.5) == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 0.25,
            "variance_proxy/proxy2_total_power": 2.25,
            "variance_proxy/proxy3_pure_noise": 2.0,
            "variance_proxy/expected_a_squared": 2.5,
            "variance_proxy/expected_w": 0.75,
        }
    )
    batch.batch["rollout_is_weights"] = tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 5.0]])
    # mean weights 1.5 and 3: (4·2.25 + ½·9) / 2
    assert compute_variance_proxy_metrics(batch)["variance_proxy/proxy2_total_power"] == pytest.approx(6.75)
    assert compute_variance_proxy_metrics(DataProto.from_dict(tensors={"advantages": half})) == {}


def test_response_info_by_hand():
    columns = {
        "responses": torch.zeros(2, 3, dtype=torch.long),
        "attention_mask": tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    }
    info = _compute_response_info(DataProto.from_dict(tensors=columns))
    assert info["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert info["prompt_length"].tolist() == [1.0, 2.0]
    assert info["response_length"].tolist() == [2.0, 3.0]
