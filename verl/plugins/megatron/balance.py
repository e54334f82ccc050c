"""The load of experts and their balance loss, where ranks have parts of the layers and of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.config.megatron_flags import ROUTER_LOSSES, bias_update_rate, router_loss_weight
from verl.errors import ConfigError
from verl.plugins.megatron.experts import (
    balanced_probabilities,
    routers_of_layers,
    squared_log_sums,
)
from verl.plugins.megatron.groups import Layout
from verl.plugins.megatron.library import parallel_state
from verl.protocol import DataProto
from verl.workers.engine.fsdp.experts import ExpertLoad, balance_loss, load_metrics
from verl.workers.routers import Choices


@dataclass(frozen=True)
class RouterTraining:
    """Losses and updates of routers beside the loss of the model."""

    balance: float = 0.0
    """Weight of :func:`~verl.workers.engine.fsdp.experts.balance_loss`, over all layers together."""
    balance_of_layers: float = 0.0
    """Weight of the sum over layers of E / K · Σ_e f_e P_e (arXiv:2412.19437, eq. 17 to 20, over the mini-batch)."""
    z: float = 0.0
    """Weight of the sum over layers of the mean over tokens of (log Σ_e exp z_e)² (arXiv:2202.08906)."""
    bias_rate: float = 0.0
    """Amount by which an update changes the bias of an expert (arXiv:2408.15664)."""

    @classmethod
    def from_settings(cls, balance: float, override: Mapping[str, object]) -> RouterTraining:
        """Read it from the weight of the balance loss over all layers, and ``override_transformer_config``.

        Raises:
            ConfigError: both ask for a balance loss.
        """
        layer_balance, z = (router_loss_weight(override, name) for name in ROUTER_LOSSES)
        if balance and layer_balance:
            raise ConfigError(
                f"override_transformer_config.{ROUTER_LOSSES[0]}={layer_balance}, and model.override_config has a "
                f"balance loss of weight {balance} too. Set one of the two: moe_aux_loss_coeff balances each layer, "
                "and router_aux_loss_coef all layers together."
            )
        return cls(balance, layer_balance, z, bias_update_rate(override))

    @property
    def needs_load(self) -> bool:
        """True if a loss needs the load of all tokens before the first gradient."""
        return self.balance > 0 or self.balance_of_layers > 0


class Mixtures:
    """Load of the experts in one mini-batch, losses of the routers, and updates of their biases.

    Args:
        pieces: this rank's part of a model; other pipeline stages may have routers where it has none.
        layout: of the ranks.
        training: of the routers; nothing is added without experts.
    """

    def __init__(self, pieces: nn.ModuleList, layout: Layout, training: RouterTraining) -> None:
        settings: Any = pieces[0].config
        self.has_experts = settings.num_moe_experts is not None
        self.per_token = settings.moe_router_topk
        self.layout = layout
        self.device = next(pieces.parameters()).device
        self.training = training if self.has_experts else RouterTraining()
        self._routers = routers_of_layers(pieces)
        for index, router in enumerate(self._routers):
            router.index = index
            router.is_balanced_by_scores = training.balance_of_layers > 0 and router.experts.groups is not None
        self._row_of: dict[int, int] = {}
        """Layers by number, and their rows in counts."""
        self._since_update: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Drop what was counted in the last mini-batch."""
        self.counts: Tensor | None = None
        """(layers, experts) tokens of each expert, over all ranks; known once :meth:`metrics` was called."""
        self._load = ExpertLoad()
        self._counts: Tensor | None = None
        self._balance = torch.zeros(())
        self._squares = torch.zeros((), dtype=torch.float64)
        self._tokens = 1
        for router in self._routers:
            router.balance_grad, router.z_weight = None, 0.0

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
            self._balance = self._balance + self._balance_of(choices, self._counts).cpu()
        if self.training.z and (self._counts is not None or not self.training.needs_load):
            for _, logits, _ in choices:
                self._squares += squared_log_sums(logits).sum().cpu().double()

    def _balance_of(self, choices: Choices, counts: Tensor) -> Tensor:
        """Return one pass's part of the balance loss; of each layer, the mean over layers."""
        if self.training.balance:
            return balance_loss(choices, counts)
        total = torch.zeros((), device=counts.device)
        for index, logits, _ in choices:
            router = self._routers[index]
            row = counts[self._row_of[router.layer_number]]
            summed = balanced_probabilities(logits, router.is_balanced_by_scores).sum(0)  # (experts,)
            total = total + (row * summed).sum() * (len(row) * self.per_token / row.sum().square())
        return total / len(counts)

    def begin(self, batch: DataProto, copies: dist.ProcessGroup | None) -> None:
        """Add the loss of squared logarithms to the passes of the mini-batch of which ``batch`` is a part. Collective.

        ``copies`` are the data-parallel ranks.
        """
        if not self.training.z:
            return
        tokens = torch.tensor(int(batch.batch["attention_mask"].sum()), device=self.device)
        dist.all_reduce(tokens, group=copies)
        self._tokens = max(int(tokens), 1)
        for router in self._routers:
            router.z_weight = self.training.z * _copies_of_gradients() / self._tokens

    def add_loss(self, copies: dist.ProcessGroup | None) -> None:
        """Add the balance loss of all tokens counted so far to the passes from here on. Collective.

        It is :func:`balance_loss`: E · Σ_e f_e P_e with P the mean of router probabilities, so that each real token's
        probability of expert e has the gradient weight · E · f_e / N in every layer.
        """
        counts = self._total(copies)
        experts = counts.shape[-1]
        if self.training.balance:
            tokens = counts.sum() / self.per_token  # N, over all layers
            factors = experts * counts.sum(0, keepdim=True) / tokens.square() * self.training.balance
            factors = factors.expand(len(counts), -1)
        else:
            tokens = counts.sum(1, keepdim=True) / self.per_token
            factors = experts * counts / tokens.square() * (self.training.balance_of_layers / self.per_token)
        for router in self._routers:
            factor = factors[self._row_of[router.layer_number]] * _copies_of_gradients()
            router.balance_grad = factor.to(router.weight.device)
        self._counts = counts.to(self.device)

    @torch.no_grad()
    def update_biases(self) -> None:
        """Raise the bias of experts with less than the mean load since the last update, and lower that of others."""
        counts, self._since_update = self._since_update, None
        if counts is None or not self.training.bias_rate:
            return
        for router in self._routers:
            row = counts[self._row_of[router.layer_number]].to(router.weight.device).float()
            assert router.e_score_correction_bias is not None, "megatron_fit refuses models without"
            router.e_score_correction_bias.add_(self.training.bias_rate * (row.mean() - row).sign())

    def metrics(self, copies: dist.ProcessGroup | None) -> dict[str, float]:
        """Compute the metrics of the mini-batch, the same on all ranks. Collective."""
        if not self.has_experts:
            return {}
        self.counts = self._total(copies) if self._counts is None else self._counts
        if self.training.bias_rate:
            self._since_update = self.counts if self._since_update is None else self._since_update + self.counts
        metrics = load_metrics(self.counts)
        if self._counts is not None:
            total = self._balance.to(self._counts.device)
            dist.all_reduce(total)
            metrics["moe/aux_loss"] = float(total)
        if self.training.z:
            squares = self._squares.to(self.counts.device)
            dist.all_reduce(squares)
            metrics["moe/z_loss"] = float(squares) / self._tokens / len(self.counts)
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
        self._row_of = {layer: row for row, layer in enumerate(sorted(layers))}
        return torch.stack([layers[layer] for layer in self._row_of])


def _copies_of_gradients() -> int:
    """Return the divisor of gradient buffers: the number of copies times that of ranks that share a sequence."""
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)
