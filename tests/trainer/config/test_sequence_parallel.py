"""Keys of sequence and tensor parallelism: groups of ranks in the rules about sizes, heads, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.trainer.config.support import Run, only
from verl.config import RMConfig, SFTConfig
from verl.testing.models import hollow_model_dir
from verl.trainer.config.sizes import derived_sizes

ACTOR = "actor_rollout_ref.actor"
SIZE = "ulysses_sequence_parallel_size"


def test_both_names_are_one_setting_and_the_reference_follows(run: Run):
    roles = run.load({f"{ACTOR}.{SIZE}": 2}, explicit=[f"{ACTOR}.{SIZE}"]).actor_rollout_ref
    assert roles.actor.fsdp_config.ulysses_sequence_parallel_size == 2
    roles = run.load({f"{ACTOR}.fsdp_config.{SIZE}": 2}).actor_rollout_ref
    assert roles.actor.ulysses_sequence_parallel_size == 2
    roles = run.script(" ".join(f"{key}={value}" for key, value in (run.ppo | {f"{ACTOR}.{SIZE}": 2}).items()))
    assert roles.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert roles.critic.ulysses_sequence_parallel_size == 1
    two = {f"{ACTOR}.{SIZE}": 2, f"{ACTOR}.fsdp_config.{SIZE}": 4, "trainer.n_gpus_per_node": 4}
    message = only(run.refusal(two))
    assert f"this is the same setting as {ACTOR}.fsdp_config.{SIZE}, which is set to 4" in message


def test_each_model_has_its_own(run: Run):
    run.load({f"critic.{SIZE}": 3})  # GRPO has no critic, so nothing is wrong with it
    message = run.refusal(
        {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 2, f"critic.{SIZE}": 3}
    )
    assert f"critic.model.fsdp_config.{SIZE}=3: so many ranks share each sequence" in message
    assert "it does not divide 2 ranks" in message


def test_heads_are_read_from_the_models_config(run: Run):
    (run.folder / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    run.load({f"{ACTOR}.{SIZE}": 2})
    message = run.refusal({f"{ACTOR}.{SIZE}": 4, "trainer.n_gpus_per_node": 4})
    assert f"{ACTOR}.fsdp_config.{SIZE}=4: each rank computes equally many of the model's 6 attention heads" in message
    assert "divisors of 2" in message  # of 6 heads and of 4 ranks


def test_mini_batches_divide_over_groups_of_ranks(run: Run):
    # 1 prompt × 4 responses: 8 ranks cannot share them, 2 groups of 4 can, with 2 responses each.
    one_prompt = {f"{ACTOR}.ppo_mini_batch_size": 1, "trainer.n_gpus_per_node": 8}
    assert "which 8 ranks cannot share equally" in run.refusal(one_prompt)
    config = run.load(one_prompt | {f"{ACTOR}.{SIZE}": 4})
    assert derived_sizes(config).mini_batch_per_rank == 2
    assert derived_sizes(config).micro_batch == "2 responses, shared by 4 ranks"
    message = run.refusal(one_prompt | {f"{ACTOR}.{SIZE}": 4, "actor_rollout_ref.rollout.n": 3})
    assert "3 responses, which 2 groups of 4 ranks (ulysses_sequence_parallel_size) cannot share equally" in message


def test_budgets_are_those_of_a_rank(run: Run):
    long = {"data.max_prompt_length": 1000, "data.max_response_length": 3000, f"{ACTOR}.use_dynamic_bsz": True}
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    run.load(long | {budget: 2000, f"{ACTOR}.{SIZE}": 2})
    message = run.refusal(long | {budget: 1999, f"{ACTOR}.{SIZE}": 2})
    assert (
        f"{budget}=1999: the longest sequence has 4000 tokens and must fit into the budgets of the 2 ranks" in message
    )
    assert "at least 2000" in message


def test_older_sizes_are_divided_by_groups(run: Run):
    # 8 sequences over all ranks: 4 for each of 2 ranks, 8 for the one group of both.
    older = {f"{ACTOR}.ppo_micro_batch_size": 8, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    assert run.load(older).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert run.load(older | {f"{ACTOR}.{SIZE}": 2}).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8


@pytest.mark.parametrize("root", [SFTConfig, RMConfig])
def test_supervised_batches_divide_over_groups(run: Run, root):
    settings = {"trainer.n_gpus_per_node": 4, "data.train_batch_size": 2, "data.micro_batch_size_per_gpu": 1}
    assert "4 ranks cannot share" in only(run.refusal(settings, root))
    assert run.load(settings | {f"engine.{SIZE}": 2}, root).engine.ulysses_sequence_parallel_size == 2
    message = only(run.refusal(settings | {f"engine.{SIZE}": 3}, root))
    assert f"engine.{SIZE}=3: so many ranks share each sequence" in message


def test_ranks_that_divide_matrices_share_rows(run: Run):
    tensor = f"{ACTOR}.fsdp_config.tensor_parallel_size"
    divided = {tensor: 4, f"{ACTOR}.ppo_mini_batch_size": 1, "trainer.n_gpus_per_node": 8}
    config = run.load(divided)
    assert (derived_sizes(config).mini_batch_per_rank, derived_sizes(config).micro_batch[-17:]) == (
        2,
        "shared by 4 ranks",
    )
    older = {f"{ACTOR}.ppo_micro_batch_size": 4, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    assert run.load(divided | older).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    message = run.refusal(divided | {"actor_rollout_ref.rollout.n": 3})
    assert "2 groups of 4 ranks (fsdp_config.tensor_parallel_size) cannot share equally" in message
    message = only(run.refusal({tensor: 2, f"{ACTOR}.fsdp_config.fsdp_size": 3, "trainer.n_gpus_per_node": 8}))
    assert "fsdp_size=3: it does not divide 4 groups of tensor_parallel_size=2 ranks" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.n_gpus_per_node": 3}, "tensor_parallel_size=2: it does not divide 3 ranks"),
        ({f"{ACTOR}.{SIZE}": 2, "trainer.n_gpus_per_node": 4}, f"{SIZE}=2: ranks that divide matrices"),
        (
            {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.lora.use_dora": True},
            "model.lora.use_dora=true: matrices are divided over ranks",
        ),
        (
            {
                "actor_rollout_ref.model.lora_rank": 4,
                "actor_rollout_ref.model.lora.target_parameters": ["experts.down_proj"],
            },
            "adapters of experts are not",
        ),
        ({"actor_rollout_ref.model.use_liger": True}, "model.use_liger=true: matrices are divided over ranks"),
        ({"actor_rollout_ref.model.enable_activation_offload": True}, "enable_activation_offload=true: matrices"),
        ({f"{ACTOR}.optim.optimizer": "Muon"}, f"{ACTOR}.optim.optimizer=Muon: matrices are divided over ranks"),
        ({"num_local_experts": 9}, "each rank has equally many of the model's num_local_experts=9"),
        ({"num_key_value_heads": 1}, "each rank has equally many of the model's num_key_value_heads=1"),
    ],
)
def test_what_does_not_go_with_divided_matrices(run: Run, settings, message):
    of_model = {key: value for key, value in settings.items() if "." not in key}
    (run.folder / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4} | of_model))
    settings = {key: value for key, value in settings.items() if key not in of_model}
    assert message in run.refusal({f"{ACTOR}.fsdp_config.tensor_parallel_size": 2} | settings)


def test_frozen_models_with_divided_matrices(run: Run):
    (run.folder / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    of_ref = {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size": 2}
    run.load(of_ref | {"actor_rollout_ref.model.enable_activation_offload": True})  # it has no backward pass
    message = only(run.refusal(of_ref | {"actor_rollout_ref.model.use_liger": True}))
    assert "model.use_liger=true: matrices are divided over ranks" in message


def test_teachers_have_matrices_that_ranks_can_divide(run: Run):
    (run.folder / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    teacher = run.folder / "teacher"
    hollow_model_dir(teacher)
    (teacher / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 1}))
    divided = {"engine.tensor_parallel_size": 2, "trainer.n_gpus_per_node": 2, "distillation.model_path": str(teacher)}
    message = only(run.refusal(divided, SFTConfig))
    assert f"each rank has equally many of the model's num_key_value_heads=1, in {teacher}" in message
