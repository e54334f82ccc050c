"""Mixtures of experts: what a Transformers config says of them, and the layers of megatron-core that compute them.

Each token goes to ``per_token`` experts, whose outputs are added with the weights of the router. Ranks that share the
experts send tokens to each other, all to all. On every device an expert computes after the other: the kernels that
compute them together need TransformerEngine or grouped_gemm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from verl.config.megatron import GROUPED, HYBRIDS, MIXTURES
from verl.plugins.megatron.groups import Layout
from verl.plugins.megatron.library import (
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    SequentialMLP,
    SharedExpertMLP,
    TopKRouter,
    tensor_parallel,
)
from verl.utils.model_facts.experts import ExpertSizes
from verl.workers.routers import Choices, unknown


@dataclass(frozen=True)
class ExpertGroups:
    """A choice of experts as in DeepSeek-V3 (arXiv:2412.19437): sigmoids as scores, and first a choice of groups.

    For the choice alone, each expert's score has a bias, which balances the load and is not trained by gradients.
    """

    count: int
    """Groups of equally many experts."""
    per_token: int
    """Groups whose experts a token may go to: those with the largest sum of their two largest scores."""
    scale: float
    """Factor of the weights of a token's experts."""

    def choice(self, scores: Tensor, per_token: int) -> Tensor:
        """Return the experts of each token, (tokens, experts per token), by their biased scores, (tokens, experts)."""
        group_scores = scores.unflatten(-1, (self.count, -1))  # (tokens, groups, experts of a group)
        groups = group_scores.topk(2, dim=-1).values.sum(-1).topk(self.per_token, dim=-1).indices
        is_open = torch.zeros_like(group_scores[..., 0], dtype=torch.bool).scatter(1, groups, True)
        open_scores = group_scores.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
        return open_scores.topk(per_token, dim=-1).indices


@dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a model."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts that a token goes to."""
    width: int
    """Feed-forward width of one expert."""
    is_renormalised: bool
    """True if the weights of a token's experts add up to 1."""
    has_fp32_weights: bool
    """True if these weights stay in fp32 in a model of another format."""
    sparse: tuple[bool, ...]
    """Layers with experts: True at the index of each."""
    shared_width: int = 0
    """Feed-forward width of what all tokens pass beside the experts."""
    is_shared_gated: bool = False
    """True if each token multiplies the output of these by a gate, the sigmoid of a number."""
    groups: ExpertGroups | None = None
    """Rule by which groups of experts are chosen first; None for a choice by softmax among all."""

    @classmethod
    def from_config(cls, hf: PretrainedConfig) -> Experts | None:
        """Read them from a Transformers config; None if all layers are dense."""
        sizes = ExpertSizes.from_config(hf)
        # The decoder of a model with images has a type of its own.
        if sizes is None or not {hf.model_type, hf.model_type.removesuffix("_text")} & set(MIXTURES):
            return None
        is_mixtral, groups = hf.model_type == "mixtral", None
        if hf.model_type in GROUPED:
            groups = ExpertGroups(hf.n_group, hf.topk_group, hf.routed_scaling_factor)
        return cls(
            count=sizes.count,
            per_token=sizes.per_token,
            width=sizes.width,
            # The routers of Mixtral, Qwen3.5 and Qwen3-VL have no other way.
            is_renormalised=bool(getattr(hf, "norm_topk_prob", True)),
            has_fp32_weights=is_mixtral or groups is not None,
            sparse=sizes.sparse,
            shared_width=sizes.shared_width,
            is_shared_gated=hf.model_type in HYBRIDS,
            groups=groups,
        )

    def settings(self, layout: Layout) -> dict[str, object]:
        """Return the fields of megatron-core's ``TransformerConfig``."""
        return {
            "num_moe_experts": self.count,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.width,
            "moe_shared_expert_intermediate_size": self.shared_width or None,
            "moe_shared_expert_gate": self.is_shared_gated,
            "moe_router_pre_softmax": True,  # the other order is refused for one expert per token
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "expert_model_parallel_size": layout.expert,
            "expert_tensor_parallel_size": layout.expert_tensor,
        }


class Repetition:
    """The choice that one router repeats in the pass that runs, and again where its activations are recomputed.

    A pipeline runs forward passes of later micro-batches before the backward pass of an earlier one, so that what they
    repeat waits in the order of the passes.
    """

    def __init__(self) -> None:
        self._runs = self._is_trained = False
        self._replayed: Tensor | None = None
        self._last_choice: Tensor | None = None
        self._waiting: deque[Tensor | None] = deque()

    def begin(self, replayed: Tensor | None, is_trained: bool) -> None:
        """Begin a forward pass with the choice ``replayed``, (tokens, experts per token); None is the router's own."""
        self._runs, self._is_trained, self._replayed, self._last_choice = True, is_trained, replayed, None

    def end(self) -> None:
        """End the forward pass."""
        self._runs, self._replayed = False, None

    def clear(self) -> None:
        """Forget what waits to be repeated."""
        self._waiting.clear()

    def last_choice(self) -> Tensor | None:
        """Return what the router chose in the last forward pass; None if it did not run."""
        return self._last_choice

    def choice(self, free: Tensor) -> Tensor:
        """Return the choice of experts, where ``free``, (tokens, experts per token), is the router's own."""
        if self._runs:
            replayed = self._replayed
            if self._is_trained and not torch.is_grad_enabled():  # so its layer runs again in the backward pass
                self._waiting.append(replayed)
        else:
            replayed = self._waiting.popleft() if self._waiting else None
        if replayed is not None:
            free = torch.where(replayed != unknown(replayed.dtype), replayed.to(free.dtype), free)
        if self._runs:
            self._last_choice = free
        return free


class TokenRouter(TopKRouter):
    """Chooses experts as Transformers' routers do: softmax of all logits in fp32, then the largest; or by groups.

    megatron-core's own computes its logits by TransformerEngine, and fails where that is not installed.
    """

    def __init__(self, experts: Experts, **settings: object) -> None:
        super().__init__(**settings)
        self.experts = experts
        self.index = 0
        """Index of this router among those of this rank."""
        self.choices: Choices | None = None
        """Record of the choices; None keeps none."""
        self.repeated = Repetition()
        """Choice that replaces the router's own."""
        self.e_score_correction_bias: nn.Parameter | None = None
        """(experts,) fp32, the bias of :class:`ExpertGroups`."""
        if experts.groups is not None:
            bias = torch.zeros(experts.count, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.balance_grad: Tensor | None = None
        """(experts,): gradient of the balance loss with respect to the router probability of each real token."""
        self.is_balanced_by_scores = False
        """True if these probabilities are the scores over their sum, where groups are chosen."""
        self.z_weight = 0.0
        """Weight of the squared logarithm of the sum of a real token's exponentials."""

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert for each token, and whether it was chosen, both (tokens, experts).

        Args:
            hidden: (length, bsz, hidden size); tokens are counted along the batch first.
            padding_mask: (length, bsz), True on padding, which goes to experts but is not counted.
        """
        experts = self.experts
        # By default as Transformers: in the model's format, then a softmax in fp32; where groups are chosen, in fp32.
        default_dtype = hidden.dtype if experts.groups is None else torch.float32
        wide = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, default_dtype)
        logits = functional.linear(hidden.flatten(0, 1).to(wide), self.weight.to(wide))
        scores = logits.softmax(-1, dtype=torch.promote_types(wide, torch.float32))
        if experts.groups is None:
            free = scores.topk(experts.per_token, dim=-1).indices
        else:
            assert self.e_score_correction_bias is not None
            scores = logits.sigmoid()
            free = experts.groups.choice(scores + self.e_score_correction_bias, experts.per_token)
        expert_ids = self.repeated.choice(free)
        top = scores.gather(-1, expert_ids)
        if experts.is_renormalised:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        if experts.groups is not None:
            top = top * experts.groups.scale
        if not experts.has_fp32_weights:
            top = top.to(logits.dtype)
        weights = top.new_zeros(logits.shape).scatter(1, expert_ids, top)
        real = slice(None) if padding_mask is None else ~padding_mask.flatten()
        if self.choices is not None:
            self.choices.add(self.index, logits.detach()[real], expert_ids[real])
        if torch.is_grad_enabled():
            if self.balance_grad is not None:
                balanced = balanced_probabilities(logits[real], self.is_balanced_by_scores)
                weights = _WithLoss.apply(weights, (balanced * self.balance_grad).sum())
            if self.z_weight:
                weights = _WithLoss.apply(weights, self.z_weight * squared_log_sums(logits[real]).sum())
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_ids, True)


def balanced_probabilities(logits: Tensor, by_scores: bool) -> Tensor:
    """Return the probabilities of a balance loss: a softmax, or sigmoids over their sum (arXiv:2412.19437, eq. 19)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not by_scores:
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def squared_log_sums(logits: Tensor) -> Tensor:
    """Return (log Σ_e exp z_e)² of each token (arXiv:2202.08906, eq. 5)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()


def routers_of_layers(pieces: nn.ModuleList) -> list[TokenRouter]:
    """Return the routers of the model's layers, without those of heads of multi-token prediction."""
    routers = (module for module in pieces.modules() if isinstance(module, TokenRouter))
    return [router for router in routers if router.layer_number <= len(router.experts.sparse)]


class _WithLoss(torch.autograd.Function):
    """Adds a term to the loss, wherever that is computed: on another pipeline stage, after recomputation."""

    @staticmethod
    def forward(ctx: object, x: Tensor, term: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


def expert_layer(experts: Experts) -> Any:
    """Return the specification of a feed-forward layer with experts."""
    linear = MLPSubmodules(
        linear_fc1=tensor_parallel.ColumnParallelLinear, linear_fc2=tensor_parallel.RowParallelLinear
    )
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linear) if experts.shared_width else None
    one_by_one = ModuleSpec(module=SequentialMLP, submodules=linear)
    router = partial(TokenRouter, experts)
    return ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=one_by_one, shared_experts=shared, router=router)
    )
