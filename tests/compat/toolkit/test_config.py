"""Typed sections of composed configurations, as public workers and task runners ask for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from omegaconf import OmegaConf

from verl.compat.toolkit.config import omega_conf_to_dataclass, validate_config
from verl.compat.toolkit.profiler import ProfilerConfig
from verl.config import DataConfig, FSDPActorConfig, HFModelConfig, PPOConfig, RolloutConfig
from verl.errors import ConfigError
from verl.trainer.config.keys import default_tree


@dataclass
class Own:
    """A section of a user's own."""

    rate: float = 0.5
    names: list[str] = field(default_factory=list)


def composed():
    return OmegaConf.create(default_tree(PPOConfig))


def test_each_section_of_the_composed_yaml_becomes_its_class(caplog):
    config = composed()
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 32
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (type(actor), actor.ppo_mini_batch_size) == (FSDPActorConfig, 32)
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.model), HFModelConfig)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (type(rollout), rollout.prompt_length) == (RolloutConfig, config.data.max_prompt_length)
    assert isinstance(omega_conf_to_dataclass(config.data, DataConfig), DataConfig)
    assert isinstance(omega_conf_to_dataclass(config.critic.get("profiler", {}), ProfilerConfig), ProfilerConfig)
    assert not caplog.records  # defaults of the YAML are no settings of the user's
    assert omega_conf_to_dataclass(actor) is actor
    assert omega_conf_to_dataclass({}, ProfilerConfig) == ProfilerConfig()


def test_a_users_own_dataclass_takes_its_fields():
    config = OmegaConf.create({"base": 2.0, "own": {"rate": "${base}", "names": ["a"]}})
    assert omega_conf_to_dataclass(config.own, Own) == Own(2.0, ["a"])


def test_what_is_no_section_is_refused():
    config = composed()
    config.actor_rollout_ref.actor.ppo_mini_batch_siz = 32
    with pytest.raises(ConfigError, match="there is no such key"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    with pytest.raises(ConfigError, match="needs dataclass_type"):
        omega_conf_to_dataclass({"a": 1})
    with pytest.raises(ConfigError, match=r"_target_=verl\.Nothing names no class"):
        omega_conf_to_dataclass({"_target_": "verl.Nothing"})


def test_a_whole_configuration_is_checked_without_the_sections_that_are_not_used(tmp_path):
    config = composed()
    config.my_recipe = {"gen_batch_size": 4}  # the script's own
    with pytest.raises(ConfigError) as error:
        validate_config(config, use_reference_policy=False, use_critic=True)
    assert "actor_rollout_ref.model.path" in str(error.value)
    assert "critic.ppo_micro_batch_size_per_gpu" in str(error.value)
    assert "my_recipe" not in str(error.value)
    config.critic.optim.lr = "typo"
    with pytest.raises(ConfigError, match=r"critic\.optim\.lr"):
        validate_config(config, use_reference_policy=False, use_critic=True)
    with pytest.raises(ConfigError) as error:
        validate_config(config, use_reference_policy=False, use_critic=False)
    assert "critic.optim.lr" not in str(error.value)
