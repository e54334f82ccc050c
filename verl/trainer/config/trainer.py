"""The run: how long, where, what is saved and shown."""

from __future__ import annotations

from typing import Annotated, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection
from verl.trainer.config.recovery import RecoveryConfig

NO_HDFS = "remote folders are not in this version; leave it null and copy trainer.default_local_dir yourself"


@section
class BaseTrainerConfig(BaseConfig):
    """What every training run has."""

    project_name: str = setting("verl_examples")
    """Project in the trackers and part of the checkpoint folder."""
    experiment_name: str = setting("gsm8k")
    """Name of the run in the trackers and part of the checkpoint folder."""
    total_epochs: int = setting(30, ge=1)
    """Passes over the training rows."""
    total_training_steps: int | None = setting(None, ge=1)
    """Steps of the run; null takes `total_epochs`."""
    seed: int = setting(1, ge=0)
    """Seed of the run: sampling and the order of the data follow it, whatever the number of ranks."""
    save_freq: int = setting(-1, ge=-1)
    """Save every this many steps and at the end; -1 or 0 never."""
    test_freq: int = setting(-1, ge=-1)
    """Validate every this many steps and at the end; -1 or 0 never."""
    logger: Annotated[tuple[str, ...], OneOrMany] = setting(("console", "wandb"))
    """Trackers: console, file, tensorboard, wandb, mlflow, swanlab, clearml, trackio."""
    default_local_dir: str = setting(
        "checkpoints/verl_examples/gsm8k",
        interpolation="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        path=True,
    )
    """Folder of the checkpoints."""
    default_hdfs_dir: str | None = setting(None, refuse=NO_HDFS)
    """Remote folder of the checkpoints."""
    resume_mode: Literal["auto", "disable", "resume_path"] = setting("auto")
    """Go on from the last checkpoint in `default_local_dir` if there is one, never, or from `resume_from_path`."""
    resume_from_path: str | None = setting(None, path=True)
    """Checkpoint folder (`.../global_step_N`) to go on from, with `resume_mode=resume_path`."""
    nnodes: int = setting(1, ge=1)
    """Nodes."""
    n_gpus_per_node: int = setting(8, ge=1)
    """Ranks per node: one per GPU, or processes on a machine without one."""
    device: Literal["cuda", "cpu"] = setting("cuda")
    """`cuda` uses GPUs if there are any and otherwise the CPU; `cpu` always the CPU."""
    controller: Literal["ray", "local"] = setting("ray")
    """`ray` starts ranks as Ray actors; `local` runs one rank in this process, for a debugger."""
    progress: Literal["auto", "on", "off"] = setting("auto")
    """Live progress display: on a terminal only, always, or never."""
    recovery: RecoveryConfig = subsection(RecoveryConfig)
    """What the run survives, and how."""


@section
class TrainerConfig(BaseTrainerConfig):
    """A reinforcement-learning run."""

    balance_batch: bool = setting(True)
    """Order samples so that ranks get nearly equal numbers of tokens."""
    critic_warmup: int = setting(0, ge=0)
    """Steps at the start in which only the critic learns."""
    val_before_train: bool = setting(True)
    """Validate before the first step."""
    val_only: bool = setting(False)
    """Validate and stop."""
    log_val_generations: int = setting(0, ge=0)
    """Validation samples that are shown in the trackers."""
    rollout_data_dir: str | None = setting(None, path=True)
    """Folder for all training responses, one jsonl per step."""
    validation_data_dir: str | None = setting(None, path=True)
    """Folder for all validation responses, one jsonl per validation."""
    max_actor_ckpt_to_keep: int | None = setting(None, ge=1)
    """Actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: int | None = setting(None, ge=1)
    """Critic checkpoints to keep; null keeps all."""
    del_local_ckpt_after_load: bool = setting(False)
    """Delete the checkpoint that was resumed from, once the next one is whole."""
    esi_redundant_time: int = setting(
        0, ge=0, refuse="saving before an instance expires is not in this version; use trainer.save_freq"
    )
    """Seconds to save before the machine is taken away."""
    ray_wait_register_center_timeout: int = setting(300, ge=1, hint="Ray reports ranks that do not start")
    """Seconds to wait until all ranks have started."""
    use_legacy_worker_impl: Literal["auto", "enable", "disable"] = setting(
        "auto", hint="there is one implementation of the workers, whatever it says"
    )
    """Choice among worker implementations."""
    max_rollout_actor_probs_diff: float | None = setting(None, gt=0, le=1)
    """Stop when a token's probability under rollout and trainer differs by more; null only logs the difference."""


@section
class SFTTrainerConfig(BaseTrainerConfig):
    """A supervised run."""

    project_name: str = setting("gsm8k-sft")
    """Project in the trackers and part of the checkpoint folder."""
    experiment_name: str = setting("test")
    """Name of the run in the trackers and part of the checkpoint folder."""
    total_epochs: int = setting(4, ge=1)
    """Passes over the training rows."""
    logger: Annotated[tuple[str, ...], OneOrMany] = setting(("console", "wandb"))
    """Trackers: console, file, tensorboard, wandb, mlflow, swanlab, clearml, trackio."""
    default_local_dir: str = setting(
        "checkpoints/gsm8k-sft/test",
        interpolation="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        path=True,
    )
    """Folder of the checkpoints."""
    nnodes: int = setting(1, ge=1, interpolation="${oc.env:GROUP_WORLD_SIZE,1}")
    """Nodes; under torchrun, those that it started."""
    n_gpus_per_node: int = setting(1, ge=1, interpolation="${oc.env:LOCAL_WORLD_SIZE,1}")
    """Ranks per node; under torchrun, those that it started."""
    max_ckpt_to_keep: int | None = setting(None, ge=1)
    """Checkpoints to keep; null keeps all."""
