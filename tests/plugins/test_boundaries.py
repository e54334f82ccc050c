"""Without a plug-in everything that does not name it works, and what names it says which one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides

PACKAGE = Path(__file__).parents[2] / "verl"
PLUGINS = sorted(path.name for path in (PACKAGE / "plugins").iterdir() if (path / "__init__.py").is_file())
ENVIRONMENT = "actor_rollout_ref.rollout.multi_turn.environment_config_path=[{{class_name:verl.environments.%s}}]"
NAMING = {
    "endpoint": ["train", "actor_rollout_ref.rollout.agent.default_agent_loop=program_agent"],
    "gymnasium": ["train", ENVIRONMENT % "gymnasium_environment.GymnasiumEnvironment"],
    "inspect": ["inspect", "rollouts", "rollouts.jsonl"],
    "megatron": ["train", "actor_rollout_ref.actor.strategy=megatron"],
    "plan": ["plan", "--gpus", "8"],
    "sandbox": ["train", "reward_model.reward_format=prime_code"],
    "serve": ["serve", "model.path={model}"],
    "veomni": ["train", "actor_rollout_ref.actor.strategy=veomni"],
    "verifiers": ["train", ENVIRONMENT % "verifiers_environment.VerifiersEnvironment"],
    "view": ["report", "run"],
}
"""A command that needs the plug-in; ``train`` is followed by the settings of a run."""


def package_without(absent: list[str], folder: Path) -> Path:
    """Make a package of links to ours, without some of its plug-ins; return the folder that holds it."""
    copy = folder / "package" / "verl"
    (copy / "plugins").mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.name not in ("plugins", "__pycache__"):
            (copy / path.name).symlink_to(path)
    shutil.copy(PACKAGE / "plugins" / "__init__.py", copy / "plugins")
    for name in set(PLUGINS) - set(absent):
        (copy / "plugins" / name).symlink_to(PACKAGE / "plugins" / name)
    return copy.parent


def run_verl(package: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "verl", *arguments], capture_output=True, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(package), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "400"},
    )  # fmt: skip


def run_without(absent: list[str], folder: Path) -> tuple[Path, list[str]]:
    """Run the smallest training without plug-ins; return the package that lacks them, and the settings of the run."""
    package = package_without(absent, folder)
    settings = overrides(
        make_tiny_run(folder), folder, trainer__total_training_steps=1, hydra__run__dir=folder / "hydra"
    )
    done = run_verl(package, folder, "train", *settings)
    assert done.returncode == 0, done.stderr
    return package, settings


def test_every_plugin_has_a_command_that_names_it() -> None:
    assert set(NAMING) == set(PLUGINS)


def test_the_smallest_run_needs_no_plugin(tmp_path: Path) -> None:
    package, _ = run_without(PLUGINS, tmp_path)
    refused = run_verl(package, tmp_path, *NAMING["view"])
    assert "plug-in 'view'" in refused.stderr
    assert refused.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_the_others_work_without_it(tmp_path: Path, name: str) -> None:
    package, settings = run_without([name], tmp_path)
    helped = run_verl(package, tmp_path, "--help")
    assert helped.returncode == 0, helped.stderr
    command, *arguments = [word.format(model=tmp_path / "model") for word in NAMING[name]]
    refused = run_verl(package, tmp_path, command, *(settings if command == "train" else []), *arguments)
    assert refused.returncode != 0
    assert f"plug-in '{name}'" in refused.stderr + refused.stdout
