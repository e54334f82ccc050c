"""Other spellings of keys reach the same place, and two spellings may not disagree."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.utils.tool_registry import initialize_tools
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig
from verl.trainer.config.key_table import ALIASES, RETIRED
from verl.trainer.config.keys import all_inactive, iter_keys

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = f"{ROLLOUT}.multi_turn.tool_config_path"
CALCULATOR = {"class_name": "verl.tools.calculator_tool.CalculatorTool", "config": {"timeout_s": 5}}
USER = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}

PPO_CASES: list[tuple[str, Any, str, Any]] = [
    (f"{ROLLOUT}.multi_turn.max_turns", 3, f"{ROLLOUT}.multi_turn.max_assistant_turns", 3),
    # spelling, value, key, value there
    ("algorithm.policy_loss_fn", "ppo", f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
    ("algorithm.policy_loss_fn", "grpo", f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
    ("algorithm.kl_ctl.init_kl_coef", 0.01, "algorithm.kl_ctrl.kl_coef", 0.01),
    ("algorithm.kl_ctl.type", "adaptive", "algorithm.kl_ctrl.type", "adaptive"),
    (
        f"{ACTOR}.policy_loss.rollout_correction.rollout_is",
        "token",
        "algorithm.rollout_correction.rollout_is",
        "token",
    ),
    ("data.chat_template", "{{ messages }}", "actor_rollout_ref.model.custom_chat_template", "{{ messages }}"),
    ("data.tokenizer", "org/tokenizer", "actor_rollout_ref.model.tokenizer_path", "org/tokenizer"),
    ("data.tool_config_path", "/tools.yaml", TOOLS, "/tools.yaml"),
    ("tools", "/tools.yaml", TOOLS, "/tools.yaml"),
    ("tools", [CALCULATOR], TOOLS, (CALCULATOR,)),
    (f"{ROLLOUT}.tools", "/tools.yaml", TOOLS, "/tools.yaml"),
    ("data.function_tool_path", "/tools.py", f"{ROLLOUT}.multi_turn.function_tool_path", "/tools.py"),
    (f"{ROLLOUT}.tools", [CALCULATOR, CALCULATOR], TOOLS, (CALCULATOR, CALCULATOR)),
    (f"{ROLLOUT}.interactions", "/users.yaml", f"{ROLLOUT}.multi_turn.interaction_config_path", "/users.yaml"),
    (f"{ROLLOUT}.interactions", [USER], f"{ROLLOUT}.multi_turn.interaction_config_path", (USER,)),
    (f"{ROLLOUT}.max_response_length", 64, "data.max_response_length", 64),
    (
        f"{ROLLOUT}.update_weights_bucket_megabytes",
        512,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        512,
    ),
    (f"{ACTOR}.optim.beta1", 0.8, f"{ACTOR}.optim.betas", (0.8, 0.999)),
    (f"{ACTOR}.optim.beta2", 0.95, f"{ACTOR}.optim.betas", (0.9, 0.95)),
    ("critic.optim.beta2", 0.95, "critic.optim.betas", (0.9, 0.95)),
    (f"{ACTOR}.optim.warmup_style", "cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}.optim.lr_scheduler", "cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
    ("critic.optim.warmup_steps_ratio", 0.1, "critic.optim.lr_warmup_steps_ratio", 0.1),
    (f"{ACTOR}.optim.lr_decay_style", "cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
    ("actor_rollout_ref.model.torch_dtype", "bfloat16", f"{ACTOR}.fsdp_config.model_dtype", "bfloat16"),
    (f"{ACTOR}.checkpoint.contents", ["model"], f"{ACTOR}.checkpoint.save_contents", ("model",)),
    ("critic.checkpoint.contents", ["model"], "critic.checkpoint.load_contents", ("model",)),
    ("reward_model.custom_reward_function.reward_kwargs.a", 1, "custom_reward_function.reward_kwargs", {"a": 1}),
    ("reward_model.custom_reward_function.name", "score", "custom_reward_function.name", "score"),
    ("reward.custom_reward_function.name", "score", "custom_reward_function.name", "score"),
    ("reward.reward_manager.name", "naive", "reward_manager.name", "naive"),
    ("reward.num_workers", 4, "reward_model.num_workers", 4),
    ("reward.reward_kwargs.a", 1, "reward_model.reward_kwargs", {"a": 1}),
    ("reward.sandbox_fusion.memory_limit_mb", 64, "reward_model.sandbox_fusion.memory_limit_mb", 64),
    ("reward.reward_model.model_path", "org/rm", "reward_model.model.path", "org/rm"),
    ("reward.reward_model.nnodes", 2, "reward_model.nnodes", 2),
    (
        "reward_model.overlong_buffer",
        {"enable": True, "len": 4},
        "reward_model.reward_kwargs",
        {"overlong_buffer_cfg": {"enable": True, "len": 4}},
    ),
    ("reward_model.max_concurrent", 3, "reward_model.reward_kwargs", {"max_concurrent": 3}),
    ("reward_model.max_rpm", 60, "reward_model.reward_kwargs", {"max_rpm": 60}),
    ("reward_model.max_tpm", 600, "reward_model.reward_kwargs", {"max_tpm": 600}),
    (
        "reward_model.estimated_tokens_per_request",
        100,
        "reward_model.reward_kwargs",
        {"estimated_tokens_per_request": 100},
    ),
    ("reward_model.timeout", 60.0, "reward_model.timeout_s", 60.0),
    ("trainer.val_generations_to_log_to_wandb", 5, "trainer.log_val_generations", 5),
    ("ray_init.num_cpus", 3, "ray_kwargs.ray_init", {"num_cpus": 3}),
]

SFT_CASES: list[tuple[str, Any, str, Any]] = [
    ("model.partial_pretrain", "org/base", "model.path", "org/base"),
    ("model.strategy", "fsdp2", "engine.strategy", "fsdp2"),
    ("model.fsdp_config.cpu_offload", True, "engine.offload_policy", True),
    ("model.fsdp_config.model_dtype", "bf16", "engine.model_dtype", "bf16"),
    ("use_remove_padding", False, "model.use_remove_padding", False),
    ("optim.warmup_steps_ratio", 0.1, "optim.lr_warmup_steps_ratio", 0.1),
    ("optim.lr_scheduler", "constant", "optim.lr_scheduler_type", "constant"),
    ("optim.beta1", 0.8, "optim.betas", (0.8, 0.999)),
    ("data.multiturn.messages_key", "chat", "data.messages_key", "chat"),
    ("data.multiturn.tools_key", "t", "data.tools_key", "t"),
    ("data.multiturn.enable_thinking_key", "t", "data.enable_thinking_key", "t"),
    ("data.chat_template", "{{ messages }}", "model.custom_chat_template", "{{ messages }}"),
    ("trainer.checkpoint.save_contents", ["model"], "checkpoint.save_contents", ("model",)),
]


def read(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("spelling, value, key, there", PPO_CASES)
def test_spellings_of_the_ppo_trainer(run: Run, spelling: str, value: Any, key: str, there: Any):
    if spelling == "reward_model.custom_reward_function.name":
        (run.folder / "mine.py").write_text("def score(): ...")
    assert read(run.load({spelling: value}), key) == there


@pytest.mark.parametrize("spelling, value, key, there", SFT_CASES)
def test_spellings_of_the_supervised_trainer(run: Run, spelling: str, value: Any, key: str, there: Any):
    if key == "model.path":
        del run.sft["model.path"]
    assert read(run.load({spelling: value}, SFTConfig), key) == there


def test_ranks_that_share_sequences_in_the_supervised_trainer(run: Run):
    settings = {"ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2}
    assert run.load(settings, SFTConfig).engine.ulysses_sequence_parallel_size == 2


def test_every_alias_leads_to_a_key_and_is_tried_here():
    roots = (PPOConfig, SFTConfig, GenerationConfig)
    known = {path for root in roots for path in [*(key.path for key in iter_keys(root)), *all_inactive(root)]}
    tried = {case[0] for case in PPO_CASES + SFT_CASES} | {"ulysses_sequence_parallel_size"}
    for alias in ALIASES:
        target = alias.new.partition("[")[0]
        assert any(target == key or target.startswith(key + ".") for key in known), alias
        same_optimizer = alias.old.replace("critic.", f"{ACTOR}.").replace(f"{ACTOR}.optim", "optim")
        assert any(
            case == alias.old
            or case.startswith(alias.old + ".")
            or case.replace("critic.", f"{ACTOR}.").replace(f"{ACTOR}.optim", "optim") == same_optimizer
            for case in tried
        ), alias


def test_the_custom_reward_function_as_the_published_example_has_it(run: Run):
    (run.folder / "my_reward.py").write_text("def compute_reward(data, **kwargs): ...")
    function = run.load(
        {
            "reward_model.custom_reward_function.path": str(run.folder / "my_reward.py"),
            "reward_model.custom_reward_function.name": "compute_reward",
            "reward_model.custom_reward_function.reward_kwargs": {},
        }
    ).custom_reward_function
    assert function.name == "compute_reward"
    assert function.path == str(run.folder / "my_reward.py")


def test_null_says_nothing(run: Run):
    roots = {alias.old: SFTConfig for alias in ALIASES} | {
        alias.old: PPOConfig
        for alias in ALIASES
        if alias.old.startswith(("actor_rollout_ref.", "algorithm.", "critic.", "reward", "ray_init", "trainer.val_"))
        or alias.old
        in ("data.chat_template", "data.tokenizer", "data.tool_config_path", "data.function_tool_path", "tools")
    }
    for root in (PPOConfig, SFTConfig):
        assert run.load({old: None for old, there in roots.items() if there is root}, root) == run.load(root=root)


def test_null_below_an_old_section_says_nothing(run: Run):
    config = run.load({"reward_model.custom_reward_function": {"path": None, "name": None}})
    assert config.custom_reward_function.name == "compute_score"


def test_two_spellings_that_agree(run: Run):
    config = run.load({"algorithm.kl_ctl.init_kl_coef": 0.01, "algorithm.kl_ctrl.kl_coef": 0.01})
    assert config.algorithm.kl_ctrl.kl_coef == 0.01


def test_one_file_of_tools_under_both_names(run: Run):
    config = run.load({"data.tool_config_path": "/a.yaml", TOOLS: "/a.yaml"})
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == "/a.yaml"
    message = only(run.refusal({"data.tool_config_path": "/a.yaml", TOOLS: "/b.yaml"}))
    assert f"data.tool_config_path=/a.yaml: this is another spelling of {TOOLS}, which is set to /b.yaml" in message


def test_a_list_of_tools_and_a_file_of_tools_contradict_each_other(run: Run):
    message = only(run.refusal({f"{ROLLOUT}.tools": [CALCULATOR], TOOLS: "/tools.yaml"}))
    assert f"this is another spelling of {TOOLS}, which is set to /tools.yaml" in message
    message = only(run.refusal({f"{ROLLOUT}.tools": [CALCULATOR], "tools": []}))
    assert f"tools=[]: this is another spelling of {ROLLOUT}.tools, which is set to" in message


def test_a_list_of_tools_on_the_command_line(run: Run):
    settings = [f"{key}={value}" for key, value in run.ppo.items()]
    entry = "{class_name: verl.tools.calculator_tool.CalculatorTool, config: {timeout_s: ${data.seed}}}"
    user = "[{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]"
    settings += ["data.seed=7", f"'+{ROLLOUT}.tools=[{entry}]'", f"'{ROLLOUT}.interactions={user}'"]
    turns = run.script(" ".join(settings)).actor_rollout_ref.rollout.multi_turn
    [tool] = initialize_tools(turns.tool_config_path)
    assert (tool.name, tool.config) == ("calculator", {"timeout_s": 7})
    assert list(initialize_interactions_from_config(turns.interaction_config_path)) == ["gsm8k"]


@pytest.mark.parametrize("key", ["tools", f"{ROLLOUT}.tools"])
@pytest.mark.parametrize("value", [["calculator"], {"calculator": {"type": "native"}}])
def test_tools_in_another_form_are_refused(run: Run, key: str, value: Any):
    message = only(run.refusal({key: value}))
    assert f"{TOOLS}=" in message
    assert "a string, or a list of mappings, or null" in message


def test_two_spellings_that_disagree(run: Run):
    message = only(run.refusal({"algorithm.kl_ctl.init_kl_coef": 0.01, "algorithm.kl_ctrl.kl_coef": 0.02}))
    assert "algorithm.kl_ctl.init_kl_coef=0.01: this is another spelling of algorithm.kl_ctrl.kl_coef" in message
    assert "which is set to 0.02" in message
    assert "keep one of the two, best algorithm.kl_ctrl.kl_coef" in message


def test_two_other_spellings_that_disagree(run: Run):
    message = only(
        run.refusal({"reward_model.custom_reward_function.name": "a", "reward.custom_reward_function.name": "b"})
    )
    assert "is another spelling of reward_model.custom_reward_function.name, which is set to a" in message


def test_a_key_that_names_its_other_spelling_says_the_same(run: Run):
    new, old = "reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"
    whole = {new: f"${{{old}}}", f"{old}.enable": True, f"{old}.len": 4}
    by_key = {f"{new}.enable": f"${{{old}.enable}}", f"{old}.enable": True, f"{old}.len": 4}
    for changes in (whole, by_key):
        assert run.load(changes).reward_model.reward_kwargs == {"overlong_buffer_cfg": {"enable": True, "len": 4}}


def test_a_value_in_the_place_of_a_section_that_another_spelling_leads_to(run: Run):
    new, old = "reward_model.reward_kwargs", "reward_model.max_rpm"
    assert run.load({new: None, old: 7}).reward_model.reward_kwargs == {"max_rpm": 7}
    for value, shown in ((3, "3"), ("${data.train_files}", "${data.train_files}")):
        message = str(run.refusal({new: value, old: 7}))
        assert f"{old}=7: it belongs below {new}, which is set to {shown}" in message


def test_a_default_that_was_asked_for_is_not_overruled(run: Run):
    changes = {"algorithm.kl_ctl.init_kl_coef": 0.01, "algorithm.kl_ctrl.kl_coef": 0.001}
    assert run.load(changes).algorithm.kl_ctrl.kl_coef == 0.01  # nobody can know
    message = only(run.refusal(changes, explicit={"algorithm.kl_ctrl.kl_coef"}))
    assert "which is set to 0.001" in message


RETIRED_CASES = [
    (f"{ROLLOUT}.multi_turn.completion_callback", "x", "conversations are led by agent loops"),
    (f"{ROLLOUT}.chat_scheduler", "x", "conversations are led by agent loops"),
    (f"{ROLLOUT}.use_fire_sampling", True, "first token hot is not in this version"),
    (f"{ACTOR}.tis_imp_ratio_cap", 2, "set algorithm.rollout_correction.rollout_is=token"),
    ("algorithm.rollout_is", True, "these settings have a section of their own"),
    ("algorithm.rollout_is_threshold", 2.0, "these settings have a section of their own"),
    ("algorithm.rollout_rs", "token_k1", "these settings have a section of their own"),
    (f"{ACTOR}.fsdp_config.grad_offload", True, "use param_offload=true instead"),
]


@pytest.mark.parametrize("key, value, said", RETIRED_CASES)
def test_retired_keys_say_why(run: Run, key: str, value: Any, said: str):
    message = only(run.refusal({key: value}))
    assert f"{key}=" in message
    assert said in message


UNREAD_CASES = [
    ("actor_rollout_ref.rollout.sglang_rollout_mode", "server", "rollout.mode decides whether the engine is a server"),
    ("actor_rollout_ref.rollout.server.max_attempts", 5, "a server that hangs is replaced: see start_timeout_s"),
]


@pytest.mark.parametrize("key, value, said", UNREAD_CASES)
def test_retired_keys_without_effect_say_so(
    run: Run, key: str, value: Any, said: str, caplog: pytest.LogCaptureFixture
):
    assert run.load({key: value}) == run.load()
    assert f"no effect: {key} (" in caplog.text
    assert said in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.fsdp_config.grad_offload": False, f"{ACTOR}.tis_imp_ratio_cap": -1},
        {"trainer.use_v1": True, "trainer.v1.trainer_mode": "sync", "trainer.remove_previous_ckpt_in_save": False},
    ],
)
def test_retired_keys_that_ask_for_nothing_are_dropped(run: Run, changes: dict[str, Any]):
    assert run.load(changes) == run.load()


def test_every_retired_key_is_tried_here():
    import fnmatch

    tried = [case[0] for case in RETIRED_CASES + UNREAD_CASES] + ["trainer.use_v1", "data.multiturn.enable"]
    for retired in RETIRED:
        patterns = (retired.pattern, f"{retired.pattern}.*")
        assert any(fnmatch.fnmatchcase(key, pattern) for key in tried for pattern in patterns), retired


def test_conversations_were_once_switched_on(run: Run):
    assert run.load({"data.multiturn.enable": True}, SFTConfig) == run.load(root=SFTConfig)
