"""Transfer of weights to rollout engines: check names and shapes, split into parts, share memory, verify checksums."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
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


def buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, copy: Callable[[Tensor], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Group weights into parts of at most ``bucket_bytes``; a larger tensor is a part by itself.

    ``copy`` is applied to each tensor as it arrives; a part holds the results.
    """
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > bucket_bytes:
            yield part
            part, held = {}, 0
        part[name] = copy(tensor)
        held += tensor.nbytes
    if part:
        yield part


@dataclass(frozen=True)
class SharedPart:
    """A part of the weights in memory that the processes of an engine map too."""

    path: Path
    """The file that holds it; it may be removed once the engine has mapped it."""
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


def shared_parts(
    weights: Iterable[tuple[str, Tensor]], folders: Sequence[Path], name: str, part_bytes: int
) -> Generator[SharedPart]:
    """Copy weights into shared memory part by part, each tensor once; a part is removed when the next is asked for.

    A part ends early where its folder is full, so that the engine takes it before more is written: several engines may
    share the memory of a machine.

    Args:
        weights: names and tensors, on any device.
        folders: where the parts may lie, the first one that has room first.
        name: prefix of the file names; a number follows.
        part_bytes: largest size of a part; a larger tensor is a part by itself.

    Raises:
        RolloutError: a single tensor fits into none of the folders.
    """
    part = _PartWriter(folders, f"{name}-0")
    try:
        for number, (key, tensor) in enumerate(weights, start=1):
            is_full = bool(part.tensors) and part.end + tensor.nbytes > part_bytes
            if is_full or not part.add(key, tensor):
                yield part.complete()
                part.remove()
                part = _PartWriter(folders, f"{name}-{number}")
                part.add(key, tensor)
        if part.tensors:
            yield part.complete()
    finally:
        part.remove()


class _PartWriter:
    """A part that is being written."""

    def __init__(self, folders: Sequence[Path], name: str) -> None:
        self._paths = [folder / name for folder in folders]
        self._file = -1
        self.tensors: dict[str, tuple[torch.dtype, torch.Size, int]] = {}
        self._checksums: dict[str, str] = {}
        self.end = 0
        """Where the last tensor ends."""
        self._nbytes = 0

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor to the end of the part; False if the file has no room for it and holds others already.

        Raises:
            RolloutError: it would be the first, and no folder has room.
        """
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        if not self._reserve(start, tensor.nbytes):
            return False
        self._checksums[name] = str(checksum(tensor))
        if tensor.nbytes:
            memory = np.memmap(self._paths[0], np.uint8, "r+", start, (tensor.nbytes,))
            torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.tensors[name] = tensor.dtype, tensor.shape, start
        self.end = start + tensor.nbytes
        self._nbytes += tensor.nbytes
        return True

    def _reserve(self, start: int, size: int) -> bool:
        while True:
            path = self._paths[0]
            try:
                if self._file < 0:
                    self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                if size:
                    # Writing to mapped memory that the file system cannot provide would end this process.
                    os.posix_fallocate(self._file, start, size)
                return True
            except OSError as error:
                if self.tensors:
                    return False
                self.remove()
                self._paths.pop(0)
                if not self._paths:
                    raise RolloutError(
                        f"{size / 2**20:.0f} MiB of new weights cannot be written to {path}: {error.strerror}. Make "
                        "room there, or point TMPDIR at a folder that has it."
                    ) from error

    def complete(self) -> SharedPart:
        """Return the part."""
        return SharedPart(self._paths[0], self.tensors, self._checksums, self._nbytes)

    def remove(self) -> None:
        """Remove the file; processes that have mapped it keep its memory for as long as they use it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._paths[0].unlink(missing_ok=True)


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
