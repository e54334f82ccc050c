"""What ``verl explain`` and ``verl diff`` find."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import verl
from tests.checkpoint.test_run import Run
from verl.cli.differences import ABSENT, describe_kinds, differences, differences_table, kinds, read_settings
from verl.cli.explain import (
    all_settings,
    explanation,
    follows_from,
    keys_of_other_sections,
    matching,
    other_keys,
    read_at,
)
from verl.errors import ConfigError
from verl.trainer.loop import RunSettings


def paths(word: str) -> list[str]:
    return [setting.path for setting in matching(word, all_settings())]


def test_a_word_is_a_whole_key_then_an_ending_then_a_part_then_a_meaning():
    assert paths("trainer.seed") == ["trainer.seed"] * len(paths("trainer.seed"))
    sections = "actor_rollout_ref.actor", "distillation.distillation_loss"
    assert set(paths("clip_ratio_low")) == {f"{section}.clip_ratio_low" for section in sections}
    assert "algorithm.filter_groups.max_num_gen_batches" in paths("num_gen")
    assert {"actor_rollout_ref.actor", "actor_rollout_ref.actor.clip_ratio"} <= set(paths("actor")), "a section"
    assert all("checkpoint" not in path for path in paths("hung")), "found by meaning only"
    assert "trainer.recovery.hang_timeout_s" in paths("hung")


def test_what_takes_its_value_from_a_key():
    settings = all_settings()
    actor = "actor_rollout_ref.actor"
    assert f"{actor}.clip_ratio_low" not in follows_from(f"{actor}.optim.lr", settings)
    assert follows_from(f"{actor}.clip_ratio", settings) == [f"{actor}.clip_ratio_low", f"{actor}.clip_ratio_high"]
    (low,) = matching(f"{actor}.clip_ratio_low", settings)
    assert low.default == f"that of {actor}.clip_ratio (0.2)"
    assert "trainer.default_local_dir" not in follows_from("trainer.seed", settings)
    assert f"{actor}.optim.clip_grad" in follows_from(f"{actor}.grad_clip", settings)
    assert "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu" in follows_from(
        f"{actor}.ppo_micro_batch_size_per_gpu", settings
    )


def test_keys_that_end_alike_in_other_sections():
    settings, rate = all_settings(), ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr", "optim.lr"]
    for path in rate:
        setting = next(one for one in settings if one.path == path)
        assert keys_of_other_sections(setting, settings) == [other for other in rate if other != path]
    assert {setting.path for setting in matching("optim.lr", settings)} == {*rate}, "a key, and the end of others"
    assert {setting.path for setting in matching("critic.optim.lr", settings)} == {"critic.optim.lr"}
    assert keys_of_other_sections(matching("trainer.seed", settings)[0], settings) == []
    assert keys_of_other_sections(matching("critic.optim", settings)[0], settings) == []


def test_all_sections_of_a_name_are_listed_before_their_keys():
    found = list(dict.fromkeys(paths("optim")))
    assert found[:3] == ["actor_rollout_ref.actor.optim", "critic.optim", "optim"]
    assert {f"{section}.lr" for section in found[:3]} <= {*found[3:]}
    assert set(paths("critic.optim")) == {path for path in found if path.startswith("critic.optim")}


def test_lines_that_read_a_key_are_code():
    places = read_at("trainer.max_rollout_actor_probs_diff")
    assert any(place.startswith("verl/trainer/ppo/trainer.py:") for place in places)
    for place in (seeds := read_at("trainer.seed")):
        file, _, line = place.partition(":")
        assert "trainer.seed" in (Path(verl.__file__).parents[1] / file).read_text().splitlines()[int(line) - 1]
    assert not any("base/env.py" in place for place in seeds), "a docstring"
    assert any(place.startswith("verl/trainer/driver.py:") for place in seeds)


def test_a_key_that_others_follow_is_not_read_at_a_fallback(capsys):
    Console(width=200).print(explanation("actor_rollout_ref.actor.clip_ratio")[0])
    assert "no line: its value is read through the settings that follow it" in capsys.readouterr().out


def test_runs_of_two_kinds_are_told():
    sft = {"data.train_batch_size": 4, "optim.lr": 1, "model.path": "x", "data.prompt_key": "prompt"}
    grpo = {"data.train_batch_size": 8, "actor_rollout_ref.model.path": "x", "algorithm.adv_estimator": "grpo"}
    assert "verl sft" in kinds(sft)
    assert kinds(grpo) == ["verl train"]
    assert kinds({"unknown": 1}) == []
    assert "A has settings of verl sft" in str(describe_kinds(kinds(sft), kinds(grpo), "A", "B"))
    assert describe_kinds(kinds({"data.seed": 1}), kinds(grpo), "A", "B") is None, "a few settings may be of either"
    assert describe_kinds([], kinds(grpo), "A", "B") is None


def test_a_misspelt_key_is_unknown_and_the_right_one_is_told():
    page, is_known = explanation("actor_rollout_ref.actor.clip_ration")
    assert not is_known
    assert "actor_rollout_ref.actor.clip_ratio," in str(page)


@pytest.mark.parametrize("word", ["", " ", ".", "=3"])
def test_no_word_is_no_key(word):
    page, is_known = explanation(word)
    assert not is_known
    assert "No key was given" in str(page)


def test_keys_of_other_versions_are_explained():
    assert any(
        line.endswith("is another spelling of actor_rollout_ref.actor.optim.betas[0]") for line in other_keys("beta1")
    )


def test_differences_of_a_yaml_file_and_a_log(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"data": {"seed": 1, "train_files": ["x"]}, "only": 3}))
    start = {"event": "start", "config": {"data": {"seed": 2, "train_files": ["x"]}}}
    lines = [{"event": "start", "config": {"data": {"seed": 9}}}, start, {"event": "end"}]
    (tmp_path / "b.run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.jsonl").write_text("")
    found = differences(read_settings(str(tmp_path / "a.yaml")), read_settings(str(tmp_path / "b.jsonl")))
    assert found == {"data.seed": (1, 2), "only": (3, ABSENT)}


def test_settings_of_a_checkpoint_are_those_of_its_run(tmp_path):
    config = {"data": {"seed": 5, "source_weights": {}}, "trainer": {"logger": ["file"]}}
    run = Run(tmp_path)
    run.checkpoint.save(replace(run.state(3), controllers={"settings": RunSettings(config).state_dict()}))
    run.checkpoint.finish()
    expected = {"data.seed": 5, "trainer.logger": ["file"]}
    assert read_settings(str(tmp_path / "global_step_3")) == read_settings(str(tmp_path)) == expected
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert read_settings(str(tmp_path / "run.yaml")) == expected, "checkpoints keep no empty sections"


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="cannot be read as settings"):
        read_settings(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "[1, 2]"),
        ("a.yaml", "- 1"),
        ("a.yaml", ""),
        ("a.run.jsonl", "[1]\n"),
        ("a.run.jsonl", '{"event": "st'),
        ("a.run.jsonl", '{"event": "start", "config": 3}\n'),
        ("a.json", '{"settings": 3}'),
    ],
)
def test_files_of_another_kind_hold_no_settings(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"there are no settings in .*Name a YAML file"):
        read_settings(str(tmp_path / name))


def test_a_file_that_is_not_there_is_told():
    for name in ("", "no/such/file.yaml"):
        with pytest.raises(ConfigError, match=f"there is no '{name}'"):
            read_settings(name)


def test_keys_of_a_narrow_table_are_whole():
    key = "actor_rollout_ref.actor.a_name_that_is_longer_than_its_column"
    console = Console(width=40)
    with console.capture() as text:
        console.print(differences_table({key: (1, 2)}, "A", "B"))
    lines = text.get().splitlines()[1:]
    assert len(lines) > 1
    assert "".join(line.partition("  ")[0].strip() for line in lines) == key


def test_a_name_of_another_library_leads_to_ours():
    console = Console(width=200, record=True, file=io.StringIO())
    for word in ("num_generations", "loss_type", "logging_steps", "lambd"):
        page, is_known = explanation(word)
        assert is_known
        console.print(page)
    said = console.export_text()
    assert "num_generations of TRL is actor_rollout_ref.rollout.n here" in said
    assert "Responses per prompt." in said, "the page of our key follows"
    assert "  dr_grpo: actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm" in said
    assert "logging_steps of TRL has no key here: every step is logged" in said
    assert "lambd of OpenRLHF is algorithm.lam here" in said
