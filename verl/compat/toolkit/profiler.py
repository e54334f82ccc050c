"""A profiler of one rank, its settings, and the mixin by which a trainer starts and stops it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch

from verl.base.fs import below
from verl.compat.toolkit.timing import marked_range
from verl.config.base import BaseConfig, section, setting
from verl.errors import ConfigError
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.profiling import MemoryTool, ProfilerTool, TorchTool

F = TypeVar("F", bound=Callable[..., object])


@section
class NsightToolConfig(BaseConfig):
    """NVIDIA Nsight Systems."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.NsightToolConfig"

    discrete: bool = setting(False)
    """Profile each annotated call by itself, instead of everything from start to stop."""


@section
class TorchMemoryToolConfig(BaseConfig):
    """The recorder of GPU memory of PyTorch."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.TorchMemoryToolConfig"

    trace_alloc_max_entries: int = setting(100_000, ge=1)
    """Allocations to remember."""
    stack_depth: int = setting(32, ge=1)
    """No effect: PyTorch remembers whole stacks."""


@section
class ProfilerConfig(BaseConfig):
    """Choice of a profiler, of the ranks that it records, and of the folder for its files."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"

    tool: Literal["torch", "torch_memory", "nsys"] | None = setting(None)
    """`torch` (time), `torch_memory` (GPU memory), or `nsys` (this process runs under Nsight Systems)."""
    enable: bool = setting(False)
    """Profile at all."""
    all_ranks: bool = setting(False)
    """Profile every rank."""
    ranks: tuple[int, ...] = setting(())
    """Ranks to profile."""
    save_path: str | None = setting("outputs/profile")
    """Folder of the files."""
    tool_config: Any = setting(None)
    """Settings of the tool, such as a TorchProfilerToolConfig."""
    global_tool_config: Any = setting(None)
    """Settings of all tools, by name, used where tool_config is null."""

    def union(self, other: ProfilerConfig) -> ProfilerConfig:
        """Profile what either of two configurations for one tool profiles."""
        self._same_tool(other)
        return self._with(
            other, self.enable or other.enable, self.all_ranks or other.all_ranks, {*self.ranks, *other.ranks}
        )

    def intersect(self, other: ProfilerConfig) -> ProfilerConfig:
        """Profile what both of two configurations for one tool profile."""
        self._same_tool(other)
        ranks = {rank for rank in {*self.ranks, *other.ranks} if self.covers(rank) and other.covers(rank)}
        return self._with(other, self.enable and other.enable, self.all_ranks and other.all_ranks, ranks)

    def covers(self, rank: int) -> bool:
        """Return whether ``rank`` is profiled."""
        return self.all_ranks or rank in self.ranks

    def _same_tool(self, other: ProfilerConfig) -> None:
        if self.tool != other.tool:
            raise ValueError(f"two profilers cannot become one: {self.tool} and {other.tool}.")

    def _with(self, other: ProfilerConfig, enable: bool, all_ranks: bool, ranks: set[int]) -> ProfilerConfig:
        return ProfilerConfig(
            tool=self.tool,
            enable=enable,
            all_ranks=all_ranks,
            ranks=tuple(sorted(ranks)),
            save_path=self.save_path,
            tool_config=self.tool_config if self.tool_config is not None else other.tool_config,
            global_tool_config=(
                self.global_tool_config if self.global_tool_config is not None else other.global_tool_config
            ),
        )


class DistProfiler:
    """Profiles what this rank does between :meth:`start` and :meth:`stop`, if it is one of the configured ranks.

    ``torch`` writes ``{save_path}/{role}_rank{rank}_{n}.json`` (for Perfetto or chrome://tracing), ``torch_memory``
    ``..._{n}.pickle`` (for https://pytorch.org/memory_viz), ``nsys`` marks the range that a surrounding
    ``nsys profile --capture-range=cudaProfilerApi`` records.

    Args:
        rank: this rank.
        config: which tool, ranks and folder; None profiles nothing.
        tool_config: settings of the tool; by default those in ``config``.

    Raises:
        ConfigError: the tool needs a GPU and there is none, or does not exist.
    """

    def __init__(
        self, rank: int, config: ProfilerConfig | None = None, tool_config: Any = None, **kwargs: object
    ) -> None:
        self.rank = rank
        self.config = ProfilerConfig() if config is None else config
        settings = self.config.tool_config if tool_config is None else tool_config
        if settings is None and isinstance(self.config.global_tool_config, Mapping):
            settings = self.config.global_tool_config.get(self.config.tool)
        self._settings: Mapping[str, Any] = settings or {}
        is_chosen = self.check_enable() and self.check_this_rank()
        self._tool = _tool(self.config.tool, self._settings) if is_chosen else None
        self._is_started = False
        self._recordings = 0

    def check_enable(self) -> bool:
        """Return whether the configuration turns profiling on."""
        return self.config.enable

    def check_this_rank(self) -> bool:
        """Return whether this rank is profiled."""
        return self.config.covers(self.rank)

    def check_this_step(self) -> bool:
        """Return whether this rank is between :meth:`start` and :meth:`stop`."""
        return self._is_started

    def is_discrete_mode(self) -> bool:
        """Return whether each annotated call is profiled by itself."""
        return bool(self._settings.get("discrete", False))

    def start(self, **kwargs: object) -> None:
        """Begin a step to be profiled; ``role`` names its file."""
        if self._tool is None:
            return
        self._is_started = True
        if not self.is_discrete_mode():
            self._begin(str(kwargs.get("role") or "worker"))

    def stop(self) -> None:
        """End the step and write its file."""
        if self._tool is None or not self._is_started:
            return
        self._is_started = False
        if not self.is_discrete_mode():
            self._tool.stop()

    def _begin(self, role: str) -> None:
        assert self._tool is not None
        folder = Path(self.config.save_path or "outputs/profile").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self._tool.start(below(folder, f"{role}_rank{self.rank}_{self._recordings}"))
        self._recordings += 1

    @contextmanager
    def marked(self, name: str, role: str) -> Iterator[None]:
        """Mark the block in the recording; in discrete mode it is a recording of its own."""
        if self._tool is None or not self._is_started:
            yield
            return
        if not self.is_discrete_mode():
            with marked_range(name):
                yield
            return
        self._begin(role)
        try:
            with marked_range(name):
                yield
        finally:
            self._tool.stop()

    @classmethod
    def annotate(
        cls,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        **kwargs_outer: object,
    ) -> Callable[[F], F]:
        """Decorate a method, plain or async, of an object with a ``profiler``: its calls are marked in recordings.

        Args:
            message: name of the mark; the method's by default.
            color: colours, domains and categories have no counterpart in the recordings of PyTorch and are ignored.
            domain: see ``color``.
            category: see ``color``.
            kwargs_outer: ``role`` names the file in discrete mode.
        """

        def decorate(method: F) -> F:
            name = message or method.__name__
            role = str(kwargs_outer.get("role") or name)

            if inspect.iscoroutinefunction(method):

                @functools.wraps(method)
                async def call_async(self: object, *args: object, **kwargs: object) -> object:
                    with _profiler_of(self).marked(name, role):
                        return await method(self, *args, **kwargs)

                return call_async  # type: ignore[return-value]

            @functools.wraps(method)
            def call(self: object, *args: object, **kwargs: object) -> object:
                with _profiler_of(self).marked(name, role):
                    return method(self, *args, **kwargs)

            return call  # type: ignore[return-value]

        return decorate


_IDLE = DistProfiler(rank=0)


def _profiler_of(worker: object) -> DistProfiler:
    return getattr(worker, "profiler", None) or _IDLE


class DistProfilerExtension:
    """Mixin of workers whose profiler the trainer starts and stops."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: object) -> None:
        """Begin a step to be profiled; see :meth:`DistProfiler.start`."""
        self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End it and write its file."""
        self.profiler.stop()


# ---- tools ----------------------------------------------------------------------------------------


def _tool(name: str | None, settings: Mapping[str, Any]) -> ProfilerTool:
    if name is None:
        raise ConfigError("profiler.enable=true needs profiler.tool: torch, torch_memory or nsys.")
    if name != "torch" and not torch.cuda.is_available():
        raise ConfigError(f"profiler.tool={name} records a GPU, and this process sees none. Use torch.")
    if name == "torch":
        return TorchTool(settings.get("contents", ()))
    if name == "torch_memory":
        return MemoryTool(settings.get("trace_alloc_max_entries", 100_000))
    return _NsightTool()


class _NsightTool:
    def start(self, path: Path) -> None:
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.profiler.stop()
