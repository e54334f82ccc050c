"""The result of a remote call as a batch that may still be computed, and copies of batches within a process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.columns import is_tensordict, make_tensordict
from verl.protocol.data_proto import DataProto

DispatchFn = Callable[[DataProto], DataProto]


@dataclass
class DataProtoFuture:
    """A batch whose parts, one per rank, may still be computed.

    The driver can pass it on to other workers without waiting: each of them resolves it and takes its own chunk, so the
    columns never pass through the driver.

    Args:
        collect_fn: joins the parts, as ``DataProto.concat`` does.
        futures: Ray references, finished batches (from the local controller), or other ``DataProtoFuture``.
        dispatch_fn: takes the receiver's share of the joined batch; None takes all.
        wait_fn: fetches ``futures`` in the process that created them and raises the errors of the worker group that
            computes them. It is not pickled: elsewhere, and for None, references are resolved with ``ray.get``.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[object]
    dispatch_fn: DispatchFn | None = None
    wait_fn: Callable[[list[object]], list[object]] | None = None

    @staticmethod
    def concat(data: list[object]) -> DataProtoFuture:
        """The future of the parts' concatenation."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Split into ``chunks`` futures of contiguous parts, with the sizes of ``DataProto.chunk``."""
        return [replace(self, dispatch_fn=partial(_take, self.dispatch_fn, i, chunks)) for i in range(chunks)]

    def then(self, change: Callable[[DataProto], DataProto]) -> DataProtoFuture:
        """The future of ``change(batch)``, computed where it is waited for."""
        return DataProtoFuture(collect_fn=partial(_changed, change), futures=[self])

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "wait_fn": None}  # it needs the worker group of this process

    def get(self) -> DataProto:
        """Wait for the parts and join them.

        Raises:
            SchemaError: a worker returned something other than a ``DataProto``.
            ProcessLostError: a worker died before it answered.
        """
        parts: list[DataProto] = []
        for rank, part in enumerate(_resolve(self.futures, self.wait_fn or _fetch)):
            if not isinstance(part, DataProto):
                raise SchemaError(
                    f"part {rank} of a DataProtoFuture is a {type(part).__name__}. A method whose results are "
                    "joined to one batch must return a DataProto on every rank."
                )
            parts.append(part)
        joined = self.collect_fn(parts)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)


def wait_for(result: DataProto | DataProtoFuture) -> DataProto:
    """Return the result of a call, which workers may still compute if the method is registered as non-blocking."""
    return result.get() if isinstance(result, DataProtoFuture) else result


def _changed(change: DispatchFn, parts: list[DataProto]) -> DataProto:
    return change(parts[0])


def _take(first: DispatchFn | None, i: int, chunks: int, data: DataProto) -> DataProto:
    return (data if first is None else first(data)).chunk(chunks)[i]


def _resolve(futures: list[object], wait_fn: Callable[[list[object]], list[object]]) -> list[object]:
    # A Ray reference can only exist where Ray is loaded already, so Ray is not imported here.
    ray = sys.modules.get("ray")
    is_reference = [ray is not None and isinstance(future, ray.ObjectRef) for future in futures]
    references = [future for future, is_ref in zip(futures, is_reference, strict=True) if is_ref]
    fetched = iter(wait_fn(references) if references else [])
    values = [
        # Resolving a reference gives each receiver its own batch; a batch of this process is copied to match that.
        next(fetched) if is_ref else private_copy(future)
        for future, is_ref in zip(futures, is_reference, strict=True)
    ]
    return [value.get() if isinstance(value, DataProtoFuture) else value for value in values]


def _fetch(references: list[object]) -> list[object]:
    return sys.modules["ray"].get(references)


def private_copy(value: object) -> Any:
    """Copy a value for a receiver in the same process, so that neither side sees the other's writes.

    This is what pickling does between processes. Tensors, arrays, ``TensorDict`` and ``DataProto`` (with the tensors
    and arrays of its ``meta_info``) are copied; tensors lose their gradient, as in pickling. Objects inside object
    arrays are shared, and any other value is returned as it is.
    """
    if isinstance(value, Tensor) or is_tensordict(value):
        # Not torch's lazy clones: they abort the process when two threads write to one of them.
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, DataProto):
        batch = make_tensordict(
            {key: private_copy(column) for key, column in value.batch.items()}, value.batch.batch_size
        )
        non_tensors = {key: column.copy() for key, column in value.non_tensor_batch.items()}
        meta_info = {key: private_copy(entry) for key, entry in value.meta_info.items()}
        return DataProto(batch, non_tensors, meta_info, value.auto_padding)
    return value
