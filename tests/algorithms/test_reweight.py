"""PF-PPO: weights by hand, draws that follow them, and that nothing else decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from verl.algorithms import compute_pf_ppo_reweight_data
from verl.algorithms.reweight import pf_ppo_weights
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto


def batch(scores: list[float]) -> DataProto:
    """Each score split over two tokens, with garbage after them."""
    half = tensor(scores).unsqueeze(-1) / 2
    rows = len(scores)
    return DataProto.from_dict(
        tensors={
            "token_level_scores": torch.cat([half, half, torch.full((rows, 1), torch.nan)], 1),
            "response_mask": tensor([[1, 1, 0]] * rows),
            "row": torch.arange(rows),
        },
        non_tensors={"uid": np.array([f"u{i}" for i in range(rows)], dtype=object)},
        meta_info={"temperature": 0.5},
    )


def rows_of(data: DataProto) -> list[int]:
    return data.batch["row"].tolist()


def test_weights_by_hand():
    scores = tensor([-2.0, 0.0, 1.0, 2.0]).double()
    # |s|² = 4, 0, 1, 4 up to a factor; the largest is scaled to 1
    assert_close(pf_ppo_weights(scores, "pow", 2.0), tensor([1.0, 0.0, 0.25, 1.0]).double())
    assert_close(pf_ppo_weights(scores, "pow", 0.0), torch.ones(4).double())
    assert_close(pf_ppo_weights(scores, "max_min"), tensor([1.0, 0.0, 0.0, 1.0]).double())
    assert_close(pf_ppo_weights(scores, "max_random"), tensor([0.1, 0.1, 0.1, 0.4]).double())


def test_scores_of_zero_are_equally_likely():
    assert_close(pf_ppo_weights(torch.zeros(3).double(), "pow", 2.0), torch.ones(3).double())
    assert set(rows_of(compute_pf_ppo_reweight_data(batch([0.0] * 40)))) > {0, 1}


def test_a_huge_exponent_keeps_the_largest():
    assert rows_of(compute_pf_ppo_reweight_data(batch([1.0, -3.0, 2.0]), "pow", 1000.0)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [4 / 9, 0, 1 / 9, 4 / 9]), ("max_min", [0.5, 0, 0, 0.5]), ("max_random", [1 / 7, 1 / 7, 1 / 7, 4 / 7])],
)
def test_rows_are_drawn_as_often_as_they_weigh(method: str, expected: list[float]):
    data = batch([-2.0, 0.0, 1.0, 2.0])
    counts = np.zeros(4)
    for seed in range(1500):
        counts += np.bincount(rows_of(compute_pf_ppo_reweight_data(data, method, 2.0, seed=seed)), minlength=4)
    # 6000 draws: a share has a standard error of at most 0.0065
    assert counts / counts.sum() == pytest.approx(expected, abs=0.026)


def test_every_column_of_a_row_comes_along_and_the_batch_stays():
    data = batch([1.0, 5.0, 2.0, 3.0])
    found = compute_pf_ppo_reweight_data(data, "pow", 2.0, seed=3)
    rows = rows_of(found)
    assert len(found) == 4
    assert found.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in rows]
    assert_close(found.batch["token_level_scores"], data.batch["token_level_scores"][rows], equal_nan=True)
    assert found.meta_info == {"temperature": 0.5}
    assert rows_of(data) == [0, 1, 2, 3]


def test_the_seed_alone_decides():
    data = batch([1.0, 5.0, 2.0, 3.0, 4.0, 1.5])
    torch.manual_seed(0)
    np.random.seed(0)
    first = rows_of(compute_pf_ppo_reweight_data(data, seed=7))
    state, array = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert rows_of(compute_pf_ppo_reweight_data(data, seed=7)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == array).all()
    assert any(rows_of(compute_pf_ppo_reweight_data(data, seed=seed)) != first for seed in range(5))


def test_what_is_wrong_is_said():
    with pytest.raises(ConfigError, match=r"reweight_method=max is unknown\. Use pow, max_min or max_random"):
        compute_pf_ppo_reweight_data(batch([1.0]), "max")
    with pytest.raises(SchemaError, match=r"PF-PPO.*needs column 'token_level_scores'"):
        compute_pf_ppo_reweight_data(DataProto.from_dict(tensors={"response_mask": torch.ones(1, 1)}))


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_a_row_without_a_valid_token_is_never_drawn(method: str):
    data = batch([-1.0, -1.0, -2.0, -1.0])
    data.batch["response_mask"][3] = 0  # its score reads 0, the largest
    drawn = [row for seed in range(20) for row in rows_of(compute_pf_ppo_reweight_data(data, method, seed=seed))]
    assert set(drawn) == {0, 1, 2}
    # max_min: rows 0 and 1 are the best, row 2 the worst: a third each of 80 draws
    if method == "max_min":
        assert drawn.count(2) / len(drawn) == pytest.approx(1 / 3, abs=0.16)
    data.batch["response_mask"][:] = 0
    assert len(compute_pf_ppo_reweight_data(data, method)) == 4
