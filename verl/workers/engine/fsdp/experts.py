"""How evenly the router of a mixture of experts spreads tokens over experts, in passes that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ExpertLoad:
    """Counts of the tokens that each expert got; none for a model without routers that return their choice.

    Transformers' routers return (router logits, weights, chosen experts), the last (tokens, experts per token).
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[nn.Module, Tensor] = {}
        self._mask: Tensor | None = None
        self._is_counting = False
        self._routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        for router in self._routers:
            router.register_forward_hook(self._count)

    def clear(self) -> None:
        """Forget all counts."""
        self._counts.clear()

    @contextmanager
    def counting(self, mask: Tensor | None) -> Iterator[None]:
        """Count in forward passes inside; ``mask``, (rows, length), is 0 on padding, None without padding."""
        # Not in the backward pass: gradient checkpointing runs routers again there.
        self._is_counting, self._mask = True, mask
        try:
            yield
        finally:
            self._is_counting, self._mask = False, None

    @torch.no_grad()
    def _count(self, router: nn.Module, _: Any, output: Any) -> None:
        if not self._is_counting or not isinstance(output, tuple):
            return
        logits, chosen = output[0], output[-1]
        if not isinstance(chosen, Tensor) or chosen.is_floating_point():
            return
        if self._mask is not None:
            chosen = chosen[self._mask.flatten().bool()]
        found = torch.bincount(chosen.flatten(), minlength=logits.shape[-1])
        self._counts[router] = self._counts[router] + found if router in self._counts else found

    def metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Compute the loads of all ranks of ``group``, the same on each; empty without counts. Collective.

        The load of an expert is its number of tokens over the mean of its layer's experts: 1 if all get as many.
        """
        if not self._counts:
            return {}
        counts = torch.stack([self._counts[router] for router in self._routers if router in self._counts])
        dist.all_reduce(counts, group=group)
        load = counts / counts.float().mean(dim=1, keepdim=True).clamp(min=1e-9)  # (layers, experts)
        return {
            "moe/load_max": float(load.max()),
            "moe/load_min": float(load.min()),
            "moe/unused_experts": float((counts == 0).sum()),
        }
