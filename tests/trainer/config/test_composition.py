"""The YAML files: made from the classes, complete, with the defaults that scripts expect."""

from __future__ import annotations

import importlib
import pickle
from collections import Counter
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from docs.generate.configuration import FOLDER, reference_pages
from verl.base.nested import flat
from verl.config import ActorRolloutRefConfig, DPOConfig, RMConfig
from verl.config.base import BaseConfig
from verl.config.machine import STORED_DTYPE
from verl.trainer.config import EvalConfig, GenerationConfig, PPOConfig, SFTConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.generate import files
from verl.trainer.config.keys import all_inactive, allowed_values, default_tree, get, iter_keys
from verl.trainer.config.load import as_composed
from verl.trainer.config.overrides import CONFIG_DIR

HERE = Path(__file__).parent
ROOTS = {
    "ppo_trainer": PPOConfig,
    "sft_trainer": SFTConfig,
    "rm_trainer": RMConfig,
    "dpo_trainer": DPOConfig,
    "generation": GenerationConfig,
    "evaluation": EvalConfig,
}
OURS = {
    "actor_rollout_ref.rollout.name": "native",
    "actor_rollout_ref.model.use_liger": None,  # where it is installed
    "trainer.save_freq": 0,
    "trainer.logger": ["console", "file"],
    "trainer.n_gpus_per_node": "${verl.gpus_per_node:}",
    "reward_model.n_gpus_per_node": "${trainer.n_gpus_per_node}",
    "actor_rollout_ref.actor.fsdp_config.dtype": "${verl.dtype:}",
    "actor_rollout_ref.ref.fsdp_config.dtype": "${verl.dtype:}",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": STORED_DTYPE,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": STORED_DTYPE,
    "critic.model.fsdp_config.model_dtype": STORED_DTYPE,
    "actor_rollout_ref.rollout.dtype": "${verl.dtype:}",
    "critic.model.fsdp_config.dtype": "${verl.dtype:}",
    "reward_model.rollout.dtype": "${verl.dtype:}",
}
"""Keys whose default differs from the list on purpose."""


def expected() -> dict[str, object]:
    """The published keys and defaults; ``${...}`` stays text."""
    pairs = (line.split(": ", 1) for line in (HERE / "keys_0_8.txt").read_text().splitlines())
    return {key: text if "${" in text else yaml.safe_load(text) for key, text in pairs}


def test_every_published_key_composes_with_its_default():
    composed = OmegaConf.to_container(compose(), resolve=False)
    assert isinstance(composed, dict)
    wrong = {}
    for key, default in expected().items():
        default = OURS.get(key, default)
        got = get(composed, key, "absent")
        if isinstance(default, str) and ("${ray session dir}" in default or "${tmp dir}" in default):
            default = None  # a folder of the machine; ours is filled in at run time
        if default == "1e-06" or default == "1e-05":
            default = float(default)  # YAML 1.1 reads it as text, Hydra as a number
        if got != default or isinstance(got, bool) != isinstance(default, bool):
            wrong[key] = (got, default)
    assert not wrong


def test_the_published_list_is_whole():
    assert len(expected()) == 556


@pytest.mark.parametrize("path", sorted(files()), ids=str)
def test_files_on_disk_are_those_that_the_classes_make(path: Path):
    assert (CONFIG_DIR / path).read_text() == files()[path], "run `python -m verl.trainer.config.generate`"


def test_no_other_file_is_left_over():
    found = {path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml")}
    assert {path for path in found if path.parts[0] != "hydra_defaults"} == set(files())


def test_the_reference_is_the_one_that_the_classes_make():
    pages = {page.name: page.read_text() for page in FOLDER.glob("*.md")}
    assert pages == reference_pages(), "run `python -m docs.generate.configuration`"


def test_the_reference_has_every_section_once():
    text = "\n".join(text for name, text in reference_pages().items() if name != "index.md")
    sections = Counter(line.removeprefix("## ") for line in text.splitlines() if line.startswith("## "))
    assert max(sections.values()) == 1
    assert {"actor_rollout_ref.actor.optim", "critic", "data of sft_trainer", "trainer.async"} <= set(sections)


@pytest.mark.parametrize("name", ROOTS)
def test_yaml_composes_to_the_classes_own_defaults(name: str):
    composed = OmegaConf.to_container(compose(config_name=name), resolve=False)
    assert composed == default_tree(ROOTS[name])


@pytest.mark.parametrize("root", ROOTS.values())
def test_every_key_has_a_sentence_and_a_type_in_words(root: type[BaseConfig]):
    for key in iter_keys(root):
        assert key.sentence.endswith("."), key.path
        assert key.section is not None or "typing" not in allowed_values(key.field), key.path


def test_every_target_can_be_imported_and_is_a_section():
    targets = {
        value
        for root in ROOTS.values()
        for path, value in flat(default_tree(root))
        if path.endswith("_target_") and path not in all_inactive(root)
    }
    assert len(targets) > 10
    for target in targets:
        module, _, name = target.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), BaseConfig), target


def test_a_composed_configuration_loads_back_from_its_resolved_form(run):
    # A run is often started again from the configuration that it saved.
    first = run.load()
    assert load_config(first.to_dict()) == first


@pytest.mark.parametrize("bypass", [False, True])
def test_the_form_for_a_fit_of_ones_own_loads_back_and_its_sections_are_the_typed_ones(run, bypass):
    config = run.load({"algorithm.rollout_correction.bypass_mode": bypass, "actor_rollout_ref.rollout.top_p": 0.9})
    composed = as_composed(config)
    assert load_config(composed) == config
    assert PPOConfig.from_mapping(composed) == config
    assert (
        ActorRolloutRefConfig.from_mapping(pickle.loads(pickle.dumps(composed.actor_rollout_ref)))
        == config.actor_rollout_ref
    )
    # What counted over all ranks is null, what is per rank holds: 4 over 2 ranks.
    ref = "actor_rollout_ref.ref.log_prob_micro_batch_size"
    composed = as_composed(run.load({ref: 4}))
    assert OmegaConf.select(composed, ref) is None
    assert OmegaConf.select(composed, f"{ref}_per_gpu") == 2


def test_interpolated_defaults_follow_their_source(run):
    config = run.load({"data.max_prompt_length": 100, "actor_rollout_ref.actor.ppo_epochs": 3})
    assert config.actor_rollout_ref.rollout.prompt_length == 100
    assert config.critic.ppo_epochs == 3
    assert run.load({"trainer.seed": 7}).actor_rollout_ref.rollout.seed == 7
    assert run.load({"trainer.seed": 7}, SFTConfig).data.seed == 7
    assert config.critic.rollout_n == 4  # rollout.n
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


def test_seed_and_determinism_of_the_environment(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_SEED", "5")
    monkeypatch.setenv("VERL_FULL_DETERMINISM", "1")
    config = run.load()
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.seed, config.data.seed) == (5, 5, 5)
    assert config.actor_rollout_ref.actor.fsdp_config.full_determinism is True
    assert run.load({"trainer.seed": 7}).actor_rollout_ref.rollout.seed == 7
    assert run.load({"trainer.seed": 1}, explicit={"trainer.seed"}).trainer.seed == 1
    assert run.load(root=SFTConfig).data.seed == 5


def test_the_values_of_a_section_in_another_place():
    # The same class with other defaults where it serves another purpose.
    tree = default_tree(PPOConfig)
    assert get(tree, "actor_rollout_ref.actor.fsdp_config.forward_only") is False
    assert get(tree, "actor_rollout_ref.ref.fsdp_config.forward_only") is True
    assert (get(tree, "actor_rollout_ref.actor.optim.lr"), get(tree, "critic.optim.lr")) == (1e-6, 1e-5)
