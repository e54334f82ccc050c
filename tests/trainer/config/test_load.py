"""Loading: types, unknown keys, interpolation, and everything told at once."""

from __future__ import annotations

import logging
import os

import pytest
from omegaconf import OmegaConf

from tests.trainer.config.support import Run, only
from verl.config.problems import Problem, report
from verl.errors import ConfigError
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.keys import allowed_values, leaves, nearest


def test_a_good_configuration_loads_and_what_is_left_out_has_its_default(run: Run):
    config = run.load()
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train_files == (str(run.folder / "train.jsonl"),)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("trainer.total_epochs", 0, "an integer >= 1, default 30"),
        ("trainer.total_epochs", "many", "an integer >= 1, default 30"),
        ("trainer.total_epochs", 2.5, "an integer >= 1, default 30"),
        ("actor_rollout_ref.actor.optim.lr", -1, "a number >= 0, default 1.0e-06"),
        ("actor_rollout_ref.actor.clip_ratio_c", 1.0, "a number > 1, default 3.0"),
        ("actor_rollout_ref.rollout.top_p", 0, "a number > 0 and <= 1, default 1"),
        ("actor_rollout_ref.rollout.top_p", 1.5, "a number > 0 and <= 1, default 1"),
        ("actor_rollout_ref.actor.use_kl_loss", "maybe", "true or false, default false"),
        ("actor_rollout_ref.actor.kl_loss_type", "k4", "low_var_kl"),
        ("actor_rollout_ref.actor.loss_agg_mode", "mean", "token-mean, token-sum, seq-mean-token-sum"),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents",
            ["weights"],
            "a list of model, optimizer, extra, hf_model",
        ),
        ("actor_rollout_ref.actor.optim.betas", [0.9], "a list of 2 numbers"),
        ("critic.ppo_micro_batch_size_per_gpu", 0, "an integer >= 1, or null"),
        ("trainer.resume_mode", "always", "auto, disable, resume_path"),
        ("trainer.resume_from_path", True, "a string, or null"),
        ("data.train_files", 7.5, "a list of strings"),
    ],
)
def test_wrong_values_name_what_is_allowed(run: Run, key: str, value: object, allowed: str):
    message = only(run.refusal({key: value}))
    assert f"1. {key}=" in message
    assert "cannot be used here" in message
    assert allowed in message


def test_a_name_with_dots_in_yaml():
    with pytest.raises(ConfigError) as caught:
        load_config({"data.seed": 1, "trainer": {"v.w": 2}})
    assert "'data.seed'=1: a name has no dots.\n     remedy: write data: {seed: ...}" in str(caught.value)
    assert "trainer.'v.w'=2: a name has no dots" in str(caught.value)


def test_an_interpolation_that_leads_nowhere_is_told_where_it_stands(run: Run):
    # rollout.prompt_length follows it and is resolved first, but is not at fault.
    message = only(run.refusal({"data.max_prompt_length": "${data.nothing}"}))
    assert "data.max_prompt_length=${data.nothing}: Interpolation key 'data.nothing' not found" in message


def test_a_section_cannot_become_a_value(run: Run):
    for value in (5, None, ["x"]):
        message = only(run.refusal({"critic.optim": value}))
        assert "critic.optim=" in message
        assert "this is a section, it cannot be replaced by a value" in message
    assert run.load({"actor_rollout_ref.rollout.profiler.tool_config": None})  # may be absent


@pytest.mark.parametrize(
    "key, meant",
    [
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),  # a slip of the finger
        ("data.max_prompt_len", "data.max_prompt_length"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),  # the beginning left out
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),  # the right name in the wrong section
        ("trainer.critic_warm_up", "trainer.critic_warmup"),
        ("algorithm.kl_ctrl.init_kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.policy_loss_fun", "algorithm.policy_loss_fn"),  # another spelling, misspelt
        ("reward_model.reward_manger", "reward_model.reward_manager"),
    ],
)
def test_unknown_keys_name_the_one_that_was_meant(run: Run, key: str, meant: str):
    message = only(run.refusal({key: 1}))
    assert f"{key}=1: there is no such key" in message
    assert f"did you mean {meant}?" in message


def test_a_key_like_no_other(run: Run):
    assert "zzz.qqq=1: there is no such key.\n     remedy: remove it" in only(run.refusal({"zzz.qqq": 1}))


def test_nearest_prefers_the_same_section():
    known = ["a.batch_size", "b.batch_size", "b.other"]
    assert nearest("b.batch_sise", known) == "b.batch_size"
    assert nearest("c.batch_size", known) in ("a.batch_size", "b.batch_size")
    assert nearest("b.qqqqqqq", known) is None


def test_names_and_values_are_told_together_and_then_the_rules(run: Run):
    values = {
        "data.foo": 1,  # unknown
        "trainer.total_epochs": "two",  # type
        "actor_rollout_ref.rollout.name": "trtllm",  # not in this version
        "trainer.project_name": "${trainer.nothing}",  # interpolation
    }
    rules = {
        "data.train_batch_size": 10,  # a rule across keys: 4 does not divide it
        "actor_rollout_ref.model.path": str(run.folder / "nowhere"),  # not on disk
        "algorithm.adv_estimator": "grop",  # not registered
    }
    message = run.refusal(values | rules)
    assert message.startswith("4 problems in the configuration:")
    for said in ("data.foo", "two", "trtllm", "trainer.nothing", "are checked once they are right."):
        assert said in message
    message = run.refusal(rules)
    assert message.startswith("2 problems in the configuration:")
    for said in ("nowhere", "data.train_batch_size=10", "are checked once these settings are right."):
        assert said in message
    assert "'grpo'" in only(run.refusal({"algorithm.adv_estimator": "grop"}))


def test_a_rule_does_not_speak_about_a_value_that_is_wrong_anyway(run: Run):
    # The mini-batch falls back to 256, which does not divide 8 prompts: saying so would only confuse.
    message = only(run.refusal({"actor_rollout_ref.actor.ppo_mini_batch_size": "four"}))
    assert "ppo_mini_batch_size=four" in message


def test_free_sections_take_any_key(run: Run):
    config = run.load(
        {
            "actor_rollout_ref.model.override_config.attention_dropout": 0.0,
            "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": 4,
            "data.apply_chat_template_kwargs.enable_thinking": False,
            "reward_model.scorer_kwargs.format_score": 0.1,
            "ray_kwargs.ray_init.address": "auto",
        }
    )
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.0}
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"swap_space": 4}, "sglang": {}, "trtllm": {}}
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.reward_model.scorer_kwargs == {"format_score": 0.1}
    assert config.ray_kwargs.ray_init == {"num_cpus": None, "address": "auto"}


def test_one_string_stands_for_a_list_of_one(run: Run):
    assert run.load({"trainer.logger": "console"}).trainer.logger == ("console",)
    assert run.load({"data.val_files": [str(run.folder / "val.jsonl")] * 2}).data.val_files[1].endswith("val.jsonl")


def test_numbers_become_text_where_text_is_asked_for(run: Run):
    assert run.load({"trainer.experiment_name": 7}).trainer.experiment_name == "7"


def test_home_and_variables_in_paths(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_DIR", str(run.folder))
    monkeypatch.setenv("HOME", str(run.folder))
    config = run.load({"data.train_files": "$RUN_DIR/train.jsonl", "actor_rollout_ref.model.path": "~/model"})
    assert config.data.train_files == (os.path.join(run.folder, "train.jsonl"),)
    assert config.actor_rollout_ref.model.path == os.path.join(run.folder, "model")


def test_missing_values_count_as_unset(run: Run):
    run.load({"reward_model.rollout.name": "???"})
    message = run.refusal({"data.path": "???", "data.train_files": None}, GenerationConfig)
    assert "data.path=null: it must be set" in message


def test_another_class_cannot_be_put_in_place_of_a_section(run: Run):
    message = only(run.refusal({"critic.optim._target_": "torch.optim.SGD"}))
    assert "critic.optim._target_=torch.optim.SGD" in message
    assert "allowed: verl.workers.config.FSDPOptimizerConfig" in message


def test_clip_ratio_moves_both_bounds_unless_they_are_set(run: Run):
    actor = run.load({"actor_rollout_ref.actor.clip_ratio": 0.1}).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1)
    actor = run.load(
        {"actor_rollout_ref.actor.clip_ratio": 0.1, "actor_rollout_ref.actor.clip_ratio_high": 0.28}
    ).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.28)
    # 0.2 is the default, but here it was asked for.
    key = "actor_rollout_ref.actor.clip_ratio_high"
    actor = run.load({"actor_rollout_ref.actor.clip_ratio": 0.1, key: 0.2}, explicit={key}).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.2)


def test_two_places_of_one_setting_are_equal_after_loading(run: Run):
    config = run.load({"actor_rollout_ref.actor.optim.clip_grad": 0.5, "actor_rollout_ref.actor.strategy": "fsdp2"})
    actor = config.actor_rollout_ref.actor
    assert actor.grad_clip == actor.optim.clip_grad == 0.5
    assert actor.strategy == actor.fsdp_config.strategy == "fsdp2"
    ref = config.actor_rollout_ref.ref
    assert ref.strategy == ref.fsdp_config.strategy == "fsdp2"  # follows the actor
    message = only(run.refusal({"critic.grad_clip": 0.5, "critic.optim.clip_grad": 2.0}))
    assert "critic.grad_clip=0.5: this is the same setting as critic.optim.clip_grad, which is set to 2.0" in message


def test_micro_batches_over_all_ranks_become_per_rank(run: Run):
    per_gpu = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    del run.ppo[per_gpu]
    actor = run.load({"actor_rollout_ref.actor.ppo_micro_batch_size": 8}).actor_rollout_ref.actor
    assert actor.ppo_micro_batch_size_per_gpu == 4  # 2 ranks
    message = run.refusal({"actor_rollout_ref.actor.ppo_micro_batch_size": 7})
    assert "ppo_micro_batch_size=7: it counts sequences over all ranks, and 2 ranks do not divide it" in message
    assert f"remedy: set {per_gpu} instead" in message
    message = run.refusal({"actor_rollout_ref.actor.ppo_micro_batch_size": "many"})
    assert "ppo_micro_batch_size=many: this value cannot be used here" in message
    message = only(run.refusal({"actor_rollout_ref.actor.ppo_micro_batch_size": 8, per_gpu: 2}))
    assert f"and {per_gpu}=2 counts them per rank" in message


def test_micro_batches_of_the_critic_follow_its_update(run: Run):
    # forward_* is derived from ppo_*, in both forms.
    gae = {"algorithm.adv_estimator": "gae", "critic.model.path": str(run.folder / "model")}
    critic = run.load(gae | {"critic.ppo_micro_batch_size": 8}).critic
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (4, 4)
    critic = run.load(gae | {"critic.ppo_micro_batch_size_per_gpu": 2}).critic
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (2, 2)
    critic = run.load(gae | {"critic.ppo_micro_batch_size": 8, "critic.forward_micro_batch_size_per_gpu": 16}).critic
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (4, 16)


def test_settings_without_effect_are_told(run: Run, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "verl"):
        run.load(
            {
                "data.image_patch_size": 16,
                "data.return_multi_modal_inputs": False,
                "actor_rollout_ref.rollout.layered_summon": True,
            }
        )
    told = [record.getMessage() for record in caplog.records]
    assert any(t.startswith("no effect: data.image_patch_size, data.return_multi_modal_inputs (") for t in told)
    assert any(t.startswith("no effect: actor_rollout_ref.rollout.layered_summon (") for t in told)
    assert len(told) == 2


def test_a_resolved_configuration_sets_nothing_that_has_no_effect(run: Run, caplog: pytest.LogCaptureFixture):
    # Keys that follow others are values then, and still nobody has set them.
    resolved = OmegaConf.to_container(compose([f"{key}={value}" for key, value in run.ppo.items()]), resolve=True)
    with caplog.at_level(logging.WARNING, "verl"):
        load_config(resolved)
    assert not caplog.records


def test_nothing_is_told_about_defaults(run: Run, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "verl"):
        run.load()
    assert not caplog.records


def test_a_composed_configuration_is_not_written_to(run: Run):
    cfg = compose([f"{key}={value}" for key, value in run.ppo.items()])
    before = cfg.copy()
    load_config(cfg)
    assert cfg == before


def test_every_entry_point_loads(run: Run):
    assert run.load(root=SFTConfig).data.train_batch_size == 8


def test_the_list_of_problems_reads_well():
    problems = [Problem("a.b", [1, "x"], "it is wrong", "1", "use 1"), Problem("c", None, "it must be set")]
    assert report(problems) == (
        "2 problems in the configuration:\n\n"
        "  1. a.b=[1, x]: it is wrong.\n     allowed: 1\n     remedy: use 1\n\n"
        "  2. c=null: it must be set."
    )


def test_types_in_words():
    keys = leaves(PPOConfig)
    assert allowed_values(keys["actor_rollout_ref.rollout.n"].field) == "an integer >= 1"
    assert allowed_values(keys["trainer.resume_from_path"].field) == "a string, or null"
    assert allowed_values(keys["actor_rollout_ref.model.override_config"].field) == "a mapping"


def test_problems_are_a_value_error():
    with pytest.raises(ValueError, match="problems in the configuration"):
        load_config({"data": {"foo": 1, "bar": 2}})
    assert issubclass(ConfigError, ValueError)


def test_a_chat_template_in_a_file_becomes_its_text(run: Run):
    """Ranks on other machines do not have the file; a name that is none is a problem of its key."""
    file, key = run.folder / "own.jinja", "actor_rollout_ref.model.custom_chat_template"
    file.write_text("{{ messages }}")
    assert run.load({key: str(file)}).actor_rollout_ref.model.custom_chat_template == "{{ messages }}"
    assert f"1. {key}=chatml: the chat template 'chatml' is neither" in only(run.refusal({key: "chatml"}))
