"""Estimators for agents: turns from one state, roles, proposers and solvers; by hand and what they reduce to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from tests.support.estimators import SETTINGS, conversations, random_batch
from verl.algorithms import (
    RoleBaselines,
    compute_advantages,
    compute_gigpo_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_per_turn_advantage,
    compute_hierarchical_grpo_advantage,
    compute_rae_advantage,
)
from verl.config import AlgoConfig
from verl.errors import SchemaError, UnsupportedError
from verl.protocol import DataProto
from verl.trainer.ppo.stages import compute_advantage, with_role_baselines

# Two siblings of three turns of one token; the environment says "seven" or "eight" between them.
MASK = tensor([[1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0]])
SAID = conversations([["go", "seven", "seven"], ["go", "eight", "seven"]])
REWARDS = tensor([[0.0, 0.0, 0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])


@pytest.mark.proof("by hand", "gigpo")
def test_gigpo_by_hand():
    plain = {"gamma": 0.5, "norm_adv_by_std_in_grpo": False}
    found, returns = compute_gigpo_advantage(REWARDS, MASK, ["p", "p"], SAID, step_advantage_weight=3.0, **plain)
    # R = 4, 0: A^E = 2, -2. G = 1, 2, 4 and 0, 0, 0 with Γ = 1/2.
    # states: the prompt (G 1 and 0: ±0.5); "eight", once: 0; "seven", three times (G 2, 4, 0, mean 2: 0, 2, -2)
    expected = [[2 + 3 * 0.5, 0, 2 + 3 * 0.0, 0, 2 + 3 * 2.0, 0], [-2 - 3 * 0.5, 0, -2 + 0.0, 0, -2 - 3 * 2.0, 0]]
    assert_close(found, tensor(expected))
    assert_close(returns, found)
    scaled, _ = compute_gigpo_advantage(REWARDS, MASK, ["p", "p"], SAID, gamma=0.5, epsilon=0.0)
    root = 2**0.5  # deviations: of R 8/√2, of the prompt 1/√2, of "seven" 2
    assert_close(scaled[0, ::2], tensor([2 * root / 4 + 0.5 * root, 2 * root / 4, 2 * root / 4 + 1.0]))


def test_states_of_other_prompts_are_other_states():
    apart, _ = compute_gigpo_advantage(REWARDS, MASK, ["p", "q"], SAID, gamma=0.5, norm_adv_by_std_in_grpo=False)
    # A response alone keeps its reward; its two turns from the state "seven" have G 2 and 4
    assert_close(apart, tensor([[4.0, 0, 4.0 - 1.0, 0, 4.0 + 1.0, 0], [0.0] * 6]))


def test_the_state_is_the_observation_whatever_tokens_close_the_turn_before_it():
    # Row 1's first turn was cut: the template closes it by a token more. Its tool call has another id.
    mask = tensor([[1, 0, 1, 0], [1, 0, 0, 1]])
    said = conversations([["go", "wall"], ["go", "wall"]])
    said[0][2]["tool_call_id"], said[1][2]["tool_call_id"] = "a", "b"
    rewards = tensor([[0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found, _ = compute_gigpo_advantage(rewards, mask, ["p", "p"], said, norm_adv_by_std_in_grpo=False)
    # A^E = ±2; both turns of each come from a state that the other has too: G = 4 and 0, A^S = ±2
    assert_close(found, tensor([[4.0, 0, 4.0, 0], [-4.0, 0, 0, -4.0]]))


def test_the_messages_of_every_turn_are_needed():
    with pytest.raises(SchemaError, match="row 0 has 3 turns of the policy in response_mask"):
        compute_gigpo_advantage(REWARDS, MASK, ["p", "p"])
    image = conversations([["go", "seven", "seven"]] * 2)
    image[1][4]["content"] = [{"type": "image"}]
    with pytest.raises(UnsupportedError, match="in row 1 the environment has shown an image"):
        compute_gigpo_advantage(REWARDS, MASK, ["p", "p"], image)
    single = tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    found, _ = compute_gigpo_advantage(REWARDS, single, ["p", "p"])  # of a single turn the state is the prompt
    assert (found == 0).all()


@pytest.mark.proof("reductions", "gigpo")
@pytest.mark.parametrize("seed", range(4))
def test_gigpo_without_its_steps_is_grpo(seed: int):
    batch = random_batch(seed)
    found, _ = compute_advantages("gigpo", batch, SETTINGS | {"step_advantage_weight": 0.0})
    assert_close(found, compute_advantages("grpo", batch, SETTINGS)[0])


@pytest.mark.proof("reductions", "gigpo")
def test_gigpo_where_the_number_of_a_turn_is_its_state_is_grpo_and_grpo_per_turn():
    batch = random_batch(3, density=1.1)
    batch["response_mask"][:, [2, 5]] = 0
    arguments = [batch[key] for key in ("token_level_rewards", "response_mask", "index")]
    found, _ = compute_gigpo_advantage(*arguments, conversations([["go", 3, 4]] * 6), gamma=0.9)
    whole, _ = compute_grpo_outcome_advantage(*arguments)
    assert_close(found, whole + compute_grpo_per_turn_advantage(*arguments, gamma=0.9)[0])


def test_gigpo_refuses_trajectories_whose_states_are_prompts():
    ids = np.array(["0/0", "0/0"], dtype=object)
    tensors = {"response_mask": MASK, "token_level_rewards": REWARDS, "token_level_scores": REWARDS}
    objects = {
        "uid": np.array(["0", "0"], dtype=object),
        "trajectory_id": ids,
        "agent": np.array(["main"] * 2, dtype=object),
    }
    with pytest.raises(UnsupportedError, match="'gigpo' compares turns by what the environment said before them"):
        compute_advantage(DataProto.from_dict(tensors=tensors, non_tensors=objects), "gigpo")


# ---- proposers and solvers ----------------------------------------------------------------------

# Of one prompt two proposed problems, each with a proposer and solvers: rewards of the documentation's example
AGENTS = ["main", "solver/1", "solver/2", "solver/3", "main", "solver/1", "solver/2"]
TRAJECTORIES = np.array(["p/0"] * 4 + ["p/1"] * 3, dtype=object)
GROUPS = np.array(["p" if agent == "main" else f"p/{agent}" for agent in AGENTS], dtype=object)


@pytest.mark.proof("by hand", "hierarchical_grpo")
def test_hierarchical_grpo_by_hand():
    rewards = tensor([[0.5], [1.0], [1.0], [0.0], [0.1], [0.0], [1.0]])
    found, _ = compute_hierarchical_grpo_advantage(
        rewards, torch.ones(7, 1), GROUPS, TRAJECTORIES, np.array(AGENTS, dtype=object), ("solver",),
        norm_adv_by_std_in_grpo=False,
    )  # fmt: skip
    # proposers 0.5 and 0.1 with each other; solvers of the first 1, 1, 0 with mean 2/3, of the second 0, 1
    assert found[:, 0].tolist() == pytest.approx([0.2, 1 / 3, 1 / 3, -2 / 3, -0.2, -0.5, 0.5])


@pytest.mark.proof("reductions", "hierarchical_grpo")
@pytest.mark.parametrize("episode_agents", [None, ("other",)])
def test_hierarchical_grpo_without_such_agents_is_grpo(episode_agents: tuple | None):
    batch = random_batch(2)
    found, _ = compute_advantages("hierarchical_grpo", batch, SETTINGS | {"episode_agents": episode_agents})
    assert_close(found, compute_advantages("grpo", batch, SETTINGS)[0])


def test_hierarchical_grpo_names_its_agents():
    (problem,) = AlgoConfig(adv_estimator="hierarchical_grpo").problems("algorithm")
    assert "algorithm.episode_agents" in str(problem)


# ---- roles --------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "rae")
def test_rae_by_hand():
    rewards = tensor([[0.0, 1.0, 9.0], [-1.0, 0.0, 9.0]])
    mask = tensor([[1, 1, 0], [1, 1, 0]])
    found, _ = compute_rae_advantage(rewards, mask, tensor([0.25, -0.5]))
    assert found.tolist() == [[0.75, 0.75, 0.0], [-0.5, -0.5, 0.0]]


@pytest.mark.proof("reductions", "rae")
def test_rae_without_baselines_is_reinforce():
    batch = random_batch(4)
    found, _ = compute_rae_advantage(batch["token_level_rewards"], batch["response_mask"], torch.zeros(6))
    rewards = (batch["token_level_rewards"] * batch["response_mask"]).sum(-1, keepdim=True)
    assert_close(found, rewards * batch["response_mask"])


def game(winner: str) -> DataProto:
    """Two agents of one trajectory; the first plays two sequences, and turns bring the rewards."""
    won, lost = (1.0, -1.0) if winner == "main" else (-1.0, 1.0)
    rewards = tensor([[0.0, 0.0], [0.0, won], [0.0, lost]])
    tensors = {"response_mask": torch.ones(3, 2), "token_level_rewards": rewards, "token_level_scores": rewards}
    objects = {
        "uid": ["g"] * 3, "trajectory_id": ["g/0"] * 3, "agent": ["main", "main", "second"],
        "data_source": ["poker"] * 3, "turn_scores": [[0.0], [won], [lost]],
    }  # fmt: skip
    columns = {name: np.array([*values, None], dtype=object)[:-1] for name, values in objects.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_the_trainer_keeps_a_baseline_for_each_role():
    baselines = RoleBaselines(decay=0.5)
    batch, metrics = with_role_baselines(game("main"), baselines)
    assert batch.batch["role_baselines"].tolist() == [0.0, 0.0, 0.0]
    assert metrics == {"rae/baseline/poker/main": 0.5, "rae/baseline/poker/second": -0.5}  # ½·0 + ½·(±1)
    resumed = RoleBaselines(decay=0.5)
    resumed.load_state_dict(baselines.state_dict())
    batch, _ = with_role_baselines(game("second"), resumed)
    assert batch.batch["role_baselines"].tolist() == [0.5, 0.5, -0.5]
    assert resumed.values == {"poker/main": -0.25, "poker/second": 0.25}  # ½·½ - ½
    advantages = compute_advantage(batch, "rae").batch["advantages"]
    assert advantages.tolist() == [[-1.5, -1.5], [-1.5, -1.5], [1.5, 1.5]]
