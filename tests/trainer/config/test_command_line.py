"""The command line: what reaches Hydra, what reaches us, and what a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from tests.trainer.config.support import Run
from verl.errors import NonFiniteError
from verl.trainer.config import PPOConfig
from verl.trainer.config.command_line import command, compose, remarks
from verl.trainer.config.flags import read_words
from verl.trainer.config.help import FIRST
from verl.trainer.config.keys import iter_keys
from verl.trainer.config.overrides import CONFIG_DIR, force_overrides, keys_set

ROOT = CONFIG_DIR.parents[2]


@pytest.mark.parametrize(
    "given, hydra_gets",
    [
        (["data.seed=1"], ["++data.seed=1"]),
        (["+data.seed=1"], ["++data.seed=1"]),
        (["++data.seed=1"], ["++data.seed=1"]),
        (["~data.seed"], ["~data.seed"]),
        (["~data.seed=1"], ["~data.seed=1"]),
        (["hydra.run.dir=x", "hydra/launcher=basic"], ["hydra.run.dir=x", "hydra/launcher=basic"]),
        (["actor@actor_rollout_ref.actor=dp_actor"], ["actor@actor_rollout_ref.actor=dp_actor"]),
        (["data=legacy_data"], ["data=legacy_data"]),  # a group of ours
        (["use_remove_padding=true"], ["++use_remove_padding=true"]),  # no group: a key at the root
        (["model.path=org/name@main"], ["++model.path=org/name@main"]),  # marks in the value mean nothing
        (["trainer.logger=[a,2026_11_28,null]"], ["++trainer.logger=['a','2026_11_28',null]"]),
        # Names stay what was typed; Hydra would make numbers and a truth value of them.
        (["trainer.experiment_name=2026_11_28"], ["++trainer.experiment_name='2026_11_28'"]),
        (
            ["+trainer.project_name=1e3", "data.train_files=true"],
            ["++trainer.project_name='1e3'", "++data.train_files='true'"],
        ),
        (
            ["reward.custom_reward_function.name=nan"],
            ["++reward.custom_reward_function.name='nan'"],
        ),  # another spelling
        (["trainer.experiment_name=${oc.env:A}"], ["++trainer.experiment_name=${oc.env:A}"]),
        (["custom_reward_function.path=null"], ["++custom_reward_function.path=null"]),
        (["data.seed=1_0", "trainer.total_training_steps=3"], ["++data.seed=1_0", "++trainer.total_training_steps=3"]),
    ],
)
def test_overrides_are_forced_so_that_unknown_keys_reach_the_loader(given: list[str], hydra_gets: list[str]):
    assert force_overrides(given, PPOConfig) == hydra_gets


@pytest.mark.parametrize(
    "given, flags",
    [
        (["a.b=1", "--cfg", "job", "c.d=2"], {"--cfg": "job"}),
        (
            ["a.b=1", "-c=job", "-p", "data", "c.d=2", "--resolve"],
            {"--cfg": "job", "--package": "data", "--resolve": ""},
        ),
        (["-cn=mine", "a.b=1", "-cd", "conf", "c.d=2"], {"--config-name": "mine", "--config-dir": "conf"}),
    ],
)
def test_flags_may_stand_anywhere(given: list[str], flags: dict[str, str]):
    words = read_words(given, PPOConfig)
    assert (words.flags, words.overrides, words.problems) == (flags, ["a.b=1", "c.d=2"], [])


def test_folders_are_relative_to_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    words = read_words(["--config-path=conf", "-cd", "conf/experiment"], PPOConfig)
    assert (words.config_folder, words.more_configs) == (tmp_path / "conf", tmp_path / "conf/experiment")
    assert read_words([], PPOConfig).config_folder == CONFIG_DIR
    # A folder of the user's is a group of configurations, and no key at the root.
    assert force_overrides(["experiment=x"], PPOConfig, [tmp_path / "conf"]) == ["experiment=x"]
    assert force_overrides(["experiment=x"], PPOConfig) == ["++experiment=x"]


@pytest.mark.parametrize("flag", ["--config-path=config", "--config-path=./config", "--config-path=config/"])
def test_the_folder_config_is_the_users_or_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str):
    monkeypatch.chdir(tmp_path)
    assert read_words([flag], PPOConfig).config_folder == CONFIG_DIR
    (tmp_path / "config").mkdir()
    assert read_words([flag], PPOConfig).config_folder == tmp_path / "config"


def test_keys_that_were_set():
    assert keys_set(["++a.b=1", "+c=2", "~d.e", "f=g=h"]) == {"a.b", "c", "d.e", "f"}


def test_compose_takes_unknown_keys_and_deletions():
    cfg = compose(["data.foo=1", "~data.shuffle"])
    assert cfg.data.foo == 1
    assert "shuffle" not in cfg.data


class CommandLine:
    """Runs a ``command`` in this process and keeps the configurations that its main function got."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.monkeypatch = run, monkeypatch
        self.got: list[PPOConfig] = []

    def __call__(self, *arguments: str) -> list[PPOConfig]:
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.run.dir={self.run.folder}/outputs")
        settings = [f"{key}={value}" for key, value in self.run.ppo.items()]
        self.monkeypatch.chdir(self.run.folder)
        command(self.main, config_name="ppo_trainer", root=PPOConfig)([*settings, *quiet, *arguments])
        return self.got

    def main(self, config: PPOConfig) -> None:
        self.got.append(config)


@pytest.fixture
def command_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(run, monkeypatch)


def asked(*arguments: str) -> str:
    """What ``main_ppo`` prints; importing torch, transformers or Ray, which take seconds, would fail."""
    script = """
import runpy, sys
sys.modules.update(torch=None, transformers=None, ray=None)
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
"""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cfg_job_prints_the_composed_configuration():
    said = asked("data.train_batch_size=7", "data.train_size=7", "--cfg", "job", "--package", "data")
    assert said.startswith("# @package data\n")
    assert "\ntrain_batch_size: 7\n" in said
    assert said.endswith(
        "# refused: data.train_size=7: there is no such key.\n# remedy: did you mean data.train_batch_size?\n"
    )


def test_cfg_job_says_what_is_refused_and_what_has_no_effect(run: Run):
    keys = {
        "actor_rollout_ref": {"model": {"use_fused_kernels": True}},
        "critic": {"model": {"mtp": {"enable": True}}},
    }
    said = remarks(keys, PPOConfig)
    assert "# refused: critic.model.mtp.enable=true: a value model predicts no tokens, so it has no heads.\n" in said
    assert "# no effect: actor_rollout_ref.model.use_fused_kernels (" in said
    assert remarks({"trainer": {"save_freq": 3}}, PPOConfig) == ""


def test_cfg_job_with_a_variable_that_cannot_be_used():
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"]
    env = os.environ | {"VERL_SEED": "abc"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    said = "ConfigError: VERL_SEED='abc' is no seed. Use an integer >= 0, or unset it.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_help_is_one_screen():
    said = asked("--help")
    assert said.startswith("python -m verl.trainer.main_ppo KEY=VALUE ...\nTrain a policy by reinforcement learning.\n")
    assert "Prompts per step. [1024]" in said
    assert len(said.splitlines()) < 80


def test_help_describes_the_keys_of_a_section(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    command_line("--help", "algorithm.kl_ctrl", "use_fused_kernels", "tensor_model_parallel_size")
    said = capsys.readouterr().out
    assert "algorithm.kl_ctrl.horizon = 10000\n" in said
    assert "(a number > 0)" in said
    assert "actor_rollout_ref.model.use_fused_kernels: no effect: " in said
    lines = said.splitlines()
    first = lines.index("actor_rollout_ref.rollout.tensor_model_parallel_size = 2") + 1
    assert all(line.startswith("    ") for line in lines[first : first + 2])  # a sentence of two lines


@pytest.mark.parametrize(
    "word, near",
    [("trainr", "trainer"), ("trainer.sav_freq", "trainer.save_freq"), ("optm.lr", "optim.lr")],
)
def test_help_names_the_nearest_of_an_unknown_key(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], word: str, near: str
):
    with pytest.raises(SystemExit) as stopped:
        command_line("--help", word)
    assert stopped.value.code == 2
    assert near in capsys.readouterr().err.removeprefix(
        f"ConfigError: there is no section or key '{word}'. Did you mean "
    )


@pytest.mark.parametrize("root", FIRST)
def test_the_first_screen_names_keys_that_exist(root):
    assert set(FIRST[root]) <= {key.path for key in iter_keys(root)}


def test_main_gets_the_typed_configuration(command_line: CommandLine):
    (config,) = command_line("actor_rollout_ref.actor.optim.lr=3e-6")
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.data.train_batch_size == 8


def test_errors_are_text_without_a_traceback(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        command_line("trainer.nnodes=two", "algorithm.kl_ctl.init_kl_coef=0.1", "algorithm.kl_ctrl.kl_coef=0.001")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: 2 problems in the configuration:\n")
    # kl_coef was set to its default by hand, so the two spellings disagree.
    assert "which is set to 0.001" in said
    assert "trainer.nnodes=two: this value cannot be used here" in said
    assert "Traceback" not in said
    assert command_line.got == []


def test_keys_that_there_are_not_are_told_before_anything_is_composed(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hydra.compose", None)  # its values may also ask a cluster
    with pytest.raises(SystemExit):
        command_line("trainer.nnodes=two", "no_such_key={a:1}", "trainer.no_such_token=abc123", "optim.no=1")
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: 3 problems in the configuration:\n")
    assert "no_such_key.a=1: there is no such key" in said
    assert "abc123" not in said  # a secret by its name
    assert not (command_line.run.folder / "outputs").exists()


def test_a_training_that_diverges_ends_without_a_traceback(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def diverge(config: PPOConfig) -> None:
        raise NonFiniteError("the updates of 3 steps in a row were not finite")

    monkeypatch.setattr(command_line, "main", diverge)
    with pytest.raises(SystemExit) as stopped:
        command_line()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("NonFiniteError: the updates of 3 steps in a row were not finite")
    assert "Traceback" not in said
    assert "Error executing job" not in said


def test_a_yaml_of_ones_own_names_ours_in_its_defaults(command_line: CommandLine):
    conf = command_line.run.folder / "conf"
    conf.mkdir()
    (conf / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 1_6}\ntrainer: {experiment_name: 2026_11_28}\n"
    )
    del command_line.run.ppo["data.train_batch_size"]
    (config,) = command_line("--config-path", "conf", "--config-name=mine")
    assert (config.data.train_batch_size, config.trainer.experiment_name) == (16, "2026_11_28")


def test_a_folder_named_config_with_other_files_hides_none_of_ours(command_line: CommandLine):
    (command_line.run.folder / "config").mkdir()
    (config,) = command_line("--config-path=config", "--config-name=ppo_trainer.yaml", "data.seed=5")
    assert config.data.seed == 5


def test_a_run_has_the_settings_of_hydra(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, object] = {}

    def look(config: PPOConfig) -> None:
        runtime = HydraConfig.get().runtime
        seen.update(cwd=Path.cwd(), output_dir=runtime.output_dir, ours=os.environ["OURS"], argv=sys.argv)

    monkeypatch.setattr(command_line, "main", look)
    argv = sys.argv.copy()
    command_line("hydra.job.chdir=true", "+hydra.job.env_set.OURS=7", "hydra.run.dir=${hydra.job.name}_${now:%Y}")
    folder = command_line.run.folder / f"test_command_line_{datetime.now().year}"
    assert seen == {"cwd": folder, "output_dir": str(folder), "ours": "7", "argv": argv}
    assert sorted(file.name for file in (folder / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert (Path.cwd(), "OURS" in os.environ, HydraConfig.initialized()) == (command_line.run.folder, False, False)


def test_modules_of_ones_own_register_before_the_check(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch):
    (command_line.run.folder / "my_algorithms.py").write_text(
        "from verl.algorithms import register_adv_est\n"
        "@register_adv_est('mine')\n"
        "def mine(token_level_rewards, response_mask):\n"
        "    return token_level_rewards, token_level_rewards\n"
    )
    monkeypatch.syspath_prepend(command_line.run.folder)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_algorithms")
    (config,) = command_line("algorithm.adv_estimator=mine")
    assert config.algorithm.adv_estimator == "mine"


def test_interpolations_on_the_command_line_refer_to_the_configuration(command_line: CommandLine):
    (config,) = command_line("trainer.project_name=mine", "trainer.experiment_name=${trainer.project_name}")
    assert config.trainer.experiment_name == "mine"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["trainer.logger=[console"], "trainer.logger=[console: brackets and quotes do not match"),
        (["trainer.project_name='a"], "trainer.project_name='a: brackets and quotes do not match"),
        (["trainer.total_epochs"], "1. trainer.total_epochs: a setting is written KEY=VALUE, without spaces"),
        (["="], "1. =: a setting is written KEY=VALUE, without spaces"),
        (["--config-name"], "1. --config-name: its value is missing.\n     remedy: write --config-name VALUE"),
        (["--config-name", "--cfg", "job"], "1. --config-name: its value is missing"),
        (["--cfg", "jobs"], "1. --cfg jobs: it shows one of three configurations.\n     allowed: job, hydra, all"),
        (["~critic"], "1. ~critic: a section cannot be deleted"),
        (["~data=legacy_data"], "1. ~data=legacy_data: a section cannot be deleted"),
        (["trainer.total_epochs", "=", "3"], "remedy: write trainer.total_epochs=3\n"),
        (["trainer.total_epochs:", "3"], "remedy: write trainer.total_epochs=3\n"),
        (["trainer.total_epochs=", "3", "data.seed=1"], "remedy: write trainer.total_epochs=3\n"),
        (["trainer.total_epochs", "=3"], "remedy: write trainer.total_epochs=3\n"),
        (["--config", "conf/mine.yaml"], "write --config-dir conf --config-name mine, and in the file: defaults: [ppo"),
        (["mine.yaml"], "remedy: write --config-dir . --config-name mine"),
        (
            ["-m", "data.seed=1,2"],
            "this flag of Hydra.\n     remedy: write a loop in the shell",
        ),
        (["--info"], "1. --info: verl does not have this flag of Hydra.\n     remedy: --cfg all shows"),
        (["data.seed=1,2"], "data.seed=1,2: several values are several runs, and a command starts one"),
        (["hydra.mode=MULTIRUN"], "hydra.mode=MULTIRUN: a command starts one run"),
        (["--cfg", "job", "-p", "dta"], "--package dta: there is no such section"),
        (["--nonsense_xyz"], "1. --nonsense_xyz: there is no such flag"),
        (["--algorithm.adv_estimator", "grpo"], "without dashes.\n     remedy: algorithm.adv_estimator=grpo"),
        (["--num-generations=8"], "num_generations of TRL: set actor_rollout_ref.rollout.n=8"),
        (["--rollout.n_samples_per_prompt", "8"], "OpenRLHF: set actor_rollout_ref.rollout.n=8"),
        (["--lambd", "0.9", "--packing_samples"], "lambd of OpenRLHF: set algorithm.lam=0.9"),
    ],
)
def test_what_hydra_cannot_read_is_named(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    with pytest.raises(SystemExit) as stopped:
        command_line(*arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert command_line.got == []


def test_an_output_folder_that_cannot_be_made_is_told(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "outputs").touch()
    with pytest.raises(SystemExit) as stopped:
        command_line()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: the folder for this run's settings cannot be made: ")
    assert said.endswith("set hydra.run.dir=FOLDER.\n")


def test_a_yaml_that_cannot_be_read_is_told(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    (command_line.run.folder / "mine.yaml").symlink_to("/proc/self/mem")  # an error for root as well
    with pytest.raises(SystemExit) as stopped:
        command_line("--config-path=.", "--config-name=mine")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: the configuration cannot be composed: [Errno 5]")


PUBLIC = "hydra: {searchpath: [pkg://verl.trainer.config]}\n"


@pytest.mark.parametrize(
    "text, said",
    [
        ("data:\n\ttrain_batch_size: 3\n", "found character '\\t' that cannot start any token"),
        ("data: {}\ndata: {}\n", "found duplicate key data"),
        ("- a\n", "primary config 'mine' must be a DictConfig"),
        (f"{PUBLIC}defaults: [ppo_trainr]\n", "Could not load 'ppo_trainr'"),
        (f"{PUBLIC}defaults: [ppo_trainer]\n", "Could not delete from config. 'data.nowhere' does not exist."),
    ],
)
def test_a_yaml_that_cannot_be_composed_is_told_without_a_traceback(
    command_line: CommandLine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    text: str,
    said: str,
):
    (command_line.run.folder / "mine.yaml").write_text(text)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command_line("--config-path=.", "--config-name=mine", "~data.nowhere")
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("ConfigError: the configuration cannot be composed: ")
    assert said in told
    assert "Traceback" not in told
    assert not [warning for warning in recwarn if "is not available" in str(warning.message)]
