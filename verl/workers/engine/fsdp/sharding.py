"""Placing a model on its ranks with FSDP2: one unit per decoder layer, the rest at the root."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from verl.errors import ConfigError
from verl.utils.model import torch_dtype
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp.model import HeadedModel, layer_classes

logger = logging.getLogger(__name__)


def make_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """All ranks share one copy of the model, or groups of ``fsdp_size`` ranks share one each (HSDP).

    Raises:
        ConfigError: ``fsdp_size`` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if fsdp_size == 0 or world_size % fsdp_size:
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks. Use a divisor, or -1 for all."
        )
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def mixed_precision(config: FSDPEngineConfig) -> MixedPrecisionPolicy:
    """Compute in ``dtype``, sum gradients in fp32, unless ``mixed_precision`` says otherwise.

    Raises:
        ConfigError: fp16 (its gradients underflow without loss scaling) or buffers in another format.
    """
    chosen = config.mixed_precision
    param_dtype = torch_dtype(chosen.param_dtype if chosen else config.dtype)
    reduce_dtype = torch_dtype(chosen.reduce_dtype) if chosen else torch.float32
    if not config.forward_only and torch.float16 in (param_dtype, torch_dtype(config.model_dtype)):
        raise ConfigError("fsdp_config.dtype=fp16 cannot be trained: its gradients underflow. Use bfloat16 or fp32.")
    if chosen and torch_dtype(chosen.buffer_dtype) != torch.float32:
        raise ConfigError("fsdp_config.mixed_precision.buffer_dtype: buffers stay in fp32 under FSDP2; leave it fp32.")
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def needs_sharding(config: FSDPEngineConfig, mesh: DeviceMesh) -> bool:
    """Whether FSDP changes anything: on one rank, in one number format, without streaming it is the identity."""
    one_format = mixed_precision(config).param_dtype == torch_dtype(config.model_dtype)
    return mesh.size() > 1 or not one_format or config.offload_policy


def shard_model(model: HeadedModel, config: FSDPEngineConfig, mesh: DeviceMesh) -> None:
    """Shard ``model`` in place over ``mesh``, and fill every rank's part with the weights of rank 0."""
    weights = dict(model.state_dict()) if mesh.get_rank() == 0 else {}
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload_policy else OffloadPolicy()
    policy = mixed_precision(config)
    units = _units(model, config)
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    if config.forward_prefetch:
        for unit, following in pairwise(units):
            assert isinstance(unit, FSDPModule)
            assert isinstance(following, FSDPModule)
            unit.set_modules_to_forward_prefetch([following])
    if mesh.size() > 1:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            copy_into(parameter, weights.get(name))


def _units(model: HeadedModel, config: FSDPEngineConfig) -> list[nn.Module]:
    """The modules that are gathered as one, in the order of the forward pass."""
    wrap = config.wrap_policy
    if wrap.min_num_params > 0:
        return _by_size(model, wrap.min_num_params)
    names = set(wrap.transformer_layer_cls_to_wrap or layer_classes(model))
    units = [module for module in model.modules() if type(module).__name__ in names]
    if not units and wrap.transformer_layer_cls_to_wrap:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"wrap_policy.transformer_layer_cls_to_wrap={sorted(names)}: the model has no such layer. It has "
            f"{', '.join(present)}."
        )
    return units


def _by_size(module: nn.Module, least: int) -> list[nn.Module]:
    """Smallest modules below ``module`` that hold at least ``least`` parameters."""
    units: list[nn.Module] = []
    for child in module.children():
        inner = _by_size(child, least)
        if inner:
            units += inner
        elif sum(p.numel() for p in child.parameters()) >= least and not isinstance(child, nn.ModuleList):
            units.append(child)
    return units


def copy_into(parameter: DTensor, full: Tensor | None) -> None:
    """Scatter the whole tensor that rank 0 holds into every rank's part of ``parameter``. Collective."""
    mesh = parameter.device_mesh
    whole = torch.empty(parameter.shape) if full is None else full.detach()
    whole = whole.to(device=mesh.device_type, dtype=parameter.dtype)
    scattered = distribute_tensor(whole, mesh, parameter.placements)
    with torch.no_grad():
        parameter.to_local().copy_(scattered.to_local())


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole tensor on every rank. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if all(size == 1 or not placement.is_shard() for size, placement in _places(tensor)):
        return cast(DTensor, tensor.detach()).to_local().to(device)
    return cast(DTensor, tensor.detach().to(device)).full_tensor()


def _places(tensor: DTensor) -> Iterable[tuple[int, Placement]]:
    """Ranks along each dimension of the mesh, and how ``tensor`` lies on them."""
    return zip(tensor.device_mesh.shape, tensor.placements, strict=True)


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of this rank of ``tensor``, and the number of the first of them.

    FSDP2 cuts along the first dimension into ceil(rows / ranks) rows per rank; the last ranks may have
    fewer, or none.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    local = cast(DTensor, tensor.detach()).to_local()
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            ranks = tensor.device_mesh.size(dim)
            rank = tensor.device_mesh.get_local_rank(dim)
            start = min(rank * -(-tensor.shape[0] // ranks), tensor.shape[0])
            return local, start
    return local, 0
