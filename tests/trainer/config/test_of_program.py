"""A configuration that a Python program hands over: keys of its own stay, and known ones are checked as ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config.support import Run
from verl.algorithms import compute_advantages
from verl.base_config import section
from verl.compat.toolkit.config import omega_conf_to_dataclass
from verl.config import FSDPActorConfig, PPOConfig, Problem
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.config.key_releases import PROGRAM_KEYS
from verl.trainer.config.keys import get, put
from verl.trainer.config.load import as_composed, load_config
from verl.trainer.config.translate import Translator
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.roles import Needs


@section
class MyActorConfig(FSDPActorConfig):
    """An actor with one more setting."""

    my_beta: float = 0.5


@dataclass
class PlainActorConfig(FSDPActorConfig):
    """The same by the standard library's decorator."""

    my_beta: float = 0.5


MINE = f"{MyActorConfig.__module__}.{MyActorConfig.__qualname__}"


def composed(run: Run, *overrides: str) -> DictConfig:
    settings = [f"{key}={value}" for key, value in run.ppo.items()]
    return compose([*settings, *overrides])


def test_sections_and_leaves_of_a_program_are_kept(run: Run, caplog: pytest.LogCaptureFixture):
    cfg = composed(
        run,
        *("agentlightning.port=9999", "trainer.spo.port=${agentlightning.port}", "trainer.spo.later=${nowhere.x}"),
        *("data.my_column=answer", "tools.search.k=3", "data.train_batch_size=16"),
    )
    view = as_composed(load_config(cfg, for_program=True))
    assert (view.agentlightning.port, view.trainer.spo.port, view.data.my_column) == (9999, 9999, "answer")
    assert (view.tools.search.k, view.data.train_batch_size) == (3, 16)
    assert "did you mean" not in caplog.text
    with pytest.raises(ConfigError, match=r"agentlightning\.port=9999: there is no such key"):
        load_config(cfg)  # the command line stays strict


@pytest.mark.parametrize(
    "key, meant",
    [
        ("data.shufle", "data.shuffle"),
        ("actor_rollout_reff.rollout.n", "actor_rollout_ref"),
        ("actor_rollout_ref.actr.ppo_epochs", "actor_rollout_ref.actor"),
        ("critic.lr", "critic.optim.lr"),
    ],
)
def test_what_resembles_a_known_key_is_told(run: Run, caplog: pytest.LogCaptureFixture, key: str, meant: str):
    load_config(composed(run, f"{key}=1"), for_program=True)
    assert f"did you mean {meant}?" in caplog.text


def test_known_keys_are_checked(run: Run):
    with pytest.raises(ConfigError, match=r"^1 problem(.|\n)*actor_rollout_ref\.rollout\.n=many"):
        load_config(composed(run, "mine.a=1", "actor_rollout_ref.rollout.n=many"), for_program=True)


@pytest.mark.parametrize("cls", [MyActorConfig, PlainActorConfig])
def test_a_section_may_be_of_the_programs_own_class(run: Run, cls: type[Any]):
    target = f"actor_rollout_ref.actor._target_={cls.__module__}.{cls.__qualname__}"
    cfg = composed(run, target, "actor_rollout_ref.actor.my_beta=0.25")
    actor = load_config(cfg, for_program=True).actor_rollout_ref.actor
    assert isinstance(actor, cls)
    assert (actor.my_beta, actor.ppo_mini_batch_size, actor.fsdp_config.strategy) == (0.25, 4, "fsdp")


@pytest.mark.parametrize(
    "target, said",
    [
        ("pathlib.Path", "Path is no subclass of verl.config.actor.FSDPActorConfig"),
        ("nowhere.Config", "it names no class: No module named 'nowhere'"),
    ],
)
def test_another_class_is_refused(run: Run, target: str, said: str):
    with pytest.raises(ConfigError) as caught:
        load_config(composed(run, f"actor_rollout_ref.actor._target_={target}"), for_program=True)
    assert said in str(caught.value)


def test_a_value_that_does_not_fit_the_programs_class_is_told(run: Run):
    cfg = composed(run, f"actor_rollout_ref.actor._target_={MINE}", "actor_rollout_ref.actor.my_beta=much")
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\._target_(.|\n)*my_beta"):
        load_config(cfg, for_program=True)


def test_a_program_may_compute_advantages_itself(run: Run):
    cfg = composed(run, "algorithm.adv_estimator=null")
    config = load_config(cfg, for_program=True)
    needs = Needs.from_config(config)
    assert needs.critic is False
    with pytest.raises(ConfigError, match="the program that made this configuration computes advantages itself"):
        compute_advantages(None, {}, {})
    with pytest.raises(ConfigError, match="name one: grpo"):
        load_config(cfg)


def test_the_reward_function_is_read_though_other_sections_are_wrong(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n  pass\n"
    )
    given: dict[str, Any] = {
        "trainer": {"nnodes": "many"},
        "mine": 1,
        "custom_reward_function": {"path": f"{tmp_path}/mine.py"},
    }
    assert get_custom_reward_fn(OmegaConf.create(given)) is not None
    given["custom_reward_function"]["path"] = 3.5
    given["reward_model"] = {"timeout_s": "long"}
    with pytest.raises(ConfigError, match=r"^1 problem(.|\n)*reward_model\.timeout_s"):
        get_custom_reward_fn(OmegaConf.create(given))


def test_a_program_overrides_keys_of_sections_that_only_releases_have():
    overrides = [
        "reward.reward_manager.name=dapo",
        "sandbox_fusion.url=http://localhost:1",
        "skip.rollout.enable=false",
        "critic.fsdp.param_offload=true",
        "actor_rollout_ref.model.lora.rank=8",
        "ray_kwargs.ray_init.runtime_env.py_executable=python3",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):  # as hydra.main composes
        cfg = hydra_compose("ppo_trainer", overrides=overrides)
    assert (cfg.reward.reward_manager.name, cfg.reward.num_workers) == ("dapo", None)
    config = load_config(cfg, for_program=True, with_rules=False)
    assert (config.reward_manager.name, config.reward_model.num_workers) == ("dapo", 1)
    assert config.reward_model.sandbox_fusion.url == "http://localhost:1"
    assert config.critic.model.fsdp_config.param_offload
    assert config.actor_rollout_ref.model.lora_rank == 8
    assert config.ray_kwargs.ray_init == {"num_cpus": None, "runtime_env": {"py_executable": "python3"}}
    assert isinstance(omega_conf_to_dataclass(cfg.actor_rollout_ref.actor), FSDPActorConfig)  # nulls are not set
    assert as_composed(config).reward.reward_manager.name == "dapo"
    assert "reward" not in compose([])  # a command of verl takes any key


def test_no_key_that_only_releases_have_is_silently_without_effect():
    odd: dict[str, Any] = {}
    paths = [f"{section}.{name}" for sections, names in PROGRAM_KEYS for section in sections for name in names.split()]
    for path in paths:
        put(odd, path, "odd")
    problems: list[Problem] = []
    translator = Translator.for_root(PPOConfig, paths, problems, for_program=True)
    tree, _, _, remarks = translator.translate(odd)
    told = " ".join([*(problem.key for problem in problems), *translator.spelt.values(), *remarks])
    assert not [path for path in paths if path not in told and get(tree, path) != "odd"]
