"""The decorator ``@register``, which makes a worker's method callable on its worker group.

::

    class Echo(Worker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
        def double(self, batch: DataProto) -> DataProto: ...

    group.double(batch)     # split over the data-parallel ranks, run on all, outputs concatenated

The dispatch modes, implemented in :mod:`verl.single_controller.base.dispatch`:

====================== ============================================= ===================================
``Dispatch``           rank r gets                                   the driver gets
====================== ============================================= ===================================
RANK_ZERO              everything, on rank 0 only                    rank 0's output
ONE_TO_ALL             everything                                    list of outputs
ALL_TO_ALL, DP_COMPUTE element r of each argument                    list of outputs
DP_COMPUTE_PROTO       part r of each batch, the rest as it is       concatenated outputs
..._PROTO_WITH_FUNC    a function, then as DP_COMPUTE_PROTO          concatenated outputs
DP_COMPUTE_METRIC      part r of each batch, never padded            list of outputs
DIRECT_ROLLOUT_METHOD  (called on the worker itself)
nd compute             the part of its data-parallel rank in a mesh  concatenated, one per data-parallel rank
====================== ============================================= ===================================
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Self, TypedDict, TypeVar

import torch

from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.single_controller.base import dispatch as modes
from verl.single_controller.base.call_times import timed_call

MAGIC_ATTR = "__verl_registration__"

Method = TypeVar("Method", bound=Callable[..., Any])


class DispatchPair(TypedDict):
    """The functions of a dispatch mode that split arguments over the ranks and combine their outputs."""

    dispatch_fn: Callable[..., tuple[Sequence[object], Mapping[str, object]]]
    collect_fn: Callable[..., object]


class _Members(type):
    """Metaclass that makes :class:`DynamicEnum` classes iterable and subscriptable, like those of ``enum``."""

    _members: dict[str, DynamicEnum]

    def __iter__(cls) -> Iterator[DynamicEnum]:
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, member: object) -> bool:
        return member in cls._members.values()

    def __getitem__(cls, name: str) -> DynamicEnum:
        if name not in cls._members:
            near = suggest(name, list(cls._members))
            raise ConfigError(f"unknown {cls.__name__} mode '{name}'.{near} Known: {', '.join(cls._members)}.")
        return cls._members[name]


class DynamicEnum(metaclass=_Members):
    """Enumeration that :meth:`register` can extend at run time."""

    _members: ClassVar[dict[str, DynamicEnum]]

    def __init_subclass__(cls) -> None:
        cls._members = {}

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    @classmethod
    def register(cls, name: str) -> Self:
        """Add the member ``name`` in upper case and return it; return an existing one unchanged."""
        name = name.upper()
        if name not in cls._members:
            member = cls(name, len(cls._members))
            cls._members[name] = member
            setattr(cls, name, member)
        member = cls._members[name]
        assert isinstance(member, cls)
        return member

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], DynamicEnum], tuple[str]]:
        # Unpickling registers the member: a worker process has not run the script that registered it in the driver.
        return type(self).register, (self.name,)


class Dispatch(DynamicEnum):
    """Modes of splitting arguments over the ranks and collecting outputs; see the table of this module."""

    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]


class Execute(DynamicEnum):
    """Ranks that run the method: all, or rank 0 alone."""

    ALL: ClassVar[Execute]
    RANK_ZERO: ClassVar[Execute]


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, DispatchPair] = {}
"""Functions of the dispatch modes: code outside may read, replace and add some."""


def _checked_pair(pair: Mapping[str, Any]) -> DispatchPair:
    if not isinstance(pair, Mapping) or set(pair) != {"dispatch_fn", "collect_fn"}:
        raise ConfigError(
            f"a dispatch mode is a member of Dispatch or a dict with 'dispatch_fn' and 'collect_fn', got {pair!r}."
        )
    for name, function in pair.items():
        if not callable(function):
            raise ConfigError(f"{name} of a dispatch mode must be a function, got {function!r}.")
    return DispatchPair(dispatch_fn=pair["dispatch_fn"], collect_fn=pair["collect_fn"])


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]
) -> None:
    """Set or replace the functions of a dispatch mode."""
    if dispatch_mode not in Dispatch:
        raise ConfigError(f"{dispatch_mode!r} is no dispatch mode. Register it first: Dispatch.register(name).")
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _checked_pair({"dispatch_fn": dispatch_fn, "collect_fn": collect_fn})


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., object], collect_fn: Callable[..., object]
) -> Dispatch:
    """Add the dispatch mode ``Dispatch.<NAME>``.

    Args:
        dispatch_mode_name: name of the new member, in any case.
        dispatch_fn: ``(group, *args, **kwargs) -> args, kwargs``, each value a list with one element per rank.
        collect_fn: ``(group, outputs) -> result``.
    """
    if dispatch_mode_name.upper() in [mode.name for mode in DISPATCH_MODE_FN_REGISTRY]:
        raise ConfigError(
            f"dispatch mode '{dispatch_mode_name}' exists already. Choose another name, or replace its functions "
            "with update_dispatch_mode."
        )
    mode = Dispatch.register(dispatch_mode_name)
    update_dispatch_mode(mode, dispatch_fn, collect_fn)
    return mode


for _name, _dispatch_fn, _collect_fn in (
    ("RANK_ZERO", modes.dispatch_as_is, modes.collect_as_is),
    ("ONE_TO_ALL", modes.dispatch_one_to_all, modes.collect_as_is),
    ("ALL_TO_ALL", modes.dispatch_as_is, modes.collect_as_is),
    ("DP_COMPUTE", modes.dispatch_as_is, modes.collect_as_is),
    ("DP_COMPUTE_PROTO", modes.dispatch_dp_compute_data_proto, modes.collect_dp_compute_data_proto),
    ("DP_COMPUTE_PROTO_WITH_FUNC", modes.dispatch_dp_compute_data_proto_with_func, modes.collect_dp_compute_data_proto),
    ("DP_COMPUTE_METRIC", modes.dispatch_dp_compute_metric, modes.collect_as_is),
    ("DIRECT_ROLLOUT_METHOD", modes.dispatch_refused, modes.collect_as_is),
):
    register_dispatch_mode(_name, _dispatch_fn, _collect_fn)

_BATCH_MODES = (Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, Dispatch.DP_COMPUTE_METRIC)

Execute.register("ALL")
Execute.register("RANK_ZERO")


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchPair:
    """Dispatch mode that splits batches over the data-parallel ranks of a device mesh.

    Each rank registers its coordinates with ``_register_dispatch_collect_info(mesh_name, dp_rank, is_collect)``
    before the first call. Ranks with the same ``dp_rank`` get the same part of a batch, and only the output of the
    one with ``is_collect`` is used. A batch that does not divide evenly is padded with repeated rows, which are
    removed from the output.
    """
    return {
        "dispatch_fn": functools.partial(modes.dispatch_nd_compute_data_proto, mesh_name),
        "collect_fn": functools.partial(modes.collect_nd_compute_data_proto, mesh_name),
    }


def get_dispatch_pair(dispatch_mode: Dispatch | Mapping[str, object]) -> DispatchPair:
    """Return the functions of a dispatch mode."""
    if not isinstance(dispatch_mode, Dispatch):
        return _checked_pair(dispatch_mode)
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ConfigError(f"{dispatch_mode!r} has no functions yet. Set them with update_dispatch_mode.")
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


get_predefined_dispatch_fn = get_dispatch_pair
"""Public name of :func:`get_dispatch_pair`."""


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """Return the name of the worker group's method that runs an execute mode: ``{"execute_fn_name": ...}``."""
    return {"execute_fn_name": "execute_rank_zero" if execute_mode is Execute.RANK_ZERO else "execute_all"}


def mesh_of(dispatch_mode: Dispatch | Mapping[str, object]) -> str | None:
    """Return the name of the mesh of :func:`make_nd_compute_dataproto_dispatch_fn`; None for other modes."""
    dispatch = get_dispatch_pair(dispatch_mode)["dispatch_fn"]
    is_nd = isinstance(dispatch, functools.partial) and dispatch.func is modes.dispatch_nd_compute_data_proto
    return dispatch.args[0] if is_nd else None


@dataclass(frozen=True)
class Registration:
    """Arguments that ``@register`` stores on a method."""

    dispatch_mode: Dispatch | Mapping[str, object]
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    wrapper: Callable[..., object]
    """The decorated method."""


def register(
    dispatch_mode: Dispatch | Mapping[str, object] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Make a worker's method callable on its worker group.

    Args:
        dispatch_mode: a member of :class:`Dispatch`, or a dict with ``dispatch_fn`` and ``collect_fn``.
        execute_mode: run on all ranks, or on rank 0 alone (``Dispatch.RANK_ZERO`` implies it).
        blocking: wait for the result. Otherwise the call returns a ``DataProtoFuture`` for modes that concatenate
            outputs, and for other modes Ray object references, or plain values with the local controller.
        materialize_futures: resolve ``DataProtoFuture`` arguments before the method runs.

    Raises:
        ConfigError: a mode is invalid, the two modes contradict each other, or the method is a coroutine.
    """
    if not isinstance(dispatch_mode, Dispatch):
        _checked_pair(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ConfigError(f"execute_mode must be one of {list(Execute)}, got {execute_mode!r}.")
    dispatch_mode, execute_mode = _reconciled(dispatch_mode, execute_mode)

    def decorate(method: Method) -> Method:
        if inspect.iscoroutinefunction(method):
            raise ConfigError(
                f"{method.__qualname__} is a coroutine; a rank runs one call after the other. Make it an ordinary "
                "method, and run the event loop inside of it."
            )

        @functools.wraps(method)
        def inner(self: object, *args: object, **kwargs: object) -> object:
            with noting_rank(self, method.__name__):
                (args, kwargs), padded = modes.receive(args, kwargs, materialize_futures)
                return modes.remove_padding(method(self, *args, **kwargs), padded)

        setattr(inner, MAGIC_ATTR, Registration(dispatch_mode, execute_mode, blocking, materialize_futures, inner))
        return inner  # pyright: ignore[reportReturnType]

    return decorate


@contextmanager
def noting_rank(worker: object, method: str) -> Iterator[None]:
    """Time the block, mark it in profiles; add worker, method, rank and time (``failed_at``) to an exception."""
    name = f"{type(worker).__name__}.{method}"
    try:
        with timed_call(name), torch.profiler.record_function(name):
            yield
    except Exception as error:  # methods raise anything; raised again with a note
        # Registered methods may call each other; only the innermost one, where the error arose, is noted.
        if not hasattr(error, "failed_at"):
            error.add_note(f"raised in {name} on rank {getattr(worker, 'rank', '?')}")
            error.failed_at = time.time()  # pyright: ignore[reportAttributeAccessIssue]
        raise


def _reconciled(
    mode: Dispatch | Mapping[str, object], execute: Execute
) -> tuple[Dispatch | Mapping[str, object], Execute]:
    if mode is Dispatch.RANK_ZERO:
        return mode, Execute.RANK_ZERO
    if execute is Execute.RANK_ZERO:
        if mode in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
            # Rank 0 gets the arguments as the driver passes them, not wrapped into lists with one element per rank.
            return Dispatch.RANK_ZERO, execute
        if mode in (Dispatch.DP_COMPUTE, *_BATCH_MODES):
            raise ConfigError(
                f"{mode!r} deals a part to every rank, and with Execute.RANK_ZERO only rank 0 would compute. Use "
                "Execute.ALL, or Dispatch.RANK_ZERO."
            )
    return mode, execute


def undecorated(method: Callable[..., object]) -> Callable[..., object]:
    """Return a bound method without the wrapper of ``@register``, for callers that do the wrapper's work themselves.

    A method with a further decorator around ``@register`` is returned unchanged.
    """
    function: Any = getattr(method, "__func__", None)
    registration = getattr(function, MAGIC_ATTR, None)
    # functools.wraps of an outer decorator copies the attribute, so it may belong to another function.
    if registration is None or registration.wrapper is not function:
        return method
    return MethodType(function.__wrapped__, method.__self__)
