"""Keys of the releases v0.8.0, v0.9.0 and 0.10: each is read, translated, told, or refused with why."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from tests.trainer.config.support import Run, only
from verl.compat.toolkit.config import validate_config
from verl.config import GenerationConfig, PPOConfig, Problem, SFTConfig
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.config.key_table import REPLACED_BY_REWARD as REPLACED
from verl.trainer.config.keys import get, keys_of, put
from verl.trainer.config.load import load_config
from verl.trainer.config.overrides import keys_set
from verl.trainer.config.rules_veomni import _why_not_importable
from verl.trainer.config.translate import Translator

ROOTS = {
    "ppo_trainer": PPOConfig,
    "ppo_megatron_trainer": PPOConfig,
    "fully_async_ppo_trainer": PPOConfig,
    "sft_trainer_engine": SFTConfig,
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def released(name: str) -> dict[str, Any]:
    """The keys of a configuration of the releases, and their defaults."""
    lines = (Path(__file__).parent / "keys_releases.txt").read_text().splitlines()
    rows = (line.removeprefix(f"{name} ").split(": ", 1) for line in lines if line.startswith(f"{name} "))
    return {key: json.loads(default) for key, default in rows}


def translated(name: str, changes: dict[str, Any], explicit: Any = ()) -> tuple[list[Problem], str]:
    """What is said against a configuration of the releases with some changes."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        put(tree, key, value)
    problems: list[Problem] = []
    *_, told = Translator.for_root(ROOTS[name], explicit, problems).translate(tree)
    return problems, "\n".join(told)


@pytest.mark.parametrize("name", ROOTS)
def test_a_whole_configuration_of_a_release_is_accepted(name: str):
    problems, _ = translated(name, released(name))
    assert problems == []
    tree: dict[str, Any] = {}
    for key, value in released(name).items():
        put(tree, key, value)
    assert Translator.for_root(ROOTS[name], (), []).unknown(tree) == []
    # The section ``rollout`` of fully_async_main is in its YAML file, which words alone do not show.
    assert Translator.for_root(PPOConfig, (), []).unknown({"rollout": {"n": 2}, "optim": {"n": 2}})[0].key == "optim.n"


def other(value: Any) -> Any:
    """A value other than the default, of its type."""
    if isinstance(value, bool):
        return not value
    return value + 7 if isinstance(value, (int, float)) else "another_value"


@pytest.mark.parametrize("name", ROOTS)
def test_every_key_has_an_outcome(name: str):
    keys = {key: value for key, value in released(name).items() if not key.endswith("_target_")}
    changes = {key: other(value) for key, value in keys.items()}
    problems, told = translated(name, changes, explicit=changes)
    assert [problem.key for problem in problems if problem.cause == "there is no such key"] == []
    assert all(problem.cause for problem in problems)
    assert "no effect: " in told


APPROX = pytest.approx(0.1)
OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"
CASES: list[tuple[dict[str, Any], str, Any]] = [
    ({"model_engine": "megatron"}, f"{ACTOR}.strategy", "megatron"),
    ({"model_engine": "megatron"}, "critic.strategy", "megatron"),
    ({"model_engine": "megatron"}, "actor_rollout_ref.ref.strategy", "megatron"),
    ({f"{ACTOR}.model_engine": "megatron"}, f"{ACTOR}.strategy", "megatron"),
    ({"model_engine": "dp"}, f"{ACTOR}.strategy", "fsdp"),
    ({"critic.fsdp.param_offload": True}, "critic.model.fsdp_config.param_offload", True),
    ({"sandbox_fusion.max_concurrent": 128}, "reward_model.sandbox_fusion.max_concurrent", 128),
    ({"reward.sandbox_fusion.url": "http://x"}, "reward_model.sandbox_fusion.url", "http://x"),
    ({"reward.reward_manager.name": "dapo"}, "reward_manager.name", "dapo"),
    ({f"{ACTOR}.policy_loss.tau_pos": 2.0}, f"{ACTOR}.tau_pos", 2.0),
    ({f"{ACTOR}.policy_loss.tau_neg": 2.0}, f"{ACTOR}.tau_neg", 2.0),
    ({f"{ACTOR}.megatron.router_replay.mode": "R2"}, f"{ACTOR}.router_replay.mode", "R2"),
    ({f"{ACTOR}.fsdp_config.min_num_params": 5}, f"{ACTOR}.fsdp_config.wrap_policy.min_num_params", 5),
    (
        {"actor_rollout_ref.model.override_config.model_config.max_position_embeddings": 9},
        "actor_rollout_ref.model.override_config",
        {"max_position_embeddings": 9},
    ),
    ({f"{ROLLOUT}.skip.enable": True}, f"{ROLLOUT}.skip_rollout", True),
    ({"skip.rollout.dump_dir": "/d"}, f"{ROLLOUT}.skip_dump_dir", "/d"),
    ({f"{ACTOR}.optim.lr_decay_steps": 50}, f"{ACTOR}.optim.total_training_steps", 50),
    ({f"{ACTOR}.optim.min_lr_ratio": None}, f"{ACTOR}.optim.min_lr_ratio", 0.0),
    ({f"{ACTOR}.optim.lr": 1e-5, f"{ACTOR}.optim.min_lr": 1e-6}, f"{ACTOR}.optim.min_lr_ratio", APPROX),
    ({f"{ACTOR}.optim.min_lr": 0.0}, f"{ACTOR}.optim.min_lr_ratio", 0.0),
    ({f"{ACTOR}.optim.lr_warmup_init": None}, f"{ACTOR}.optim.init_lr_ratio", 0.0),
    ({f"{ACTOR}.optim.init_lr_ratio": None}, f"{ACTOR}.optim.init_lr_ratio", 0.0),
    ({f"{ACTOR}.optim.lr": 1e-5, f"{ACTOR}.optim.lr_warmup_init": 1e-6}, f"{ACTOR}.optim.init_lr_ratio", APPROX),
    (
        {f"{ACTOR}.optim.optimizer": "dist_muon", f"{ACTOR}.optim.muon_momentum": 0.9},
        f"{OPTIMIZER}.momentum",
        0.9,
    ),
    ({f"{OPTIMIZER}.optimizer_cpu_offload": True}, f"{ACTOR}.optim.offload_fraction", 1.0),
    (
        {f"{OPTIMIZER}.optimizer_cpu_offload": True, f"{OPTIMIZER}.optimizer_offload_fraction": 0.5},
        f"{ACTOR}.optim.offload_fraction",
        0.5,
    ),
    ({"data.function_tool_path": "/t.py"}, f"{ROLLOUT}.multi_turn.function_tool_path", "/t.py"),
]


@pytest.mark.parametrize("changes, key, there", CASES)
def test_translations(changes: dict[str, Any], key: str, there: Any):
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        put(tree, name, value)
    problems: list[Problem] = []
    translator = Translator.for_root(PPOConfig, changes, problems)
    found, *_ = translator.translate(tree)
    assert problems == []
    assert get(found, key) == there


@pytest.mark.parametrize(
    "changes, key, there",
    [
        ({"engine.strategy": "megatron", "engine.tensor_model_parallel_size": 2}, "tensor_model_parallel_size", 2),
        ({"engine.strategy": "megatron", "engine.param_offload": True}, "param_offload", True),
        ({"engine.strategy": "megatron", "engine.dtype": "float32"}, "dtype", "float32"),
    ],
)
def test_settings_of_megatron_in_the_engine_of_a_supervised_run(changes: dict[str, Any], key: str, there: Any):
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        put(tree, name, value)
    problems: list[Problem] = []
    found, *_ = Translator.for_root(SFTConfig, changes, problems).translate(tree)
    assert problems == []
    assert get(found, f"megatron.{key}") == there


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_engine": "torchtitan"}, "model_engine=torchtitan: it is not in this version"),
        ({"model_engine": "veomni"}, "actor.strategy=veomni: VeOmni is not installed"),
        ({f"{ACTOR}.qat.enable": True}, "training of quantized weights is not in this version"),
        ({"trainer.device": "npu"}, "Ascend devices are not in this version"),
        ({f"{ACTOR}.optim.min_lr": "low"}, "it is no share of lr="),
        (
            {f"{ACTOR}.optim.optimizer": "muon", f"{ACTOR}.optim.muon_match_adamw_update_rms": False},
            "muon_match_adamw_update_rms=false: updates of Muon have the size of AdamW's unless",
        ),
        ({f"{ACTOR}.optim.optimizer": "muon", OPTIMIZER: "momentum"}, "override_optimizer_config=momentum"),
        ({f"{ACTOR}.optim.muon_extra_scale_factor": 0.2}, "adjust_lr_fn says how updates of Muon are scaled"),
        ({f"{ACTOR}.optim.optimizer": "Adamw"}, "torch.optim has no such class. Did you mean 'AdamW'?"),
        ({f"{ACTOR}.optim.optimizer_impl": "apexx.optimizers"}, "the package 'apexx' is not installed"),
        ({f"{ACTOR}.optim.exp_avg_dtype": "bf16"}, "strategy=fsdp moments have the precision of the stored weights"),
        ({f"{ACTOR}.strategy": "fsdp2", "model_engine": "megatron"}, "is the back end of all models"),
    ],
)
def test_refusals(run: Run, changes: dict[str, Any], said: str):
    assert said in only(run.refusal(changes, explicit=changes))


@pytest.mark.parametrize(
    "key, value",
    [
        (f"{ACTOR}.megatron.override_transformer_config.apply_rope_fusion", True),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction", 0.5),
        (f"{ACTOR}.checkpoint.strict", False),
        (f"{ACTOR}.megatron.use_remove_padding", False),
        (f"{ACTOR}.pad_to_length", True),
        (f"{ACTOR}.optim.zero_indexed_step", False),
        (f"{ROLLOUT}.profiler.enable", True),
        (f"{ACTOR}.veomni.param_offload", True),
    ],
)
def test_what_is_told(run: Run, caplog: pytest.LogCaptureFixture, key: str, value: Any):
    assert run.load({key: value}, explicit=[key]) == run.load()
    assert f"no effect: {key} (" in caplog.text


@pytest.mark.parametrize(
    "name, root, overrides, key, there",
    [
        ("ppo_trainer", PPOConfig, ["actor@actor_rollout_ref.actor=megatron_actor"], f"{ACTOR}.strategy", "megatron"),
        ("sft_trainer_engine", SFTConfig, ["engine=megatron", "optim=megatron"], "engine.strategy", "megatron"),
        ("sft_trainer_engine", SFTConfig, ["engine=veomni", "optim=automodel"], "engine.strategy", "veomni"),
        ("sft_trainer_engine", SFTConfig, ["engine=fsdp", "model=hf_model"], "engine.strategy", "fsdp"),
        ("generation_server", GenerationConfig, ["data.train_files=/rows.jsonl"], "data.path", "/rows.jsonl"),
        ("generation_server", GenerationConfig, [f"{ROLLOUT}.n=3"], "data.n_samples", 3),
        ("generation_server", GenerationConfig, [], "data.n_samples", 1),
        ("generation_server", GenerationConfig, [f"{ROLLOUT}.top_k=7"], "rollout.top_k", 7),
        ("generation_server", GenerationConfig, ["actor_rollout_ref.model.path=org/m"], "model.path", "org/m"),
    ],
)
def test_names_of_configurations_and_of_their_groups(name: str, root: type, overrides: list[str], key: str, there: Any):
    found = load_config(compose(overrides, name), root, keys_set(overrides), with_rules=False)
    assert get(found, key) == there


def test_a_part_of_an_absent_feature_is_silent_in_a_whole_configuration(run: Run, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        run.load({f"{ACTOR}.qat.mode": "w4a16"})
    assert "qat" not in caplog.text


def test_settings_of_veomni_are_those_of_fsdp():
    of_actor = {
        "param_offload": True,
        "enable_full_shard": False,
        "fsdp_size": 16,
        "ulysses_parallel_size": 4,
        "moe_implementation": "fused_triton",
        "router_replay.mode": "R2",
        "expert_parallel_size": 8,
    }
    changes = {f"{ACTOR}.veomni.{name}": value for name, value in of_actor.items()}
    tree: dict[str, Any] = {}
    of_ref = {"actor_rollout_ref.ref.veomni.param_offload": True}
    for key, value in {"model_engine": "veomni", **changes, **of_ref}.items():
        put(tree, key, value)
    problems: list[Problem] = []
    found, *_, told = Translator.for_root(PPOConfig, changes, problems).translate(tree)
    assert problems == []
    assert get(found, f"{ACTOR}.strategy") == get(found, "critic.strategy") == "veomni"
    fsdp = get(found, f"{ACTOR}.fsdp_config")
    assert isinstance(fsdp, dict)
    expected = {"param_offload": True, "reshard_after_forward": False, "fsdp_size": 16}
    assert expected.items() <= fsdp.items()
    assert (fsdp["ulysses_sequence_parallel_size"], fsdp["moe_implementation"]) == (4, "fused_triton")
    assert get(found, f"{ACTOR}.router_replay.mode") == "R2"
    assert get(found, "actor_rollout_ref.ref.fsdp_config.param_offload") is True
    assert "experts are sharded over all ranks" in "\n".join(told)


def test_settings_of_an_engine_that_is_not_used_have_no_effect():
    problems, told = translated("ppo_trainer", {f"{ACTOR}.veomni.fsdp_size": 16}, [f"{ACTOR}.veomni.fsdp_size"])
    assert problems == []
    assert "settings of fsdp_config are read" in told


def test_what_veomni_does_not_do(run: Run):
    veomni = {f"{ACTOR}.strategy": "veomni"}
    message = run.refusal(veomni | {f"{ACTOR}.fsdp_config.tensor_parallel_size": 2})
    assert "tensor_parallel_size=2: VeOmni's matrices are not divided" in message
    (run.folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    kernels = {f"{ACTOR}.fsdp_config.moe_implementation": "fused_quack", f"{ACTOR}.use_kl_loss": True}
    assert "ref.fsdp_config.moe_implementation=null: all models of a process" in run.refusal(veomni | kernels)
    same = {"actor_rollout_ref.ref.fsdp_config.moe_implementation": "fused_quack"}
    assert "all models of a process" not in run.refusal(veomni | kernels | same)


def test_versions_with_which_veomni_is_not_imported():
    cause = _why_not_importable([Requirement("pytest"), Requirement("torch<1")])
    assert cause is not None
    assert cause.endswith("is installed, and VeOmni's models here need torch<1")
    assert _why_not_importable([Requirement("pytest")]) is None


def test_veomnis_models_of_one_process_have_the_same_kernels(run: Run):
    changes = {"model_engine": "veomni", "algorithm.adv_estimator": "gae", "critic.model.use_liger": False}
    said = "use_liger=false: VeOmni's models of a process have the same kernels, and actor_rollout_ref.model has null"
    assert said in run.refusal(changes | {"trainer.device": "cuda"})
    assert "the same kernels" not in run.refusal(changes | {"trainer.device": "cpu"})


def test_nulls_beside_the_section_reward_are_unset(run: Run):
    """The releases have the section ``reward``, and nulls in the sections that it replaces."""
    cfg = compose([f"{key}={value}" for key, value in run.ppo.items()])
    OmegaConf.set_struct(cfg, False)
    replaced = [key for key in keys_of(PPOConfig).values() if key.path.startswith(REPLACED) and key.section is None]
    tree: dict[str, Any] = {}
    for key in replaced:
        put(tree, key.path, None)
    cfg.merge_with(tree)
    reward = {
        "num_workers": 8,
        "reward_manager": {"name": "naive"},
        "reward_model": {"enable": False, "nnodes": 0, "n_gpus_per_node": 0, "rollout": {"prompt_length": 2048}},
    }
    cfg.merge_with({"reward": reward, "critic": {"model": {"_target_": "verl.workers.config.HFModelConfig"}}})
    # The program has its data in memory.
    cfg.data.train_files = "nowhere.parquet"
    validate_config(cfg, use_reference_policy=False, use_critic=True)
    config = load_config(cfg, for_program=True, reads_data=False)
    assert (config.reward_model.num_workers, config.reward_model.rollout.max_num_seqs) == (8, 1024)
    assert config.custom_reward_function.name == "compute_score"
    assert cfg.data.gen_batch_size == config.data.gen_batch_size == config.data.train_batch_size
    pool = OmegaConf.merge(cfg, {"reward": {"reward_model": {"enable_resource_pool": True, "nnodes": 1}}})
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=0: a separate pool needs at least one rank"):
        validate_config(pool, False, True)
