"""Defaults that follow the machine: ranks per node, and the number format of the computation.

``import verl.config`` registers three resolvers of OmegaConf, which the YAML files use:

``${verl.gpus_per_node:}``
    The GPUs of each node: of the Ray cluster's nodes if the run connects to one, else of this machine. 1 without a
    GPU, with ``trainer.device=cpu``, and with ``trainer.controller=local``, which has one rank.
``${verl.dtype:}``
    ``bfloat16`` on GPUs, and ``float32`` on a CPU, where passes in bfloat16 take longer.
``${verl.stored_dtype:...}``
    The format in which FSDP stores weights: ``fp32``, and of a frozen model the format of the computation.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.base.ray_address import answers, cluster_address

logger = logging.getLogger(__name__)

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs: NVIDIA's on Linux, that of Windows' subsystem for Linux, AMD's."""
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 60.0

_assumed: ContextVar[int | None] = ContextVar("assumed GPUs of each node", default=None)


@contextmanager
def assumed_gpus(per_node: int) -> Iterator[None]:
    """Within the block, each node has so many GPUs, whatever this machine has: for plans of runs elsewhere."""
    token = _assumed.set(per_node)
    try:
        yield
    finally:
        _assumed.reset(token)


def has_driver() -> bool:
    """Return whether the driver of a GPU is loaded on this machine; PyTorch may still be unable to use it."""
    return any(map(os.path.exists, DRIVER_FILES))


def local_gpus() -> int:
    """GPUs that PyTorch finds in this process. Without a driver PyTorch is not imported to count none."""
    if sys.modules.get("torch") is None and not has_driver():
        return 0
    import torch

    # Unlike is_available, it asks the driver's library and not CUDA, which a process cannot use after a fork.
    return torch.cuda.device_count()


def gpus_of_nodes(trainer: Mapping[str, object], ray_init: Mapping[str, object] | None = None) -> Sequence[int]:
    """Return the GPUs of each node that has some, the most first: of the Ray cluster, else of this machine.

    Args:
        trainer: the section ``trainer``; its ``controller`` counts.
        ray_init: arguments of ``ray.init``; ``address`` names a cluster that this process may not be connected to yet.
    """
    if (assumed := _assumed.get()) is not None:
        return (assumed,)
    if trainer.get("controller", "ray") == "ray":
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            return gpus_among(ray.nodes())
        if address := cluster_address(ray_init or {}):
            counts = _gpus_of_cluster(address)
            if counts is not None:
                return counts
    count = local_gpus()
    return (count,) if count else ()


def gpus_among(nodes: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the GPUs of each live node of ``ray.nodes()`` that has some, the most first."""
    counts = (int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])
    return tuple(sorted(filter(None, counts), reverse=True))


@functools.cache
def _gpus_of_cluster(address: str) -> tuple[int, ...] | None:
    """Ask a cluster in a process of its own, as the driver may still be forked; None if it does not answer.

    The run itself then says what is wrong with the address.
    """
    if not answers(address, CONNECT_TIMEOUT_S):
        return None
    ask = (
        "import json, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error'); "
        "print(json.dumps(ray.nodes()))"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ask, address],
            capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("the GPUs of the Ray cluster at %s cannot be counted (%s).", address, type(error).__name__)
        return None
    return gpus_among(json.loads(answer.stdout.splitlines()[-1]))


def _sections(root: DictConfig) -> tuple[Mapping[str, object], Mapping[str, object]]:
    trainer = OmegaConf.select(root, "trainer")
    ray_init = OmegaConf.select(root, "ray_kwargs.ray_init")
    return (
        trainer if isinstance(trainer, Mapping) else {},
        ray_init if isinstance(ray_init, Mapping) else {},
    )


def _gpus_per_node(*, _root_: DictConfig) -> int:
    trainer, ray_init = _sections(_root_)
    if trainer.get("device") == "cpu" or trainer.get("controller") == "local":
        return 1
    counts, nodes = gpus_of_nodes(trainer, ray_init), trainer.get("nnodes")
    used = counts[: nodes if isinstance(nodes, int) and nodes > 0 else 1]
    return min(used, default=1)


def _dtype(*, _root_: DictConfig) -> str:
    trainer, ray_init = _sections(_root_)
    on_gpu = trainer.get("device") != "cpu" and gpus_of_nodes(trainer, ray_init)
    return "bfloat16" if on_gpu else "float32"


def stored_dtype(forward_only: bool, mixed_precision: Mapping[str, Any] | None, dtype: str) -> str:
    """Return the format in which FSDP stores weights by default: fp32 to train them, else that of the computation."""
    if not forward_only:
        return "fp32"
    return dtype if mixed_precision is None else mixed_precision["param_dtype"]


GPUS_PER_NODE, DTYPE = "${verl.gpus_per_node:}", "${verl.dtype:}"
OmegaConf.register_new_resolver("verl.gpus_per_node", _gpus_per_node, replace=True)
OmegaConf.register_new_resolver("verl.dtype", _dtype, replace=True)
STORED_DTYPE = "${verl.stored_dtype:${.forward_only},${.mixed_precision},${.dtype}}"
OmegaConf.register_new_resolver("verl.stored_dtype", stored_dtype, replace=True)
