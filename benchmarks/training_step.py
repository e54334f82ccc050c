"""How near a training step comes to the arithmetic it consists of.

Forward and backward of a small Qwen3 shape on a CPU in fp32: by the plain Transformers model, padded, with full logits,
and by the training engine, in the same run and in turn. Yardstick: matrix products, the fastest of several shapes, by
``torch.mm`` and by oneDNN, which may be much faster and to which PyTorch gives convolutions. Useful FLOP/s leave out
padding and recomputation. ::

    python -m benchmarks.training_step [--sequences 64] [--prompt 24] [--response 128] [--ragged] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.backends.cpu.allocator import keep_freed_memory
from verl.protocol import DataProto
from verl.utils.flops_counter import FlopsCounter
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FunctionLoss, MicroBatchConfig

VOCABULARY = 104


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
    )


def make_batch(sequences: int, prompt: int, response: int, ragged: bool) -> DataProto:
    g = torch.Generator().manual_seed(0)
    lengths = torch.full((sequences,), response)
    if ragged:
        lengths = torch.randint(response // 8, response + 1, (sequences,), generator=g)
        lengths[0] = response
    mask = torch.cat([torch.ones(sequences, prompt), torch.arange(response) < lengths[:, None]], 1).long()
    ids = torch.randint(2, VOCABULARY, (sequences, prompt + response), generator=g) * mask
    response_mask = mask[:, prompt:].clone()
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, prompt:],
            "response_mask": response_mask,
            "advantages": torch.randn(sequences, response, generator=g) * response_mask,
        }
    )


def matrix_peak(tokens: int) -> dict[str, dict[str, float]]:
    """GFLOP/s of fp32 matrix products by library and shape, the best of a few."""
    shapes = [(1024, 1024, 1024), (2048, 2048, 2048), (tokens, 256, 256), (tokens, 256, 768), (tokens, 768, 256)]
    found: dict[str, dict[str, float]] = {"torch.mm": {}, "oneDNN": {}}
    for m, k, n in shapes:
        a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        image, points = a[None, None].permute(0, 3, 1, 2), torch.randn(n, k)[:, :, None, None]
        ways = {
            "torch.mm": lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
            "oneDNN": lambda image=image, points=points: functional.conv2d(image, points),
        }
        for name, call in ways.items():
            found[name][f"{m} x {k} x {n}"] = 2 * m * k * n / 1e9 / best_of(call, 6)
    return found


def best_of(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@FunctionLoss
def policy_loss(outputs: dict[str, torch.Tensor], data: DataProto, totals: Any) -> tuple[torch.Tensor, dict]:
    """-A log p, and the entropy if it is there: little work, so that the model is measured."""
    loss = -(outputs["log_probs"] * data.batch["advantages"]).sum()
    if "entropy" in outputs:
        loss = loss - 0.01 * outputs["entropy"].sum()
    return loss / totals.batch_num_tokens, {}


with_entropy = FunctionLoss(policy_loss.function, outputs=frozenset({"log_probs", "entropy"}))


def plain_pass(model: Qwen3ForCausalLM, batch: DataProto, entropy: bool = False) -> None:
    """What a user of Transformers writes: full logits of the padded batch."""
    model.zero_grad(set_to_none=True)
    columns = batch.batch
    prompt = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    logits = model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]).logits
    log_p = logits[:, prompt - 1 : -1].float().log_softmax(-1)
    chosen = log_p.gather(-1, columns["responses"].unsqueeze(-1)).squeeze(-1)
    loss = -(chosen * columns["advantages"]).sum()
    if entropy:
        loss = loss + 0.01 * ((log_p.exp() * log_p).sum(-1) * columns["response_mask"]).sum()
    (loss / columns["response_mask"].sum()).backward()


def measure(sequences: int, prompt: int, response: int, ragged: bool, repeats: int) -> dict[str, Any]:
    keep_freed_memory()  # for both contestants, as every worker of a run does
    torch.manual_seed(0)
    config = model_config()
    batch = make_batch(sequences, prompt, response, ragged)
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    responses = int(batch.batch["response_mask"].sum())
    model = Qwen3ForCausalLM(config).train()
    model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=HFModelConfig(path=folder, enable_gradient_checkpointing=False),
            engine_config=FSDPEngineConfig(dtype="fp32"),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6),
            device_name="cpu",
        )
        engine.initialize()
    micro = MicroBatchConfig()

    def engine_pass(loss: Any) -> None:
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss, micro)

    calls: dict[str, Callable[[], object]] = {
        "transformers": lambda: plain_pass(model, batch),
        "transformers, entropy": lambda: plain_pass(model, batch, entropy=True),
        "engine": lambda: engine_pass(policy_loss),
        "engine, entropy": lambda: engine_pass(with_entropy),
        "optimizer step": engine.optimizer_step,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    products: dict[str, dict[str, float]] = {"torch.mm": {}, "oneDNN": {}}
    with engine.train_mode():
        for round_number in range(repeats + 1):
            for library, found in matrix_peak(sum(lengths)).items():
                for shape, value in found.items():
                    products[library][shape] = max(products[library].get(shape, 0.0), value)
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if round_number:
                    times[name].append(time.perf_counter() - start)
    peaks = {library: max(found.values()) for library, found in products.items()}
    useful = FlopsCounter(config).training_flops(lengths, responses) / 1e9
    rows: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        rows[name] = {"seconds": min(values), "median_seconds": statistics.median(values)}
        if name != "optimizer step":
            rate = useful / min(values)
            rows[name] |= {"useful_gflops": rate, **{f"share_of_{lib}": rate / best for lib, best in peaks.items()}}
    return {
        "work": f"{sequences} sequences of {prompt} + {'up to ' if ragged else ''}{response} tokens, fp32",
        "tokens": sum(lengths),
        "useful_gflop": useful,
        "peak_gflops": peaks,
        "matrix_products_gflops": products,
        "passes": rows,
        "target": "engine: share_of_oneDNN >= 0.65",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--ragged", action="store_true", help="responses of all lengths from an eighth of --response")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    found = measure(args.sequences, args.prompt, args.response, args.ragged, args.repeats)
    print(f"{found['work']}: {found['useful_gflop']:.0f} GFLOP of useful work; {found['machine']}")
    for library, products in found["matrix_products_gflops"].items():
        for shape, value in products.items():
            print(f"  {library:<8} {shape:<20} {value:7.0f} GFLOP/s")
    for name, row in found["passes"].items():
        share = ""
        if "useful_gflops" in row:
            shares = ", ".join(f"{row[f'share_of_{library}']:.0%} of {library}" for library in found["peak_gflops"])
            share = f"{row['useful_gflops']:7.0f} GFLOP/s, {shares}"
        print(f"  {name:<24} {row['seconds']:7.3f} s (median {row['median_seconds']:.3f})  {share}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
