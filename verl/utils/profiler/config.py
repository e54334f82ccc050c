"""Profilers. The sections exist so that scripts compose; turning one on is refused in this version."""

from __future__ import annotations

from typing import Any, ClassVar

from verl.base_config import BaseConfig, section, setting, subsection

NO_PROFILER = "profilers are not in this version; leave it at its default (timing_s/* is always logged)"

PART_OF_PROFILING = "part of profiling, which is not in this version"

_TRACED = "cuda,nvtx,cublas,ucx"


def _nsys_controller() -> dict[str, Any]:
    return {"trace": _TRACED, "cuda-memory-usage": True, "cuda-graph-trace": "graph"}


def _nsys_worker() -> dict[str, Any]:
    return _nsys_controller() | {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}


@section
class NsightToolConfig(BaseConfig):
    """NVIDIA Nsight Systems."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.NsightToolConfig"

    discrete: bool = setting(False, interpolation="${oc.select:global_profiler.global_tool_config.nsys.discrete}")
    """One report per task instead of one per step."""


@section
class GlobalNsightToolConfig(BaseConfig):
    """NVIDIA Nsight Systems, for all processes."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.NsightToolConfig"

    discrete: bool = setting(False)
    """One report per task instead of one per step."""
    controller_nsight_options: dict[str, Any] = setting(factory=_nsys_controller)
    """Options of the profiler around the driver."""
    worker_nsight_options: dict[str, Any] = setting(factory=_nsys_worker)
    """Options of the profiler around the workers."""


@section
class TorchProfilerToolConfig(BaseConfig):
    """The profiler of PyTorch."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.TorchProfilerToolConfig"

    contents: tuple[str, ...] = setting(())
    """What to record besides time: cpu, cuda, memory, shapes, stack."""
    discrete: bool = setting(False)
    """One trace per task instead of one per step."""


@section
class TorchMemoryToolConfig(BaseConfig):
    """The memory recorder of PyTorch."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.TorchMemoryToolConfig"

    trace_alloc_max_entries: int = setting(
        100_000,
        ge=1,
        interpolation="${oc.select:global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries,100000}",
    )
    """Allocations that are remembered."""
    stack_depth: int = setting(
        32, ge=1, interpolation="${oc.select:global_profiler.global_tool_config.torch_memory.stack_depth,32}"
    )
    """Frames that are remembered per allocation."""


@section
class GlobalTorchMemoryToolConfig(BaseConfig):
    """The memory recorder of PyTorch, for all processes."""

    trace_alloc_max_entries: int = setting(100_000, ge=1)
    """Allocations that are remembered."""
    stack_depth: int = setting(32, ge=1)
    """Frames that are remembered per allocation."""
    context: str = setting("all")
    """Which events keep their stack."""
    stacks: str = setting("all")
    """Which stacks are kept."""
    kw_args: dict[str, Any] = setting(factory=dict)
    """Further arguments of the recorder."""


@section
class NPUToolConfig(BaseConfig):
    """The profiler of Ascend devices."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.config.NPUToolConfig"

    contents: tuple[str, ...] = setting(())
    """What to record besides time."""
    level: str = setting("level0")
    """Detail of the recording."""
    analysis: bool = setting(True)
    """Analyse the recording at the end."""
    discrete: bool = setting(False)
    """One recording per task instead of one per step."""


@section
class ToolConfigs(BaseConfig):
    """Settings of each profiler; only those of the chosen tool count."""

    nsys: NsightToolConfig = subsection(NsightToolConfig)
    """NVIDIA Nsight Systems."""
    npu: NPUToolConfig = subsection(NPUToolConfig)
    """The profiler of Ascend devices."""
    torch: TorchProfilerToolConfig = subsection(TorchProfilerToolConfig)
    """The profiler of PyTorch."""
    torch_memory: TorchMemoryToolConfig = subsection(TorchMemoryToolConfig)
    """The memory recorder of PyTorch."""


@section
class ProfilerConfig(BaseConfig):
    """Profiling of one role's workers."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"

    tool: str | None = setting(None, interpolation="${oc.select:global_profiler.tool,null}")
    """Which profiler: nsys, npu, torch, torch_memory."""
    enable: bool = setting(False, refuse=NO_PROFILER)
    """Profile this role."""
    all_ranks: bool = setting(False)
    """Profile every rank of the role."""
    ranks: tuple[int, ...] = setting(())
    """Ranks to profile."""
    save_path: str | None = setting(None, interpolation="${oc.select:global_profiler.save_path,null}")
    """Folder of the recordings."""
    tool_config: ToolConfigs | None = subsection(ToolConfigs)
    """Settings of each profiler."""


_ACTOR_TOOLS = "${oc.select:actor_rollout_ref.actor.profiler.tool_config,null}"


@section
class RewardProfilerConfig(ProfilerConfig):
    """Profiling of the reward model's workers."""

    tool_config: ToolConfigs | None = setting(None, interpolation=_ACTOR_TOOLS)
    """Settings of each profiler, by default the actor's."""


@section
class RolloutProfilerConfig(RewardProfilerConfig):
    """Profiling of the rollout workers, by default as the actor's."""

    enable: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.actor.profiler.enable,false}", refuse=NO_PROFILER
    )
    """Profile this role."""
    all_ranks: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.profiler.all_ranks,false}")
    """Profile every rank of the role."""
    ranks: tuple[int, ...] = setting((), interpolation="${oc.select:actor_rollout_ref.actor.profiler.ranks,[]}")
    """Ranks to profile."""


@section
class GlobalToolConfigs(BaseConfig):
    """Settings of the profilers that hold for all processes."""

    nsys: GlobalNsightToolConfig = subsection(GlobalNsightToolConfig)
    """NVIDIA Nsight Systems."""
    torch_memory: GlobalTorchMemoryToolConfig = subsection(GlobalTorchMemoryToolConfig)
    """The memory recorder of PyTorch."""


@section
class GlobalProfilerConfig(BaseConfig):
    """Which profiler runs, and at which steps."""

    hydra_target: ClassVar[str] = "verl.utils.profiler.ProfilerConfig"

    tool: str | None = setting(None, refuse=NO_PROFILER)
    """Which profiler: nsys, npu, torch, torch_memory."""
    steps: tuple[int, ...] | None = setting(None, refuse=NO_PROFILER)
    """Steps to profile."""
    profile_continuous_steps: bool = setting(False)
    """One recording for neighbouring steps."""
    save_path: str = setting("outputs/profile")
    """Folder of the recordings."""
    global_tool_config: GlobalToolConfigs = subsection(GlobalToolConfigs)
    """Settings of the profilers that hold for all processes."""
