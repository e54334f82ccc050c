"""Find the shards of a model in a run's folder, a step's or a role's, and tell which back end wrote them.

::

    {default_local_dir}/global_step_N/actor/    of reinforcement learning; beside it critic/
    {default_local_dir}/global_step_N/          of runs with one model
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from verl.checkpoint.steps import read_latest, saved_steps
from verl.config.megatron import INDEX
from verl.errors import CheckpointError

Backend = Literal["fsdp", "megatron"]

WORLD_SIZE_FILE = "fsdp_config.json"
"""File that FSDP writes beside its shards."""
LAYOUT_FILE = "megatron_config.json"
"""File that Megatron writes beside its shards."""


def dist_checkpoint(folder: Path) -> Path | None:
    """Return the folder with the index of a checkpoint of megatron-core: ``folder``, or ``dist_ckpt`` as verl 0.8 has.

    None if there is no index.
    """
    return next((below for below in (folder, folder / "dist_ckpt") if (below / INDEX).is_file()), None)


def backend_of(folder: Path) -> Backend | None:
    """Return what wrote the shards that lie directly in ``folder``; None if there are none."""
    if (folder / LAYOUT_FILE).is_file() or dist_checkpoint(folder) is not None:
        return "megatron"
    is_fsdp = (folder / WORLD_SIZE_FILE).is_file() or any(folder.glob("model_world_size_*_rank_*.pt"))
    return "fsdp" if is_fsdp else None


def shards_below(folder: Path) -> Path | None:
    """Return the folder of shards that ``folder`` is or leads to: a run's newest step, a step's actor or only model.

    None if it leads to none.
    """
    if not folder.is_dir():
        return None
    if backend_of(folder) is not None:
        return folder
    steps = saved_steps(folder)
    if steps:
        try:
            latest = read_latest(folder)
        except CheckpointError:
            latest = None
        return shards_below(steps[latest if latest in steps else max(steps)])
    roles = [child for child in sorted(folder.iterdir()) if child.is_dir() and backend_of(child) is not None]
    return next((role for role in roles if role.name == "actor"), roles[0] if len(roles) == 1 else None)
