"""Transfer of weights to rollout engines: check names and shapes, split into parts, share memory, verify checksums."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from verl.errors import RolloutError
from verl.workers.rollout.engine_side.verl_engine import checksum

ADAPTER = "policy"
"""Name of the only adapters in an engine."""
ADAPTER_FILE = "adapter_model.safetensors"
_SHOWN_PROBLEMS = 8
_SHOWN_NAMES = 5
_ALIGNMENT = 64  # of the first byte of a tensor in a part; more than the size of an element
_LARGEST_GROWTH = 2**26  # bytes by which a buffer grows beyond what a part needs now
_SPARE_BYTES = 2**20  # for the header of a file


class ExpectedWeights:
    """Check given weights against the names and shapes of a model's weights.

    Args:
        module: the model; its parameters may be on the meta device.
        dtype: dtype to which weights are converted; None keeps the given one.
        with_buffers: whether given buffers are checked and passed on like weights; otherwise they are skipped.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, with_buffers: bool = False) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        buffers = dict(module.named_buffers())
        self.model_name = type(module).__name__
        self._dtype = dtype
        self._needed = list(names.values())
        self._skipped = set() if with_buffers else set(buffers)
        self.shapes = {name: buffer.shape for name, buffer in buffers.items()}
        """Of weights and buffers, by name."""
        self.shapes |= {name: parameter.shape for parameter, name in names.items()}
        # Tied weights have several names; they are passed on once, under the first.
        self._first_names = {name: name for name in buffers}
        self._first_names |= {name: names[p] for name, p in module.named_parameters(remove_duplicate=False)}

    def checked(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield each fitting weight once, converted.

        Raises:
            RolloutError: after the last weight, because the iteration may be collective; it names weights that are
                unknown, missing or of another shape.
        """
        problems, seen = [], set()
        for given, tensor in weights:
            name = self._first_names.get(given)
            if name is None:
                problems.append(f"{given} is unknown")
            elif name in self._skipped or name in seen:
                continue
            elif tensor.shape != self.shapes[name]:
                problems.append(f"{given} has shape {list(tensor.shape)} where {list(self.shapes[name])} is needed")
                seen.add(name)
            else:
                seen.add(name)
                yield name, tensor.detach().to(self._dtype or tensor.dtype)
        problems += [f"{name} is missing" for name in self._needed if name not in seen]
        check_fit(problems, version, self.model_name)

    def checked_adapters(self, adapters: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Tensor]:
        """Return the adapters of an iteration, converted; see :class:`~verl.workers.adapted_weights.AdaptedWeights`.

        Raises:
            RolloutError: an adapter is of no layer of the model, or of another shape; the message names it.
        """
        problems, found = [], {}
        for name, tensor in adapters:
            layer, _, part = name.rpartition(".lora_")
            shape = self.shapes.get(f"{layer}.weight")
            side = -1 if part.startswith("A") else 0
            if shape is None:
                problems.append(f"{name} is of no layer")
            elif tensor.shape[side] != shape[side]:
                problems.append(f"{name} has shape {list(tensor.shape)}, and the layer's weight {list(shape)}")
            else:
                found[name] = tensor.detach().to(self._dtype or tensor.dtype)
        check_fit(problems, version, self.model_name)
        return found


def check_fit(problems: Sequence[str], version: int, model_name: str) -> None:
    """Raise RolloutError if there are problems; the message has the first few."""
    if problems:
        shown = "; ".join(problems[:_SHOWN_PROBLEMS])
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise RolloutError(
            f"weights of version {version} do not fit {model_name}: {shown}{more}. Trainer and rollout must be built "
            "from the same model.path and override_config."
        )


def check_arrival(sent: Mapping[str, str], arrived: Mapping[str, str], where: str) -> None:
    """Compare the checksums, by name, of the weights that were sent with those that the engine reports.

    Args:
        sent: checksums computed before sending.
        arrived: checksums that the engine reports.
        where: name of the engine and its process, for the message.

    Raises:
        RolloutError: the names or a checksum differ.
    """
    wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
    if wrong:
        shown = ", ".join(wrong[:_SHOWN_NAMES]) + (" and more" if len(wrong) > _SHOWN_NAMES else "")
        raise RolloutError(
            f"{len(wrong)} of {len(sent)} weights did not arrive in {where} as they were sent: {shown}. Their "
            "checksums differ; the engine's weights cannot be trusted."
        )


@dataclass(frozen=True)
class SharedPart:
    """A part of the weights in memory that an engine maps too; valid until the next one is asked for."""

    path: Path
    """The file that holds it."""
    tensors: Mapping[str, tuple[torch.dtype, torch.Size, int]]
    """Format, shape and first byte of each tensor."""
    checksums: Mapping[str, str]
    """Of the tensors before they were copied."""
    nbytes: int
    """Of the tensors, without the gaps between them."""

    def description(self) -> dict[str, Any]:
        """JSON of which ``verl_engine.weights_in_part`` makes the tensors."""
        tensors = [
            [name, str(dtype).removeprefix("torch."), list(shape), start]
            for name, (dtype, shape, start) in self.tensors.items()
        ]
        return {"path": str(self.path), "tensors": tensors}


class SharedBuffer:
    """Memory in which weights go to the processes of an engine on this machine, part by part.

    It is a file that both sides map, and stays mapped from update to update, because new pages cost more than a copy.
    It grows as parts need it. A part ends early where its folder has no more room, so that several engines can share
    a small one.

    Args:
        folders: where the file may lie, the first one that has room first; whoever made them removes them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._paths = [folder / "weights" for folder in folders]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def parts(self, weights: Iterable[tuple[str, Tensor]], part_bytes: int) -> Iterator[SharedPart]:
        """Copy weights, each tensor once, and yield each part when it is complete.

        Args:
            weights: names and tensors, on any device.
            part_bytes: largest size of a part; a larger tensor is a part by itself.

        Raises:
            RolloutError: a single tensor fits into none of the folders.
        """
        tensors: dict[str, tuple[torch.dtype, torch.Size, int]] = {}
        checksums: dict[str, str] = {}
        nbytes = end = 0
        for name, tensor in weights:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT if tensor.nbytes else 0
            if tensors and not (start + tensor.nbytes <= part_bytes and self._has_room(start + tensor.nbytes)):
                yield SharedPart(self._paths[0], tensors, checksums, nbytes)
                tensors, checksums, nbytes, start, end = {}, {}, 0, 0, 0
            if not tensors:
                self._make_room(tensor.nbytes)
            end = max(end, start + tensor.nbytes)
            checksums[name] = str(checksum(tensor))
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            tensors[name] = tensor.dtype, tensor.shape, start
            nbytes += tensor.nbytes
        if tensors:
            yield SharedPart(self._paths[0], tensors, checksums, nbytes)

    def _has_room(self, size: int) -> bool:
        """Grow the file to at least ``size`` bytes, if its folder has them."""
        try:
            self._grow(size)
        except OSError:
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Grow the file to at least ``size`` bytes, in the next folder if need be; nothing of it is in use."""
        while True:
            try:
                self._grow(size)
                return
            except OSError as error:
                self._memory = torch.empty(0, dtype=torch.uint8)
                self._paths[0].unlink(missing_ok=True)
                if len(self._paths) == 1:
                    raise RolloutError(
                        f"{size / 2**20:.0f} MiB of new weights cannot be written to {self._paths[0]}: "
                        f"{error.strerror}. Make room there, or point TMPDIR at a folder that has it."
                    ) from error
                self._paths.pop(0)

    def _grow(self, size: int) -> None:
        held = len(self._memory)
        if size <= held:
            return
        file = os.open(self._paths[0], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Reserved first, because to write to mapped memory that the file system lacks would end this process.
            size = _allocate(file, max(size, min(2 * held, held + _LARGEST_GROWTH)), size)
        finally:
            os.close(file)
        self._memory = torch.from_file(str(self._paths[0]), shared=True, size=size, dtype=torch.uint8)


def _allocate(file: int, wanted: int, needed: int) -> int:
    """Reserve ``wanted`` bytes of a file, or at least those needed; return how many."""
    try:
        os.posix_fallocate(file, 0, wanted)
    except OSError:
        if wanted == needed:
            raise
        return _allocate(file, needed, needed)
    return wanted


def save_tensors(tensors: Mapping[str, Tensor], folders: Sequence[Path], name: str, what: str) -> Path:
    """Write tensors to the file ``name`` below the first of ``folders`` with enough free space.

    Another process may fill that folder meanwhile (the engines of a machine share its memory): then the next one
    is tried.

    Raises:
        RolloutError: no folder takes it; the message names ``what``.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    untried = list(folders)
    while True:
        folder = folder_with_room(untried, size, what)
        path = folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(dict(tensors), path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            untried.remove(folder)
            if not untried:
                raise RolloutError(
                    f"{size / 2**20:.0f} MiB of {what} could not be written to {path}: {error}. Make room there, or "
                    "point TMPDIR at a folder that has it."
                ) from error
        else:
            return path


def write_adapters(adapters: Mapping[str, Tensor], folders: Sequence[Path]) -> tuple[Path, dict[str, Tensor]]:
    """Write LoRA adapters as peft does, to a new folder below the first of ``folders`` with enough free space.

    Args:
        adapters: see :class:`~verl.workers.adapted_weights.AdaptedWeights`.
        folders: where there may be room.

    Returns:
        the new folder, which the caller deletes, and the tensors in its file.
    """
    tensors = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in adapters.items()}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    layers = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters})
    folder = save_tensors(tensors, folders, f"adapters-{uuid4().hex}/{ADAPTER_FILE}", "new weights").parent
    # The scale lora_alpha / r is 1: that of training is part of the tensors.
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, tensors


def folder_with_room(folders: Sequence[Path], size: int, what: str) -> Path:
    """Return the first of ``folders`` with free space for ``size`` bytes and some to spare.

    Raises:
        RolloutError: none has it; the message names ``what``.
    """
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder, room in free.items():
        if room > size + _SPARE_BYTES:
            return folder
    found = ", ".join(f"{folder} ({room / 2**20:.0f} MiB free)" for folder, room in free.items())
    raise RolloutError(
        f"{size / 2**20:.0f} MiB of {what} fit into none of {found}. Make room, or point TMPDIR at a folder that "
        "has it."
    )
