"""Every path that touches all weights: peak memory, bytes read and seconds of each process.

    python -m benchmarks.whole_models [--gib 1] [--ranks 2] [--paths load resume merge ...] [--json weights.json]

A dense Qwen3 shape and a mixture of experts, whose files have the experts one by one, both in bf16 with a file for each
layer, are taken through each path in new processes that form a gloo group. ``peak`` is the largest increase of memory
that no file backs (Pss_Anon and Pss_Shmem in /proc/self/smaps_rollup: what processes share is divided by their number),
as a share of the model in the format that the path holds; mapped files are not in it, because the kernel takes their
pages when memory is short. ``read`` are the bytes
that the process fetched from the disk (read_bytes in /proc/self/io), as a share of the files; the page cache is emptied
of them before, and ranks share it, as those of one machine do. Meanwhile freed blocks above 1 MiB go back to the kernel
at once. ``time`` is the seconds of further processes, which do neither, divided by those of reading the files from the
disk once, right before; ``processor`` is the processor time of these processes together, divided likewise.

As with a model that is much larger than a file of 2 GiB, files that are written end at a sixteenth of the model, merges
compare every weight, but no logits, and ranks on CPUs keep no whole weights between updates.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from verl.backends.cpu import backend as cpu_backend
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, McoreEngineConfig
from verl.model_merger import fsdp as merging
from verl.model_merger.__main__ import main as merger
from verl.testing.models import tiny_tokenizer
from verl.utils.model import empty_causal_lm
from verl.utils.transformers_private import names_on_disk
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp import sharded_model
from verl.workers.engine.model.export import write_in_turn
from verl.workers.engine.model.headed import own_state, pretrained_weights
from verl.workers.rollout.weights import FileBuffer
from verl.workers.teacher.average import AveragedWeights

GIB = 1 << 30
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 104}


def config_of(kind: str, gib: float) -> PretrainedConfig:
    """A config whose weights take ``gib`` GiB in bf16."""
    sizes: dict[str, Any] = {"hidden_size": 1024, **ATTENTION}
    if kind == "experts":
        layers = max(1, round(gib * GIB / (2 * (8 * 3 * 1024 * 512 + 3 * 1024 * 1024))))
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        return Qwen3MoeConfig(num_hidden_layers=layers, **sizes)
    layers = max(1, round(gib * GIB / (2 * (3 * 1024 * 4096 + 3 * 1024 * 1024))))
    return Qwen3Config(num_hidden_layers=layers, intermediate_size=4096, **sizes)


def write_model(folder: Path, kind: str, gib: float) -> None:
    """Write the model layer by layer; each weight is a repeated block of numbers."""
    folder.mkdir(parents=True)
    config = config_of(kind, gib)
    config.architectures = ["Qwen3MoeForCausalLM" if kind == "experts" else "Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model = empty_causal_lm(config, torch.bfloat16, torch.device("meta"))
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in own_state(model).items():
        files.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = weight
    index = {}
    for layer, weights in files.items():
        repeated = {
            name: block.repeat(-(-weight.numel() // len(block)))[: weight.numel()].view(weight.shape)
            for name, weight in weights.items()
        }
        parts = {name: tensor.contiguous() for name, tensor in names_on_disk(model, repeated).items()}
        save_file(parts, folder / f"model-{layer}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(parts, f"model-{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def size_of(folder: Path, ending: str) -> int:
    """Bytes of the files with this ending."""
    return sum(path.stat().st_size for path in folder.rglob(f"*{ending}"))


def forget(folder: Path) -> None:
    """Empty the page cache of all files below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- what is measured in a process


@dataclass
class Measured:
    """What one process did on a path."""

    is_watched: bool = False
    """Whether its memory is looked at."""
    peak: int = 0
    """Bytes."""
    read: int = 0
    """Bytes."""
    seconds: float = 0.0
    processor_seconds: float = 0.0


def fields(name: str) -> dict[str, str]:
    """One of the files of this process in /proc."""
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def memory() -> int:
    """Bytes of this process that no file backs."""
    sizes = fields("smaps_rollup")
    return sum(int(sizes[key].split()[0]) for key in ("Pss_Anon", "Pss_Shmem")) * 1024


@contextmanager
def measured(result: Measured) -> Iterator[None]:
    """Measure the block; memory, if it is watched, every 20 ms."""
    done, first, read = threading.Event(), memory(), int(fields("io")["read_bytes"])
    began, used = time.monotonic(), time.process_time()

    def watch() -> None:
        while not done.wait(0.02):
            result.peak = max(result.peak, memory() - first)

    thread = threading.Thread(target=watch)
    if result.is_watched:
        thread.start()
    try:
        yield
    finally:
        result.seconds, result.processor_seconds = time.monotonic() - began, time.process_time() - used
        if result.is_watched:
            done.set()
            thread.join()
            result.peak = max(result.peak, memory() - first)
        result.read = int(fields("io")["read_bytes"]) - read


# ---- the paths


def engine_of(model: Path, strategy: str = "fsdp2", ranks: int = 1, lora_rank: int = 0) -> BaseEngine:
    """An engine in fp32 that is not initialized; frozen without adapters."""
    settings = (
        McoreEngineConfig(forward_only=True, dtype="fp32", tensor_model_parallel_size=ranks)
        if strategy == "megatron"
        else FSDPEngineConfig(forward_only=not lora_rank, dtype="fp32")
    )
    config = HFModelConfig(path=str(model), lora_rank=lora_rank)
    return EngineRegistry.new(
        "language_model",
        strategy,
        model_config=config,
        engine_config=settings,
        optimizer_config=FSDPOptimizerConfig() if lora_rank else None,
        device_name="cpu",
    )


def load(kind: str, strategy: str = "fsdp2") -> Callable[[Path, int, Measured], None]:
    """Start an engine from a model folder."""

    def run(folder: Path, ranks: int, result: Measured) -> None:
        engine_of(folder / "tiny" / kind, strategy, ranks).initialize()
        engine = engine_of(folder / kind, strategy, ranks)
        with measured(result):
            engine.initialize()

    return run


def started(folder: Path, ranks: int, strategy: str = "fsdp2", lora_rank: int = 0) -> BaseEngine:
    """An engine of the dense model."""
    engine = engine_of(folder / "dense", strategy, ranks, lora_rank)
    with (  # models up to 1 GiB are kept whole between updates
        patch.object(cpu_backend, "KEEP_BYTES", 0),
        patch.object(cpu_backend, "WholeWeights", partial(cpu_backend.WholeWeights, keep_bytes=0)),
    ):
        engine.initialize()
    return engine


def save(strategy: str, target: str, lora_rank: int = 0) -> Callable[[Path, int, Measured], None]:
    """Write the shards of a checkpoint."""

    def run(folder: Path, ranks: int, result: Measured) -> None:
        engine = started(folder, ranks, strategy, lora_rank)
        with measured(result):
            engine.save_checkpoint(str(folder / target), contents=["model"])

    return run


@contextmanager
def in_small_files(folder: Path, width: int) -> Iterator[None]:
    """End files at a sixteenth of the dense model, whose numbers have ``width`` bytes, and compare no logits."""
    file_bytes = size_of(folder / "dense", ".safetensors") // 2 * width // 16
    with (
        patch.object(sharded_model, "write_in_turn", partial(write_in_turn, file_bytes=file_bytes)),
        patch.object(merging, "write_in_files", partial(merging.write_in_files, file_bytes=file_bytes)),
        patch.object(merging, "available_memory", lambda: 0),
    ):
        yield


def export(folder: Path, ranks: int, result: Measured) -> None:
    """Write a model folder."""
    engine = started(folder, ranks)
    with in_small_files(folder, 4), measured(result):
        engine.save_checkpoint(str(folder / "exported"), contents=["hf_model"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "exported")


def resume(folder: Path, ranks: int, result: Measured) -> None:
    """Read the shards of a checkpoint."""
    engine = started(folder, ranks)
    dist.barrier()
    if dist.get_rank() == 0:
        forget(folder / "saved")
    dist.barrier()
    with measured(result):
        engine.load_checkpoint(str(folder / "saved"), contents=["model"])


def merge(source: str, width: int) -> Callable[[Path, int, Measured], None]:
    """Merge shards into a model folder, in one process."""

    def run(folder: Path, ranks: int, result: Measured) -> None:
        for _ in pretrained_weights(HFModelConfig(path=str(folder / "tiny" / "dense")), torch.float32):
            pass
        with in_small_files(folder, width), measured(result):
            if merger([str(folder / source), "--target_dir", str(folder / "merged")]):
                raise SystemExit("the merger failed")
        shutil.rmtree(folder / "merged")

    return run


def from_folder(kind: str) -> Callable[[Path, int, Measured], None]:
    """Give an engine (a teacher, a rollout alone) the weights of a model folder, which every rank reads."""

    def run(folder: Path, ranks: int, result: Measured) -> None:
        for _ in pretrained_weights(HFModelConfig(path=str(folder / "tiny" / kind)), torch.bfloat16):
            pass
        with measured(result):
            for _ in pretrained_weights(HFModelConfig(path=str(folder / kind)), torch.bfloat16):
                pass

    return run


def to_engine(folder: Path, ranks: int, result: Measured) -> None:
    """Give the weights to a rollout engine in parts of 64 MiB of shared memory, which rank 0 fills."""
    engine = started(folder, ranks)
    with measured(result):
        weights = engine.weights_for_rollout(torch.bfloat16)
        for _ in weights if dist.get_rank() else FileBuffer().parts(weights, 64 << 20):
            pass


def average(folder: Path, ranks: int, result: Measured) -> None:
    """Begin a moving average of the weights, update it, and compute with it."""
    engine = started(folder, ranks)
    for parameter in engine.model.parameters():  # type: ignore[attr-defined]
        parameter.requires_grad_(True)
    with measured(result):
        averaged = AveragedWeights(engine, 0.9)
        averaged.update()
        with averaged.in_model():
            pass


@dataclass(frozen=True)
class Route:
    """A path, what it reads, and how wide the numbers are that it holds."""

    run: Callable[[Path, int, Measured], None]
    reads: str = "dense"
    """Folder."""
    after: str = ""
    """The path that writes that folder."""
    is_alone: bool = False
    """Whether one process does it."""
    width: int = 4
    """Bytes for each number that the path holds."""


ROUTES = {
    "load": Route(load("dense")),
    "load, experts": Route(load("experts"), "experts"),
    "load, Megatron TP": Route(load("dense", "megatron")),
    "from folder to engine": Route(from_folder("dense"), width=2),
    "from folder to engine, experts": Route(from_folder("experts"), "experts", width=2),
    "to engine": Route(to_engine, width=2),
    "average": Route(average),
    "export": Route(export),
    "save": Route(save("fsdp2", "saved")),
    "save, Megatron TP": Route(save("megatron", "saved_megatron")),
    "save, LoRA": Route(save("fsdp2", "saved_lora", lora_rank=8)),
    "resume": Route(resume, "saved", "save"),
    "merge": Route(merge("saved", 4), "saved", "save", is_alone=True),
    "merge, Megatron TP": Route(merge("saved_megatron", 4), "saved_megatron", "save, Megatron TP", is_alone=True),
    "merge, LoRA": Route(merge("saved_lora", 2), after="save, LoRA", is_alone=True, width=2),
}


def in_process(rank: int, name: str, folder: Path, ranks: int, is_watched: bool) -> None:
    """Run one path as one rank, and write what was measured."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = Measured(is_watched)
    ROUTES[name].run(folder, ranks, result)
    (folder / f"rank_{rank}.json").write_text(json.dumps(asdict(result)))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, folder: Path, ranks: int, is_watched: bool) -> list[Measured]:
    """Run one path in new processes; return what each measured."""
    route = ROUTES[name]
    ranks = 1 if route.is_alone else ranks
    (folder / "store").unlink(missing_ok=True)
    forget(folder)
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if is_watched else {}
    with patch.dict(os.environ, allocator):
        mp.start_processes(in_process, (name, folder, ranks, is_watched), ranks, start_method="spawn")
    (folder / f"{name}.done").touch()
    return [Measured(**json.loads((folder / f"rank_{rank}.json").read_text())) for rank in range(ranks)]


def seconds_to_read(files: list[Path]) -> float:
    """Read files from the disk, and forget them again."""
    began, block = time.monotonic(), bytearray(1 << 22)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return time.monotonic() - began


@dataclass
class Shares:
    """What a path takes."""

    peak: list[float]
    """Of each process, as a share of the model."""
    read: list[float]
    """Of each process, as a share of the files."""
    time: float | None = None
    """Seconds, as a multiple of those of reading the files."""
    processor_time: float | None = None
    """Processor time of all processes, likewise."""


def shares(name: str, folder: Path, ranks: int, is_timed: bool) -> Shares:
    """Measure a path, after the one that writes what it reads."""
    route = ROUTES[name]
    if route.after and not (folder / f"{route.after}.done").exists():
        measure(route.after, folder, ranks, is_watched=False)
    numbers = size_of(folder / ("experts" if route.reads == "experts" else "dense"), ".safetensors") / 2
    ending = ".pt" if route.reads.startswith("saved") else ".safetensors"
    files = sorted((folder / route.reads).rglob(f"*{ending}"))
    processes = measure(name, folder, ranks, is_watched=True)
    size = sum(path.stat().st_size for path in files)
    found = Shares([one.peak / (numbers * route.width) for one in processes], [one.read / size for one in processes])
    if is_timed:
        forget(folder)
        reading = seconds_to_read(files)
        processes = measure(name, folder, ranks, is_watched=False)
        found.time = max(one.seconds for one in processes) / reading
        found.processor_time = sum(one.processor_seconds for one in processes) / reading
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the models in bf16 (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--paths", nargs="+", choices=list(ROUTES), default=list(ROUTES), help="what to measure")
    parser.add_argument("--json", type=Path, help="write the shares to this file")
    args = parser.parse_args()
    found: dict[str, Shares] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, args.gib)
        print("| path | ranks | peak of a process | read by a process | time | processor |\n|---|---|---|---|---|---|")
        for path in args.paths:
            found[path] = one = shares(path, folder, args.ranks, is_timed=True)
            peaks, reads = (", ".join(f"{share:.2f}" for share in part) for part in (one.peak, one.read))
            print(
                f"| {path} | {len(one.peak)} | {peaks} | {reads} | {one.time:.1f} | {one.processor_time:.1f} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({path: asdict(one) for path, one in found.items()}, indent=1))


def write_models(folder: Path, gib: float) -> None:
    """Write both models in ``gib`` GiB, and in one layer to warm up with."""
    for kind in ("dense", "experts"):
        write_model(folder / kind, kind, gib)
        write_model(folder / "tiny" / kind, kind, 0.0)


if __name__ == "__main__":
    main()
