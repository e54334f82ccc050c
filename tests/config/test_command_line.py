"""The command line: what reaches Hydra, what reaches us, and what a user sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.support import Run
from verl.trainer.config import PPOConfig
from verl.trainer.config.load import hydra_entry
from verl.trainer.config.overrides import CONFIG_DIR, compose, force_overrides, keys_set

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
        (["trainer.logger=[a,b]"], ["++trainer.logger=[a,b]"]),
        (["a.b=1", "--cfg", "job", "c.d=2"], ["--cfg", "job", "++a.b=1", "++c.d=2"]),
        (["a.b=1", "-m"], ["-m", "++a.b=1"]),
        (["--config-name", "mine", "a.b=1"], ["--config-name", "mine", "++a.b=1"]),
        (["--config-name=mine"], ["--config-name=mine"]),
        (["--info", "a.b=1"], ["--info", "++a.b=1"]),
        (["--help"], ["--help"]),
    ],
)
def test_overrides_are_forced_so_that_unknown_keys_reach_the_loader(given: list[str], hydra_gets: list[str]):
    assert force_overrides(given) == hydra_gets


def test_folders_are_relative_to_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert force_overrides(["--config-path", "conf"]) == ["--config-path", str(tmp_path / "conf")]
    assert force_overrides(["--config-path=conf", "experiment=x"]) == [f"--config-path={tmp_path}/conf", "experiment=x"]
    assert force_overrides(["--config-path", "nowhere"]) == ["--config-path", "nowhere"]


def test_keys_that_were_set():
    assert keys_set(["++a.b=1", "+c=2", "~d.e", "f=g=h"]) == {"a.b", "c", "d.e", "f"}


def test_compose_takes_unknown_keys_and_deletions():
    cfg = compose(["data.foo=1", "~data.shuffle"])
    assert cfg.data.foo == 1
    assert "shuffle" not in cfg.data


class CommandLine:
    """Runs ``hydra_entry`` in this process and keeps the configurations that its main function got."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.monkeypatch = run, monkeypatch
        self.got: list[PPOConfig] = []

    def __call__(self, *arguments: str) -> list[PPOConfig]:
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.run.dir={self.run.folder}/outputs")
        settings = [f"{key}={value}" for key, value in self.run.ppo.items()]
        self.monkeypatch.chdir(self.run.folder)
        self.monkeypatch.setattr(sys, "argv", ["main.py", *settings, *arguments, *quiet])
        hydra_entry(self.main, config_name="ppo_trainer", root=PPOConfig)
        return self.got

    def main(self, config: PPOConfig) -> None:
        self.got.append(config)


@pytest.fixture
def command_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(run, monkeypatch)


def test_cfg_job_prints_the_composed_configuration():
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "data.train_batch_size=7", "--cfg", "job", "--package", "data"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# @package data\n")
    assert "\ntrain_batch_size: 7\n" in done.stdout


def test_main_gets_the_typed_configuration(command_line: CommandLine):
    (config,) = command_line("actor_rollout_ref.actor.optim.lr=3e-6")
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.data.train_batch_size == 8


def test_errors_are_text_without_a_traceback(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        command_line("+data.foo=1", "algorithm.kl_ctl.init_kl_coef=0.1", "algorithm.kl_ctrl.kl_coef=0.001")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: 2 problems in the configuration:\n")
    # kl_coef was set to its default by hand, so the two spellings disagree.
    assert "which is set to 0.001" in said
    assert "data.foo=1: there is no such key" in said
    assert "Traceback" not in said
    assert command_line.got == []


def test_a_yaml_of_ones_own_names_ours_in_its_defaults(command_line: CommandLine):
    conf = command_line.run.folder / "conf"
    conf.mkdir()
    (conf / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 16}\n")
    del command_line.run.ppo["data.train_batch_size"]
    (config,) = command_line("--config-path", "conf", "--config-name=mine")
    assert config.data.train_batch_size == 16


def test_a_sweep_runs_every_point(command_line: CommandLine):
    configs = command_line("-m", "data.train_batch_size=8,16", f"hydra.sweep.dir={command_line.run.folder}/sweep")
    assert [config.data.train_batch_size for config in configs] == [8, 16]


def test_modules_of_ones_own_register_before_the_check(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch):
    (command_line.run.folder / "my_algorithms.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n"
        "@register_adv_est('mine')\n"
        "def mine(token_level_rewards, response_mask):\n"
        "    return token_level_rewards, token_level_rewards\n"
    )
    monkeypatch.syspath_prepend(command_line.run.folder)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_algorithms")
    (config,) = command_line("algorithm.adv_estimator=mine")
    assert config.algorithm.adv_estimator == "mine"
