"""Process groups of megatron-core, which say what ranks share; models of one process may have several layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.config import McoreEngineConfig
from verl.errors import ConfigError
from verl.plugins.megatron import cpu
from verl.plugins.megatron.library import parallel_state, tensor_parallel
from verl.utils.device import group_timeout


@dataclass(frozen=True)
class Layout:
    """Ranks that share one copy of the model; the others hold copies of it."""

    tensor: int
    """Ranks that share each weight matrix."""
    pipeline: int
    """Ranks that share the layers."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of a layer, each with some of them; other weights are copied or divided."""
    expert_tensor: int = 1
    """Ranks that share each expert's matrices."""
    pieces: int = 1
    """Pieces of the model on each pipeline stage, above 1 if it is interleaved (arXiv:2104.04473, section 2.2)."""

    @classmethod
    def from_config(cls, config: McoreEngineConfig) -> Layout:
        """Read it from the configuration."""
        tensor = config.tensor_model_parallel_size
        expert_tensor = config.expert_tensor_parallel_size or tensor
        pipeline, context = config.pipeline_model_parallel_size, config.context_parallel_size
        return cls(tensor, pipeline, context, config.expert_model_parallel_size, expert_tensor, config.model_chunks)

    @property
    def shared_by(self) -> int:
        """Number of ranks that compute the same rows."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        settings = f"tensor_model_parallel_size={self.tensor}, pipeline_model_parallel_size={self.pipeline}"
        if self.pieces > 1:
            settings += f", virtual_pipeline_model_parallel_size={self.pieces}"
        if self.context > 1:
            settings += f", context_parallel_size={self.context}"
        if self.expert == 1 and self.expert_tensor == self.tensor:
            return settings
        return f"{settings}, expert_model_parallel_size={self.expert}, expert_tensor_parallel_size={self.expert_tensor}"


class _Groups:
    """The process groups of each layout in this process; megatron-core uses the groups of one layout at a time.

    megatron-core keeps them in variables of its module ``parallel_state``, which are exchanged.
    """

    def __init__(self) -> None:
        self._active: Layout | None = None
        self._empty: dict[str, object] = {}
        self._by_layout: dict[Layout, dict[str, object]] = {}

    def is_joined(self, layout: Layout) -> bool:
        return layout in self._by_layout

    def begin(self) -> None:
        """Set the groups aside, so that those of another layout can be made."""
        if self._active is None:
            self._empty = self._variables()
        else:
            self._by_layout[self._active] = self._variables()
            vars(parallel_state).update(_copied(self._empty))
        self._active = None

    def end(self, layout: Layout) -> None:
        """Register the groups made since :meth:`begin` under a layout."""
        self._active = layout
        self._by_layout[layout] = self._variables()

    def use(self, layout: Layout) -> None:
        if layout == self._active:
            return
        if self._active is not None:
            self._by_layout[self._active] = self._variables()
        vars(parallel_state).update(self._by_layout[layout])
        self._active = layout

    @staticmethod
    def _variables() -> dict[str, object]:
        """megatron-core's variables."""
        return _copied({n: value for n, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", n)})


def _copied(variables: Mapping[str, object]) -> dict[str, object]:
    """Copy the dictionaries among variables, which megatron-core fills."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in variables.items()}


_groups = _Groups()


def join(layout: Layout, device: torch.device, seed: int) -> None:
    """Make the process groups of ``layout``, or use them if this process has them. Collective.

    Raises:
        ConfigError: the layout does not divide the ranks.
    """
    if device.type == "cpu":
        cpu.install()
    ranks = dist.get_world_size()
    if ranks % layout.shared_by:
        raise ConfigError(
            f"megatron.{layout}: {layout.shared_by} ranks share one copy of the model, which does not divide the "
            f"{ranks} ranks. Use sizes whose product divides them."
        )
    if ranks % (experts_by := layout.expert_tensor * layout.expert * layout.pipeline):
        raise ConfigError(
            f"megatron.{layout}: {experts_by} ranks share the experts, which does not divide the {ranks} ranks. Use "
            "sizes whose product divides them."
        )
    if _groups.is_joined(layout):
        use(layout)
        return
    _groups.begin()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.pieces if layout.pieces > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=math.ceil(group_timeout(device).total_seconds() / 60),
        create_gloo_process_groups=False,  # for megatron-core's own optimizer, which is not used
    )
    _groups.end(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def use(layout: Layout) -> None:
    """Make megatron-core use the groups of ``layout``, which this process has joined."""
    _groups.use(layout)
