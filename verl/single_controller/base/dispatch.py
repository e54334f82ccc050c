"""Split the arguments of a call over the ranks, and combine their outputs into one result.

A dispatch mode is a pair of functions::

    dispatch_fn(group, *args, **kwargs) -> args, kwargs      each value a list, one element per rank
    collect_fn(group, outputs)          -> result            outputs: a list in the order of ranks

With ``Execute.RANK_ZERO`` the values and the output are those of rank 0, without lists around them.
The outputs of a non-blocking call are :class:`PendingOutputs`.

A batch (``DataProto``, ``TensorDict``, ``DataProtoFuture``) is split into contiguous parts of equal size, one per
data-parallel rank. If the rows do not divide evenly, the last parts are padded with repeated rows. A padded part
carries their number (:class:`BatchPart`), and the worker removes these rows from its output, so the caller never
sees padding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, TypeVar

import numpy as np
import torch

from verl.errors import SchemaError, WorkerError
from verl.protocol import DataProto, DataProtoConfig, DataProtoFuture
from verl.protocol.columns import gather_metrics, is_tensordict, same_value

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[object, ...], dict[str, object]]
Padding = Literal["always", "if enabled", "never"]
T = TypeVar("T")

_ROWS = torch.Tensor | np.ndarray


class CallOutputs(list[T]):
    """Outputs of a call of ``method``, one per rank."""

    def __init__(self, outputs: Iterable[T], method: str) -> None:
        super().__init__(outputs)
        self.method = method


class PendingOutputs(CallOutputs[T]):
    """Outputs of a non-blocking call, one per rank in ``ranks``: Ray object references, or values if local."""

    def __init__(self, outputs: Iterable[T], method: str, ranks: Sequence[int], call_number: int = 0) -> None:
        super().__init__(outputs, method)
        self.ranks = ranks
        self.call_number = call_number
        """Place of the call in the order in which the processes got their calls."""


@dataclass(frozen=True)
class Mesh:
    """Assignment of batch parts to the ranks of a group."""

    dp_ranks: list[int]
    """For each rank, the index of the part that it computes."""
    collecting_ranks: list[int]
    """For each part, the rank whose output is used."""


class CalledGroup(Protocol):
    """The members of a worker group that dispatch modes use."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def mesh(self, mesh_name: str) -> Mesh:
        """Assignment of batch parts to ranks in a mesh."""
        ...

    def wait_for(self, outputs: PendingOutputs[object]) -> list[object]:
        """Wait for the outputs and return their values."""
        ...


# ---- parts of a batch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPart:
    """One rank's part of a batch, whose last ``padding`` rows are repeated rows."""

    rows: DataProto | TensorDict
    padding: int


@dataclass(frozen=True)
class FutureBatchPart:
    """One rank's part of a batch that is still being computed; the receiving worker takes the part."""

    future: DataProtoFuture
    index: int
    parts: int
    pad: Padding

    def get(self) -> BatchPart:
        """Wait for the batch and return this part of it."""
        return take_part(self.future.get(), self.index, self.parts, self.pad)

    def later(self) -> DataProtoFuture:
        """Return this part unresolved; the batch must divide evenly, since its padding could not be removed later."""
        return self.future.chunk(self.parts)[self.index]


def is_batch(value: object) -> TypeGuard[DataProto | TensorDict]:
    """Return whether ``value`` is a DataProto or a TensorDict."""
    return isinstance(value, DataProto) or is_tensordict(value)


def take_part(batch: DataProto | TensorDict, index: int, parts: int, pad: Padding) -> BatchPart:
    """Return part ``index`` of ``parts`` equal parts of a batch, padded with the batch's first rows.

    Five rows in two parts: rows 0 1 2, and rows 3 4 0 with ``padding=1``.

    Raises:
        SchemaError: the rows do not divide evenly and ``pad`` forbids padding.
    """
    rows = len(batch)
    if rows % parts and not _may_pad(batch, pad):
        raise SchemaError(
            f"a batch of {rows} rows cannot be dealt to {parts} data-parallel ranks in equal parts. Pass a multiple "
            f"of {parts}, e.g. {rows // parts * parts or parts} rows"
            + ("." if pad == "never" else ", or allow padding: DataProto.from_dict(..., auto_padding=True).")
        )
    size = -(-rows // parts)
    start, stop = index * size, (index + 1) * size
    if stop <= rows:
        # Pickling a view of a TensorDict includes its whole storage; pickling a DataProto does not.
        part = batch.part(start, stop) if isinstance(batch, DataProto) else batch[start:stop].clone()
        return BatchPart(part, 0)
    wrapped = torch.arange(start, stop) % rows
    return BatchPart(batch[wrapped], min(stop - rows, size))


def _may_pad(batch: DataProto | TensorDict, pad: Padding) -> bool:
    if pad != "if enabled":
        return pad == "always"
    return batch.is_padding_enabled() if isinstance(batch, DataProto) else DataProtoConfig.auto_padding


def receive(
    args: tuple[object, ...], kwargs: dict[str, object], materialize: bool
) -> tuple[Arguments, BatchPart | None]:
    """Resolve futures and unpack batch parts among the arguments that a worker received.

    With ``materialize=False`` the method gets ``DataProtoFuture`` objects.

    Returns:
        The arguments for the method, and the padded part, if any, for :func:`remove_padding`.

    Raises:
        SchemaError: the batches of one call have different numbers of rows, and one is padded.
    """
    parts: list[BatchPart] = []
    unpacked = (
        tuple(_unpack(value, materialize, parts) for value in args),
        {name: _unpack(value, materialize, parts) for name, value in kwargs.items()},
    )
    padded = next((part for part in parts if part.padding), None)
    sizes = {(len(part.rows), part.padding) for part in parts}
    if padded and len(sizes) > 1:
        raise SchemaError(
            "the batches of one call must have the same number of rows if they do not divide over the ranks; this "
            f"rank got parts of (rows, padding) {sorted(sizes)}."
        )
    return unpacked, padded


# Not a closure of `receive`: a recursive closure is a reference cycle, which would keep the batch in memory until the
# garbage collector runs, and the collector counts objects, not bytes.
def _unpack(value: object, materialize: bool, parts: list[BatchPart]) -> object:
    if isinstance(value, FutureBatchPart):
        return _unpack(value.get(), materialize, parts) if materialize else value.later()
    if isinstance(value, DataProtoFuture):
        return value.get() if materialize else value
    if isinstance(value, BatchPart):
        parts.append(value)
        return value.rows
    if is_batch(value) and len(value):
        parts.append(BatchPart(value, 0))
    return value


def remove_padding(output: object, part: BatchPart | None) -> object:
    """Return ``output`` without the rows that correspond to the padding of ``part``.

    Raises:
        SchemaError: the output does not have one row per input row, so the contribution of repeated samples cannot
            be removed.
    """
    if part is None:
        return output
    rows = len(part.rows)
    if is_batch(output) and len(output) == rows:
        return output[: rows - part.padding]
    returned = f"a {type(output).__name__}" + (f" of {len(output)} rows" if hasattr(output, "__len__") else "")
    raise SchemaError(
        f"the batch did not divide over the ranks and was padded ({part.padding} of the {rows} rows of this rank are "
        f"repeated samples), but the method returned {returned}, from which they cannot be removed. Pass a number of "
        "rows that is a multiple of the data-parallel size, or return one row per row."
    )


# ---- dispatch functions ---------------------------------------------------------------------------


def dispatch_one_to_all(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Give every rank the same arguments."""
    n = worker_group.world_size
    return tuple([value] * n for value in args), {name: [value] * n for name, value in kwargs.items()}


def dispatch_as_is(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Pass arguments through: they are lists with one element per rank already, or are for rank 0 alone."""
    return args, kwargs


def dispatch_dp_compute_data_proto(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Split batches into one part per rank, padded only if the batch allows it; replicate other arguments."""
    return _deal(list(range(worker_group.world_size)), "if enabled", args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Give every rank the function that is the first argument; dispatch the others as DP_COMPUTE_PROTO does."""
    if not args or not callable(args[0]):
        raise WorkerError("Dispatch.DP_COMPUTE_PROTO_WITH_FUNC expects a function as its first argument.")
    return dispatch_dp_compute_data_proto(worker_group, *args, **kwargs)


def dispatch_dp_compute_metric(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Split batches into one part per rank, never padded: a repeated sample would count twice in a metric."""
    return _deal(list(range(worker_group.world_size)), "never", args, kwargs)


def dispatch_nd_compute_data_proto(
    mesh_name: str, worker_group: CalledGroup, *args: object, **kwargs: object
) -> Arguments:
    """Split batches into one part per data-parallel rank of the mesh, padded if they do not divide evenly.

    Ranks with the same data-parallel rank (tensor or sequence parallel) get the same part.
    """
    return _deal(worker_group.mesh(mesh_name).dp_ranks, "always", args, kwargs)


def dispatch_refused(worker_group: CalledGroup, *args: object, **kwargs: object) -> Arguments:
    """Raise a WorkerError: methods of this mode are called on a worker, not through the group."""
    raise WorkerError(
        "a method with Dispatch.DIRECT_ROLLOUT_METHOD is not called through its worker group. Call it on one rank: "
        "group.workers[rank]."
    )


def _deal(dp_ranks: list[int], pad: Padding, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
    parts = max(dp_ranks) + 1
    passed = [*enumerate(args), *kwargs.items()]
    has_batch = any(isinstance(value, DataProtoFuture) or is_batch(value) for _, value in passed)
    for name, value in passed:
        _check_argument(name, value, has_batch)

    def deal(value: object) -> list[object]:
        cut = _cut(value, parts, pad)
        return [cut[dp_rank] for dp_rank in dp_ranks]

    return tuple(map(deal, args)), {name: deal(value) for name, value in kwargs.items()}


def _check_argument(name: str | int, value: object, has_batch: bool) -> None:
    """Refuse what could be meant as rows of a batch, and would go whole to every rank."""
    if is_batch(value):
        if not len(value) and _has_columns(value):
            raise SchemaError(f"argument {name!r} is a batch without rows: there is nothing to compute.")
        return
    if isinstance(value, _ROWS):
        inside = f"a bare {type(value).__name__}"
    elif isinstance(value, Mapping | list | tuple) and (
        not has_batch
        or any(
            isinstance(item, _ROWS) or is_batch(item)
            for item in (value.values() if isinstance(value, Mapping) else value)
        )
    ):
        inside = f"a {type(value).__name__}"
    else:
        return
    raise SchemaError(
        f"argument {name!r} is {inside}: it could be meant for every rank, or be cut into one part for each. Put it "
        "into a DataProto (DataProto.from_dict) to have it cut, or use Dispatch.ONE_TO_ALL."
    )


def _has_columns(batch: DataProto | TensorDict) -> bool:
    """Return whether it has any; a ``DataProto`` may consist of ``meta_info`` alone, which goes to every rank."""
    return not isinstance(batch, DataProto) or bool(list(batch.batch.keys()) or batch.non_tensor_batch)


def _cut(value: object, parts: int, pad: Padding) -> list[object]:
    if isinstance(value, DataProtoFuture):
        return [FutureBatchPart(value, i, parts, pad) for i in range(parts)]
    if is_batch(value) and len(value):
        cut = [take_part(value, i, parts, pad) for i in range(parts)]
        return [part if part.padding else part.rows for part in cut]
    return [value] * parts


# ---- collect functions ----------------------------------------------------------------------------


def collect_as_is(worker_group: CalledGroup, output: T) -> T:
    """Return the outputs unchanged: a list in the order of ranks, or the output of rank 0."""
    return output


def collect_dp_compute_data_proto(worker_group: CalledGroup, output: list[object]) -> object:
    """Combine the outputs of all ranks with :func:`join`, or return a future of a non-blocking call."""
    method = output.method if isinstance(output, CallOutputs) else "the method"
    if not isinstance(output, PendingOutputs):
        return join(output, method)
    ranks, call_number = output.ranks, output.call_number
    future = DataProtoFuture(functools.partial(join_batches, method=method), list(output))
    future.wait_fn = lambda references: worker_group.wait_for(PendingOutputs(references, method, ranks, call_number))
    return future


def collect_nd_compute_data_proto(mesh_name: str, worker_group: CalledGroup, output: list[object]) -> object:
    """Combine the outputs of one rank per data-parallel rank, as ``collect_dp_compute_data_proto`` does."""
    ranks = worker_group.mesh(mesh_name).collecting_ranks
    rank_outputs = [output[rank] for rank in ranks]
    if isinstance(output, PendingOutputs):
        rank_outputs = PendingOutputs(rank_outputs, output.method, ranks, output.call_number)
    elif isinstance(output, CallOutputs):
        rank_outputs = CallOutputs(rank_outputs, output.method)
    return collect_dp_compute_data_proto(worker_group, rank_outputs)


def join(outputs: list[Any], method: str) -> Any:
    """Combine the outputs of the data-parallel ranks.

    Batches are concatenated (see :func:`join_batches`); this includes batches without rows, such as the metrics of an
    update. If all ranks return None, so does the call.

    Raises:
        SchemaError: a rank returned anything else, or some ranks a batch and others not.
    """
    if all(output is None for output in outputs):
        return None
    kinds = {type(output) for output in outputs}
    if all(isinstance(output, DataProto) for output in outputs):
        return join_batches(outputs, method)
    if all(is_batch(output) for output in outputs) and len(kinds) == 1:
        return torch.cat(outputs)
    names = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise SchemaError(
        f"{method} returned {names}; its dispatch mode joins the ranks' results to one batch, so every rank must "
        "return a DataProto, or every rank None. Dispatch.ONE_TO_ALL returns any results, as a list."
    )


def join_batches(batches: Sequence[DataProto], method: str) -> DataProto:
    """Concatenate the batches that the ranks returned.

    An entry of ``meta_info`` that is equal on all ranks is kept. ``metrics`` that differ are gathered: each name has
    the list of all ranks' values, which ``reduce_metrics`` takes. Of another entry that differs the first rank's value
    is kept, with a warning.
    """
    meta_info: dict[str, object] = {}
    for key in dict.fromkeys(key for batch in batches for key in batch.meta_info):
        values = [batch.meta_info[key] for batch in batches if key in batch.meta_info]
        if all(same_value(values[0], value) for value in values):
            meta_info[key] = values[0]
        elif key == "metrics" and all(isinstance(value, Mapping) for value in values):
            meta_info[key] = gather_metrics(values)
        else:
            meta_info[key] = values[0]
            _warn_of_difference(method, key)
    return DataProto.concat([batch.with_meta_info({}) for batch in batches]).with_meta_info(meta_info)


@functools.cache
def _warn_of_difference(method: str, key: str) -> None:
    """Warn once per process: a method is called in every step."""
    logger.warning(
        "the ranks returned different values of meta_info['%s'] from %s; the first rank's is kept. What differs "
        "between the ranks belongs into a column, or into meta_info['metrics'], which are gathered.",
        key,
        method,
    )
