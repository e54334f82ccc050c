"""What `verl plan` says of memory against what real FSDP and Megatron engines take, part by part, on CPUs.

Each case runs an engine of 1 or 2 ranks in processes of their own, through one step of training. Weights, gradients and
optimizer state are the bytes of the engine's tensors; activations those that autograd keeps; the pass is how far
PyTorch's allocator rises at most in a forward and backward pass, by its own records. The engine computes as on a GPU:
the CPU's own layers and collectives, which keep other tensors, are left out. All are of the rank with most. ::

    python -m benchmarks.plan_accuracy [--quick] [--json plan.json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.backends.base import Backend
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, McoreEngineConfig
from verl.plugins.plan.memory import ModelMemory
from verl.plugins.plan.passes import Rows
from verl.plugins.plan.plan import layout_of
from verl.plugins.plan.shapes import ModelShape
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.utils.sharded_tensor import local_rows
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.engine.passes import MicroBatch, split_micro_batches
from verl.workers.losses import sft_loss

PARTS = ("weights", "gradients", "optimizer", "kept activations", "pass")


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    name: str
    family: str
    ranks: int
    checkpoints: bool
    tokens: int
    shape: Mapping[str, Any]
    dtype: str = "bfloat16"
    is_shared: bool = False
    """Whether the four sequences share a prompt, half as long as they are."""
    sizes: Mapping[str, Any] | None = None
    """Of a layout of Megatron; None is FSDP. Each stage of its pipeline has a pass."""

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return (self.sizes or {}).get("pipeline_model_parallel_size", 1)

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the back end."""
        if self.sizes is None:
            return FSDPEngineConfig(dtype=self.dtype)
        return McoreEngineConfig(dtype=self.dtype, **self.sizes)

    @property
    def rows(self) -> Rows:
        """The sequences, as the plan sees them."""
        length = self.tokens // 4
        prompt = length // 2 if self.is_shared else 16
        return Rows(prompt, length - prompt, 4 if self.is_shared else 1)


SMALL_SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "vocab": 1024}  # fmt: skip
_MEDIUM = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 64, "vocab": 16384}  # fmt: skip
EXPERT_SHAPE = {**SMALL_SHAPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
_LATENT = {**SMALL_SHAPE, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
           "qk_nope_head_dim": 32, "v_head_dim": 48, "head_dim": 16, "moe_intermediate_size": 192}  # fmt: skip
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
UNEVEN = {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 3}}
EXPERT = {"expert_model_parallel_size": 2}
CASES = [
    Case("small qwen3", "qwen3", 1, False, 1024, SMALL_SHAPE),
    Case("small llama", "llama", 1, True, 1024, SMALL_SHAPE),
    Case("small llama", "llama", 2, False, 1024, SMALL_SHAPE),
    Case("small qwen3", "qwen3", 2, True, 1024, SMALL_SHAPE),
    Case("medium qwen3", "qwen3", 1, True, 2048, _MEDIUM),
    Case("medium qwen3", "qwen3", 2, True, 2048, _MEDIUM),
    Case("medium qwen3", "qwen3", 2, False, 2048, _MEDIUM),
    Case("medium llama, fp32", "llama", 2, True, 2048, _MEDIUM, "fp32"),
    Case("medium qwen3, shared prompt", "qwen3", 1, True, 2048, _MEDIUM, is_shared=True),
    Case("medium qwen3, shared prompt", "qwen3", 1, False, 2048, _MEDIUM, is_shared=True),
    *(
        Case(f"small qwen3, Megatron {name}", "qwen3", ranks, checkpoints, 1024, SMALL_SHAPE, sizes=sizes)
        for name, ranks, sizes in (("1 rank", 1, {}), ("TP 2", 2, TENSOR), ("PP 2", 2, PIPELINE))
        for checkpoints in (False, True)
    ),
    Case("small qwen3, Megatron PP 2, layers 3 and 1", "qwen3", 2, True, 1024, SMALL_SHAPE, sizes=PIPELINE | UNEVEN),
    *(Case("small qwen3_moe", "qwen3_moe", 1, on, 1024, EXPERT_SHAPE) for on in (True, False)),
    Case("small deepseek_v3", "deepseek_v3", 1, True, 1024, _LATENT),
    Case("small deepseek_v3", "deepseek_v3", 1, False, 1024, _LATENT),
    Case("small deepseek_v3, Megatron 1 rank", "deepseek_v3", 1, True, 1024, _LATENT, sizes={}),
    Case("small deepseek_v3, Megatron EP 2", "deepseek_v3", 2, False, 1024, _LATENT, sizes=EXPERT),
    *(
        Case("small qwen3_moe, Megatron EP 2", "qwen3_moe", 2, on, 1024, EXPERT_SHAPE, sizes=EXPERT)
        for on in (False, True)
    ),
]


def batch_of(rows: Rows, vocabulary: int) -> DataProto:
    """Four sequences of a prompt, their own or the same, and a response."""
    length, prompt = rows.prompt + rows.response, rows.prompt
    ids = torch.randint(2, vocabulary, (4, length), generator=torch.Generator().manual_seed(0))
    if rows.group > 1:
        ids[:, :prompt] = ids[0, :prompt]
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": torch.arange(length).expand(4, -1).contiguous(),
        "responses": ids[:, prompt:],
        "response_mask": ones[:, prompt:],
    }
    return DataProto.from_dict(tensors=columns)


def nbytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(part.numel() * part.dtype.itemsize for part in (local_rows(tensor)[0] for tensor in tensors))


def on_rank(rank: int, ranks: int, cases: Sequence[tuple[str, Case]], folder: str) -> None:
    """Measure the cases of so many ranks, and write ``<case>_<rank>.json``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store_{cases[0][0]}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name, case in cases:
        found = one_engine(case, f"{folder}/{name}", Path(f"{folder}/{name}_{rank}_trace.json"))
        Path(f"{folder}/{name}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def one_engine(case: Case, model: str, trace: Path) -> dict[str, float]:
    """Run one engine through a step, and measure it."""
    engine: Any = EngineRegistry.new(
        "language_model",
        "fsdp2" if case.sizes is None else "megatron",
        model_config=HFModelConfig(path=model, enable_gradient_checkpointing=case.checkpoints),
        engine_config=case.placement,
        optimizer_config=FSDPOptimizerConfig(lr=1e-5),
        device_name="cpu",
    )
    if case.sizes is None:
        engine.backend = Backend(engine.device)
    engine.initialize()
    vocabulary = case.shape["vocab"]
    micro = MicroBatchConfig(micro_batch_size_per_gpu=4 // case.stages, shares_prompts=case.is_shared)
    data, small = batch_of(case.rows, vocabulary), batch_of(Rows(16, 16, case.rows.group), vocabulary)
    with engine.train_mode():
        engine.train_batch(small, sft_loss, micro)  # the optimizer makes its state
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(small, sft_loss, micro)
        stored = of_fsdp(engine) if case.sizes is None else of_megatron(engine)
        # With gradients of an earlier pass, to which this one adds: what it takes besides.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine.forward_backward_batch(data, sft_loss, micro)
        profile.export_chrome_trace(str(trace))
        engine.optimizer_zero_grad()
        if case.sizes is None:
            kept = kept_by_fsdp(engine, next(split_micro_batches(data, micro, engine.device)))
        else:
            kept = kept_by_megatron(engine, data, micro)
    return stored | {"kept activations": kept, "pass": allocated_rise(trace)}


def of_fsdp(engine: Any) -> dict[str, float]:
    """What lies in memory between passes."""
    return {
        "weights": nbytes(engine.model.parameters()),
        "gradients": nbytes(p.grad for p in engine.model.parameters()),
        "optimizer": nbytes(v for s in engine.optimizer.state.values() for v in s.values() if v.dim()),
    }


def of_megatron(engine: Any) -> dict[str, float]:
    """What lies in memory between passes."""
    return {
        "weights": nbytes(engine.model.pieces.parameters()),
        "gradients": nbytes(engine.optimizer.buffers()),
        "optimizer": nbytes(engine.optimizer.tensors()),
    }


def kept_by_fsdp(engine: Any, part: MicroBatch) -> int:
    """Bytes of what autograd keeps of the decoder layers, without gathered weights."""
    kept: dict[int, int] = {}
    gathered: set[int] = set()

    def weights_of(module: torch.nn.Module, *_: Any) -> None:
        gathered.update(p.untyped_storage().data_ptr() for p in module.parameters() if not isinstance(p, DTensor))

    handles = [layer.register_forward_hook(weights_of) for layer in engine._units]
    with keeping(kept):
        engine.model(engine._inputs(part), frozenset({"hidden"}), 1.0)
    for handle in handles:
        handle.remove()
    engine._reshard()
    return sum(size for pointer, size in kept.items() if pointer not in gathered)


def kept_by_megatron(engine: Any, data: DataProto, micro: MicroBatchConfig) -> int:
    """Bytes of what autograd keeps of the forward passes that this stage makes before its first backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in engine.model.pieces.parameters()}
    passes: list[dict[int, int]] = []
    contexts = ExitStack()

    def begin(*_: Any) -> None:
        passes.append({})
        contexts.enter_context(keeping(passes[-1]))

    def end(*_: Any) -> None:
        contexts.close()

    (piece,) = engine.model.pieces
    handles = [piece.register_forward_pre_hook(begin), piece.register_forward_hook(end)]
    engine.forward_backward_batch(data, sft_loss, micro)
    for handle in handles:
        handle.remove()
    engine.optimizer_zero_grad()
    at_once = passes[: engine.layout.pipeline if engine.model.first.pre_process else 1]  # of at most two stages
    return sum(size for kept in at_once for pointer, size in kept.items() if pointer not in weights)


def keeping(kept: dict[int, int]) -> AbstractContextManager[None]:
    """Fill ``kept`` with address and bytes of what autograd keeps in the context."""

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def allocated_rise(trace: Path) -> int:
    """Largest rise of the allocator's total in a trace of PyTorch's profiler, in bytes."""
    events = json.loads(trace.read_text())["traceEvents"]
    totals = [e["args"]["Total Allocated"] for e in sorted(events, key=_time) if e.get("name") == "[memory]"]
    return max(totals) - totals[0]


def _time(event: Mapping[str, Any]) -> float:
    return event.get("ts", 0.0)


def planned(case: Case, model: str) -> dict[str, float]:
    """What the planner says."""
    shape = ModelShape.read(model)
    layout = layout_of(case.placement, case.ranks, False, shape.layers)
    memory = ModelMemory(
        shape=shape, layout=layout, trained=shape.parameters(), checkpoints=case.checkpoints, with_entropy=False
    )
    tokens = case.rows.for_rows(4 // case.stages)
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "kept activations": memory.kept_activations(tokens.computed, tokens.keys - tokens.computed),
        "pass": sum(memory.training_pass(tokens).values()),
    }


def compare(cases: Sequence[Case]) -> Iterator[tuple[Case, dict[str, tuple[float, float]]]]:
    """Yield each case with part → planned bytes, and measured ones of the rank with most."""
    with tempfile.TemporaryDirectory() as folder:
        named = [(f"case{number}", case) for number, case in enumerate(cases)]
        for name, case in named:
            tiny_model_dir(f"{folder}/{name}", case.family, **dict(case.shape))
        for ranks, sizes in dict.fromkeys((case.ranks, repr(case.sizes)) for case in cases):
            # A process has one layout of Megatron.
            wanted = [(name, case) for name, case in named if (case.ranks, repr(case.sizes)) == (ranks, sizes)]
            mp.start_processes(on_rank, (ranks, wanted, folder), ranks, start_method="spawn")
            for name, case in wanted:
                found = [json.loads(Path(f"{folder}/{name}_{rank}.json").read_text()) for rank in range(ranks)]
                plan = planned(case, f"{folder}/{name}")
                most = {part: max(one[part] for one in found) for part in PARTS}
                yield case, {part: (plan[part], real) for part, real in most.items()}


def main() -> None:
    """Measure all cases and print a table: planned MiB, and its difference from what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models only")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    found, worst = {}, 0.0
    print(f"| model | ranks | checkpointing | {' | '.join(PARTS)} |")
    print(f"|---|---|---|{'---|' * len(PARTS)}")
    for case, pairs in compare([case for case in CASES if case.name.startswith("small") or not args.quick]):
        errors = {part: plan / real - 1 for part, (plan, real) in pairs.items()}
        worst = max(worst, *map(abs, errors.values()))
        cells = (f"{pairs[part][0] / 2**20:.1f} MiB ({errors[part]:+.1%})" for part in PARTS)
        print(
            f"| {case.name} | {case.ranks} | {'yes' if case.checkpoints else 'no'} | {' | '.join(cells)} |", flush=True
        )
        found[f"{case.name}, {case.ranks} ranks, checkpointing {case.checkpoints}"] = pairs
    print(f"\nlargest difference: {worst:.1%}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
