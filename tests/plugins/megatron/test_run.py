"""main_ppo with strategy=megatron on Ray: the numbers of one local rank under FSDP, and a resumed run's bits."""

import shutil

import pytest

from tests.support.tiny_run import same
from tests.trainer.test_run import ALL_MODELS, assert_ranks_are_recorded, assert_same_steps, comparable, train
from verl.testing.models import tiny_model_dir

pytest.importorskip("verl.plugins.megatron.library")

__all__ = ["train"]

SECTIONS = ("actor_rollout_ref__actor", "actor_rollout_ref__ref", "critic", "reward_model")
FP32 = {f"{section}__megatron__dtype": "float32" for section in SECTIONS}
FP32 |= {"reward_model__model__fsdp_config__dtype": "float32"}
MEGATRON = {f"{section}__strategy": "megatron" for section in SECTIONS if not section.endswith("ref")}
# AdamW's step is lr · m / (√v + ε): with the usual tiny ε the rounding of a gradient near 0 becomes a step of lr.
SMALL_STEPS = {"actor_rollout_ref__actor__optim__lr": 1e-4, "critic__optim__lr": 1e-4}
SMALL_STEPS |= {f"{section}__optim__override_optimizer_config": "{eps:1e-4}" for section in (SECTIONS[0], "critic")}
GRPO = {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__use_kl_loss": "true"}


def layout(ranks, tensor=1, pipeline=1, context=1, expert=1, pieces=1):
    """Experts are whole on one rank."""
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    if expert > 1:
        sizes |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
    if pieces > 1:
        sizes["virtual_pipeline_model_parallel_size"] = pieces
    actor = {f"actor_rollout_ref__actor__megatron__{name}": size for name, size in sizes.items()}  # others follow it
    return {"trainer__controller": "ray", "trainer__n_gpus_per_node": ranks, **MEGATRON, **actor}


def test_two_tensor_parallel_ranks_give_the_numbers_of_one_and_resume_bit_by_bit(train, ray_cluster, tmp_path):
    """The trained model is split over two ranks, each of which generates with a whole one."""
    settings = GRPO | SMALL_STEPS | FP32 | {"actor_rollout_ref__rollout__name": "native"}
    local = train(**settings)
    megatron = settings | layout(2, tensor=2) | {"trainer__save_freq": 1}
    first = train(**megatron)
    assert_same_steps(local, first, rel=1e-5)
    stage_of = {"generate_sequences": "gen", "update_actor": "update_actor"}
    assert_ranks_are_recorded(tmp_path / "metrics.jsonl", ["global_pool 0", "global_pool 1"], stage_of)
    folder = tmp_path / "checkpoints"
    assert (folder / "global_step_1" / "actor" / "megatron_config.json").is_file()
    shutil.rmtree(folder / "global_step_2")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    again = train(**megatron)
    assert again.keys() == {2}
    assert same(comparable(again[2]), comparable(first[2]))


@pytest.mark.slow
def test_adapters_of_a_run_under_fsdp_go_on_over_two_tensor_parallel_ranks(train, ray_cluster, tmp_path):
    settings = GRPO | SMALL_STEPS | FP32 | {"actor_rollout_ref__rollout__name": "native"}
    train(**settings, actor_rollout_ref__model__lora_rank=4, trainer__save_freq=2)
    shutil.move(tmp_path / "checkpoints" / "global_step_2" / "actor" / "lora_adapter", tmp_path / "warm")
    shutil.rmtree(tmp_path / "checkpoints")
    settings |= {"actor_rollout_ref__model__lora_adapter_path": str(tmp_path / "warm")}
    assert_same_steps(train(**settings), train(**settings | layout(2, tensor=2)), rel=1e-5)


LAYOUTS = {
    "one rank": layout(1),
    "2 copies": layout(2),
    "pp 2": layout(2, pipeline=2),
    "pp 2, two pieces each": layout(2, pipeline=2, pieces=2),
    "cp 2": layout(2, context=2),
    "ep 2": layout(2, expert=2),
    "tp 2 x pp 2": layout(4, tensor=2, pipeline=2),
    "tp 2, 2 copies": layout(4, tensor=2),
    "tp 2, ep 2": layout(2, tensor=2, expert=2),
    "pp 2, 2 copies": layout(4, pipeline=2),
    "tp 2 x cp 2": layout(4, tensor=2, context=2),
}


def models_for(sizes, folder):
    """Models that the layout can divide: with experts, or with a layer for each piece of a pipeline."""
    names = " ".join(sizes)
    if "expert" in names:
        kind = {"family": "qwen3_moe"}
    elif "virtual" in names:
        kind = {"num_hidden_layers": 4}
    else:
        return {}
    model = tiny_model_dir(folder / "fitting", **kind)
    reward_model = tiny_model_dir(folder / "fitting_reward_model", task="sequence_classification", **kind)
    paths = {"actor_rollout_ref": model, "critic": model, "reward_model": reward_model}
    return {f"{section}__model__path": path for section, path in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ALL_MODELS, GRPO], ids=["gae", "grpo"])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("packed", ["true", "false"])
def test_every_layout_gives_the_numbers_of_one_local_rank(train, ray_cluster, tmp_path, settings, sizes, packed):
    common = (
        settings
        | SMALL_STEPS
        | FP32
        | models_for(sizes, tmp_path)
        | {
            "trainer__total_training_steps": 3,
            "actor_rollout_ref__model__use_remove_padding": packed,
            "critic__model__use_remove_padding": packed,
            "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
            "critic__ppo_micro_batch_size_per_gpu": 2,
        }
    )
    assert_same_steps(train(**common), train(**common, **sizes), rel=1e-5)
