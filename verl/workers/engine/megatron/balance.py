"""The load of experts and their balance loss, where ranks have parts of the layers and of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.workers.engine.fsdp.experts import ExpertLoad, balance_loss, load_metrics
from verl.workers.engine.megatron.experts import TokenRouter
from verl.workers.engine.megatron.groups import Layout
from verl.workers.engine.megatron.library import parallel_state
from verl.workers.routers import Choices


class Mixtures:
    """Load and balance loss of the experts in one mini-batch, from the choices of this rank's routers.

    Args:
        pieces: this rank's part of a model; other pipeline stages may have routers where it has none.
        layout: of the ranks.
        weight: of the balance loss; 0 for none.
    """

    def __init__(self, pieces: nn.ModuleList, layout: Layout, weight: float) -> None:
        settings: Any = pieces[0].config
        self.has_experts = settings.num_moe_experts is not None
        self.per_token = settings.moe_router_topk
        self.layout = layout
        self.weight = weight if self.has_experts else 0.0
        self._routers = [module for module in pieces.modules() if isinstance(module, TokenRouter)]
        for index, router in enumerate(self._routers):
            router.index = index
        self.reset()

    def reset(self) -> None:
        """Drop what was counted in the last mini-batch."""
        self.counts: Tensor | None = None
        """(layers, experts) tokens of each expert, over all ranks; known once :meth:`metrics` was called."""
        self._load = ExpertLoad()
        self._counts: Tensor | None = None
        self._balance = torch.zeros(())
        for router in self._routers:
            router.balance_grad = None

    @contextmanager
    def watched(self, is_counted: bool) -> Iterator[None]:
        """Count what a forward pass inside chooses; after :meth:`add_loss` compute its part of the balance loss."""
        # Not in the backward pass: recomputation runs routers again there.
        choices = Choices(None)
        for router in self._routers if is_counted else ():
            router.choices = choices
        try:
            yield
        finally:
            for router in self._routers:
                router.choices = None
        if self._counts is None:
            self._load.add(choices)
        elif choices.per_token:
            self._balance = self._balance + balance_loss(choices, self._counts).cpu()

    def add_loss(self, copies: dist.ProcessGroup | None) -> None:
        """Add the balance loss of all tokens counted so far to the passes from here on. Collective.

        It is :func:`balance_loss`: E · Σ_e f_e P_e with P the mean of router probabilities, so that each real token's
        probability of expert e has the gradient weight · E · f_e / N in every layer.
        """
        counts = self._total(copies)
        tokens = counts.sum() / self.per_token  # N, over all layers
        # The gradient buffers divide by the copies and by the ranks that share a sequence.
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        balance_grad = self.weight * ranks * counts.shape[-1] * counts.sum(0) / tokens.square()
        for router in self._routers:
            router.balance_grad = balance_grad.to(router.weight.device)
        self._counts = counts.to(balance_grad.device)

    def metrics(self, copies: dist.ProcessGroup | None) -> dict[str, float]:
        """Compute the metrics of the mini-batch, the same on all ranks. Collective."""
        if not self.has_experts:
            return {}
        self.counts = self._total(copies) if self._counts is None else self._counts
        metrics = load_metrics(self.counts)
        if self._counts is not None:
            total = self._balance.to(self._counts.device)
            dist.all_reduce(total)
            metrics["moe/aux_loss"] = float(total)
        return metrics

    def _total(self, copies: dist.ProcessGroup | None) -> Tensor:
        """Sum over all ranks, (layers, experts) of all stages. Collective."""
        counts = self._load.total(copies)
        if counts.numel():
            dist.all_reduce(counts, group=parallel_state.get_context_parallel_group())
            if self.layout.tensor > 1:  # its ranks divide tokens: without sequence_parallel there are no experts
                dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
        routers = self._routers if counts.numel() else []
        mine = {router.layer_number: row for router, row in zip(routers, counts.cpu(), strict=True)}
        stages = [mine] * self.layout.pipeline
        dist.all_gather_object(stages, mine, group=parallel_state.get_pipeline_model_parallel_group())
        # An interleaved pipeline gives a stage layers that are not adjacent.
        layers = {layer: row for stage in stages for layer, row in stage.items()}
        return torch.stack([layers[layer] for layer in sorted(layers)])
