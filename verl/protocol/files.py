"""Batches in files that hold data and nothing else.

A file is in the safetensors format: a JSON header, then raw bytes. Reading it never runs code from
it, whoever wrote it; a pickle is refused. Beside the tensor columns there is one entry of JSON text
with everything else; arrays, tensors and bytes inside of that are entries of their own.

Non-tensor columns and ``meta_info`` may hold None, bool, int, float, str, bytes, numpy scalars,
numpy arrays (numbers, booleans, strings, objects of these kinds), tensors, and lists, tuples and
dicts of all these.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from verl.errors import DataError
from verl.protocol.columns import object_array

FORMAT = "verl.DataProto.1"
TREE = "tree"
TAG = "$"

DAMAGED = (safetensors.SafetensorError, KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError)

Batch = tuple[tuple[int, ...], dict[str, Tensor]]


def write(path: str | PathLike[str], batch: Batch | None, columns: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Write batch size and tensor columns, non-tensor columns and ``meta_info``; folders are made.

    Raises:
        DataError: a value is of a type that data files do not hold.
    """
    encoder = _Encoder()
    tree = {
        "batch_size": None if batch is None else list(batch[0]),
        "batch": {key: encoder.encode(value, f"column '{key}'") for key, value in (batch[1] if batch else {}).items()},
        "non_tensor_batch": {key: encoder.encode(value, f"column '{key}'") for key, value in columns.items()},
        "meta_info": {key: encoder.encode(value, f"meta_info '{key}'") for key, value in meta.items()},
    }
    text = json.dumps(tree, ensure_ascii=False).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    entries = {**encoder.tensors, TREE: _bytes_tensor(text)}
    safetensors.torch.save_file(entries, path, metadata={"format": FORMAT})


def read(path: str | PathLike[str]) -> tuple[Batch | None, dict[str, np.ndarray], dict[str, Any]]:
    """What ``write`` wrote.

    Raises:
        DataError: there is no such file, it is damaged, or not written by ``write``.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; expected one that DataProto.save_to_disk wrote.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise DataError(f"{path}: a safetensors file, but not one that DataProto.save_to_disk wrote.")
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        tree = json.loads(tensors[TREE].numpy().tobytes())
        decode = _Decoder(tensors).decode
        columns = {key: decode(value) for key, value in tree["non_tensor_batch"].items()}
        meta = {key: decode(value) for key, value in tree["meta_info"].items()}
        batch = {key: decode(value) for key, value in tree["batch"].items()}
        return None if tree["batch_size"] is None else (tuple(tree["batch_size"]), batch), columns, meta
    except DAMAGED as error:
        raise DataError(
            f"{path}: damaged, or not a file that DataProto.save_to_disk wrote ({error}). Pickle files are not "
            "read, as they could run code. Write the file anew."
        ) from error


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


class _Encoder:
    """Values to JSON; tensors, arrays of numbers and bytes are set apart and referred to by number."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.encode(item, where) for item in value]
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, where) for key, item in value.items()}
        return self._tagged(value, where)

    def _tagged(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {TAG: "tensor", "value": self._apart(value)}
        if isinstance(value, bytes):
            return {TAG: "bytes", "value": self._apart(_bytes_tensor(value))}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            raw = self._apart(torch.from_numpy(flat.copy()))
            return {TAG: "array", "value": raw, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "UO":
            items = [self.encode(item, where) for item in value.ravel().tolist()]
            return {TAG: "objects", "value": items, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, tuple):
            return {TAG: "tuple", "value": [self.encode(item, where) for item in value]}
        if type(value) is dict:
            pairs = [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]
            return {TAG: "dict", "value": pairs}
        raise DataError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which a data file cannot. "
            "Drop it with select or pop, or convert it to numbers, text, lists, dicts, arrays or tensors."
        )

    def _apart(self, tensor: Tensor) -> str:
        name = str(len(self.tensors))
        # safetensors refuses tensors that share memory.
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


class _Decoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        return self._tagged(value[TAG], value["value"], value)

    def _tagged(self, tag: str, content: Any, value: dict[str, Any]) -> Any:
        match tag:
            case "tensor":
                return self.tensors[content]
            case "bytes":
                return self.tensors[content].numpy().tobytes()
            case "array":
                array = self.tensors[content].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"])
                return array if array.ndim else array[()]
            case "objects":
                return object_array(self.decode(content)).astype(np.dtype(value["dtype"])).reshape(value["shape"])
            case "tuple":
                return tuple(self.decode(content))
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in content}
        raise KeyError(f"unknown kind of value '{tag}'")
