"""What a policy loss declares: columns, what is prepared for it, where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from verl.algorithms import (
    clipped_tokens,
    get_policy_loss_fn,
    policy_loss_columns,
    policy_loss_info,
    prepare_policy_loss,
    register_policy_loss,
)
from verl.errors import ConfigError
from verl.workers.config import ActorConfig


def register_mine(made: dict) -> None:
    def prepare(columns, config, seed):
        return {key: columns["advantages"] * value + seed for key, value in made.items()}

    @register_policy_loss("mine", paper="https://arxiv.org/abs/1", prepare=prepare, modes=["token-sum"])
    def mine(log_prob, ref_log_prob, rollout_log_probs=None, my_baseline=None, scale=2.0): ...


def test_what_it_declares_is_read_from_its_parameters():
    register_mine({"my_baseline": 3})
    info = policy_loss_info("mine")
    assert info.columns == {"ref_log_prob"}
    assert info.optional_columns == {"rollout_log_probs"}
    assert info.prepared_columns == {"my_baseline"}
    assert policy_loss_columns("mine") == {"ref_log_prob", "my_baseline"}
    assert not info.takes_weights
    assert (info.modes, info.paper_mode) == (("token-sum",), None)


def test_prepare_gets_the_mini_batch_and_a_seed():
    register_mine({"my_baseline": 3})
    made = prepare_policy_loss("mine", {"advantages": torch.ones(2, 2)}, config=None, seed=4)
    assert_close(made, {"my_baseline": torch.full((2, 2), 7.0)})
    assert prepare_policy_loss("vanilla", {}, config=None, seed=0) == {}


@pytest.mark.parametrize("made", [{}, {"my_baselin": 1}, {"my_baseline": 1, "more": 1}])
def test_prepare_makes_what_the_loss_names(made: dict):
    register_mine(made)
    with pytest.raises(ConfigError, match=r"made columns \[.*\], but the loss has parameters .* \['my_baseline'\]"):
        prepare_policy_loss("mine", {"advantages": torch.ones(1, 1)}, config=None, seed=0)


def test_unknown_losses_are_named():
    for ask in (policy_loss_info, policy_loss_columns):
        with pytest.raises(ConfigError, match=r"unknown policy loss 'gsop'.*Did you mean 'gspo'"):
            ask("gsop")


def test_the_losses_of_the_guides_work_as_they_say():
    """Each block of the guides is run; the loss with a prepared mean is the same in two parts as in one."""
    docs = Path(__file__).parents[2] / "docs"
    section = (docs / "extending.md").read_text().split("## A policy loss")[1].split("\n## ")[0]
    for guide in (section, (docs / "internals" / "policy_losses.md").read_text()):
        _, *blocks = guide.split("```python\n")
        assert len(blocks) == 1
        exec(blocks[0].split("```")[0], {})
    config = ActorConfig(global_batch_info={"batch_num_tokens": 3, "global_batch_size": 2})
    columns = {
        "log_prob": torch.tensor([[-1.0, -2.0], [-3.0, -9.0]]),
        "advantages": torch.tensor([[3.0, 0.0], [0.0, 9.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    made = prepare_policy_loss("centred_pg", columns, config, seed=0)
    assert_close(made["mean_advantage"], torch.ones(2))

    def loss(*rows: int) -> torch.Tensor:
        part = {key: value[list(rows)] for key, value in {**columns, **made}.items()}
        return get_policy_loss_fn("centred_pg")(**part, loss_agg_mode="token-mean", config=config)[0]

    # 1·(3-1) + 2·(0-1) + 3·(0-1), over 3 tokens
    assert_close(loss(0, 1), torch.tensor((2.0 - 2.0 - 3.0) / 3))
    assert_close(loss(0) + loss(1), loss(0, 1))
    assert policy_loss_info("plain_pg").takes_weights


def test_clipped_tokens_are_those_that_a_bound_of_the_loss_holds():
    # bounds 0.8 and 1.2, dual clip 3. Ratios and advantages: 1.5 with A = 1 is above; with A = -1 it is not clipped;
    # 0.5 with A = -1 is below; 4 with A = -1 meets the dual clip; 1 is free; the last token is masked.
    ratio = torch.tensor([[1.5, 1.5, 0.5, 4.0, 1.0, 1.5]])
    columns = {
        "old_log_probs": torch.full((1, 6), -1.0),
        "advantages": torch.tensor([[1.0, -1.0, -1.0, -1.0, 1.0, 1.0]]),
        "response_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
    }
    config = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    clipped = clipped_tokens(policy_loss_info("vanilla"), ratio.log() - 1, columns, config)
    assert clipped is not None
    assert clipped.tolist() == [[True, False, True, True, False, False]]
    free = clipped_tokens(policy_loss_info("gpg"), ratio.log() - 1, columns, config)
    assert free is not None
    assert not free.any()
