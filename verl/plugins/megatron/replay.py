"""Router replay where ranks have parts of the layers and of the tokens: what routers choose, and choices repeated.

A rank's routers see its part of each sequence, and have the layers of its pipeline stage. Choices travel whole, as the
column ``routed_experts`` of :mod:`verl.workers.routers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.base.device_copies import to_device
from verl.errors import ConfigError
from verl.plugins.megatron.experts import TokenRouter, routers_of_layers
from verl.plugins.megatron.groups import Layout
from verl.plugins.megatron.library import parallel_state
from verl.workers.engine.model.inputs import ModelInputs
from verl.workers.engine.passes import MicroBatch
from verl.workers.routers import choice_dtype, unknown

_ROWS = 8
"""Rows whose choices are exchanged between pipeline stages at once."""


class RouterReplay:
    """The routers of this rank: records and replays their choices.

    Args:
        pieces: this rank's part of a model, which may have no experts.
        layout: of the ranks.
    """

    def __init__(self, pieces: nn.ModuleList, layout: Layout) -> None:
        self._routers = routers_of_layers(pieces)
        self._stages = layout.pipeline
        self._divides_tokens = layout.tensor > 1  # without sequence_parallel there are no experts
        self._recorded: Tensor | None = None

    def reset(self) -> None:
        """Forget the passes of an earlier call, whose backward passes may not have been reached."""
        for router in self._routers:
            router.repeated.clear()

    @contextmanager
    def replayed(self, inputs: ModelInputs, is_trained: bool) -> Iterator[None]:
        """Make routers choose ``inputs.routed_experts`` in the forward pass inside, None leaves the choice to them.

        With ``is_trained`` they repeat it in the backward pass too, if activations are computed again there. Backward
        passes have the order of the forward passes.

        Raises:
            ConfigError: the model has another number of routers.
        """
        routed = inputs.routed_experts
        if routed is not None:
            routed = self._rank_tokens(routed.view(*inputs.input_ids.shape, *routed.shape[1:]))
        for router in self._routers:
            layers = sum(router.experts.sparse)
            if routed is not None and routed.shape[1] != layers:
                raise ConfigError(
                    f"the column routed_experts has the choices of {routed.shape[1]} layers, and the model has "
                    f"{layers} routers: it was recorded with another model."
                )
            router.repeated.begin(None if routed is None else routed[:, self._index(router)], is_trained)
        try:
            yield
        finally:
            for router in self._routers:
                router.repeated.end()

    @staticmethod
    def _index(router: TokenRouter) -> int:
        """Return the place of a router among those of the whole model."""
        return sum(router.experts.sparse[: router.layer_number - 1])

    def _rank_tokens(self, rows: Tensor) -> Tensor:
        """Return the tokens of (bsz, length, ...) that this rank's routers see, in their order: (tokens, ...)."""
        if self._divides_tokens:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            rows = rows.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
        return rows.transpose(0, 1).flatten(0, 1)

    # ---- recording ----------------------------------------------------------------------------

    def record(self, batch_rows: int, length: int) -> None:
        """Begin to record, for a batch of so many rows.

        Raises:
            ConfigError: the model has no routers.
        """
        experts = next((router.experts for router in self._routers), None)
        sizes: list[tuple[int, int, int] | None] = [None] * self._stages
        mine = None if experts is None else (sum(experts.sparse), experts.per_token, experts.count)
        dist.all_gather_object(sizes, mine, group=parallel_state.get_pipeline_model_parallel_group())
        size = next((size for size in sizes if size is not None), None)
        if size is None:
            raise ConfigError(
                "the model has no experts, so router replay has nothing to repeat. Set "
                "actor.router_replay.mode=disabled."
            )
        layers, per_token, count = size
        dtype = choice_dtype(count)
        self._recorded = torch.full((batch_rows, length, layers, per_token), unknown(dtype), dtype=dtype)

    def keep(self, part: MicroBatch, inputs: ModelInputs) -> None:
        """Record what routers chose in the last pass. Collective over the ranks that share its sequences."""
        if self._recorded is None:
            return
        ran = [(self._index(router), router.repeated.last_choice()) for router in self._routers]
        choices = {index: choice for index, choice in ran if choice is not None}
        if not choices:
            return
        assert inputs.attention_mask is not None
        bsz, length = inputs.input_ids.shape
        choice = torch.stack([choices[index] for index in sorted(choices)], dim=1).to(self._recorded.dtype)
        rows = choice.view(-1, bsz, *choice.shape[1:])  # (length / ranks, bsz, routers, per token)
        if self._divides_tokens:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, rows.contiguous(), group=group)
            rows = torch.cat(parts)
        assert len(rows) == length
        experts = inputs.joined_expert_ids(rows.transpose(0, 1)[inputs.attention_mask]).cpu()
        if part.is_filler:
            return
        mask = part.data.batch["attention_mask"].bool().cpu()
        part_routing = self._recorded[part.rows]
        for position, index in enumerate(sorted(choices)):
            part_routing[:, :, index][mask] = experts[:, position]
        self._recorded[part.rows] = part_routing

    def recorded(self, device: torch.device) -> Tensor:
        """Return the choices of all layers, (bsz, length, routers, experts per token), on the CPU. Collective."""
        assert self._recorded is not None
        column, self._recorded = self._recorded, None
        if self._stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for rows in column.split(_ROWS):
                # Only one stage knows the choices of a layer; the number for an unknown choice on the others is larger.
                shared = to_device(rows.to(torch.int32), device)
                dist.all_reduce(shared, dist.ReduceOp.MIN, group=group)
                rows.copy_(shared.to(rows.dtype))
        return column
