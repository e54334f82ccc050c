"""Write a checkpoint in the layout in which verl itself saves under FSDP2, so that its loader and merger read it.

::

    {target}/
      fsdp_config.json                       {"FSDP_version": 2, "world_size": W}
      model_world_size_{W}_rank_{R}.pt       state_dict() of the model: a DTensor for each weight, sharded by rows
      optim_world_size_{W}_rank_{R}.pt       state_dict() of the optimizer: moments as DTensors, param_groups
      extra_state_world_size_{W}_rank_{R}.pt lr_scheduler.state_dict() and the random states
      huggingface/                           config, tokenizer

Our own files have the same names and another format: plain tensors, numbers and text, which are read without running
code (:mod:`verl.checkpoint.shards`).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.checkpoint.locate import WORLD_SIZE_FILE, backend_of
from verl.checkpoint.shards import assemble, read_shards, read_state, saved_world_size, shard_file
from verl.errors import CheckpointError
from verl.model_merger.fsdp import config_of, empty_model
from verl.model_merger.lora import has_adapters
from verl.utils.dtensor_private import mesh_of_rank, sharded_by_rows

logger = logging.getLogger(__name__)


def export(source: Path, target: Path, ranks: int | None = None, trust_remote_code: bool = False) -> None:
    """Write the shards in ``source`` as verl's FSDP2 checkpoints.

    Args:
        source: an ``actor`` or ``critic`` folder that FSDP wrote, with the contents model, optimizer and extra.
        target: folder to make, such as ``checkpoints/PROJECT/NAME/global_step_10/actor``.
        ranks: number of ranks that will read it; by default as many as wrote ``source``.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        CheckpointError: a file is missing or damaged, Megatron wrote it, or ``target`` has files already.
    """
    if backend_of(source) == "megatron":
        raise CheckpointError(f"{source} was written by Megatron; only checkpoints of FSDP are written as verl's.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already. Name a folder that does not exist, or is empty.")
    saved_ranks = saved_world_size(source)
    ranks = ranks or saved_ranks
    model = read_shards(source, "model", saved_ranks)
    has_optimizer = (source / shard_file("optim", saved_ranks, 0)).is_file()
    optimizer = read_shards(source, "optim", saved_ranks) if has_optimizer else None
    if has_adapters(model[0]["tensors"]):
        raise CheckpointError(f"{source} holds LoRA adapters. Merge them into a model folder instead.")
    names, tied = _names_of(source, trust_remote_code)
    if unknown := sorted(set(model[0]["shapes"]) - set(names)):
        raise CheckpointError(f"{source} has weights that its model does not have: {', '.join(unknown[:5])}.")
    target.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        mesh = mesh_of_rank(ranks, rank)
        held = {name: _rows(model, name, mesh, rank) for name in names if name in model[0]["shapes"]}
        # verl's own files have a tied weight under each of its names.
        weights = {name: held.get(name, held.get(tied.get(name, ""))) for name in names}
        if lacking := [name for name, weight in weights.items() if weight is None]:
            raise CheckpointError(f"{source} does not have these weights of its model: {', '.join(lacking[:5])}.")
        torch.save(weights, target / shard_file("model", ranks, rank))
        extra = _extra(source, saved_ranks, rank)
        if extra is not None:
            torch.save(extra, target / shard_file("extra_state", ranks, rank))
        if optimizer is not None:
            schedule = {} if extra is None else extra["lr_scheduler"] or {}
            state = _optimizer(optimizer, list(held), schedule, mesh, rank)
            torch.save(state, target / shard_file("optim", ranks, rank))
    (target / WORLD_SIZE_FILE).write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    if (source / "huggingface").is_dir():
        shutil.copytree(source / "huggingface", target / "huggingface")
    logger.info("wrote %s: %d weights for %d rank(s), in the layout of verl under FSDP2", target, len(weights), ranks)


def _names_of(source: Path, trust_remote_code: bool) -> tuple[list[str], dict[str, str]]:
    """Return the names in the model's ``state_dict()``, and for a tied weight's further names the first one."""
    with torch.device("meta"):
        model = empty_model(config_of(source / "huggingface", trust_remote_code), trust_remote_code)
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return list(model.state_dict()), tied


def _rows(shards: list[dict[str, Any]], name: str, mesh: DeviceMesh, rank: int) -> Tensor:
    """Return the rows of a rank as a DTensor, cut as ``torch.chunk`` cuts; a scalar as it is."""
    shape = torch.Size(shards[0]["shapes"][name])
    if not shape:
        return assemble(shards, name, 0, 0)
    each = -(-shape[0] // mesh.size())
    start, stop = (min(edge * each, shape[0]) for edge in (rank, rank + 1))
    return sharded_by_rows(assemble(shards, name, start, stop), shape, mesh)


def _optimizer(
    shards: list[dict[str, Any]], weights: list[str], schedule: Mapping[str, Any], mesh: DeviceMesh, rank: int
) -> dict[str, object]:
    """Return what ``state_dict()`` of an AdamW of the trained weights returns on a rank."""
    entries: dict[str, dict[str, object]] = {}
    for key in shards[0]["shapes"]:
        name, entry = key.rsplit("/", 1)
        entries.setdefault(name, {})[entry] = _rows(shards, key, mesh, rank)
    for key, value in shards[0]["other"].items():
        name, entry = key.rsplit("/", 1)
        entries.setdefault(name, {})[entry] = value
    trained = [name for name in weights if name in entries]
    kind = shards[0].get("optimizer") or {"class": "AdamW"}
    if kind["class"] not in ("Adam", "AdamW"):
        raise CheckpointError(f"the optimizer is {kind['class']}, and the settings of Adam and AdamW alone are known.")
    # The rates are those of the schedule. What a checkpoint here leaves to the configuration has PyTorch's defaults.
    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    group = {name: value for name, value in defaults.items() if name != "params"}
    group["amsgrad"] = bool(kind.get("amsgrad"))
    if schedule:
        group |= {"lr": schedule["_last_lr"][0], "initial_lr": schedule["base_lrs"][0]}
    group["params"] = list(range(len(trained)))
    # The entries of one weight in the order in which Adam has them: first the step.
    state = {
        index: dict(sorted(entries[name].items(), key=lambda item: (item[0] != "step", item[0])))
        for index, name in enumerate(trained)
    }
    return {"state": state, "param_groups": [group]}


def _extra(source: Path, saved_ranks: int, rank: int) -> dict[str, Any] | None:
    """Return schedule and random states of a rank; one beyond those that wrote them has the states of the last."""
    path = source / shard_file("extra_state", saved_ranks, min(rank, saved_ranks - 1))
    if not path.is_file():
        return None
    saved = read_state(path)
    random = saved["rng"]
    states: dict[str, object] = {}
    if random is not None:
        name, keys, *rest = random["numpy"]
        version, numbers, gauss = random["python"]
        states = {
            "cpu": random["torch"],
            "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
            "random": (version, tuple(numbers), gauss),
        } | ({"cuda": random["cuda"]} if "cuda" in random else {})
    return {"lr_scheduler": saved["lr_scheduler"], "rng": states}
