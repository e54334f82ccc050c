"""Configuration of the run: length, placement, logging, checkpoints, recovery."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from verl.base.fs import name_problem
from verl.base.registry import suggest
from verl.base.remote import driver_problem, is_remote
from verl.base.requirements import install_command
from verl.config.asynchronous import AsyncConfig, V1Config
from verl.config.base import BaseConfig, OneOrMany, section, setting, subsection
from verl.config.machine import GPUS_PER_NODE
from verl.config.problems import Problem

TRACKERS: dict[str, str | None] = {
    "console": None,
    "console_full": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "trackio": "trackio",
}
"""Tracker → the package that it needs, if any."""
KEEPS_FILES = {"wandb", "mlflow"}
"""Trackers that take checkpoints."""


@section
class RecoveryConfig(BaseConfig):
    """Fault tolerance: restarts, snapshots, time-outs, damaged checkpoints, skipped updates."""

    max_restarts: int = setting(3, ge=0)
    """Consecutive restarts of the workers without a finished step between them; 0 stops at the first failed worker."""
    backoff_s: float = setting(1.0, ge=0)
    """Pause before the first restart, in seconds; each further one waits twice as long, up to a minute."""
    snapshot_freq: int | None = setting(None, ge=0)
    """Steps between snapshots in memory from which restarts continue (on Ray); null uses at most 2 % of the time for
    them, if two fit into Ray's object store; 0 uses the newest checkpoint on disk."""
    hang_timeout_s: float | None = setting(1800.0, gt=0)
    """Seconds without an answer or a sign of work (tokens, passes) after which a call of the workers counts as hung;
    unless set, more for a large model; null is no limit."""
    replacement_timeout_s: float = setting(60.0, ge=0)
    """How long a restart waits for a machine in place of one that died, in seconds (on Ray); a cloud needs 5 to 15
    minutes to start one."""
    driver_restarts: int = setting(3, ge=0)
    """Restarts of a driver that was killed by a signal (on Linux, from the command line); 0 is none."""
    on_damaged_checkpoint: Literal["previous", "stop"] = setting("previous")
    """Resume from the checkpoint before a damaged one and report it (`previous`), or stop."""
    on_failed_save: Literal["retry", "stop"] = setting("retry")
    """After a failed save, save again after the next step (the last save must succeed), or stop the run."""
    max_bad_steps: int | None = setting(3, ge=1)
    """Stop after this many steps in a row whose update was skipped (loss or gradient not finite); null never stops."""
    bad_batch_dir: str | None = setting(None, path=True)
    """Folder for the newest few batches of such steps; null uses `bad_batches` in the checkpoint folder."""
    split_on_out_of_memory: bool = setting(True)
    """If a micro-batch does not fit into memory, split it in two, try again, and keep the size that fits."""


@section
class PlacementConfig(BaseConfig):
    """Nodes, ranks and device of a run."""

    nnodes: int = setting(1, ge=1)
    """Nodes."""
    n_gpus_per_node: int = setting(1, ge=1, interpolation=GPUS_PER_NODE)
    """Ranks per node: one per GPU, or processes on a machine without one. By default the GPUs of this machine, or of
    the nodes of the Ray cluster that the run connects to; 1 without a GPU."""
    device: Literal["cuda", "cpu"] = setting(
        "cuda", refuse_values={"npu": "Ascend devices are not in this version; use cuda or cpu"}
    )
    """`cuda` uses the GPUs of the machine or of the Ray cluster, or the CPU if there are none; `cpu` always the CPU."""
    ray_wait_register_center_timeout: float = setting(300.0, gt=0)
    """Time limit of the start of all worker processes, in seconds; unless set, 2 per rank where that is more."""
    controller: Literal["ray", "local"] = setting("ray")
    """`ray` starts ranks as Ray actors; `local` runs one rank in this process, for a debugger."""

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.nnodes * self.n_gpus_per_node

    def problems(self, path: str) -> Iterator[Problem]:
        """The local controller has one rank, and the `ray` controller has Ray installed."""
        if self.controller == "local" and self.ranks > 1:
            cause = f"it runs one rank in this process, and {self.ranks} are asked for (nnodes × n_gpus_per_node)"
            remedy = f"set {path}.nnodes=1 and {path}.n_gpus_per_node=1, or {path}.controller=ray"
            yield Problem(f"{path}.controller", "local", cause, remedy=remedy)
        if self.controller == "ray" and importlib.util.find_spec("ray") is None:
            remedy = f"pip install 'ray>=2.60,<2.62', or set {path}.controller=local with one rank"
            yield Problem(f"{path}.controller", "ray", "Ray is not installed", remedy=remedy)


@section
class BaseTrainerConfig(PlacementConfig):
    """Settings of every training run."""

    project_name: str = setting("verl_examples")
    """Project in the trackers, and part of the checkpoint folder's path."""
    experiment_name: str = setting("gsm8k")
    """Name of the run in the trackers, and part of the checkpoint folder's path."""
    total_epochs: int = setting(30, ge=1)
    """Passes over the training rows."""
    total_training_steps: int | None = setting(None, ge=1)
    """Steps of the run; null uses `total_epochs`."""
    seed: int = setting(1, ge=0)
    """Seed of the run: it determines sampling and the order of the data, for any number of ranks."""
    save_freq: int = setting(0, ge=-1)
    """Save every this many steps and at the end; 0 at the end only, -1 never."""
    test_freq: int = setting(-1, ge=-1)
    """Validate every this many steps and at the end; -1 or 0 never."""
    logger: Annotated[tuple[str, ...], OneOrMany] = setting(("console", "file"))
    """Trackers: console (main metrics) or console_full, file, tensorboard, wandb, mlflow, swanlab, clearml, trackio."""
    default_local_dir: str = setting(
        "checkpoints/verl_examples/gsm8k",
        interpolation="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        path=True,
    )
    """Folder for the checkpoints."""
    log_expert_counts: bool = setting(False)
    """Log the tokens that each expert of a mixture of experts gets in a step, as the table `moe/tokens_per_expert`."""
    log_checkpoints: bool = setting(False)
    """Upload each saved checkpoint to the trackers that store files, wandb and mlflow, as an artifact of the run; the
    step waits for the upload."""
    checkpoint_callback_class: str | None = setting(None)
    """Class (`package.module.Class`) whose `on_save` runs in the driver after each saved checkpoint
    (docs/extending.md)."""
    default_hdfs_dir: str | None = setting(None, path=True)
    """Remote folder (`s3://`, `gs://`, `hdfs://` ...) for a copy of each checkpoint; a run on a machine without
    checkpoints resumes from there."""
    resume_mode: Literal["auto", "disable", "resume_path"] = setting("auto")
    """Resume from the last checkpoint in `default_local_dir` if there is one, never, or from `resume_from_path`."""
    resume_from_path: str | None = setting(None, path=True)
    """Checkpoint folder (`.../global_step_N`, also remote) to resume from, with `resume_mode=resume_path`."""
    progress: Literal["auto", "on", "off"] = setting("auto")
    """Live progress display: on a terminal only, always, or never."""
    recovery: RecoveryConfig = subsection(RecoveryConfig)
    """Fault tolerance: restarts, snapshots, time-outs, damaged checkpoints, skipped updates."""

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints, the last step at least."""
        return self.save_freq >= 0

    def problems(self, path: str) -> Iterator[Problem]:
        """Names are safe as folders, trackers are known and installed, and the checkpoint to resume from exists."""
        yield from super().problems(path)
        for key in ("project_name", "experiment_name"):
            if cause := name_problem(self[key]):
                remedy = f"set folders by {path}.default_local_dir and by the variables of the trackers"
                yield Problem(f"{path}.{key}", self[key], cause, "a name, or names with / between them", remedy)
        if self.default_hdfs_dir is not None and (cause := driver_problem(self.default_hdfs_dir)):
            remedy = "install the driver, or leave it null and copy the folder of checkpoints yourself"
            yield Problem(f"{path}.default_hdfs_dir", self.default_hdfs_dir, cause, remedy=remedy)
        yield from self._tracker_problems(f"{path}.logger")
        yield from self._resume_problems(f"{path}.resume_from_path")

    def _tracker_problems(self, key: str) -> Iterator[Problem]:
        if self.log_checkpoints and not {*self.logger} & KEEPS_FILES:
            cause = f"no tracker of {key}=[{', '.join(self.logger)}] keeps files"
            remedy = f"add {' or '.join(sorted(KEEPS_FILES))} to {key}, or leave it out"
            yield Problem(key.replace("logger", "log_checkpoints"), True, cause, "false", remedy)
        for name in self.logger:
            if name not in TRACKERS:
                cause = f"there is no tracker '{name}'.{suggest(name, list(TRACKERS))}"
                yield Problem(key, list(self.logger), cause, ", ".join(TRACKERS))
            elif (module := TRACKERS[name]) is not None and importlib.util.find_spec(module) is None:
                rest = [other for other in self.logger if other != name] or ["console"]
                remedy = f"{install_command(name)}, or set {key}=[{','.join(rest)}]"
                yield Problem(key, list(self.logger), f"{name} is not installed", remedy=remedy)

    def _resume_problems(self, key: str) -> Iterator[Problem]:
        path, mode = self.resume_from_path, "trainer.resume_mode"
        if self.resume_mode != "resume_path":
            if path is not None:
                cause = f"it is not read with {mode}={self.resume_mode}"
                yield Problem(key, path, cause, remedy=f"set {mode}=resume_path to start from it", advice=True)
        elif path is None:
            yield Problem(key, None, f"{mode}=resume_path needs it", remedy="name a .../global_step_N folder")
        elif not re.search(r"global_step_\d+/?$", path):
            yield Problem(key, path, "this is no checkpoint", "a folder that ends in global_step_N")
        elif is_remote(path):
            if cause := driver_problem(path):
                yield Problem(key, path, cause, remedy="install the driver, or name a local folder")
        elif not Path(path).is_dir():
            beside = Path(path).parent.glob("global_step_[0-9]*")
            steps = sorted((int(p.name.rpartition("_")[2]), p.name) for p in beside)
            there = ", ".join(name for _, name in steps[-3:])
            remedy = f"there is {there}" if steps else f"{Path(path).parent} holds no checkpoint"
            yield Problem(key, path, "there is no such folder", remedy=remedy)


@section
class TrainerConfig(BaseTrainerConfig):
    """A reinforcement-learning run."""

    balance_batch: bool = setting(True)
    """Order samples so that ranks get nearly equal numbers of tokens."""
    critic_warmup: int = setting(0, ge=0)
    """Number of first steps in which only the critic is trained."""
    val_before_train: bool = setting(True)
    """Validate before the first step."""
    val_only: bool = setting(False)
    """Validate and stop."""
    rollout_only: bool = setting(False)
    """Sample, score and compute advantages as in training, without any update or checkpoint."""
    log_val_generations: int = setting(0, ge=0)
    """Validation samples shown in the trackers: a table, and their tokens, as a page or (TensorBoard) a text."""
    rollout_data_dir: str | None = setting(None, path=True)
    """Folder for all training responses, one jsonl per step."""
    validation_data_dir: str | None = setting(None, path=True)
    """Folder for all validation responses, one jsonl per validation."""
    rollout_token_dump_freq: int = setting(0, ge=0)
    """Steps between files in `rollout_data_dir` with the values of each token; 0 writes them only for validation."""
    max_actor_ckpt_to_keep: int | None = setting(None, ge=1)
    """Actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: int | None = setting(None, ge=1)
    """Critic checkpoints to keep; null keeps all."""
    remove_previous_ckpt_in_save: bool = setting(False)
    """Keep only the newest checkpoint, instead of the two limits above."""
    del_local_ckpt_after_load: bool = setting(False)
    """Delete the checkpoint that the run resumed from when the next one is complete."""
    max_rollout_actor_probs_diff: float | None = setting(None, gt=0, le=1)
    """Stop if a token's probability differs by more than this between rollout and trainer; null only logs the
    difference."""
    async_: AsyncConfig = setting(factory=AsyncConfig, alias="async")
    """Training on responses that were sampled some steps ago."""
    v1: V1Config = subsection(V1Config)
    """Modes in which sampling and training overlap."""

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints; one that trains nothing does not."""
        return super().saves and not self.val_only and not self.rollout_only

    def problems(self, path: str) -> Iterator[Problem]:
        """`val_only` has a validation to run and no steps, and files of tokens have a folder."""
        yield from super().problems(path)
        if self.rollout_token_dump_freq > 0 and self.rollout_data_dir is None:
            cause = f"the files have no folder: {path}.rollout_data_dir=null"
            remedy = f"set {path}.rollout_data_dir"
            yield Problem(f"{path}.rollout_token_dump_freq", self.rollout_token_dump_freq, cause, remedy=remedy)
        limits = {name: self[name] for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")}
        for name, limit in limits.items():
            if self.remove_previous_ckpt_in_save and (limit or 1) > 1:
                cause = f"{path}.remove_previous_ckpt_in_save=true keeps one"
                yield Problem(f"{path}.{name}", limit, cause, "null, 1", "set only one of both")
        if self.rollout_only and self.val_only:
            cause = f"{path}.val_only=true stops before the first step"
            yield Problem(f"{path}.rollout_only", True, cause, "false", "set only one of both")
        if self.max_rollout_actor_probs_diff is not None:
            key = f"{path}.max_rollout_actor_probs_diff"
            if lag := self.async_.lag:
                cause = f"with {path}.async.lag={lag} the difference is that of {lag} updates"
                yield Problem(key, self.max_rollout_actor_probs_diff, cause, "null", f"or set {path}.async.lag=0")
            if (mode := self.v1.trainer_mode) != "sync":
                cause = f"with {path}.v1.trainer_mode={mode} the difference is that of several updates"
                yield Problem(key, self.max_rollout_actor_probs_diff, cause, "null", "leave it null")
        if self.val_only and not self.val_before_train:
            cause = f"the run would do nothing: {path}.val_before_train=false"
            yield Problem(f"{path}.val_only", True, cause, remedy=f"set {path}.val_before_train=true")


@section
class SFTTrainerConfig(BaseTrainerConfig):
    """A supervised run."""

    project_name: str = setting("gsm8k-sft")
    """Project in the trackers, and part of the checkpoint folder's path."""
    experiment_name: str = setting("test")
    """Name of the run in the trackers, and part of the checkpoint folder's path."""
    total_epochs: int = setting(4, ge=1)
    """Passes over the training rows."""
    logger: Annotated[tuple[str, ...], OneOrMany] = setting(("console", "file"))
    """Trackers: console (main metrics) or console_full, file, tensorboard, wandb, mlflow, swanlab, clearml, trackio."""
    default_local_dir: str = setting(
        "checkpoints/gsm8k-sft/test",
        interpolation="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        path=True,
    )
    """Folder for the checkpoints."""
    nnodes: int = setting(1, ge=1, interpolation="${oc.env:GROUP_WORLD_SIZE,1}")
    """Nodes; under torchrun, the nodes that it started."""
    n_gpus_per_node: int = setting(1, ge=1, interpolation="${oc.env:LOCAL_WORLD_SIZE," + GPUS_PER_NODE + "}")
    """Ranks per node; under torchrun the ranks that it started, else the GPUs of a node, or 1 without GPUs."""
    max_ckpt_to_keep: int | None = setting(None, ge=1)
    """Checkpoints to keep; null keeps all."""


def _ray_init() -> dict[str, object]:
    return {"num_cpus": None}


@section
class RayConfig(BaseConfig):
    """Settings with which Ray is started."""

    ray_init: dict[str, object] = setting(factory=_ray_init)
    """Arguments of `ray.init`; with `num_cpus=null` Ray counts the CPUs."""
    timeline_json_file: str | None = setting(None)
    """File for Ray's timeline, written at the end of the run."""
