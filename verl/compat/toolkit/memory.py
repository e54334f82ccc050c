"""Memory of GPUs: log it, free it, and keep activations out of it."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from verl.utils.metric import GB
from verl.workers.engine.fsdp.activations import activations_on_cpu

F = TypeVar("F", bound=Callable[..., object])


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log the GPU memory of this process in GiB, on ``rank`` only (or without a process group); nothing without GPUs.

    Without ``logger`` the message goes to verl's own, at INFO or above.
    """
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_rank() != rank):
        return
    free, total = torch.cuda.mem_get_info()
    message = (
        f"{head}: GPU memory allocated {torch.cuda.memory_allocated() / GB:.2f} GiB, reserved "
        f"{torch.cuda.memory_reserved() / GB:.2f} GiB, used by all {(total - free) / GB:.2f} of {total / GB:.2f} GiB"
    )
    if logger is None:
        logger, level = logging.getLogger("verl"), max(level, logging.INFO)
    logger.log(level, message)


class GPUMemoryLogger:
    """Decorator that logs the GPU memory before and after a function.

    Args:
        role: name of the owner in the messages.
        logger: verl's own by default.
        level: of the messages.
        log_only_rank_0: log on rank 0 only.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role = role
        self.logger = logger or logging.getLogger("verl")
        self.level = level
        self.log_only_rank_0 = log_only_rank_0

    def __call__(self, decorated_function: F) -> F:
        """Decorate a function."""

        @functools.wraps(decorated_function)
        def logged(*args: object, **kwargs: object) -> object:
            return self.log(decorated_function, *args, **kwargs)

        return logged  # type: ignore[return-value]

    def log(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call ``func`` with its arguments and log the memory before and after."""
        self._log(f"Before {self.role} {func.__name__}")
        result = func(*args, **kwargs)
        self._log(f"After {self.role} {func.__name__}")
        return result

    def _log(self, head: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        log_gpu_memory_usage(head, self.logger, self.level, rank=0 if self.log_only_rank_0 else rank)


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and return unused GPU memory to the device, until no more comes free; nothing without a GPU.

    Args:
        force_sync: wait for the device first.
        max_retries: rounds at most.
    """
    if not torch.cuda.is_available():
        return
    for _ in range(max_retries):
        before = torch.cuda.memory_reserved()
        gc.collect()
        if force_sync:
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved() == before:
            return


def enable_activation_offloading(model: nn.Module, strategy: str = "fsdp2", enable_ckpt: bool = False) -> None:
    """Copy what the backward pass needs to CPU memory during the forward pass, and back when it is used.

    Weights stay where they are. Copies are not overlapped with computation, so this is slower than gradient
    checkpointing where that suffices.

    Args:
        model: changed in place.
        strategy: the way of sharding, ``fsdp`` or ``fsdp2``; both work.
        enable_ckpt: also keep only each layer's input, and compute the layer again (a Transformers model).
    """
    if strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"strategy='{strategy}' is unknown. Use fsdp or fsdp2.")
    if enable_ckpt:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    forward = model.forward

    @functools.wraps(forward)
    def offloaded(*args: object, **kwargs: object) -> object:
        with activations_on_cpu():
            return forward(*args, **kwargs)

    model.forward = offloaded  # type: ignore[method-assign]
