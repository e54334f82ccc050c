"""Optimizer, gradient clipping and learning-rate schedule of the training engines."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.base.registry import suggest
from verl.config import FSDPOptimizerConfig
from verl.errors import ConfigError
from verl.utils.sharded_tensor import divided_dim, local_rows
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.engine.muon import MatrixExchange, MuonWithAdamW, RowExchange


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: FSDPOptimizerConfig,
    matrices: Collection[nn.Parameter] | None = None,
    exchange: MatrixExchange | None = None,
) -> Optimizer:
    """Make an optimizer of the class ``config.optimizer`` in the module ``config.optimizer_impl``.

    AdamW is fused unless ``override_optimizer_config`` sets ``fused`` or ``foreach``. PyTorch's Muon moves ``matrices``
    (:func:`~verl.workers.engine.muon.hidden_matrices`), and AdamW all other parameters; ``exchange`` says how ranks
    compute whole matrices, by default :class:`~verl.workers.engine.muon.RowExchange`.

    Raises:
        ConfigError: there is no such class, it does not accept a setting, or Muon is to be used without ``matrices``.
    """
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ConfigError(f"optim.optimizer_impl={config.optimizer_impl} cannot be imported: {error}.") from error
    cls = getattr(module, config.optimizer, None)
    if not isinstance(cls, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type) and name != "Optimizer"]
        hint = suggest(config.optimizer, classes)
        raise ConfigError(f"optim.optimizer={config.optimizer}: {config.optimizer_impl} has no such class.{hint}")
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "betas" in cls.__init__.__code__.co_varnames:  # SGD and others have none
        settings["betas"] = tuple(config.betas)
    settings |= config.override_optimizer_config or {}
    if cls is Muon and matrices is None:
        raise ConfigError(
            "optim.optimizer=Muon needs to know which weights are matrices of hidden layers: give build_optimizer "
            "`matrices`, or use AdamW."
        )
    if cls is AdamW and not settings.keys() & {"fused", "foreach"}:
        settings["fused"] = True
    try:
        if cls is Muon:
            return _muon(parameters, matrices or (), config, settings, exchange or RowExchange())
        return cls(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim.override_optimizer_config: {config.optimizer} refuses its settings: {error}."
        ) from error


def _muon(
    parameters: Iterable[nn.Parameter],
    matrices: Collection[nn.Parameter],
    config: FSDPOptimizerConfig,
    settings: dict[str, Any],
    exchange: MatrixExchange,
) -> MuonWithAdamW:
    adamw = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": tuple(config.betas), "fused": True}
    adamw |= settings.pop("adamw", {})
    # One learning rate for both: their updates then have about the same size (arXiv:2502.16982, section 2.2).
    muon = {"adjust_lr_fn": "match_rms_adamw"} | settings
    return MuonWithAdamW(parameters, matrices, muon, adamw, exchange)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the moments of this rank: one of each weight that Muon moves, two of others as in Adam."""
    return sum(
        local_rows(weight)[0].nbytes * (1 if "ns_steps" in group else 2)
        for group in optimizer.param_groups
        for weight in group["params"]
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, loss_scale: int = 1) -> float:
    """Scale all gradients so that their joint norm is at most ``max_norm``. Collective.

    Gradients of a loss that was multiplied by ``loss_scale`` are divided by it first.

    Returns:
        the norm before clipping, in fp32. If it is not finite, gradients stay as they are.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    # This rank's parts as plain tensors: an operation on a DTensor costs the host ten times as much.
    parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    if loss_scale != 1:
        torch._foreach_mul_(parts, 1 / loss_scale)
    by_layout: dict[tuple[Any, Any], list[Tensor]] = defaultdict(list)
    for gradient, part in zip(gradients, parts, strict=True):
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        by_layout[layout].append(part)
    squares = [
        _sum_over_shards(torch.stack(torch._foreach_norm(same_layout, dtype=torch.float32)).square().sum(), *layout)
        for layout, same_layout in by_layout.items()
    ]
    total = torch.stack(squares).sum()
    norm = total.sqrt().item()
    factor = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    if math.isfinite(norm) and factor < 1:
        torch._foreach_mul_(parts, factor)
    return norm


def _sum_over_shards(total: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Tensor:
    """Sum over the ranks that have different parts, not over those with copies of the same part. Collective."""
    for dimension, placement in enumerate(placements):
        assert mesh is not None
        if divided_dim(placement) is not None and mesh.size(dimension) > 1:
            dist.all_reduce(total, group=mesh.get_group(dimension))
    return total


def build_scheduler(optimizer: Optimizer, config: FSDPOptimizerConfig) -> LambdaLR:
    """Make the learning-rate schedule: linear warm-up from ``init_lr_ratio``, then constant or a
    cosine down to ``min_lr_ratio``.

    Its length is ``config.total_training_steps``; the trainer has set -1 to the length of the run.

    Raises:
        ConfigError: the schedule needs a length and none is known.
    """
    total = config.total_training_steps
    shape = config.lr_scheduler_type
    by_ratio = config.lr_warmup_steps <= 0 and config.lr_warmup_steps_ratio > 0
    if total <= 0 and (shape == "cosine" or by_ratio):
        raise ConfigError(
            "this learning-rate schedule needs the number of its steps: set optim.total_training_steps "
            "(the trainer does so from the length of the run)."
        )
    warmup = int(config.lr_warmup_steps_ratio * total) if by_ratio else max(config.lr_warmup_steps, 0)
    if shape == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup, init_lr_ratio=config.init_lr_ratio)
    return get_cosine_schedule_with_warmup(
        optimizer, warmup, total, config.min_lr_ratio, config.num_cycles, init_lr_ratio=config.init_lr_ratio
    )
