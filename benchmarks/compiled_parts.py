"""Our CPU kernels against ``torch.compile``, part by part: a layer, attention, log-probs, a decoding step.

Each part is computed by plain PyTorch (Transformers' layers), by ``torch.compile`` of the same code, and by what the
engine uses, in turn and in one process; medians, and the seconds that compiling took. ::

    python -m benchmarks.compiled_parts [--tokens 4864] [--repeats 7] [--dtype fp32 bf16]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM, StaticCache

from benchmarks.training_step import VOCABULARY, model_config
from verl.backends.cpu.layers import use_fast_layers
from verl.workers.engine.model.head import token_log_probs
from verl.workers.packed_attention import PACKED_ATTENTION, Packing, packed_attention_forward
from verl.workers.rollout.native.model import NativeModel

LENGTH = 152
ROWS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def layer_ways(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Forward and backward of a decoder layer over sequences of ``LENGTH`` tokens."""
    torch.manual_seed(0)
    config = model_config()
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    model: Any = Qwen3ForCausalLM(config).to(dtype).train()
    fast = copy.deepcopy(model)
    sequences = tokens // LENGTH
    model.set_attn_implementation("sdpa")
    fast.set_attn_implementation(PACKED_ATTENTION)
    use_fast_layers(fast, for_training=True)
    positions = torch.arange(LENGTH).expand(sequences, -1)
    packing = Packing.from_lengths([LENGTH] * sequences, torch.device("cpu"))
    x = torch.randn(sequences, LENGTH, 256, dtype=dtype).requires_grad_()
    rotation = model.model.rotary_emb(x, positions)
    flat_rotation = model.model.rotary_emb(x.view(1, -1, 256), positions.reshape(1, -1))

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return model.model.layers[0](x, position_embeddings=(cos, sin), attention_mask=None)

    compiled = torch.compile(plain)

    def ours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        row = x.reshape(1, -1, 256)
        return fast.model.layers[0](row, position_embeddings=flat_rotation, attention_mask=None, packing=packing)

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: function(x, *rotation).float().square().mean().backward()

    return {"plain": both(plain), "torch.compile": both(compiled), "ours": both(ours)}


def attention_ways(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Causal attention over sequences of ``LENGTH`` tokens, forward and backward."""
    sequences = tokens // LENGTH
    q, k, v = (torch.randn(1, heads, sequences * LENGTH, 64, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    packing = Packing.from_lengths([LENGTH] * sequences, torch.device("cpu"))

    def fold(x: Tensor) -> Tensor:
        return x.squeeze(0).unflatten(1, (sequences, LENGTH)).transpose(0, 1)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = map(fold, (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention_forward(torch.nn.Identity(), q, k, v, None, packing=packing)[0]

    compiled = torch.compile(plain)

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: function(q, k, v).float().square().mean().backward()

    return {"plain": both(plain), "torch.compile": both(compiled), "ours": both(ours)}


def head_ways(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """log p and entropy of a quarter as many tokens under a vocabulary of 8192, forward and backward."""
    hidden = torch.randn(tokens // 4, 256, dtype=dtype).requires_grad_()
    weight = (0.05 * torch.randn(8192, 256)).to(dtype).requires_grad_()
    targets = torch.randint(8192, (tokens // 4,))

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        return log_p.gather(-1, targets[:, None]).sum() - 0.01 * (log_p.exp() * log_p).sum()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        found = token_log_probs(hidden, weight, None, targets, with_entropy=True)
        assert found.entropy is not None
        return found.log_probs.sum() + 0.01 * found.entropy.sum()

    compiled = torch.compile(plain)

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: function(hidden, weight).backward()

    return {"plain": both(plain), "torch.compile": both(compiled), "ours": both(ours)}


def decoding_ways(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One token more for each of ``ROWS`` rows that have 24 tokens of prompt and 40 of their own."""
    torch.manual_seed(0)
    config = model_config()
    reference: Any = Qwen3ForCausalLM(config).to(dtype).eval()
    reference.set_attn_implementation("sdpa")
    cache = StaticCache(config=config, max_cache_len=128)
    prompts = torch.randint(2, VOCABULARY, (ROWS, 64))
    with torch.inference_mode():
        reference(input_ids=prompts, past_key_values=cache)
    newest = torch.randint(2, VOCABULARY, (ROWS, 1))
    place = torch.tensor([64])

    @torch.inference_mode()
    def plain(forward: Callable[..., Any] = reference) -> Tensor:
        return forward(input_ids=newest, past_key_values=cache, cache_position=place, position_ids=place[None]).logits

    compiled = torch.compile(reference)
    engine = NativeModel(config, dtype, torch.device("cpu"))
    with torch.no_grad():
        engine.load(reference.state_dict().items())
    memory = engine.memory(ROWS, 24, 104)
    with torch.inference_mode():
        memory.admit([24] * ROWS, [1] * ROWS)
        engine.prefill(memory, prompts[:, :24].tolist())
        for step in range(24, 64):
            engine.decode(memory, prompts[:, step])

    @torch.inference_mode()
    def ours() -> Tensor:
        logits = engine.decode(memory, newest[:, 0])
        memory.lengths = memory.lengths - 1  # the next call writes to the same place
        return logits

    return {"plain": plain, "torch.compile": lambda: plain(compiled), "ours": ours}


PARTS = {"layer": layer_ways, "attention": attention_ways, "log-probs": head_ways, "decoding step": decoding_ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4864)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    for part in args.parts:
        for dtype in args.dtype:
            ways = PARTS[part](args.tokens, DTYPES[dtype])
            first, times = {}, {name: [] for name in ways}
            for repeat in range(args.repeats + 1):
                for name, call in ways.items():
                    begin = time.perf_counter()
                    call()
                    took = time.perf_counter() - begin
                    if repeat:
                        times[name].append(took)
                    else:
                        first[name] = took
            medians = {name: statistics.median(values) for name, values in times.items()}
            shown = ", ".join(f"{name} {1e3 * value:8.2f} ms" for name, value in medians.items())
            ratio = medians["torch.compile"] / medians["ours"]
            compiling = first["torch.compile"] - medians["torch.compile"]
            print(
                f"{part:<14} {dtype}: {shown}; torch.compile / ours {ratio:.2f}, plain / ours "
                f"{medians['plain'] / medians['ours']:.2f}; compiling {compiling:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
