"""Sharded checkpoints that any number of ranks can read, and export to the Transformers format.

::

    {local_path}/
      fsdp_config.json                       {"FSDP_version": 2, "world_size": W}
      model_world_size_{W}_rank_{R}.pt       rows of each weight that rank R holds
      optim_world_size_{W}_rank_{R}.pt       the same rows of the optimizer's state, and its step counts
      extra_state_world_size_{W}_rank_{R}.pt schedule, random states, weight version, step
      huggingface/                           config, tokenizer; safetensors if "hf_model" is saved

The ``.pt`` files hold plain tensors, numbers and strings, and are read with ``weights_only=True``:
reading one never runs code from it. The same states can be held in memory instead (:func:`restore_rank`).
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import CheckpointError
from verl.utils.checkpoint import on_all_ranks, rng_state, set_rng_state
from verl.utils.checkpoint.files import UNREADABLE
from verl.workers.engine.base import RankState
from verl.workers.engine.fsdp.export import whole_weights, write_huggingface
from verl.workers.engine.fsdp.model import own_state
from verl.workers.engine.fsdp.sharding import local_part

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.engine import FSDPEngine

logger = logging.getLogger(__name__)

FORMAT = 1
KINDS = ("model", "optim", "extra_state")


def shard_file(kind: str, world_size: int, rank: int) -> str:
    """``model_world_size_2_rank_0.pt`` and its kind."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


# ---- from the engine ----------------------------------------------------------------------------


def rank_state(engine: FSDPEngine, global_step: int, contents: Sequence[str], copied: bool) -> RankState:
    """What this rank holds of ``contents``. Collective if they have ``hf_model``."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    states = {
        shard_file(kind, world_size, rank): state for kind, state in _states(engine, global_step, contents, copied)
    }
    weights = whole_weights(engine) if "hf_model" in contents else None
    if rank:
        return RankState(states)

    def describe(folder: Path) -> None:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
        write_huggingface(engine, folder / "huggingface", weights)

    return RankState(states, describe)


def _states(
    engine: FSDPEngine, global_step: int, contents: Sequence[str], copied: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    if "model" in contents:
        yield "model", _tensors_state(own_state(engine.model), copied)
    if "optimizer" in contents and engine.optimizer is not None:
        yield "optim", _optimizer_state(engine, copied)
    if "extra" in contents:
        yield (
            "extra_state",
            {
                "format": FORMAT,
                "lr_scheduler": None if engine.scheduler is None else copy.deepcopy(engine.scheduler.state_dict()),
                "rng": rng_state(),
                "weight_version": engine.weight_version,
                "global_step": global_step,
            },
        )


def _tensors_state(tensors: Mapping[str, Tensor], copied: bool) -> dict[str, Any]:
    """Rows of each tensor that this rank holds, with the whole shape and the number of the first row."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    return {
        "format": FORMAT,
        "tensors": {name: local.to("cpu", copy=copied) for name, (local, _) in parts.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "first_rows": {name: start for name, (_, start) in parts.items()},
    }


def _optimizer_state(engine: FSDPEngine, copied: bool) -> dict[str, Any]:
    """Moments as rows like the weights, under ``<weight>/<moment>``; the rest as it is."""
    assert engine.optimizer is not None
    rows: dict[str, Tensor] = {}
    other: dict[str, Any] = {}
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            is_rows = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
            (rows if is_rows else other)[f"{name}/{key}"] = value
    return _tensors_state(rows, copied) | {"other": copy.deepcopy(other)}


# ---- into the engine ----------------------------------------------------------------------------


def load_engine(engine: FSDPEngine, local_path: str, contents: Sequence[str]) -> None:
    """Read ``contents`` back into ``engine``, whatever number of ranks wrote them. Collective.

    Raises:
        CheckpointError: on every rank, if one finds a file missing, damaged or of another model.
    """
    folder = Path(local_path).expanduser()
    with on_all_ranks(f"resume from {folder}"):
        saved_ranks = saved_world_size(folder)
        if "model" in contents:
            _load_rows(own_state(engine.model), read_shards(folder, "model", saved_ranks))
        if "optimizer" in contents and engine.optimizer is not None:
            _load_optimizer(engine, read_shards(folder, "optim", saved_ranks))
        if "extra" in contents:
            rank = dist.get_rank()
            extra = read_state(folder / shard_file("extra_state", saved_ranks, min(rank, saved_ranks - 1)))
            _load_extra(engine, extra, has_own_rng=rank < saved_ranks)


def restore_rank(engine: FSDPEngine, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what :func:`rank_state` gave on this rank of as many ranks.

    Raises:
        CheckpointError: it is of another rank, another number of ranks, or another model.
    """
    wanted = {kind: shard_file(kind, dist.get_world_size(), dist.get_rank()) for kind in KINDS}
    if unknown := states.keys() - set(wanted.values()):
        raise CheckpointError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} cannot take the state {', '.join(sorted(unknown))}: a "
            "state held in memory goes back to the rank that it came from, among as many ranks. For another number of "
            "ranks, resume from a checkpoint on disk."
        )
    found = {kind: dict(states[file]) for kind, file in wanted.items() if file in states}
    if "model" in found:
        _load_rows(own_state(engine.model), [found["model"]])
    if "optim" in found and engine.optimizer is not None:
        _load_optimizer(engine, [found["optim"]])
    if "extra_state" in found:
        _load_extra(engine, found["extra_state"], has_own_rng=True)


def saved_world_size(folder: Path) -> int:
    """The number of ranks that wrote ``folder``.

    Raises:
        CheckpointError: ``fsdp_config.json`` is missing or damaged.
    """
    path = folder / "fsdp_config.json"
    try:
        ranks = json.loads(path.read_text())["world_size"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, so {folder} is not a whole FSDP checkpoint.") from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if type(ranks) is not int or ranks < 1:
        raise CheckpointError(f"{path} is damaged: world_size={ranks!r:.80} is no number of ranks.")
    return ranks


def read_shards(folder: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    """What every rank wrote of one kind; tensors stay on disk until they are used.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    paths = (folder / shard_file(kind, world_size, rank) for rank in range(world_size))
    return [_rows_state(path) for path in paths]


def _rows_state(path: Path) -> dict[str, Any]:
    """What :func:`_tensors_state` made. Numbers in it say how much memory is taken, so none is taken on trust."""
    state = read_state(path)
    parts = [part for key in ("tensors", "shapes", "first_rows") if isinstance(part := state.get(key), dict)]
    names = {frozenset(part) for part in parts}
    if len(parts) < 3 or len(names) > 1 or not all(isinstance(name, str) for name in parts[0]):
        raise CheckpointError(f"{path} is damaged: its tensors, shapes and rows do not belong together.")
    for name, shape in state["shapes"].items():
        if not _is_part(state["tensors"][name], shape, state["first_rows"][name]):
            raise CheckpointError(f"{path} is damaged: '{name}' is no part of a tensor of shape {shape!r:.80}.")
    return state


def _is_part(local: Any, shape: Any, first: Any) -> bool:
    """Whether ``local`` is a tensor that holds rows of one of ``shape``, from row ``first`` on."""
    if not isinstance(local, Tensor) or not isinstance(shape, list) or local.dim() != len(shape):
        return False
    if any(type(number) is not int or number < 0 for number in (*shape, first)):
        return False
    if local.untyped_storage().nbytes() < local.numel() * local.element_size():  # rows that are one row, many times
        return False
    return not shape or (list(local.shape[1:]) == shape[1:] and first + local.shape[0] <= shape[0])


def read_state(path: Path) -> dict[str, Any]:
    """One ``.pt`` file, without running code from it.

    Raises:
        CheckpointError: it is missing, cut short, or not one of ours.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        found = sorted(p.name for p in path.parent.glob("*.pt")) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} is missing. The folder holds {', '.join(found) or 'no .pt file'}.") from None
    except UNREADABLE as error:
        first = (str(error).strip().splitlines() or ["damaged"])[0]
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {first}). Resume from another step."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint file of this version (format {FORMAT}). Convert it to a model folder with "
            "the version that wrote it, and start from that (model.path)."
        )
    return state


def assemble(shards: list[dict[str, Any]], name: str, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of tensor ``name``, from the ranks that hold them.

    Raises:
        CheckpointError: the files together do not hold these rows.
    """
    shape = shards[0]["shapes"][name]
    if not shape:
        return shards[0]["tensors"][name]
    parts, done = [], start
    for shard in sorted(shards, key=lambda item: item["first_rows"].get(name, 0)):
        if shard["shapes"].get(name) != shape:
            raise CheckpointError(f"the checkpoint's files disagree about the shape of '{name}'.")
        local, first = shard["tensors"][name], shard["first_rows"][name]
        begin, end = max(done, first), min(stop, first + local.shape[0])
        if begin == done and end > begin:
            parts.append((begin - start, local[begin - first : end - first]))
            done = end
    if done < stop:
        raise CheckpointError(f"the checkpoint's files hold rows up to {done} of '{name}', which has {shape[0]}.")
    result = torch.empty((stop - start, *shape[1:]), dtype=shards[0]["tensors"][name].dtype)
    for place, rows in parts:
        result[place : place + rows.shape[0]] = rows
    return result


def _load_rows(tensors: Mapping[str, Tensor], shards: list[dict[str, Any]]) -> None:
    saved = shards[0]["shapes"]
    missing, unknown = sorted(tensors.keys() - saved.keys()), sorted(saved.keys() - tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {missing[:3] or 'nothing'}, and it has "
            f"{unknown[:3] or 'nothing'} that this model lacks."
        )
    for name, tensor in tensors.items():
        if list(tensor.shape) != saved[name]:
            raise CheckpointError(f"'{name}' has shape {saved[name]} in the checkpoint and {list(tensor.shape)} here.")
        local, start = local_part(tensor)
        rows = local.shape[0] if local.dim() else 0
        with torch.no_grad():
            local.copy_(assemble(shards, name, start, start + rows))


def _load_optimizer(engine: FSDPEngine, shards: list[dict[str, Any]]) -> None:
    assert engine.optimizer is not None
    engine.optimizer.state.clear()
    moments: dict[str, Tensor] = {}
    for name, parameter in engine.model.named_parameters():
        keys = [key for key in shards[0]["shapes"] if key.rsplit("/", 1)[0] == name]
        fresh = {key.rsplit("/", 1)[1]: torch.zeros_like(parameter) for key in keys}
        plain = {
            key.rsplit("/", 1)[1]: value.clone() if isinstance(value, Tensor) else value
            for key, value in shards[0]["other"].items()
            if key.rsplit("/", 1)[0] == name
        }
        moments |= {f"{name}/{key}": value for key, value in fresh.items()}
        if fresh or plain:
            engine.optimizer.state[parameter] = plain | fresh
    _load_rows(moments, shards)


def _load_extra(engine: FSDPEngine, state: Mapping[str, Any], has_own_rng: bool) -> None:
    if engine.scheduler is not None and state["lr_scheduler"] is not None:
        engine.scheduler.load_state_dict(state["lr_scheduler"])
        for group, lr in zip(engine.scheduler.optimizer.param_groups, state["lr_scheduler"]["_last_lr"], strict=True):
            group["lr"] = lr
    if has_own_rng:
        set_rng_state(state["rng"])
    engine.weight_version = int(state["weight_version"])
