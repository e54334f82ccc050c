"""Sizes that follow from others."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.trainer.config.support import Run
from verl.trainer.config.sizes import derived_sizes, resolve_device, sizes_table


def test_sizes_by_hand(run: Run):
    # 8 prompts × 4 responses = 32 per step; mini-batches of 4 prompts: 2, each trained on 3 times;
    # 4 × 4 = 16 responses on 2 ranks: 8 each; 32 × (100 + 50) tokens; 35 rows make 4 steps, 3 are left over.
    config = run.load(
        {
            "data.max_prompt_length": 100,
            "data.max_response_length": 50,
            "actor_rollout_ref.actor.ppo_epochs": 3,
            "trainer.total_epochs": 5,
        }
    )
    sizes = derived_sizes(config, 35)
    assert (sizes.ranks, sizes.prompts_per_step, sizes.responses_per_step) == (2, 8, 32)
    assert (sizes.mini_batches_per_step, sizes.mini_batch_per_rank) == (2, 8)
    assert sizes.max_tokens_per_step == 4800
    assert (sizes.steps_per_epoch, sizes.total_steps) == (4, 20)
    assert (sizes.optimizer_steps_per_step, sizes.optimizer_steps) == (6, 120)
    assert sizes.micro_batch == "2 responses"


def test_a_given_number_of_steps_wins(run: Run):
    sizes = derived_sizes(run.load({"trainer.total_training_steps": 7}), 35)
    assert (sizes.steps_per_epoch, sizes.total_steps) == (4, 7)


def test_before_the_data_is_read(run: Run):
    sizes = derived_sizes(run.load())
    assert (sizes.steps_per_epoch, sizes.total_steps) == (None, 0)
    assert "known once the data is read" in str(sizes)


def test_budget_by_tokens(run: Run):
    sizes = derived_sizes(run.load({"actor_rollout_ref.actor.use_dynamic_bsz": True}))
    assert sizes.micro_batch == "up to 16,384 tokens"


def test_table_and_text_say_the_same(run: Run):
    sizes = derived_sizes(run.load(), 800)
    console = Console(record=True, width=100)
    console.print(sizes_table(sizes))
    table = console.export_text()
    for name, value in sizes.rows():
        assert name in table
        assert value in table
        assert f"{name}  " in str(sizes)


@pytest.mark.parametrize(
    "asked, available, device", [("cuda", True, "cuda"), ("cuda", False, "cpu"), ("cpu", True, "cpu")]
)
def test_device(run: Run, asked: str, available: bool, device: str):
    assert resolve_device(run.load({"trainer.device": asked}), available) == device


def test_the_table_says_where_the_ranks_come_from(run: Run, monkeypatch: pytest.MonkeyPatch):
    assert dict(derived_sizes(run.load()).rows())["ranks"] == "2 (nnodes=1, n_gpus_per_node=2)"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert derived_sizes(run.load()).device == "cpu (no GPU on this machine, or in the Ray cluster of the run)"
    assert derived_sizes(run.load({"trainer.device": "cpu"})).device == "cpu"
    monkeypatch.setattr("verl.trainer.config.sizes.has_driver", lambda: True)
    assert derived_sizes(run.load()).device == "cpu (PyTorch cannot use the GPU of this machine: verl doctor)"


def test_time_limits_that_were_not_set_follow_the_largest_model(run: Run, caplog: pytest.LogCaptureFixture):
    # 141 GB at 0.2 GB/s are 705 s: five times that for a collective, ten times for a call.
    with (run.folder / "model" / "more.safetensors").open("wb") as file:
        file.truncate(141 * 10**9)
    with caplog.at_level("INFO"):
        config = run.load()
    assert (config.actor_rollout_ref.nccl_timeout, config.trainer.recovery.hang_timeout_s) == (3525, 7050)
    assert "actor_rollout_ref.nccl_timeout: 3525 and not 600, because a model of 141 GB is read" in caplog.text
    assert config.trainer.ray_wait_register_center_timeout == 300
    many = {"trainer.nnodes": 128, "trainer.n_gpus_per_node": 8, "data.train_batch_size": 1024}
    many["actor_rollout_ref.actor.ppo_mini_batch_size"] = 1024
    assert run.load(many).trainer.ray_wait_register_center_timeout == 2048
    many["trainer.ray_wait_register_center_timeout"] = 100
    assert run.load(many, explicit=set(many)).trainer.ray_wait_register_center_timeout == 100
    keys = {"actor_rollout_ref.nccl_timeout": 600, "trainer.recovery.hang_timeout_s": None}
    config = run.load(keys, explicit=set(keys))
    assert (config.actor_rollout_ref.nccl_timeout, config.trainer.recovery.hang_timeout_s) == (600, None)
