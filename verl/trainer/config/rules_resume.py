"""The checkpoints that a run would go on from are its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from verl.base.nested import flat
from verl.base.redact import without_secrets
from verl.checkpoint.states import STATE
from verl.checkpoint.steps import read_latest, step_folder
from verl.config import PPOConfig, Problem, SupervisedConfig
from verl.config.problems import shown
from verl.errors import CheckpointError
from verl.trainer.config.rules_sizes import needs_critic

COMMANDS = {
    "algorithm.adv_estimator": "verl train",
    "data.messages_key": "verl sft",
    "loss.center_rewards_coefficient": "verl rm",
    "loss.reference_free": "verl dpo",
}
"""A setting that one command alone has, and the command."""


def own_checkpoints(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    """With ``resume_mode=auto``, the run in the folder had this command, model, data and algorithm.

    Settings that the latest checkpoint does not have, as it is older, count as equal. A file or folder is another one
    if its name or that of the folder around it differs: data and models may have been moved as a whole.
    """
    trainer = config.trainer
    if trainer.resume_mode != "auto":
        return
    root = Path(trainer.default_local_dir).expanduser()
    saved = _saved(root)
    if saved is None:
        return
    folder, there = saved
    here = dict(flat(without_secrets(config.to_dict())))
    differences = [
        f"{key} is {shown(there[key])} there and {shown(here[key])} here"
        for key in _identity(config, there)
        if key in there and not _equal(key, there[key], here[key])
    ]
    if command := next((name for key, name in COMMANDS.items() if key in there and key not in here), None):
        differences = [f"it is one of {command}"]
    if differences:
        cause = (
            f"another run saved {folder.name} there, and trainer.resume_mode=auto would go on from it: "
            + "; ".join(differences)
        )
        remedy = (
            "set another trainer.experiment_name (or trainer.default_local_dir; in a call of Python output_dir); or "
            "trainer.resume_mode=disable to start anew in this folder; or, to go on from that run, "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )
        yield Problem("trainer.default_local_dir", trainer.default_local_dir, cause, remedy=remedy)


def _saved(root: Path) -> tuple[Path, Mapping[str, object]] | None:
    """Return the folder of the latest step and the settings in it; resuming reports what cannot be read."""
    try:
        latest = read_latest(root)
        if latest is None:
            return None
        state = json.loads((step_folder(root, latest) / STATE).read_bytes())
    except (CheckpointError, OSError, ValueError):
        return None
    settings = state.get("settings") if isinstance(state, Mapping) else None
    return (step_folder(root, latest), settings) if isinstance(settings, Mapping) else None


def _identity(config: PPOConfig | SupervisedConfig, there: Mapping[str, object]) -> list[str]:
    """Return the settings by which two runs of a command are told apart."""
    if not isinstance(config, PPOConfig):
        return ["model.path", "model.lora_rank", "data.train_files"]
    # A checkpoint of an estimator without a critic has only the default of its path.
    had_critic = there.get("algorithm.adv_estimator") == config.algorithm.adv_estimator and needs_critic(config)
    return [
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.lora_rank",
        *(["critic.model.path"] if had_critic else []),
        "data.train_files",
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
    ]


def _equal(key: str, first: object, second: object) -> bool:
    if key.endswith((".path", "_files")):
        first, second = _ends(first), _ends(second)
    return first == second


def _ends(paths: object) -> object:
    """Return the last two names of each path."""
    if isinstance(paths, list):
        return [_ends(path) for path in paths]
    return PurePosixPath(paths).parts[-2:] if isinstance(paths, str) else paths
