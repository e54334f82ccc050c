"""Read the tensors of a ``torch_dist`` checkpoint, as megatron-core writes it, without running code from it.

::

    {folder}/
      metadata.json      {"sharded_backend": "torch_dist", ...}
      .metadata          a pickle: shape and format of each tensor, its boxes, and at which offset of which file each is
      __{R}_{I}.distcp   boxes one after another, each as torch.save writes a tensor
      common.pt          the state that is not divided over ranks; it has no weights and is not read

The pickle is read by an unpickler that knows the classes of such an index by name and makes none of them: what it makes
keeps the fields of an object and does nothing else. A box is read by PyTorch's unpickler of weights.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.boxes import overlap
from verl.checkpoint.files import UNREADABLE
from verl.config.megatron import INDEX
from verl.errors import CheckpointError


class _Object:
    """An object of the index, of which only the state is kept."""

    state: Any = None

    def __new__(cls, *_: object) -> _Object:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_CLASSES = frozenset(
    {
        *(f"{_METADATA}.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_METADATA}.{name}" for name in ("ChunkStorageMetadata", "MetadataIndex", "TensorProperties")),
        *(f"{_METADATA}.{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        # Of the plans by which megatron-core wrote the files.
        *(f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        f"{_PLANNER}.BytesIOWriteData",
        # Of keys and paths.
        "builtins.slice",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    }
)


class _IndexUnpickler(pickle.Unpickler):
    """Makes an :class:`_Object` of every object of :data:`_CLASSES`, and refuses all other names."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._classes: dict[str, type[_Object]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """Return what stands for a name in the pickle."""
        name = f"{module_name}.{global_name}"
        if name == "torch.Size":
            return tuple
        if module_name == "torch" and isinstance(dtype := vars(torch).get(global_name), torch.dtype):
            return dtype
        if name not in _CLASSES:
            raise pickle.UnpicklingError(f"it calls {name}, which no index of tensors contains")
        return self._classes.setdefault(name, type(global_name, (_Object,), {}))

    def persistent_load(self, pid: object) -> object:
        """Refuse references to objects outside of the pickle."""
        raise pickle.UnpicklingError("it refers to objects outside of it")


@dataclass(frozen=True)
class _StoredBox:
    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int


class TorchDistFiles:
    """The tensors of a checkpoint, by name.

    Args:
        folder: with the index in it.

    Raises:
        CheckpointError: the folder is no such checkpoint, or its index is damaged or would run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        if not path.is_file():
            below = sorted(str(index.parent) for index in folder.glob(f"*/{INDEX}"))[:3] if folder.is_dir() else []
            hint = f" Below it are {', '.join(below)}." if below else ""
            raise CheckpointError(
                f"'{folder}' is no torch_dist checkpoint of megatron-core: it has no file {INDEX}.{hint} Name the "
                "folder that has it and files __*.distcp. Other formats (zarr, fsdp_dtensor) are not read."
            )
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of all tensors in the checkpoint."""
        self.dtypes: dict[str, torch.dtype] = {}
        self._boxes: dict[str, list[_StoredBox]] = {}
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            self._read_index(index)
        except (*UNREADABLE, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is not the index of a checkpoint as PyTorch and megatron-core write it "
                f"({type(error).__name__}: {error}). No code of it was run. Take a checkpoint from people you trust, "
                "or convert it again."
            ) from error

    def _read_index(self, index: _Object) -> None:
        """Fill the tables; the types are those of the file, so every field is checked."""
        stored: dict[tuple[str, tuple[int, ...]], _Object] = {}
        for key, info in index["storage_data"].items():
            if (start := key.state.get("offset")) is not None:
                stored[key["fqn"], tuple(start)] = info
        for name, tensor in index["state_dict_metadata"].items():
            if type(tensor).__name__ != "TensorStorageMetadata":
                continue  # bytes, such as states of random numbers
            shape, dtype = tuple(tensor["size"]), tensor["properties"].state[0]
            if not _are_sizes(shape) or not isinstance(dtype, torch.dtype) or not isinstance(name, str):
                raise ValueError(f"{name!r:.80} has no shape and format")
            self.shapes[name], self.dtypes[name] = shape, dtype
            self._boxes[name] = []
            for chunk in tensor["chunks"]:
                start, size = tuple(chunk["offsets"]), tuple(chunk["sizes"])
                info = stored[name, start].state
                file, offset, length = info["relative_path"], info["offset"], info["length"]
                if not (len(start) == len(size) == len(shape) and _are_sizes((*start, *size, offset, length))):
                    raise ValueError(f"{name!r:.80} has a box that does not lie in it")
                if not isinstance(file, str) or Path(file).name != file:
                    raise ValueError(f"{name!r:.80} is in {file!r:.80}, which is no file of the folder")
                if info.get("transform_descriptors"):
                    raise ValueError(f"{name!r:.80} is compressed, which is not read")
                self._boxes[name].append(_StoredBox(start, size, file, offset, length))

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Copy one box of the tensor ``name`` out of the files; only stored boxes that overlap with it are read.

        Raises:
            CheckpointError: a file is missing or damaged, or they lack some of the elements.
        """
        result = torch.empty(tuple(size), dtype=self.dtypes[name])
        missing = torch.ones(tuple(size), dtype=torch.bool)
        for box in self._boxes[name]:
            parts = overlap(box.start, box.size, start, size)
            if parts is not None:
                source_part, result_part = parts
                result[result_part] = self._read_box(name, box)[source_part]
                missing[result_part] = False
        if bool(missing.any()):
            raise CheckpointError(f"the files of '{self.folder}' do not contain all parts of '{name}'.")
        return result

    def _read_box(self, name: str, box: _StoredBox) -> Tensor:
        path = self.folder / box.file
        try:
            if box.offset + box.length > (available := path.stat().st_size):
                raise ValueError(f"it would end at byte {box.offset + box.length} of {available}")
            with path.open("rb") as file:
                file.seek(box.offset)
                packed = io.BytesIO(file.read(box.length))
            values = torch.load(packed, map_location="cpu", weights_only=True)
            if not isinstance(values, Tensor):
                raise TypeError(f"a {type(values).__name__} is in place of a tensor")
            if values.untyped_storage().nbytes() < values.numel() * values.element_size():
                raise ValueError("it has fewer numbers than its shape")  # an expanded view: a copy could be huge
            if values.is_floating_point() != self.dtypes[name].is_floating_point:
                raise TypeError(f"it is {values.dtype}, and {self.dtypes[name]} in the index")
            return values.detach().reshape(box.size)
        except UNREADABLE as error:
            first = (str(error).strip().splitlines() or ["damaged"])[0]
            raise CheckpointError(
                f"{path} cannot be read at the box of '{name}' ({type(error).__name__}: {first}). Copy the checkpoint "
                "again."
            ) from error


def _are_sizes(numbers: Sequence[object]) -> bool:
    return all(type(size) is int and size >= 0 for size in numbers)
