"""Names of prompts, columns of scores, and metrics of them."""

import numpy as np
import torch

from verl.experience.prompts import name_groups, repeat_prompts
from verl.experience.rewards import metrics_by_source, source_metrics
from verl.experience.scoring import score_columns
from verl.protocol import DataProto


def test_values_of_any_kind_are_one_column():
    columns = score_columns(torch.zeros(2, 1), {"turns": [[1.0], [2.0]], "acc": [True, None]})
    assert columns.non_tensor_batch["turns"].tolist() == [[1.0], [2.0]]
    assert columns.non_tensor_batch["turns"].shape == (2,)
    assert columns.non_tensor_batch["acc"].tolist() == [True, None]


def test_sources_are_told_apart_where_there_are_several():
    mask = torch.ones(3, 2, dtype=torch.long)
    data = DataProto.from_dict(
        tensors={"responses": mask, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])},
        non_tensors={"data_source": np.array(["a", "b", "a"], dtype=object)},
    )
    scores = torch.tensor([1.0, 0.5, 0.0])
    metrics = metrics_by_source(data, scores, ["ok", "ok", "timeout"])
    # Of source a one response failed: its 0 is no part of the mean. Lengths: 2, 1, 2 tokens.
    assert metrics == {
        "train-source/a/score/mean": 1.0,
        "train-source/a/response_length/mean": 2.0,
        "train-source/a/count": 2,
        "train-source/b/score/mean": 0.5,
        "train-source/b/response_length/mean": 1.0,
        "train-source/b/count": 1,
    }
    assert metrics_by_source(data[[0, 2]], scores[[0, 2]], ["ok", "ok"]) == {}


def test_siblings_are_neighbours_and_counted():
    prompts = DataProto.from_dict(tensors={"input_ids": torch.tensor([[1], [2]])})
    repeated = repeat_prompts(name_groups(prompts, step=7), 2)
    assert repeated.batch["input_ids"].flatten().tolist() == [1, 1, 2, 2]
    assert repeated.non_tensor_batch["uid"].tolist() == ["7-0", "7-0", "7-1", "7-1"]
    assert repeated.non_tensor_batch["sample_index"].tolist() == [0, 1, 0, 1]


def test_source_metrics_by_hand():
    made = source_metrics(["a", "b", "a", "b", "c"], [1, 0, 0.5, np.nan, np.nan], [4, 5, 8, 7, 1])
    assert made == {
        "train-source/a/score/mean": 0.75,
        "train-source/a/response_length/mean": 6.0,
        "train-source/a/count": 2.0,
        "train-source/b/score/mean": 0.0,
        "train-source/b/response_length/mean": 6.0,
        "train-source/b/count": 2.0,
        "train-source/c/response_length/mean": 1.0,
        "train-source/c/count": 1.0,
    }
