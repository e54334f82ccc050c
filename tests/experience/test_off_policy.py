"""The age of what a step trains on, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.experience.off_policy import off_policy_metrics, with_age
from verl.protocol import DataProto

AGES = torch.tensor([[3, 3, 1, -1], [0, 0, -1, 0], [2, -1, -1, -1], [-1, -1, -1, -1], [5, 4, 4, 4]], dtype=torch.int32)


def of(metrics: dict[str, float], name: str) -> tuple[float, float, float]:
    return tuple(metrics[f"training/off_policy/{name}/{kind}"] for kind in ("mean", "max", "min"))


def test_ages_of_trajectories():
    metrics = off_policy_metrics(DataProto.from_dict(tensors={"updates_behind": AGES}))
    assert of(metrics, "trajectory_staleness_worst") == ((3 + 0 + 2 + 5) / 4, 5, 0)  # the fourth drew nothing
    assert of(metrics, "trajectory_staleness") == ((1 + 0 + 2 + 4) / 4, 4, 0)
    assert of(metrics, "trajectory_spans") == ((2 + 0 + 0 + 1) / 4, 2, 0)
    shares = [metrics[f"training/off_policy/tokens_by_age/{age}"] for age in range(6)]
    assert shares == pytest.approx([3 / 11, 1 / 11, 1 / 11, 2 / 11, 3 / 11, 1 / 11])
    partial = [metrics[f"fully_async/partial/{name}"] for name in ("total_partial_num", "partial_ratio")]
    assert partial == [2, 0.5]
    assert metrics["fully_async/partial/max_partial_span"] == 2


def test_sequences_of_a_trajectory_count_together():
    names = {
        "trajectory_id": np.array(["a", "a", "b", "c", "b"], dtype=object),
        "agent": np.array(["main"] * 5, object),
    }
    metrics = off_policy_metrics(DataProto.from_dict(tensors={"updates_behind": AGES}, non_tensors=names))
    assert of(metrics, "trajectory_staleness_worst") == (4, 5, 3)  # a: 3 to 0; b: 5 to 2; c drew nothing
    assert of(metrics, "trajectory_staleness") == (1, 2, 0)
    assert of(metrics, "trajectory_spans") == (3, 3, 3)
    assert metrics["fully_async/partial/partial_ratio"] == 1


def test_one_age_for_all_and_none():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    batch = with_age(DataProto.from_dict(tensors={"response_mask": mask}), 4)
    assert batch.batch["updates_behind"].tolist() == [[4, 4, -1], [4, -1, 4]]
    assert batch.batch["updates_behind"].dtype == torch.int32
    assert of(off_policy_metrics(batch), "trajectory_staleness") == (4, 4, 4)
    assert with_age(batch, 1).batch["updates_behind"].tolist() == [[1, 1, -1], [1, -1, 1]]
    assert off_policy_metrics(DataProto.from_dict(tensors={"response_mask": mask})) == {}
    assert off_policy_metrics(with_age(DataProto.from_dict(tensors={"response_mask": mask * 0}), 1)) == {}
