"""How the arguments of one call are dealt to the ranks, and how their outputs become one result.

A dispatch mode is a pair of functions::

    dispatch_fn(group, *args, **kwargs) -> args, kwargs      each value a list, one element per rank
    collect_fn(group, outputs)          -> result            outputs: a list in the order of ranks

With ``Execute.RANK_ZERO`` the values and the output are those of rank 0, without lists around them.
The outputs of a call that is not waited for come as :class:`Pending`.

A batch (``DataProto``, ``TensorDict``, ``DataProtoFuture``) is cut into contiguous equal parts, one
for each data-parallel rank. Where the rows do not divide, the parts are filled up with repeated rows;
the part itself knows how many (:class:`Share`), and the worker that received it takes them off its
output again, so that the padding is never seen outside of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import numpy as np
import torch

from verl.errors import SchemaError, WorkerError
from verl.protocol import DataProto, DataProtoConfig, DataProtoFuture
from verl.protocol.tensordicts import is_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.single_controller.base.worker_group import WorkerGroup

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Padding = Literal["always", "if enabled", "never"]
T = TypeVar("T")


class Pending(list[T]):
    """Outputs of a call that was not waited for: references of Ray, or values that are here already.

    Args:
        outputs: one for each rank, or for some of them.
        method: what was called, for messages.
        ranks: whose outputs they are; None if it is all of them in their order.
    """

    def __init__(self, outputs: Iterable[T], method: str, ranks: Sequence[int] | None = None) -> None:
        super().__init__(outputs)
        self.method = method
        self.ranks = range(len(self)) if ranks is None else ranks


# ---- parts of a batch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch, whose last ``padding`` rows only fill it up."""

    rows: DataProto | TensorDict
    padding: int


@dataclass(frozen=True)
class FutureShare:
    """One rank's part of a batch that is not here yet; cut by the worker that receives it."""

    future: DataProtoFuture
    index: int
    parts: int
    pad: Padding

    def get(self) -> Share:
        """Wait for the batch and take this part of it."""
        return take_share(self.future.get(), self.index, self.parts, self.pad)

    def later(self) -> DataProtoFuture:
        """The part, still unresolved; the batch must divide, because nobody could remove padding from it."""
        return self.future.chunk(self.parts)[self.index]


def is_batch(value: Any) -> TypeGuard[DataProto | TensorDict]:
    """Whether rows can be taken from ``value``."""
    return isinstance(value, DataProto) or is_tensordict(value)


def take_share(batch: DataProto | TensorDict, index: int, parts: int, pad: Padding) -> Share:
    """The ``index``-th of ``parts`` equal parts of ``batch``, filled up with its first rows where they end.

    Five rows in two parts: rows 0 1 2 and rows 3 4 0, the second with ``padding=1``.

    Raises:
        SchemaError: the rows do not divide and must not be padded.
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
        return Share(_slice(batch, start, stop), 0)
    wrapped = torch.arange(start, stop) % rows
    return Share(batch[wrapped], min(stop - rows, size))


def _may_pad(batch: DataProto | TensorDict, pad: Padding) -> bool:
    if pad != "if enabled":
        return pad == "always"
    return batch.is_padding_enabled() if isinstance(batch, DataProto) else DataProtoConfig.auto_padding


def _slice(batch: DataProto | TensorDict, start: int, stop: int) -> DataProto | TensorDict:
    # A view of a TensorDict would drag its whole storage along when it is pickled; DataProto does not.
    return batch[start:stop] if isinstance(batch, DataProto) else batch[start:stop].clone()


def receive(args: tuple[Any, ...], kwargs: dict[str, Any], materialize: bool) -> tuple[Arguments, Share | None]:
    """What a worker does with the arguments that reach it: futures are resolved, parts unpacked.

    Args:
        args: positional arguments, as they were dealt to this rank.
        kwargs: the arguments by name.
        materialize: wait for futures; otherwise the method gets ``DataProtoFuture`` objects.

    Returns:
        The arguments for the method, and the part whose padding :func:`remove_padding` has to remove.

    Raises:
        SchemaError: the batches of one call have different numbers of rows, and one is padded.
    """
    shares: list[Share] = []
    unpacked = (
        tuple(_unpack(value, materialize, shares) for value in args),
        {name: _unpack(value, materialize, shares) for name, value in kwargs.items()},
    )
    padded = next((share for share in shares if share.padding), None)
    sizes = {(len(share.rows), share.padding) for share in shares}
    if padded and len(sizes) > 1:
        raise SchemaError(
            "the batches of one call must have the same number of rows if they do not divide over the ranks; this "
            f"rank got parts of (rows, padding) {sorted(sizes)}."
        )
    return unpacked, padded


# No closure of `receive`: a function that calls itself by a variable of its surroundings is kept, with all that it
# sees, until the garbage collector comes by, and a batch is nothing that it counts as large.
def _unpack(value: Any, materialize: bool, shares: list[Share]) -> Any:
    if isinstance(value, FutureShare):
        return _unpack(value.get(), materialize, shares) if materialize else value.later()
    if isinstance(value, DataProtoFuture):
        return value.get() if materialize else value
    if isinstance(value, Share):
        shares.append(value)
        return value.rows
    if is_batch(value) and len(value):
        shares.append(Share(value, 0))
    return value


def remove_padding(output: Any, share: Share | None) -> Any:
    """``output`` without the rows that belong to the padding of ``share``.

    Raises:
        SchemaError: the output has not one row per row of the input, so the repeated samples are
            part of its numbers and nobody can take them out.
    """
    if share is None:
        return output
    rows = len(share.rows)
    if is_batch(output) and len(output) == rows:
        return output[: rows - share.padding]
    found = f"a {type(output).__name__}" + (f" of {len(output)} rows" if hasattr(output, "__len__") else "")
    raise SchemaError(
        f"the batch did not divide over the ranks and was padded ({share.padding} of the {rows} rows of this rank are "
        f"repeated samples), but the method returned {found}, from which they cannot be removed. Pass a number of "
        "rows that is a multiple of the data-parallel size, or return one row per row."
    )


# ---- dispatch functions ---------------------------------------------------------------------------


def dispatch_one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Every rank gets the same arguments."""
    n = group.world_size
    return tuple([value] * n for value in args), {name: [value] * n for name, value in kwargs.items()}


def dispatch_as_is(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The arguments are lists with one element per rank already, or go to rank 0 alone."""
    return args, kwargs


def dispatch_dp_compute_data_proto(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Batches are cut into one part per rank; padded only if the batch allows it. The rest is replicated."""
    return _deal(list(range(group.world_size)), "if enabled", args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The first argument is a function for every rank, the others as in DP_COMPUTE_PROTO.

    Raises:
        WorkerError: the first argument cannot be called.
    """
    if not args or not callable(args[0]):
        raise WorkerError("Dispatch.DP_COMPUTE_PROTO_WITH_FUNC expects a function as its first argument.")
    return dispatch_dp_compute_data_proto(group, *args, **kwargs)


def dispatch_dp_compute_metric(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Batches are cut into one part per rank, and never padded: a repeated sample would count twice."""
    return _deal(list(range(group.world_size)), "never", args, kwargs)


def dispatch_nd_compute_data_proto(mesh_name: str, group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Batches are cut into one part per data-parallel rank of the mesh, padded where they do not divide.

    Ranks that share a data-parallel rank (tensor or sequence parallel) get the same part.
    """
    return _deal(group.mesh(mesh_name).dp_ranks, "always", args, kwargs)


def dispatch_refused(group: WorkerGroup, *args: Any, **kwargs: Any) -> Arguments:
    """A method of this mode is called on the workers themselves.

    Raises:
        WorkerError: always.
    """
    raise WorkerError(
        "a method with Dispatch.DIRECT_ROLLOUT_METHOD is not called through its worker group. Call it on one rank: "
        "group.workers[rank]."
    )


def _deal(dp_ranks: list[int], pad: Padding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    parts = max(dp_ranks) + 1

    def deal(name: str | int, value: Any) -> list[Any]:
        shares = _cut(name, value, parts, pad)
        return [shares[dp_rank] for dp_rank in dp_ranks]

    return tuple(deal(i, value) for i, value in enumerate(args)), {k: deal(k, value) for k, value in kwargs.items()}


def _cut(name: str | int, value: Any, parts: int, pad: Padding) -> list[Any]:
    if isinstance(value, DataProtoFuture):
        return [FutureShare(value, i, parts, pad) for i in range(parts)]
    if is_batch(value) and len(value):
        shares = [take_share(value, i, parts, pad) for i in range(parts)]
        return [share if share.padding else share.rows for share in shares]
    if isinstance(value, torch.Tensor | np.ndarray):
        raise SchemaError(
            f"argument {name!r} is a bare {type(value).__name__}: it could be meant for every rank, or be cut into one "
            "part for each. Put it into a DataProto to have it cut, or use Dispatch.ONE_TO_ALL."
        )
    return [value] * parts


# ---- collect functions ----------------------------------------------------------------------------


def collect_as_is(group: WorkerGroup, outputs: T) -> T:
    """The outputs as they are: a list in the order of ranks, or the output of rank 0."""
    return outputs


def collect_dp_compute_data_proto(group: WorkerGroup, outputs: list[Any]) -> Any:
    """The outputs of all ranks as one batch, see :func:`join`; a future if the call is not waited for."""
    if isinstance(outputs, Pending):
        future = DataProtoFuture.concat(list(outputs))
        future.wait_fn = functools.partial(group._wait, method=outputs.method, ranks=outputs.ranks)
        return future
    return join(outputs)


def collect_nd_compute_data_proto(mesh_name: str, group: WorkerGroup, outputs: list[Any]) -> Any:
    """As ``collect_dp_compute_data_proto``, of one rank per data-parallel rank, in their order."""
    ranks = group.mesh(mesh_name).collecting_ranks
    chosen = [outputs[rank] for rank in ranks]
    waiting = isinstance(outputs, Pending)
    return collect_dp_compute_data_proto(group, Pending(chosen, outputs.method, ranks) if waiting else chosen)


def join(outputs: list[Any]) -> Any:
    """One result from the outputs of the data-parallel ranks.

    Batches are concatenated. Batches without rows, such as the metrics of an update, become one
    without rows, whose ``meta_info`` is merged as in ``DataProto.concat``. Whatever else a method
    returns comes back as a list, or as None if every rank returned None.

    Raises:
        SchemaError: some ranks returned a batch and others did not.
    """
    kinds = {type(output) for output in outputs}
    if all(isinstance(output, DataProto) for output in outputs):
        return DataProto.concat(outputs)
    if all(is_batch(output) for output in outputs) and len(kinds) == 1:
        return torch.cat(outputs)
    if any(is_batch(output) for output in outputs):
        names = sorted(kind.__name__ for kind in kinds)
        raise SchemaError(f"the ranks returned different kinds of results ({', '.join(names)}); all must return one.")
    return None if kinds == {type(None)} else list(outputs)
