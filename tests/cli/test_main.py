"""The command ``verl`` in processes of its own: what it runs, what it loads, how it ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from verl.cli.commands import INSPECTIONS, MODULES
from verl.cli.main import complete_keys

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


def test_train_without_arguments_names_what_to_set_first(tmp_path):
    command = [sys.executable, "-m", "verl", "train"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert "ConfigError: no setting was given" in done.stderr
    assert "deepseek" not in done.stderr
    assert "wandb" not in done.stderr
    shown = done.stderr.partition("verl train ")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = shlex.split(shown.replace("$HOME", str(tmp_path)).replace("Qwen/Qwen3-0.6B", str(tmp_path)))
    given = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert "train.parquet: there is no such file" in given.stderr
    assert "micro_batch" not in given.stderr
    assert "critic" not in given.stderr


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("status: 1\nstatus: 1\nusage: verl merge")
    assert done.stderr.count("nowhere/huggingface/config.json is missing") == 2


def test_keys_are_completed():
    assert complete_keys("ppo_trainer", "data.train_b") == ["data.train_batch_size="]
    done = verl(_VERL_COMPLETE="bash_complete", COMP_WORDS="verl sft optim.lr_sch", COMP_CWORD="2")
    assert done.stdout == "plain,optim.lr_scheduler_type=\n"


def test_errors_of_verl_are_one_sentence():
    done = verl("diff", "nowhere.yaml", "elsewhere.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: there is no 'nowhere.yaml'. Name a YAML file")
