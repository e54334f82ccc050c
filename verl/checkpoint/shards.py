"""Sharded checkpoints of a training state: each rank writes its rows, any number of ranks can read them.

::

    {local_path}/
      fsdp_config.json                       {"FSDP_version": 2, "world_size": W}
      model_world_size_{W}_rank_{R}.pt       part of each weight that rank R holds: rows, of all or some columns
      optim_world_size_{W}_rank_{R}.pt       the same rows of the optimizer's state, and its step counts
      extra_state_world_size_{W}_rank_{R}.pt schedule, random states, weight version, step
      huggingface/                           config, tokenizer; safetensors if "hf_model" is saved

The ``.pt`` files hold plain tensors, numbers and strings and are read with ``weights_only=True``, so reading never runs
code from them. Files that verl 0.8 saved under the same names are read too (:mod:`verl.checkpoint.public_shards`). The
same states can be kept in memory (:meth:`TrainingState.restore`).
"""

from __future__ import annotations

import copy
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.checkpoint.files import UNREADABLE
from verl.checkpoint.locate import WORLD_SIZE_FILE
from verl.checkpoint.public_shards import extra_state, load_file, model_rows, optimizer_rows
from verl.checkpoint.ranks import on_all_ranks
from verl.checkpoint.states import State, rng_state, set_rng_state
from verl.errors import CheckpointError
from verl.utils.sharded_tensor import local_part

T = TypeVar("T")

FORMAT = 1  # of the .pt files; another one is refused
KINDS = ("model", "optim", "extra_state")  # as in the names of the files


def shard_file(kind: str, world_size: int, rank: int) -> str:
    """File name of a rank's shard, e.g. ``model_world_size_2_rank_0.pt``."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


@dataclass(frozen=True)
class TrainingState:
    """Weights, optimizer and schedule of this rank, to be saved and restored.

    Args:
        tensors: weights and buffers by name, tied ones once; possibly sharded by rows.
        parameters: the weights among them that the optimizer may hold, by the same names.
        optimizer: None for a frozen model.
        scheduler: of the learning rate.
    """

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    optimizer: Optimizer | None
    scheduler: LambdaLR | None

    # ---- out of the model -----------------------------------------------------------------------

    def states(self, contents: Sequence[str], numbers: Mapping[str, int], copied: bool) -> dict[str, dict[str, object]]:
        """Collect the contents of this rank's files, by file name.

        Args:
            contents: any of ``model``, ``optimizer`` and ``extra``.
            numbers: stored with ``extra``; :meth:`load` and :meth:`restore` return them.
            copied: copy the tensors, so that later steps do not change them.
        """
        states: dict[str, dict[str, object]] = {}
        if "model" in contents:
            states["model"] = _rows_of(self.tensors, copied)
        if "optimizer" in contents and self.optimizer is not None:
            states["optim"] = self._optimizer_state(self.optimizer, copied)
        if "extra" in contents:
            states["extra_state"] = extra_of(self.scheduler, numbers)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        return {shard_file(kind, world_size, rank): state for kind, state in states.items()}

    def _optimizer_state(self, optimizer: Optimizer, copied: bool) -> dict[str, object]:
        """Moments as rows like the weights, under ``<weight>/<moment>``; other entries unchanged."""
        rows: dict[str, Tensor] = {}
        other: dict[str, object] = {}
        for name, parameter in self.parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                is_rows = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
                (rows if is_rows else other)[f"{name}/{key}"] = value
        return _rows_of(rows, copied) | {"other": copied_to_cpu(other), "optimizer": kind_of(optimizer)}

    # ---- back into it ---------------------------------------------------------------------------

    def load(self, folder: Path, contents: Sequence[str]) -> State:
        """Load ``contents`` from disk, whatever number of ranks wrote them. Collective.

        Returns:
            the ``numbers`` of :meth:`states` (among other entries), empty unless ``extra`` is read.

        Raises:
            CheckpointError: on every rank, if one finds a file missing, damaged or of another model.
        """
        extra: State = {}
        with on_all_ranks(f"resume from {folder}"):
            saved_ranks = saved_world_size(folder)
            if "model" in contents:
                _load_rows(self.tensors, read_shards(folder, "model", saved_ranks))
            if "optimizer" in contents and self.optimizer is not None:
                self._load_optimizer(self.optimizer, read_shards(folder, "optim", saved_ranks, self.parameters.keys()))
            if "extra" in contents:
                # A rank beyond the saved ones takes the schedule of the last, and keeps its own random state.
                rank = dist.get_rank()
                path = folder / shard_file("extra_state", saved_ranks, min(rank, saved_ranks - 1))
                saved = read_state(path)
                extra = saved if is_own(saved) else _converted(path, lambda: extra_state(saved))
                load_extra(self.scheduler, extra, has_own_rng=rank < saved_ranks)
        return extra

    def restore(self, states: Mapping[str, State]) -> State:
        """Restore the result of :meth:`states` on the same rank of as many ranks; returns as :meth:`load`.

        Raises:
            CheckpointError: it is from another rank, another number of ranks, or another model.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        files = {kind: shard_file(kind, world_size, rank) for kind in KINDS}
        if unknown := states.keys() - set(files.values()):
            raise CheckpointError(
                f"rank {rank} of {world_size} cannot load the state {', '.join(sorted(unknown))}: a snapshot in "
                "memory can only be loaded by the same rank of the same number of ranks. For another number of "
                "ranks, resume from a checkpoint on disk."
            )
        tensors = {kind: dict(states[file]) for kind, file in files.items() if file in states}
        if "model" in tensors:
            _load_rows(self.tensors, [tensors["model"]])
        if "optim" in tensors and self.optimizer is not None:
            self._load_optimizer(self.optimizer, [tensors["optim"]])
        if "extra_state" in tensors:
            load_extra(self.scheduler, tensors["extra_state"], has_own_rng=True)
        return tensors.get("extra_state", {})

    def _load_optimizer(self, optimizer: Optimizer, shards: list[State]) -> None:
        check_kind(optimizer, shards[0].get("optimizer"))
        optimizer.state.clear()
        moments: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            keys = [key for key in shards[0]["shapes"] if key.rsplit("/", 1)[0] == name]
            fresh = {key.rsplit("/", 1)[1]: torch.zeros_like(parameter) for key in keys}
            plain = {
                key.rsplit("/", 1)[1]: value
                for key, value in shards[0]["other"].items()
                if key.rsplit("/", 1)[0] == name
            }
            plain = for_optimizer(optimizer, parameter, plain)
            moments |= {f"{name}/{key}": value for key, value in fresh.items()}
            if fresh or plain:
                optimizer.state[parameter] = plain | fresh
        _load_rows(moments, shards)


def copied_to_cpu(entries: Mapping[str, object]) -> dict[str, object]:
    """Copy entries of an optimizer's state, tensors among them to the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in entries.items()
    }


def for_optimizer(optimizer: Optimizer, parameter: Tensor, entries: Mapping[str, object]) -> dict[str, object]:
    """Copy saved entries that are not shaped like the weight to the device where the optimizer reads them.

    Kernels that are fused, or captured in a CUDA graph, read the number of steps on the device of the weight; others
    read it on the CPU (``torch.optim.Optimizer.load_state_dict`` has the same rule).
    """
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    on_device = bool(group.get("fused") or group.get("capturable"))
    return {
        key: value.to(parameter.device if on_device or key != "step" else "cpu", copy=True)
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for key, value in entries.items()
    }


def extra_of(scheduler: LambdaLR | None, numbers: Mapping[str, int]) -> dict[str, object]:
    """Collect schedule, random states and ``numbers``."""
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    return {"format": FORMAT, "lr_scheduler": schedule, "rng": rng_state(), **numbers}


def load_extra(scheduler: LambdaLR | None, state: State, has_own_rng: bool) -> None:
    """Restore schedule and, with ``has_own_rng``, random states from :func:`extra_of`."""
    if scheduler is not None and state["lr_scheduler"] is not None:
        _go_to_step(scheduler, int(state["lr_scheduler"]["last_epoch"]))
    if has_own_rng and state["rng"] is not None:
        set_rng_state(state["rng"])


_MORE_STATE = ("amsgrad", "centered", "momentum")
"""Settings of PyTorch's optimizers that need further state for each weight when they are on."""


def kind_of(optimizer: Optimizer) -> State:
    """Class of an optimizer and the settings that decide what its state holds."""
    return {"class": type(optimizer).__name__} | {
        name: bool(optimizer.defaults[name]) for name in _MORE_STATE if name in optimizer.defaults
    }


def check_kind(optimizer: Optimizer, saved: Mapping[str, object] | None) -> None:
    """Check that a saved state is of this kind of optimizer; None is a checkpoint that does not record the kind.

    Raises:
        CheckpointError: it is of another kind.
    """
    now = kind_of(optimizer)
    added = [name for name in _MORE_STATE if saved and now.get(name) and not saved.get(name)]
    if saved is None or (saved["class"] == now["class"] and not added):
        return
    raise CheckpointError(
        f"the optimizer's state in the checkpoint is of {saved['class']}, and this run has {now['class']}"
        + (f" with {', '.join(added)}" if added else "")
        + ", which needs another one. Use that optimizer with its settings (override_optimizer_config), or begin "
        "with new moments: load_contents=[model,extra]."
    )


def _go_to_step(scheduler: LambdaLR, step: int) -> None:
    """Continue this run's schedule after ``step`` steps; base rate and shape are those of its configuration."""
    rates = [base * shape(step) for base, shape in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict({"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": []})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _rows_of(tensors: Mapping[str, Tensor], copied: bool) -> dict[str, object]:
    """The part of each tensor that this rank holds, with the full shape and the indices of its first row and column.

    The column is there only for tensors whose columns are divided.
    """
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    divided = {name for name, (local, _) in parts.items() if local.shape[1:] != tensors[name].shape[1:]}
    return {
        "format": FORMAT,
        "tensors": {name: local.to("cpu", copy=copied) for name, (local, _) in parts.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "first_rows": {name: first[0] if first else 0 for name, (_, first) in parts.items()},
        **({"first_columns": {name: parts[name][1][1] for name in sorted(divided)}} if divided else {}),
    }


def drop_copies(shards: list[State], names: Set[str]) -> None:
    """Remove tensors that are not in ``names`` and equal one that is: tied weights, which verl 0.8 saves twice."""
    shapes = shards[0]["shapes"]
    for name in [name for name in shapes if name not in names]:
        alike = (other for other in shapes if other in names and shapes[other] == shapes[name])
        if any(all(torch.equal(s["tensors"][name], s["tensors"][other]) for s in shards) for other in alike):
            for shard in shards:
                for part in ("tensors", "shapes", "first_rows"):
                    del shard[part][name]
                shard.get("first_columns", {}).pop(name, None)


def _load_rows(tensors: Mapping[str, Tensor], shards: list[State]) -> None:
    drop_copies(shards, tensors.keys())
    saved = shards[0]["shapes"]
    missing, unknown = sorted(tensors.keys() - saved.keys()), sorted(saved.keys() - tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint is of another model: missing weights {missing[:3] or 'none'}, unknown weights "
            f"{unknown[:3] or 'none'}."
        )
    for name, tensor in tensors.items():
        if list(tensor.shape) != saved[name]:
            raise CheckpointError(f"'{name}' has shape {saved[name]} in the checkpoint and {list(tensor.shape)} here.")
        local, first = local_part(tensor)
        bounds = [slice(start, start + size) for start, size in zip(first, local.shape, strict=True)]
        rows = bounds[0] if bounds else slice(0, 0)
        with torch.no_grad():
            local.copy_(assemble(shards, name, rows.start, rows.stop, *bounds[1:2]))


# ---- files ----------------------------------------------------------------------------------------


def write_world_size(folder: Path) -> None:
    """Record in ``folder`` how many ranks write there; call on rank 0."""
    (folder / WORLD_SIZE_FILE).write_text(json.dumps({"FSDP_version": 2, "world_size": dist.get_world_size()}))


def saved_world_size(folder: Path) -> int:
    """Read the number of ranks that wrote ``folder``; a missing or damaged file is a ``CheckpointError``."""
    path = folder / WORLD_SIZE_FILE
    try:
        ranks = json.loads(path.read_text())["world_size"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, so {folder} is not a whole FSDP checkpoint.") from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if type(ranks) is not int or ranks < 1:
        raise CheckpointError(f"{path} is damaged: world_size={ranks!r:.80} is no number of ranks.")
    return ranks


def read_shards(folder: Path, kind: str, world_size: int, trained: Set[str] = frozenset()) -> list[State]:
    """Read one kind of shard of every rank, validated; tensors are memory-mapped until they are used.

    ``trained`` are the names of the optimizer's weights, which the moments that verl 0.8 saved do not have.
    """
    paths: list[Path] = []
    states: list[State] = []
    for rank in range(world_size):  # one by one: a damaged number of ranks ends at the first file that is missing
        paths.append(folder / shard_file(kind, world_size, rank))
        states.append(read_state(paths[-1]))
    if not all(map(is_own, states)):
        states = _public_rows(paths, kind, states, trained)
        paths = paths[: len(states)]
    return [_checked_rows(path, state) for path, state in zip(paths, states, strict=True)]


def _public_rows(paths: list[Path], kind: str, states: list[State], trained: Set[str]) -> list[State]:
    if kind == "model":
        return [
            _converted(path, functools.partial(model_rows, state, rank))
            for rank, (path, state) in enumerate(zip(paths, states, strict=True))
        ]
    folder = paths[0].parent
    shapes = read_shards(folder, "model", len(states))[0]["shapes"]
    trained_shapes = {name: shape for name, shape in shapes.items() if name in trained}
    return _converted(folder, lambda: optimizer_rows(states, trained_shapes))


def _converted(path: Path, convert: Callable[[], T]) -> T:
    """Run a conversion of files that verl 0.8 is said to have saved; what it cannot read is a ``CheckpointError``."""
    try:
        return convert()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} is no checkpoint of this version and none of verl 0.8 under FSDP ({type(error).__name__}: "
            f"{error!s:.200}). Convert it to a model folder with what wrote it, and start from that folder."
        ) from error


def _checked_rows(path: Path, state: State) -> State:
    """Validate a result of :func:`_rows_of`; its shapes decide how much memory loading allocates."""
    parts = [part for key in ("tensors", "shapes", "first_rows") if isinstance(part := state.get(key), Mapping)]
    names = {frozenset(part) for part in parts}
    if len(parts) < 3 or len(names) > 1 or not all(isinstance(name, str) for name in parts[0]):
        raise CheckpointError(f"{path} is damaged: its tensors, shapes and rows do not belong together.")
    columns = state.get("first_columns", {})
    if not isinstance(columns, Mapping) or not columns.keys() <= parts[0].keys():
        raise CheckpointError(f"{path} is damaged: its columns are not those of its tensors.")
    for name, shape in state["shapes"].items():
        if not _is_part(state["tensors"][name], shape, state["first_rows"][name], columns.get(name)):
            raise CheckpointError(f"{path} is damaged: '{name}' is no part of a tensor of shape {shape!r:.80}.")
    return state


def _is_part(local: object, shape: object, first: Any, first_column: Any = None) -> bool:
    """Return whether ``local`` holds rows of a tensor of ``shape``, from row ``first`` on.

    They are whole rows, or the columns from ``first_column`` on.

    An expanded view is none: a small file could claim a huge shape.
    """
    if not isinstance(local, Tensor) or not isinstance(shape, list) or local.dim() != len(shape):
        return False
    if any(type(size) is not int or size < 0 for size in (*shape, first, first_column or 0)):
        return False
    if local.untyped_storage().nbytes() < local.numel() * local.element_size():  # an expanded view
        return False
    sizes = list(local.shape)
    if first_column is None or len(shape) < 2:
        return first_column is None and (not shape or (sizes[1:] == shape[1:] and first + sizes[0] <= shape[0]))
    return sizes[2:] == shape[2:] and first + sizes[0] <= shape[0] and first_column + sizes[1] <= shape[1]


def read_state(path: Path) -> State:
    """Read one ``.pt`` file, of this version or of verl 0.8, without running code from it, else ``CheckpointError``."""
    try:
        state = load_file(path)
    except FileNotFoundError:
        present = sorted(p.name for p in path.parent.glob("*.pt")) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} is missing. The folder holds {', '.join(present) or 'no .pt file'}.") from None
    except UNREADABLE as error:
        first = (str(error).strip().splitlines() or ["damaged"])[0]
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {first}). Resume from another step."
        ) from error
    if not isinstance(state, dict) or state.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint file of this version (format {FORMAT}). Convert it to a model folder with "
            "the version that wrote it, and start from that folder."
        )
    return state


def is_own(state: Mapping[str, object]) -> bool:
    """Return whether a file was saved by this project; files of verl 0.8 have no number of a format."""
    return "format" in state


def assemble(shards: list[State], name: str, start: int, stop: int, columns: slice | None = None) -> Tensor:
    """Assemble rows ``start`` to ``stop`` of tensor ``name``, all columns or ``columns`` of them.

    Raises:
        CheckpointError: the shards lack some.
    """
    shape = shards[0]["shapes"][name]
    if not shape:  # a scalar, which every rank holds
        return shards[0]["tensors"][name]
    by_column: dict[int, list[State]] = defaultdict(list)
    for shard in shards:
        if shard["shapes"].get(name) != shape:
            raise CheckpointError(f"the checkpoint's files disagree about the shape of '{name}'.")
        by_column[shard.get("first_columns", {}).get(name, 0)].append(shard)
    column_range = range(shape[1] if len(shape) > 1 else 1)[columns or slice(None)]
    parts: list[tuple[int, int, Tensor]] = []
    done = column_range.start
    for first, holders in sorted(by_column.items()):
        widths = {shard["tensors"][name].shape[1] if len(shape) > 1 else 1 for shard in holders}
        if len(widths) > 1:
            raise CheckpointError(f"the checkpoint's files disagree about the columns of '{name}' from {first} on.")
        begin, end = max(first, done), min(first + widths.pop(), column_range.stop)
        if begin == done and end > begin:
            for row, rows in _rows_from(holders, name, start, stop):
                parts.append((row, begin, rows[:, begin - first : end - first] if len(shape) > 1 else rows))
            done = end
    if done < column_range.stop:
        raise CheckpointError(f"the checkpoint's files hold columns up to {done} of '{name}', which has {shape[1]}.")
    sizes = (stop - start, len(column_range), *shape[2:]) if len(shape) > 1 else (stop - start,)
    result = torch.empty(sizes, dtype=shards[0]["tensors"][name].dtype)
    for row, begin, part in parts:
        target_rows = result[row : row + part.shape[0]]
        (target_rows.narrow(1, begin - column_range.start, part.shape[1]) if len(shape) > 1 else target_rows).copy_(
            part
        )
    return result


def _rows_from(shards: list[State], name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Iterate over parts of rows ``start`` to ``stop``, each with its place among them; the columns are the shards'."""
    done = start
    for shard in sorted(shards, key=lambda item: item["first_rows"].get(name, 0)):
        local, first = shard["tensors"][name], shard["first_rows"][name]
        begin, end = max(done, first), min(stop, first + local.shape[0])
        if begin == done and end > begin:
            yield begin - start, local[begin - first : end - first]
            done = end
    if done < stop:
        rows = shards[0]["shapes"][name][0]
        raise CheckpointError(f"the checkpoint's files hold rows up to {done} of '{name}', which has {rows}.")
