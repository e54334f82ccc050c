"""A batch that other processes are still computing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from verl.errors import SchemaError
from verl.protocol.copies import private_copy
from verl.protocol.data_proto import DataProto

DispatchFn = Callable[[DataProto], DataProto]


@dataclass
class DataProtoFuture:
    """The parts of a batch that is not here yet, one per rank, and what to do when they are.

    The driver can hand it on to other workers without waiting: each of them gets its own chunk and
    resolves it there, so that the columns never pass through the driver.

    Args:
        collect_fn: joins the parts, as ``DataProto.concat`` does.
        futures: references of Ray; also batches that are here already, as the local controller has
            them, and other ``DataProtoFuture``.
        dispatch_fn: takes from the joined batch what is meant for the receiver; None takes all.
        wait_fn: gives the results of ``futures`` in the process that made them, with the errors of the group
            that computes them; elsewhere, and for None, references are resolved as they are.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: DispatchFn | None = None
    wait_fn: Callable[[list[Any]], list[Any]] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """The future of the parts' concatenation."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` futures: the i-th gives the i-th of ``chunks`` equal parts."""
        return [replace(self, dispatch_fn=partial(_take, self.dispatch_fn, i, chunks)) for i in range(chunks)]

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: it does not know the group."""
        return {**vars(self), "wait_fn": None}

    def get(self) -> DataProto:
        """Wait for the parts and join them.

        Raises:
            SchemaError: a worker returned something else than a ``DataProto``.
            ProcessLostError: a worker died before it answered.
        """
        parts = _resolve(self.futures, self.wait_fn or _fetch)
        for rank, part in enumerate(parts):
            if not isinstance(part, DataProto):
                raise SchemaError(
                    f"part {rank} of a DataProtoFuture is a {type(part).__name__}. A method whose results are "
                    "joined to one batch must return a DataProto on every rank."
                )
        whole = self.collect_fn(parts)
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _take(first: DispatchFn | None, i: int, chunks: int, data: DataProto) -> DataProto:
    return (data if first is None else first(data)).chunk(chunks)[i]


def _resolve(futures: list[Any], wait_fn: Callable[[list[Any]], list[Any]]) -> list[Any]:
    # A reference of Ray exists only where Ray is loaded, so nothing needs to be imported here.
    ray = sys.modules.get("ray")
    is_reference = [ray is not None and isinstance(future, ray.ObjectRef) for future in futures]
    references = [future for future, is_ref in zip(futures, is_reference, strict=True) if is_ref]
    fetched = iter(wait_fn(references) if references else [])
    values = [
        # A reference gives everyone who resolves it a batch of their own; so does a batch that is here already.
        next(fetched) if is_ref else private_copy(future)
        for future, is_ref in zip(futures, is_reference, strict=True)
    ]
    return [value.get() if isinstance(value, DataProtoFuture) else value for value in values]


def _fetch(references: list[Any]) -> list[Any]:
    return sys.modules["ray"].get(references)
