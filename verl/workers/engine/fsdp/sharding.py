"""Sharding of a model with FSDP2: device mesh, precision, and units (one per decoder layer, the rest at the root)."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors

from verl.config import FSDPEngineConfig
from verl.errors import ConfigError
from verl.utils.device import limit_groups
from verl.utils.folder_weights import FolderWeights
from verl.utils.model import torch_dtype
from verl.utils.sharded_tensor import local_part, parts_of_ranks
from verl.utils.transformers_private import conversions_of, set_conversions
from verl.workers.engine.model.adapters import is_adapter, own_name
from verl.workers.engine.model.headed import HeadedModel, layer_classes, own_state

logger = logging.getLogger(__name__)

T = TypeVar("T")


def make_mesh(device: torch.device, fsdp_size: int, tensor: int = 1) -> DeviceMesh:
    """Make the mesh ``(replicate, shard, tp)`` over all ranks; it lacks the first or the last if their size is 1.

    FSDP divides each weight over ``shard``, and ``replicate`` numbers the copies (HSDP). ``tensor`` consecutive ranks
    divide matrices among them.

    Args:
        device: of the ranks.
        fsdp_size: of ``shard``; a negative one, or one that is too large, leaves a single copy.
        tensor: of ``tp``.

    Raises:
        ConfigError: a size does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if world_size % tensor:
        raise ConfigError(
            f"fsdp_config.tensor_parallel_size={tensor} does not divide the {world_size} ranks. Use a divisor, or 1."
        )
    groups = world_size // tensor
    shards = groups if fsdp_size < 0 or fsdp_size >= groups else fsdp_size
    if shards == 0 or groups % shards:
        ranks = f"{world_size} ranks" if tensor == 1 else f"{groups} groups of tensor_parallel_size={tensor} ranks"
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {ranks}. Use a divisor, or -1 for all."
        )
    sizes = {"replicate": groups // shards, "shard": shards, "tp": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return limit_groups(mesh, device)


def divided(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the dimensions of :func:`make_mesh` over which FSDP divides weights, and that of tensor parallelism."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name != "tp")], mesh["tp"]


def make_rows_mesh(device: torch.device, sequence: int, tensor: int = 1) -> DeviceMesh | None:
    """Make the mesh ``(dp, group)`` of groups of consecutive ranks with the same rows; None if each has its own.

    Models are sharded over all ranks, whatever this mesh says; it decides which rows and tokens a rank gets.

    Args:
        device: of the ranks.
        sequence: ranks that share the tokens of a sequence.
        tensor: ranks that share matrices, which all compute all tokens.

    Raises:
        ConfigError: ``sequence`` does not divide the number of ranks.
    """
    world_size, ranks = dist.get_world_size(), sequence * tensor
    if ranks == 1:
        return None
    if world_size % ranks:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sequence} does not divide the {world_size} ranks, which are to share "
            "sequences in groups of that size. Use a divisor, or 1."
        )
    mesh = init_device_mesh(device.type, (world_size // ranks, ranks), mesh_dim_names=("dp", "group"))
    return limit_groups(mesh, device)


def mixed_precision(config: FSDPEngineConfig) -> MixedPrecisionPolicy:
    """Return FSDP's precision policy: compute in ``dtype`` and reduce gradients in fp32, unless configured otherwise.

    Raises:
        ConfigError: weights that are trained are stored in fp16, or their gradients summed in it; buffers not in fp32.
    """
    precision = config.mixed_precision
    param_dtype = torch_dtype(precision.param_dtype if precision else config.dtype)
    reduce_dtype = torch_dtype(precision.reduce_dtype) if precision else torch.float32
    if not config.forward_only and torch.float16 in (reduce_dtype, torch_dtype(config.model_dtype)):
        raise ConfigError(
            "fsdp_config.model_dtype=fp16 or mixed_precision.reduce_dtype=fp16: small updates of weights that are "
            "stored in fp16 are lost, and sums of gradients overflow. Set both to fp32; dtype=fp16 only computes in it."
        )
    if precision and torch_dtype(precision.buffer_dtype) != torch.float32:
        raise ConfigError("fsdp_config.mixed_precision.buffer_dtype: buffers stay in fp32 under FSDP2; leave it fp32.")
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def needs_sharding(config: FSDPEngineConfig, mesh: DeviceMesh) -> bool:
    """Return whether FSDP is needed: for several ranks, a compute format other than the stored one, or its offload."""
    one_format = mixed_precision(config).param_dtype == torch_dtype(config.model_dtype)
    return mesh.size() > 1 or not one_format or config.offload_policy


def shard_model(model: HeadedModel, config: FSDPEngineConfig, mesh: DeviceMesh) -> None:
    """Shard ``model`` in place over ``mesh``; each rank keeps its part of the weights that it has. Collective."""
    if type(model.hf).__module__.startswith("transformers.models."):
        # It warns of operations in place on what a layer returns; code of a model folder (trust_remote_code) may have
        # them, Transformers' and verl's own has not.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)
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
    # What the root holds is needed as soon as the backward pass begins: freed, it would be gathered again at once.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    if config.forward_prefetch:
        for unit, following in pairwise(units):
            assert isinstance(unit, FSDPModule)
            assert isinstance(following, FSDPModule)
            unit.set_modules_to_forward_prefetch([following])


def drop_weights(model: HeadedModel) -> None:
    """Move parameters to the meta device, where they have no memory, so that sharding copies nothing; buffers stay."""
    for parameter in model.parameters():
        swap_tensors(parameter, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))


def allocate_weights(model: HeadedModel, device: torch.device) -> None:
    """Allocate memory on ``device`` for this rank's part of parameters without any; its content is arbitrary."""
    # As nn.Module.to_empty, which would drop buffers too.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def new_weights(model: HeadedModel) -> dict[str, Tensor]:
    """Copy what model folders lack, adapters and a head for scalars, from a model that has its weights."""
    names = [name for name in own_state(model) if is_adapter(name) or name.startswith("score.")]
    return {name: model.get_parameter(name).detach().clone() for name in names}


class InitialWeights:
    """The weights that a model starts with, as the first rank reads them.

    Args:
        open_folder: opens the model folder.
        new: what the folder lacks; see :func:`new_weights`.
        magnitudes: names of the magnitudes of new DoRA adapters, which are the norms of rows, by the name of their
            weight in the folder.
    """

    def __init__(
        self, open_folder: Callable[[], FolderWeights], new: Mapping[str, Tensor], magnitudes: Mapping[str, str]
    ) -> None:
        self._open_folder, self._new, self._magnitudes = open_folder, dict(new), magnitudes
        self._parts: Iterator[Mapping[str, Tensor]] = iter(())
        self.part: dict[str, Tensor] = {}
        """The weights whose names :meth:`advance` returned."""

    def open(self) -> object:
        """Open the folder; return the conversions from names in its files to names in the model."""
        folder = self._open_folder()
        self._parts = folder.parts()
        return conversions_of(folder.model)

    def advance(self, state: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        """Read the next layer, and at last return the new weights; return names and formats, none at the end."""
        names = {own_name(name): name for name in state if not is_adapter(name)}
        self.part = {}
        for unit in self._parts:
            for name in unit.keys() & self._magnitudes.keys():
                weight = unit[name].to(state[names[name]].dtype)
                self._new[self._magnitudes[name]] = weight.norm(dim=1).float()
            self.part = {names[name]: tensor for name, tensor in unit.items() if name in names}
            self._new = {name: tensor for name, tensor in self._new.items() if name not in self.part}
            if self.part:
                return self._formats()
        self.part, self._new = self._new, {}
        return self._formats()

    def _formats(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.part.items()}


def fill(model: HeadedModel, source: InitialWeights | None, device: torch.device) -> None:
    """Distribute the weights, which rank 0 reads one layer after the other, to the ranks' parts. Collective.

    Args:
        model: sharded by :func:`shard_model`, with weights that are not set.
        source: on rank 0; None on other ranks.
        device: of the ranks' process group.

    Raises:
        ConfigError: on every rank, if the folder cannot be read or lacks weights.
    """
    state = own_state(model)
    set_conversions(model.hf, _on_first_rank(None if source is None else source.open, device))
    unfilled = set(state)
    while formats := _on_first_rank(None if source is None else partial(source.advance, state), device):
        for name, dtype in formats.items():
            tensor, full = state[name], None if source is None else source.part.pop(name)
            if isinstance(tensor, DTensor):
                copy_into(tensor, full, dtype)
            else:  # a persistent buffer, which every rank has whole
                if full is not None:
                    tensor.copy_(full)
                dist.broadcast(tensor, src=0)
        unfilled -= formats.keys()
    if unfilled:
        raise ConfigError(f"the model folder does not contain {sorted(unfilled)[0]} of {type(model.hf).__name__}.")


def _on_first_rank(compute: Callable[[], T] | None, device: torch.device) -> T:
    """Run ``compute``, which only the first rank has; return its result, or raise its error, on all ranks.

    Other ranks raise a ConfigError with the text of another error.
    """
    message: list[Any] = [None]
    try:
        if compute is not None:
            message = [compute()]
    finally:
        problem = sys.exc_info()[1]
        if isinstance(problem, Exception):  # other ranks would wait forever for a rank that raises alone
            text = str(problem) if isinstance(problem, ConfigError) else f"{type(problem).__name__}: {problem}"
            message = [ConfigError(text)]
        if problem is None or isinstance(problem, Exception):  # no collective after an interrupt
            dist.broadcast_object_list(message, src=0, device=device)
    if isinstance(message[0], ConfigError):
        raise message[0]
    return message[0]


def _units(model: HeadedModel, config: FSDPEngineConfig) -> list[nn.Module]:
    """Return the modules to be gathered as one unit each, in the order of the forward pass."""
    wrap = config.wrap_policy
    if wrap.min_num_params > 0:
        # The root keeps the head, and an embedding that it is tied to: the head's weight is used without its module.
        head = {id(parameter) for parameter in model.head.parameters()}
        units = _by_size(model, wrap.min_num_params)
        return [unit for unit in units if head.isdisjoint(map(id, unit.parameters()))]
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
    """Return the smallest modules below ``module`` that hold at least ``least`` parameters."""
    units: list[nn.Module] = []
    for child in module.children():
        inner = _by_size(child, least)
        if inner:
            units += inner
        elif sum(p.numel() for p in child.parameters()) >= least and not isinstance(child, nn.ModuleList):
            units.append(child)
    return units


def copy_into(parameter: DTensor, full: Tensor | None, dtype: torch.dtype) -> None:
    """Distribute ``full``, of format ``dtype``, which rank 0 holds and others pass as None. Collective."""
    mesh = parameter.device_mesh
    # Sent in the narrower format; the ranks convert their parts.
    sent_dtype = min(dtype, parameter.dtype, key=lambda candidate: candidate.itemsize)
    if full is None:
        buffer = torch.empty(parameter.shape, dtype=sent_dtype, device=mesh.device_type)
    else:
        buffer = full.detach().to(device=mesh.device_type, dtype=sent_dtype)
    if mesh.size() == dist.get_world_size() and len(parts_of_ranks(parameter)) < 2:
        part = distribute_tensor(buffer, mesh, parameter.placements).to_local()
    else:  # rank 0 is in no group that could scatter, or rows and columns are divided
        dist.broadcast(buffer, src=0)
        local, first = local_part(parameter)
        part = buffer[tuple(slice(start, start + size) for start, size in zip(first, local.shape, strict=True))]
    with torch.no_grad():
        parameter.to_local().copy_(part)
