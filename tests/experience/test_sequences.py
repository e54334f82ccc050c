"""Trajectories of several training sequences: scores, advantages, mini-batches and padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algorithms import agg_loss, estimator_names, prepare_aggregation
from verl.algorithms.aggregate import LOSS_AGG_MODES
from verl.config import AgentLoopConfig, FilterGroupsConfig
from verl.experience.dynamic_sampling import Draw, fill_batch
from verl.experience.scoring import leave_out_failed
from verl.experience.sequences import Trajectories, mini_batch_sizes, resampled, trajectory_scores, with_prompts
from verl.experience.trajectories import complete_scores, rows_to_score
from verl.protocol import DataProto
from verl.trainer.balance import deal
from verl.trainer.ppo import stages
from verl.workers.reward_manager.scores import on_last_token

Row = tuple[str, str, list[int]]
"""Trajectory, agent, response_mask."""


def column(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(values, dtype=object, count=len(values))


def rows_of(rows: Sequence[Row], **non_tensors: Sequence[Any]) -> DataProto:
    """A batch whose trajectories are named uid/sample_index."""
    mask = torch.tensor([mask for *_, mask in rows])
    names = {
        "trajectory_id": column([name for name, *_ in rows]),
        "uid": column([name.split("/")[0] for name, *_ in rows]),
        "agent": column([agent for _, agent, _ in rows]),
        "trajectory_status": column(["done"] * len(rows)),
    }
    given_columns = {name: column(values) for name, values in non_tensors.items()}
    return DataProto.from_dict(
        tensors={"response_mask": mask, "responses": mask, "attention_mask": mask},
        non_tensors={**names, **given_columns},
    )


def with_scores(batch: DataProto, scores: Sequence[float]) -> DataProto:
    """Each row with the score of its trajectory on its last token, as rewards too."""
    tokens = on_last_token(batch.batch["response_mask"], scores)
    return batch | DataProto.from_dict(tensors={"token_level_scores": tokens, "token_level_rewards": tokens})


TWO_PROMPTS: list[Row] = [
    ("p/0", "main", [1, 1, 0]),
    ("p/0", "helper", [1, 0, 0]),
    ("p/0", "main", [1, 0, 1]),
    ("p/1", "main", [1, 1, 1]),
    ("p/1", "helper", [1, 1, 0]),
    ("p/1", "helper", [0, 1, 0]),
    ("q/0", "main", [1, 0, 0]),
    ("q/1", "main", [1, 1, 0]),
]


def test_the_last_sequence_of_main_is_scored():
    assert Trajectories.from_batch(rows_of(TWO_PROMPTS)).scored_rows == [2, 3, 6, 7]
    without_main = rows_of([("p/0", "a", [1]), ("p/0", "b", [1]), ("p/1", "main", [1]), ("p/1", "b", [1])])
    assert Trajectories.from_batch(without_main).scored_rows == [1, 2]


def test_prompts_are_repeated_for_each_sequence():
    prompts = DataProto.from_dict(
        tensors={"reward_baselines": torch.tensor([0.5, 0.25])},
        non_tensors={"uid": column(["p", "p"]), "sample_index": column([0, 1]), "truth": column(["a", "b"])},
    )
    made = rows_of(TWO_PROMPTS[:6])
    made = made.select(non_tensor_batch_keys=["trajectory_id", "agent"])
    joined = with_prompts(prompts, made)
    assert joined.non_tensor_batch["truth"].tolist() == ["a"] * 3 + ["b"] * 3
    assert joined.batch["reward_baselines"].tolist() == [0.5] * 3 + [0.25] * 3


# ---- scores ------------------------------------------------------------------------------------


def test_the_score_of_the_reward_function_is_shared_by_all_sequences():
    batch = rows_of(TWO_PROMPTS, reward_score=[None] * 6 + [2.0, None])
    agent = AgentLoopConfig()
    rows = rows_to_score(batch, agent)
    assert rows == [2, 3, 7]  # trajectory q/0 has a score of its own
    scored = torch.tensor([[0.0, 0, 0.5], [0.25, 0, 0.5], [0, 1, 0]])
    extra = {"acc": [0, 1, 1], "score": [0.5, 0.75, 1.0], "reward_status": ["ok"] * 3}
    scores, columns = complete_scores(batch, (scored, extra), rows, agent)
    assert scores.tolist() == [
        [0, 0.5, 0], [0.5, 0, 0], [0, 0, 0.5],  # p/0
        [0.25, 0, 0.5], [0, 0.75, 0], [0, 0.75, 0],  # p/1: the scored row keeps the scores of its tokens
        [2, 0, 0], [0, 1, 0],
    ]  # fmt: skip
    assert columns["acc"] == [0, 0, 0, 1, 1, 1, None, 1]
    assert columns["score"] == [0.5] * 3 + [0.75] * 3 + [2.0, 1.0]
    assert trajectory_scores(batch, scores).tolist() == [0.5, 0.75, 2.0, 1.0]


def test_scores_of_turns_stay_on_their_turns_and_add_up():
    turns = [[0.25], None, [0.5, 1.0], None, None, None, None, [9.0, 9.0]]
    batch = rows_of(TWO_PROMPTS, turn_scores=turns, reward_score=[1.75, *[None] * 2, 3.0, *[None] * 2, 1.0, None])
    scores, columns = complete_scores(batch, (torch.zeros(0), {}), [], AgentLoopConfig())
    assert scores[:3].tolist() == [
        [0, 0.25, 0],
        [1.75, 0, 0],  # the helper has none, and shares the sum 0.25 + 0.5 + 1.0
        [0.5, 0, 1.0],
    ]
    assert columns["score"][:3] == [1.75] * 3
    assert trajectory_scores(batch, scores).tolist() == [1.75, 3.0, 1.0, 0.0]
    # q/1 has one turn and two scores.
    assert columns["reward_status"] == ["ok"] * 7 + ["error"]


def test_one_sequence_that_cannot_be_scored_fails_its_trajectory():
    turns = [[0.25], None, [0.5], [1.0], None, None, None, None]  # the third has two turns
    batch = rows_of(TWO_PROMPTS, turn_scores=turns, reward_score=[None] * 6 + [0.0, 0.0])
    scores, columns = complete_scores(batch, (torch.zeros(0), {}), [], AgentLoopConfig())
    assert columns["reward_status"] == ["error"] * 3 + ["ok"] * 5
    assert scores[:3].tolist() == torch.zeros(3, 3).tolist()
    kept, rates = leave_out_failed(batch, columns["reward_status"], "mask")
    assert kept.batch["response_mask"].any(-1).tolist() == [False] * 3 + [True] * 5
    assert rates["reward/left_out_rate"] == rates["reward/error_rate"] == 0.25  # of four trajectories


def test_an_agent_of_one_trajectory_alone_has_nobody_to_be_compared_with():
    rows = [*TWO_PROMPTS[:4], *TWO_PROMPTS[6:]]
    kept, rates = leave_out_failed(rows_of(rows), ["ok"] * 6, "mask", needs_siblings=True)
    assert kept.batch["response_mask"].any(-1).tolist() == [True, False, True, True, True, True]
    assert rates["reward/left_out_rate"] == 0  # every trajectory is trained on


# ---- advantages --------------------------------------------------------------------------------


def test_group_baselines_count_each_trajectory_once_and_each_agent_apart():
    batch = with_scores(rows_of(TWO_PROMPTS), [1, 1, 1, 0, 0, 0, 0.5, 1])
    # Prompt p: scores 1 and 0 of main's two trajectories, mean 1/2, however many sequences these are; the helper's
    # group has the same. Prompt q: 1/2 and 1, mean 3/4.
    made = stages.compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert made.batch["advantages"].tolist() == [
        [0.5, 0.5, 0], [0.5, 0, 0], [0.5, 0, 0.5],
        [-0.5, -0.5, -0.5], [-0.5, -0.5, 0], [0, -0.5, 0],
        [-0.25, 0, 0], [0.25, 0.25, 0],
    ]  # fmt: skip
    # RLOO: minus the other one's score.
    made = stages.compute_advantage(batch, "rloo")
    mask = made.batch["response_mask"]
    assert torch.equal(made.batch["advantages"], mask * torch.tensor([1, 1, 1, -1, -1, -1, -0.5, 0.5])[:, None])
    # OPO weighs by tokens of the whole trajectory: main's have 2 + 2 and 3, the helper's 1 and 2 + 1.
    made = stages.compute_advantage(batch, "opo")
    assert made.batch["advantages"][:3].amax(-1).tolist() == pytest.approx([1 - 4 / 7, 1 - 1 / 4, 1 - 4 / 7])


def test_agents_with_different_scores_do_not_mix():
    rows: list[Row] = [("p/0", "main", [1]), ("p/0", "b", [1]), ("p/1", "main", [1]), ("p/1", "b", [1])]
    batch = with_scores(rows_of(rows, turn_scores=[[8.0], [1.0], [4.0], [0.0]]), [8, 1, 4, 0])
    made = stages.compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert made.batch["advantages"].flatten().tolist() == [2, 0.5, -2, -0.5]


def test_without_a_group_each_sequence_has_the_score_at_its_end():
    rows: list[Row] = [("p/0", "main", [1, 1]), ("p/0", "main", [1, 0]), ("p/1", "main", [1, 0])]
    batch = with_scores(rows_of(rows), [1, 1, 0])
    made = stages.compute_advantage(batch, "reinforce_plus_plus", gamma=0.5)
    assert made.batch["returns"].tolist() == [[0.5, 1], [1, 0], [0, 0]]


OUTCOME = ["grpo", "rloo", "grpo_passk", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl", "gdpo", "grpo_per_turn",
           "hierarchical_grpo"]  # fmt: skip


@pytest.mark.parametrize("estimator", OUTCOME)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_splitting_a_trajectory_changes_no_advantage(estimator: str, seed: int):
    """A response of several turns as one sequence, and cut between turns into several."""
    draw = np.random.default_rng(seed)
    prompts, n, length = 2, 3, 9
    whole: list[Row] = []
    split: list[Row] = []
    places: list[list[tuple[int, int]]] = []  # of each split row, the tokens of the whole one: start and end
    for trajectory in range(prompts * n):
        name = f"{trajectory // n}/{trajectory % n}"
        turns = draw.integers(1, 4)
        mask, cuts = [], [0]
        for _ in range(turns):
            mask += [1] * int(draw.integers(1, 3)) + [0]
            if draw.random() < 0.5:
                cuts.append(len(mask))
        cuts = [*[cut for cut in cuts if cut < len(mask)], len(mask)]
        whole.append((name, "main", mask + [0] * (length - len(mask))))
        for start, end in itertools.pairwise(cuts):
            split.append((name, "main", mask[start:end] + [0] * (length - end + start)))
            places.append([(trajectory, start), (trajectory, end)])
    scores = draw.integers(0, 3, prompts * n).astype(float).tolist()
    of_split = [scores[first[0]] for first, _ in places]
    settings_ = {"gdpo_reward_keys": ["acc"], "norm_adv_by_std_in_grpo": True}
    one = stages.compute_advantage(with_scores(rows_of(whole, acc=scores), scores), estimator, config=settings_)
    several = stages.compute_advantage(with_scores(rows_of(split, acc=of_split), of_split), estimator, config=settings_)
    for row, ((trajectory, start), (_, end)) in enumerate(places):
        expected = one.batch["advantages"][trajectory, start:end]
        torch.testing.assert_close(several.batch["advantages"][row, : end - start], expected, rtol=1e-5, atol=1e-6)
        assert not several.batch["advantages"][row, end - start :].any()


def test_every_estimator_that_compares_trajectories_is_here():
    compares = {name for name in estimator_names() if "index" in stages.adv_needs(name).columns}
    position = {"optimal_token_baseline", "tir_optimal_token_baseline"}  # they read columns of the actor
    refuse = {"gigpo"}  # see tests/algorithms/test_advantages_agents.py
    assert compares - position - refuse - {name for name in compares if name.endswith("_vectorized")} == set(OUTCOME)


def test_kl_of_all_sequences_is_in_the_reward_and_the_score_once():
    rows: list[Row] = [("p/0", "main", [1, 0]), ("p/0", "main", [1, 1]), ("p/1", "main", [1, 0])]
    batch = with_scores(rows_of(rows), [1, 1, 1])
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] - 0.125 * batch.batch["response_mask"]
    # 1 - 3/8 and 1 - 1/8: mean 3/4.
    made = stages.compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert made.batch["advantages"].tolist() == [[-0.125, 0], [-0.125, -0.125], [0.125, 0]]


# ---- updates -----------------------------------------------------------------------------------


def test_mini_batches_have_whole_trajectories():
    batch = rows_of(TWO_PROMPTS)
    assert mini_batch_sizes(batch, 1) == [8]
    assert mini_batch_sizes(batch, 2) == [6, 2]
    assert mini_batch_sizes(batch, 4) == [3, 3, 1, 1]
    with pytest.raises(ValueError, match="4 trajectories do not divide into 3"):
        mini_batch_sizes(batch, 3)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ranks=st.integers(1, 4),
    balance=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padding_rows_fill_up_ranks_and_are_taken_out_again(sizes: list[int], ranks: int, balance: bool, seed: int):
    total = sum(sizes)
    of_tokens = ("response_mask", "distillation_mask", "observation_weights")
    ids = torch.arange(1, total + 1)
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(1, 9, total))
    batch = DataProto.from_dict(
        tensors={
            "id": ids,
            "attention_mask": (torch.arange(8) < lengths[:, None]).long(),
            **{name: torch.ones(total, 2) for name in of_tokens},
            "trajectory_count": torch.ones(total, dtype=torch.long),
        }
    )
    dealt = deal(batch, ranks, balance=balance, sizes=sizes, pads=True)
    assert dealt.sizes == [-(-size // ranks) for size in sizes]
    assert len(dealt.rows) == ranks * sum(dealt.sizes)
    counted = dealt.rows.batch["trajectory_count"].bool()
    assert sorted(dealt.rows.batch["id"][counted].tolist()) == ids.tolist()
    assert all(torch.equal(dealt.rows.batch[name].bool().any(-1), counted) for name in of_tokens)
    start = 0
    for k, size in enumerate(sizes):  # mini-batch k of all ranks
        before = sum(dealt.sizes[:k])
        parts = [part[before : before + dealt.sizes[k]] for part in dealt.rows.batch["id"].chunk(ranks)]
        assert set(torch.cat(parts).tolist()) == set(ids[start : start + size].tolist())
        start += size
    results = dealt.rows.select(batch_keys=["id"])
    results.batch["id"][sorted(dealt.padding)] = 0  # a row with an empty mask has no log-probs
    assert dealt.restore(results).batch["id"].tolist() == ids.tolist()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_split_trajectory_and_padding_leave_the_loss_and_its_gradient(mode: str):
    """Trajectories of 3 and 2 tokens; the first as one sequence, or as two, with a padding row."""
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64, requires_grad=True)
    whole_mask, split_mask = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]])

    def loss(rows: list[list[int]], mask: Tensor, trajectories: list[str] | None) -> Tensor:
        matrix = torch.stack([torch.stack([losses[i] if i >= 0 else losses[0] * 7 for i in row]) for row in rows])
        prompts = ["p"] * (len(mask) - 1) + ["q"]
        made = prepare_aggregation(mode, mask, prompts, trajectories)
        weights = made.get("row_weights")
        if trajectories is not None:  # the padding row repeats the last, with an empty mask and no weight
            matrix, mask = torch.cat([matrix, matrix[-1:]]), torch.cat([mask, torch.zeros_like(mask[-1:])])
            weights = None if weights is None else torch.cat([weights, weights[-1:]])
        return agg_loss(matrix, mask, mode, batch_num_tokens=5, global_batch_size=2, row_weights=weights)

    one = loss([[0, 1, 2], [3, 4, -1]], whole_mask, None)
    several = loss([[0, 1, -1], [2, -1, -1], [3, 4, -1]], split_mask, ["a", "a", "b"])
    torch.testing.assert_close(several, one, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(several, losses), torch.autograd.grad(one, losses), rtol=1e-6, atol=0
    )


def test_a_trajectory_is_counted_on_its_first_row():
    made = prepare_aggregation("token-mean", torch.ones(5, 1), [], ["a", "a", "b", "c", "c"])
    assert made["trajectory_count"].tolist() == [1, 0, 1, 1, 0]
    made = prepare_aggregation("seq-mean-token-mean", torch.tensor([[1, 1], [1, 0], [0, 0]]), [], ["a", "a", "b"])
    assert made["row_weights"].tolist() == pytest.approx([1 / 6, 1 / 6, 0])


def test_resampling_draws_trajectories_with_all_their_sequences():
    batch = with_scores(rows_of(TWO_PROMPTS), [1, 1, 1, 0.5, 0.5, 0.5, 2, 0])
    seen: list[list[float]] = []

    def twice_the_second(rows: DataProto) -> DataProto:
        seen.append(rows.batch["token_level_scores"].sum(-1).tolist())
        return rows.select_idxs([1, 1, 3, 0])

    drawn = resampled(batch, twice_the_second)
    assert seen == [[1, 0.5, 2, 0]]
    assert drawn.non_tensor_batch["trajectory_id"].tolist() == [*["p/1#0"] * 3, *["p/1#1"] * 3, "q/1#2", *["p/0#3"] * 3]
    assert drawn.batch["response_mask"].tolist() == [TWO_PROMPTS[row][2] for row in (3, 4, 5, 3, 4, 5, 7, 0, 1, 2)]


def test_dynamic_sampling_keeps_all_sequences_of_informative_prompts():
    rows = [*TWO_PROMPTS, ("r/0", "main", [1, 0, 0]), ("r/1", "main", [1, 0, 0]), ("r/1", "helper", [1, 0, 0])]
    # Scores of p: 1 and 0; of q: equal; of r: 0.5 and 0, of s: as p.
    scores = [1, 1, 1, 0, 0, 0, 1, 1, 0.5, 0, 0]
    first = with_scores(rows_of(rows), scores)
    second = with_scores(
        rows_of([(name.replace("p", "s"), agent, mask) for name, agent, mask in TWO_PROMPTS[:6]]), scores[:6]
    )
    draws = [Draw(b, b.non_tensor_batch["uid"], np.ones(len(b), dtype=bool)) for b in (first, second)]
    batch, metrics = fill_batch(iter(draws), FilterGroupsConfig(enable=True, metric="seq_reward"), 2, 2)
    assert batch.non_tensor_batch["trajectory_id"].tolist() == [*["p/0"] * 3, *["p/1"] * 3, "r/0", "r/1", "r/1"]
    assert metrics["training/filter_groups/num_gen_batches"] == 1
    assert metrics["training/filter_groups/kept_ratio"] == pytest.approx(2 / 3)
    batch, metrics = fill_batch(iter(draws), FilterGroupsConfig(enable=True, metric="seq_reward"), 3, 2)
    assert len(batch) == 9 + 6
    # Over the scores of eight trajectories: 1 + 0 + 1 + 1 + 0.5 + 0 + 1 + 0.
    assert metrics["training/filter_groups/seq_reward/mean"] == pytest.approx(4.5 / 8)
