"""Rollout engines: how their ranks share a model, and what of it lies on each rank."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import RolloutConfig
from verl.config.rollout import SERVER_ENGINES
from verl.plugins.plan.memory import BYTES
from verl.plugins.plan.shapes import ModelShape

_QUANTISED_BYTES, _SCALE_BYTES = 1, 4
"""Bytes of a weight in fp8 or int8, and of the scale of each output."""


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Division of a model among the ranks of one engine."""

    tensor: int = 1
    """Ranks that share each weight matrix."""
    pipeline: int = 1
    """As many times ranks share the layers."""
    copies: int = 1
    """Copies of all but the experts, whose ranks share the experts."""
    expert: int = 1
    """Ranks that share the experts of a layer; with 1 those of ``tensor`` share each expert's matrices."""
    size: int = 2
    """Bytes of a number."""
    is_quantised: bool = False
    """True if the linear layers of the decoder are rounded to 8 bits."""
    is_program: bool = True
    """True if it is vLLM or SGLang, which multiply by weights of 8 bits, and cache the latent vectors of latent
    attention; engines inside the worker restore one layer at a time, and cache keys and values of all heads."""

    @classmethod
    def from_rollout(cls, rollout: RolloutConfig) -> EngineLayout:
        """Return that of a rollout engine."""
        return cls(
            tensor=rollout.tensor_model_parallel_size,
            pipeline=rollout.pipeline_model_parallel_size,
            copies=rollout.data_parallel_size if rollout.shares_experts else 1,
            expert=rollout.expert_parallel_size,
            size=BYTES[rollout.dtype],
            is_quantised=rollout.quantization is not None,
            is_program=rollout.name in SERVER_ENGINES,
        )

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return self.tensor * self.pipeline * self.copies

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of one layer together."""
        return max(self.expert, self.tensor)

    @property
    def linear_bytes(self) -> int:
        """Bytes of a stored weight of the decoder's linear layers."""
        return _QUANTISED_BYTES if self.is_quantised else self.size

    @property
    def moved_bytes(self) -> int:
        """Bytes that a decoding step reads or writes for each of these weights."""
        restored = 2 * self.size if self.is_quantised and not self.is_program else 0
        return self.linear_bytes + restored

    @property
    def speedup(self) -> int:
        """Return the speed-up of products with these weights: numbers of half the size take half the time."""
        return self.size // self.linear_bytes if self.is_program else 1

    def weights(self, shape: ModelShape) -> float:
        """Bytes of the weights on one rank."""
        experts, linear = shape.expert_parameters, shape.matrix_parameters
        unshared_bytes = (linear - experts) * self.linear_bytes + (shape.parameters() - linear) * self.size
        stored = (unshared_bytes / self.tensor + experts * self.linear_bytes / self.expert_ranks) / self.pipeline
        if not self.is_quantised:
            return stored
        scales = sum(outputs * count for _, outputs, count in shape.linear_sizes.values()) * _SCALE_BYTES
        restored = 0.0 if self.is_program else shape.largest_layer_parameters * self.size / self.tensor
        return stored + scales / self.ranks + restored

    def row(self, shape: ModelShape, tokens: int) -> float:
        """Bytes of the keys and values of one row on each rank that computes it."""
        return tokens * shape.cached_bytes(self.size, self.tensor, not self.is_program) / self.pipeline
