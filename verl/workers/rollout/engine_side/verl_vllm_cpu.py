"""Additions to vLLM 0.32 on CPUs: updates of experts and int8, experts on ranks, eager stages, draws with proposals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl_vllm import WeightLoader
from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.sample import rejection_sampler

_compute_experts = CPUUnquantizedExperts.apply
_cut = rejection_sampler.apply_sampling_constraints
_make_product = _custom_ops.create_onednn_scaled_mm


class CPUWeightLoader(WeightLoader):
    """Load weights from shared memory into a model on a CPU; a mix-in of vLLM's worker (``worker_extension_cls``)."""

    def begin_layers(self, model: nn.Module) -> None:
        """See :meth:`WeightLoader.begin_layers`."""
        super().begin_layers(model)
        for layer in model.modules():
            # vLLM brings experts into the layout of its kernel where it makes the kernel, which it else makes once.
            method = getattr(layer, "quant_method", None)
            if method is not None and hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def begin_weights(self) -> None:
        """See :meth:`WeightLoader.begin_weights`."""
        super().begin_weights()
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # Where the stage before puts its results; vLLM makes it in a warm-up, which eager models have not on a CPU.
            sizes = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": runner.device}
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(**sizes)


def compute_experts(
    experts: CPUUnquantizedExperts,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **arguments: Any,
) -> object:
    """Compute the experts of this rank: vLLM's kernel takes all chosen ones for its own."""
    if expert_map is not None:
        if apply_router_weight_on_input:
            raise NotImplementedError("experts on several ranks whose router weights are applied to their input")
        local = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    return _compute_experts(
        experts,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=None,
        apply_router_weight_on_input=apply_router_weight_on_input,
        **arguments,
    )


def all_gatherv(
    communicator: CpuCommunicator, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Join tensors of all ranks, of different sizes, along their first dimension."""
    if isinstance(input_, list):
        return [_joined(communicator, tensor, dim, sizes) for tensor in input_]
    return _joined(communicator, input_, dim, sizes)


def _joined(communicator: CpuCommunicator, tensor: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    assert dim == 0
    sizes = sizes or [len(tensor)] * communicator.world_size
    longest = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    longest[: len(tensor)] = tensor
    parts = [torch.empty_like(longest) for _ in sizes]
    dist.all_gather(parts, longest, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    communicator: CpuCommunicator, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """Add tensors of all ranks, and return this rank's part along the first dimension."""
    assert dim == 0
    total = input_.clone()
    dist.all_reduce(total, group=communicator.device_group)
    sizes = sizes or [len(total) // communicator.world_size] * communicator.world_size
    return total.split(sizes)[communicator.rank_in_group].contiguous()


def make_product(weight: Tensor, weight_scales: Tensor, *settings: Any) -> Any:
    """Make a product of 8 bits that keeps the scales of its weights.

    oneDNN has the address of the scales alone, and at an update vLLM frees the tensor that had them there.
    """
    product = _make_product(weight, weight_scales, *settings)
    product.verl_scales = weight_scales
    return product


def for_each_proposal(
    values: Tensor, cumulative_proposals: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat a value of each request, such as its temperature, for each proposed token.

    vLLM's own kernel writes into a copy of its output, so that draws follow memory that nobody has written (its issue
    55005).
    """
    proposals = cumulative_proposals.diff(prepend=cumulative_proposals.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(proposals, output_size=num_tokens)


def cut(logits: Tensor, *arguments: Any) -> Tensor:
    """Apply temperature and cuts to the logits of proposed tokens, of which a step may have none."""
    return _cut(logits, *arguments) if len(logits) else logits


CPUUnquantizedExperts.apply = compute_experts
rejection_sampler.apply_sampling_constraints = cut
rejection_sampler.expand_batch_to_tokens = for_each_proposal
_custom_ops.create_onednn_scaled_mm = make_product
CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
