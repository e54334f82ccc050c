"""Published figures of GPUs, and the cluster that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass

from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.utils.flops_counter import published_peak


@dataclass(frozen=True)
class Gpu:
    """Figures of one GPU from NVIDIA's data sheet for it."""

    name: str
    memory_gb: float
    """Memory in 10⁹ bytes."""
    memory_bytes_per_s: float
    """Bandwidth of that memory."""
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of the node in one direction: half of what data sheets add up for both."""

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
        Gpu("B200", 180, 8.0e12, 900e9),
        Gpu("H200", 141, 4.8e12, 450e9),
        Gpu("H100", 80, 3.35e12, 450e9),
        Gpu("H800", 80, 3.35e12, 200e9),
        Gpu("H20", 96, 4.0e12, 450e9),
        Gpu("A100", 80, 2.039e12, 300e9),
        Gpu("A800", 80, 2.039e12, 200e9),
        Gpu("L40S", 48, 0.864e12, 32e9),
        Gpu("A40", 48, 0.696e12, 32e9),
        Gpu("4090", 24, 1.008e12, 32e9),
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
    """GPUs of a run, and how much of their peaks it is assumed to reach."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    memory_gb: float
    """Memory of one GPU in 10⁹ bytes."""
    reserved_gb: float = 3.0
    """Memory that is no tensor: CUDA's context, NCCL's buffers, what the allocator cannot use. An assumption."""
    mfu: float = 0.4
    """Part of the peak FLOP/s that passes reach. An assumption; docs/internals/planning.md has published ones."""
    bandwidth_use: float = 0.6
    """Part of the memory bandwidth that decoding reaches. An assumption."""
    network_bytes_per_s: float = 50e9
    """Bandwidth between nodes for each GPU: 400 Gbit/s. An assumption."""
    host_bytes_per_s: float = 25e9
    """Bandwidth between a GPU and the host's memory in one direction: PCIe 4.0 x16. An assumption."""
    sum_latency_s: float = 20e-6
    """Seconds that a sum over ranks takes besides its bytes. An assumption."""

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory for tensors on one GPU."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    @property
    def flops(self) -> float:
        """FLOP/s that passes reach on one GPU."""
        return self.gpu.peak_flops * self.mfu

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes that decoding reads per second on one GPU."""
        return self.gpu.memory_bytes_per_s * self.bandwidth_use

    def exchange_bytes_per_s(self, ranks: int) -> float:
        """Bytes that one of ``ranks`` neighbours receives per second in a collective."""
        return self.gpu.link_bytes_per_s if ranks <= self.gpus_per_node else self.network_bytes_per_s
