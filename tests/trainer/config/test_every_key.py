"""No setting is silent: each published key changes the configuration, or is refused or told to have no effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.trainer.config.support import Run
from tests.trainer.config.test_composition import expected
from verl.algorithms.loss_registry import POLICY_LOSSES, register_policy_loss
from verl.base.nested import flat
from verl.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from verl.trainer.config.keys import all_inactive, iter_keys

KEYS = {key.path: key for key in iter_keys(PPOConfig)}
INACTIVE = all_inactive(PPOConfig)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ROOT = Path(verl.__file__).parent


def outcome(path: str) -> str:
    """What becomes of a value: a section's key that code reads, or one that is refused or told."""
    section = path.removesuffix("._target_")
    if path in KEYS or any(path.startswith(f"{key}.") for key, found in KEYS.items() if found.section is None):
        return "read"
    if path != section and section in KEYS:
        return "refused"  # a section has its own class
    inactive = next((INACTIVE[key] for key in parents(path) if key in INACTIVE), None)
    if inactive is None:
        return "unknown"
    if inactive.is_spelling:
        return "spelling"  # see test_aliases
    return "refused" if inactive.refused else "told"


def parents(path: str) -> list[str]:
    """The path and the sections that it is in."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def other_value(key: str) -> Any:
    """A value other than the default, of no particular type."""
    now = next((INACTIVE[path].yaml_default for path in parents(key) if path in INACTIVE), None)
    return not now if isinstance(now, bool) else f"other_{key}"


def by_outcome(wanted: str) -> list[str]:
    """The published keys with an outcome."""
    return [path for path in expected() if outcome(path) == wanted]


def test_each_published_key_has_an_outcome():
    # Refusals: see test_refusals.
    counts = {name: len(by_outcome(name)) for name in ("read", "spelling", "refused", "told", "unknown")}
    assert counts["unknown"] == 0
    assert counts["refused"] > 40
    assert sum(counts.values()) == len(expected())


def test_what_counts_as_read_is_named_by_code_outside_the_configuration():
    outside = [file for file in ROOT.rglob("*.py") if not file.is_relative_to(ROOT / "config")]
    code = "\n".join(file.read_text() for file in outside if "key_table" not in file.name)
    words = set(re.findall(r"\w+", code))
    unread = {path for path in by_outcome("read") if path.rpartition(".")[2] not in words}
    assert unread == {"actor_rollout_ref.rollout.engine_kwargs.trtllm"}  # told: the engine has another name


def test_what_has_no_effect_is_told_in_one_go(run: Run, caplog: pytest.LogCaptureFixture):
    run.load({path: other_value(path) for path in by_outcome("told")})
    said = set(re.findall(r"[\w.-]+", caplog.text))
    assert [path for path in by_outcome("told") if not said.intersection(parents(path))] == []


def test_another_class_in_place_of_a_section_is_refused(run: Run):
    targets = [path for path in by_outcome("refused") if path.endswith("._target_")]
    message = run.refusal(dict.fromkeys(targets, "mine.Config"))
    assert [path for path in targets if f"{path}=mine.Config: another class" not in message] == []


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"critic.optim.lr": 1e-3}, "algorithm.adv_estimator=grpo needs no critic"),
        ({"algorithm.lam": 0.9}, "algorithm.adv_estimator=grpo does not take it"),
        ({"algorithm.step_advantage_weight": 0.5}, "algorithm.adv_estimator=grpo does not take it"),
        ({"algorithm.rae_decay": 0.5}, "algorithm.adv_estimator=grpo does not take it"),
        ({"actor_rollout_ref.actor.kl_loss_coef": 0.1}, "actor_rollout_ref.actor.use_kl_loss=false"),
        ({"algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.use_kl_in_reward=false"),
        ({"algorithm.kl_ctrl.horizon": 5, "algorithm.use_kl_in_reward": True}, "algorithm.kl_ctrl.type=fixed"),
        ({"actor_rollout_ref.ref.fsdp_config.param_offload": True}, "no KL term needs the reference"),
        ({"algorithm.pf_ppo.weight_pow": 3.0}, "algorithm.use_pf_ppo=false"),
        ({"actor_rollout_ref.actor.optim.min_lr_ratio": 0.1}, "actor_rollout_ref.actor.optim.lr_scheduler_type=const"),
        ({"reward_model.model.path": "org/name"}, "reward_model.enable=false"),
        ({f"{ACTOR}.policy_loss.clip_cov_lb": 2.0}, f"{ACTOR}.policy_loss.loss_mode=vanilla does not take it"),
        ({f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1, f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}, f"{ACTOR}.policy"),
        ({f"{ACTOR}.tau_pos": 2.0}, f"{ACTOR}.policy_loss.loss_mode=vanilla does not take it"),
        ({f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.policy_loss.loss_mode": "gpg"}, f"{ACTOR}.policy_loss.loss_mode=gpg"),
        ({f"{ACTOR}.loss_scale_factor": 9.0}, f"{ACTOR}.loss_agg_mode=token-mean"),
        ({f"{ACTOR}.data_loader_seed": 7}, f"{ACTOR}.shuffle=false"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}, f"{ACTOR}.use_dynamic_bsz=false"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, f"{ACTOR}.use_dynamic_bsz": True}, f"{ACTOR}.use_dynamic_bsz=t"),
        ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 99}, f"{ROLLOUT}.log_prob_use_dynamic_bsz=false"),
        ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1, f"{ACTOR}.optim.lr_warmup_steps": 3}, f"{ACTOR}.optim.lr_warm"),
        (
            {f"{ROLLOUT}.val_kwargs.temperature": 0.6},
            "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
        ),
        (
            {"actor_rollout_ref.model.lora.target_parameters": ["down_proj"]},
            "actor_rollout_ref.model.lora_rank=0 trains",
        ),
        ({"trainer.test_freq": 5, "data.val_files": []}, "data.val_files=null"),
        ({f"{ROLLOUT}.skip_dump_dir": "rollouts"}, f"{ROLLOUT}.skip_rollout=false"),
        (
            {f"{ROLLOUT}.engine_kwargs": {"vllm": {"a": 1}}},
            "vllm: actor_rollout_ref.rollout.name=native",
        ),
    ],
)
def test_a_setting_of_what_is_turned_off_is_told(
    run: Run, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
):
    run.load(settings)
    assert f"no effect: {next(iter(settings))} ({reason}" in caplog.text


@pytest.mark.parametrize(
    "root, settings, reason",
    [
        (SFTConfig, {"data.max_token_len_per_gpu": 99, "data.use_dynamic_bsz": False}, "data.use_dynamic_bsz=false"),
        (SFTConfig, {"data.micro_batch_size_per_gpu": 1}, "data.use_dynamic_bsz=true"),
        (SFTConfig, {"data.prompt_dict_keys": ["a"]}, "data.prompt_key=null"),
        (SFTConfig, {"data.val_max_samples": 3}, "data.val_files=null"),
        (SFTConfig, {"trainer.test_freq": 3}, "data.val_files=null"),
        (SFTConfig, {"optim.num_cycles": 2.0, "optim.lr_scheduler_type": "constant"}, "optim.lr_scheduler_type=const"),
        (RMConfig, {"data.max_token_len_per_gpu": 99, "data.use_dynamic_bsz": False}, "data.use_dynamic_bsz=false"),
        (SFTConfig, {"distillation.cross_entropy_coef": 0.5}, "distillation.model_path=null"),
        (SFTConfig, {"model.lora_alpha": 32.0}, "model.lora_rank=0 trains the model's weights"),
        (DPOConfig, {"ref.param_offload": True, "loss.reference_free": True}, "loss.reference_free=true"),
    ],
)
def test_a_setting_of_what_is_turned_off_is_told_in_supervised_runs_too(
    run: Run, caplog: pytest.LogCaptureFixture, root: type, settings: dict[str, Any], reason: str
):
    run.load(settings, root)
    assert f"no effect: {next(iter(settings))} ({reason}" in caplog.text
    assert caplog.text.count("no effect") == 1


def test_of_a_loss_that_gets_the_whole_section_nothing_is_told(run: Run, caplog: pytest.LogCaptureFixture):
    def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config): ...

    register_policy_loss("of_a_test")(my_loss)
    try:
        run.load({f"{ACTOR}.policy_loss.loss_mode": "of_a_test", f"{ACTOR}.tau_pos": 2.0})
    finally:
        POLICY_LOSSES.remove("of_a_test")
    assert "no effect" not in caplog.text


def test_nothing_is_told_of_defaults_or_of_a_configuration_that_a_run_saved(run: Run, caplog: pytest.LogCaptureFixture):
    saved = run.load({"actor_rollout_ref.actor.ppo_epochs": 3, "data.max_prompt_length": 100}).to_dict()
    run.load(dict(flat(saved)), explicit=("algorithm.lam",))
    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("vlm", {"a": 1}, "no engine of that name takes arguments. Did you mean 'vllm'?"),
        ("vllm", "eager", "an engine takes arguments by name"),
    ],
)
def test_arguments_of_engines(run: Run, name: str, value: Any, said: str):
    assert said in run.refusal({f"actor_rollout_ref.rollout.engine_kwargs.{name}": value})
