"""Which ranks share what: the process groups of megatron-core, joined once per process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.config import McoreEngineConfig
from verl.errors import ConfigError
from verl.workers.engine.megatron import cpu
from verl.workers.engine.megatron.library import parallel_state, tensor_parallel


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
    """Ranks that share the experts of a layer, each with some of them; they hold copies of all else, or parts of it."""
    expert_tensor: int = 1
    """Ranks that share each expert's matrices."""
    pieces: int = 1
    """Pieces of the model on each pipeline stage, above 1 if it is interleaved (arXiv:2104.04473, section 2.2)."""

    @classmethod
    def of(cls, config: McoreEngineConfig) -> Layout:
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
        said = f"tensor_model_parallel_size={self.tensor}, pipeline_model_parallel_size={self.pipeline}"
        if self.pieces > 1:
            said += f", virtual_pipeline_model_parallel_size={self.pieces}"
        if self.context > 1:
            said += f", context_parallel_size={self.context}"
        if self.expert == 1 and self.expert_tensor == self.tensor:
            return said
        return f"{said}, expert_model_parallel_size={self.expert}, expert_tensor_parallel_size={self.expert_tensor}"


def joined() -> Layout | None:
    """Return the layout of this process, if its groups were made."""
    if not parallel_state.is_initialized():
        return None
    return Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def join(layout: Layout, device: torch.device, seed: int) -> None:
    """Make the process groups of ``layout``; all engines of a process have the same. Collective.

    Raises:
        ConfigError: the layout does not divide the ranks, or another engine of this process has another layout.
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
    known = joined()
    if known is not None:
        if known != layout:
            raise ConfigError(
                f"megatron.{layout}, and another model of this process has {known}. megatron-core has one layout in a "
                "process: give actor, ref and critic the same sizes."
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.pieces if layout.pieces > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,  # for megatron-core's own optimizer, which is not used
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
