"""Published figures of GPUs, and the cluster that a plan is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.plugins.plan import constants
from verl.utils.flops_counter import published_peak

_PCIE_4, _PCIE_5 = 32e9, 64e9


@dataclass(frozen=True)
class Gpu:
    """Figures of one GPU from NVIDIA's data sheet for it."""

    name: str
    memory_gb: float
    """Memory in 10⁹ bytes."""
    memory_bytes_per_s: float
    """Bandwidth of that memory."""
    link_bytes_per_s: float
    """Bandwidth to GPUs that are joined to it, in one direction: half of what data sheets add up for both."""
    host_bytes_per_s: float
    """Bandwidth to the host's memory in one direction."""
    joined: int = 8
    """GPUs that are joined by such links, if their nodes are next to each other."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory."""
        return self.memory_gb * 1e9

    @property
    def peak_flops(self) -> float:
        """Peak of dense bf16 matrix products, in FLOP/s."""
        peak = published_peak(self.name)
        assert peak is not None, self.name
        return peak


GPUS: dict[str, Gpu] = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("GB200", 186, 8.0e12, 900e9, 225e9, 72),
        Gpu("B200", 180, 8.0e12, 900e9, _PCIE_5),
        Gpu("H200", 141, 4.8e12, 450e9, _PCIE_5),
        Gpu("H100", 80, 3.35e12, 450e9, _PCIE_5),
        Gpu("H800", 80, 3.35e12, 200e9, _PCIE_5),
        Gpu("H20", 96, 4.0e12, 450e9, _PCIE_5),
        Gpu("A100", 80, 2.039e12, 300e9, _PCIE_4),
        Gpu("A800", 80, 2.039e12, 200e9, _PCIE_4),
        Gpu("L40S", 48, 0.864e12, 32e9, _PCIE_4),
        Gpu("A40", 48, 0.696e12, 32e9, _PCIE_4),
        Gpu("4090", 24, 1.008e12, 32e9, _PCIE_4),
    )
}
"""SXM or the only form, with the largest memory; GPUs without NVLink have PCIe 4.0 x16."""


def gpu_named(name: str) -> Gpu:
    """Return a GPU by name, in any case.

    Raises:
        ConfigError: it is not in the table.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        hint = suggest(name.lower(), list(GPUS))
        raise ConfigError(
            f"--gpu {name}: no figures of it are known.{hint} Known are {', '.join(GPUS)}. Take one that is alike, and "
            "its --memory_gb."
        )
    return gpu


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of a run, and how much of their peaks it is assumed to reach.

    :mod:`.constants` has the meaning of the other fields, of single operations; which part of the peak a
    whole pass reaches follows from them and the model.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    memory_gb: float
    """Memory of one GPU in 10⁹ bytes."""
    reserved_gb: float = 3.0
    """Memory that is no tensor: CUDA's context, NCCL's buffers, what the allocator cannot use. An assumption."""
    mfu: float | None = None
    """Part of the peak FLOP/s that passes reach, as measured; None derives it from the operations of a pass."""
    pins_host_memory: bool = True
    """True if offloaded tensors go to pinned host memory that is reused, as in the engines here."""
    product_use: float = constants.PRODUCT_USE
    attention_use: float = constants.ATTENTION_USE
    bandwidth_use: float = constants.BANDWIDTH_USE
    link_use: float = constants.LINK_USE
    network_bytes_per_s: float = constants.NETWORK_BYTES_PER_S
    host_use: float = constants.PINNED_USE
    host_memory_bytes_per_s: float = constants.OPTIMIZER_ON_HOST_BYTES_PER_S
    kernel_s: float = constants.KERNEL_S
    product_s: float = constants.PRODUCT_S
    step_s: float = constants.DECODING_STEP_S
    row_s: float = constants.DECODING_ROW_S
    launch_s: float = constants.LAUNCH_S

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory for tensors on one GPU."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    @property
    def product_flops(self) -> float:
        """FLOP/s of large matrix products on one GPU."""
        return self.gpu.peak_flops * self.product_use

    @property
    def attention_flops(self) -> float:
        """FLOP/s of attention on one GPU."""
        return self.gpu.peak_flops * self.attention_use

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes that operations read and write per second on one GPU."""
        return self.gpu.memory_bytes_per_s * self.bandwidth_use

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes that move between a GPU and pinned memory of the host per second, in one direction."""
        return self.gpu.host_bytes_per_s * self.host_use

    @property
    def joined(self) -> int:
        """GPUs that are joined by links: those of a node, or of several."""
        return max(self.gpus_per_node, self.gpu.joined if self.gpu.joined > 8 else 0)

    def gather_bytes_per_s(self, ranks: int, apart: int = 1) -> float:
        """Bytes that each of ``ranks`` ranks receives per second in a gather or a sum.

        Nodes receive through the network ports of all their ranks together. Neighbours of the group are ``apart`` ranks
        from each other; those between are in other groups, which do the same.
        """
        if ranks * apart <= self.joined:
            return self.gpu.link_bytes_per_s * self.link_use
        ports = max(1, self.joined // apart)
        return min(self.gpu.link_bytes_per_s, ports * self.network_bytes_per_s) * self.link_use

    def exchange_bytes_per_s(self, ranks: int, apart: int = 1) -> float:
        """Bytes that each of ``ranks`` ranks sends per second where each has others for each of the others."""
        near = min(ranks, max(1, self.joined // apart))
        if near == ranks:
            return self.gpu.link_bytes_per_s * self.link_use
        share = (ranks - near) / (ranks - 1)
        slower = max(share / self.network_bytes_per_s, (1 - share) / self.gpu.link_bytes_per_s)
        return self.link_use / slower

    def sum_latency_s(self, ranks: int) -> float:
        """Seconds of a sum of few bytes over ranks: a tree, by the latencies with which NCCL chooses its algorithms."""
        near = min(ranks, self.joined)
        return 6.8e-6 + 2 * ((near - 1) * 0.6e-6 + math.ceil(math.log2(max(1.0, ranks / near))) * 5e-6)
