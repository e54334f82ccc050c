"""Store batches in safetensors files: a JSON header and raw bytes, no code.

Reading never runs code from a file, so files of any origin are safe; pickles are refused. Tensor columns, and the
arrays, tensors and bytes inside other values, are entries of the file; the rest is one entry of JSON text.

Non-tensor columns and ``meta_info`` may hold None, bool, int, float, str, bytes, numpy scalars, numpy arrays (numbers,
booleans, strings, objects of these kinds), tensors, :class:`~verl.protocol.shared.SharedTensors`, and lists, tuples and
dicts of all these. Shared tensors are written once, and rows that share them share them again when they are read.
"""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from verl.errors import DataError
from verl.protocol.columns import describe, object_array
from verl.protocol.shared import SharedTensors

FORMAT = "verl.DataProto.1"
TREE = "tree"
TAG = "$"
NUMBERS, OBJECTS = "biufc", "UO"  # kinds of numpy dtypes: booleans and numbers; strings and objects

# What decoding raises for a forged or truncated file; bad JSON is a ValueError.
DAMAGED = (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError)


def write(
    path: str | PathLike[str],
    batch_size: tuple[int, ...] | None,
    tensors: dict[str, Tensor],
    columns: dict[str, np.ndarray],
    meta_info: dict[str, object],
) -> None:
    """Write the parts of a ``DataProto``, creating missing folders and replacing an older file atomically.

    Raises:
        DataError: a part holds what files cannot.
        OSError: the file cannot be written, for example because the disk is full; an older file stays as it is.
    """
    encoder = _Encoder()
    tree = {
        "batch_size": batch_size,
        "batch": {key: encoder.encode(value, f"column '{key}'") for key, value in tensors.items()},
        "non_tensor_batch": {key: encoder.encode(value, f"column '{key}'") for key, value in columns.items()},
        "meta_info": {key: encoder.encode(value, f"meta_info '{key}'") for key, value in meta_info.items()},
    }
    entries = {**encoder.tensors, TREE: _bytes_tensor(json.dumps(tree).encode())}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Not written in place: a batch read from the older file may still have it mapped into memory.
    unfinished = f"{os.fspath(path)}.unfinished"
    try:
        safetensors.torch.save_file(entries, unfinished, metadata={"format": FORMAT})
    except safetensors.SafetensorError as error:  # its own class also for what the system refuses
        Path(unfinished).unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    os.replace(unfinished, path)


def read(
    path: str | PathLike[str],
) -> tuple[tuple[int, ...] | None, dict[str, Tensor], dict[str, np.ndarray], dict[str, object]]:
    """Read batch size, tensors, other columns and ``meta_info`` from a file of :func:`write`, else ``DataError``."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; expected one that DataProto.save_to_disk wrote.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            kind = (file.metadata() or {}).get("format")
            if kind != FORMAT:
                raise ValueError(f"its format is {kind}, not {FORMAT}")
            entries = {key: file.get_tensor(key) for key in file.keys()}
        tree = json.loads(entries[TREE].numpy().tobytes())
        decode = _Decoder(entries).decode
        tensors, columns, meta_info = (
            {key: decode(value) for key, value in tree[part].items()}
            for part in ("batch", "non_tensor_batch", "meta_info")
        )
        return None if tree["batch_size"] is None else tuple(tree["batch_size"]), tensors, columns, meta_info
    except DAMAGED as error:
        raise DataError(
            f"{path}: damaged, or not a file that DataProto.save_to_disk wrote ({error}). Write it anew. Pickle "
            "files are never read, as they could run code."
        ) from error


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


class _Encoder:
    """Encode values as JSON; tensors, numeric arrays and bytes go to ``tensors`` and are referred to by number."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._shared: dict[SharedTensors, int] = {}

    def encode(self, value: object, where: str) -> object:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.encode(item, where) for item in value]
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, where) for key, item in value.items()}
        return self._tagged(value, where)

    def _tagged(self, value: object, where: str) -> dict[str, object]:
        if isinstance(value, Tensor):
            if value.dtype in (torch.complex32, torch.complex128):
                raise DataError(f"{where} holds {describe(value)}; the only complex dtype of data files is complex64.")
            return {TAG: "tensor", "value": self._add_tensor(value)}
        if isinstance(value, bytes):
            return {TAG: "bytes", "value": self._add_tensor(_bytes_tensor(value))}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS + OBJECTS:
            return self._array(np.asarray(value), where)
        if isinstance(value, SharedTensors):
            is_new = value not in self._shared
            index = self._shared.setdefault(value, len(self._shared))
            arrays = {name: self._array(array, where) for name, array in value.arrays().items()} if is_new else None
            return {TAG: "shared", "index": index, "value": arrays}
        if isinstance(value, tuple):
            return {TAG: "tuple", "value": [self.encode(item, where) for item in value]}
        if type(value) is dict:
            pairs = [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]
            return {TAG: "dict", "value": pairs}
        raise DataError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which a data file cannot. "
            "Drop it with select or pop, or convert it to numbers, text, lists, dicts, arrays or tensors."
        )

    def _array(self, array: np.ndarray, where: str) -> dict[str, object]:
        kind = {"dtype": array.dtype.str, "shape": list(array.shape)}
        if array.dtype.kind in OBJECTS:
            return {TAG: "objects", "value": [self.encode(item, where) for item in array.ravel().tolist()], **kind}
        return {TAG: "numbers", "value": self._add_tensor(_bytes_tensor(array.tobytes())), **kind}

    def _add_tensor(self, tensor: Tensor) -> str:
        name = str(len(self.tensors))
        # safetensors refuses tensors that share memory.
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


class _Decoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._shared: dict[int, SharedTensors] = {}

    def decode(self, value: object) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        return self._tagged(value[TAG], value["value"], value)

    def _tagged(self, tag: str, content: Any, value: dict[str, Any]) -> object:
        match tag:
            case "tensor":
                return self.tensors[content]
            case "bytes":
                return self._bytes(content)
            case "numbers":
                return _shaped(np.frombuffer(self._bytes(content), _dtype(value, NUMBERS)).copy(), value)
            case "objects":
                return _shaped(object_array(self.decode(content)).astype(_dtype(value, OBJECTS)), value)
            case "shared":
                if content is not None:
                    arrays = self.decode(content)
                    self._shared[value["index"]] = SharedTensors({k: torch.from_numpy(a) for k, a in arrays.items()})
                return self._shared[value["index"]]
            case "tuple":
                return tuple(self.decode(content))
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in content}
        raise KeyError(f"unknown kind of value '{tag}'")

    def _bytes(self, name: str) -> bytes:
        return self.tensors[name].numpy().tobytes()


def _dtype(value: dict[str, Any], kinds: str) -> np.dtype:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in kinds:
        raise ValueError(f"dtype {dtype} where one of the kinds {kinds} belongs")
    return dtype


def _shaped(array: np.ndarray, value: dict[str, Any]) -> object:
    shaped = array.reshape(value["shape"])
    return shaped if shaped.ndim else shaped[()]
