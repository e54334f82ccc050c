"""The recordings of a process: PyTorch's profiler and its history of GPU memory.

A process has one recording at a time, which the roles in it share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from verl.errors import ConfigError


class ProfilerTool(Protocol):
    """Records from :meth:`start` to :meth:`stop`, which writes the file."""

    def start(self, path: Path) -> None:
        """Begin; ``path`` is the file without its ending."""

    def stop(self) -> None:
        """End and write the file."""


class TorchTool:
    """Operators and kernels over time, in a Chrome trace ``.json``; ``contents`` as in ``TorchProfilerToolConfig``."""

    def __init__(self, contents: Collection[str] = ()) -> None:
        self._contents = set(contents)

    def start(self, path: Path) -> None:
        """See :class:`ProfilerTool`."""
        kinds = {"cpu": torch.profiler.ProfilerActivity.CPU}
        if torch.cuda.is_available():
            kinds["cuda"] = torch.profiler.ProfilerActivity.CUDA
        self._path = path
        self._profile = torch.profiler.profile(
            activities=[kind for name, kind in kinds.items() if name in self._contents] or list(kinds.values()),
            profile_memory="memory" in self._contents,
            record_shapes="shapes" in self._contents,
            with_stack="stack" in self._contents,
        )
        self._profile.start()

    def stop(self) -> None:
        """See :class:`ProfilerTool`."""
        self._profile.stop()
        self._profile.export_chrome_trace(f"{self._path}.json")


class MemoryTool:
    """Allocations of GPU memory, in a snapshot ``.pickle`` for https://pytorch.org/memory_viz.

    Args:
        max_entries: allocations to remember.
        settings: further arguments of PyTorch's recorder, such as ``stacks``.
    """

    def __init__(self, max_entries: int = 100_000, **settings: object) -> None:
        self._settings = {"max_entries": max_entries, **settings}

    def start(self, path: Path) -> None:
        """See :class:`ProfilerTool`."""
        self._path = path
        torch.cuda.memory._record_memory_history(**self._settings)

    def stop(self) -> None:
        """See :class:`ProfilerTool`."""
        torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)  # None ends the recording


@dataclass(frozen=True)
class RecordingPlan:
    """Settings of the recording of one role's processes at one step."""

    tool: str
    settings: Mapping[str, object]
    """Arguments of the tool."""
    folder: str
    step: int
    role: str
    ranks: tuple[int, ...] | None
    """Ranks that record; None for all."""


@dataclass
class ProcessRecording:
    """The recording of this process, begun by the first role in it and written by the last one."""

    tool: ProfilerTool | None = None
    step: int | None = None
    roles: list[str] = field(default_factory=list)

    def start(self, plan: RecordingPlan, rank: int) -> None:
        """Begin to record for a role; a recording that a failed step left is dropped.

        Raises:
            ConfigError: the tool records a GPU, and this process sees none.
        """
        if self.tool is not None and self.step == plan.step and plan.role not in self.roles:
            self.roles.append(plan.role)
            return
        if plan.tool == "torch_memory" and not torch.cuda.is_available():
            raise ConfigError(
                f"global_profiler.tool={plan.tool} records a GPU, and rank {rank} sees none. Use global_profiler.tool="
                "torch."
            )
        folder = Path(plan.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tool: ProfilerTool = {"torch": TorchTool, "torch_memory": MemoryTool}[plan.tool](**plan.settings)
        self.tool, self.step, self.roles = None, plan.step, [plan.role]
        tool.start(folder / f"step{plan.step}_{plan.role}_rank{rank}")
        self.tool = tool

    def stop(self, role: str) -> None:
        """End the recording of a role; the last one writes the file."""
        if role in self.roles:
            self.roles.remove(role)
            if self.tool is not None and not self.roles:
                tool, self.tool = self.tool, None
                tool.stop()


process_recording = ProcessRecording()
"""The recording of this process."""
