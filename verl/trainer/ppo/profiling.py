"""Profiles of chosen steps: starts and stops the recordings of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.config import PPOConfig
from verl.errors import ConfigError
from verl.workers.profiling import RecordingPlan

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


class StepProfiles:
    """Records the steps of ``global_profiler.steps`` on the ranks that ``profiler`` of each role names.

    Args:
        config: the run's configuration.
        total_steps: length of the run.

    Raises:
        ConfigError: a step is beyond the end of the run.
    """

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self._config = config.global_profiler
        self.steps = frozenset(self._config.steps or ()) if self._config.tool else frozenset()
        roles = config.actor_rollout_ref
        models = {"actor_rollout": roles.actor.profiler, "ref": roles.ref.profiler, "critic": config.critic.profiler}
        self._profilers = {
            name: profiler
            for name, profiler in {**models, "rm": config.reward_model.profiler}.items()
            if profiler.enable
        }
        self._contents = sorted(
            {
                kind
                for name, profiler in models.items()
                if profiler.enable
                for kind in profiler.tool_config.torch.contents
            }
        )
        steps, memory = sorted(self.steps), self._config.global_tool_config.torch_memory
        length = memory.memory_snapshot_num_steps if self._config.tool == "torch_memory" else 1
        self._first = frozenset(steps[::length])
        self._last = frozenset([*steps[length - 1 :: length], *steps[-1:]])
        if beyond := sorted(step for step in self.steps if step > total_steps):
            raise ConfigError(
                f"global_profiler.steps={sorted(self.steps)}: the run ends with step {total_steps}, before "
                f"{', '.join(map(str, beyond))}. Choose steps from 1 to {total_steps}, or make the run longer."
            )

    @contextmanager
    def profile_step(self, step: int, groups: Mapping[str, WorkerGroup | None]) -> Iterator[None]:
        """Record the block if ``step`` is to be profiled; a step that fails writes nothing.

        A snapshot of memory may have several steps: the first one starts the recording, and the last one ends it.
        """
        if step in self._first:
            self.start(step, groups)
        yield
        if step in self._last:
            self.stop(groups)

    def start(self, step: int, groups: Mapping[str, WorkerGroup | None]) -> None:
        """Begin the recordings of a step.

        Args:
            step: its number.
            groups: the worker group of each role, None where the run has none.

        Raises:
            ConfigError: the class of a role's workers cannot record.
        """
        for role, profiler in self._profilers.items():
            group = groups.get(role)
            if group is None:
                continue  # the run has no such role
            if not hasattr(group, "start_recording"):
                raise ConfigError(
                    f"the workers of '{role}' cannot be profiled. Derive their class from "
                    "verl.workers.engine_worker.EngineWorker, or leave profiler.enable of this role out."
                )
            ranks = None if profiler.all_ranks else profiler.ranks
            plan = RecordingPlan(self._config.tool or "", self._settings, self._config.save_path, step, role, ranks)
            group.start_recording(plan)

    def stop(self, groups: Mapping[str, WorkerGroup | None]) -> None:
        """End the recordings, which writes their files."""
        for role in self._profilers:
            if (group := groups.get(role)) is not None:
                group.stop_recording(role)

    @property
    def _settings(self) -> dict[str, object]:
        if self._config.tool == "torch":
            return {"contents": self._contents}
        memory = self._config.global_tool_config.torch_memory
        return {"max_entries": memory.trace_alloc_max_entries, "context": memory.context, "stacks": memory.stacks}
