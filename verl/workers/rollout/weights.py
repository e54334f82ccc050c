"""Transfer of weights to rollout engines: check names and shapes, split into parts, share memory, verify checksums."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor

from verl.errors import RolloutError
from verl.utils.device import one_allocation
from verl.utils.model_facts.prediction_heads import FurtherLayers
from verl.utils.sharded_tensor import DividedTensor, full_tensor, is_first_holder, is_held_by_each, local_part
from verl.workers.rollout.engine_side.verl_engine import (
    ROW_WORDS,
    SHARED_MEMORY,
    Share,
    as_text,
    device_uuid,
    pin,
    signed_checksum,
    unpin,
)
from verl.workers.rollout.file_names import FileNames
from verl.workers.rollout.ranks import MachineRanks, machine_identity

ADAPTER = "policy"
"""Name of the only adapters in an engine."""
ADAPTER_FILE = "adapter_model.safetensors"
_SHOWN_PROBLEMS = 8  # in a message, as one cause often concerns all layers
_SHOWN_NAMES = 5
_ALIGNMENT = 64  # of the first byte of a tensor in a part; more than the size of an element
_MAX_GROWTH = 2**26  # bytes by which a buffer grows beyond what a part needs now
_SPARE_BYTES = 2**20  # for the header of a file
_NO_COUNTER = b"/verl_no_counter", 0  # PyTorch ignores a counter whose file does not exist


class ExpectedWeights:
    """Check given weights against the names and shapes of a model's weights.

    Args:
        module: the model; its parameters may be on the meta device.
        dtype: dtype to which weights are converted, but not buffers; None keeps the given one.
        with_buffers: whether all given buffers are checked and passed on like weights; otherwise those that model
            folders lack are skipped.
        heads: of multi-token prediction, all of which may come too, or none.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None = None,
        with_buffers: bool = False,
        heads: FurtherLayers | None = None,
    ) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        buffers = dict(module.named_buffers())
        self.model_name = type(module).__name__
        self._dtype = dtype
        self._needed = list(names.values())
        self._buffers = set(buffers)
        # Such as angles of rotation. Those of files, such as the bias of DeepSeek-V3's routers, are weights.
        self._skipped = set() if with_buffers else self._buffers - module.state_dict().keys()
        self.shapes = {name: buffer.shape for name, buffer in buffers.items()}
        """Shapes of weights and buffers, by name."""
        self.shapes |= {name: parameter.shape for parameter, name in names.items()}
        # Tied weights have several names; they are passed on once, under the first.
        self._first_names = {name: name for name in buffers}
        self._first_names |= {name: names[p] for name, p in module.named_parameters(remove_duplicate=False)}
        self.head_shapes = {} if heads is None else {name: torch.Size(shape) for name, shape in heads.shapes.items()}
        """Shapes of the weights of heads, by name."""
        if heads is not None:
            self._buffers |= {name for name in self.head_shapes if heads.in_last_layer(name) in buffers}
        self.shapes |= self.head_shapes
        self._first_names |= {name: name for name in self.head_shapes}

    def checked(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield each fitting weight once, converted.

        Raises:
            RolloutError: after the last weight, because the iteration may be collective; it names weights that are
                unknown, missing or of another shape.
        """
        problems, seen = [], set()
        for sent_name, tensor in weights:
            name = self._first_names.get(sent_name)
            if name is None:
                problems.append(f"{sent_name} is unknown")
            elif name in self._skipped or name in seen:
                continue
            elif tensor.shape != self.shapes[name]:
                problems.append(f"{sent_name} has shape {list(tensor.shape)} where {list(self.shapes[name])} is needed")
                seen.add(name)
            else:
                seen.add(name)
                dtype = tensor.dtype if name in self._buffers else self._dtype or tensor.dtype
                yield name, tensor.detach().to(dtype)
        needed = [*self._needed, *(self.head_shapes if seen & self.head_shapes.keys() else ())]
        problems += [f"{name} is missing" for name in needed if name not in seen]
        check_fit(problems, version, self.model_name)

    def checked_adapters(self, adapters: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Tensor]:
        """Return the adapters of an iteration, converted; see :class:`~verl.workers.adapted_weights.AdaptedWeights`.

        Raises:
            RolloutError: an adapter is of no layer of the model, or of another shape; the message names it.
        """
        problems, converted = [], {}
        for name, tensor in adapters:
            layer, _, part = name.rpartition(".lora_")
            shape = self.shapes.get(f"{layer}.weight")
            side = -1 if part.startswith("A") else 0
            if shape is None:
                problems.append(f"{name} is of no layer")
            elif tensor.shape[side] != shape[side]:
                problems.append(f"{name} has shape {list(tensor.shape)}, and the layer's weight {list(shape)}")
            else:
                converted[name] = tensor.detach().to(self._dtype or tensor.dtype)
        check_fit(problems, version, self.model_name)
        return converted


def in_files(
    weights: Iterable[tuple[str, Tensor]],
    names: FileNames,
    machines: Mapping[str, Collection[int]],
    device: torch.device,
) -> Iterator[tuple[str, Tensor | DividedTensor]]:
    """Yield weights as the model's files have them, which engines read too.

    DTensors stay divided if the ranks of each machine have all elements: each gives its own, and nothing is exchanged.
    Others are gathered, which is collective.

    Args:
        weights: of the model.
        names: of its files.
        machines: the ranks of each machine, which are all given the same weights; none if one rank is alone.
        device: of the weights that are gathered.
    """
    for name, tensor in weights:
        may_divide = bool(machines) and names.can_divide(name)
        if not (may_divide and isinstance(tensor, DTensor) and is_held_by_each(tensor, machines.values())):
            yield from names.convert(name, full_tensor(tensor, device))
            continue
        box, start = local_part(tensor)
        if not is_first_holder(tensor, machines[machine_identity()]):
            box = box[:0]
        yield from names.convert_divided(name, DividedTensor(tensor.shape, box, start))


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
    mismatches = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
    if mismatches:
        shown = ", ".join(mismatches[:_SHOWN_NAMES]) + (" and more" if len(mismatches) > _SHOWN_NAMES else "")
        raise RolloutError(
            f"{len(mismatches)} of {len(sent)} weights did not arrive in {where} as they were sent: {shown}. Their "
            "checksums differ; the engine's weights cannot be trusted."
        )


def signed_term(tensor: DividedTensor) -> Tensor:
    """Return what this rank's elements add to the checksum of a tensor: the sum over ranks is that of the whole."""
    box = tensor.box
    first = tensor.start[0] * tensor.shape[1:].numel() * tensor.dtype.itemsize
    if box.shape[1:] != tensor.shape[1:]:
        # Elements of other ranks count as zeros.
        rows = box.new_zeros(len(box), *tensor.shape[1:])
        rows[(slice(None), *_slices(box.shape[1:], tensor.start[1:]))] = box
        return _signed_rows(rows, first, tensor.nbytes) - rows.numel() + box.numel()
    return _signed_rows(box, first, tensor.nbytes)


def _signed_rows(rows: Tensor, first: int, nbytes: int) -> Tensor:
    """Return what rows of a tensor of ``nbytes`` bytes, from byte ``first`` on, add to its checksum."""
    data = rows.contiguous().reshape(-1).view(torch.uint8)
    before, after = first % 8, -(first + len(data)) % 8
    if before or after:
        data = torch.nn.functional.pad(data, (before, after))
    elif data.data_ptr() % 8:
        data = data.clone()
    words, index = data.view(torch.int64), first // 8
    head = min(-index % ROW_WORDS, len(words))
    count, factor = (len(words) - head) // ROW_WORDS, 2 * ((index + head) // ROW_WORDS) + 1
    row_sums = words[head : head + count * ROW_WORDS].view(count, ROW_WORDS).sum(-1)
    total = (row_sums * (2 * torch.arange(count, device=data.device) + factor)).sum() + rows.numel()
    total += words[:head].sum() * (2 * (index // ROW_WORDS) + 1)
    total += words[head + count * ROW_WORDS :].sum() * (factor + 2 * count)
    if len(words) and nbytes % 8 and (index + len(words)) * 8 > nbytes:  # an incomplete word is a row of its own
        total += 2 * words[-1]
    return total


def _slices(sizes: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))


@dataclass(frozen=True)
class SharedPart:
    """A part of the weights in memory that an engine sees too; valid until the next one is asked for."""

    location: Mapping[str, object]
    """Location of the bytes: ``path`` of a file, ``paths`` of several by machine, ``handle`` of memory on a device."""
    memory: Tensor
    """The bytes, as this process sees them."""
    tensors: Mapping[str, tuple[torch.dtype, torch.Size, int]]
    """Format, shape and first byte of each tensor."""
    checksums: Mapping[str, str]
    """Checksums of the tensors before they were copied, by name."""
    nbytes: int
    """Size of the tensors, without the gaps between them."""

    def description(self) -> dict[str, object]:
        """JSON of which ``verl_engine.weights_in_part`` makes the tensors."""
        tensors = [
            [name, str(dtype).removeprefix("torch."), list(shape), start]
            for name, (dtype, shape, start) in self.tensors.items()
        ]
        return {**self.location, "size": len(self.memory), "tensors": tensors}

    def share(self, rank: int, ranks: int) -> dict[str, str]:
        """Checksums of the tensors that a process of the engine verifies, of ``ranks`` processes."""
        share = Share(rank, ranks)
        return {name: text for index, (name, text) in enumerate(self.checksums.items()) if share.has(index)}


class SharedBuffer(ABC):
    """Memory in which weights go to the processes of engines on this machine, part by part.

    Args:
        ranks: the ranks that fill it together, each a part of the tensors; None is this one alone.
    """

    def __init__(self, ranks: MachineRanks | None = None) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ranks = ranks or MachineRanks(is_alone=True)

    def parts(self, weights: Iterable[tuple[str, Tensor | DividedTensor]], part_bytes: int) -> Iterator[SharedPart]:
        """Copy weights, each tensor once, and yield each part when it is complete.

        Collective over the ranks that fill the buffer: all give the same weights, and iterate to the end, because a
        part stays until all ranks have asked for the next one. A whole tensor is copied by one rank; of a divided one
        each rank copies what it has.

        Args:
            weights: names and tensors, on any device.
            part_bytes: largest size of a part; a larger tensor is a part by itself.

        Raises:
            RolloutError: there is no memory for a single tensor.
        """
        tensors: dict[str, tuple[torch.dtype, torch.Size, int]] = {}
        signed: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # by name and first element
        nbytes = end = 0

        def part() -> SharedPart:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the copies are made
            terms: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in tensors}
            for texts in self._ranks(as_text(signed)):
                for (name, start), text in texts.items():
                    terms[name][start] = int(text)  # of copies one counts
            checksums = {name: str(sum(rank_terms.values()) % 2**64) for name, rank_terms in terms.items()}
            return SharedPart(self._location(), self._memory[:end], tensors, checksums, nbytes)

        for name, tensor in weights:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT if tensor.nbytes else 0
            if tensors and not (start + tensor.nbytes <= part_bytes and self._has_room(start + tensor.nbytes)):
                yield part()
                self._ranks(None)  # all engines have read it
                tensors, signed, nbytes, start, end = {}, {}, 0, 0, 0
            if not tensors:
                self._make_room(tensor.nbytes, part_bytes)
            end = max(end, start + tensor.nbytes)
            target = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if isinstance(tensor, DividedTensor):
                if tensor.box.numel():
                    signed[name, tensor.start] = signed_term(tensor)
                    target[_slices(tensor.box.shape, tensor.start)].copy_(tensor.box, non_blocking=True)
            elif len(tensors) % self._ranks.size == self._ranks.rank:
                signed[name, ()] = signed_checksum(tensor)
                target.copy_(tensor, non_blocking=True)
            tensors[name] = tensor.dtype, tensor.shape, start
            nbytes += tensor.nbytes
        if tensors:
            yield part()
            self._ranks(None)

    @abstractmethod
    def _location(self) -> Mapping[str, object]:
        """Return the location of the memory, for other processes."""

    @abstractmethod
    def _has_room(self, size: int) -> bool:
        """Return whether the part under way, whose bytes stay, may grow to ``size`` bytes."""

    @abstractmethod
    def _make_room(self, size: int, part_bytes: int) -> None:
        """Provide at least ``size`` bytes for a new part; nothing of the memory is in use."""


@dataclass(frozen=True)
class _Reserved:
    """The file of a machine, or why its folder has no room for it."""

    path: str = ""
    size: int = 0
    """Bytes."""
    problem: str | None = None
    folder: str = ""
    """The one that is full."""
    has_other_folder: bool = False
    """True if the machine can continue in another folder."""


class FileBuffer(SharedBuffer):
    """A file that the ranks and the engines of a machine map.

    It has no name in its folder: others open it by the process that made it, the first rank, and it ends with the last
    process that has it, however that ends. It stays mapped from update to update, because new pages cost more than a
    copy, and is pinned for GPUs. It grows as parts need it. A part ends early where its folder has no more room, so
    that a small one is enough.

    Args:
        folders: where the file may lie, the first one that has room first; None is memory, and then ``TMPDIR``.
        ranks: see :class:`SharedBuffer`.
    """

    def __init__(self, folders: Sequence[Path] | None = None, ranks: MachineRanks | None = None) -> None:
        super().__init__(ranks)
        self._folders = [*(default_folders() if folders is None else folders)]
        self._file: IO[bytes] | None = None
        self._room = 0
        """Bytes of the file on every machine: each part has the same tensors on all."""
        self.path = ""
        """Path of the file, for processes of this machine."""
        self._paths: dict[str, str] = {}
        """Paths of the files of all machines that are in step."""

    def _location(self) -> Mapping[str, object]:
        return {"paths": self._paths} if len(self._paths) > 1 else {"path": self.path}

    @property
    def memory(self) -> Tensor:
        """The whole file, as this process has mapped it."""
        return self._memory

    def reserve(self, size: int) -> None:
        """Provide at least ``size`` bytes, pinned for GPUs; earlier bytes may be lost.

        Raises:
            RolloutError: there is no room.
        """
        self._make_room(size, size)
        self._pin()

    def grow(self, size: int) -> bool:
        """Provide at least ``size`` bytes if there is room, and keep those that are there."""
        return self._has_room(size)

    def parts(self, weights: Iterable[tuple[str, Tensor | DividedTensor]], part_bytes: int) -> Iterator[SharedPart]:
        """See :meth:`SharedBuffer.parts`."""
        self._pin()  # not each time that it grows, as pinning takes as long as a copy
        yield from super().parts(weights, part_bytes)

    def _pin(self) -> None:
        if not self._memory.is_pinned():
            pin(self._memory, self.path)

    def _has_room(self, size: int) -> bool:
        return not self._grow(size)

    def _make_room(self, size: int, part_bytes: int) -> None:
        while full := self._grow(size):
            # All machines know of all that are full, so that none waits for one that gave up.
            for machine, reserved in full.items():
                if not reserved.has_other_folder:
                    raise RolloutError(
                        f"{size / 2**20:.0f} MiB of new weights cannot be written to {reserved.folder}: "
                        f"{reserved.problem}. Make room there, on {machine.split()[0]}, or point TMPDIR at a folder "
                        "that has it."
                    )
            if self._ranks.machine in full:
                unpin(self._memory)
                self._memory, self._file, self._room = torch.empty(0, dtype=torch.uint8), None, 0
                if self._ranks.rank == 0:
                    self._folders.pop(0)

    def _grow(self, size: int) -> dict[str, _Reserved]:
        """Provide ``size`` bytes, or return the machines whose folder has no room for them."""
        if size <= self._room:
            return {}
        reserved = self._ranks.by_machine(self._reserve(size) if self._ranks.rank == 0 else _Reserved())
        if full := {
            machine: machine_reserved
            for machine, machine_reserved in reserved.items()
            if machine_reserved.problem is not None
        }:
            return full
        local = reserved[self._ranks.machine]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies into the mapping that ends here
        unpin(self._memory)
        self.path = local.path
        self._memory = torch.from_file(local.path, shared=True, size=local.size, dtype=torch.uint8)
        self._room = min(machine_reserved.size for machine_reserved in reserved.values())
        self._paths = {machine: machine_reserved.path for machine, machine_reserved in reserved.items()}
        return {}

    def _reserve(self, size: int) -> _Reserved:
        """Reserve at least ``size`` bytes of the file."""
        held = len(self._memory)
        try:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folders[0])  # noqa: SIM115 - it stays open
            # Reserved, because to write to mapped memory that the file system lacks would end this process.
            allocated = _allocate(self._file.fileno(), max(size, min(2 * held, held + _MAX_GROWTH)), size)
        except OSError as error:
            return _Reserved(
                problem=str(error.strerror), folder=str(self._folders[0]), has_other_folder=len(self._folders) > 1
            )
        return _Reserved(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", allocated)


class DeviceBuffer(SharedBuffer):
    """Memory on a device, which an engine's process opens by a handle: no byte leaves the device.

    It is allocated for each update, since training needs the memory in between. On a CPU it is shared memory, with
    PyTorch's sharing strategy ``file_system`` if the engine is no child of this process.

    Args:
        device: of the trainer and the engine.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def _location(self) -> Mapping[str, object]:
        rebuild, arguments = reduce_tensor(self._memory)
        if self._device.type == "cuda":
            # PyTorch would keep the memory until each handle that it gave was opened and closed, also by an engine
            # that was lost. Here an engine has closed it when it answers, and the memory is freed after that. So this
            # process counts down, and engines do not: below 0 the counter is 2^64 - 1, which keeps the memory for ever.
            torch.UntypedStorage._release_ipc_counter_cuda(*arguments[-4:-2])
            arguments = (*arguments[:-4], *_NO_COUNTER, *arguments[-2:])
        return {"handle": base64.b64encode(ForkingPickler.dumps((rebuild, arguments))).decode()}

    def parts(self, weights: Iterable[tuple[str, Tensor | DividedTensor]], part_bytes: int) -> Iterator[SharedPart]:
        """See :meth:`SharedBuffer.parts`."""
        try:
            yield from super().parts(weights, part_bytes)
        finally:
            self._free()

    def _free(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates next

    def _has_room(self, size: int) -> bool:
        return size <= len(self._memory)

    def _make_room(self, size: int, part_bytes: int) -> None:
        if size <= len(self._memory):
            return
        self._free()
        try:
            with one_allocation():
                self._memory = torch.empty(max(size, part_bytes), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise RolloutError(
                f"{max(size, part_bytes) / 2**20:.0f} MiB for new weights do not fit on {self._device} together "
                "with trainer and engine. Lower rollout.checkpoint_engine.update_weights_bucket_megabytes or "
                "rollout.gpu_memory_utilization, or set actor.fsdp_config.param_offload=true."
            ) from error


def buffer_for(device: torch.device, engine_devices: Sequence[str | None]) -> SharedBuffer:
    """Return memory that all processes of one engine reach.

    It is on the trainer's GPU if that is the GPU of each of the engine's processes, and otherwise in a file.

    Args:
        device: of the trainer's rank that sends the weights.
        engine_devices: ``verl_engine.device_uuid`` of each process of the engine.
    """
    is_on_gpus = device.type == "cuda" and None not in engine_devices
    if is_on_gpus and set(engine_devices) == {device_uuid(device)}:
        return DeviceBuffer(device)
    return FileBuffer()


def default_folders() -> list[Path]:
    """Folders for weights on their way: memory, if processes may write there, and ``TMPDIR``."""
    in_memory = [Path(SHARED_MEMORY)] if os.access(SHARED_MEMORY, os.W_OK) else []
    return [*in_memory, Path(tempfile.gettempdir())]


def _allocate(file: int, preferred: int, needed: int) -> int:
    """Reserve ``preferred`` bytes of a file, or at least those needed; return how many."""
    try:
        os.posix_fallocate(file, 0, preferred)
    except OSError:
        if preferred == needed:
            raise
        return _allocate(file, needed, needed)
    return preferred


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
    tried = ", ".join(f"{folder} ({room / 2**20:.0f} MiB free)" for folder, room in free.items())
    raise RolloutError(
        f"{size / 2**20:.0f} MiB of {what} fit into none of {tried}. Make room, or point TMPDIR at a folder that "
        "has it."
    )
