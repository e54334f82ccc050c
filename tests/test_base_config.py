from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl.compat.toolkit.config import omega_conf_to_dataclass
from verl.config.base import BaseConfig, defaults_of, section, sentence_of, setting, subsection
from verl.errors import ConfigError, SectionError
from verl.trainer.config import PPOConfig
from verl.trainer.config.keys import iter_keys
from verl.workers.config import ActorConfig, CheckpointConfig, FSDPActorConfig


@section
class Inner(BaseConfig):
    """Inner."""

    lr: float = setting(0.5, gt=0)
    """Step size."""


@section
class Outer(BaseConfig):
    """Outer."""

    inner: Inner = subsection(Inner)
    """The inner one."""
    names: tuple[str, ...] = setting(("a",))
    """Names."""
    hidden: int = setting(0, internal=True)
    """Filled in by code."""


def test_reads_as_attribute_and_as_mapping():
    config = Outer(inner=Inner(lr=0.1))
    assert config.inner.lr == config["inner"]["lr"] == 0.1
    assert config.get("nothing", 7) == 7
    assert dict(config.inner) == {"lr": 0.1}
    assert list(config) == ["inner", "names", "hidden"]
    assert len(config) == 3


def test_an_unknown_item_names_the_fields():
    with pytest.raises(KeyError, match="Inner has no field 'momentum'; it has lr"):
        Inner()["momentum"]


def test_nobody_writes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().lr = 1.0  # type: ignore[misc]
    changed = dataclasses.replace(Inner(), lr=2.0)
    assert changed.lr == 2.0
    assert Inner().lr == 0.5


def test_sections_of_equal_values_are_equal():
    assert Inner(lr=0.1) == Inner(lr=0.1) != Inner(lr=0.2)
    assert Inner() != {"lr": 0.5}
    assert CheckpointConfig() == CheckpointConfig() != CheckpointConfig(save_contents=["model"])
    assert len({CheckpointConfig(), CheckpointConfig()}) == 1
    assert len({Inner(), Inner(lr=0.5), Inner(lr=0.1)}) == 2
    assert PPOConfig(composed={"a": 1}) == PPOConfig()  # not of the compared fields


def test_defaults_of_a_subsection_may_differ_from_those_of_its_class():
    @section
    class Slow(BaseConfig):
        inner: Inner = subsection(Inner, lr=0.1)

    assert Slow().inner == Inner(lr=0.1)
    assert Slow(inner=Inner()).inner.lr == 0.5
    with pytest.raises(TypeError, match="CheckpointConfig has no momentum"):
        defaults_of(CheckpointConfig, momentum=0.9)


def test_a_subsection_of_a_user_is_made_by_its_class():
    @section
    class Needs(BaseConfig):
        path: str

        def __eq__(self, other: object) -> bool:
            return True

    @section
    class Mine(BaseConfig):
        needs: Needs = subsection(Needs)

    with pytest.raises(ConfigError, match="path"):
        Mine()
    assert Needs(path="a") == 3


BY_VALUE = """
import sys, cloudpickle
from verl.config.base import BaseConfig, section, setting, subsection

@section
class Inner(BaseConfig):
    lr: float = setting(0.5, gt=0)

@section
class Mine(BaseConfig):
    inner: Inner = subsection(Inner)

sys.stdout.buffer.write(cloudpickle.dumps(Mine))
"""


def test_a_section_of_a_script_goes_to_another_process_before_one_was_made():
    written = subprocess.run([sys.executable, "-c", BY_VALUE], capture_output=True, check=True)
    mine = pickle.loads(written.stdout)
    assert mine().inner.lr == 0.5
    with pytest.raises(ConfigError):
        mine(inner={"lr": 0})


@pytest.mark.parametrize("arguments", [{"lr": 0}, {"lr": "fast"}, {"momentum": 0.9}])
def test_bounds_types_and_unknown_fields_are_refused(arguments):
    with pytest.raises(ConfigError):
        Inner(**arguments)


def test_plain_form_leaves_internal_fields_out():
    assert Outer(hidden=3).to_dict() == {"inner": {"lr": 0.5}, "names": ["a"]}


def test_the_whole_configuration_survives_a_process_border():
    config = PPOConfig()
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_field_that_follows_another_one():
    assert ActorConfig(clip_ratio=0.1).clip_ratio_low == 0.1
    assert ActorConfig(clip_ratio=0.1, clip_ratio_high=0.3).clip_ratio_high == 0.3
    assert CheckpointConfig(save_contents=["model"]).load_contents == ("model",)


def test_an_engine_fills_in_global_counts_on_a_copy():
    config = FSDPActorConfig(ppo_mini_batch_size=8)
    filled = dataclasses.replace(config, global_batch_info={"dp_size": 2})
    assert filled.global_batch_info == {"dp_size": 2}
    assert config.global_batch_info == {}
    assert "global_batch_info" not in {key.name for key in iter_keys(PPOConfig)}


def test_sentences_are_inherited():
    assert sentence_of(Inner, "lr") == "Step size."
    assert sentence_of(FSDPActorConfig, "ppo_epochs") == "Passes over the batch of a step."


def test_sentences_of_classes_of_one_name_are_not_mixed_up():
    @section
    class Inner(BaseConfig):
        lr: float = 0.1
        """Another
        step size."""
        bare: int = 1

    assert sentence_of(Inner, "lr") == "Another step size."
    assert sentence_of(Inner, "bare") == ""
    typed_in = type("TypedIn", (BaseConfig,), {"__module__": "builtins"})  # a module without source code
    assert sentence_of(typed_in, "lr") == ""


def test_a_plain_dataclass_of_a_user_is_a_mapping_too():
    @dataclasses.dataclass
    class Mine(BaseConfig):
        rate: float = 0.5

    mine = Mine(0.25)
    assert (mine["rate"], mine.get("nothing", 7), dict(mine), mine.to_dict()) == (0.25, 7, {"rate": 0.25}, dict(mine))
    assert omega_conf_to_dataclass({"rate": 2.0}, Mine) == Mine(2.0)


def test_a_section_is_extended_by_section():
    @section
    class Mine(FSDPActorConfig):
        beta: float = setting(1.0)
        """Weight."""

    assert (Mine(beta=2.0)["beta"], Mine().clip_ratio) == (2.0, 0.2)


def test_a_section_is_extended_by_a_plain_dataclass():
    @dataclasses.dataclass
    class Mine(FSDPActorConfig):
        api_key: str = ""
        beta: float = 1.0
        names: list[str] = dataclasses.field(default_factory=list)

        def __post_init__(self):
            super().__post_init__()
            assert self.beta < 9

    mine = Mine(api_key="secret", beta="2.5", ppo_epochs=3)
    assert (mine.beta, mine["beta"], mine.names, mine.ppo_epochs, mine.clip_ratio) == (2.5, 2.5, [], 3, 0.2)
    assert "secret" not in repr(mine)
    assert dataclasses.replace(mine, beta=3.0) == Mine(api_key="secret", beta=3.0, ppo_epochs=3) != mine
    assert copy.deepcopy(mine) == mine
    assert omega_conf_to_dataclass(OmegaConf.create({"api_key": "k", "ppo_epochs": 2}), Mine).ppo_epochs == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.beta = 1.0
    with pytest.raises(SectionError, match=r"ppo_epochs=0"):
        Mine(api_key="k", ppo_epochs=0)
    with pytest.raises(SectionError, match="Mine has no 'gamma'"):
        Mine(api_key="k", gamma=1)


def test_a_setting_that_is_not_kept_says_how_to_read_it():
    with pytest.raises(AttributeError, match=r"Inner has no 'beta'.*\.get\('beta', default\)"):
        Inner().beta  # noqa: B018
    assert not hasattr(Inner(), "beta")
