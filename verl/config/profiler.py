"""Profilers of a run: which tool, at which steps, for which roles and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.problems import Problem

Contents = Literal["cpu", "cuda", "memory", "shapes", "stack"]

_NSYS = (
    "Nsight Systems surrounds a process, so a run cannot start it for itself; start the command under it: nsys profile "
    "--trace=cuda,nvtx,cublas python -m verl.trainer.main_ppo trainer.controller=local and the rest of the command "
    "line, or use torch"
)


@section
class TorchProfilerToolConfig(BaseConfig):
    """The profiler of PyTorch."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.TorchProfilerToolConfig"

    contents: tuple[Contents, ...] = setting(())
    """Activities to record; empty records the time on the CPU and on the GPU."""
    discrete: bool = setting(False)
    """Profile each annotated call separately, instead of everything from start to stop; only for your own workers with
    a `DistProfiler`."""


@section
class ModelToolsConfig(BaseConfig):
    """Settings of the tools for one role."""

    torch: TorchProfilerToolConfig = subsection(TorchProfilerToolConfig)
    """With `global_profiler.tool=torch`."""


@section
class RoleProfilerConfig(BaseConfig):
    """Selection of the ranks of a role that are profiled, at the steps of `global_profiler.steps`."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"

    enable: bool = setting(False)
    """Profile the processes of this role."""
    all_ranks: bool = setting(False)
    """Profile every rank."""
    ranks: tuple[int, ...] = setting(())
    """Ranks to profile."""

    def covers(self, rank: int) -> bool:
        """Return whether ``rank`` is profiled."""
        return self.enable and (self.all_ranks or rank in self.ranks)

    def problems(self, path: str) -> Iterator[Problem]:
        """A role that is profiled has ranks that are."""
        if self.enable and not (self.all_ranks or self.ranks):
            remedy = f"set {path}.ranks=[0], or {path}.all_ranks=true"
            yield Problem(f"{path}.enable", True, "no rank of this role is chosen", remedy=remedy, advice=True)


@section
class ModelProfilerConfig(RoleProfilerConfig):
    """The same, with settings of the tools."""

    tool_config: ModelToolsConfig = subsection(ModelToolsConfig)
    """Settings of the tools."""

    def problems(self, path: str) -> Iterator[Problem]:
        """A rank has one trace per step."""
        yield from super().problems(path)
        if self.tool_config.torch.discrete:
            cause = "a rank writes one trace per step, in which each call is marked"
            yield Problem(f"{path}.tool_config.torch.discrete", True, cause, "false", advice=True)


@section
class RewardProfilerConfig(RoleProfilerConfig):
    """The same, for a reward model; the contents of its traces are those set for the other roles."""


@section
class MemoryHistoryConfig(BaseConfig):
    """The recorder of GPU memory of PyTorch."""

    trace_alloc_max_entries: int = setting(100_000, ge=1)
    """Number of allocations to keep."""
    memory_snapshot_num_steps: int = setting(1, ge=1)
    """Steps of `global_profiler.steps` in one snapshot, which is written after the last of them."""
    context: Literal["all", "state", "alloc"] = setting("all")
    """Events whose stacks are recorded: allocations and frees, allocations only, or memory that is in use."""
    stacks: Literal["all", "python"] = setting("all")
    """Frames of a stack: with those of C++, or those of Python only."""


@section
class GlobalToolsConfig(BaseConfig):
    """Settings of the tools for all roles."""

    torch_memory: MemoryHistoryConfig = subsection(MemoryHistoryConfig)
    """With `tool=torch_memory`."""


@section
class GlobalProfilerConfig(BaseConfig):
    """Profiles of some steps of a run (docs/debugging.md); `profiler` of each role chooses what is recorded."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"

    tool: Literal["torch", "torch_memory"] | None = setting(
        None,
        ignore_values={
            "nsys": _NSYS,
            "npu": "Ascend devices are not in this version; torch and torch_memory are",
            "precision_debugger": "this tool is not in this version; torch and torch_memory are",
        },
    )
    """`torch` (operators and kernels over time), `torch_memory` (GPU memory), or null for no profiler."""
    steps: tuple[int, ...] | None = setting(None)
    """Steps to profile, counted from 1."""
    save_path: str = setting("outputs/profile", path=True)
    """Folder for the files, on the machine of each rank."""
    global_tool_config: GlobalToolsConfig = subsection(GlobalToolsConfig)
    """Settings of the tools."""

    def problems(self, path: str) -> Iterator[Problem]:
        """A tool has steps, and steps have a tool; they are counted from 1."""
        if self.tool and not self.steps:
            yield Problem(f"{path}.steps", self.steps, "no step is chosen", "", f"set {path}.steps=[2]", advice=True)
        if self.steps and not self.tool:
            remedy = f"set {path}.tool=torch, or leave the steps out"
            yield Problem(f"{path}.steps", list(self.steps), "no profiler is chosen", remedy=remedy, advice=True)
        if self.steps and min(self.steps) < 1:
            yield Problem(f"{path}.steps", list(self.steps), "steps are counted from 1", "integers >= 1")
