"""FSDP2: shard a model, fill it, move it between CPU and GPU, and read it out whole.

The engine of verl itself is :mod:`verl.workers.engine.fsdp`; these functions are for workers that build their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from verl.errors import ConfigError
from verl.utils.device import get_device_id, get_device_name
from verl.utils.transformers_private import layer_class_names

# ---- building -------------------------------------------------------------------------------------


def get_init_weight_context_manager(
    use_meta_tensor: bool = True, mesh: DeviceMesh | None = None
) -> Callable[[], AbstractContextManager[object]]:
    """Return the context in which this rank builds its model, before weights are sent from the first rank.

    On the first rank (of each copy of the model, with a mesh of several dimensions) that is the CPU; on the others
    parameters have no memory (meta device) if ``use_meta_tensor``. Buffers are always real, as they are computed.
    """
    is_first = dist.get_rank() == 0 if mesh is None else mesh.get_coordinate()[-1] == 0  # type: ignore[index]
    if is_first or not use_meta_tensor:
        return lambda: torch.device("cpu")
    return _parameters_on_meta


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def init_fn(x: nn.Module) -> nn.Module:
    """Give the own parameters of a module memory on this rank's device, unset; on rank 0 it stays as it is."""
    return x if dist.get_rank() == 0 else x.to_empty(device=get_device_id(), recurse=False)


def get_fsdp_wrap_policy(
    module: nn.Module, config: Mapping[str, Any] | None = None, is_lora: bool = False
) -> Callable[..., bool] | None:
    """Return the rule (of ``torch.distributed.fsdp.wrap``) for which modules are sharded as a unit; None for none.

    Args:
        module: a Transformers model, whose repeated layers are the units by default.
        config: ``disable``, ``transformer_layer_cls_to_wrap`` (class names), ``min_num_params`` (units by size).
        is_lora: must be false: under FSDP2 frozen and trained weights may be in one unit, so adapters need none.
    """
    if is_lora:
        raise ConfigError("is_lora=True: FSDP2 needs no separate units for adapters; leave it out.")
    config = config or {}
    if config.get("disable"):
        return None
    if (least := config.get("min_num_params") or 0) > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    classes = {type(unit) for unit in _units(module, config)}
    return ModuleWrapPolicy(classes) if classes else None


def _units(module: nn.Module, config: Mapping[str, object]) -> list[nn.Module]:
    """The repeated layers, by the class names in ``config`` or else those that the Transformers model declares."""
    class_names = config.get("transformer_layer_cls_to_wrap") or config.get("layer_class")
    names = {class_names} if isinstance(class_names, str) else set(class_names or layer_class_names(module))  # type: ignore[arg-type]
    units = [unit for unit in module.modules() if type(unit).__name__ in names]
    if class_names and not units:
        present = sorted({type(unit).__name__ for unit in module.modules()})
        raise ConfigError(
            f"transformer_layer_cls_to_wrap={sorted(names)}: the model has no such layer; it has {', '.join(present)}."
        )
    return units


def apply_fsdp2(model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Shard a model in place: each repeated layer is a unit, and so is an input embedding that is not tied.

    Args:
        model: a Transformers model, or any module with ``wrap_policy.transformer_layer_cls_to_wrap`` given.
        fsdp_kwargs: arguments of PyTorch's ``fully_shard``: ``mesh``, ``mp_policy``, ``offload_policy``,
            ``reshard_after_forward``, ``shard_placement_fn``.
        config: the ``fsdp_config``, of which ``wrap_policy`` is read.
    """
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    units = _units(model, config.get("wrap_policy") or {})
    units += [] if tied else [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for unit in units:
        fully_shard(unit, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def get_shard_placement_fn(fsdp_size: int) -> Callable[[nn.Parameter], Shard]:
    """Return a rule that shards a parameter along its first dimension that ``fsdp_size`` divides, or else its first."""

    def placement(param: nn.Parameter) -> Shard:
        return Shard(next((dim for dim, size in enumerate(param.shape) if size % fsdp_size == 0), 0))

    return placement


# ---- weights --------------------------------------------------------------------------------------


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Tensor], device_mesh: DeviceMesh | None = None, cpu_offload: object = None
) -> None:
    """Fill a sharded model with the whole weights that rank 0 holds; other ranks pass an empty dict. Collective.

    Parameters without memory (meta device) get some, on the CPU if ``cpu_offload``, else on this rank's device.

    Args:
        model: result of :func:`apply_fsdp2`.
        full_state: whole tensors by name, on rank 0.
        device_mesh: unused, the model knows its own.
        cpu_offload: an offload policy, or whether weights stay on the CPU.
    """
    device = torch.device("cpu") if cpu_offload or get_device_name() == "cpu" else torch.device(get_device_id())
    if any(parameter.is_meta for parameter in model.parameters()):
        buffers = dict(model.named_buffers())
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])  # computed on every rank, so not to be emptied
    else:
        model.to(device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=bool(cpu_offload))
    set_model_state_dict(model, full_state, options=options)  # type: ignore[arg-type]


def get_fsdp_full_state_dict(
    model: nn.Module, offload_to_cpu: bool = True, rank0_only: bool = True
) -> dict[str, Tensor]:
    """Return the whole weights by name, on rank 0 only (an empty dict elsewhere) or on all ranks. Collective."""
    # With cpu_offload PyTorch gathers on rank 0 only.
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload_to_cpu and rank0_only)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if rank0_only:
        return weights if dist.get_rank() == 0 else {}
    return {name: tensor.cpu() for name, tensor in weights.items()} if offload_to_cpu else weights


def fsdp2_clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale sharded gradients so that their norm is at most ``max_norm``; return the norm before. Collective."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ---- memory ---------------------------------------------------------------------------------------


def fsdp_version(model: nn.Module) -> int:
    """Return 2 or 1 for a model sharded by that version of FSDP, 0 for any other."""
    if isinstance(model, FSDPModule):
        return 2
    return 1 if isinstance(model, FullyShardedDataParallel) else 0


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Move the shards of an FSDP2 model to CPU memory.

    Raises:
        ConfigError: the model is wrapped by FSDP1.
    """
    _refuse_fsdp1(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.to("cpu")
    if empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Move the shards of an FSDP2 model to this rank's device; raises as :func:`offload_fsdp_model_to_cpu`."""
    _refuse_fsdp1(model)
    model.to(get_device_id())


def offload_fsdp_optimizer(optimizer: Optimizer) -> None:
    """Move the state of an optimizer to CPU memory."""
    _move_optimizer(optimizer, "cpu")


def load_fsdp_optimizer(optimizer: Optimizer, device_id: int | str | torch.device) -> None:
    """Move the state of an optimizer to a device."""
    _move_optimizer(optimizer, device_id)


def _move_optimizer(optimizer: Optimizer, device: int | str | torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _refuse_fsdp1(model: nn.Module) -> None:
    if fsdp_version(model) == 1:
        raise ConfigError("the model is wrapped by FSDP1; shard it by apply_fsdp2 (FSDP2) instead.")
