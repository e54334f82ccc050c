"""Small tools under the names by which public programs import them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from verl import DataProto
from verl.agents.parsers import ToolParser
from verl.agents.tool_state import AgentData, AgentState
from verl.algorithms import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, agg_loss, kl_penalty, register_adv_est
from verl.base.registry import scoped_registrations
from verl.compat.toolkit import models
from verl.compat.toolkit.agents import get_trajectory_info
from verl.compat.toolkit.chat import extract_system_prompt_and_generation, get_processor_token_id, set_pad_token_id
from verl.compat.toolkit.checkpoints import BaseCheckpointManager
from verl.compat.toolkit.config import is_distillation_enabled, update_dict_with_config
from verl.compat.toolkit.files import get_local_temp_path, is_non_local, md5_encode, verify_copy
from verl.compat.toolkit.imports import load_class_from_fqn, load_extern_object, load_extern_type
from verl.compat.toolkit.limits import AsyncTokenBucket
from verl.compat.toolkit.processes import temp_env_var
from verl.compat.toolkit.rollouts import RolloutSkip
from verl.compat.toolkit.scoring import get_default_compute_score
from verl.compat.toolkit.traces import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from verl.errors import ConfigError, DataError, SchemaError, VerlError
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.utils.flops_counter import FlopsCounter
from verl.utils.seqlen_balancing import ceildiv, get_seqlen_balanced_partitions
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.abstract import REWARD_MANAGER_REGISTRY
from verl.workers.rollout import get_rollout_class

# ---- rates --------------------------------------------------------------------------------------


def test_tokens_are_waited_for_in_turn(monkeypatch: pytest.MonkeyPatch):
    clock, waits = [100.0], []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))

    monkeypatch.setattr("verl.compat.toolkit.limits.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("verl.compat.toolkit.limits.asyncio", SimpleNamespace(sleep=sleep))
    bucket = AsyncTokenBucket(rate_limit=2.0, max_tokens=4)

    async def take(*counts: float) -> list[float]:
        waits.clear()
        for count in counts:
            await bucket.acquire(count)
        return list(waits)

    # 4 there: 3 and 1 come at once, the next one after ½ s, and 2 more after another 1 s: nobody is passed over.
    assert asyncio.run(take(3, 1, 1, 2)) == [0.5, 1.5]
    clock[0] += 2.5  # -3 + 5 = 2 there
    assert asyncio.run(take(2)) == []
    clock[0] += 60  # a full bucket, and no more: 10 of 4 wait for 6
    assert asyncio.run(take(10)) == [3.0]
    for wrong in ({"rate_limit": 0}, {"rate_limit": 1, "max_tokens": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            AsyncTokenBucket(**wrong)


# ---- registries ---------------------------------------------------------------------------------


def test_the_registry_of_dispatch_modes_is_the_dict_itself():
    before = dict(DISPATCH_MODE_FN_REGISTRY)
    try:
        DISPATCH_MODE_FN_REGISTRY.clear()
        with pytest.raises(AssertionError, match="has no functions"):
            get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
        for _ in range(2):  # a cleared name may be registered again
            mode = register_dispatch_mode("mine_of_this_test", max, min)
            assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": max, "collect_fn": min}
            with pytest.raises(ValueError, match="exists already"):
                register_dispatch_mode("mine_of_this_test", max, min)
            DISPATCH_MODE_FN_REGISTRY.clear()
        update_dispatch_mode(Dispatch.ONE_TO_ALL, sum, len)
        assert {Dispatch.ONE_TO_ALL: {"dispatch_fn": sum, "collect_fn": len}} == DISPATCH_MODE_FN_REGISTRY
    finally:
        DISPATCH_MODE_FN_REGISTRY.clear()
        DISPATCH_MODE_FN_REGISTRY.update(before)
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_registries_may_be_emptied_and_filled_again():
    with scoped_registrations():
        estimators, losses = ADV_ESTIMATOR_REGISTRY.copy(), POLICY_LOSS_REGISTRY.copy()
        ADV_ESTIMATOR_REGISTRY.clear()
        assert dict(ADV_ESTIMATOR_REGISTRY) == {}
        for _ in range(2):

            @register_adv_est("gae")
            def mine(token_level_rewards: Any, response_mask: Any) -> Any: ...

            assert ADV_ESTIMATOR_REGISTRY["gae"] is mine
            ADV_ESTIMATOR_REGISTRY.clear()
        ADV_ESTIMATOR_REGISTRY.update(estimators)
        POLICY_LOSS_REGISTRY.clear()
        POLICY_LOSS_REGISTRY.update(losses)
        assert ADV_ESTIMATOR_REGISTRY.copy() == estimators
        assert POLICY_LOSS_REGISTRY.copy() == losses
        managers, parsers = dict(REWARD_MANAGER_REGISTRY), dict(ToolParser._registry)
        REWARD_MANAGER_REGISTRY.clear()
        with pytest.raises(ValueError, match="unknown reward manager 'naive'"):
            get_reward_manager_cls("naive")
        register("naive")(AbstractRewardManager)
        assert get_reward_manager_cls("naive") is AbstractRewardManager
        REWARD_MANAGER_REGISTRY.update(managers)
        assert get_reward_manager_cls("naive") is managers["naive"]
        assert set(parsers) >= {"hermes", "gpt-oss", "qwen3_coder"}


# ---- models -------------------------------------------------------------------------------------


def test_random_masks_have_padding_on_both_sides_within_their_limits():
    torch.manual_seed(0)
    mask = models.create_random_mask(torch.zeros(200, 20), 0.5, 0.4, 0.2)
    counts, first = mask.sum(-1), mask.argmax(-1)
    assert (int(counts.min()), int(counts.max())) == (4, 10)
    assert (int(first.min()), int(first.max())) == (0, 8)
    assert mask.diff(dim=-1).abs().sum(-1).max() <= 2  # one block of tokens in each row
    assert models.create_random_mask(torch.zeros(2, 3), 0.1, 0).sum(-1).tolist() == [1, 1]
    with pytest.raises(AssertionError, match="must be fractions"):
        models.create_random_mask(torch.zeros(2, 3), 0.2, 0.0, 0.5)
    with pytest.raises(SchemaError, match="leaves no room"):
        models.create_random_mask(torch.zeros(2, 3), 0.9, 0.5, 0.6)


def test_sizes_adapters_and_packed_tokens(tmp_path: Path):
    assert models.get_model_size(nn.Linear(100, 20)) == (2.02, "K")  # 100 · 20 + 20
    assert models.get_model_size(nn.Linear(2, 2), "") == (6.0, "")
    tokens, ends, longest = models.pad_packed_inputs(torch.ones(5), torch.tensor([0, 2, 5]), 3, 4)
    assert (tokens.tolist(), ends.tolist(), longest) == ([1, 1, 1, 1, 1, 0, 0, 0], [0, 2, 5, 8], 3)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 16}))
    assert models.get_lora_rank_from_adapter(tmp_path) == 16
    with pytest.raises(DataError, match="names no rank"):
        models.get_lora_rank_from_adapter(tmp_path / "none")
    adapter = SimpleNamespace(target_modules=["q_proj"], exclude_modules=r".*\.1\..*")
    assert models.check_target_modules(adapter, "layers.0.q_proj")
    assert not models.check_target_modules(adapter, "layers.0.aq_proj")
    assert models.check_exclude_modules(adapter, "layers.1.q_proj")
    assert models.squeeze(torch.ones(2, 3, 1)).shape == (2, 3)
    assert models.LambdaLayer(lambda x: 2 * x)(3) == 6


def test_flops_of_any_object_with_the_fields_of_a_config():
    fields = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SimpleNamespace(**fields, intermediate_size=16)
    # weights of a layer: attention 8 · 2 · (8 + 8), feed-forward 3 · 8 · 16; two products per token, and the head
    weights = 2 * (8 * 2 * 16 + 3 * 8 * 16)
    attended = 4 * 8 * 2 * (3 * 4 / 2)
    assert FlopsCounter(config).forward_flops([3]) == 2 * 3 * weights + 2 * 8 * 32 * 3 + attended
    assert FlopsCounter(SimpleNamespace(text_config=config)).forward_flops([3]) == FlopsCounter(config).forward_flops(
        [3]
    )


# ---- configurations -----------------------------------------------------------------------------


def test_what_parts_a_plain_configuration_needs():
    plain = {
        "algorithm": {"use_kl_in_reward": False, "adv_estimator": "gae"},
        "actor_rollout_ref": {"actor": {"use_kl_loss": True}},
        "critic": {"enable": None},
        "reward_model": {"enable": False},
    }
    for config in (plain, OmegaConf.create(plain)):
        assert (need_reference_policy(config), need_critic(config), need_reward_model(config)) == (True, True, False)
    assert need_reference_policy({Role.RefPolicy: object})
    assert not need_reference_policy({Role.Actor: object})
    assert is_distillation_enabled({"enabled": True})
    assert not is_distillation_enabled(None)
    changed = {"temperature": 1.0, "top_k": 5}
    update_dict_with_config(changed, OmegaConf.create({"temperature": 0.5, "n": 4}))
    assert changed == {"temperature": 0.5, "top_k": 5}


# ---- files and processes ------------------------------------------------------------------------


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert is_non_local("hdfs://a/b")
    assert not is_non_local("/a/b")
    assert md5_encode("a") == "0cc175b9c0f1b6a831c399e269772661"
    path = get_local_temp_path("hdfs://a/model", str(tmp_path))
    assert path == str(tmp_path / md5_encode("hdfs://a/model") / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "x").write_text("abc")
    assert verify_copy(str(one), str(two))
    (two / "x").write_text("ab")
    assert not verify_copy(str(one), str(two))
    monkeypatch.delenv("VERL_OF_THIS_TEST", raising=False)
    with temp_env_var("VERL_OF_THIS_TEST", "1"):
        assert load_class_from_fqn("os.environ")["VERL_OF_THIS_TEST"] == "1"  # type: ignore[index]
    assert "VERL_OF_THIS_TEST" not in load_class_from_fqn("os.environ")  # type: ignore[operator]
    assert [ceildiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    for name, error in (("Path", ValueError), ("no_such.Path", ImportError), ("pathlib.NoPath", AttributeError)):
        with pytest.raises(error):
            load_class_from_fqn(name)


def test_the_oldest_checkpoints_go(tmp_path: Path):
    manager = BaseCheckpointManager(nn.Linear(1, 1), checkpoint_config={"save_contents": ["model", "hf_model"]})
    assert (manager.should_save_model, manager.should_save_optimizer, manager.should_save_hf_model) == (
        True,
        False,
        True,
    )
    for step in range(1, 5):
        (tmp_path / str(step)).mkdir()
        manager.ensure_checkpoint_capacity(3)  # room for one more
        assert len(manager.previous_saved_paths) <= 2
        manager.register_checkpoint(str(tmp_path / str(step)), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]
    manager.ensure_checkpoint_capacity(1)  # the newest stays until the next is there
    manager.register_checkpoint(str(tmp_path / "4"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]
    state = manager.get_rng_state()
    drawn = torch.rand(2)
    manager.load_rng_state(state)
    assert torch.equal(torch.rand(2), drawn)


# ---- agents, templates, traces ------------------------------------------------------------------


def test_states_and_trajectories():
    data = AgentData([{"role": "user", "content": "hi"}], None, None, request_id="a", tools_kwargs={})
    assert (data.response_mask, data.assistant_turns, AgentState("pending")) == ([], 0, AgentState.PENDING)
    rows = asyncio.run(get_trajectory_info(3, [7, 7, 9], validate=False))
    assert [(row["step"], row["sample_index"], row["rollout_n"]) for row in rows] == [(3, 7, 0), (3, 7, 1), (3, 9, 0)]


class Template:
    """Renders ``S`` once, then for each message its role and ``;``, and ``A`` to open an answer."""

    pad_token_id, eos_token_id = None, 2
    image_token, video_token_id = "<image>", 5

    def apply_chat_template(self, messages: list[Mapping], *, add_generation_prompt: bool, **_: Any) -> list[int]:
        return [83] + [ord(c) for m in messages for c in m["role"][0] + ";"] + [65] * add_generation_prompt


def test_tokens_around_messages():
    assert extract_system_prompt_and_generation(Template()) == ([83], [65])
    template = Template()
    set_pad_token_id(template)
    assert template.pad_token_id == 2
    processor = SimpleNamespace(
        image_token="<image>", video_token_id=5, tokenizer=SimpleNamespace(convert_tokens_to_ids={"<image>": 9}.get)
    )
    assert [get_processor_token_id(processor, name) for name in ("image", "video", "audio")] == [9, 5, None]


def test_calls_are_traced_only_with_a_backend():
    @rollout_trace_op
    async def double(self: Any, number: int) -> int:
        return 2 * number

    try:
        RolloutTraceConfig.init("project", "experiment", None, token2text=True)
        RolloutTraceConfig.init("other", "experiment", None)  # the first call counts
        assert RolloutTraceConfig.get_instance().project_name == "project"
        assert (RolloutTraceConfig.get_backend(), RolloutTraceConfig.enable_token2text()) == (None, True)
        with rollout_trace_attr(sample_index=1, step=2, trace=False):
            assert asyncio.run(double(None, 4)) == 8
        RolloutTraceConfig.reset()
        with pytest.raises(ConfigError, match="Use mlflow"):
            RolloutTraceConfig.init("project", "experiment", "weave")
    finally:
        RolloutTraceConfig.reset()


@pytest.mark.slow
def test_a_trajectory_is_a_trace_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import mlflow

    @rollout_trace_op
    def double(number: int) -> int:
        return 2 * number

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        RolloutTraceConfig.init("project", "experiment", "mlflow")
        with rollout_trace_attr(sample_index=1, step=2, rollout_n=0, name="trajectory"):
            assert double(4) == 8
        mlflow.flush_trace_async_logging()
        trace = mlflow.get_trace(mlflow.get_last_active_trace_id())
        assert [span.name.rpartition(".")[2] for span in trace.data.spans] == ["trajectory", "double"]
        assert (trace.data.spans[1].inputs, trace.data.spans[1].outputs) == ({"number": 4}, 8)
        assert {name: trace.info.tags[name] for name in ("step", "sample_index", "experiment_name")} == {
            "step": "2", "sample_index": "1", "experiment_name": "experiment",
        }  # fmt: skip
    finally:
        RolloutTraceConfig.reset()
        mlflow.set_tracking_uri(None)


# ---- responses and scores -----------------------------------------------------------------------


def test_responses_are_read_from_files_where_they_are_there(tmp_path: Path):
    config = {"actor_rollout_ref": {"rollout": {"name": "hf", "skip_rollout": True, "skip_dump_dir": str(tmp_path)}}}
    drawn = []

    class Engine:
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            drawn.append(len(prompts))
            return DataProto.from_dict({"responses": prompts.batch["input_ids"] + 1})

    prompts = DataProto.from_dict({"input_ids": torch.tensor([[1], [2]])}, {"uid": ["1-0", "1-1"]})
    for _ in range(2):
        engine = Engine()
        RolloutSkip(config, engine).wrap_generate_sequences()
        assert engine.generate_sequences(prompts).batch["responses"].tolist() == [[2], [3]]
    assert drawn == [2]
    idle = RolloutSkip({"actor_rollout_ref": {"rollout": {"name": "hf"}}}, engine := Engine())
    idle.wrap_generate_sequences()
    assert not idle.is_active
    assert "generate_sequences" not in vars(engine)


def test_a_reward_function_by_name():
    score = get_default_compute_score("openai/gsm8k")
    assert score("any", "#### 5", "5") == 1.0
    with pytest.raises(NotImplementedError):
        get_default_compute_score("no/such")


# ---- errors -------------------------------------------------------------------------------------


def test_errors_are_of_the_kinds_that_public_code_catches(tmp_path: Path):
    x, mask = torch.zeros(1, 2), torch.ones(1, 2)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    calls = [
        (NotImplementedError, "unknown kl_penalty 'none'", lambda: kl_penalty(x, x, "none")),
        (ValueError, "unknown loss_agg_mode 'none'", lambda: agg_loss(x, mask, "none")),
        (FileNotFoundError, "there is no file", lambda: load_extern_type(str(tmp_path / "none.py"), "Reward")),
        (AttributeError, "has no such name", lambda: load_extern_object("pathlib", "NoPath")),
        (RuntimeError, "ZeroDivisionError", lambda: load_extern_type(str(broken), "Reward")),
        (AssertionError, "cannot make 2 parts", lambda: get_seqlen_balanced_partitions([3], 2, equal_size=False)),
        (ValueError, "no level of weights", lambda: compute_rollout_correction_weights(x, mask, "none")),  # type: ignore[arg-type]
        (AssertionError, "there is no such rollout engine", lambda: get_rollout_class("none")),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message) as error:
            call()
        assert isinstance(error.value, VerlError)
        assert message in str(error.value)
