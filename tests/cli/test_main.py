"""The command ``verl`` in processes of its own: what it runs, what it loads, how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests import forks
from verl.cli.commands import INSPECTIONS, MODULES
from verl.cli.differences import differences, read_settings
from verl.cli.main import complete_keys
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.overrides import keys_set
from verl.trainer.loop import RunSettings
from verl.trainer.main_ppo import FIRST_WORDS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy", "pandas", "hydra", "starlette", "uvicorn")


def verl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_answers_load_nothing_heavy():
    answers = [["--help"], ["explain", "clip_ratio_low"], ["--version"], ["inspect", "-h"]]
    code = (
        "import sys; from verl.cli.main import cli\n"
        f"for arguments in {answers!r}:\n"
        "    try: cli(arguments, prog_name='verl')\n"
        "    except SystemExit as end: assert end.code in (0, None), (arguments, end.code)\n"
        f"    print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded:")] == ["loaded: []"] * len(answers)


def test_a_configuration_is_shown_without_what_only_runs_need():
    code = (
        "import sys; from verl.cli.main import cli; from verl.config import PPOConfig\n"
        "try: cli(['train', '--cfg', 'job', 'data.train_batch_size=8'])\n"
        "except SystemExit as end: assert not end.code\n"
        "wanted = ('torch', 'ray', 'rich', 'psutil', 'filelock')\n"
        "print([name for name in wanted if name in sys.modules], PPOConfig.__pydantic_complete__, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "train_batch_size: 8" in done.stdout
    assert done.stderr == "[] False\n"  # no validator was built either


def test_mistakes_are_told_without_what_only_runs_need_and_modules_of_this_folder_are_found(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "my_idea.py").write_text("import sys; print('my_idea imported', file=sys.stderr)\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "bin/verl").write_text(  # as pip writes it: the first folder of sys.path is that of the script
        "import sys; from verl.cli.main import cli\n"
        "try: cli()\n"
        "finally: print([name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules])"
    )
    overrides = ["data.train_files=rows.jsonl", "data.val_files=null", "actor_rollout_ref.model.path=./nothing"]
    overrides += ["algorithm.adv_estimator=grpo", "data.train_batch_size=6", "trainer.n_gpus_per_node=4"]
    command = [sys.executable, "bin/verl", "train", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "my_idea"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "[]")
    assert "my_idea imported" in done.stderr
    assert "actor_rollout_ref.model.path=./nothing: there is no such folder" in done.stderr
    assert "data.train_batch_size=6" in done.stderr


def test_each_command_answers_help_by_its_module_without_torch():
    names = [*MODULES, *(f"inspect {name}" for name in INSPECTIONS)]
    code = (
        "import sys; sys.modules.update(torch=None, ray=None); from verl.cli.main import cli\n"
        f"for name in {names!r}:\n"
        "    print('command:', name)\n"
        "    try: cli([*name.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code in (0, None), (name, end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = dict(text.split("\n", 1) for text in done.stdout.split("command: ")[1:])
    assert list(answers) == names
    for name, said in answers.items():
        assert "KEY=VALUE" in said or "usage:" in said or "data.train_files" in said, name


def test_arguments_and_exit_status_are_those_of_the_module():
    composed = verl("train", "data.train_batch_size=48", "--cfg", "job")
    assert composed.returncode == 0
    assert "train_batch_size: 48" in composed.stdout
    wrong = verl("train", "data.train_batch_sise=48")
    assert wrong.returncode == 2
    assert "data.train_batch_size" in wrong.stderr


def the_example_of_train(folder: Path) -> list[str]:
    """Write the files that `verl train` describes without arguments, and return the settings of its example."""
    block = re.compile(r"\n\n  (?! )(.+?)\n\n(?! )", re.DOTALL)
    row, function, command = (textwrap.dedent(f"  {found}") for found in block.findall(FIRST_WORDS)[-3:])
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(f"{row}\n" * 16)
    (folder / "my_reward.py").write_text(function)
    words = shlex.split(command.replace("\\\n", " ").replace("Qwen/Qwen3-0.6B", tiny_model_dir(folder / "model")))
    assert words[:2] == ["verl", "train"]
    return words[2:]


def test_train_without_arguments_shows_an_example_that_is_a_whole_run(tmp_path, monkeypatch):
    done = verl("train")
    assert (done.returncode, done.stderr) == (2, f"ConfigError: {FIRST_WORDS}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    settings = the_example_of_train(tmp_path)
    config = load_config(compose(settings), explicit=keys_set(settings))
    assert config.trainer.ranks == 1
    with pytest.raises(ConfigError):
        load_config(compose())  # so no run is lost by showing it


@pytest.mark.slow  # it trains, on Ray
def test_the_example_of_train_trains_to_the_end(tmp_path):
    settings = the_example_of_train(tmp_path)
    short = ["trainer.total_training_steps=2", "data.max_response_length=8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    command = [sys.executable, "-m", "verl", "train", *settings, *short]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished: 2 steps" in done.stdout + done.stderr
    assert (tmp_path / "verl_examples/my_first_run.jsonl").is_file()
    assert (tmp_path / "checkpoints/verl_examples/my_first_run/global_step_2/actor").is_dir()


def test_the_settings_of_a_run_are_those_of_its_newest_checkpoint(tmp_path):
    for step in (9, 10, 100):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}/trainer_state.json").write_text(f'{{"settings": {{"data.seed": {step}}}}}')
    assert read_settings(str(tmp_path)) == {"data.seed": 100}


def test_the_settings_that_hydra_wrote_are_those_of_the_checkpoint(tmp_path):
    composed = compose(["data.train_batch_size=8", "trainer.n_gpus_per_node=2", "data.seed=3"])
    config = load_config(composed, with_rules=False)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(OmegaConf.to_yaml(composed))
    (tmp_path / "global_step_1").mkdir()
    state = {"settings": RunSettings(config.to_dict()).state_dict()}
    (tmp_path / "global_step_1/trainer_state.json").write_text(json.dumps(state))
    assert differences(read_settings(str(tmp_path)), read_settings(str(tmp_path / "global_step_1"))) == {}


def test_differences_of_two_kinds_are_those_of_common_keys(tmp_path):
    (tmp_path / "sft.yaml").write_text("data: {train_batch_size: 4}\nmodel: {path: x}\noptim: {lr: 1}\n")
    (tmp_path / "grpo.yaml").write_text("data: {train_batch_size: 8}\nactor_rollout_ref: {model: {path: x}}\n")
    done = verl("diff", str(tmp_path / "sft.yaml"), str(tmp_path / "grpo.yaml"), COLUMNS="200")
    assert done.returncode == 1
    assert done.stdout.startswith("The runs are of different kinds: ")
    assert "data.train_batch_size" in done.stdout
    assert "optim.lr" not in done.stdout


def test_merge_takes_the_arguments_of_the_merger_with_or_without_its_own_word():
    code = (
        "import sys; from verl.cli.main import cli\n"
        "nowhere = ['--backend', 'megatron', '--local_dir', 'nowhere']\n"
        "for words in (['merge', *nowhere], ['merge', 'merge', *nowhere], ['merge', '--help']):\n"
        "    try: cli(words, prog_name='verl')\n"
        "    except SystemExit as end: print('status:', end.code)"
    )
    done = forks.run(["-c", code], cwd=ROOT)
    assert done.stdout.startswith("status: 1\nstatus: 1\nusage: verl merge")
    assert done.stderr.count("nowhere: there is no such folder") == 2
    assert "--target_dir" in done.stdout


def test_keys_are_completed():
    assert complete_keys("ppo_trainer", "data.train_b") == ["data.train_batch_size="]
    done = verl(_VERL_COMPLETE="bash_complete", COMP_WORDS="verl sft optim.lr_sch", COMP_CWORD="2")
    assert done.stdout == "plain,optim.lr_scheduler_type=\n"


def test_errors_of_verl_are_one_sentence():
    done = verl("diff", "nowhere.yaml", "elsewhere.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: there is no 'nowhere.yaml'. Name a YAML file")
